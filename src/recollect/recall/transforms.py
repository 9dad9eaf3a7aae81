"""Function transforms and forward-mode derivatives: unknown to backward passes written by hand."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.autograd import forward_ad

__all__ = ["refuse_transforms"]


def refuse_transforms(tensors: Iterable[object]) -> None:
    """Refuse to run inside `torch.func` transforms, or on tensors with a tangent.

    Args:
        tensors: what may carry a tangent; looked at only inside a dual level.

    Raises:
        RuntimeError: inside ``vmap``, ``grad``, ``jvp`` and their kin, or given a dual tensor.
    """
    if torch.compiler.is_compiling():
        return
    if torch._C._are_functorch_transforms_active():  # pyright: ignore[reportPrivateUsage]
        raise RuntimeError(
            "recollect does not run inside the transforms of torch.func (vmap, grad, jvp, jacrev, "
            "...): most recipes need inner gradients or backward passes that these do not know; "
            "use the batch axis B in place of vmap, and torch.autograd.grad in place of grad"
        )
    level: int = forward_ad._current_level  # pyright: ignore[reportPrivateUsage]
    if level >= 0 and any(_is_dual(x) for x in tensors):
        raise RuntimeError(
            "recollect has no forward-mode derivatives (torch.autograd.forward_ad): most recipes "
            "need inner gradients or backward passes that it does not know; use torch.autograd.grad"
        )


def _is_dual(x: object) -> bool:
    return isinstance(x, Tensor) and forward_ad.unpack_dual(x).tangent is not None
