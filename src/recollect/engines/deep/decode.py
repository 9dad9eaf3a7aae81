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
from recollect.recipe.recipe import Recipe

__all__ = ["Stepped", "decodes", "step"]


@dataclass(frozen=True, kw_only=True)
class Stepped:
    """Outputs ``[P, G, V]``, the memory after the token, and the cache for the next."""

    y: Tensor
    memory: Memory
    cache: dict[str, Tensor]


def decodes(method: Method) -> bool:
    """Whether reads of a recipe are one table of coefficients with numbers per head."""
    recipe, rule = method.recipe, method.rule
    decay = recipe.retention.decay
    plain = decay is None or (decay.per == "head" and decay.when == "after")
    plain &= not recipe.algorithm.per_value
    linked = recipe.retention.linked or rule.splits or rule.pairs
    # Batches of one token have nothing to keep.
    return method.way == "table" and plain and not linked and recipe.algorithm.batch > 1


def _tag(recipe: Recipe) -> int | None:
    """A number that tells recipes apart; ``None`` where a user's member has none."""
    try:
        return hash(recipe)
    except TypeError:
        return None


def step(
    method: Method, layout: Layout, memory: Memory, held: Mapping[str, Tensor]
) -> Stepped | None:
    """The last token of a layout of one batch; ``None`` where a map is applied more than once."""
    R = layout.b + layout.c - 1
    table, *_ = tables(method.rule, method.maps, layout.steps, layout.gamma, start=0)
    old = _held(method, layout, held, R - 1)
    here = slice(R - 1 if old else 0, R)
    names = [name for name in layout.keys if name not in ("raw", "phi", "v")]
    keys = {name: x[0, :, :, here] for name, x in layout.keys.items()}
    found = factors(
        method.memory,
        memory.A,
        Points(
            phi=keys["phi"],
            raw=keys.get("raw", keys["phi"]),
            v=keys["v"],
            gates={name: keys[name] for name in names},
        ),
        layout.params,
        method.recipe.bias,
        outer=False,
    )
    if any(one.h.shape[1] != here.stop - here.start for one in found):
        return None
    if old:
        found = [a.join(b) for a, b in zip(old, found, strict=True)]
    y = _read(method, layout, memory, table, found)
    if layout.commits[0] is True:
        return Stepped(y=y, memory=_moved(table, memory, found), cache={})
    B, tag = layout.x.shape[1], _tag(method.recipe)
    if tag is None:
        return Stepped(y=y, memory=memory, cache={})
    cache = {f"h.{i}": one.h.unflatten(0, (B, -1)) for i, one in enumerate(found)}
    cache |= {f"delta.{i}": one.delta.unflatten(0, (B, -1)) for i, one in enumerate(found)}
    return Stepped(y=y, memory=memory, cache={**cache, **_depends(method, layout, tag)})


def _depends(method: Method, layout: Layout, tag: int) -> dict[str, Tensor]:
    """What the factors come from beside the state, row by row."""
    B, like = layout.x.shape[1], layout.x
    tags = torch.full((B,), tag, dtype=torch.long, device=like.device)
    # A parameter may be trained in place between two calls: what is kept is its value now.
    params = {name: x.detach().clone() for name, x in layout.params.items()}
    return {"recipe": tags, **{f"param.{n}": x.expand(B, *x.shape) for n, x in params.items()}}


def _held(
    method: Method, layout: Layout, held: Mapping[str, Tensor], count: int
) -> list[Factors] | None:
    """The cached factors of the batch's earlier tokens, if they are this recipe's."""
    maps, tag = range(len(method.maps)), _tag(method.recipe)
    if tag is None or not all(f"{name}.{i}" in held for name in ("h", "delta") for i in maps):
        return None
    first = held["h.0"]
    if first.shape[2] != count or first.dtype != layout.x.dtype:
        return None
    for name, x in _depends(method, layout, tag).items():
        if name not in held or not torch.equal(held[name], x):
            return None
    return [Factors(held[f"h.{i}"].flatten(0, 1), held[f"delta.{i}"].flatten(0, 1)) for i in maps]


def _read(
    method: Method, layout: Layout, memory: Memory, table: Table, found: Sequence[Factors]
) -> Tensor:
    moments, G = memory.slots.get("momentum"), layout.G
    a, m = (None if x is None else x[0, :, -1:, None].expand(-1, G, -1) for x in (table.a, table.m))
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
