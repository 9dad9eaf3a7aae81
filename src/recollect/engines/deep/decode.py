"""Decoding one token inside an inner batch, from cached gradient factors of its earlier tokens.

All gradients of an inner batch are taken at W°, so h and δ of its tokens stay as they are until the
border, and the coefficients by which a read mixes them move on from token to token:

    D_t = θ_t D_{t−1} − η_t γ_t,  C_t = α_t C_{t−1} + D_t  (a row over the batch's associations)
    s_t = θ_t s_{t−1},  m_t = α_t m_{t−1} + s_t,  a_t = α_t a_{t−1}  (of S° and A°)

A step that makes one token keeps all of it in the state's cache: the next computes one key's
factors, one row of coefficients and one read. Without a cache (after a long call, another engine, a
reset) the factors and coefficients of the whole open batch are made once.

The cache holds what it depends on beside the state: the recipe's hash, and the memory's parameters.
On a device, where the host would have to wait to compare these, it holds an entry that is named for
them (`recollect.choices.devices.stamp`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from recollect.choices.devices import stamp
from recollect.engines.common.problem import Problem
from recollect.engines.deep.chain.engine import chain_slopes
from recollect.engines.deep.gradient_factors import Factors, Points, Read, factors, read
from recollect.engines.deep.layout import DeepPlan, Layout, Memory
from recollect.engines.deep.share import scaled_by
from recollect.engines.deep.step_coefficients import Table, tables
from recollect.state.state import State

__all__ = ["Stepped", "by_row", "follow", "step"]

Cache = dict[str, Tensor]


@dataclass(kw_only=True)  # not frozen: made for every decoded token
class Stepped:
    """Outputs ``[P, G, V]``, the memory after the token, and the cache for the next."""

    y: Tensor
    memory: Memory
    cache: Cache


@dataclass(kw_only=True)  # not frozen: made for every decoded token
class _Row:
    """Coefficients after one token: C and D over the batch's associations, the rest of A° and S°.

    C and D are ``[P, n]``, a, m and s ``[P]``. ``None`` is 1 for a, nothing for m and s, and for D
    what C says.
    """

    C: Tensor
    D: Tensor | None = None
    a: Tensor | None = None
    m: Tensor | None = None
    s: Tensor | None = None


_NUMBERS = ("C", "D", "a", "m", "s")


def follow(problem: Problem, memory: Memory, params: Mapping[str, Tensor]) -> Stepped | None:
    """The token after those of the cache, or the first of an inner batch.

    ``None`` where rows have come differently far, where the cache is another's or there is none,
    and where a map is applied more than once.

    Args:
        problem: of one token, for which nobody asks an outer gradient.
        memory: at the batch's start.
        params: the memory's own.
    """
    method: DeepPlan = problem.plan
    cache, b, c = problem.state.cache, method.b, method.c
    place, depends, like = _place(problem.state, b), _depends(problem), memory.A[0]
    if place is None or not depends:
        return None
    old: list[Factors] = []
    if place or c > 1:
        cached = _cached_factors(method, cache, depends, place + c - 1, like)
        if cached is None or "C" not in cache:
            return None
        old = cached
    position = problem.positions()
    points = _points(problem, method, position)
    new = _factors(method, memory, points, params)
    for one in new:
        if one.h.shape[1] != 1:
            return None
    row = _advance(problem, method, cache if old else {}, place, points.phi)
    all_factors = [first.join(last) for first, last in zip(old, new, strict=True)] if old else new
    x = problem.phi(problem.q, "query", position).squeeze(1)
    raw = problem.q.to(x.dtype).squeeze(1)
    y = _read(method, memory, row, all_factors, x, raw, params)
    if place + 1 == b:
        return Stepped(y=y, memory=_moved(row, memory, all_factors), cache={})
    return Stepped(y=y, memory=memory, cache=_cached(all_factors, row, depends))


def _place(state: State, b: int) -> int | None:
    """How many tokens the open inner batch of every row holds, if it is as many."""
    if state.seen is not None:
        return state.seen % b
    places = set(state.position.remainder(b).tolist())
    return places.pop() if len(places) == 1 else None


def step(problem: Problem, layout: Layout, memory: Memory) -> Stepped | None:
    """The last token of a layout of one batch; ``None`` where a map is applied more than once.

    Args:
        problem: of one token.
        layout: the open inner batch up to this token.
        memory: at the batch's start.
    """
    method: DeepPlan = problem.plan
    cache = problem.state.cache
    R = layout.b + layout.c - 1
    table, *_ = tables(method.rule, method.maps, layout.steps, layout.gamma, start=0)
    depends = _depends(problem)
    old = _cached_factors(method, cache, depends, R - 1, memory.A[0]) if depends else None
    here = slice(R - 1 if old else 0, R)
    keys: dict[str, Tensor] = {}
    for name, x in layout.keys.items():
        keys[name] = x[0, :, :, here]
    phi, v = keys.pop("phi"), keys.pop("v")
    points = Points(phi=phi, raw=keys.pop("raw", phi), v=v, gates=keys)
    new = _factors(method, memory, points, layout.params)
    for one in new:
        if one.h.shape[1] != here.stop - here.start:
            return None
    all_factors = [first.join(last) for first, last in zip(old, new, strict=True)] if old else new
    row, G = _row_of(table), layout.G
    x = layout.x[0, :, :, -G:]
    raw = x if layout.raw is None else layout.raw[0, :, :, -G:]
    y = _read(method, memory, row, all_factors, x, raw, layout.params)
    if layout.commits[0] is True:
        return Stepped(y=y, memory=_moved(row, memory, all_factors), cache={})
    if not depends:
        return Stepped(y=y, memory=memory, cache={})
    cache = _cached(all_factors, row, depends)
    if method.rule.mean:
        # Averages are made of plain sums, which the table does not hold.
        for name in _NUMBERS:
            cache.pop(name, None)
    return Stepped(y=y, memory=memory, cache=cache)


# -- the cache ------------------------------------------------------------------------------------


def _depends(problem: Problem) -> Cache:
    """What the factors come from beside the state, row by row; nothing where that has no name."""
    method: DeepPlan = problem.plan
    if problem.sized.tag is None:
        return {}
    B = problem.q.shape[0]
    if problem.q.device.type != "cpu":
        name = stamp(problem.sources)
        # Whatever has the right rows: its name says it all.
        return {} if name is None else {f"of {problem.sized.tag} {name}": problem.state.position}
    tags = problem.state.position.new_full((B,), problem.sized.tag)
    made = {"recipe": tags}
    for name in (*method.params, *method.lifts):
        x = problem.params[name]
        # A parameter may be trained in place between two calls: what is kept is its value now.
        made[f"param.{name}"] = x.detach().clone().expand(B, *x.shape)
    return made


def _cached_factors(
    method: DeepPlan,
    cache: Mapping[str, Tensor],
    depends: Mapping[str, Tensor],
    count: int,
    like: Tensor,
) -> list[Factors] | None:
    """The cached factors of the batch's earlier tokens, if they are this recipe's."""
    old: list[Factors] = []
    for i in range(len(method.maps)):
        h, delta = cache.get(f"h.{i}"), cache.get(f"delta.{i}")
        if h is None or delta is None or h.shape[2] != count or h.dtype != like.dtype:
            return None
        old.append(Factors(h.flatten(0, 1), delta.flatten(0, 1)))
    for name, x in depends.items():
        if name not in cache or (x.device.type == "cpu" and not torch.equal(cache[name], x)):
            return None
    return old


def _cached(all_factors: Sequence[Factors], row: _Row, depends: Cache) -> Cache:
    entries = dict(depends)
    B = next(iter(entries.values())).shape[0]
    for i, one in enumerate(all_factors):
        entries[f"h.{i}"] = by_row(one.h, B)
        entries[f"delta.{i}"] = by_row(one.delta, B)
    for name, x in (("C", row.C), ("D", row.D), ("a", row.a), ("m", row.m), ("s", row.s)):
        if x is not None:
            entries[name] = by_row(x, B)
    return entries


def by_row(x: Tensor, B: int) -> Tensor:
    """``[B·H, ...]`` to ``[B, H, ...]``."""
    return x.reshape(B, x.shape[0] // B, *x.shape[1:])  # a third of the time of `unflatten`


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
    """h and δ of every map; by formula where the memory is a chain, else by autograd."""
    if method.chain is not None:
        return chain_slopes(method.chain, memory.A, points)
    bias = method.recipe.bias
    slopes = factors(method.memory, memory.A, points, params, bias, outer=False)
    if method.normalizer is None:
        return slopes.factors
    rho = method.normalizer.shares(slopes, points, memory.A, {})
    return scaled_by(slopes.factors, rho)


def _advance(
    problem: Problem, method: DeepPlan, cache: Mapping[str, Tensor], place: int, phi: Tensor
) -> _Row:
    """The coefficients after this token from those before it; none before a batch's first."""
    rates, rule = problem.rates, method.rule
    C, D, a, m, s = [None if (x := cache.get(n)) is None else x.flatten(0, 1) for n in _NUMBERS]
    new = -_weights(problem, method, phi)  # [P, c]
    theta = rates["momentum"].flatten() if rule.slot else None
    alpha = rates["log_decay"].exp().flatten() if "log_decay" in rates else None
    if rule.mean:
        offset = rates["offset"]
        offset = offset[..., place] if offset.dim() == 4 else offset
        tau = (1 / (place + 1) + offset).clamp_min(0).flatten()
        D = _added(D, new)
        return _Row(C=tau.unsqueeze(-1) * D, D=D)
    C = C if C is None or alpha is None else C * alpha.unsqueeze(-1)
    a = alpha if a is None or alpha is None else a * alpha
    if theta is None:
        return _Row(C=_added(C, new), a=a)
    s = theta if s is None else s * theta
    D = _added(None if D is None else D * theta.unsqueeze(-1), new)
    C = D if C is None else pad(C, (0, 1)) + D
    if m is None:
        m = s
    else:
        m = s + m if alpha is None else torch.addcmul(s, m, alpha)
    return _Row(C=C, D=D, a=a, m=m, s=s)


