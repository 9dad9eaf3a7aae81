"""Conjugate gradients on many symmetric positive definite systems at once."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["conjugate_gradient", "safe_divide"]


def safe_divide(x: Tensor, y: Tensor) -> Tensor:
    """Return x/y, or 0 if y is not positive."""
    positive = y > 0
    return torch.where(positive, x / torch.where(positive, y, 1.0), 0.0)


def conjugate_gradient(
    product: Callable[[Tensor], Tensor],  # x ↦ A x
    right: Tensor,  # [..., D]
    *,
    steps: int,
    tolerance: float = 0.0,
    check_every: int = 0,
) -> tuple[Tensor, Tensor, int]:
    """Run conjugate gradients on A x = right from 0, differentiable if the tolerance is 0.

    A system stops when ‖right − A x‖ ≤ tolerance ‖right‖. Every ``check_every`` steps, the loop
    reads from the device whether all have stopped.

    Returns:
        x, ‖right − A x‖² ``[..., 1]``, and the number of steps.
    """
    x, r, p = torch.zeros_like(right), right.clone(), right
    add = Tensor.addcmul_ if tolerance else Tensor.addcmul
    size = right.square().sum(-1, keepdim=True)
    goal = tolerance**2 * size
    for count in range(steps):
        if check_every and count % check_every == 0 and not bool((size > goal).any()):
            return x, size, count
        Ap = product(p)
        alpha = safe_divide(size, (p * Ap).sum(-1, keepdim=True))
        if tolerance:
            alpha = torch.where(size > goal, alpha, 0.0)
        x, r = add(x, alpha, p), add(r, alpha, Ap, value=-1)
        new_size = r.square().sum(-1, keepdim=True)
        p = torch.addcmul(r, safe_divide(new_size, size), p)
        size = new_size
    return x, size, steps
