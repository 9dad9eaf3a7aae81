"""Alignment of tokens to inner batches, so that every row's batches share their columns.

Rows differ in how far their open inner batch has come (padding, packing). Each row is therefore
moved so that its open batch begins in column 0, with what the buffer holds of that batch in front
of the new tokens. After that a border is a border for all rows, and a row that ends earlier only
stops committing its batches.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from recollect.engines.common.joined_tokens import fills, join
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

    def outputs(self, y: Tensor, T: int) -> Tensor:
        """Of outputs per column ``[B, N b, ...]``, those of the new tokens ``[B, T, ...]``."""
        if len(set(self.start)) <= 1:
            first = self.start[0] if self.start else 0
            y = y[:, first : first + T]
            # Padding that no row's tokens reach has no columns.
            return y if y.shape[1] == T else torch.cat([y, _fill(y, T - y.shape[1], 0.0)], dim=1)
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
            first = self.first[0] if self.first else 0
            stop = first + self.columns
            here = x[:, max(first, 0) : max(min(stop, x.shape[1]), 0)]
            parts = [_fill(x, min(max(-first, 0), self.columns), fill), here]
            parts.append(_fill(x, self.columns - parts[0].shape[1] - here.shape[1], fill))
            parts = [part for part in parts if part.shape[1]]
            return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
        index = _tensor(self.first, x)[:, None] + torch.arange(self.columns, device=x.device)
        there = (index >= 0) & (index < x.shape[1])
        index = index.clamp(0, x.shape[1] - 1)
        found = x.gather(1, _spread(index, x).expand(-1, -1, *x.shape[2:]))
        return torch.where(_spread(there, x), found, torch.full((), fill, dtype=x.dtype).to(x))


def _fill(x: Tensor, columns: int, fill: float) -> Tensor:
    return x.new_full((x.shape[0], columns, *x.shape[2:]), fill)


def lay_out(problem: Problem) -> Grid:
    """The grid of a call with at least one token."""
    recipe, tokens = problem.recipe, join(problem)
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
    harmless: Mapping[str, float] = {} if whole else fills(problem)
    join_first = tuple(tokens.held - o for o in opened)
    steps = _Place(first=join_first, columns=columns)
    keys = _Place(first=tuple(f - (c - 1) for f in join_first), columns=c - 1 + columns)
    asked = _Place(first=tuple(-o for o in opened), columns=columns)
    bias = recipe.bias
    travels = bias.numbers.keys()
    rates = dict(tokens.rates)
    if recipe.algorithm.keyed and "lr" in rates:
        assert bias.affine is not None
        kappa = tokens.phi.square().sum(-1)
        rates["lr"] = recipe.algorithm.rate(rates["lr"], kappa, bias.affine[0])
    placed = {"phi": tokens.phi, "v": tokens.v}
    if not _same(tokens.phi, tokens.k):
        placed["raw"] = tokens.k
    q_phi = problem.phi(problem.q, "query", problem.positions())
    counted = problem.state.position[:, None] + 1 - _tensor(tuple(opened), problem.k)[:, None]
    return Grid(
        b=width,
        c=c,
        N=N,
        keys={
            **{name: keys.take(x) for name, x in placed.items()},
            **{name: keys.take(rates[name], harmless.get(name, 0.0)) for name in sorted(travels)},
        },
        valid=keys.take(tokens.valid.to(tokens.phi.dtype)),
        steps={
            name: steps.take(x, harmless.get(name, 0.0))
            for name, x in rates.items()
            if name not in travels
        },
        queries={
            "x": asked.take(q_phi),
            **({} if _same(q_phi, problem.q) else {"raw": asked.take(problem.q.to(q_phi.dtype))}),
        },
        full=None if all(n == N for n in full) else tuple(full),
        start=tuple(opened),
        count=counted + torch.arange(columns, device=problem.k.device),
    )
