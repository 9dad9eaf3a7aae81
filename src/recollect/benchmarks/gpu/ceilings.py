"""What a device can do at best, measured: products by type, a copy, a launch."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypedDict

import torch
from torch.utils.benchmark import Timer

from recollect.choices.matmul_precision import matmul_precision

__all__ = ["Ceilings", "measure_ceilings", "seconds_of"]

_SIDE, _TINY_SIDE = 8192, 256
_TINY_BYTES = 2**22


class Ceilings(TypedDict):
    """Rates of a device, as they are written to a file.

    Attributes:
        matmul: operations per second of one large product, by the type it multiplies.
        side: n of that product, n³. copy: bytes per second, read and written.
        copied: bytes that were copied. launch: seconds that a small operation takes the host.
    """

    matmul: dict[str, float]
    side: int
    copy: float
    copied: int
    launch: float


def seconds_of(call: Callable[[], object], *, least: float) -> float:
    """Median seconds of a call, by torch's timer, which waits for the device.

    Args:
        call: what is timed, after one call that is not.
        least: seconds that all calls together take, about.
    """
    call()
    threads = torch.get_num_threads()
    timer = Timer("call()", globals={"call": call}, num_threads=threads)
    return timer.blocked_autorange(min_run_time=least).median


def measure_ceilings(device: torch.device, *, tiny: bool = False, least: float = 0.3) -> Ceilings:
    """Measure them, on random numbers: equal ones keep a GPU cooler, and so faster.

    Args:
        device: that is measured.
        tiny: whether sizes are such that only the way is shown, and no ceiling.
        least: seconds that each measurement takes, about.
    """
    generator = torch.Generator(device).manual_seed(0)
    side = _TINY_SIDE if tiny else _SIDE
    left, right = torch.randn(2, side, side, device=device, generator=generator)
    matmul: dict[str, float] = {}
    for name, precision, dtype in (
        ("bfloat16", None, torch.bfloat16),
        ("TF32", "tf32", torch.float32),
        ("float32", "float32", torch.float32),
    ):
        if name == "TF32" and device.type != "cuda":
            continue
        a, b = left.to(dtype), right.to(dtype)
        with matmul_precision(precision):
            matmul[name] = 2.0 * side**3 / seconds_of(lambda: a @ b, least=least)  # noqa: B023
    del left, right
    copied = _TINY_BYTES if tiny else _copied(device)
    source = torch.ones(copied, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy = 2.0 * copied / seconds_of(lambda: target.copy_(source), least=least)
    small = torch.zeros(1, device=device)
    return Ceilings(
        matmul=matmul,
        side=side,
        copy=copy,
        copied=copied,
        launch=seconds_of(lambda: small.add_(1.0), least=least),
    )


def _copied(device: torch.device) -> int:
    """Many times what caches hold, and little of what the memory does."""
    if device.type != "cuda":
        return 2**28
    return min(2**32, torch.cuda.get_device_properties(device).total_memory // 16)
