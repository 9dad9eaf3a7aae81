"""Coefficients of inner batches: decay, momentum, step and window as one small matrix per map.

For tokens t = 1..n after a border where the memory was A°, S°::

    A_t = a_t A° + m_t S° + Σ_i C[t, i] δ_i h_iᵀ,     C = −P^α P^θ diag(η) Γ
    S_n = (Π θ) S° + Σ_i D[i] δ_i h_iᵀ,              D = −(last row of P^θ) diag(η) Γ

Γ is the window's band: row t weighs association t − m by γ_t[m]. Columns are associations in order,
the c − 1 of earlier tokens first. Where a number differs between channels it cannot be in a matrix
that all channels share: it is absorbed into h, δ and the read-out instead, and a
window then needs a column per pair of step and association (*pairs*), because the decay starts at
the step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from recollect.choices.memory.base import LinearMap
from recollect.choices.runtime import cached_constant
from recollect.engines.common.coefficients import cumulated, flushed, products

__all__ = [
    "Own",
    "Row",
    "Rule",
    "Table",
    "added",
    "advance",
    "band",
    "paired",
    "per_map",
    "row_of",
    "tables",
    "window_rows",
]


@dataclass(frozen=True, kw_only=True)
class Rule:
    """What of a recipe decides the coefficients.

    Attributes:
        slot: what S accumulates: ``"steps"`` −η g, ``"gradients"`` −g, or ``""`` without momentum.
        splits: momentum on the write only (columns: the writes, then the erasures).
        mean: averaged over the open inner batch.
        side: the channels of ``log_decay`` where it has any: ``"key"`` or ``"value"``.
        pairs: columns are pairs of step and association.
    """

    slot: str
    splits: bool
    mean: bool
    side: str
    pairs: bool


@dataclass(frozen=True, kw_only=True)
class Table:
    """The coefficients of one map over n tokens and R columns, for batches ``[N, P]`` (P = B·H).

    Attributes:
        a: of A°, ``[N, P, n]``, or ``None`` for ones.
        m: of S°, ``[N, P, n]``, or ``None``.
        C: ``[N, P, n, R]``.
        s: of S° in S_n, ``[N, P]``; D: ``[N, P, R]``; ``None`` without momentum.
        inner: cumulated log decays over the map's inputs, float64 ``[N, P, n, in]``, or ``None``.
        outer: over its outputs.
        scale: factors of δ's columns ``[N, P, R, out]``, or ``None``.
    """

    a: Tensor | None
    m: Tensor | None
    C: Tensor
    s: Tensor | None = None
    D: Tensor | None = None
    inner: Tensor | None = None
    outer: Tensor | None = None
    scale: Tensor | None = None


@dataclass(kw_only=True)
class Own:
    """One map's share of a number: one per token, and per channel of its inputs or outputs."""

    scalar: Tensor | None = None
    inner: Tensor | None = None
    outer: Tensor | None = None
    entry: Tensor | None = None

    def matrix(self, n: int, t: int) -> Tensor:
        """The number of one token as a factor ``[P, out or 1, in or 1]``."""
        shaped = (
            None if self.scalar is None else self.scalar[n, :, t, None, None],
            None if self.inner is None else self.inner[n, :, t, None, :],
            None if self.outer is None else self.outer[n, :, t, :, None],
            None if self.entry is None else self.entry[n, :, t],
        )
        first, *rest = [x for x in shaped if x is not None]
        return sum(rest, first)

    def add(self, other: Own) -> Own:
        """Sums of logs."""
        pairs = ((self.scalar, other.scalar), (self.inner, other.inner), (self.outer, other.outer))
        scalar, inner, outer = (b if a is None else a if b is None else a + b for a, b in pairs)
        return Own(scalar=scalar, inner=inner, outer=outer)


def per_map(x: Tensor, side: str, maps: Sequence[LinearMap]) -> list[Own]:
    """A number ``[N, P, n]``, ``[.., channels]`` or ``[.., out, in]`` as every map sees it.

    Channels over ``"key"`` act on the first maps' inputs (a bias column takes their mean), over
    ``"value"`` on the last map's outputs; every other map takes the channels' mean.
    """
    owns: list[Own] = []
    for one in maps:
        if x.dim() == 3:
            owns.append(Own(scalar=x))
        elif x.dim() == 5:
            owns.append(Own(entry=x))
        elif side == "key" and one.reads_features:
            whole = torch.cat([x, x.mean(-1, keepdim=True)], dim=-1) if one.bias else x
            owns.append(Own(inner=whole))
        elif side == "value" and one.is_output:
            owns.append(Own(outer=x))
        else:
            owns.append(Own(scalar=x.mean(-1)))
    return owns


