"""Decoding of one token inside an inner batch, from cached gradient factors of earlier tokens.

All gradients of an inner batch are taken at W°, so h and δ of its tokens are constant until the
boundary. The coefficients of a read follow a recurrence over tokens:

    D_t = θ_t D_{t−1} − η_t γ_t,  C_t = α_t C_{t−1} + D_t

They are rows over A°, S° and the associations of the batch: a token reads
A_t = Σ_i C_t[i] (A°, S°, δ_1 h_1ᵀ, …)[i], and S_t = Σ_i D_t[i] (A°, S°, δ_1 h_1ᵀ, …)[i]. The
initial rows are (1, 0) and (0, 1), and γ_t is 0 at A° and S°.

A call of one token stores factors and coefficients in the cache of the state. The next call
computes the factors of one key, one row of coefficients and one read. Without a cache (after a long
call, another engine, a reset), the factors and coefficients of the open batch are computed once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from recollect.engines.common.problem import Problem
from recollect.engines.deep.chain.forward import chain_gradient_factors
from recollect.engines.deep.gradient_factors import Factors, Points, Read, factors, read
from recollect.engines.deep.layout import DeepPlan, Layout, Memory
from recollect.engines.deep.share import scaled_by
from recollect.engines.deep.step_coefficients import Row, added, advance, row_of, tables
from recollect.engines.deep.token_cache import (
    Cache,
    cached,
    cached_factors,
    depends_on,
    joined,
    row_kept,
)
from recollect.state.state import State

__all__ = ["Stepped", "follow", "step"]


@dataclass(kw_only=True)  # not frozen: created for every decoded token
class Stepped:
    """Outputs ``[P, G, V]``, the memory after the token, and the cache for the next."""

    y: Tensor
    memory: Memory
    cache: Cache


def follow(problem: Problem, memory: Memory, params: Mapping[str, Tensor]) -> Stepped | None:
    """Decode the token after those of the cache, or the first of an inner batch.

    Return ``None`` if sequences are at different positions of their batches. Return ``None`` also
    if the cache does not fit, or if a map is applied more than once.

    Args:
        problem: problem of one token without an outer gradient.
        memory: memory at the start of the batch.
        params: parameters of the memory.
    """
    method: DeepPlan = problem.bound.plan
    cache, b, c = problem.state.cache, method.b, method.c
    place, depends, like = _place(problem.state, b), depends_on(problem), memory.A[0]
    if place is None or not depends:
        return None
    old, last = None, row_kept(cache) if place else None
    if place or c > 1:
        old = cached_factors(cache, depends, place + c - 1, like)
        if old is None or "C" not in cache:
            return None
    position = problem.positions()
    points = _points(problem, method, position)
    x = problem.phi(problem.q, "query", position).squeeze(1)
    new = _factors(method, memory, points, params)
    for one in new:
        if one.h.shape[1] != 1:
            return None
    row = _advance(problem, method, last, place, points.phi)
    rows, all_factors = joined(method, old, new)
    raw = problem.q.to(x.dtype).squeeze(1)
    y = read(method.memory, _reads(method, memory, row, all_factors), x, raw, params).flatten(0, 1)
    if place + 1 == b:
        return Stepped(y=y, memory=_moved(row, memory, all_factors), cache={})
    return Stepped(y=y, memory=memory, cache=cached(rows, row, depends))


def _place(state: State, b: int) -> int | None:
    """Return the number of tokens in every open inner batch, or ``None`` if sequences differ."""
    if state.host_position is not None:
        return state.host_position % b
    lengths = set(state.position.remainder(b).tolist())
    return lengths.pop() if len(lengths) == 1 else None


def step(problem: Problem, layout: Layout, memory: Memory) -> Stepped | None:
    """Decode the last token of a layout of one batch.

    Return ``None`` if a map is applied more than once.

    Args:
        problem: problem of one token.
        layout: open inner batch up to this token.
        memory: memory at the start of the batch.
    """
    method: DeepPlan = problem.bound.plan
    cache = problem.state.cache
    R = layout.b + layout.c - 1
    table, *_ = tables(method.rule, method.maps, layout.steps, layout.gamma, start=0)
    depends = depends_on(problem)
    old = cached_factors(cache, depends, R - 1, memory.A[0]) if depends else None
    new_rows = slice(0 if old is None else R - 1, R)
    keys: dict[str, Tensor] = {}
    for name, x in layout.keys.items():
        keys[name] = x[0, :, :, new_rows]
    phi, v = keys.pop("phi"), keys.pop("v")
    points = Points(phi=phi, raw=keys.pop("raw", phi), v=v, gates=keys)
    new = _factors(method, memory, points, layout.params)
    for one in new:
        if one.h.shape[1] != new_rows.stop - new_rows.start:
            return None
    rows, all_factors = joined(method, old, new)
    row, G = row_of(table), layout.G
    x = layout.x[0, :, :, -G:]
    raw = x if layout.raw is None else layout.raw[0, :, :, -G:]
    reads = _reads(method, memory, row, all_factors)
    y = read(method.memory, reads, x, raw, layout.params).flatten(0, 1)
    if layout.commits[0] is True:
        return Stepped(y=y, memory=_moved(row, memory, all_factors), cache={})
    if not depends:
        return Stepped(y=y, memory=memory, cache={})
    cache = cached(rows, row, depends)
    if method.rule.mean:
        # Averages need sums, which the table does not contain.
        cache.pop("C")
        cache.pop("D", None)
    return Stepped(y=y, memory=memory, cache=cache)


# -- one token ------------------------------------------------------------------------------------


def _points(problem: Problem, method: DeepPlan, position: Tensor) -> Points:
    phi = problem.phi(problem.k.unsqueeze(3), "key", position).squeeze(3)  # [B, 1, H, F]
    gates: dict[str, Tensor] = {}
    for name in method.numbers:
        x = problem.rates[name]
        gates[name] = (x.unsqueeze(-1) if x.dim() == 3 else x).transpose(1, 2)
    return Points(
        phi=phi.transpose(1, 2),
        raw=problem.k.to(phi.dtype).transpose(1, 2),
        v=problem.v.to(phi.dtype).transpose(1, 2),
        gates=gates,
    )


def _factors(
    method: DeepPlan, memory: Memory, points: Points, params: Mapping[str, Tensor]
) -> list[Factors]:
    """Return h and δ of every map, by formula for a chain and by autograd otherwise."""
    if method.chain is not None:
        return chain_gradient_factors(method.chain, memory.A, points, params)
    bias = method.recipe.bias
    slopes = factors(method.memory, memory.A, points, params, bias, outer=False)
    if method.normalizer is None:
        return slopes.factors
    rho = method.normalizer.shares(slopes, points, memory.A, params, {})
    return scaled_by(slopes.factors, rho)


def _advance(problem: Problem, method: DeepPlan, row: Row | None, place: int, phi: Tensor) -> Row:
    """Return the coefficients after this token; ``row`` is ``None`` at the start of a batch."""
    rates, rule = problem.rates, method.rule
    new, first = -_weights(problem, method, phi), place == 0  # [P, c]
    if rule.mean:
        D = new if row is None or row.D is None else added(row.D, new, first=first)
        return Row(C=pad(_tau(rates, place).unsqueeze(-1) * D, (1, 0), value=1.0), D=D)
    alpha = rates["log_decay"].exp().reshape(-1, 1) if "log_decay" in rates else None
    theta = rates["momentum"].reshape(-1, 1) if rule.slot else None
    return advance(row, new, theta, alpha, first=first)


def _tau(rates: Mapping[str, Tensor], place: int) -> Tensor:
    """Return τ of one token, the scale of the sum of a batch's steps."""  # [P]
    offset = rates["offset"]
    offset = offset[..., place] if offset.dim() == 4 else offset
    return (1 / (place + 1) + offset).clamp_min(0).flatten()


