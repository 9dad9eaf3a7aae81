from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from recollect.benchmarks import BenchResult, Case, Ceiling, run
from recollect.benchmarks.results import summarize
from recollect.report import Environment

ENVIRONMENT = Environment(
    device="a device",
    device_type="cpu",
    threads=2,
    python="3.11.0",
    torch="2.13.0",
    system="Linux x86_64",
    commit="0123456789ab-dirty",
    date="2026-01-01T00:00:00Z",
)


ROOT = Path(__file__).parents[2]
STORED = [
    path
    for folder in ("bench", "kernel")
    for path in sorted(ROOT.glob(f"results/{folder}/*.json"))
    if {"suite", "timings"} <= json.loads(path.read_text("utf-8")).keys()
]


def nothing() -> Callable[[], object]:
    return lambda: None


def a_result() -> BenchResult:
    return summarize(
        [
            Case(name="base", make=nothing, flops=4e9, bytes=2e6),
            Case(name="fast", make=nothing),
        ],
        # The machine slows to half in the middle; the second case is twice as fast in every round.
        [[0.1, 0.1, 0.2, 0.2, 0.2], [0.05, 0.05, 0.1, 0.1, 0.1]],
        baseline="base",
        seed=3,
        ceilings=[
            Ceiling(name="large", gflops=80.0),
            Ceiling(name="small", gflops=40.0, dtype="bfloat16"),
        ],
        calls=[1, 2],
        peaks=[None, 3_000_000],
        environment=ENVIRONMENT,
    )


class TestSummary:
    def test_numbers(self) -> None:
        result = a_result()
        base, fast = result.timings
        assert (base.lower, base.median, base.upper) == (0.1, 0.2, 0.2)
        assert base.ratio == 1
        assert fast.ratio == 0.5
        assert base.gflops == pytest.approx(20.0)
        assert base.share == pytest.approx(0.25), "the share is of the higher ceiling"
        assert fast.gflops is None
        assert fast.share is None
        assert result["fast"] is fast
        with pytest.raises(KeyError, match=r"no case 'slow'; there are base, fast"):
            result["slow"]

    def test_the_ratio_is_taken_within_rounds(self) -> None:
        # Each round disturbs one case more than the other, so the ratio of medians (0.5) misleads,
        # and the median of the ratios (2) does not.
        result = summarize(
            [Case(name="a", make=nothing), Case(name="b", make=nothing)],
            [[1.0, 4.0, 9.0], [2.0, 2.0, 18.0]],
            baseline="a",
            seed=0,
            ceilings=[],
            calls=[1, 1],
            peaks=[None, None],
            environment=ENVIRONMENT,
        )
        assert result["b"].ratio == 2.0
        assert result["b"].median / result["a"].median == 0.5

    def test_table_shows_every_number_and_the_environment(self) -> None:
        lines = str(a_result()).splitlines()
        assert lines[1].split() == (
            "base 200 ms 100 ms … 200 ms 1 4 2 20 25% –".split()  # noqa: SIM905
        )
        assert lines[2].split()[-6:] == ["0.5", "–", "–", "–", "–", "3"]
        text = "\n".join(lines)
        for fact in ("of base", "5 alternating rounds", "0123456789ab-dirty"):
            assert fact in text
        assert "large float32 80 GFLOP/s, small bfloat16 40 GFLOP/s" in text

    def test_a_narrow_table_leaves_out_quartiles_first(self) -> None:
        text = a_result().to_table().to_text(60)
        table, left_out = text.split("left out at 60 columns: ")
        assert "200 ms" in table and "quartiles" not in table
        assert left_out.startswith("quartiles")

    def test_columns_without_values_are_left_out(self) -> None:
        result = dataclasses.replace(a_result(), timings=a_result().timings[1:])
        columns = [column.name for column in result.to_table().columns]
        assert columns == ["case", "median", "quartiles", "ratio", "peak MB"]

    def test_json_contains_all_fields(self) -> None:
        content = json.loads(a_result().to_json())
        assert content["schema"] == 1
        assert content["environment"]["commit"] == "0123456789ab-dirty"
        assert content["timings"][1]["seconds"] == [0.05, 0.05, 0.1, 0.1, 0.1]
        assert [ceiling["dtype"] for ceiling in content["ceilings"]] == ["float32", "bfloat16"]
        assert BenchResult.from_dict(content) == a_result()

    @pytest.mark.parametrize("path", STORED, ids=lambda path: path.stem)
    def test_stored_results_have_a_table(self, path: Path) -> None:
        content = json.loads(path.read_text("utf-8"))
        text = str(BenchResult.from_dict(content))
        assert all(timing["name"] in text for timing in content["timings"])
        # Files without a dtype were measured in float32.
        assert "matmul 1024³ float32" in text


