"""Time several implementations alternately, beside what the device can do at best.

A machine slows down and speeds up while it is measured: other work, heat, clocks. Implementations
that are timed one after the other therefore differ even when they are the same. Here every round
times each of them once, in an order drawn anew for each round, so that whatever happens to the
machine happens to all of them, and the ratio to the baseline is taken within each round before the
median over rounds.

Where the C library is glibc, memory that a case frees is kept for the next one, as in a training
loop under a caching allocator; without that, what is timed of a case with large tensors is mostly
the kernel handing out zeroed pages (two fifths of the processor time of the ``matrix`` suite).

The matmul ceiling (float32, one 1024 x 1024 x 1024 product and a batch of 64 x 64 x 64 products) is
timed in the same rounds. A share of it says how far an implementation is from the device's best.
"""

from __future__ import annotations

import ctypes
import gc
import json
import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from os import PathLike
from pathlib import Path

import torch
from torch import Tensor

from recollect.report.environment import Environment, describe_environment
from recollect.report.files import write_atomic

SCHEMA = 1
"""Version of the JSON that :meth:`BenchResult.to_json` writes."""

_GEMM, _SMALL, _SMALL_BATCH = 1024, 64, 512
_DASH = "–"
_CEILINGS = ("matmul 1024³", f"matmul {_SMALL_BATCH} × 64³")


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
                _duration(t.median),
                f"{_duration(t.lower)} … {_duration(t.upper)}",
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
            f"ceilings in float32: {ceilings}\n"
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

    def print(self) -> None:
        """Print the result, with rich if it is installed, else as plain text.

        Columns without any value are left out, and so are, where the terminal is narrow, the
        quartiles, then memory, then counts: the table never breaks a number.
        """
        try:
            from rich.box import SIMPLE_HEAD
            from rich.console import Console
            from rich.table import Table
        except ImportError:
            print(self.table())
            return
        console = Console()
        columns, rows = self.columns(), self.rows()
        widths = [max(map(len, column)) + 2 for column in zip(columns, *rows, strict=True)]
        shown = [i for i in range(len(columns)) if any(row[i] != _DASH for row in rows)]
        for name in ("quartiles", "peak MB", "MB", "GFLOP"):
            if sum(widths[i] for i in shown) > console.width and columns.index(name) in shown:
                shown.remove(columns.index(name))
        table = Table(box=SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
        for i in shown:
            table.add_column(columns[i], justify="left" if i == 0 else "right", no_wrap=i > 0)
        for row in rows:
            table.add_row(*(row[i] for i in shown))
        console.print(table)
        console.print(self.footer(), style="dim", markup=False, highlight=False)

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


def run(
    cases: Sequence[Case],
    *,
    baseline: str,
    rounds: int = 9,
    seed: int = 0,
    warmup: int = 2,
    min_seconds: float = 0.02,
    device: torch.device | str | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> BenchResult:
    """Time the cases alternately.

    Each case is made once and called ``warmup`` times (compilation, allocation); how many calls
    make a round of at least ``min_seconds`` is found from one more call. Then every round times
    every case and both ceilings, in an order shuffled by ``seed``. On a GPU the clock waits for the
    device. Python's garbage collector rests while a clock runs.

    Args:
        cases: what to time; names must differ.
        baseline: name of the case that ratios refer to.
        rounds: how many rounds; medians of fewer than five mean little.
        seed: of the order of cases within rounds, not of their inputs.
        warmup: calls before the first timing.
        min_seconds: how long the calls of one case in one round should take together.
        device: where the cases run; by default a GPU if there is one, else the CPU.
        progress: called after each round with the rounds done and the rounds in all.

    Returns:
        The result.

    Raises:
        ValueError: if there are no cases, names repeat, the baseline is not among them, or a
            number is out of range.
        RuntimeError: if a case fails, naming the case; the cause is chained.
    """
    names = [case.name for case in cases]
    _check(names, baseline, rounds, warmup, min_seconds)
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(device)
    _keep_freed_memory()
    probes = _ceiling_cases(device)

    works: list[_Work] = []
    for case in (*cases, *probes):
        try:
            works.append(_prepare(case, device, warmup, min_seconds))
        except Exception as error:
            raise RuntimeError(
                f"bench: case {case.name!r} failed before it could be timed: {error}"
            ) from error

    seconds: list[list[float]] = [[] for _ in works]
    order = list(range(len(works)))
    shuffler = random.Random(seed)
    for done in range(rounds):
        shuffler.shuffle(order)
        for index in order:
            work = works[index]
            seconds[index].append(_clock(work.call, work.calls, device) / work.calls)
        if progress is not None:
            progress(done + 1, rounds)

    return summarise(
        cases,
        seconds[: len(cases)],
        baseline=baseline,
        seed=seed,
        ceilings=[
            Ceiling(name=probe.name, gflops=(probe.flops or 0) / statistics.median(times) / 1e9)
            for probe, times in zip(probes, seconds[len(cases) :], strict=True)
        ],
        calls=[work.calls for work in works[: len(cases)]],
        peaks=[work.peak for work in works[: len(cases)]],
        environment=describe_environment(device),
    )


def _keep_freed_memory() -> None:
    """Let glibc's allocator reuse what is freed; elsewhere, do nothing."""
    trim_threshold, mmap_max = -1, -4  # the names of mallopt(3)
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):
        return
    mallopt(mmap_max, 0)
    mallopt(trim_threshold, 2**31 - 1)


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


@dataclass(frozen=True, kw_only=True)
class _Work:
    """A case made and warmed up."""

    call: Callable[[], object]
    calls: int
    peak: int | None


def _prepare(case: Case, device: torch.device, warmup: int, min_seconds: float) -> _Work:
    call = case.make()
    for _ in range(warmup):
        call()
    peak = _peak(call, device)
    once = _clock(call, 1, device)
    return _Work(call=call, calls=max(1, math.ceil(min_seconds / max(once, 1e-7))), peak=peak)


def _clock(call: Callable[[], object], calls: int, device: torch.device) -> float:
    """Seconds that so many calls take, from an idle device to an idle device."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        _wait(device)
        start = time.perf_counter()
        for _ in range(calls):
            call()
        _wait(device)
        # A clock of coarse resolution may not have moved; no rate is infinite.
        return max(time.perf_counter() - start, 1e-9)
    finally:
        if collecting:
            gc.enable()


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _peak(call: Callable[[], object], device: torch.device) -> int | None:
    if device.type != "cuda":
        return None
    _wait(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    call()
    _wait(device)
    return torch.cuda.max_memory_allocated(device) - before


def _ceiling_cases(device: torch.device) -> list[Case]:
    """One large matrix product, and many small ones as chunked recurrences make them."""

    def product(*shape: int) -> Callable[[], Callable[[], object]]:
        def make() -> Callable[[], object]:
            generator = torch.Generator(device).manual_seed(0)
            left = torch.randn(shape, generator=generator, device=device)
            right = torch.randn(shape, generator=generator, device=device)
            out = torch.empty_like(left)

            def call() -> Tensor:
                return torch.matmul(left, right, out=out)

            return call

        return make

    return [
        Case(name=_CEILINGS[0], make=product(_GEMM, _GEMM), flops=2.0 * _GEMM**3),
        Case(
            name=_CEILINGS[1],
            make=product(_SMALL_BATCH, _SMALL, _SMALL),
            flops=2.0 * _SMALL_BATCH * _SMALL**3,
        ),
    ]


def _check(
    names: Sequence[str], baseline: str, rounds: int, warmup: int, min_seconds: float
) -> None:
    if not names:
        raise ValueError("bench: there is no case to time")
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise ValueError(f"bench: case names must differ; repeated: {', '.join(repeated)}")
    if baseline not in names:
        raise ValueError(
            f"bench: the baseline {baseline!r} is not a case; there are {', '.join(names)}"
        )
    if rounds < 1 or warmup < 0 or not 0 <= min_seconds < math.inf:
        raise ValueError(
            f"bench: rounds must be at least 1, warmup and min_seconds not negative; "
            f"got rounds={rounds}, warmup={warmup}, min_seconds={min_seconds}"
        )


def _quartiles(times: Sequence[float]) -> tuple[float, float, float]:
    if len(times) == 1:
        return times[0], times[0], times[0]
    lower, median, upper = statistics.quantiles(times, n=4, method="inclusive")
    return lower, median, upper


def _duration(seconds: float) -> str:
    for size, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-9:.3g} ns"


def _or_dash(value: float | None, show: Callable[[float], str]) -> str:
    return _DASH if value is None else show(value)
