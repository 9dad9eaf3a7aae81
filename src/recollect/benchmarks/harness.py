"""Time several cases in alternation, together with the device's matrix products.

The speed of a machine changes during a measurement: other programs, heat, clocks. Cases that are
timed one after the other differ even if they are equal. The harness therefore times each case once
per round, in a new random order for each round. Changes of the machine affect all cases alike, and
ratios to the baseline are taken within each round before the median over rounds.

With glibc, freed memory is kept for the next case, as in a training loop with a caching allocator.
Otherwise the time of a case with large tensors is mostly that of zeroed pages from the kernel (two
fifths of the processor time of the suite ``matrix``).

The ceilings are a large matrix product and a batch of 64 × 64 × 64 products, timed in the same
rounds. Their inputs are random, because a GPU multiplies zeros faster. The fraction of a ceiling
shows how close a case is to the best that the device can do.
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

from recollect.benchmarks.results import BenchResult, Case, Ceiling, summarize
from recollect.report.environment import describe_environment

__all__ = ["run"]

_SMALL_SIZE, _SMALL_BATCH = 64, 512

Timer = Callable[[], float]


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
    timer: Timer = time.perf_counter,
    progress: Callable[[int, int], None] | None = None,
) -> BenchResult:
    """Time cases in alternation.

    Each case is made once and called ``warmup`` times for compilation and allocation. One more call
    determines how many calls take at least ``min_seconds``. Every round then times all cases and
    both ceilings. The clock waits for the device, and Python's garbage collector is off while it
    runs.

    Args:
        cases: cases with different names.
        baseline: name of the case that ratios refer to.
        rounds: number of rounds; at least five for stable medians.
        seed: seed of the order within rounds; inputs do not depend on it.
        warmup: number of calls before the first timing.
        min_seconds: smallest time of the calls of one case in one round.
        device: device of the cases; by default a GPU if there is one, else the CPU.
        dtype: dtype of the ceilings: that of the cases.
        timer: clock in seconds. `time.process_time` excludes other programs, and adds up the time
            of all threads.
        progress: function that gets the number of finished rounds and of all rounds.

    Returns:
        The result.

    Raises:
        ValueError: there are no cases, names repeat, the baseline is not among them, or a number is
            out of range.
        RuntimeError: a case failed; the message names it.
    """
    names = [case.name for case in cases]
    _check(names, baseline, rounds, warmup, min_seconds)
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(device)
    _keep_freed_memory()
    products = _ceiling_cases(device, dtype)

    prepared: list[_Prepared] = []
    for case in (*cases, *products):
        try:
            prepared.append(_prepare(case, device, warmup, min_seconds, timer))
        except Exception as error:
            raise RuntimeError(
                f"bench: case {case.name!r} failed before it could be timed: {error}"
            ) from error

    seconds: list[list[float]] = [[] for _ in prepared]
    order = list(range(len(prepared)))
    shuffler = random.Random(seed)
    for num_done in range(1, rounds + 1):
        shuffler.shuffle(order)
        for i in order:
            call, calls = prepared[i].call, prepared[i].calls
            seconds[i].append(_measure_seconds(call, calls, device, timer) / calls)
        if progress is not None:
            progress(num_done, rounds)

    return summarize(
        cases,
        seconds[: len(cases)],
        baseline=baseline,
        seed=seed,
        ceilings=[
            Ceiling(
                name=case.name,
                gflops=(case.flops or 0) / statistics.median(times) / 1e9,
                dtype=str(dtype).removeprefix("torch."),
            )
            for case, times in zip(products, seconds[len(cases) :], strict=True)
        ],
        calls=[x.calls for x in prepared[: len(cases)]],
        peaks=[x.peak_bytes for x in prepared[: len(cases)]],
        environment=describe_environment(device),
    )


def _keep_freed_memory() -> None:
    """Let glibc's allocator reuse freed memory; other C libraries are left as they are."""
    trim_threshold, mmap_max = -1, -4  # parameters of mallopt(3)
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):
        return
    mallopt(mmap_max, 0)
    mallopt(trim_threshold, 2**31 - 1)


@dataclass(frozen=True, kw_only=True)
class _Prepared:
    """A case after its warm-up."""

    call: Callable[[], object]
    calls: int
    peak_bytes: int | None


def _prepare(
    case: Case, device: torch.device, warmup: int, min_seconds: float, timer: Timer
) -> _Prepared:
    call = case.make()
    for _ in range(warmup):
        call()
    peak_bytes = _measure_peak(call, device)
    seconds = max(_measure_seconds(call, 1, device, timer), 1e-7)
    calls = max(1, math.ceil(min_seconds / seconds))
    return _Prepared(call=call, calls=calls, peak_bytes=peak_bytes)


def _measure_seconds(
    call: Callable[[], object], calls: int, device: torch.device, timer: Timer
) -> float:
    """Return the seconds of several calls, from an idle device to an idle device."""
    was_collecting = gc.isenabled()
    gc.disable()
    try:
        _synchronize(device)
        start = timer()
        for _ in range(calls):
            call()
        _synchronize(device)
        # A coarse clock may not have advanced; rates must be finite.
        return max(timer() - start, 1e-9)
    finally:
        if was_collecting:
            gc.enable()


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def _measure_peak(call: Callable[[], object], device: torch.device) -> int | None:
    if device.type != "cuda":
        return None
    _synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    allocated = torch.cuda.memory_allocated(device)
    call()
    _synchronize(device)
    return torch.cuda.max_memory_allocated(device) - allocated


def _ceiling_cases(device: torch.device, dtype: torch.dtype) -> list[Case]:
    """Return a large matrix product, and many small ones as in chunked recurrences."""
    # A product of 1024³ does not occupy a GPU.
    size = 1024 if device.type == "cpu" else 8192 if dtype.itemsize < 4 else 4096

    def product(name: str, *shape: int) -> Case:
        def make() -> Callable[[], Tensor]:
            generator = torch.Generator(device).manual_seed(0)
            a, b = (
                torch.randn(shape, generator=generator, device=device).to(dtype) for _ in range(2)
            )
            out = torch.empty_like(a)
            return lambda: torch.matmul(a, b, out=out)

        return Case(name=name, make=make, flops=2.0 * math.prod(shape) * shape[-1])

    return [
        product(f"matmul {size}³", size, size),
        product(f"matmul {_SMALL_BATCH} × {_SMALL_SIZE}³", _SMALL_BATCH, _SMALL_SIZE, _SMALL_SIZE),
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