def _weights(problem: Problem, method: DeepPlan, phi: Tensor) -> Tensor:
    """η_t γ_t of the window's associations, oldest first, ``[P, c]``."""
    rates, c = problem.rates, method.c
    lr = rates.get("lr")
    if lr is not None and method.slope is not None:
        kappa = phi.square().sum(-1).transpose(1, 2)
        lr = problem.recipe.algorithm.rate(lr, kappa, method.slope)
    gamma = rates["window"].flatten(0, 2) if "window" in rates else None
    if c > 1:
        there = torch.arange(c, device=phi.device) <= problem.state.position[:, None]
        there = there.repeat_interleave(phi.shape[1], dim=0).to(phi.dtype)
        gamma = (there if gamma is None else gamma * there).flip(-1)
    if gamma is None:
        if lr is not None:
            return lr.flatten().unsqueeze(-1)
        gamma = phi.new_ones(phi.shape[0] * phi.shape[1], 1)
    return gamma if lr is None else gamma * lr.flatten().unsqueeze(-1)


def _added(row: Tensor | None, new: Tensor) -> Tensor:
    """A row over the associations before, and the weights of the last c of those now."""
    if row is None:
        return new
    if new.shape[-1] == 1:
        return torch.cat([row, new], dim=-1)
    return pad(row, (0, 1)) + pad(new, (row.shape[-1] + 1 - new.shape[-1], 0))


