"""Norms of memories: layer norm with derivatives of any order, and projection onto norm outputs.

Layer normalisation uses PyTorch's kernels if they are exact. An inner gradient through a norm is
its first derivative, the outer gradient the second, and a gradient of that the third. PyTorch's
``layer_norm`` treats its scale as a constant in the third derivative. With

    c = h − mean(h),   r = (mean(c²) + ε)^(−1/2),   y = r c,   ⟨a b⟩ = mean(a ⊙ b),

the derivative J = ∂y/∂h is symmetric, J g = r (g − ⟨g⟩ − y ⟨g y⟩), and the gradient of u·(J g) is

    J u with respect to g,   −r (⟨g y⟩ J u + ⟨u y⟩ J g + ⟨g J u⟩ y) with respect to h.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional

from recollect.choices.autograd import CustomFunction

__all__ = ["NORM_EPS", "layer_norm", "layer_norm_vjp", "project_to_norm_range"]

NORM_EPS = 1e-6
MIN_SQUARED_WEIGHT = 1 / 36  # multiple of the mean of w²


def layer_norm(h: Tensor) -> Tensor:
    """Return (h − mean(h)) / √(var(h) + ε) over the last axis, with ε = 1e-6."""
    if not (torch.is_grad_enabled() and h.requires_grad):
        return functional.layer_norm(h, h.shape[-1:], eps=NORM_EPS)
    return cast(Tensor, _LayerNorm.apply(h))


def _mean(x: Tensor) -> Tensor:
    return x.mean(-1, keepdim=True)


def layer_norm_vjp(g: Tensor, h: Tensor, mean: Tensor, r: Tensor) -> Tensor:
    """Return J g by PyTorch's kernel, without a graph; ``native_layer_norm`` returns mean and r."""
    return torch.ops.aten.native_layer_norm_backward(  # type: ignore[no-any-return]
        g, h, h.shape[-1:], mean, r, None, None, [True, False, False]
    )[0]


class _LayerNorm(CustomFunction):
    @staticmethod
    def forward(ctx: Any, h: Tensor) -> Tensor:
        y, mean, r = torch.native_layer_norm(h, h.shape[-1:], None, None, NORM_EPS)
        ctx.save_for_backward(h, y, mean, r)
        return y

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Tensor:
        h, y, mean, r = ctx.saved_tensors
        if torch.is_grad_enabled():
            return cast(Tensor, _LayerNormVjp.apply(grad_outputs[0], h, y.detach(), mean, r))
        return layer_norm_vjp(grad_outputs[0], h, mean, r)


class _LayerNormVjp(CustomFunction):
    """J g as a function of g and h."""

    @staticmethod
    def forward(ctx: Any, g: Tensor, h: Tensor, y: Tensor, mean: Tensor, r: Tensor) -> Tensor:
        Jg = layer_norm_vjp(g, h, mean, r)
        ctx.save_for_backward(g, h, y, mean, r, Jg)
        return Jg

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (u,), (g, h, y, mean, r, Jg) = grad_outputs, ctx.saved_tensors
        if torch.is_grad_enabled():  # recompute all factors in the graph
            c = h - _mean(h)
            r = (_mean(c.square()) + NORM_EPS).rsqrt()
            y = c * r
            Ju = r * (u - _mean(u) - y * _mean(u * y))
            second_order = _mean(g * y) * Ju + _mean(u * y) * Jg + _mean(Ju * g) * y
            return Ju, -r * second_order, None, None, None
        Ju = layer_norm_vjp(u, h, mean, r)
        second_order = Ju * _mean(g * y)
        second_order.addcmul_(Jg, _mean(u * y)).addcmul_(y, _mean(Ju * g))
        return Ju, second_order.mul_(-r), None, None, None


def project_to_norm_range(offset: Tensor, weight: Tensor, *, centred: bool) -> Tensor:
    """Project d = ``offset`` onto outputs of a norm, w ⊙ û with mean(û²) ≤ 1 (and mean(û) = 0).

        û = s min(1, √V/‖s‖),   s_i = (x_i − μ) / (y_i + λ),   x = w ⊙ d − mean(w ⊙ d),
        λ = max(0, ‖x‖/√V − Σ y x² / Σ x²),   y = max(w², mean(w²)/36).

    d is the value minus the key and the norm's bias. For a layer norm (``centred``), û has mean 0,
    and μ gives s this mean. For an RMS norm, x = w ⊙ d and μ = 0. Without the floor of y, the
    output nearest to d has the λ ≥ 0 at which ‖s‖ = √V, or 0 if d is attainable. The λ above equals
    this λ if all w are equal, approaches it for distant d, and is smaller otherwise. Without the
    floor, a channel with a tiny w would make s so long that all other channels vanish
    (`docs/design/steps.md`).
    """
    tiny = torch.finfo(offset.dtype).tiny ** (1 / 3)  # gives roots a derivative at 0
    y = weight.square()
    y = y.clamp_min(MIN_SQUARED_WEIGHT * _mean(y) + tiny)
    x = weight * offset
    if centred:
        x = x - _mean(x)
    squares = x.square()
    size = _mean(squares) + tiny
    inverse = (y + (size.sqrt() - _mean(squares * y) / size).relu()).reciprocal()
    s = x * inverse
    if centred:
        shift = s.sum(-1, keepdim=True) / inverse.sum(-1, keepdim=True)
        s = torch.addcmul(s, inverse, shift, value=-1)
    return weight * (s * functional.threshold(_mean(s.square()), 1.0, 1.0).rsqrt())
