"""The script for the day a GPU is there, where there is none: it ends, and says what it did not do.

Its numbers here are of the CPU at tiny sizes. What is asked is whether every stage's result comes
to the report, whether one that breaks or hangs leaves the others alone, and whether nothing that
was not measured looks as if it had been.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from recollect.benchmarks.gpu import __main__ as script
from recollect.benchmarks.gpu import stages as parts
from recollect.benchmarks.gpu.junit import read_tests
from recollect.benchmarks.gpu.readme import not_run, readme
from recollect.benchmarks.gpu.speed import TINY, Sizes, lines, measure
from recollect.benchmarks.gpu.stages import STAGES, Here, Stage, run_stage
from recollect.cli.app import build
from recollect.report.environment import describe_environment

NAMES = [(stage.name, stage.about) for stage in STAGES]
SMALL = Sizes(lengths=(16,), tokens=16, heads=1, size=8, rounds=1, rows=(1,), prompt=4)


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty folder to run in, on a machine without a GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def stage(name: str, code: str, seconds: float = 60.0) -> Stage:
    """A stage that runs a line of Python; ``out`` is where its result goes."""

    def command(here: Here, result: Path) -> list[str]:
        del here
        begin = f"import json, os, pathlib, sys, time; out = pathlib.Path({str(result)!r}); "
        return [sys.executable, "-c", begin + code]

    def read(found: Mapping[str, Any]) -> tuple[str, bool]:
        return f"{found['count']} counted", found["count"] > 0

    return Stage(name=name, about=name, seconds=seconds, command=command, read=read)


# -- the whole script ------------------------------------------------------------------------------


def test_it_ends_without_a_gpu_and_says_so(
    no_gpu: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert script.main(["--only", "parity,sanitizer"]) == 0
    *_, last = capsys.readouterr().out.splitlines()
    assert last.startswith("Nothing of parity ran on a GPU: what stands here of them is of the CPU")
    for name, about in [one for one in NAMES if one[0] != "parity"]:
        why = "there is no CUDA device" if name == "sanitizer" else "it was not asked for"
        assert f"Not run: {name} ({about}): {why}." in last
    assert not (no_gpu / "results").exists()
    found = json.loads((no_gpu / "runs/gpu/parity.json").read_text("utf-8"))
    assert found["environment"]["device_type"] == "cpu"
    numbers = {case["name"]: case["found"] for case in found["found"]["tests"]}
    assert set(numbers) == {
        "test_preset[gated_delta_net-float32]",
        "test_preset[softmax_attention-float32]",
    }
    assert all({"y", "gradient", "decoded", "waits"} <= set(one) for one in numbers.values())
    page = (no_gpu / "runs/gpu/README.md").read_text("utf-8")
    assert last in page and "not by hand" in page


@pytest.mark.slow
def test_all_of_it_at_tiny_sizes(no_gpu: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert script.main(["--out", "here"]) == 0
    *_, last = capsys.readouterr().out.splitlines()
    for name in ("parity", "bench", "training"):
        record = json.loads((no_gpu / f"here/{name}.json").read_text("utf-8"))
        assert record["outcome"] == "passed", record
    for name in ("kernels", "backend", "fused", "sanitizer"):
        assert f"Not run: {name}" in last
    assert "Nothing of parity, bench, training ran on a GPU" in last
    page = (no_gpu / "here/README.md").read_text("utf-8")
    assert page.count("Sizes are tiny") == 2
    record = json.loads((no_gpu / "here/training.json").read_text("utf-8"))["found"]
    assert record["finished"] and record["tokens_per_second"] > 0 and record["kernels"]
    # The CPU's own name, not a GPU's, stands at its numbers.
    assert describe_environment("cpu").device in page


def test_a_stage_that_breaks_leaves_the_others_alone(
    no_gpu: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    good = "out.write_text(json.dumps({'count': 3}))"
    made = (
        stage("raises", "sys.exit('no such kernel')"),
        stage("hangs", f"{good}; time.sleep(60)", seconds=0.7),
        stage("half", "out.write_text('{')"),
        stage("other", "out.write_text('{}')"),
        stage("none", "out.write_text(json.dumps({'count': 0}))"),
        stage("dies", f"{good}; os.kill(os.getpid(), 9)"),
        stage("good", good),
    )
    monkeypatch.setattr(script, "STAGES", made)
    monkeypatch.setattr(parts, "_GRACE", 0.2)
    monkeypatch.setattr(
        "recollect.benchmarks.gpu.readme._PARTS", {x.name: lambda _: [] for x in made}
    )
    assert script.main(["--out", "out"]) == 1
    said = capsys.readouterr().out
    records = {x.name: json.loads((no_gpu / f"out/{x.name}.json").read_text("utf-8")) for x in made}
    outcomes = {name: record["outcome"] for name, record in records.items()}
    assert outcomes == dict.fromkeys(outcomes, "failed") | {"good": "passed"}
    assert "no such kernel" in records["raises"]["tail"]
    assert records["raises"]["sentence"] == "it ended with status 1; it has written nothing"
    assert records["hangs"]["sentence"] == "3 counted; its 1 s were over before it had ended"
    assert records["hangs"]["found"] == {"count": 3}, "what it had written is kept"
    assert "cannot be read" in records["half"]["sentence"]
    assert "not whole" in records["other"]["sentence"]
    assert records["none"]["sentence"] == "0 counted"
    assert records["dies"]["sentence"] == "3 counted; it ended with status -9"
    assert "no such kernel" in (no_gpu / "out/README.md").read_text("utf-8")
    assert "Nothing came of raises" in said.splitlines()[-1]


def test_what_is_asked_for_must_be_there(no_gpu: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, why in (
        (["--only", "speed"], "there is no stage 'speed'; there are kernels, parity, backend"),
        (["--device", "cuda"], "torch sees no CUDA device"),
    ):
        with pytest.raises(SystemExit) as ended:
            script.main(arguments)
        assert ended.value.code == 2
        assert why in capsys.readouterr().err
    assert not list(no_gpu.iterdir())


def test_all_stages_together_take_less_than_25_minutes() -> None:
    aside = sum(one.seconds for one in STAGES if one.aside)
    beside = sum(one.seconds for one in STAGES if not one.aside and not one.alone)
    alone = sum(one.seconds for one in STAGES if one.alone)
    assert max(aside, beside) + alone <= 24 * 60


def test_stages_on_a_gpu_ask_for_all_of_it(tmp_path: Path) -> None:
    """Which commands a GPU would run, of which none is tiny, and none has the CPU's device."""
    here = Here(device="cuda", scratch=tmp_path, root=parts.checkout())
    commands = {one.name: one.command(here, tmp_path / f"{one.name}.json") for one in STAGES}
    for name, command in commands.items():
        assert isinstance(command, list), (name, command)
        assert "--tiny" not in command and "cpu" not in command
    assert commands["parity"][-2:] == [
        "tests/gpu/test_presets_on_cuda.py",
        "tests/gpu/test_graphs.py",
    ]
    packaged = replace(here, root=None)
    for one in STAGES[1:5]:
        assert "installed package" in str(one.command(packaged, tmp_path / "x.json"))