def _weights(problem: Problem, method: DeepPlan, phi: Tensor) -> Tensor:
    """Return η_t γ_t of the window's associations, oldest first."""  # [P, c]
    rates, c = problem.rates, method.c
    lr = rates.get("lr")
    if lr is not None and method.slope is not None:
        kappa = phi.square().sum(-1).transpose(1, 2)
        lr = problem.recipe.algorithm.rate(lr, kappa, method.slope)
    gamma = rates["window"].flatten(0, 2) if "window" in rates else None
    if c > 1:
        mask = torch.arange(c, device=phi.device) <= problem.state.position[:, None]
        mask = mask.repeat_interleave(phi.shape[1], dim=0).to(phi.dtype)
        gamma = (mask if gamma is None else gamma * mask).flip(-1)
    if gamma is None:
        if lr is not None:
            return lr.flatten().unsqueeze(-1)
        gamma = phi.new_ones(phi.shape[0] * phi.shape[1], 1)
    return gamma if lr is None else gamma * lr.flatten().unsqueeze(-1)


def _reads(
    method: DeepPlan, memory: Memory, row: Row, all_factors: Sequence[Factors]
) -> list[Read]:
    """Return the read of every map after a token, from the memory at the start of its batch."""
    moments = memory.slots.get("momentum")
    n = all_factors[0].h.shape[1]
    a, *rest, C = row.C.unsqueeze(1).split_with_sizes([1] * (row.C.shape[1] - n) + [n], dim=-1)
    reads: list[Read] = []
    for i, one in enumerate(all_factors):
        reads.append(
            Read(
                W=memory.A[i],
                S=None if moments is None else moments[i],
                factors=one,
                a=None if method.recipe.retention.decay is None else a,
                m=rest[0] if rest else None,
                C=C,
                inner=None,
                outer=None,
                tokens=1,
                inplace=True,
            )
        )
    return reads


def _moved(row: Row, memory: Memory, all_factors: Sequence[Factors]) -> Memory:
    """Return A_n = a_n A° + m_n S° + Σ C[n, i] δ_i h_iᵀ and S_n, at the batch's end."""
    n, moments = all_factors[0].h.shape[1], memory.slots.get("momentum")
    both = row.both
    if both is None:
        of_A = row.C.unsqueeze(1)
        both = of_A if moments is None or row.D is None else torch.stack([row.C, row.D], dim=1)
    A: list[Tensor] = []
    S: list[Tensor] = []
    a, *of_S, C = both.unsqueeze(-1).split_with_sizes([1] * (both.shape[2] - n) + [n], dim=2)
    for i, one in enumerate(all_factors):
        delta = (one.delta.unsqueeze(1) * C).unbind(1)
        end = memory.A[i] * a[:, 0]
        if moments is not None:
            end.addcmul_(moments[i], of_S[0][:, 0])
            # The coefficient of A° in S is 0.
            S.append((moments[i] * of_S[0][:, 1]).baddbmm_(delta[1].mT, one.h))
        A.append(end.baddbmm_(delta[0].mT, one.h))
    return Memory(A=A, slots={} if moments is None else {"momentum": S})