@dataclass(frozen=True, kw_only=True)
class _Parts:
    """What all maps share.

    Attributes:
        gamma: window weights ``[N, P, n, c]``.
        first: momentum of the first token ``[N, P, 1]``; theta: P^θ ``[N, P, n, n]``.
        tau: as in TTT's averages.
    """

    rule: Rule
    gamma: Tensor
    first: Tensor | None
    theta: Tensor | None
    tau: Tensor | None

    def written(self, E: Tensor | None, eta: Tensor | None) -> Tensor:
        """−E diag(η) Γ for ``E [N, P, rows, n]``; ``None`` is the plain sum over the past."""
        n, c = self.gamma.shape[-2:]
        weight = -(self.gamma if eta is None else self.gamma * eta.unsqueeze(-1))
        if c == 1:
            return (_past(n, weight) if E is None else E) * weight.mT
        if self.rule.pairs:
            steps = _past(n, weight) if E is None else E
            return steps.repeat_interleave(c, dim=-1) * weight.flatten(-2).unsqueeze(-2)
        placed = band(weight)
        return placed.cumsum(-2) if E is None else E @ placed


def tables(
    rule: Rule,
    maps: Sequence[LinearMap],
    numbers: Mapping[str, Tensor],
    gamma: Tensor,
    *,
    start: int,
) -> list[Table]:
    """Coefficients of every map.

    Args:
        numbers: of the step by name, ``[N, P, n, ...]``.
        gamma: window weights ``[N, P, n, c]``, entry m of row t for association t − m, 0 where
            there is none.
        start: place of the first token in its inner batch, from 0.
    """
    c = gamma.shape[-1]
    theta = numbers.get("momentum") if rule.slot else None
    decays: list[Own] = [Own() for _ in maps]
    if "log_decay" in numbers:
        decays = per_map(numbers["log_decay"], rule.side, maps)
    if "log_decay_value" in numbers:
        rows = per_map(numbers["log_decay_value"], "value", maps)
        decays = [a.add(b) for a, b in zip(decays, rows, strict=True)]
    logs = {id(own.scalar): own.scalar for own in decays if own.scalar is not None}
    alphas = {key: x.exp() for key, x in logs.items()}
    given = [*alphas.values(), *([] if theta is None else [theta])]
    # One call for all of them: at small sizes every operation costs the same.
    cumulative = products(torch.stack(given)).unbind(0) if len(given) > 1 else map(products, given)
    *moved, last = (*cumulative, None) if theta is None else cumulative
    P = dict(zip(alphas, moved, strict=True))
    parts = _Parts(
        rule=rule,
        gamma=gamma,
        first=None if theta is None else theta[..., :1],
        theta=last,
        tau=_tau(numbers["offset"], start) if rule.mean else None,
    )
    ones = gamma.new_ones(()).expand(gamma.shape[:-1])
    rates = per_map(numbers.get("lr", ones), "value", maps)
    shared: dict[tuple[int, int], Table] = {}
    made: list[Table] = []
    for decay, rate in zip(decays, rates, strict=True):
        key = (id(decay.scalar), id(rate.scalar))
        if key not in shared:
            first = None if decay.scalar is None else alphas[key[0]][..., :1]
            shared[key] = _table(parts, first, P.get(key[0]), rate.scalar)
        table = shared[key]
        scale = rate.outer
        if scale is not None:
            scale = scale.repeat_interleave(c, dim=-2) if rule.pairs else scale
            scale = torch.cat([scale, scale], dim=-2) if rule.splits else scale
        made.append(
            Table(
                a=table.a,
                m=table.m,
                C=table.C,
                s=table.s,
                D=table.D,
                inner=None if decay.inner is None else cumulated(decay.inner, -2),
                outer=None if decay.outer is None else cumulated(decay.outer, -2),
                scale=scale,
            )
        )
    return made


def _table(parts: _Parts, first: Tensor | None, P: Tensor | None, lr: Tensor | None) -> Table:
    """From the first token's decay ``[N, P, 1]`` and P^α."""
    rule, theta = parts.rule, parts.theta
    # The products from the border on are those after the first token times its own number.
    a = None if P is None or first is None else flushed(P[..., 0] * first)
    if parts.tau is not None:
        return Table(a=None, m=None, C=parts.tau.unsqueeze(-1) * parts.written(None, lr))
    if theta is None or parts.first is None:
        return Table(a=a, m=None, C=parts.written(P, lr))
    # Without decay A adds every S up: P^α is the plain sum.
    moved = theta.cumsum(-2) if P is None else P @ theta
    eta = lr if rule.slot == "steps" else None
    C = parts.written(moved, eta)
    D = parts.written(theta[..., -1:, :], eta).squeeze(-2)
    if rule.splits:
        C = torch.cat([C, parts.written(P, lr)], dim=-1)
        D = torch.cat([D, torch.zeros_like(D)], dim=-1)
    m, s = moved[..., 0] * parts.first, theta[..., -1, 0] * parts.first.squeeze(-1)
    return Table(a=a, m=m, C=C, s=s, D=D)


