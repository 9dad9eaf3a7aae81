"""What memories need of norms: exact derivatives of any order, and what a norm can say of a value.

Layer normalisation runs by torch's kernels where they are exact.

An inner gradient through a norm is a first derivative of it, its outer gradient a second, and a
gradient of that a third, where torch's own ``layer_norm`` takes its scale for a constant. With

    c = h − mean(h),   r = (mean(c²) + ε)^(−1/2),   y = r c,   ⟨a b⟩ = mean(a ⊙ b),

the derivative J = ∂y/∂h is symmetric, J g = r (g − ⟨g⟩ − y ⟨g y⟩), and the gradient of u·(J g) is

    J u with respect to g,   −r (⟨g y⟩ J u + ⟨u y⟩ J g + ⟨g J u⟩ y) with respect to h.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional

from recollect.choices.gradients import HandWritten

__all__ = ["NORM_EPS", "layer_norm", "layer_norm_pull", "sayable"]

NORM_EPS = 1e-6
_LEAST = 1 / 36  # of the mean of w²


def layer_norm(h: Tensor) -> Tensor:
    """(h − mean(h)) / √(var(h) + ε) over the last axis, ε = 1e-6."""
    if not (torch.is_grad_enabled() and h.requires_grad):
        return functional.layer_norm(h, h.shape[-1:], eps=NORM_EPS)
    return cast(Tensor, _LayerNorm.apply(h))


def _mean(x: Tensor) -> Tensor:
    return x.mean(-1, keepdim=True)


def layer_norm_pull(g: Tensor, h: Tensor, mean: Tensor, r: Tensor) -> Tensor:
    """J g by torch's kernel, without a graph.

    Args:
        g: shaped like ``h``. h: where J is taken.
        mean, r: of it, as ``native_layer_norm`` has them.
    """
    return torch.ops.aten.native_layer_norm_backward(  # type: ignore[no-any-return]
        g, h, h.shape[-1:], mean, r, None, None, [True, False, False]
    )[0]


class _LayerNorm(HandWritten):
    @staticmethod
    def forward(ctx: Any, h: Tensor) -> Tensor:
        y, mean, r = torch.native_layer_norm(h, h.shape[-1:], None, None, NORM_EPS)
        ctx.save_for_backward(h, y, mean, r)
        return y

    @staticmethod
    def backward(ctx: Any, *above: Tensor) -> Tensor:
        h, y, mean, r = ctx.saved_tensors
        if torch.is_grad_enabled():
            return cast(Tensor, _Slope.apply(above[0], h, y.detach(), mean, r))
        return layer_norm_pull(above[0], h, mean, r)


class _Slope(HandWritten):
    """J g as a function of g and h."""

    @staticmethod
    def forward(ctx: Any, g: Tensor, h: Tensor, y: Tensor, mean: Tensor, r: Tensor) -> Tensor:
        Jg = layer_norm_pull(g, h, mean, r)
        ctx.save_for_backward(g, h, y, mean, r, Jg)
        return Jg

    @staticmethod
    def backward(ctx: Any, *above: Tensor) -> tuple[Tensor | None, ...]:
        (u,), (g, h, y, mean, r, Jg) = above, ctx.saved_tensors
        if torch.is_grad_enabled():  # to be differentiated again: nothing is a constant
            c = h - _mean(h)
            r = (_mean(c.square()) + NORM_EPS).rsqrt()
            y = c * r
            Ju = r * (u - _mean(u) - y * _mean(u * y))
            bend = _mean(g * y) * Ju + _mean(u * y) * Jg + _mean(Ju * g) * y
            return Ju, -r * bend, None, None, None
        Ju = layer_norm_pull(u, h, mean, r)
        bend = Ju * _mean(g * y)
        bend.addcmul_(Jg, _mean(u * y)).addcmul_(y, _mean(Ju * g))
        return Ju, bend.mul_(-r), None, None, None


def sayable(away: Tensor, weight: Tensor, *, centred: bool) -> Tensor:
    """Of d = ``away`` what a norm can say: w ⊙ û with mean(û²) ≤ 1 (and mean(û) = 0).

        û = s min(1, √V/‖s‖),   s_i = (x_i − μ) / (y_i + λ),   x = w ⊙ d − mean(w ⊙ d),
        λ = max(0, ‖x‖/√V − Σ y x² / Σ x²),   y = max(w², mean(w²)/36).

    A layer norm says only û of mean 0, and μ is what gives s that mean; an RMS norm has x = w ⊙ d
    and μ = 0. But for the floor of y the nearest to d of all that can be said is this with the
    λ ≥ 0 at which ‖s‖ = √V, or 0 within reach. Ours is that λ where all w are equal, comes to it
    where d is far beyond reach, and is below it elsewhere. The floor is for channels that say next
    to nothing: one of them would make s so long that the others say nothing either
    (`docs/design/steps.md`).

    Args:
        away: the value less the key and the norm's bias, ``[..., V]``.
        weight: w of the norm, broadcast against it.
        centred: of a layer norm.
    """
    smallest = torch.finfo(away.dtype).tiny ** (1 / 3)  # a root of 0 has no derivative
    x, y = weight * away, weight.square()
    if centred:
        x = x - _mean(x)
    y = y.clamp_min(_LEAST * _mean(y) + smallest)
    squares = x.square()
    size = _mean(squares) + smallest
    inverse = (y + (size.sqrt() - _mean(y * squares) / size).clamp_min(0)).reciprocal()
    s = x * inverse
    if centred:
        s = s - inverse * (_mean(s) / _mean(inverse))
    return weight * (s / (_mean(s.square()) + smallest).sqrt().clamp_min(1.0))
