"""The multiplier that keeps a weighted sum: ζ with Σ W g(s − ζ) = c, for increasing g.

With D = Σ W g'(s − ζ), the implicit function theorem gives

    ∂ζ/∂s_i = W_i g'(s_i − ζ) / D,    ∂ζ/∂W_i = g(s_i − ζ) / D,

functions of W, s and ζ itself, so that derivatives of any order follow from them. A weight of 0
stays 0 whatever the step is, and counts as a constant.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from recollect.choices.gradients import HandWritten, leaves_of

__all__ = ["multiplier", "weighed"]

Increasing = Callable[[Tensor], Tensor]


def weighed(W: Tensor, g: Increasing, y: Tensor) -> Tensor:
    """W ⊙ g(y), 0 where W is: beyond its domain g is infinite there."""
    zero = W == 0
    return torch.where(zero, 0.0, W * g(torch.where(zero, -1.0, y)))


def multiplier(
    W: Tensor, step: Tensor, g: Increasing, *, one: float, scale: float, dim: Sequence[int]
) -> Tensor:
    """ζ with Σ W g(step − ζ) = c over ``dim``, where ΣW = c; by bisection.

    The sum falls in ζ; at min(step) − y* every g ≥ 1 and at max(step) − y* every g ≤ 1, so the root
    lies between.

    Args:
        one: y*, where g is 1.
        scale: c.
    """
    return cast(Tensor, _Root.apply(g, one, scale, tuple(dim), W, step))


class _Root(HandWritten):
    @staticmethod
    def forward(
        ctx: Any,
        g: Increasing,
        one: float,
        scale: float,
        dim: tuple[int, ...],
        W: Tensor,
        step: Tensor,
    ) -> Tensor:
        low, high = step.amin(dim, keepdim=True) - one, step.amax(dim, keepdim=True) - one
        # Until neighbouring numbers are left: more halvings change nothing.
        for _ in range(60 if step.dtype == torch.float64 else 32):
            middle = 0.5 * (low + high)
            above = weighed(W, g, step - middle).sum(dim, keepdim=True) > scale
            low, high = torch.where(above, middle, low), torch.where(above, high, middle)
        ctx.g, ctx.dim = g, dim
        ctx.save_for_backward(W, step, high)
        return high

    @staticmethod
    def backward(ctx: Any, *above: Tensor) -> tuple[Tensor | None, ...]:
        W, step, zeta = ctx.saved_tensors
        outer = torch.is_grad_enabled()
        with torch.enable_grad():
            rest = step - zeta if outer else (step - zeta).detach()
            places = leaves_of((W, rest), outer=outer)
            total = weighed(places[0], ctx.g, places[1]).sum()
            by_W, by_step = torch.autograd.grad(total, places, create_graph=outer)
        pull = above[0] / by_step.sum(ctx.dim, keepdim=True)
        return None, None, None, None, pull * by_W, pull * by_step
