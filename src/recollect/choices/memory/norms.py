"""What memories need of norms: exact derivatives of any order, and what a norm can say of a value.

Layer normalisation runs by torch's kernels where they are exact.

An inner gradient through a norm is a first derivative of it, its outer gradient a second, and a
gradient of that a third, where torch's own ``layer_norm`` takes its scale for a constant. With

    c = h − mean(h),   r = (mean(c²) + ε)^(−1/2),   y = r c,   ⟨a b⟩ = mean(a ⊙ b),

the derivative J = ∂y/∂h is symmetric, J g = r (g − ⟨g⟩ − y ⟨g y⟩), and the gradient of u·(J g) is

    J u with respect to g,   −r (⟨g y⟩ J u + ⟨u y⟩ J g + ⟨g J u⟩ y) with respect to h.
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.nn import functional

from recollect.choices.gradients import HandWritten, again

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
    y = weight.square()
    y = y.clamp_min(_LEAST * _mean(y) + _smallest(away))
    return cast(Tensor, _Sayable.apply(away, weight, y, centred))


def _smallest(x: Tensor) -> float:
    """Beside a square, so that a root of 0 has a derivative."""
    return float(torch.finfo(x.dtype).tiny ** (1 / 3))


class _Solved(NamedTuple):
    """What `sayable` is made of: û = s / n, and n = max(√mean(s²), 1)."""

    x: Tensor
    inverse: Tensor  # of y + λ
    s: Tensor
    size: Tensor  # mean(x²)
    moment: Tensor  # mean(y x²)
    n: Tensor


def _solved(d: Tensor, w: Tensor, y: Tensor, *, centred: bool, own: bool) -> _Solved:
    """By operations that autograd follows, or ``own`` ones that write over what they made."""
    least = _smallest(d)
    x = w * d
    if centred:
        x = x.sub_(_mean(x)) if own else x - _mean(x)
    squares = x.square()
    size = _mean(squares) + least
    moment = _mean(squares.mul_(y) if own else squares * y)
    below = y + (size.sqrt() - moment / size).clamp_min(0)
    inverse = below.reciprocal_() if own else below.reciprocal()
    s = x * inverse
    if centred:
        move = s.addcmul_ if own else s.addcmul
        s = move(inverse, _mean(s) / _mean(inverse), value=-1)
    n = (_mean(torch.mul(s, s, out=squares) if own else s.square()) + least).sqrt().clamp_min(1.0)
    return _Solved(x, inverse, s, size, moment, n)


class _Sayable(HandWritten):
    """w ⊙ s / n as a function of d, w and the floored y.

    With g the gradient of s, t = g − mean(g / (y + λ)) / mean(1 / (y + λ)) where means are taken
    off, that of x is t / (y + λ), and that of y + λ is −t s / (y + λ).
    """

    @staticmethod
    def forward(ctx: Any, d: Tensor, w: Tensor, y: Tensor, centred: bool) -> Tensor:
        found = _solved(d, w, y, centred=centred, own=True)
        ctx.centred = centred
        ctx.save_for_backward(d, w, y, *found)
        return (found.s / found.n).mul_(w)

    @staticmethod
    def backward(ctx: Any, *above: Tensor) -> tuple[Tensor | None, ...]:
        d, w, y, *kept = ctx.saved_tensors
        if torch.is_grad_enabled():

            def said(given: list[Tensor]) -> list[Tensor]:
                d, w, y = given
                found = _solved(d, w, y, centred=ctx.centred, own=False)
                return [w * (found.s / found.n)]

            return *again(said, (d, w, y), ctx.needs_input_grad[:3], above), None
        found = _Solved(*kept)
        g, s, V = above[0] / found.n, found.s, d.shape[-1]
        of_w = g * s
        # n moves where it is not 1.
        along = _mean(w * of_w).where(found.n > 1, 0.0)
        t = torch.addcmul(w * g, s, along / found.n.square(), value=-1)
        if ctx.centred:
            t = t - _mean(t * found.inverse) / _mean(found.inverse)
        of_x = t * found.inverse
        of_y = (of_x * s).neg_()
        far, size = found.size.sqrt(), found.size
        of_far = of_y.sum(-1, keepdim=True).where(size * far > found.moment, 0.0)
        of_size = of_far * (0.5 / far + found.moment / size.square())
        of_moment = -of_far / size
        of_y.addcmul_(found.x.square(), of_moment / V)
        of_x.addcmul_(found.x, (y * of_moment).add_(of_size).mul_(2 / V))
        if ctx.centred:
            of_x.sub_(_mean(of_x))
        of_w.addcmul_(of_x, d)
        gradients = zip((of_x.mul_(w), of_w, of_y), (d, w, y), strict=True)
        return *(x.sum_to_size(like.shape) for x, like in gradients), None
