"""Low-rank factors of the gradients of a memory's linear maps, and reads through the maps.

A linear map's gradient at one association is δ hᵀ, its output's gradient times its input, so no
weight of a single token is ever built. δ comes from one backward pass of all tokens through the
memory's own program: tokens do not meet in it, so the sum of their losses has every token's δ as
its gradient, and that gradient can be differentiated again.

Layout: the program sees ``[B, H, tokens, ·]``; products run on ``[P, tokens, ·]``, P = B·H.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from recollect.choices.bias.base import Bias
from recollect.choices.memory.base import Stack
from recollect.engines.common.coefficients import absorbable
from recollect.engines.common.decayed_products import decayed_gram, decayed_mix

__all__ = [
    "Factors",
    "Points",
    "Read",
    "Slopes",
    "factors",
    "plus_product",
    "read",
    "read_at",
    "scaled",
]

Values = Mapping[str, Tensor]


@dataclass(kw_only=True)  # not frozen: made for every decoded token
class Points:
    """Associations where gradients are taken: ``[B, H, R, ·]``; the bias's numbers by name.

    ``said`` is what of v a normed memory can say, where a normalised step knows it beforehand.
    """

    phi: Tensor
    raw: Tensor
    v: Tensor
    gates: Values
    said: Tensor | None = None


@dataclass  # not frozen: made for every decoded token
class Factors:
    """One map's inputs h ``[P, R, in]`` and output gradients δ ``[P, R, out]``."""

    h: Tensor
    delta: Tensor

    def join(self, other: Factors) -> Factors:
        """The associations of both."""
        return Factors(
            torch.cat([self.h, other.h], dim=1), torch.cat([self.delta, other.delta], dim=1)
        )


@dataclass(frozen=True, kw_only=True)
class Slopes:
    """Factors of every map, and the predictions and errors ``[B, H, R, V]`` they come from."""

    factors: list[Factors]
    prediction: Tensor
    error: Tensor


def _bmm(h: Tensor, W: Tensor) -> Tensor:
    """``h [B, H, n, in]`` through ``W [P, out, in]``."""
    return torch.bmm(h.flatten(0, 1), W.mT).unflatten(0, h.shape[:2])


def factors(
    memory: Stack,
    W: Sequence[Tensor],
    points: Points,
    params: Values,
    bias: Bias,
    *,
    outer: bool,
    free: bool = False,
) -> Slopes:
    """h and δ of every map at weights ``W [P, out, in]``, and what they come from.

    Args:
        outer: whether they will be differentiated again.
        free: only the part of the error that no prediction enters.
    """
    calls: list[list[tuple[Tensor, Tensor]]] = [[] for _ in W]
    # Without an outer gradient, only what lies between the maps is recorded.
    weights = W if outer else [w.detach() for w in W]
    if not outer:
        params = {name: x.detach() for name, x in params.items()}
    with torch.enable_grad():

        def apply(index: int, h: Tensor) -> Tensor:
            z = _bmm(h, weights[index])
            if not z.requires_grad:
                z.requires_grad_()
            calls[index].append((h, z))
            return z

        prediction = memory.compute(apply, points.phi, points.raw, params)
        error = _error(bias, prediction if outer else prediction.detach(), points, free=free)
        outputs = [z for made in calls for _, z in made]
        if len(outputs) == 1 and prediction is outputs[0]:
            deltas: Sequence[Tensor] = (error,)
        else:
            deltas = torch.autograd.grad(
                prediction, outputs, error, create_graph=outer, materialize_grads=True
            )
    by_map: list[Factors] = []
    rest = iter(deltas)
    for index, made in enumerate(calls):
        own: Factors | None = None
        for h, _ in made:
            delta = next(rest)
            if not outer:
                h, delta = h.detach(), delta.detach()
            one = Factors(h.flatten(0, 1), delta.flatten(0, 1))
            own = one if own is None else own.join(one)
        if own is None:  # a map that the program leaves out has no gradient
            P, out, inp = weights[index].shape
            rows = points.phi.shape[2]
            zeros = weights[index].new_zeros
            own = Factors(zeros(P, rows, inp), zeros(P, rows, out))
        by_map.append(own)
    if not outer:
        prediction, error = prediction.detach(), error.detach()
    return Slopes(factors=by_map, prediction=prediction, error=error)


def _error(bias: Bias, prediction: Tensor, points: Points, *, free: bool) -> Tensor:
    if free:
        assert bias.affine is not None
        return (-bias.affine[1] * points.v).expand_as(prediction)
    return bias.error(prediction, points.v, points.gates)


