"""Decoding one token inside an inner batch, from cached gradient factors of its earlier tokens.

All gradients of an inner batch are taken at W°, so h and δ of its tokens stay as they are until the
border. A step that makes one token keeps them in the state's cache: the next computes one key's
factors, the last row of the coefficients and one read. Without a cache (after a long call, another
engine, a reset) the factors of the whole open batch are made once.

The cache holds what it depends on beside the state: the recipe's hash, and the memory's parameters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from recollect.engines.deep.gradient_factors import Factors, Points, Read, factors, read
from recollect.engines.deep.segments import Layout, Memory, Method
from recollect.engines.deep.step_coefficients import Table, tables

__all__ = ["Stepped", "step"]


@dataclass(frozen=True, kw_only=True)
class Stepped:
    """Outputs ``[P, G, V]``, the memory after the token, and the cache for the next."""

    y: Tensor
    memory: Memory
    cache: dict[str, Tensor]


def step(
    method: Method,
    layout: Layout,
    memory: Memory,
    cache: Mapping[str, Tensor],
    tag: int | None,
) -> Stepped | None:
    """The last token of a layout of one batch; ``None`` where a map is applied more than once.

    Args:
        method: how the recipe runs.
        layout: the open inner batch up to this token.
        memory: at the batch's start.
        cache: of the state.
        tag: a number that tells recipes apart; without one nothing is cached.
    """
    R = layout.b + layout.c - 1
    table, *_ = tables(method.rule, method.maps, layout.steps, layout.gamma, start=0)
    closes = layout.commits[0] is True
    depends: dict[str, Tensor] = {}
    if tag is not None and (cache or not closes):
        depends = _depends(layout, tag)
    old = _held(method, layout, cache, depends, R - 1)
    here = slice(R - 1 if old else 0, R)
    keys: dict[str, Tensor] = {}
    for name, x in layout.keys.items():
        keys[name] = x[0, :, :, here]
    phi, v = keys.pop("phi"), keys.pop("v")
    raw = keys.pop("raw", phi)
    new = factors(
        method.memory,
        memory.A,
        Points(phi=phi, raw=raw, v=v, gates=keys),
        layout.params,
        method.recipe.bias,
        outer=False,
    )
    for one in new:
        if one.h.shape[1] != here.stop - here.start:
            return None
    found = [a.join(b) for a, b in zip(old, new, strict=True)] if old else new
    y = _read(method, layout, memory, table, found)
    if closes:
        return Stepped(y=y, memory=_moved(table, memory, found), cache={})
    if tag is None:
        return Stepped(y=y, memory=memory, cache={})
    B = layout.x.shape[1]
    for i, one in enumerate(found):
        depends[f"h.{i}"] = one.h.unflatten(0, (B, -1))
        depends[f"delta.{i}"] = one.delta.unflatten(0, (B, -1))
    return Stepped(y=y, memory=memory, cache=depends)


def _depends(layout: Layout, tag: int) -> dict[str, Tensor]:
    """What the factors come from beside the state, row by row."""
    B, like = layout.x.shape[1], layout.x
    made = {"recipe": torch.full((B,), tag, dtype=torch.long, device=like.device)}
    for name, x in layout.params.items():
        # A parameter may be trained in place between two calls: what is kept is its value now.
        made[f"param.{name}"] = x.detach().clone().expand(B, *x.shape)
    return made


def _held(
    method: Method,
    layout: Layout,
    cache: Mapping[str, Tensor],
    depends: Mapping[str, Tensor],
    count: int,
) -> list[Factors] | None:
    """The cached factors of the batch's earlier tokens, if they are this recipe's."""
    old: list[Factors] = []
    for i in range(len(method.maps)):
        h, delta = cache.get(f"h.{i}"), cache.get(f"delta.{i}")
        if h is None or delta is None or h.shape[2] != count or h.dtype != layout.x.dtype:
            return None
        old.append(Factors(h.flatten(0, 1), delta.flatten(0, 1)))
    for name, x in depends.items():
        if name not in cache or not torch.equal(cache[name], x):
            return None
    return old if depends else None


def _read(
    method: Method, layout: Layout, memory: Memory, table: Table, found: Sequence[Factors]
) -> Tensor:
    moments, G = memory.slots.get("momentum"), layout.G
    a, m = table.a, table.m
    a = None if a is None else a[0, :, -1:, None].expand(-1, G, -1)
    m = None if m is None else m[0, :, -1:, None].expand(-1, G, -1)
    C = table.C[0, :, -1:].expand(-1, G, -1)
    reads = [
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
        for i, one in enumerate(found)
    ]
    x = layout.x[0, :, :, -G:]
    raw = x if layout.raw is None else layout.raw[0, :, :, -G:]
    return read(method.memory, reads, x, raw, layout.params).flatten(0, 1)


def _moved(table: Table, memory: Memory, found: Sequence[Factors]) -> Memory:
    """A_n = a_n A° + m_n S° + Σ C[n, i] δ_i h_iᵀ and S_n, at the batch's end."""
    moments = memory.slots.get("momentum")
    A: list[Tensor] = []
    S: list[Tensor] = []
    for i, one in enumerate(found):
        moved = memory.A[i] if table.a is None else memory.A[i] * table.a[0, :, -1, None, None]
        if moments is not None and table.m is not None:
            moved = torch.addcmul(moved, moments[i], table.m[0, :, -1, None, None])
        A.append(torch.baddbmm(moved, (one.delta * table.C[0, :, -1, :, None]).mT, one.h))
        if moments is not None and table.s is not None and table.D is not None:
            kept = moments[i] * table.s[0, :, None, None]
            S.append(torch.baddbmm(kept, (one.delta * table.D[0, :, :, None]).mT, one.h))
    return Memory(A=A, slots={} if moments is None else {"momentum": S})
