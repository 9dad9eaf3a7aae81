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

__all__ = ["exprel", "safe_divide", "safe_log", "safe_pow", "safe_sqrt"]

SERIES_LIMIT, SERIES_TERMS = 0.125, 12
"""Largest |x| of the power series of `exprel`, and its terms: exact to 1e-19 with derivatives."""


def exprel(x: Tensor) -> Tensor:
    """Return (e^x − 1)/x, which is 1 at 0."""
    small = x.abs() < SERIES_LIMIT
    tiny = x.masked_fill(~small, 0.0)
    one = torch.ones_like(x)
    series = one
    for n in range(SERIES_TERMS, 1, -1):  # 1 + x/2 (1 + x/3 (1 + ...))
        series = torch.addcmul(one, tiny, series, value=1 / n)
    large = x.masked_fill(small, 1.0)
    return torch.where(small, series, torch.expm1(large) / large)


def safe_sqrt(x: Tensor) -> Tensor:
    """Return √x for x ≥ 0, with derivative 0 at 0."""
    zero = x == 0
    return x.masked_fill(zero, 1.0).sqrt().masked_fill(zero, 0.0)


def safe_pow(x: Tensor, exponent: float | Tensor) -> Tensor:
    """Return x to the power of an exponent for x ≥ 0: value and derivative 0 at 0."""
    zero = x == 0
    return x.masked_fill(zero, 1.0).pow(exponent).masked_fill(zero, 0.0)


def safe_log(x: Tensor) -> Tensor:
    """Return log x for x ≥ 0: −∞ with derivative 0 at 0."""
    zero = x == 0
    return x.masked_fill(zero, 1.0).log().masked_fill(zero, -torch.inf)


def safe_divide(x: Tensor | float, y: Tensor) -> Tensor:
    """Return x / y: value and derivatives 0 where y is 0."""
    zero = y == 0
    return (x / y.masked_fill(zero, 1.0)).masked_fill(zero, 0.0)