def test_a_stage_aside_ends_before_one_that_is_timed(
    no_gpu: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    good = "out.write_text(json.dumps({'count': 1}))"
    made = (
        replace(stage("aside", f"time.sleep(1.5); {good}"), aside=True, alone=False),
        replace(stage("beside", good), alone=False),
        stage("timed", good),
    )
    monkeypatch.setattr(script, "STAGES", made)
    monkeypatch.setattr(
        "recollect.benchmarks.gpu.readme._PARTS", {x.name: lambda _: [] for x in made}
    )
    assert script.main(["--out", "out"]) == 0
    said = capsys.readouterr().out
    places = [said.index(f"  {name}: passed") for name in ("beside", "aside", "timed")]
    assert places == sorted(places)
    assert len(list((no_gpu / "out").glob("*.json"))) == 3


# -- what the report says --------------------------------------------------------------------------

XML = """<?xml version="1.0" encoding="utf-8"?><testsuites><testsuite>
<testcase name="test_preset[titans-float32]" time="1.5"><properties>
<property name="y" value="3e-07"/><property name="waits" value="{&quot;forward&quot;: []}"/>
</properties></testcase>
<testcase name="test_preset[gla-float32]" time="0.5"><properties>
<property name="y" value="Infinity"/></properties>
<failure message="AssertionError: gla: y inf | at most 1e-05">a long trace</failure></testcase>
<testcase name="test_preset[atlas-bf16]" time="0"><skipped message="seconds each"/></testcase>
</testsuite></testsuites>"""


def test_tests_come_to_the_report(tmp_path: Path) -> None:
    (tmp_path / "parity.xml").write_text(XML, encoding="utf-8")
    found = read_tests(tmp_path / "parity.xml")
    assert [one["outcome"] for one in found["tests"]] == ["passed", "failed", "skipped"]
    assert found["tests"][0]["found"] == {"y": 3e-7, "waits": {"forward": []}}
    said, good = STAGES[1].read(found)
    assert (said, good) == ("1 of 2 pass, 1 were not run", False)
    json.dumps(found, allow_nan=False)
    records = {"parity": gpu("failed", said, found)}
    page = readme(NAMES, records)
    assert "| y, float32 | inf | `test_preset[gla-float32]` |" in page
    assert "AssertionError: gla: y inf \\| at most 1e-05" in page
    assert "Not run of parity: 1 tests, test_preset[atlas-bf16]." in not_run(NAMES, records)


def gpu(outcome: str, sentence: str, found: Mapping[str, Any]) -> dict[str, Any]:
    """The record of a stage on an invented device, which no file but a test's holds."""
    environment = describe_environment("cpu").to_dict() | {
        "device": "an invented device",
        "device_type": "cuda",
    }
    return {
        "outcome": outcome,
        "sentence": sentence,
        "seconds": 1.0,
        "found": found,
        "environment": environment,
    }


def timed(name: str, seconds: float, share: float | None = None) -> dict[str, Any]:
    here = {"group": "linear", "way": "forward", "T": 2048, "share": share}
    return {"name": name, "median": seconds, **here}


def test_speeds_come_to_the_report() -> None:
    bench = {
        "environment": gpu("", "", {})["environment"],
        "packages": {"flash-linear-attention": "0.6.0", "titans-pytorch": None},
        "tiny": False,
        "sizes": {"tokens": 65536, "heads": 8, "size": 64, "prompt": 1024},
        "ceilings": {
            "matmul": {"bfloat16": 7e14}, "side": 8192, "copy": 4e12, "copied": 2**32,
            "launch": 5e-6,
        },
        "decoded": [
            {"name": "gla", "rows": 256, "graphs": True, "seconds": 1e-4, "bytes": 2e8},
        ],
        "speeds": [timed("gla", 1e-3, 0.25), timed("gla, flash-linear-attention", 2e-3)],
        "agreement": {"gla": 4e-3, "delta_net": 0.4},
        "left_out": {"delta_net, linear, forward, T = 2,048": "RuntimeError: no room\nnot here"},
        "finished": False,
    }  # fmt: skip
    records = {"bench": gpu("passed", "2 times", bench)}
    page = readme(NAMES, records)
    assert "| gla | 1 (25.0%) |" in page
    assert "| **speed: gla by flash-linear-attention** | 2.00 × |" in page
    assert "| `gla` | 256 | CUDA graph | 100 | 200 | 50.0% |" in page
    assert "| product of bfloat16, 8192³ | 700 TFLOP/s |" in page
    assert "| `gla` | 4.0e-03 |" in page
    said, good = next(one for one in STAGES if one.name == "bench").read(bench)
    assert not good and "delta_net by the operator is 4.0e-01 from PyTorch alone" in said
    assert "no titans-pytorch" in page and "tiny" not in page
    last = not_run(NAMES, records)
    assert "Not timed: delta_net, linear, forward, T = 2,048." in last
    assert "bench did not come to its end." in last
    assert "Not run: parity" in last and "Nothing of" not in last
    whole = {name: gpu("passed", "all", {"tests": []}) for name, _ in NAMES}
    assert not_run(NAMES, whole) == "Everything was run."


# -- the suite -------------------------------------------------------------------------------------


def test_the_suite_times_what_it_says() -> None:
    kept: list[int] = []
    data = measure(
        "cpu",
        SMALL,
        only=["gated_delta_net"],
        keep=lambda data: kept.append(len(data["speeds"])),
    )
    assert [(one["way"], one["name"]) for one in data["speeds"]] == [
        (way, name)
        for way in ("forward", "forward + backward")
        for name in ("SDPA", "gated_delta_net")
    ]
    assert kept == [0, 0, 2, 4, 4], "every run is kept at once"
    for one in data["speeds"]:
        assert one["share"] == pytest.approx(one["gflops"] / one["matmul"])
    assert data["tiny"] and data["finished"]
    (one,) = data["decoded"]
    assert (one["name"], one["rows"], one["graphs"]) == ("gated_delta_net", 1, False)
    assert next(iter(lines(data))).startswith("tiny sizes on ")
    json.dumps(data, allow_nan=False)


def test_the_suite_ends_in_time_and_says_what_it_left_out() -> None:
    data = measure("cpu", SMALL, only=["linear_attention"], seconds=0.0)
    assert data["speeds"] == []
    over = [
        what for what, why in data["left_out"].items() if why == "the time of the suite was over"
    ]
    assert over == ["linear, forward, T = 16", "linear, forward + backward, T = 16"]


def test_the_suite_refuses_in_one_sentence() -> None:
    with pytest.raises(ValueError, match="this suite has no 'glla'; it has linear_attention, gla"):
        measure("cpu", SMALL, only=["glla"])
    with pytest.raises(ValueError, match="T = 32 is longer than all 16 tokens"):
        measure("cpu", replace(SMALL, lengths=(32,)))
    assert TINY.tokens % max(TINY.lengths) == 0


def test_the_command_saves_the_suite_and_its_page(tmp_path: Path) -> None:
    path = tmp_path / "gpu.json"
    arguments = ["bench", "--suite", "gpu", "--only", "linear_attention", "--save", str(path)]
    small = ["--length", "16", "--heads", "1", "--size", "8", "--rounds", "1"]
    done = CliRunner().invoke(build(), [*arguments, *small])
    assert done.exit_code == 0, done.output
    assert "tiny sizes on" in done.output and "linear_attention" in done.output
    data = json.loads(path.read_text("utf-8"))
    assert data["sizes"]["heads"] == 1 and data["sizes"]["lengths"] == [16]
    assert "tiny" in path.with_suffix(".html").read_text("utf-8")


def test_a_stage_that_cannot_run_says_why(tmp_path: Path) -> None:
    here = Here(device="cpu", scratch=tmp_path, root=parts.checkout())
    for one in (STAGES[0], *STAGES[2:5]):
        record = run_stage(one, here)
        assert (record["outcome"], record["sentence"]) == ("not run", "there is no CUDA device")
    assert not list(tmp_path.iterdir())
