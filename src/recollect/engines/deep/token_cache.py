"""Cache of gradient factors and coefficients between the tokens of an inner batch.

The factors of a token are concatenated: h and δ of the first map, then of the next. One tensor
grows by one row per token, and a read splits it by map. The cache also identifies its dependencies
other than the state: one entry is named after the recipe, and others hold the parameters of the
memory. On a device, a comparison of parameters would synchronise with the host, so the name
includes their version (`recollect.choices.runtime.version_tag`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from recollect.choices.runtime import can_read_values, version_tag
from recollect.engines.common.problem import Problem
from recollect.engines.deep.gradient_factors import Factors
from recollect.engines.deep.layout import DeepPlan
from recollect.engines.deep.step_coefficients import Row

__all__ = [
    "Cache",
    "by_row",
    "cached",
    "cached_factors",
    "depends_on",
    "joined",
    "row_kept",
]

Cache = dict[str, Tensor]


def _mark(tag: int, params: str = "") -> str:
    """Return the name of the entry that identifies the recipe and its parameters' version."""
    return f"of {tag} {params}"


def depends_on(problem: Problem) -> Cache:
    """Return the dependencies of the factors other than the state; empty if not identifiable."""
    method: DeepPlan = problem.bound.plan
    tag, position = problem.bound.fingerprint, problem.state.position
    if tag is None:
        return {}
    if not can_read_values(problem.q):
        name = version_tag(problem.param_sources)
        return {} if name is None else {_mark(tag, name): position}
    entries = {_mark(tag): position}
    for name in (*method.params, *method.lifts):
        x = problem.params[name]
        # A parameter may be trained in place between two calls, so the cache stores a copy.
        entries[f"param.{name}"] = x.detach().clone().expand(problem.q.shape[0], *x.shape)
    return entries


def cached_factors(
    cache: Mapping[str, Tensor], depends: Mapping[str, Tensor], count: int, like: Tensor
) -> Tensor | None:
    """Return the cached factors of the batch's earlier tokens, or ``None`` if they do not fit."""
    old = cache.get("factors")
    if old is None or old.shape[2] != count or old.dtype != like.dtype:
        return None
    for name, x in depends.items():
        compared = name.startswith("param.")
        if name not in cache or (compared and not torch.equal(cache[name], x)):
            return None
    return old.flatten(0, 1)


def joined(
    method: DeepPlan, old: Tensor | None, new: Sequence[Factors]
) -> tuple[Tensor, list[Factors]]:
    """Append factors to the cached ones, and return them concatenated ``[P, n, ·]`` and by map.

    Args:
        method: plan of the recipe.
        old: cached factors of earlier tokens, or ``None``.
        new: new factors of each map, ``[P, c, ·]``.
    """
    rows = torch.cat([x for one in new for x in (one.h, one.delta)], dim=-1)
    rows = rows if old is None else torch.cat([old, rows], dim=1)
    return rows, _parted(method, rows)


def _parted(method: DeepPlan, rows: Tensor) -> list[Factors]:
    """Split concatenated factors ``[P, n, ·]`` by map."""
    parts = rows.split_with_sizes(method.widths, dim=-1)
    return [Factors(parts[i], parts[i + 1]) for i in range(0, len(parts), 2)]


def cached(rows: Tensor, row: Row, depends: Cache) -> Cache:
    """Return the cache for the next token.

    Args:
        rows: concatenated factors.
        row: coefficients.
        depends: dependencies of the factors, with at least one tensor of B rows.
    """
    B = next(iter(depends.values())).shape[0]
    entries = {**depends, "factors": by_row(rows, B), "C": by_row(row.C, B)}
    if row.D is not None:
        entries["D"] = by_row(row.D, B)
    return entries


def row_kept(cache: Mapping[str, Tensor]) -> Row | None:
    """Return the coefficients of a cache, or ``None`` if it has none."""
    if (C := cache.get("C")) is None:
        return None
    return Row(C=C.flatten(0, 1), D=None if (D := cache.get("D")) is None else D.flatten(0, 1))


def by_row(x: Tensor, B: int) -> Tensor:
    """Reshape ``[B·H, ...]`` to ``[B, H, ...]``."""
    return x.reshape(B, x.shape[0] // B, *x.shape[1:])  # faster than `unflatten`
