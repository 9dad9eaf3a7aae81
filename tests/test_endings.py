"""Finished work survives signals, closed pipes, full disks and deleted folders."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("typer")
pytest.importorskip("transformers")
pytest.importorskip("matplotlib")

from safetensors.torch import load_file
from tests.processes import paragraphs, run_command, wait_for_output
from tests.test_run_train import PLAN
from typer.testing import CliRunner

import recollect as rc
from recollect.cli import build
from recollect.cli.progress import CompareDisplay, ReproduceDisplay
from recollect.experiments.reproduce import reproduce
from recollect.lm.training.plan import TrainPlan
from recollect.lm.training.progress import Progress, TrainObserver
from recollect.report import files

SIZES = ("--width", "16", "--depth", "1", "--heads", "2")
COMPARE = ("compare", "--models", "linear_attention,delta_net")
STEPS = 150


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "t.txt"
    path.write_text(paragraphs(150))
    return path


def run_file(folder: Path, text: Path, out: Path, steps: int = STEPS) -> Path:
    path = folder / "run.toml"
    plan = PLAN.format(text=text, out=out).replace("steps = 2", f"steps = {steps}")
    path.write_text(plan.replace("save_every = 1", "save_every = 1000"))
    return path


# -- signals --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def uninterrupted(text: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """Return the weights of an uninterrupted run."""
    folder = tmp_path_factory.mktemp("whole")
    config = run_file(folder, text, folder / "out")
    assert CliRunner().invoke(build(), ["train", str(config)]).exit_code == 0
    return load_file(folder / "out" / "model" / "model.safetensors")


SLOW = pytest.mark.slow


# Fast are an interrupt within a process, which `tests/lm/test_training.py` resumes, and signals to
# a command that imports (`tests/misuse/test_processes.py`).
@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_signalled_run_saves_a_checkpoint(
    number: signal.Signals, text: Path, tmp_path: Path, uninterrupted: dict[str, torch.Tensor]
) -> None:
    out = tmp_path / "out"
    config = run_file(tmp_path, text, out)
    with run_command("train", str(config)) as run:
        wait_for_output(run.stderr, r"^step \d")
        os.killpg(run.pid, number)
        stderr = run.communicate()[1]
    assert run.returncode == 128 + number
    assert "Traceback" not in stderr
    (checkpoint,) = out.glob("checkpoint-*")
    assert f"interrupted: {checkpoint} is complete, and --resume" in stderr
    assert 0 < int(checkpoint.name.removeprefix("checkpoint-")) < STEPS
    on = CliRunner().invoke(build(), ["train", str(config), "--resume"])
    assert on.exit_code == 0, on.output
    weights = load_file(out / "model" / "model.safetensors")
    for name, weight in uninterrupted.items():
        torch.testing.assert_close(weights[name], weight, atol=1e-6, rtol=0)


@SLOW
@pytest.mark.parametrize("jobs", ["1", "2"])
def test_signalled_comparison_saves_finished_runs(jobs: str, text: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    models = ("--models", "linear_attention,delta_net,gla")
    many = ("--steps", "60", "--jobs", jobs, "--text", str(text), "--out", str(out))
    with run_command("compare", *models, *SIZES, *many) as run:
        wait_for_output(run.stdout, r"text: \w+ [\d.]+ after")
        os.killpg(run.pid, signal.SIGTERM)  # as a scheduler does, for every process
        stderr = run.communicate()[1]
    assert run.returncode == 128 + signal.SIGTERM, stderr
    assert "Traceback" not in stderr
    result = json.loads((out / "results.json").read_text())
    assert result["interrupted"] and not result["failures"]
    done = [row for row in result["runs"] if row["finished"]]
    assert done and all(row["value"] is not None for row in done)
    assert (out / "report.html").exists() and not (out / ".run.lock").exists()


@pytest.mark.slow
def test_signalled_experiment_saves_finished_cells(tmp_path: Path) -> None:
    requested = ("reproduce", "ttr-fig2", "--scale", "small", "--out", str(tmp_path))
    with run_command(*requested) as run:
        wait_for_output(run.stdout, r"\[1/\d+\]")
        os.killpg(run.pid, signal.SIGTERM)
        stderr = run.communicate()[1]
    assert run.returncode == 128 + signal.SIGTERM, stderr
    assert "Traceback" not in stderr
    cells = list((tmp_path / "ttr-fig2" / "cells" / "small").glob("*.json"))
    assert cells and all(json.loads(path.read_text())["values"] for path in cells)
    result = json.loads((tmp_path / "ttr-fig2" / "results.json").read_text())
    assert not result["complete"] and len(result["records"]) == len(cells)


# -- pipes ----------------------------------------------------------------------------------------


@SLOW
def test_closed_pipe_does_not_stop_a_comparison(text: Path, tmp_path: Path) -> None:
    out = ("--out", str(tmp_path / "compare"), "--steps", "3", "--text", str(text))
    with run_command(*COMPARE, *SIZES, *out) as run:
        assert run.stdout is not None and run.stdout.readline()
        run.stdout.close()
        assert run.stderr is not None and run.stderr.read() == ""
        assert run.wait() == 0
    assert len(json.loads((tmp_path / "compare" / "results.json").read_text())["runs"]) == 2


@SLOW
def test_closed_pipe_does_not_stop_a_run(text: Path, tmp_path: Path) -> None:
    with run_command("train", str(run_file(tmp_path, text, tmp_path / "out", steps=20))) as run:
        assert run.stderr is not None and run.stderr.readline()
        run.stderr.close()
        assert run.stdout is not None and "20 steps" in run.stdout.read()
        assert run.wait() == 0
    assert (tmp_path / "out" / "model" / "model.safetensors").exists()


PRINTING: dict[str, int] = {
    "zoo": 0,
    "zoo --json": 0,
    "--help": 0,
    "train --help": 0,
    "--version": 0,
    "explain gla": 0,
    "explain gla --json": 0,
    "reproduce --list": 0,
    "reproduce ttr-fig3 --scale paper": 0,
    "sizes": 0,
    "bench --rounds 1 --length 16 --heads 1 --size 4 --only gla": 0,
    "generate MODEL --prompt ab --tokens 3": 0,
    "generate MODEL --prompt ab --tokens 3 --json": 0,
    "explain nope": 2,
    "zoo --nope": 2,
    "nope": 2,
}
"""Commands that print, and their exit codes; the first three are fast."""


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    config = rc.lm.RecollectConfig.from_recipes(
        "gla", vocab_size=256, hidden_size=16, num_hidden_layers=1
    )
    rc.lm.RecollectForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("command", [pytest.param(command, marks=SLOW) for command in PRINTING])
def test_closed_pipe_of_a_listing(command: str, saved: Path) -> None:
    """A closed reader of one output, or of both, causes no message and no other exit code."""
    words = command.replace("MODEL", str(saved)).split()
    for closed in (("stdout",), ("stdout", "stderr")):
        with run_command(*words) as run:
            for name in closed:
                getattr(run, name).close()
            if closed == ("stdout",):
                assert run.stderr is not None
                stderr = run.stderr.read()
                for word in ("Errno", "Traceback", "Broken pipe", "Exception ignored"):
                    assert word not in stderr
                if words[0] not in ("generate", "nope") and not PRINTING[command]:
                    assert stderr == "" or words[0] == "bench"
            assert run.wait() == PRINTING[command], closed


# -- disks and folders ----------------------------------------------------------------------------


@pytest.fixture
def full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder in which no file can be written, with a writable temporary folder."""
    place, other = tmp_path / "full", tmp_path / "tmp"
    other.mkdir()
    usual = files.tempfile.mkstemp

    def mkstemp(*args: Any, **kwargs: Any) -> Any:
        if place in (Path(kwargs["dir"]), *Path(kwargs["dir"]).parents):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(kwargs["dir"]))
        return usual(*args, **kwargs)

    monkeypatch.setattr(files.tempfile, "mkstemp", mkstemp)
    monkeypatch.setattr(files.tempfile, "tempdir", str(other))
    return place