def _row_of(table: Table) -> _Row:
    """The last token's coefficients."""
    return _Row(
        C=table.C[0, :, -1],
        D=None if table.D is None else table.D[0],
        a=None if table.a is None else table.a[0, :, -1],
        m=None if table.m is None else table.m[0, :, -1],
        s=None if table.s is None else table.s[0],
    )


def _read(
    method: DeepPlan,
    memory: Memory,
    row: _Row,
    all_factors: Sequence[Factors],
    x: Tensor,
    raw: Tensor,
    params: Mapping[str, Tensor],
) -> Tensor:
    """Outputs ``[P, G, V]`` of queries ``[B, H, G, ·]``."""
    moments = memory.slots.get("momentum")
    a = None if row.a is None else row.a[:, None, None]
    m = None if row.m is None else row.m[:, None, None]
    C = row.C.unsqueeze(1)
    reads: list[Read] = []
    for i, one in enumerate(all_factors):
        reads.append(
            Read(
                W=memory.A[i],
                S=None if moments is None else moments[i],
                factors=one,
                a=a,
                m=m,
                C=C,
                inner=None,
                outer=None,
                tokens=1,
                own=True,
            )
        )
    return read(method.memory, reads, x, raw, params).flatten(0, 1)


def _moved(row: _Row, memory: Memory, all_factors: Sequence[Factors]) -> Memory:
    """A_n = a_n A° + m_n S° + Σ C[n, i] δ_i h_iᵀ and S_n, at the batch's end."""
    moments = memory.slots.get("momentum")
    A: list[Tensor] = []
    S: list[Tensor] = []
    for i, one in enumerate(all_factors):
        moved = memory.A[i] if row.a is None else memory.A[i] * row.a[:, None, None]
        if moments is not None and row.m is not None:
            moved = torch.addcmul(moved, moments[i], row.m[:, None, None])
        A.append(torch.baddbmm(moved, (one.delta * row.C.unsqueeze(-1)).mT, one.h))
        if moments is not None and row.s is not None and row.D is not None:
            decayed = moments[i] * row.s[:, None, None]
            S.append(torch.baddbmm(decayed, (one.delta * row.D.unsqueeze(-1)).mT, one.h))
    return Memory(A=A, slots={} if moments is None else {"momentum": S})
