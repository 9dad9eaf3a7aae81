"""What the host may ask of a device, and what stays there between calls.

A host that asks a GPU for a value waits until all work before it is done, and the GPU idles while
the host decides. So decisions rest on shapes and on what members declare; a value is looked at only
where nobody has to wait for it (`looks`). Constants are made once and stay where they are needed.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake  # pyright: ignore[reportUnknownVariableType]

__all__ = ["constant", "lasts", "looks"]

KEPT = 512
"""Constants that are kept at a time; more sizes than that in one process are made anew."""

_Key = tuple[Callable[..., Tensor], tuple[object, ...], torch.device, torch.dtype | None]
_made: dict[_Key, Tensor] = {}


def looks(x: Tensor) -> bool:
    """Whether numbers may be looked at, token by token.

    A GPU would have to wait at each; a compiled graph would break.
    """
    return x.device.type == "cpu" and not torch.compiler.is_compiling()


def lasts(x: Tensor) -> bool:
    """Whether a tensor may be kept for later calls: it holds numbers, and stands for no other."""
    return not (torch.compiler.is_compiling() or x.is_meta or bool(is_fake(x)))


def constant(
    make: Callable[..., Tensor],
    *sizes: object,
    device: torch.device,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """``make(*sizes)`` on a device, the same tensor each time: nothing may be written to it.

    Args:
        make: a function of a module, from sizes alone to a tensor of the default device.
        sizes: what it takes; hashable.
        device: where the constant is needed.
        dtype: of the constant; what ``make`` gives when omitted.
    """
    if torch.compiler.is_compiling():
        return make(*sizes).to(device=device, dtype=dtype)
    key = (make, sizes, device, dtype)
    if key in _made:
        return _made[key]
    # It will be used outside of modes too, and stands where it is needed whatever is being built.
    with torch.inference_mode(False), torch.device(device):
        made = make(*sizes).to(device=device, dtype=dtype)
    if lasts(made):
        if len(_made) >= KEPT:
            _made.clear()
        _made[key] = made
    return made
