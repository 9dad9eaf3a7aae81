"""Results of a benchmark: times, ratios within rounds, rates, and their JSON and tables."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

from recollect.report.environment import Environment
from recollect.report.files import write_atomic
from recollect.report.tables import Column, Table

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["BenchResult", "Case", "Ceiling", "Timing", "duration", "summarise"]

SCHEMA = 1
"""Version of the JSON that :meth:`BenchResult.to_json` writes."""

_DASH = "–"
_RANKS = {
    **dict.fromkeys(("case", "median", "ratio"), 0),
    "GFLOP/s": 1,
    "of ceiling": 2,
    "GFLOP": 3,
    "MB": 4,
    "peak MB": 5,
    "quartiles": 6,
}
"""When a column is left out where there is no room."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One implementation to time.

    Args:
        name: how the table calls it; different for every case of a run.
        make: builds the inputs and returns the function to time, which takes no argument and
            whose result is dropped. It is called once, outside the timing; for forward plus
            backward let the returned function do both. To be fair, let every case of a run build
            the same inputs.
        flops: floating-point operations of one call, a multiply-add counting two, or None.
        bytes: bytes that one call must at least read and write, or None.
    """

    name: str
    make: Callable[[], Callable[[], object]]
    flops: float | None = None
    bytes: float | None = None


@dataclass(frozen=True, kw_only=True)
class Ceiling:
    """What the device's own matrix product reached in this run.

    Args:
        name: the shape of the product.
        gflops: median over rounds, 10⁹ operations per second.
    """

    name: str
    gflops: float


@dataclass(frozen=True, kw_only=True)
class Timing:
    """What one case took.

    Args:
        name: of the case.
        median: seconds per call, over rounds.
        lower: first quartile.
        upper: third quartile.
        ratio: median over rounds of this case's time by the baseline's in the same round.
        calls: calls per round, so many that a round is long against the clock's resolution.
        flops: as the case gave it.
        bytes: as the case gave it.
        gflops: achieved, 10⁹ operations per second, or None without ``flops``.
        share: of the higher ceiling, between 0 and about 1, or None without ``flops``.
        peak_bytes: the most memory that one call allocated on a GPU beyond what was there before;
            None on the CPU, where torch does not count it.
        seconds: the time per call in each round, in the order of the rounds.
    """

    name: str
    median: float
    lower: float
    upper: float
    ratio: float
    calls: int
    flops: float | None
    bytes: float | None
    gflops: float | None
    share: float | None
    peak_bytes: int | None
    seconds: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class BenchResult:
    """A finished run.

    Args:
        timings: one per case, in the cases' order.
        ceilings: the device's matrix products, measured in the same rounds.
        baseline: name of the case that ratios refer to.
        rounds: how many rounds there were.
        seed: of the order within rounds.
        environment: device, versions, commit, date.
    """

    timings: tuple[Timing, ...]
    ceilings: tuple[Ceiling, ...]
    baseline: str
    rounds: int
    seed: int
    environment: Environment

    def __getitem__(self, name: str) -> Timing:
        """The timing of the case of this name.

        Raises:
            KeyError: if there is none, naming those there are.
        """
        for timing in self.timings:
            if timing.name == name:
                return timing
        raise KeyError(f"no case {name!r}; there are {', '.join(t.name for t in self.timings)}")

    def columns(self) -> list[str]:
        """Headings of :meth:`rows`."""
        return [
            "case",
            "median",
            "quartiles",
            "ratio",
            "GFLOP",
            "MB",
            "GFLOP/s",
            "of ceiling",
            "peak MB",
        ]

    def rows(self) -> list[list[str]]:
        """The table as text, one row per case; what was not given or measured is a dash."""
        return [
            [
                t.name,
                duration(t.median),
                f"{duration(t.lower)} … {duration(t.upper)}",
                f"{t.ratio:.3g}",
                _or_dash(t.flops, lambda v: f"{v / 1e9:.3g}"),
                _or_dash(t.bytes, lambda v: f"{v / 1e6:.3g}"),
                _or_dash(t.gflops, lambda v: f"{v:.3g}"),
                _or_dash(t.share, lambda v: f"{v:.0%}"),
                _or_dash(t.peak_bytes, lambda v: f"{v / 1e6:.3g}"),
            ]
            for t in self.timings
        ]

    def footer(self) -> str:
        """Where it was measured and what the device's ceilings were, in three lines."""
        ceilings = ", ".join(f"{c.name} {c.gflops:,.0f} GFLOP/s" for c in self.ceilings)
        facts = self.environment.facts()
        return (
            f"ratio: time by that of {self.baseline}; {self.rounds} alternating rounds\n"
            f"ceilings in float32, what matrix products reached in the same rounds: {ceilings}\n"
            f"{facts['device']}; {facts['software']}; commit {facts['commit']}"
        )

    def table(self) -> str:
        """The whole result as plain text in aligned columns."""
        lines = [self.columns(), *self.rows()]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        text = [
            "  ".join(
                cell.ljust(width) if index == 0 else cell.rjust(width)
                for index, (cell, width) in enumerate(zip(line, widths, strict=True))
            ).rstrip()
            for line in lines
        ]
        text.insert(1, "─" * max(map(len, text)))
        return "\n".join([*text, self.footer()])

    def print(self, console: Console | None = None) -> None:
        """Print the result, with rich if it is installed, else as plain text.

        Columns without any value are left out, and so are, where the terminal is narrow, the
        quartiles, then memory, then counts: the table never breaks a number.

        Args:
            console: rich's, where to; the standard output when omitted.
        """
        try:
            from rich.console import Console
        except ImportError:
            print(self.table())
            return
        console = console or Console(markup=False, emoji=False)
        names, rows = self.columns(), self.rows()
        here = [i for i in range(len(names)) if any(row[i] != _DASH for row in rows)]
        table = Table(
            columns=[
                Column(name=names[i], align="right" if i > 0 else "left", priority=_RANKS[names[i]])
                for i in here
            ],
            rows=[[row[i] for i in here] for row in rows],
        )
        table.print(console, also_in="--json")
        console.print(self.footer(), style="dim", highlight=False)

    def to_json(self) -> str:
        """All numbers, with where they were measured."""
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

    def save(self, path: str | PathLike[str]) -> Path:
        """Write :meth:`to_json` atomically; missing folders are made."""
        return write_atomic(path, self.to_json())


