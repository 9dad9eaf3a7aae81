"""Elementwise functions whose values and derivatives stay finite where the plain ones do not.

Each replaces the singular entries before the function and selects their limit afterwards, so every
derivative there is 0, also of a double backward pass.

Examples:
    >>> from recollect.numerics import safe_sqrt
    >>> x = torch.zeros(1, requires_grad=True)
    >>> safe_sqrt(x).backward()
    >>> x.grad
    tensor([0.])
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["safe_divide", "safe_log", "safe_pow", "safe_sqrt"]


def safe_sqrt(x: Tensor) -> Tensor:
    """Return √x for x ≥ 0, with derivative 0 at 0."""
    zero = x == 0
    return torch.where(zero, 0.0, torch.where(zero, 1.0, x).sqrt())


def safe_pow(x: Tensor, exponent: float | Tensor) -> Tensor:
    """Return x to the power of an exponent for x ≥ 0: value and derivative 0 at 0."""
    zero = x == 0
    return torch.where(zero, 0.0, torch.where(zero, 1.0, x).pow(exponent))


def safe_log(x: Tensor) -> Tensor:
    """Return log x for x ≥ 0: −∞ with derivative 0 at 0."""
    zero = x == 0
    return torch.where(zero, -torch.inf, torch.where(zero, 1.0, x).log())


def safe_divide(x: Tensor | float, y: Tensor) -> Tensor:
    """Return x / y: value and derivatives 0 where y is 0."""
    zero = y == 0
    return torch.where(zero, 0.0, x / torch.where(zero, 1.0, y))