def rescued(stderr: str, folder: Path) -> Path:
    assert "Traceback" not in stderr
    assert f"{folder} cannot be written to (No space left on device)" in stderr
    result = re.search(r"what was measured is in (\S+), to be", stderr)
    assert result is not None
    return Path(result[1])


@pytest.fixture
def passes_first_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check before the work succeeds."""
    for command in ("compare", "reproduce"):
        module = sys.modules[f"recollect.cli.{command}"]
        monkeypatch.setattr(module, "check_writable", lambda out: out.mkdir(parents=True))


@pytest.mark.usefixtures("passes_first_check")
def test_comparison_on_a_full_disk_is_saved_elsewhere(full: Path, text: Path) -> None:
    requested = [*COMPARE, *SIZES, "--steps", "2", "--text", str(text), "--out", str(full)]
    result = CliRunner().invoke(build(), requested)
    assert result.exit_code == 2
    place = rescued(result.stderr, full)
    results = json.loads((place / "results.json").read_text())
    assert [run["model"] for run in results["runs"]] == ["linear_attention", "delta_net"]
    # also with a full disk
    assert "linear_attention" in result.stdout and "bits per byte" in result.stdout


@pytest.mark.usefixtures("passes_first_check")
def test_rows_on_a_full_disk_are_saved_elsewhere(full: Path, text: Path) -> None:
    requested = [*COMPARE, *SIZES, "--steps", "2", "--text", str(text), "--rows", str(full)]
    result = CliRunner().invoke(build(), [*requested, "--parameters", "20000"])
    assert result.exit_code == 2
    place = rescued(result.stderr, full)
    assert sorted(path.name for path in place.iterdir()) == [
        "delta_net.json",
        "linear_attention.json",
    ]
    for path in place.iterdir():
        assert json.loads(path.read_text())["run"]["finished"]


@pytest.mark.usefixtures("passes_first_check")
def test_experiment_on_a_full_disk_is_saved_elsewhere(full: Path, tmp_path: Path) -> None:
    requested = ["reproduce", "ttr-fig2", "--scale", "smoke", "--out"]
    result = CliRunner().invoke(build(), [*requested, str(full)])
    assert result.exit_code == 2
    place = rescued(result.stderr, full / "ttr-fig2")
    assert CliRunner().invoke(build(), [*requested, str(tmp_path / "whole")]).exit_code == 0
    expected = {path.name for path in (tmp_path / "whole").rglob("cells/smoke/*.json")}
    assert {path.name for path in place.rglob("cells/smoke/*.json")} == expected


def test_disk_that_is_full_for_a_while(full: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first: list[str] = []

    class Reporter(ReproduceDisplay):
        def __init__(self) -> None: ...

        def begin(self, *_: Any) -> None: ...

        def on_record(self, record: Any) -> None:
            first.append("measured")
            if len(first) == 2:
                monkeypatch.undo()

    full.mkdir()
    run = reproduce("ttr-fig2", scale="smoke", out=full, progress=Reporter())
    assert run.complete
    assert len(run.results.records) == len(first)


def vanishing(folder: Path, method: Callable[..., None]) -> Callable[..., None]:
    """Return the method, but delete the folder at the first call."""
    times: list[int] = []

    def changed(*args: Any, **kwargs: Any) -> None:
        method(*args, **kwargs)
        times.append(1)
        if len(times) == 1:
            shutil.rmtree(folder)

    return changed


def test_comparison_whose_folder_is_deleted(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    monkeypatch.setattr(CompareDisplay, "on_end", vanishing(out, CompareDisplay.on_end))
    requested = [*COMPARE, *SIZES, "--steps", "2", "--text", str(text), "--out", str(out)]
    result = CliRunner().invoke(build(), requested)
    assert result.exit_code == 0, result.output
    assert len(json.loads((out / "results.json").read_text())["runs"]) == 2


def test_experiment_whose_folder_is_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    monkeypatch.setattr(ReproduceDisplay, "on_record", vanishing(out, ReproduceDisplay.on_record))
    requested = ["reproduce", "ttr-fig2", "--scale", "smoke", "--out", str(out)]
    result = CliRunner().invoke(build(), requested)
    assert result.exit_code == 0, result.output
    assert json.loads((out / "ttr-fig2" / "results.json").read_text())["complete"]


def test_run_whose_folder_is_deleted(text: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"

    class Vanishing(TrainObserver):
        def on_progress(self, progress: Progress) -> None:
            if progress.step == 3 and out.exists():
                shutil.rmtree(out)

    tables = {
        "model": {"width": 16, "depth": 1, "heads": 2},
        "data": {"train": [str(text)], "context": 16},
        "optimizer": {"steps": 6, "batch": 2},
        "run": {"out": str(out), "save_every": 2},
    }
    result = rc.lm.train(TrainPlan.from_dict(tables), observer=Vanishing())
    assert result.steps == 6 and (result.folder / "model.safetensors").exists()
    assert {path.name for path in out.glob("checkpoint-*")} <= {"checkpoint-4", "checkpoint-6"}
    repeated = rc.lm.train(TrainPlan.from_dict(tables), resume=True)
    assert repeated.steps == 0