class TestRun:
    def test_cases_alternate_in_a_shuffled_order(self) -> None:
        def trace(seed: int) -> str:
            log: list[str] = []

            def case(name: str) -> Case:
                def call() -> None:
                    log.append(name)
                    time.sleep(1e-4)

                return Case(name=name, make=lambda: call)

            run(
                [case("A"), case("B"), case("C")],
                baseline="A",
                rounds=6,
                seed=seed,
                warmup=1,
                min_seconds=0,
                device="cpu",
            )
            return "".join(log)

        trace_0 = trace(0)
        head, rounds = trace_0[:6], trace_0[6:]
        assert head == "AABBCC", "each case is warmed up once and called once to choose its calls"
        chunks = [rounds[i : i + 3] for i in range(0, len(rounds), 3)]
        assert len(chunks) == 6
        assert all(sorted(chunk) == ["A", "B", "C"] for chunk in chunks)
        assert len(set(chunks)) > 1
        assert trace(0) == trace_0
        assert trace(1) != trace_0

    def test_case_is_built_once_and_short_ones_run_often(self) -> None:
        calls: list[str] = []

        def make() -> Callable[[], object]:
            calls.append("x")
            return lambda: None

        reports: list[tuple[int, int]] = []
        result = run(
            [Case(name="x", make=make)],
            baseline="x",
            rounds=2,
            min_seconds=1e-3,
            device="cpu",
            progress=lambda done, total: reports.append((done, total)),
        )
        assert calls == ["x"]
        assert result["x"].calls > 10
        assert len(result["x"].seconds) == 2
        assert reports == [(1, 2), (2, 2)]
        assert [c.gflops > 0 for c in result.ceilings] == [True, True]
        assert result.environment.torch == torch.__version__

    def test_ceilings_have_the_dtype_of_the_cases(self) -> None:
        case = Case(name="a", make=nothing)
        options = {"rounds": 1, "min_seconds": 0, "device": "cpu"}
        result = run([case], baseline="a", dtype=torch.float64, **options)  # type: ignore[arg-type]
        assert [ceiling.dtype for ceiling in result.ceilings] == ["float64"] * 2
        assert "matmul 1024³ float64" in result.footer()

    def test_a_slower_case_has_the_larger_ratio(self) -> None:
        def sleeper(seconds: float) -> Callable[[], Callable[[], object]]:
            return lambda: lambda: time.sleep(seconds)

        cases = [Case(name="a", make=sleeper(1e-3)), Case(name="b", make=sleeper(1e-1))]
        result = run(cases, baseline="a", rounds=3, min_seconds=0, device="cpu")
        assert result["b"].ratio > 2

    def test_a_failing_case_is_named(self) -> None:
        def make() -> Callable[[], object]:
            raise ZeroDivisionError("no kernel")

        with pytest.raises(RuntimeError, match=r"'bad' failed.*no kernel") as caught:
            run([Case(name="bad", make=make)], baseline="bad", device="cpu")
        assert isinstance(caught.value.__cause__, ZeroDivisionError)

    @pytest.mark.parametrize(
        ("names", "options", "message"),
        [
            ([], {}, "no case"),
            (["a", "b", "a"], {}, "repeated: a"),
            (["b"], {}, "'a' is not a case; there are b"),
            (["a"], {"rounds": 0}, "rounds must be at least 1"),
            (["a"], {"warmup": -1}, "not negative"),
            (["a"], {"min_seconds": float("nan")}, "not negative"),
        ],
    )
    def test_contradictions_are_refused(
        self, names: list[str], options: dict[str, float], message: str
    ) -> None:
        cases = [Case(name=name, make=nothing) for name in names]
        with pytest.raises(ValueError, match=message):
            run(cases, baseline="a", **options)  # type: ignore[arg-type]