def summarise(
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
    """Medians, quartiles, ratios and rates from raw times; apart from :func:`run` for testing.

    Args:
        cases: the cases.
        seconds: for each case, the time per call in each round.
        baseline: name of the case that ratios refer to.
        seed: of the order within rounds.
        ceilings: what the device's matrix products reached.
        calls: calls per round of each case.
        peaks: memory of each case, or None.
        environment: where it was measured.
    """
    reference = next(s for case, s in zip(cases, seconds, strict=True) if case.name == baseline)
    top = max((ceiling.gflops for ceiling in ceilings), default=math.nan)
    timings: list[Timing] = []
    for case, times, count, peak in zip(cases, seconds, calls, peaks, strict=True):
        lower, median, upper = _quartiles(times)
        gflops = None if case.flops is None else case.flops / median / 1e9
        timings.append(
            Timing(
                name=case.name,
                median=median,
                lower=lower,
                upper=upper,
                ratio=statistics.median(a / b for a, b in zip(times, reference, strict=True)),
                calls=count,
                flops=case.flops,
                bytes=case.bytes,
                gflops=gflops,
                share=None if gflops is None or not top > 0 else gflops / top,
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


def _quartiles(times: Sequence[float]) -> tuple[float, float, float]:
    if len(times) == 1:
        return times[0], times[0], times[0]
    lower, median, upper = statistics.quantiles(times, n=4, method="inclusive")
    return lower, median, upper


def duration(seconds: float) -> str:
    """A time with three digits and its unit."""
    for size, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-9:.3g} ns"


def _or_dash(value: float | None, show: Callable[[float], str]) -> str:
    return _DASH if value is None else show(value)
