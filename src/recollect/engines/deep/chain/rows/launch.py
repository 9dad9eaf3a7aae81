"""Selection of the chains whose elementwise operations are one launch each, and the launches."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec

import torch
from torch import Tensor

from recollect.choices.runtime import is_cacheable
from recollect.engines.deep.chain.ends.ending import Ending

__all__ = ["LAUNCHERS", "OPTIONS", "SMALLEST", "Launch", "compiles", "launch", "launcher"]

Launch = Callable[[str, int, Sequence[Tensor | int], Mapping[str, object]], None]
"""Of ``"forward"`` or ``"backward"``: its programs, its arguments, and what it is compiled for."""

LAUNCHERS: dict[str, Launch] = {}
"""Who launches, by type of device; tests put Triton's interpreter here."""

WIDEST = 1024
"""Of a row: one is held in registers at once."""

OPTIONS = {"num_warps": 4, "enable_fp_fusion": True}
"""Of Triton's compiler; the second is its default until 3.9, and stated because that changes."""

OLDEST = (8, 0)
"""Compute capability from which on the kernels were compiled."""


def launcher(A: Sequence[Tensor], ending: Ending, k: Tensor) -> Launch | None:
    """Who launches the stretches of a chain; ``None`` where they are operations of torch.

    Args:
        A: the maps, ``[P, out, in]``.
        ending: what follows them.
        k: keys, on the device.
    """
    kind = k.device.type
    if kind != "cuda" and kind not in LAUNCHERS:
        return None
    if len(A) != 2 or ending.affine is None:
        return None
    if ending.target is not None and ending.affine[0] == 0:
        return None
    wide, narrow = A[0].shape[-2:]
    if tuple(A[1].shape[-2:]) != (narrow, wide) or not narrow <= wide <= WIDEST:
        return None
    if {k.dtype, A[0].dtype, A[1].dtype} not in ({torch.float32}, {torch.float64}):
        return None
    if not is_cacheable(k):  # a compiler asks for shapes, or follows operations of torch
        return None
    if kind in LAUNCHERS:
        return LAUNCHERS[kind]
    return launch if find_spec("triton") is not None and compiles(k.device) else None


SMALLEST: Mapping[str, object] = dict.fromkeys(("W", "D", "J", "ROWS", "BW", "BD"), 1) | {
    "CURVE": "identity", "SHARE": False, "SLOPE": 1.0, "EPS": 0.0, "TINY": 0.0,
}  # fmt: skip
"""What the kernel that is tried first is compiled for: one association of two 1 × 1 maps."""


@functools.cache
def compiles(device: torch.device) -> bool:
    """Whether Triton makes kernels for a device here: it asks for a C compiler too.

    Args:
        device: of CUDA.
    """
    if torch.version.hip is not None or torch.cuda.get_device_capability(device) < OLDEST:
        return False
    x = torch.ones(1, 2, 1, 1, 1, device=device)
    one = torch.ones(1, 1, 1, 1, device=device)
    try:
        launch("forward", 1, (one, one, x, x, one, one, one, x, 0, 0, 1, 1, 1), SMALLEST)
    except Exception as error:
        warnings.warn(
            f"Triton compiles nothing for {device} ({error!r}): deep memories launch their "
            "entrywise operations one by one",
            stacklevel=2,
        )
        return False
    return True


def launch(
    kernel: str, programs: int, arguments: Sequence[Tensor | int], sizes: Mapping[str, object]
) -> None:
    """Enqueue a kernel by Triton, on the device of its arguments.

    A kernel is compiled at its first call with such sizes, and kept for the process.

    Args:
        kernel: ``"forward"`` or ``"backward"``.
        programs: how many.
        arguments: tensors and numbers in its order.
        sizes: what it is compiled for.
    """
    from recollect.engines.deep.chain.rows import kernels

    (first, *_) = arguments
    assert isinstance(first, Tensor)
    with torch.cuda.device(first.device):
        getattr(kernels, kernel)[(programs,)](*arguments, **sizes, **OPTIONS)
