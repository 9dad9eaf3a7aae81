"""The GPU run: its steps at tiny sizes on the CPU, its time limits, and its tables."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.gpu import parity

pytest.importorskip("transformers")

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import gpu_checks  # noqa: E402
import gpu_run  # noqa: E402
import gpu_times  # noqa: E402
from gpu_tables import markdown, read_lines, strip_folders, summary  # noqa: E402

FILES = sorted((ROOT / "results/gpu").glob("*.jsonl"))
MISSING = ("failed", "left out", "cut short", "not run")


@pytest.fixture
def context(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    monkeypatch.setattr(parity, "DEVICE", torch.device("cpu"))

    def create(step: str, **fields: Any) -> gpu_checks.StepContext:
        defaults = {"device": "cpu", "deadline": time.time() + 250, "start": time.time()}
        path = tmp_path / gpu_run.FILE
        return gpu_checks.StepContext(step=step, path=path, **{**defaults, **fields})

    return create


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(text) for text in path.read_text("utf-8").splitlines()]


# -- steps ---------------------------------------------------------------------------------------

RESULTS = {
    "device": ["versions", "ceilings"],
    "presets": ["preset"] * 6,
    "recurrence": ["equal"],
    "adoption": ["equal"],
    "linear": ["speed"] * 10,
    "deep": ["deep"] * 2 + ["peer"] * 3,
    "decoding": ["token"] * 3,
    "training": ["first step", "training"] * 2,
}


# Each of the slow ones compiles, trains or times many cases.
@pytest.mark.parametrize(
    "step",
    [
        pytest.param(x, marks=[pytest.mark.slow] * (x in ("linear", "deep", "training")))
        for x in RESULTS
    ],
)
def test_a_step_at_tiny_sizes(step: str, context: Callable[..., Any]) -> None:
    if step == "deep":
        pytest.importorskip("titans_pytorch")
    one = context(step)
    module = next(s.module for s in gpu_run.STEPS if s.name == step)
    getattr(sys.modules[module], step)(one)
    lines = lines_of(one.path)
    assert [line["what"] for line in lines] == RESULTS[step], lines
    assert all(line.get("good", True) for line in lines)


def test_a_step_that_needs_a_gpu_writes_the_reason(context: Callable[..., Any]) -> None:
    gpu_checks.backend(context("backend"))
    assert [line["what"] for line in lines_of(context("").path)] == ["not run"]


def test_the_most_valuable_cases_come_first(
    context: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_times, "has_backend", lambda device: True)
    cases = list(gpu_times._linear_cases(context("linear", device="cuda")))
    first = [backward for T, backward, *_ in cases if cases[0][0] == T]
    assert first == sorted(first) and {name for _, _, name, _ in cases[:13]} == {
        "SDPA",
        *gpu_checks.OPERATORS,
    }
    timed: list[tuple[str, int, bool]] = []
    monkeypatch.setattr(gpu_times, "_time_titans_pytorch", lambda *_: None)
    monkeypatch.setattr(
        gpu_times,
        "_time_deep",
        lambda _, name, precision, B, engine, *, backward: timed.append((name, B, backward)),
    )
    gpu_times.deep(context("deep", device="cuda"))
    both = [(name, B) for name, B, backward in timed if backward]
    assert both == [(name, B) for name, B, backward in timed if not backward]
    assert len(both) == len(set(both)) + 2  # titans in two precisions
    assert [name for name, _ in both[:3]] == ["titans", "titans", gpu_times.NO_NORM]


def test_a_failure_is_a_line_without_folders(context: Callable[..., Any]) -> None:
    one = context("deep")
    with one.guard("a case", B=3):
        raise OSError("no file /home/name/lib/python3/site-packages/x.so here")
    (line,) = lines_of(one.path)
    assert line["error"] == "OSError: no file x.so here"
    assert (line["what"], line["of"], line["B"]) == ("failed", "a case", 3)


def test_cases_after_the_deadline_are_left_out(context: Callable[..., Any]) -> None:
    gpu_times.linear(context("linear", deadline=time.time()))
    gpu_checks.presets(context("presets", deadline=time.time()))
    assert {line["what"] for line in lines_of(context("").path)} == {"left out"}


def test_few_configurations_of_a_kernel_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    autotuner = pytest.importorskip("triton.runtime.autotuner")
    configurations: list[Any] = []

    def initialize(self: Any, fn: Any, arg_names: Any, configs: Any) -> None:
        configurations.append(configs)

    monkeypatch.setattr(autotuner.Autotuner, "__init__", initialize)
    gpu_run.limit_configurations(2)
    for configs in (list(range(10)), [1], None):
        autotuner.Autotuner(None, [], configs)
    assert configurations == [[0, 5], [1], None]


# -- the run -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_run_writes_versions_and_prints_tables(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--out", str(tmp_path), "--device", "cpu", "--only", "backend"]
    assert gpu_run.main(arguments) == 0
    lines = lines_of(tmp_path / gpu_run.FILE)
    assert [(line["step"], line["what"]) for line in lines] == [
        ("device", "versions"),
        ("device", "ceilings"),
        ("backend", "not run"),
        ("run", "ended"),
    ]
    assert lines[0]["packages"]["torch"] == torch.__version__ and lines[0]["commit"] != "unknown"
    assert "### CPU, tiny sizes" in capsys.readouterr().out


def test_a_run_without_time_starts_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert gpu_run.main(["--out", str(tmp_path), "--device", "cpu", "--seconds", "5"]) == 0
    lines = lines_of(tmp_path / gpu_run.FILE)
    assert {line["what"] for line in lines} == {"left out", "ended"}
    assert "### Unknown device" in capsys.readouterr().out


def test_unknown_steps_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        gpu_run.main(["--only", "linera"])
    assert "unknown steps linera; expected some of device, presets" in capsys.readouterr().err


def test_a_process_ends_at_its_time_limit(tmp_path: Path) -> None:
    running = [
        gpu_run._Running(
            label,
            0,
            subprocess.Popen([sys.executable, "-c", code], start_new_session=True),
            time.time() - 2.5,
        )
        for label, code in (
            ("hangs", "import time; time.sleep(60)"),
            ("fails", "raise SystemExit(3)"),
            ("ends", ""),
        )
    ]
    processes = [one.process for one in running]
    start = time.time()
    time.sleep(1)
    gpu_run._wait_for(running, tmp_path / "x.jsonl", start)
    assert time.time() - start < 30 and all(p.poll() is not None for p in processes)
    reasons = {line["step"]: line["why"] for line in lines_of(tmp_path / "x.jsonl")}
    assert reasons["hangs"] == "time limit" and reasons["fails"] == "exit status 3"
    assert "ends" not in reasons


# -- tables --------------------------------------------------------------------------------------


def test_the_tables_of_the_documentation_are_those_of_the_results() -> None:
    page = (ROOT / "results/gpu/README.md").read_text("utf-8")
    _, _, rest = page.partition("<!-- gpu_run: begin -->\n")
    tables, end, _ = rest.partition("<!-- gpu_run: end -->")
    assert end and FILES
    assert tables.strip() == markdown(FILES).strip(), (
        "replace them with the output of: python scripts/gpu_run.py --markdown --read "
        + " ".join(str(path.relative_to(ROOT)) for path in FILES)
    )


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_results_name_their_device_and_no_folders(path: Path) -> None:
    first = [line["what"] for line in lines_of(path)[:3]]
    assert first == ["versions", "device", "ceilings"]
    for line in lines_of(path):
        texts = [value for value in line.values() if isinstance(value, str)]
        assert [strip_folders(text) for text in texts] == texts


def test_the_last_measurement_is_in_the_table(tmp_path: Path) -> None:
    packages = dict.fromkeys(gpu_checks.PACKAGES, "1.0")
    versions = {"step": "device", "what": "versions", "python": "3.12", "cuda": "13.0"}
    speed = {"step": "linear", "what": "speed", "name": "gla", "method": "operator"}
    speed |= {"T": 8192, "B": 4, "H": 16, "D": 64, "peak_mib": 10.0}
    lines = [
        {**versions, "packages": packages, "commit": "a" * 40},
        {**speed, "backward": False, "ms": 1.0, "operator": "chunk_gla"},
        {"step": "linear", "what": "left out", "name": "gla"},
        {**versions, "packages": packages, "commit": "b" * 12 + "-dirty"},
        {**speed, "backward": False, "ms": 0.5, "operator": "chunk_gla"},
        {**speed, "backward": True, "ms": 2.0, "operator": "chunk_gla"},
        {"step": "linear", "what": "failed", "of": "gla", "error": "ValueError: x"},
    ]
    path = tmp_path / "card.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    assert {line["commit"] for line in read_lines(path)} == {"a" * 40, "b" * 12 + "-dirty"}
    text = markdown([path])
    row = "| 8192 | 4 | `gla` | `chunk_gla` alone | 0.50 | 2.00 | 10 | bbbbbbbb-dirty |"
    assert row in text.splitlines()
    assert "| `linear` |  |  | 1 |" in text.splitlines(), "only of the last run of the step"
    assert "ValueError: x" in summary(path)
