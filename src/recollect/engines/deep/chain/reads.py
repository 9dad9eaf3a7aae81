"""Reads of a chain: each query at the weights of its token, for several inner batches at once.

    z_l = a A° x_(l−1) + m S° x_(l−1) + (C ⊙ (x_(l−1) h_(l−1)ᵀ)) δ_l,    x_l = σ(z_l)

Given the weights at every boundary, and h and δ at the keys, reads do not depend on each other.
Coefficients per token scale the narrower side of a map, as in `forward`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from recollect.engines.deep.chain.trace import ChainSpec, ForwardTrace, ReadGradients
from recollect.engines.deep.step_coefficients import Table

__all__ = [
    "QueryBatch",
    "ReadCache",
    "backward_read",
    "make_query_batch",
    "read",
    "read_differentiable",
]

Tensors = list[Tensor]


@dataclass(frozen=True, kw_only=True)
class QueryBatch:
    """Features of queries ``[N, P, rows, F]`` and their coefficients.

    Attributes:
        q: Features.
        C: Coefficients of the associations, ``[N, P, rows, R]``.
        scale: a and m, ``[N, P, rows, J]``, or ``None`` for ones.
    """

    q: Tensor
    C: Tensor
    scale: Tensor | None

    def slice_batches(self, start: int, stop: int) -> QueryBatch:
        """Return the queries of the batches from ``start`` to ``stop``."""
        batches = slice(start, stop)
        scale = None if self.scale is None else self.scale[batches]
        return QueryBatch(q=self.q[batches], C=self.C[batches], scale=scale)


def make_query_batch(table: Table, q: Tensor, *, decays_to_base: bool) -> QueryBatch:
    """Return queries with their rows of the coefficients.

    Args:
        table: Coefficients of every token.
        q: Features ``[N, P, b G, F]``.
        decays_to_base: Whether A decays towards a base.
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
    if decays_to_base:
        parts.append(1 - parts[0])
    scale = None
    if parts:  # a view if there is one part
        scale = rows(torch.stack(parts, dim=-1) if parts[1:] else parts[0].unsqueeze(-1))
    return QueryBatch(q=q, C=rows(table.C), scale=scale)


@dataclass(frozen=True, kw_only=True)
class ReadCache:
    """Tensors of one map's reads for the backward pass.

    Attributes:
        x: Inputs of the map, ``[N P, rows, in]``.
        z: Outputs of the map before, with x = σ(z), or ``None`` for the first map.
        scores: x hᵀ ``[N P, rows, R]``.
        scaled: x times a and m ``[N P, rows, J in]`` if inputs are narrower than outputs. Otherwise
            the products with A and S, ``[N P, rows, J, out]``. ``None`` without coefficients.
    """

    x: Tensor
    z: Tensor | None
    scores: Tensor
    scaled: Tensor | None


def read(
    spec: ChainSpec, trace: ForwardTrace, queries: QueryBatch
) -> tuple[Tensor, list[ReadCache]]:
    """Return outputs ``[N, P, rows, V]`` without a graph, and the caches of all maps."""
    C = _coefficients(trace, queries)
    scale = None if queries.scale is None else queries.scale.flatten(0, 1).unsqueeze(-1)
    x, preactivation, caches = queries.q.flatten(0, 1), None, []
    for i, is_transposed in enumerate(spec.transposed):
        M, h, delta = (part[i].flatten(0, 1) for part in (trace.M, trace.h, trace.delta))
        J, stack = M.shape[1], M.flatten(1, 2)
        scaled = None
        if scale is None:
            z = torch.bmm(x, stack if is_transposed else stack.mT)
        elif is_transposed:
            scaled = (x.unsqueeze(2) * scale).flatten(2)
            z = torch.bmm(scaled, stack)
        else:
            scaled = torch.bmm(x, stack.mT).unflatten(2, (J, -1))
            z = _sum_stacks(scaled * scale if spec.save_for_backward else scaled.mul_(scale))
        scores = torch.bmm(x, h.mT)
        z.baddbmm_(scores * C if spec.save_for_backward else scores.mul_(C), delta)
        if spec.save_for_backward:
            caches.append(ReadCache(x=x, z=preactivation, scores=scores, scaled=scaled))
        if i + 1 == len(spec.transposed):
            return z.unflatten(0, queries.q.shape[:2]), caches
        x, preactivation = spec.activation.forward(z), z
    raise AssertionError("a chain has a map")


