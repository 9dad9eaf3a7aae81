"""Low-rank factors of the gradients of a memory's linear maps, and reads through the maps.

The gradient of a linear map at one association is δ hᵀ: the gradient of its output times its input.
No weight of a single token is ever built. δ comes from one backward pass of all tokens through the
memory's program. Tokens are independent in the program, so the gradient of the summed loss holds
every token's δ. This gradient can be differentiated again.

Layout: the program takes ``[B, H, tokens, ·]``. Products run on ``[P, tokens, ·]``, P = B·H.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from recollect.choices.bias.base import Bias
from recollect.choices.memory.base import Stack
from recollect.engines.common.coefficients import fits_float32_range
from recollect.engines.common.decayed_products import decayed_gram, decayed_matmul
from recollect.engines.deep.step_coefficients import Table

__all__ = [
    "Factors",
    "Points",
    "Read",
    "Slopes",
    "end_momentum",
    "end_weights",
    "factors",
    "plus_product",
    "read",
    "read_at",
    "repeat_calls",
    "scaled",
]

Values = Mapping[str, Tensor]


@dataclass(kw_only=True)  # not frozen: created for every decoded token
class Points:
    """Associations at which gradients are taken, ``[B, H, R, ·]``, and the bias's gates by name.

    ``representable_target`` is the closest output to v that a normed memory can produce, if a
    normalised step has computed it in advance.
    """

    phi: Tensor
    raw: Tensor
    v: Tensor
    gates: Values
    representable_target: Tensor | None = None


@dataclass  # not frozen: created for every decoded token
class Factors:
    """Inputs h ``[P, R, in]`` and output gradients δ ``[P, R, out]`` of one map."""

    h: Tensor
    delta: Tensor

    def join(self, other: Factors) -> Factors:
        """Return the factors of both sets of associations."""
        return Factors(
            torch.cat([self.h, other.h], dim=1), torch.cat([self.delta, other.delta], dim=1)
        )


@dataclass(frozen=True, kw_only=True)
class Slopes:
    """Factors of every map, with their predictions and errors ``[B, H, R, V]``."""

    factors: list[Factors]
    prediction: Tensor
    error: Tensor


def _bmm(h: Tensor, W: Tensor) -> Tensor:
    """Apply ``W [P, out, in]`` to ``h [B, H, n, in]``."""
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
    erasure: float = 0.0,
) -> Slopes:
    """Return h and δ of every map at weights ``W [P, out, in]``, with predictions and errors.

    ``outer``: the factors will be differentiated again. ``free``: only the part of the error that
    is independent of the prediction is used. ``erasure``: c of δ + c W h, which replaces δ.
    """
    calls: list[list[tuple[Tensor, Tensor]]] = [[] for _ in W]
    # Without an outer gradient, autograd records only the operations between the maps.
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
        outputs = [z for map_calls in calls for _, z in map_calls]
        if len(outputs) == 1 and prediction is outputs[0]:
            deltas: Sequence[Tensor] = (error,)
        else:
            deltas = torch.autograd.grad(
                prediction, outputs, error, create_graph=outer, materialize_grads=True
            )
    by_map: list[Factors] = []
    rest = iter(deltas)
    for index, map_calls in enumerate(calls):
        total: Factors | None = None
        for h, z in map_calls:
            delta = next(rest)
            if erasure and not free:
                delta = torch.add(delta, z, alpha=erasure)
            if not outer:
                h, delta = h.detach(), delta.detach()
            one = Factors(h.flatten(0, 1), delta.flatten(0, 1))
            total = one if total is None else total.join(one)
        if total is None:  # an unused map has no gradient
            P, out, inp = weights[index].shape
            rows = points.phi.shape[2]
            zeros = weights[index].new_zeros
            total = Factors(zeros(P, rows, inp), zeros(P, rows, out))
        by_map.append(total)
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
    """Return M(W; x) for ``x [B, H, rows, F]`` and ``W [P · each, out, in]``.

    ``each`` is the number of weights per memory: 1, or one per token with rows in their order.
    """

    def apply(index: int, h: Tensor) -> Tensor:
        rows = h.flatten(0, 1)
        if each > 1:
            rows = rows.unflatten(1, (each, -1)).flatten(0, 1)
        z = torch.bmm(rows, W[index].mT)
        return z.reshape(*h.shape[:3], -1)

    return memory.compute(apply, x, raw, params)


def scaled(x: Tensor, by: Tensor, *, inplace: bool) -> Tensor:
    """Return x ⊙ by, in place if ``inplace``."""
    return x.mul_(by) if inplace else x * by


def plus_product(z: Tensor, x: Tensor, y: Tensor, *, inplace: bool) -> Tensor:
    """Return z + x y over heads, in place if ``inplace``."""
    return z.baddbmm_(x, y) if inplace else torch.baddbmm(z, x, y)


@dataclass(kw_only=True)  # not frozen: created for every decoded token
class Read:
    """Weights, factors and coefficients of one map for the reads of queries.

    Attributes:
        table: coefficients of every read (`Table.batches`).
        tokens: tokens with equally many reads.
        inplace: whether intermediates may be overwritten. Autograd forbids this.
    """

    W: Tensor
    S: Tensor | None
    factors: Factors
    table: Table
    tokens: int
    inplace: bool

    def __call__(self, h: Tensor) -> Tensor:
        """Return the map's outputs ``[B, H, rows, out]`` at inputs ``[B, H, rows, in]``."""
        return self.of(h.flatten(0, 1)).unflatten(0, h.shape[:2])

    def of(self, x: Tensor) -> Tensor:
        """Return the map's outputs ``[P, rows, out]`` at inputs ``[P, rows, in]``."""
        table, W, S = self.table, self.W.mT, self.S
        if table.inner is not None or table.outer is not None:
            return self._channels(x)
        inplace = self.inplace
        # Coefficients per token scale the narrower side of the product.
        if table.a is None:
            z = torch.bmm(x, W)
        elif W.shape[-2] <= W.shape[-1]:
            z = torch.bmm(x * table.a, W)
        else:
            z = scaled(torch.bmm(x, W), table.a, inplace=inplace)
        if table.m is not None and S is not None:
            if W.shape[-2] <= W.shape[-1]:
                z = plus_product(z, x * table.m, S.mT, inplace=inplace)
            else:
                moved = torch.bmm(x, S.mT)
                z = z.addcmul_(moved, table.m) if inplace else torch.addcmul(z, moved, table.m)
        h, C = self.factors.h, repeat_calls(table.C, self.factors)
        return plus_product(
            z, scaled(torch.bmm(x, h.mT), C, inplace=inplace), self.factors.delta, inplace=inplace
        )

    def _channels(self, x: Tensor) -> Tensor:
        """Apply the map with decays per channel absorbed into x and h, or into δ and the result."""
        table, h, each = self.table, self.factors.h, x.shape[1] // self.tokens
        inner, outer = table.inner, table.outer
        now = x
        if inner is not None:
            now = x * inner.exp().to(x.dtype).repeat_interleave(each, dim=1)
        z = torch.bmm(now if table.a is None else now * table.a, self.W.mT)
        if inner is None:
            scores = torch.bmm(x, h.mT)
        elif fits_float32_range(inner):
            back = (-inner).exp().to(x.dtype)
            scores = torch.bmm(
                now, (h * back.repeat_interleave(h.shape[1] // self.tokens, dim=1)).mT
            )
        else:
            scores = decayed_gram(x, inner, h, inner, strict=False)
        scores = scores * repeat_calls(table.C, self.factors)
        if outer is None:
            return torch.baddbmm(z, scores, self.factors.delta)
        z = z * outer.exp().to(x.dtype).repeat_interleave(each, dim=1)
        return z + decayed_matmul(scores, self.factors.delta, outer)


def repeat_calls(C: Tensor, one: Factors) -> Tensor:
    """Repeat the coefficients ``[P, rows, R]`` for every application of a map."""
    times = one.h.shape[1] // C.shape[-1]
    return C if times == 1 else torch.cat([C] * times, dim=-1)


def end_weights(end: Table, one: Factors, A: Tensor, S: Tensor | None, *, inplace: bool) -> Tensor:
    """Return a_n A° + m_n S° + Σ C[n, i] δ_i h_iᵀ of one map; ``end`` is the last row."""
    h, delta = _weigh(one, repeat_calls(end.C, one))
    weights = A if end.a is None else scaled(A, end.a, inplace=inplace)
    if end.inner is not None:
        weights, h = _absorb(weights, h, end.inner, -1)
    if end.outer is not None:
        weights, delta = _absorb(weights, delta, end.outer, -2)
    if end.m is not None and S is not None:
        add = weights.addcmul_ if inplace else weights.addcmul
        weights = add(S, end.m)
    return plus_product(weights, delta.mT, h, inplace=inplace)


def end_momentum(end: Table, one: Factors, S: Tensor | None, *, inplace: bool) -> Tensor:
    """Return s S° + Σ D[i] δ_i h_iᵀ of one map; ``end`` is the last row."""
    assert end.D is not None
    h, delta = _weigh(one, repeat_calls(end.D, one))
    if S is None or end.s is None:
        return torch.bmm(delta.mT, h)
    return plus_product(scaled(S, end.s, inplace=inplace), delta.mT, h, inplace=inplace)


def _weigh(one: Factors, C: Tensor) -> tuple[Tensor, Tensor]:
    """Multiply the narrower of h and δ by every association's coefficient ``[P, 1, R]``."""
    h, delta = one.h, one.delta
    return (h * C.mT, delta) if h.shape[-1] <= delta.shape[-1] else (h, delta * C.mT)


def _absorb(old: Tensor, rows: Tensor, total: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Decay A° and rows ``[P, R, ·]`` to the last token, over channels ``dim`` of A."""
    end = total[:, -1:]
    decay = end.exp().to(old.dtype)
    rest = (end - total).exp().to(old.dtype)
    rest = rest.repeat_interleave(rows.shape[1] // total.shape[1], dim=1)
    return old * (decay if dim == -1 else decay.mT), rows * rest


def read(
    memory: Stack,
    reads: Sequence[Callable[[Tensor], Tensor]],
    x: Tensor,
    raw: Tensor,
    params: Values,
) -> Tensor:
    """Return the output of M at every token's weights, with one read function per map."""
    return memory.compute(lambda index, h: reads[index](h), x, raw, params)
