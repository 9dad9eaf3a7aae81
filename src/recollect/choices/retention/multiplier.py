"""The multiplier that preserves a weighted sum: ζ with Σ W g(s − ζ) = c, for increasing g.

With D = Σ W g'(s − ζ), the implicit function theorem gives

    ∂ζ/∂s_i = W_i g'(s_i − ζ) / D,    ∂ζ/∂W_i = g(s_i − ζ) / D,

which are functions of W, s and ζ, so derivatives of any order follow from them. A weight of 0 stays
0 for every step and is treated as a constant.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from recollect.choices.autograd import CustomFunction, inner_leaves

__all__ = ["normalization_multiplier", "weighted"]

Increasing = Callable[[Tensor], Tensor]


def weighted(W: Tensor, g: Increasing, y: Tensor) -> Tensor:
    """Return W ⊙ g(y), with 0 at zeros of W even if g is infinite."""
    zero = W == 0
    return torch.where(zero, 0.0, W * g(torch.where(zero, -1.0, y)))


def normalization_multiplier(
    W: Tensor, step: Tensor, g: Increasing, *, unit_point: float, scale: float, dim: Sequence[int]
) -> Tensor:
    """Return ζ with Σ W g(step − ζ) = c over ``dim`` for ΣW = c, by bisection.

    W ≥ 0, g increases, and g(y*) = 1 at the unit point. The sum decreases in ζ. Every g ≥ 1 at
    min(step) − y*, and every g ≤ 1 at max(step) − y*, so the root is between them. c is the scale.
    """
    return cast(Tensor, _Root.apply(g, unit_point, scale, tuple(dim), W, step))


class _Root(CustomFunction):
    @staticmethod
    def forward(
        ctx: Any,
        g: Increasing,
        unit_point: float,
        scale: float,
        dim: tuple[int, ...],
        W: Tensor,
        step: Tensor,
    ) -> Tensor:
        low = step.amin(dim, keepdim=True) - unit_point
        high = step.amax(dim, keepdim=True) - unit_point
        # Until low and high are adjacent floating-point numbers.
        for _ in range(60 if step.dtype == torch.float64 else 32):
            middle = 0.5 * (low + high)
            above = weighted(W, g, step - middle).sum(dim, keepdim=True) > scale
            low, high = torch.where(above, middle, low), torch.where(above, high, middle)
        ctx.g, ctx.dim = g, dim
        ctx.save_for_backward(W, step, high)
        return high

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        W, step, zeta = ctx.saved_tensors
        outer = torch.is_grad_enabled()
        with torch.enable_grad():
            y = step - zeta if outer else (step - zeta).detach()
            leaves = inner_leaves((W, y), outer=outer)
            total = weighted(leaves[0], ctx.g, leaves[1]).sum()
            grad_W, grad_y = torch.autograd.grad(total, leaves, create_graph=outer)
        factor = grad_outputs[0] / grad_y.sum(ctx.dim, keepdim=True)  # grad_output / D
        return None, None, None, None, factor * grad_W, factor * grad_y