def _coefficients(trace: ForwardTrace, queries: QueryBatch) -> Tensor:
    """Return C, or C′ = ρ C, ``[N P, rows, R]``."""
    C = queries.C.flatten(0, 1)
    return C if trace.rho is None else C * trace.rho.flatten(0, 1).unsqueeze(1)


def read_differentiable(
    spec: ChainSpec,
    M: Sequence[Tensor],
    h: Sequence[Tensor],
    delta: Sequence[Tensor],
    queries: QueryBatch,
) -> Tensor:
    """Return the outputs of `read` by operations that autograd follows."""
    C = queries.C.flatten(0, 1)
    scale = None if queries.scale is None else queries.scale.flatten(0, 1)[..., None, None]
    z = queries.q.flatten(0, 1)
    for i, is_transposed in enumerate(spec.transposed):
        x = spec.activation.forward(z) if i else z
        maps = M[i].flatten(0, 1) if is_transposed else M[i].flatten(0, 1).mT  # [N P, J, in, out]
        # One row per query, because coefficients differ by query.
        outputs = x.unsqueeze(1) @ maps
        outputs = outputs if scale is None else outputs * scale.squeeze(-1).transpose(1, 2)
        mask = torch.bmm(x, h[i].flatten(0, 1).mT) * C
        z = outputs.sum(1) + torch.bmm(mask, delta[i].flatten(0, 1))
    return z.unflatten(0, queries.q.shape[:2])


def backward_read(
    spec: ChainSpec,
    trace: ForwardTrace,
    queries: QueryBatch,
    caches: Sequence[ReadCache],
    grad_output: Tensor,
) -> ReadGradients:
    """Return the gradients through reads, from those of the outputs ``[N, P, rows, V]``."""
    C = _coefficients(trace, queries)
    scale = None if queries.scale is None else queries.scale.flatten(0, 1).unsqueeze(-1)
    lead = queries.q.shape[:2]
    grad_C, grad_scale = torch.zeros_like(C), None if scale is None else torch.zeros_like(scale)
    hs, deltas, lefts, rights = [], [], [], []
    z = grad_output.flatten(0, 1)
    for i in reversed(range(len(spec.transposed))):
        cache = caches[i]
        M, h, delta = (part[i].flatten(0, 1) for part in (trace.M, trace.h, trace.delta))
        J, stack = M.shape[1], M.flatten(1, 2)
        deltas.append(torch.bmm((cache.scores * C).mT, z))
        mask = torch.bmm(z, delta.mT)
        grad_C.addcmul_(mask, cache.scores)
        mask.mul_(C)
        hs.append(torch.bmm(mask.mT, cache.x))
        if spec.transposed[i]:
            parts = torch.bmm(z, stack.mT)
            lefts.append(cache.x if cache.scaled is None else cache.scaled)
            rights.append(z)
            if scale is None or grad_scale is None:
                x = parts
            else:
                parts = parts.unflatten(2, (J, -1))
                grad_scale += parts @ cache.x.unsqueeze(-1)
                x = _sum_stacks(parts.mul_(scale))
        else:
            if cache.scaled is None or scale is None or grad_scale is None:
                scaled = z
            else:
                grad_scale += cache.scaled @ z.unsqueeze(-1)
                scaled = (z.unsqueeze(2) * scale).flatten(2)
            x = torch.bmm(scaled, stack)
            lefts.append(scaled)
            rights.append(cache.x)
        x = x.baddbmm_(mask, h)
        z = x if cache.z is None else spec.activation.vjp(x, cache.z)
    if trace.rho is not None:
        grad_C.mul_(trace.rho.flatten(0, 1).unsqueeze(1))
    for factors in (hs, deltas, lefts, rights):
        factors.reverse()
    hs, deltas, lefts, rights = (
        [x.unflatten(0, lead) for x in factors] for factors in (hs, deltas, lefts, rights)
    )
    return ReadGradients(
        q=z.unflatten(0, lead),
        C=grad_C.unflatten(0, lead),
        scale=None if grad_scale is None else grad_scale.squeeze(-1).unflatten(0, lead),
        h=hs,
        delta=deltas,
        left_factors=lefts,
        right_factors=rights,
    )


def _sum_stacks(parts: Tensor) -> Tensor:
    """Return the sum over the few entries of axis 2 in new memory."""
    first, *rest = parts.unbind(2)
    if not rest:
        return first.contiguous()
    total = first + rest[0]
    for part in rest[1:]:
        total += part
    return total
