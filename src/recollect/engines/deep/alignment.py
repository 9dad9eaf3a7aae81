"""Alignment of tokens to inner batches, so that every row's batches share their columns.

Rows differ in how far their open inner batch has come (padding, packing). Each row is therefore
moved so that its open batch begins in column 0, with what the buffer holds of that batch in front
of the new tokens. After that a border is a border for all rows, and a row that ends earlier only
stops committing its batches.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from recollect.engines.common.joined_tokens import join
from recollect.engines.common.problem import Problem

__all__ = ["Grid", "lay_out"]


@dataclass(frozen=True, kw_only=True)
class Grid:
    """Tokens of a call in inner batches of ``b`` columns, N of them.

    Attributes:
        b: columns of a batch; fewer than the recipe's where a single open batch holds them all.
        c: associations in a window; the keys have c − 1 more columns in front.
        N: batches.
        keys: ``[B, c − 1 + N b, H, ...]`` by name: features, raw keys where they differ, values,
            the bias's numbers.
        valid: ``[B, c − 1 + N b]``: 1 where an association is there.
        steps: ``[B, N b, H, ...]``: numbers of the step.
        queries: ``x``, their features, ``[B, N b, H, G, ·]``, and ``raw`` where that differs.
        full: batches that each row completes, or ``None`` when every row completes all.
        start: column of the first new token per row.
        count: number of each token in its document from 1, ``[B, N b]``.
    """

    b: int
    c: int
    N: int
    keys: Mapping[str, Tensor]
    valid: Tensor
    steps: Mapping[str, Tensor]
    queries: Mapping[str, Tensor]
    full: tuple[int, ...] | None
    start: tuple[int, ...]
    count: Tensor

    def tensors(self) -> list[Tensor]:
        """Tensors with columns: those of keys, with c − 1 more in front, then the others."""
        return [
            *self.keys.values(),
            self.valid,
            *self.steps.values(),
            *self.queries.values(),
            self.count,
        ]

    def like(self, tensors: Iterator[Tensor]) -> Grid:
        """The same columns of other tensors, in the order of `tensors`."""
        return replace(
            self,
            keys=dict(zip(self.keys, tensors, strict=False)),
            valid=next(tensors),
            steps=dict(zip(self.steps, tensors, strict=False)),
            queries=dict(zip(self.queries, tensors, strict=False)),
            count=next(tensors),
        )

    def outputs(self, y: Tensor, T: int) -> Tensor:
        """Of outputs per column ``[B, N b, ...]``, those of the new tokens ``[B, T, ...]``."""
        if len(set(self.start)) <= 1:
            first = self.start[0] if self.start else 0
            # Padding that no row's tokens reach has no columns.
            return _columns(y, first, T)
        columns = _tensor(self.start, y)[:, None] + torch.arange(T, device=y.device)
        columns = columns.clamp_max(y.shape[1] - 1)
        return y.gather(1, _spread(columns, y).expand(-1, -1, *y.shape[2:]))


def _tensor(numbers: tuple[int, ...], like: Tensor) -> Tensor:
    return torch.tensor(numbers, device=like.device)


def _spread(index: Tensor, x: Tensor) -> Tensor:
    return index.view(*index.shape, *(1,) * (x.dim() - 2))


def _same(lifted: Tensor, raw: Tensor) -> bool:
    """Whether a feature map left its input as it was."""
    same = lifted.data_ptr() == raw.data_ptr() and lifted.shape == raw.shape
    return same and lifted.dtype == raw.dtype and lifted.stride() == raw.stride()


@dataclass(frozen=True, kw_only=True)
class _Place:
    """Column j of the grid is token ``first + j`` of a run of tokens, row by row."""

    first: tuple[int, ...]
    columns: int

    def take(self, x: Tensor, fill: float = 0.0) -> Tensor:
        """``x [B, tokens, ...]`` on the grid; ``fill`` where there is no token."""
        if len(set(self.first)) <= 1:
            return _columns(x, self.first[0] if self.first else 0, self.columns, fill)
        index = _tensor(self.first, x)[:, None] + torch.arange(self.columns, device=x.device)
        there = (index >= 0) & (index < x.shape[1])
        index = index.clamp(0, x.shape[1] - 1)
        found = x.gather(1, _spread(index, x).expand(-1, -1, *x.shape[2:]))
        return torch.where(_spread(there, x), found, torch.full((), fill, dtype=x.dtype).to(x))


def _columns(x: Tensor, first: int, columns: int, fill: float = 0.0) -> Tensor:
    """Columns ``first`` to ``first + columns`` of ``x``, which has them from 0 to its length."""
    length = x.shape[1]
    before = min(max(-first, 0), columns)
    after = min(max(first + columns - length, 0), columns - before)
    here = x[:, max(first, 0) : max(min(first + columns, length), 0)]
    if not before and not after:
        return here
    return pad(here, (*(0, 0) * (x.dim() - 2), before, after), value=fill)


def lay_out(problem: Problem) -> Grid:
    """The grid of a call with at least one token."""
    recipe, tokens, method = problem.recipe, join(problem), problem.plan
    b, c = recipe.algorithm.batch, recipe.context.horizon or 1
    B, T = problem.k.shape[:2]
    opened = [0] * B if b == 1 else [p % b for p in problem.state.position.tolist()]
    lengths = [T] * B if problem.lengths is None else problem.lengths.tolist()
    ends = [o + n for o, n in zip(opened, lengths, strict=True)]
    N = max(1, -(-max(ends, default=1) // b))
    width = max(1, *ends) if N == 1 and ends else b
    full = [end // b for end in ends]
    columns = N * width
    # Columns without a token need numbers that every loss can take; without such, none are asked.
    whole = all(o == 0 for o in opened) and columns == T and c == 1
    fills: Mapping[str, float] = {} if whole else problem.sized.fills
    join_first = tuple(tokens.held - o for o in opened)
    steps = _Place(first=join_first, columns=columns)
    keys = _Place(first=tuple(f - (c - 1) for f in join_first), columns=c - 1 + columns)
    asked = _Place(first=tuple(-o for o in opened), columns=columns)
    rates = dict(tokens.rates)
    if method.slope is not None and "lr" in rates:
        kappa = tokens.phi.square().sum(-1)
        rates["lr"] = recipe.algorithm.rate(rates["lr"], kappa, method.slope)
    placed = {"phi": tokens.phi, "v": tokens.v}
    if not _same(tokens.phi, tokens.k):
        placed["raw"] = tokens.k
    q_phi = problem.phi(problem.q, "query", problem.positions())
    counted = problem.state.position[:, None] + 1 - _tensor(tuple(opened), problem.k)[:, None]
    # Called for every decoded token: loops, no comprehensions.
    of_keys: dict[str, Tensor] = {}
    of_steps: dict[str, Tensor] = {}
    for name, x in placed.items():
        of_keys[name] = keys.take(x)
    for name in method.numbers:
        of_keys[name] = keys.take(rates.pop(name), fills.get(name, 0.0))
    for name, x in rates.items():
        of_steps[name] = steps.take(x, fills.get(name, 0.0))
    queries = {"x": asked.take(q_phi)}
    if not _same(q_phi, problem.q):
        queries["raw"] = asked.take(problem.q.to(q_phi.dtype))
    return Grid(
        b=width,
        c=c,
        N=N,
        keys=of_keys,
        valid=keys.take(tokens.valid.to(tokens.phi.dtype)),
        steps=of_steps,
        queries=queries,
        full=None if all(n == N for n in full) else tuple(full),
        start=tuple(opened),
        count=counted + torch.arange(columns, device=problem.k.device),
    )