def read_at(
    memory: Stack, W: Sequence[Tensor], x: Tensor, raw: Tensor, params: Values, each: int = 1
) -> Tensor:
    """M(W; x) for ``x [B, H, rows, F]``.

    Args:
        W: ``[P, out, in]``, or ``[P · each, out, in]``: one per token, rows in order of tokens.
    """

    def apply(index: int, h: Tensor) -> Tensor:
        rows = h.flatten(0, 1)
        if each > 1:
            rows = rows.unflatten(1, (each, -1)).flatten(0, 1)
        z = torch.bmm(rows, W[index].mT)
        return z.reshape(*h.shape[:3], -1)

    return memory.compute(apply, x, raw, params)


def scaled(x: Tensor, by: Tensor, *, own: bool) -> Tensor:
    """x ⊙ by; in place where x is ``own``: a tensor that nobody else will read."""
    return x.mul_(by) if own else x * by


def plus_product(z: Tensor, x: Tensor, y: Tensor, *, own: bool) -> Tensor:
    """z + x y over heads; in place where z is ``own``."""
    return z.baddbmm_(x, y) if own else torch.baddbmm(z, x, y)


@dataclass(kw_only=True)  # not frozen: made for every decoded token
class Read:
    """What one map's queries need: its weights, its factors and its rows of the coefficients.

    Attributes:
        a, m: ``[P, rows, 1]`` or ``None``. C: ``[P, rows, R]``.
        inner, outer: cumulated log decays per channel, ``[P, tokens, ·]``.
        own: whether intermediates may be reused, which autograd forbids.
    """

    W: Tensor
    S: Tensor | None
    factors: Factors
    a: Tensor | None
    m: Tensor | None
    C: Tensor
    inner: Tensor | None
    outer: Tensor | None
    tokens: int
    own: bool

    def __call__(self, h: Tensor) -> Tensor:
        """The map's outputs ``[B, H, rows, out]`` at inputs ``[B, H, rows, in]``."""
        return self.of(h.flatten(0, 1)).unflatten(0, h.shape[:2])

    def of(self, x: Tensor) -> Tensor:
        """The same of inputs ``[P, rows, in]``."""
        if self.inner is not None or self.outer is not None:
            return self._channels(x)
        own, W, S = self.own, self.W.mT, self.S
        # Numbers per token scale the narrower side of the product.
        if self.a is None:
            z = torch.bmm(x, W)
        elif W.shape[-2] <= W.shape[-1]:
            z = torch.bmm(x * self.a, W)
        else:
            z = scaled(torch.bmm(x, W), self.a, own=own)
        if self.m is not None and S is not None:
            if W.shape[-2] <= W.shape[-1]:
                z = plus_product(z, x * self.m, S.mT, own=own)
            else:
                moved = torch.bmm(x, S.mT)
                z = z.addcmul_(moved, self.m) if own else torch.addcmul(z, moved, self.m)
        scores = scaled(torch.bmm(x, self.factors.h.mT), self.C, own=own)
        return plus_product(z, scores, self.factors.delta, own=own)

    def _channels(self, x: Tensor) -> Tensor:
        """Under decays per channel, absorbed into x and h, and into δ and the result."""
        each = x.shape[1] // self.tokens
        now, h = x, self.factors.h
        if self.inner is not None:
            now = x * self.inner.exp().to(x.dtype).repeat_interleave(each, dim=1)
        z = torch.bmm(now if self.a is None else now * self.a, self.W.mT)
        if self.inner is None:
            scores = torch.bmm(x, h.mT)
        elif absorbable(self.inner):
            back = (-self.inner).exp().to(x.dtype)
            scores = torch.bmm(
                now, (h * back.repeat_interleave(h.shape[1] // self.tokens, dim=1)).mT
            )
        else:
            scores = decayed_gram(x, self.inner, h, self.inner, strict=False)
        scores = scores * self.C
        if self.outer is None:
            return torch.baddbmm(z, scores, self.factors.delta)
        z = z * self.outer.exp().to(x.dtype).repeat_interleave(each, dim=1)
        return z + decayed_mix(scores, self.factors.delta, self.outer)


def read(
    memory: Stack,
    reads: Sequence[Callable[[Tensor], Tensor]],
    x: Tensor,
    raw: Tensor,
    params: Values,
) -> Tensor:
    """M at every token's own weights, given how each map reads them."""
    return memory.compute(lambda index, h: reads[index](h), x, raw, params)
