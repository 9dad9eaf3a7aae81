"""Time several implementations alternately, beside what the device can do at best.

A machine slows down and speeds up while it is measured: other work, heat, clocks. Implementations
that are timed one after the other therefore differ even when they are the same. Here every round
times each of them once, in an order drawn anew for each round, so that whatever happens to the
machine happens to all of them, and the ratio to the baseline is taken within each round before the
median over rounds.

Where the C library is glibc, memory that a case frees is kept for the next one, as in a training
loop under a caching allocator; without that, what is timed of a case with large tensors is mostly
the kernel handing out zeroed pages (two fifths of the processor time of the ``matrix`` suite).

The matmul ceiling (one large product, 1024³ on a CPU, and a batch of 64 x 64 x 64 products; float32
where nothing else is asked for) is timed in the same rounds, on random numbers: a GPU multiplies
zeros faster, because it stays cooler. A share of it says how far an implementation is from the
device's best.
"""

from __future__ import annotations

import ctypes
import gc
import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from recollect.benchmarks.results import BenchResult, Case, Ceiling, summarise
from recollect.report.environment import describe_environment

__all__ = ["run"]

_SMALL, _SMALL_BATCH = 64, 512


def run(
    cases: Sequence[Case],
    *,
    baseline: str,
    rounds: int = 9,
    seed: int = 0,
    warmup: int = 2,
    min_seconds: float = 0.02,
    device: torch.device | str | None = None,
    dtype: torch.dtype = torch.float32,
    left_out: dict[str, str] | None = None,
    timer: Callable[[], float] = time.perf_counter,
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
        dtype: of the ceilings' products.
        left_out: where it is given, cases that cannot be made or called are left out and put there
            with the reason, in place of ending the run. The first that can be is then the baseline
            if the baseline itself is among them.
        timer: clock in seconds. `time.process_time` leaves out the time that other programs take of
            the processor, and adds up the time of all threads.
        progress: called after each round with the rounds done and the rounds in all.

    Returns:
        The result.

    Raises:
        ValueError: if there are no cases, names repeat, the baseline is not among them, or a
            number is out of range.
        RuntimeError: if a case fails, naming the case, and is not left out; the cause is chained.
            If no case is left.
    """
    names = [case.name for case in cases]
    _check(names, baseline, rounds, warmup, min_seconds)
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(device)
    _keep_freed_memory()
    probes = _ceiling_cases(device, dtype)

    works: list[_Work] = []
    made: list[Case] = []
    for case in (*cases, *probes):
        try:
            works.append(_prepare(case, device, warmup, min_seconds, timer))
            made.append(case)
        except Exception as error:
            if left_out is None or case in probes:
                raise RuntimeError(
                    f"bench: case {case.name!r} failed before it could be timed: {error}"
                ) from error
            left_out[case.name] = f"{type(error).__name__}: {error}"
            _forget(device)
    cases = made[: len(made) - len(probes)]
    if not cases:
        raise RuntimeError(f"bench: no case is left; {left_out}")
    if baseline not in {case.name for case in cases}:
        baseline = cases[0].name

    seconds: list[list[float]] = [[] for _ in works]
    order = list(range(len(works)))
    shuffler = random.Random(seed)
    for done in range(rounds):
        shuffler.shuffle(order)
        for index in order:
            work = works[index]
            seconds[index].append(_clock(work.call, work.calls, device, timer) / work.calls)
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


@dataclass(frozen=True, kw_only=True)
class _Work:
    """A case made and warmed up."""

    call: Callable[[], object]
    calls: int
    peak: int | None


def _prepare(
    case: Case,
    device: torch.device,
    warmup: int,
    min_seconds: float,
    timer: Callable[[], float],
) -> _Work:
    call = case.make()
    for _ in range(warmup):
        call()
    peak = _peak(call, device)
    seconds = max(_clock(call, 1, device, timer), 1e-7)
    return _Work(call=call, calls=max(1, math.ceil(min_seconds / seconds)), peak=peak)


def _clock(
    call: Callable[[], object], calls: int, device: torch.device, timer: Callable[[], float]
) -> float:
    """Seconds that so many calls take, from an idle device to an idle device."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        _wait(device)
        start = timer()
        for _ in range(calls):
            call()
        _wait(device)
        # A clock of coarse resolution may not have moved; no rate is infinite.
        return max(timer() - start, 1e-9)
    finally:
        if collecting:
            gc.enable()


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def _peak(call: Callable[[], object], device: torch.device) -> int | None:
    if device.type != "cuda":
        return None
    _wait(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    call()
    _wait(device)
    return torch.cuda.max_memory_allocated(device) - before


def _forget(device: torch.device) -> None:
    """Give back what a case that failed had allocated."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _ceiling_cases(device: torch.device, dtype: torch.dtype) -> list[Case]:
    """One large matrix product, and many small ones as chunked recurrences make them."""
    # A GPU is not full with 1024³: that takes as long as launching it.
    side = 1024 if device.type == "cpu" else 8192 if dtype.itemsize < 4 else 4096
    suffix = "" if dtype == torch.float32 else f" {str(dtype).removeprefix('torch.')}"

    def product(*shape: int) -> Callable[[], Callable[[], object]]:
        def make() -> Callable[[], object]:
            generator = torch.Generator(device).manual_seed(0)
            left, right = (
                torch.randn(shape, generator=generator, device=device).to(dtype) for _ in range(2)
            )
            out = torch.empty_like(left)

            def call() -> Tensor:
                return torch.matmul(left, right, out=out)

            return call

        return make

    return [
        Case(name=f"matmul {side}³{suffix}", make=product(side, side), flops=2.0 * side**3),
        Case(
            name=f"matmul {_SMALL_BATCH} × 64³{suffix}",
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
