"""Selection of the kernels for the recurrence, and their launch by Triton."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec

import torch
from torch import Tensor

from recollect.choices.runtime import is_cacheable
from recollect.engines.deep.chain.chain import OutputHead
from recollect.engines.deep.recurrence.runner import TUNING, Launch, RecurrenceRunner

__all__ = ["DTYPES", "LAUNCHERS", "TUNING", "launch", "select_runner"]

LAUNCHERS: dict[str, Launch] = {}
"""Launch function by device type; tests register Triton's interpreter."""

DTYPES = (torch.float32,)
"""Types of the states."""

NARROWEST, WIDEST = 16, 128
"""Channels of keys and values, from the width of tensor cores to the size of the registers."""

SMALLEST, LARGEST = 16, 32
"""Associations and queries of an inner batch; 64 would spill registers."""


OLDEST = (8, 0)
"""Smallest compute capability, for products in TF32 and bfloat16."""


def _supports_batch(n: int) -> bool:
    """Return whether an inner batch of n associations or queries is a tile."""
    return SMALLEST <= n <= LARGEST and n & (n - 1) == 0


def select_runner(
    A: Sequence[Tensor], output_head: OutputHead, k: Tensor, num_queries: int
) -> RecurrenceRunner | None:
    """Return the kernels' runner for ``A [P, out, in]`` and keys ``[N, P, R, D]``, or ``None``.

    ``num_queries`` is the number of queries of an inner batch.
    """
    kind = k.device.type
    if kind != "cuda" and kind not in LAUNCHERS:
        return None
    if len(A) != 2 or not (output_head.layer_norm or output_head.affine is not None):
        return None
    affine = output_head.bias.affine
    if affine is None or (output_head.target is not None and affine[0] == 0):
        return None
    W, D = A[0].shape[-2:]
    if tuple(A[1].shape[-2:]) != (D, W) or W % 16 or not NARROWEST <= D <= min(W, WIDEST):
        return None
    if k.shape[0] < 2 or not all(map(_supports_batch, (k.shape[2], num_queries))):
        return None
    if {k.dtype, A[0].dtype, A[1].dtype} not in [{dtype} for dtype in DTYPES]:
        return None
    if not is_cacheable(k):  # traced, or without data
        return None
    if kind in LAUNCHERS:
        return RecurrenceRunner(LAUNCHERS[kind])
    if find_spec("triton") is None or torch.version.hip is not None:
        return None
    if torch.cuda.get_device_capability(k.device) < OLDEST:
        return None
    return RecurrenceRunner(launch)


def launch(
    kernel: str, programs: int, arguments: Sequence[Tensor | int], constants: Mapping[str, object]
) -> None:
    """Enqueue a kernel on the device of its arguments; the first call compiles it."""
    from recollect.engines.deep.recurrence import kernels

    first, *_ = arguments
    assert isinstance(first, Tensor)
    options = {**TUNING[kernel][str(constants["PRECISION"])]}
    del options["BW"]  # BW is one of the constants
    with torch.cuda.device(first.device):
        getattr(kernels, kernel)[(programs,)](*arguments, **constants, **options)
