"""Cumulative products of consecutive numbers as a matrix per head: P[t, i] = x_{i+1} ⋯ x_t.

The rows follow from each other, P[t] = x_t P[t − 1] + e_t, which is exact for numbers that are
exactly 0 (a momentum may be) and needs no logarithm. Their gradient is

    ∂P/∂x_j:  x̄_j = Σ_{t ≥ j > i} P̄[t, i] P[t, j] P[j − 1, i] = Σ_i (Pᵀ P̄)[j, i] P[j − 1, i].
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from recollect.engines.common.coefficients import product_matrix

__all__ = ["flushed", "products"]


def flushed(x: Tensor) -> Tensor:
    """Numbers of no consequence as zeros: products with subnormal ones are many times slower."""
    return x.masked_fill(x.abs() < torch.finfo(x.dtype).tiny * 1e8, 0.0)


def products(x: Tensor) -> Tensor:
    """``x [..., n]`` to P ``[..., n, n]``, lower triangular with ones on the diagonal."""
    return cast("Tensor", _Products.apply(x))


SMALL = 2**17
"""Entries up to which a few large operations beat one small operation per row."""


def _rows(x: Tensor) -> Tensor:
    n = x.shape[-1]
    if x.numel() * n <= SMALL:
        return product_matrix(x)
    P = x.new_zeros(*x.shape, n)
    P.diagonal(dim1=-2, dim2=-1).fill_(1.0)
    for t in range(1, n):
        torch.mul(P[..., t - 1, :t], x[..., t, None], out=P[..., t, :t])
    return P


class _Products(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        P = flushed(_rows(x.detach()))
        ctx.save_for_backward(x, P)
        return P

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        x, P = ctx.saved_tensors
        if torch.is_grad_enabled():
            P = products(x)
        above = P.mT @ grads[0]  # [..., j, i]
        slope = (above[..., 1:, :] * P[..., :-1, :]).sum(-1)  # P is 0 from i = j on
        return torch.nn.functional.pad(slope, (1, 0))
