"""Results of a benchmark: times, ratios within rounds, and rates; their JSON and their table."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from recollect.report.environment import Environment
from recollect.report.tables import Column, Table

__all__ = ["BenchResult", "Case", "Ceiling", "Timing", "format_duration", "summarize"]

SCHEMA = 1
"""Version of the JSON that `BenchResult.to_json` writes."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """An implementation to time."""

    name: str  # name of the case, different for all cases of a run
    # Function that creates the inputs and returns the function to time, which takes no argument and
    # whose result is dropped. It is called once and is not timed. All cases of a run should create
    # equal inputs.
    make: Callable[[], Callable[[], object]]
    # floating-point operations of one call, two for a multiply-add, or None
    flops: float | None = None
    bytes: float | None = None  # smallest number of bytes that one call reads and writes, or None


@dataclass(frozen=True, kw_only=True)
class Ceiling:
    """Speed of a matrix product of torch in the same rounds."""

    name: str  # shape of the product
    gflops: float  # median over rounds, 10⁹ operations per second
    dtype: str = "float32"  # dtype of the product; files without it were measured in float32


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Time of one case."""

    name: str
    median: float  # seconds per call, median over rounds
    lower: float  # first quartile
    upper: float  # third quartile
    # median over rounds of this case's time divided by the baseline's in the same round
    ratio: float
    calls: int  # calls per round, so many that the clock's resolution is negligible
    flops: float | None  # FLOPs per call, or None
    bytes: float | None  # bytes per call, or None
    gflops: float | None  # 10⁹ operations per second, or None without flops
    share: float | None  # gflops as a fraction of the higher ceiling, or None without flops
    # largest memory that one call allocated on a GPU in addition to its inputs; None on a CPU
    peak_bytes: int | None
    seconds: tuple[float, ...]  # time per call in each round, in the order of the rounds


def _format(value: float | None, unit: float = 1.0) -> str | None:
    return None if value is None else f"{value / unit:.3g}"


_COLUMNS: tuple[tuple[str, int, Callable[[Timing], str | None]], ...] = (
    ("case", 0, lambda t: t.name),
    ("median", 0, lambda t: format_duration(t.median)),
    ("quartiles", 6, lambda t: f"{format_duration(t.lower)} … {format_duration(t.upper)}"),
    ("ratio", 0, lambda t: _format(t.ratio)),
    ("GFLOP", 3, lambda t: _format(t.flops, 1e9)),
    ("MB", 4, lambda t: _format(t.bytes, 1e6)),
    ("GFLOP/s", 1, lambda t: _format(t.gflops)),
    ("of ceiling", 2, lambda t: None if t.share is None else f"{t.share:.0%}"),
    ("peak MB", 5, lambda t: _format(t.peak_bytes, 1e6)),
)
"""Heading, priority in narrow terminals, and cell of each column."""


@dataclass(frozen=True, kw_only=True)
class BenchResult:
    """Result of a run."""

    timings: tuple[Timing, ...]  # one per case, in the order of the cases
    ceilings: tuple[Ceiling, ...]  # matrix products, timed in the same rounds
    baseline: str  # name of the case that ratios refer to
    rounds: int
    seed: int  # seed of the order within rounds
    environment: Environment  # device, versions, commit, date

    def __getitem__(self, name: str) -> Timing:
        """Return the timing of a case.

        Raises:
            KeyError: there is no such case.
        """
        for timing in self.timings:
            if timing.name == name:
                return timing
        raise KeyError(f"no case {name!r}; there are {', '.join(t.name for t in self.timings)}")

    def to_table(self, *, title: str = "", caption: str | None = None) -> Table:
        """Return one row per case; columns without any value are left out.

        Args:
            title: heading above the table.
            caption: text below the table; by default `footer`.
        """
        columns = [
            (Column(name=name, align="right" if i else "left", priority=priority), cells)
            for i, (name, priority, format_cell) in enumerate(_COLUMNS)
            if any(cells := [format_cell(timing) for timing in self.timings])
        ]
        return Table(
            columns=[column for column, _ in columns],
            rows=list(zip(*(cells for _, cells in columns), strict=True)),
            title=title,
            caption=self.footer() if caption is None else caption,
        )

    def footer(self) -> str:
        """Return the meaning of the ratios, the ceilings and the environment, in three lines."""
        facts = self.environment.facts()
        return (
            f"ratio: time by that of {self.baseline}; {self.rounds} alternating rounds\n"
            f"ceilings, matrix products in the same rounds: {self.describe_ceilings()}\n"
            f"{facts['device']}; {facts['software']}; commit {facts['commit']}"
        )

    def describe_ceilings(self) -> str:
        """Return shape, dtype and speed of the ceilings."""
        return ", ".join(f"{c.name} {c.dtype} {c.gflops:,.0f} GFLOP/s" for c in self.ceilings)

    def __str__(self) -> str:
        return self.to_table().to_text()

    def to_json(self) -> str:
        """Return all numbers with the environment as JSON."""
        content = {
            "schema": SCHEMA,
            "baseline": self.baseline,
            "rounds": self.rounds,
            "seed": self.seed,
            "environment": self.environment.to_dict(),
            "ceilings": [asdict(ceiling) for ceiling in self.ceilings],
            "timings": [asdict(timing) for timing in self.timings],
        }
        return json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n"

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> BenchResult:
        """Return the result that `to_json` wrote; other keys are ignored."""
        timings = (Timing(**{**x, "seconds": tuple(x["seconds"])}) for x in data["timings"])
        return cls(
            timings=tuple(timings),
            ceilings=tuple(Ceiling(**ceiling) for ceiling in data["ceilings"]),
            baseline=data["baseline"],
            rounds=data["rounds"],
            seed=data["seed"],
            environment=Environment(**data["environment"]),
        )


def summarize(
    cases: Sequence[Case],
    seconds: Sequence[Sequence[float]],
    *,
    baseline: str,
    seed: int,
    ceilings: Sequence[Ceiling],
    calls: Sequence[int],
    peaks: Sequence[int | None],
    environment: Environment,
) -> BenchResult:
    """Return medians, quartiles, ratios and rates of raw times.

    ``seconds`` has the time per call in each round, ``calls`` the calls per round, and ``peaks``
    the memory of each case. Ratios refer to the case ``baseline``.
    """
    reference = next(s for case, s in zip(cases, seconds, strict=True) if case.name == baseline)
    ceiling = max((ceiling.gflops for ceiling in ceilings), default=math.nan)
    timings: list[Timing] = []
    for case, times, num_calls, peak in zip(cases, seconds, calls, peaks, strict=True):
        quartiles = [times[0]] * 3
        if len(times) > 1:
            quartiles = statistics.quantiles(times, n=4, method="inclusive")
        lower, median, upper = quartiles
        gflops = None if case.flops is None else case.flops / median / 1e9
        timings.append(
            Timing(
                name=case.name,
                median=median,
                lower=lower,
                upper=upper,
                ratio=statistics.median(a / b for a, b in zip(times, reference, strict=True)),
                calls=num_calls,
                flops=case.flops,
                bytes=case.bytes,
                gflops=gflops,
                share=None if gflops is None or not ceiling > 0 else gflops / ceiling,
                peak_bytes=peak,
                seconds=tuple(times),
            )
        )
    return BenchResult(
        timings=tuple(timings),
        ceilings=tuple(ceilings),
        baseline=baseline,
        rounds=len(reference),
        seed=seed,
        environment=environment,
    )


def format_duration(seconds: float) -> str:
    """Return a time with three digits and its unit."""
    for size, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-9:.3g} ns"