def _past(n: int, like: Tensor) -> Tensor:
    return torch.ones(n, n, dtype=like.dtype, device=like.device).tril()


def band(gamma: Tensor) -> Tensor:
    """``[..., n, c]`` as ``[..., n, n + c − 1]``: row t begins at column t, oldest first."""
    n, c = gamma.shape[-2:]
    wide = torch.nn.functional.pad(gamma.flip(-1), (0, n))  # [..., n, c + n]
    return wide.flatten(-2)[..., : n * (n + c - 1)].unflatten(-1, (n, n + c - 1))


def _tau(offset: Tensor, start: int) -> Tensor:
    """τ_t = 1/place + offset, at least 0, ``[N, P, n]``."""
    n = offset.shape[2]
    place = torch.arange(start, start + n, device=offset.device)
    if offset.dim() == 4:
        offset = offset[..., start : start + n].diagonal(dim1=-2, dim2=-1)
    return (1 / (place + 1).to(offset.dtype) + offset).clamp_min(0)


def window_rows(x: Tensor, n: int, c: int) -> Tensor:
    """Associations ``[..., n + c − 1, D]`` as pairs of step and association, ``[..., n c, D]``.

    Pair (t, m) is association t − m.
    """
    steps = torch.arange(n, device=x.device)[:, None] + (c - 1)
    index = (steps - torch.arange(c, device=x.device)).flatten()
    return x.index_select(-2, index)


def paired(x: Tensor, n: int, c: int) -> Tensor:
    """Associations as pairs with their steps, stream by stream."""
    parts = [window_rows(part, n, c) for part in x.split(n + c - 1, dim=1)]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


# -- one token ------------------------------------------------------------------------------------


@dataclass  # not frozen: made for every decoded token
class Row:
    """Coefficients after one token, ``[P, 1 + n]``, or ``[P, 2 + n]`` where there is momentum.

    C and D are those of A and S; of A°, then of S° where there is one, then of the batch's n
    associations. D is ``None`` without momentum, and holds the plain sums ``[P, n]`` of averages.
    ``both`` are the two in one tensor ``[P, 2, ·]``, if they are in one.
    """

    C: Tensor
    D: Tensor | None = None
    both: Tensor | None = None


def _starts(P: int, size: int) -> Tensor:
    """C, and D where there is one, before a batch's first token: ``[size, P, size]``."""
    return torch.eye(size).unsqueeze(1).repeat(1, P, 1)


def advance(
    row: Row | None, new: Tensor, theta: Tensor | None, alpha: Tensor | None, *, first: bool
) -> Row:
    """The coefficients one token on: D = θ D − η γ and C = α C + D.

    Args:
        row: after the token before; ``None`` before a batch's first.
        new: −η γ of the window's associations, oldest first, ``[P, c]``.
        theta: θ ``[P, 1]``, where there is momentum.
        alpha: α ``[P, 1]``, where there is decay.
        first: whether the token is its batch's first.
    """
    if row is None:
        P, size = new.shape[0], 1 + (theta is not None)
        row = Row(*cached_constant(_starts, P, size, device=new.device, dtype=new.dtype))
    C, D = row.C, row.D
    if D is None or theta is None:
        return Row(C=added(C if alpha is None else C * alpha, new, first=first))
    D = D * theta
    C = C + D if alpha is None else torch.addcmul(D, C, alpha)
    if first or new.shape[-1] == 1:
        both = torch.cat([C, new, D, new], dim=-1).view(C.shape[0], 2, -1)  # one operation
        C, D = both.unbind(1)
        return Row(C=C, D=D, both=both)
    return Row(C=added(C, new, first=first), D=added(D, new, first=first))


def added(row: Tensor, new: Tensor, *, first: bool) -> Tensor:
    """A row over the associations before, and the weights of the last c of those now.

    Args:
        row: over those before, ``[P, n]``.
        new: weights ``[P, c]``.
        first: whether the token is its batch's first, which finds none before it.
    """
    if first or new.shape[-1] == 1:
        return torch.cat([row, new], dim=-1)
    return pad(row, (0, 1)) + pad(new, (row.shape[-1] + 1 - new.shape[-1], 0))


def row_of(table: Table) -> Row:
    """Coefficients after the last token of a table of one batch."""
    C = table.C[0, :, -1]
    a = torch.ones_like(C[:, :1]) if table.a is None else table.a[0, :, -1:]
    if table.m is None or table.s is None or table.D is None:
        return Row(C=torch.cat([a, C], dim=-1))
    s = table.s[0].unsqueeze(-1)
    return Row(
        C=torch.cat([a, table.m[0, :, -1:], C], dim=-1),
        D=torch.cat([torch.zeros_like(s), s, table.D[0]], dim=-1),
    )
