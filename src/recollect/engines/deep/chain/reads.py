"""Reads of a chain: each query at its own token's weights, several inner batches at once.

    z_l = a A° x_(l−1) + m S° x_(l−1) + (C ⊙ (x_(l−1) h_(l−1)ᵀ)) δ_l,    x_l = σ(z_l)

Once the weights at every border and h and δ at the keys are known, no read waits for another.
Numbers per token scale the narrower side of a map, as in `forward`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from recollect.engines.deep.chain.trace import ChainSpec, ForwardTrace, ReadGradients
from recollect.engines.deep.step_coefficients import Table

__all__ = ["QueryBatch", "ReadCache", "backward_read", "query_batch", "read", "read_by_autograd"]

Tensors = list[Tensor]


@dataclass(frozen=True, kw_only=True)
class QueryBatch:
    """Queries' features ``[N, P, rows, F]`` and their coefficients.

    Attributes:
        C: ``[N, P, rows, R]``. scale: a and m, ``[N, P, rows, J]``, or ``None`` for ones.
    """

    q: Tensor
    C: Tensor
    scale: Tensor | None

    def cut(self, start: int, stop: int) -> QueryBatch:
        """Some of the batches."""
        here = slice(start, stop)
        scale = None if self.scale is None else self.scale[here]
        return QueryBatch(q=self.q[here], C=self.C[here], scale=scale)


def query_batch(table: Table, q: Tensor, *, pulled: bool) -> QueryBatch:
    """Queries and their rows of the coefficients.

    Args:
        table: of the coefficients of every token.
        q: features ``[N, P, b G, F]``.
        pulled: whether A forgets towards a base.
    """
    G = q.shape[2] // table.C.shape[2]

    def rows(x: Tensor) -> Tensor:
        return x if G == 1 else x.repeat_interleave(G, dim=2)

    parts: list[Tensor] = []
    if table.a is not None:
        parts = [table.a]
    elif table.m is not None:
        parts = [torch.ones_like(table.m)]
    if table.m is not None:
        parts.append(table.m)
    if pulled:
        parts.append(1 - parts[0])
    scale = None
    if parts:  # of one, a view
        scale = rows(torch.stack(parts, dim=-1) if parts[1:] else parts[0].unsqueeze(-1))
    return QueryBatch(q=q, C=rows(table.C), scale=scale)


@dataclass(frozen=True, kw_only=True)
class ReadCache:
    """What the backward pass needs of one map's reads.

    Attributes:
        x: its inputs ``[N P, rows, in]``.
        z: outputs of the map before, of which x is σ; ``None`` for the first map.
        scores: x hᵀ ``[N P, rows, R]``.
        scaled: x times a and m ``[N P, rows, J in]`` where inputs are narrower; else what A and S
            gave, ``[N P, rows, J, out]``; ``None`` without coefficients.
    """

    x: Tensor
    z: Tensor | None
    scores: Tensor
    scaled: Tensor | None


def read(
    spec: ChainSpec, trace: ForwardTrace, queries: QueryBatch
) -> tuple[Tensor, list[ReadCache]]:
    """Outputs ``[N, P, rows, V]`` without a graph, and what was seen if that will be needed."""
    C = _coefficients(trace, queries)
    scale = None if queries.scale is None else queries.scale.flatten(0, 1).unsqueeze(-1)
    x, preactivation, caches = queries.q.flatten(0, 1), None, []
    for i, up in enumerate(spec.tall):
        M, h, delta = (part[i].flatten(0, 1) for part in (trace.M, trace.h, trace.delta))
        J, stack = M.shape[1], M.flatten(1, 2)
        scaled = None
        if scale is None:
            z = torch.bmm(x, stack if up else stack.mT)
        elif up:
            scaled = (x.unsqueeze(2) * scale).flatten(2)
            z = torch.bmm(scaled, stack)
        else:
            scaled = torch.bmm(x, stack.mT).unflatten(2, (J, -1))
            z = _total(scaled * scale if spec.keep else scaled.mul_(scale))
        scores = torch.bmm(x, h.mT)
        z.baddbmm_(scores * C if spec.keep else scores.mul_(C), delta)
        if spec.keep:
            caches.append(ReadCache(x=x, z=preactivation, scores=scores, scaled=scaled))
        if i + 1 == len(spec.tall):
            return z.unflatten(0, queries.q.shape[:2]), caches
        x, preactivation = spec.curve.value(z), z
    raise AssertionError("a chain has a map")


def _coefficients(trace: ForwardTrace, queries: QueryBatch) -> Tensor:
    """C, or C′ = ρ C, ``[N P, rows, R]``."""
    C = queries.C.flatten(0, 1)
    return C if trace.rho is None else C * trace.rho.flatten(0, 1).unsqueeze(1)


def read_by_autograd(
    spec: ChainSpec,
    M: Sequence[Tensor],
    h: Sequence[Tensor],
    delta: Sequence[Tensor],
    queries: QueryBatch,
) -> Tensor:
    """The same by operations that autograd follows."""
    C = queries.C.flatten(0, 1)
    scale = None if queries.scale is None else queries.scale.flatten(0, 1)[..., None, None]
    z = queries.q.flatten(0, 1)
    for i, up in enumerate(spec.tall):
        x = spec.curve.value(z) if i else z
        maps = M[i].flatten(0, 1) if up else M[i].flatten(0, 1).mT  # [N P, J, in, out]
        # One row per query, so that each has coefficients of its own.
        each = x.unsqueeze(1) @ maps
        each = each if scale is None else each * scale.squeeze(-1).transpose(1, 2)
        mask = torch.bmm(x, h[i].flatten(0, 1).mT) * C
        z = each.sum(1) + torch.bmm(mask, delta[i].flatten(0, 1))
    return z.unflatten(0, queries.q.shape[:2])


def backward_read(
    spec: ChainSpec,
    trace: ForwardTrace,
    queries: QueryBatch,
    caches: Sequence[ReadCache],
    up: Tensor,
) -> ReadGradients:
    """From the outputs' gradient ``[N, P, rows, V]``."""
    C = _coefficients(trace, queries)
    scale = None if queries.scale is None else queries.scale.flatten(0, 1).unsqueeze(-1)
    lead = queries.q.shape[:2]
    to_C, to_scale = torch.zeros_like(C), None if scale is None else torch.zeros_like(scale)
    hs, deltas, left, right = [], [], [], []
    z = up.flatten(0, 1)
    for i in reversed(range(len(spec.tall))):
        cache = caches[i]
        M, h, delta = (part[i].flatten(0, 1) for part in (trace.M, trace.h, trace.delta))
        J, stack = M.shape[1], M.flatten(1, 2)
        deltas.append(torch.bmm((cache.scores * C).mT, z))
        mask = torch.bmm(z, delta.mT)
        to_C.addcmul_(mask, cache.scores)
        mask.mul_(C)
        hs.append(torch.bmm(mask.mT, cache.x))
        if spec.tall[i]:
            parts = torch.bmm(z, stack.mT)
            left.append(cache.x if cache.scaled is None else cache.scaled)
            right.append(z)
            if scale is None or to_scale is None:
                x = parts
            else:
                parts = parts.unflatten(2, (J, -1))
                to_scale += parts @ cache.x.unsqueeze(-1)
                x = _total(parts.mul_(scale))
        else:
            if cache.scaled is None or scale is None or to_scale is None:
                spread = z
            else:
                to_scale += cache.scaled @ z.unsqueeze(-1)
                spread = (z.unsqueeze(2) * scale).flatten(2)
            x = torch.bmm(spread, stack)
            left.append(spread)
            right.append(cache.x)
        x = x.baddbmm_(mask, h)
        z = x if cache.z is None else spec.curve.pull(x, cache.z)
    if trace.rho is not None:
        to_C.mul_(trace.rho.flatten(0, 1).unsqueeze(1))
    for factors in (hs, deltas, left, right):
        factors.reverse()
    hs, deltas, left, right = (
        [x.unflatten(0, lead) for x in factors] for factors in (hs, deltas, left, right)
    )
    return ReadGradients(
        q=z.unflatten(0, lead),
        C=to_C.unflatten(0, lead),
        scale=None if to_scale is None else to_scale.squeeze(-1).unflatten(0, lead),
        h=hs,
        delta=deltas,
        left=left,
        right=right,
    )


def _total(parts: Tensor) -> Tensor:
    """Σ over axis 2, of a few; the result may be written to."""
    first, *rest = parts.unbind(2)
    if not rest:
        return first.contiguous()
    total = first + rest[0]
    for one in rest[1:]:
        total += one
    return total
