"""Decoding of one token inside an inner batch, from cached gradient factors of earlier tokens.

All gradients of an inner batch are taken at W°, so h and δ of its tokens are constant until the
boundary. The coefficients of A_t and S_t follow a recurrence over tokens:

    D_t = θ_t D_{t−1} − η_t γ_t,  C_t = α_t C_{t−1} + D_t

They are rows over A°, S° and the associations of the batch: a token reads
A_t = Σ_i C_t[i] (A°, S°, δ_1 h_1ᵀ, …)[i], and S_t = Σ_i D_t[i] (A°, S°, δ_1 h_1ᵀ, …)[i]. The
initial rows are (1, 0) and (0, 1), and γ_t is 0 at A° and S°. Without momentum, C is the only row.

A call of one token stores factors and rows in the cache of the state. The next call computes the
factors of one key, the next rows and one read. Without a cache (after a long call, another engine,
a reset), the factors and rows of the open batch are computed once. Factors are concatenated: h and
δ of the first map, then of the next.

The cache also identifies its dependencies other than the state: one entry is named after the
recipe, and others are copies of the parameters of the memory. On a device, a comparison of
parameters would synchronise with the host, so the name includes their version
(`recollect.choices.runtime.version_tag`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from recollect.choices.runtime import cached_constant, can_read_values, version_tag
from recollect.engines.common.problem import Problem, state_dtype
from recollect.engines.deep.chain.forward import chain_gradient_factors
from recollect.engines.deep.gradient_factors import (
    Factors,
    Points,
    Read,
    end_momentum,
    end_weights,
    factors,
    read,
)
from recollect.engines.deep.layout import DeepPlan, Layout, Memory
from recollect.engines.deep.share import scaled_by
from recollect.engines.deep.step_coefficients import Table, tables

__all__ = ["Stepped", "follow", "step", "unflatten_heads"]

Cache = dict[str, Tensor]


@dataclass(kw_only=True)  # not frozen: created for every decoded token
class Stepped:
    """Outputs ``[P, G, V]``, the memory if the token moved it, and the cache for the next token."""

    y: Tensor
    memory: Memory | None
    cache: Cache


def follow(problem: Problem, memory: Memory, params: Mapping[str, Tensor]) -> Stepped | None:
    """Decode the token after those of the cache, or the first of an inner batch.

    ``memory`` is the memory at the start of the batch. Return ``None`` if sequences are at
    different positions of their batches. Return ``None`` also if the cache does not fit, or if a
    map is applied more than once.
    """
    method: DeepPlan = problem.bound.plan
    place = _place(problem, method.b)
    if place is None:
        return None
    depends, old = _cached_factors(problem, place + method.c - 1, memory.A[0])
    last = problem.state.cache.get("rows") if place else None
    if not depends or (old is None and (place or method.c > 1)) or (place and last is None):
        return None
    points, queries = _inputs(problem, method)
    new_rows = _next_rows(problem, None if last is None else last.flatten(0, 1), place, points.phi)
    return _stepped(
        method,
        memory,
        params,
        points,
        old,
        rows=_averages(problem, new_rows, place) if method.rule.mean else new_rows,
        queries=queries,
        ends=place + 1 == method.b,
        cache={**depends, "rows": unflatten_heads(new_rows, problem.k.shape[0])},
    )


def step(
    problem: Problem, layout: Layout, memory: Memory, params: Mapping[str, Tensor]
) -> Stepped | None:
    """Decode the last token of a layout of one batch, from the memory at its start.

    Return ``None`` if a map is applied more than once.
    """
    method: DeepPlan = problem.bound.plan
    R, G = layout.b + layout.c - 1, layout.G
    table, *_ = tables(method.rule, method.maps, layout.steps, layout.gamma, start=0)
    depends, old = _cached_factors(problem, R - 1, memory.A[0])
    keys = {name: x[0, :, :, 0 if old is None else R - 1 :] for name, x in layout.keys.items()}
    phi, v = keys.pop("phi"), keys.pop("v")
    x = layout.x[0, :, :, -G:]
    rows = _last_rows(table)
    # Averages need sums, which the table does not contain.
    row_entry = {} if method.rule.mean else {"rows": unflatten_heads(rows, problem.k.shape[0])}
    return _stepped(
        method,
        memory,
        params,
        Points(phi=phi, raw=keys.pop("raw", phi), v=v, gates=keys),
        old,
        rows=rows,
        queries=(x, x if layout.raw is None else layout.raw[0, :, :, -G:]),
        ends=layout.commits[0] is True,
        cache={**depends, **row_entry} if depends else {},
    )


def _stepped(
    method: DeepPlan,
    memory: Memory,
    params: Mapping[str, Tensor],
    points: Points,
    old: Tensor | None,  # factors of earlier associations, [P, n, ·]
    *,
    rows: Tensor,  # [P, J, ·]
    queries: tuple[Tensor, Tensor],  # features and raw, [B, H, G, ·]
    ends: bool,
    cache: Cache,
) -> Stepped | None:
    """Return the read after the new associations, and the memory if the batch ends."""
    new = _factors(method, memory, points, params)
    for one in new:
        if one.h.shape[1] != points.phi.shape[2]:
            return None
    joined = torch.cat([x for one in new for x in (one.h, one.delta)], dim=-1)
    joined = joined if old is None else torch.cat([old, joined], dim=1)
    parts = joined.split_with_sizes(method.widths, dim=-1)
    all_factors = [Factors(parts[i], parts[i + 1]) for i in range(0, len(parts), 2)]
    table = _table(method, rows, joined.shape[1])
    S = memory.slots.get("momentum")
    reads: list[Read] = []
    for i, one in enumerate(all_factors):
        s = None if S is None else S[i]
        reads.append(Read(W=memory.A[i], S=s, factors=one, table=table, tokens=1, inplace=True))
    y = read(method.memory, reads, *queries, params).flatten(0, 1)
    if ends:
        return Stepped(y=y, memory=_end(table, memory, all_factors), cache={})
    if cache:
        cache["factors"] = unflatten_heads(joined, points.phi.shape[0])
    return Stepped(y=y, memory=None, cache=cache)


def unflatten_heads(x: Tensor, B: int) -> Tensor:
    """Reshape ``[B·H, ...]`` to ``[B, H, ...]``."""
    return x.reshape(B, x.shape[0] // B, *x.shape[1:])  # faster than `unflatten`


def _place(problem: Problem, b: int) -> int | None:
    """Return the number of tokens in every open inner batch, or ``None`` if sequences differ."""
    state = problem.state
    if state.host_position is not None:
        return state.host_position % b
    lengths = set(state.position.remainder(b).tolist())
    return lengths.pop() if len(lengths) == 1 else None


def _inputs(problem: Problem, method: DeepPlan) -> tuple[Points, tuple[Tensor, Tensor]]:
    """Return the new association, and the features and the raw queries ``[B, H, G, ·]``."""
    dtype = state_dtype(problem.q, problem.k, problem.v)
    raw, queries = problem.k.to(dtype), problem.q.to(dtype)  # [B, 1, H, K] and [B, 1, H, G, K]
    phi, x = raw, queries
    if problem.bound.has_features:
        position = problem.positions()
        phi = problem.phi(raw.unsqueeze(3), "key", position).squeeze(3)
        x = problem.phi(queries, "query", position)
    gates: dict[str, Tensor] = {}
    for name in method.numbers:
        gate = problem.rates[name]
        gates[name] = (gate.unsqueeze(-1) if gate.dim() == 3 else gate).transpose(1, 2)
    v = problem.v.to(dtype)
    points = Points(
        phi=phi.transpose(1, 2), raw=raw.transpose(1, 2), v=v.transpose(1, 2), gates=gates
    )
    return points, (x.squeeze(1), queries.squeeze(1))


def _cached_factors(problem: Problem, count: int, like: Tensor) -> tuple[Cache, Tensor | None]:
    """Return the dependencies of factors other than the state, and the ``count`` cached factors.

    The dependencies are empty if they are not identifiable, and the factors ``None`` if they do
    not fit.
    """
    method: DeepPlan = problem.bound.plan
    tag, cache, params = problem.bound.fingerprint, problem.state.cache, {}
    if tag is None:
        return {}, None
    name = f"of {tag}"
    if can_read_values(problem.q):
        params = {f"param.{param}": problem.params[param] for param in method.param_names}
    elif (version := version_tag(problem.param_sources)) is not None:
        name += f" {version}"
    else:
        return {}, None
    depends, old = {name: problem.state.position}, cache.get("factors")
    fits = old is not None and old.shape[2] == count and old.dtype == like.dtype and name in cache
    for param, x in params.items():
        x = x.detach().expand(problem.q.shape[0], *x.shape)
        fits = fits and param in cache and torch.equal(cache[param], x)
        # A parameter may be trained in place between two calls, so the cache stores a copy.
        depends[param] = cache[param] if fits else x.clone()
    return depends, old.flatten(0, 1) if fits and old is not None else None


def _factors(
    method: DeepPlan, memory: Memory, points: Points, params: Mapping[str, Tensor]
) -> list[Factors]:
    """Return h and δ of every map without a graph; δ contains step scales."""
    if method.chain is not None:
        return chain_gradient_factors(method.chain, memory.A, points, params)
    recipe = method.recipe
    slopes = factors(
        method.memory,
        memory.A,
        points,
        params,
        recipe.bias,
        outer=False,
        erasure=recipe.algorithm.erasure,
    )
    if method.normalizer is None:
        return slopes.factors
    rho = method.normalizer.shares(slopes, points, memory.A, params, {})
    return scaled_by(slopes.factors, rho)


# -- rows of coefficients [P, J, ·] ----------------------------------------------------------------


def _identity(P: int, J: int) -> Tensor:
    """Return the rows before the first token of a batch."""
    return torch.eye(J).expand(P, J, J)


def _next_rows(problem: Problem, rows: Tensor | None, place: int, phi: Tensor) -> Tensor:
    """Return the rows after a token, from those before it or ``None`` at the start of a batch.

    For averages, they are the sums of the weights, without columns of A° and S°.
    """
    method: DeepPlan = problem.bound.plan
    rates, rule = problem.rates, method.rule
    new, first = -_weights(problem, method, phi), place == 0  # [P, c]
    P, c = new.shape
    if rule.mean:
        parts = [] if rows is None else [rows[:, 0]]
    else:
        if rows is None:
            J = 1 + bool(rule.slot)
            rows = cached_constant(_identity, P, J, device=new.device, dtype=new.dtype)
        alpha = rates["log_decay"].exp().reshape(P, 1) if "log_decay" in rates else None
        C, *moments = rows.unbind(1)
        if moments:
            D = moments[0] * rates["momentum"].reshape(P, 1)
            parts = [C + D if alpha is None else torch.addcmul(D, C, alpha), D]
        else:
            parts = [C if alpha is None else C * alpha]
    if first or c == 1:  # every association is new
        columns = [x for part in parts for x in (part, new)] or [new]
        return torch.cat(columns, dim=-1).view(P, max(len(parts), 1), -1)
    rows = torch.stack(parts, dim=1)
    return pad(rows, (0, 1)) + pad(new.unsqueeze(1), (rows.shape[2] + 1 - c, 0))


def _averages(problem: Problem, sums: Tensor, place: int) -> Tensor:
    """Return the rows of averages: sums ``[P, 1, n]`` times τ, and 1 for A°."""
    offset = problem.rates["offset"]
    offset = offset[..., place] if offset.dim() == 4 else offset
    tau = (1 / (place + 1) + offset).clamp_min(0).view(-1, 1, 1)
    return pad(tau * sums, (1, 0), value=1.0)


def _last_rows(table: Table) -> Tensor:
    """Return the rows after the last token of the table of one batch."""
    C = table.C[0, :, -1]
    a = torch.ones_like(C[:, :1]) if table.a is None else table.a[0, :, -1:]
    if table.m is None or table.s is None or table.D is None:
        return torch.cat([a, C], dim=-1).unsqueeze(1)
    s = table.s[0].unsqueeze(-1)
    columns = [a, table.m[0, :, -1:], C, torch.zeros_like(s), s, table.D[0]]
    return torch.cat(columns, dim=-1).view(C.shape[0], 2, -1)


def _table(method: DeepPlan, rows: Tensor, n: int) -> Table:
    """Return the table of one token (`Table.batches`) from its rows over n associations."""
    sizes = [1] * (rows.shape[2] - n) + [n]
    a, *m, C = rows[:, :1].split_with_sizes(sizes, dim=2)
    decays = method.recipe.retention.decay is not None
    table = Table(a=a if decays else None, m=m[0] if m else None, C=C)
    if rows.shape[1] > 1:  # the coefficient of A° in S is 0
        _, table.s, table.D = rows[:, 1:].split_with_sizes(sizes, dim=2)
    return table


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


def _end(table: Table, memory: Memory, all_factors: Sequence[Factors]) -> Memory:
    """Return A_n and S_n from the memory at the start of the batch."""
    A = [w.clone() for w in memory.A]
    moments = {name: [w.clone() for w in slot] for name, slot in memory.slots.items()}
    S = moments.get("momentum")
    for i, one in enumerate(all_factors):
        s = None if S is None else S[i]
        A[i] = end_weights(table, one, A[i], s, inplace=True)
        if s is not None:
            end_momentum(table, one, s, inplace=True)
    return Memory(A=A, slots=moments)
