"""Coefficients of inner batches: decay, momentum, step and window as one small matrix per map.

For tokens t = 1..n after a border where the memory was A°, S°::

    A_t = a_t A° + m_t S° + Σ_i C[t, i] δ_i h_iᵀ,     C = −P^α P^θ diag(η) Γ
    S_n = (Π θ) S° + Σ_i D[i] δ_i h_iᵀ,              D = −(last row of P^θ) diag(η) Γ

Γ is the band of the window: row t weights association t − m by γ_t[m]. Columns are associations in
order, and the c − 1 associations of earlier tokens come first.

A hyperparameter per channel cannot be part of a matrix that all channels share. It is absorbed into
h, δ and the read instead. A window then needs one column per pair of step and association
(*pairs*), because the decay starts at the step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from recollect.choices.memory.base import LinearMap
from recollect.choices.runtime import cached_constant
from recollect.engines.common.coefficients import cumulative_log_decay, flush_subnormals, products

__all__ = [
    "PerMapValue",
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
    """Structure of a recipe's coefficients.

    Attributes:
        slot: terms of the sum S: ``"steps"`` −η g, ``"gradients"`` −g, or ``""`` without momentum.
        splits: whether momentum applies to the write only (columns: the writes, then the erasures).
        mean: whether steps are averaged over the open inner batch.
        side: channels of a ``log_decay`` per channel: ``"key"`` or ``"value"``.
        pairs: whether columns are pairs of step and association.
    """

    slot: str
    splits: bool
    mean: bool
    side: str
    pairs: bool


@dataclass(frozen=True, kw_only=True)
class Table:
    """Coefficients of one map over n tokens and R columns, for batches ``[N, P]`` (P = B·H).

    Attributes:
        a: coefficients of A°, ``[N, P, n]``, or ``None`` for ones.
        m: coefficients of S°, ``[N, P, n]``, or ``None``.
        C: coefficients of the gradients in A, ``[N, P, n, R]``.
        s: coefficients of S° in S_n, ``[N, P]``, or ``None`` without momentum.
        D: coefficients of the gradients in S_n, ``[N, P, R]``, or ``None`` without momentum.
        inner: cumulative log decays over the map's inputs, float64 ``[N, P, n, in]``, or ``None``.
        outer: cumulative log decays over the map's outputs, float64 ``[N, P, n, out]``, or
            ``None``.
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
class PerMapValue:
    """Hyperparameter of one map: per token, per input or output channel, or per entry."""

    scalar: Tensor | None = None
    inner: Tensor | None = None
    outer: Tensor | None = None
    entry: Tensor | None = None

    def matrix(self, n: int, t: int) -> Tensor:
        """Return the value of one token as a factor ``[P, out or 1, in or 1]``."""
        shaped = (
            None if self.scalar is None else self.scalar[n, :, t, None, None],
            None if self.inner is None else self.inner[n, :, t, None, :],
            None if self.outer is None else self.outer[n, :, t, :, None],
            None if self.entry is None else self.entry[n, :, t],
        )
        first, *rest = [x for x in shaped if x is not None]
        return sum(rest, first)

    def add(self, other: PerMapValue) -> PerMapValue:
        """Return the sum of two log decays."""
        pairs = ((self.scalar, other.scalar), (self.inner, other.inner), (self.outer, other.outer))
        scalar, inner, outer = (b if a is None else a if b is None else a + b for a, b in pairs)
        return PerMapValue(scalar=scalar, inner=inner, outer=outer)


def per_map(x: Tensor, side: str, maps: Sequence[LinearMap]) -> list[PerMapValue]:
    """Distribute a hyperparameter ``[N, P, n]``, ``[.., channels]`` or ``[.., out, in]`` to maps.

    Channels over ``"key"`` act on the inputs of the first maps, and a bias column takes their mean.
    Channels over ``"value"`` act on the outputs of the last map. Every other map takes the mean of
    the channels.
    """
    values: list[PerMapValue] = []
    for one in maps:
        if x.dim() == 3:
            values.append(PerMapValue(scalar=x))
        elif x.dim() == 5:
            values.append(PerMapValue(entry=x))
        elif side == "key" and one.reads_features:
            inner = torch.cat([x, x.mean(-1, keepdim=True)], dim=-1) if one.bias else x
            values.append(PerMapValue(inner=inner))
        elif side == "value" and one.is_output:
            values.append(PerMapValue(outer=x))
        else:
            values.append(PerMapValue(scalar=x.mean(-1)))
    return values


@dataclass(frozen=True, kw_only=True)
class _Parts:
    """Inputs of the coefficients that all maps share.

    Attributes:
        gamma: window weights ``[N, P, n, c]``.
        first: momentum of the first token ``[N, P, 1]``.
        theta: P^θ ``[N, P, n, n]``.
        tau: weights τ of TTT's averages ``[N, P, n]``.
    """

    rule: Rule
    gamma: Tensor
    first: Tensor | None
    theta: Tensor | None
    tau: Tensor | None

    def step_weights(self, E: Tensor | None, eta: Tensor | None) -> Tensor:
        """Return −E diag(η) Γ for ``E [N, P, rows, n]``, or for the sum over the past if None."""
        n, c = self.gamma.shape[-2:]
        weight = -(self.gamma if eta is None else self.gamma * eta.unsqueeze(-1))
        if c == 1:
            return (_past(n, weight) if E is None else E) * weight.mT
        if self.rule.pairs:
            steps = _past(n, weight) if E is None else E
            return steps.repeat_interleave(c, dim=-1) * weight.flatten(-2).unsqueeze(-2)
        bands = band(weight)
        return bands.cumsum(-2) if E is None else E @ bands


def tables(
    rule: Rule,
    maps: Sequence[LinearMap],
    numbers: Mapping[str, Tensor],
    gamma: Tensor,
    *,
    start: int,
) -> list[Table]:
    """Return the coefficients of every map.

    Args:
        numbers: hyperparameters of the step by name, ``[N, P, n, ...]``.
        gamma: window weights ``[N, P, n, c]``. Entry m of row t weights association t − m, and is 0
            if there is no association.
        start: position of the first token in its inner batch, from 0.
    """
    c = gamma.shape[-1]
    theta = numbers.get("momentum") if rule.slot else None
    decays: list[PerMapValue] = [PerMapValue() for _ in maps]
    if "log_decay" in numbers:
        decays = per_map(numbers["log_decay"], rule.side, maps)
    if "log_decay_value" in numbers:
        rows = per_map(numbers["log_decay_value"], "value", maps)
        decays = [a.add(b) for a, b in zip(decays, rows, strict=True)]
    logs = {id(decay.scalar): decay.scalar for decay in decays if decay.scalar is not None}
    alphas = {key: x.exp() for key, x in logs.items()}
    gates = [*alphas.values(), *([] if theta is None else [theta])]
    # A single call for all gates: at small sizes every operation costs the same.
    cumulative = products(torch.stack(gates)).unbind(0) if len(gates) > 1 else map(products, gates)
    *decay_products, last = (*cumulative, None) if theta is None else cumulative
    P = dict(zip(alphas, decay_products, strict=True))
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
    map_tables: list[Table] = []
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
        map_tables.append(
            Table(
                a=table.a,
                m=table.m,
                C=table.C,
                s=table.s,
                D=table.D,
                inner=None if decay.inner is None else cumulative_log_decay(decay.inner, -2),
                outer=None if decay.outer is None else cumulative_log_decay(decay.outer, -2),
                scale=scale,
            )
        )
    return map_tables


def _table(parts: _Parts, first: Tensor | None, P: Tensor | None, lr: Tensor | None) -> Table:
    """Return the table for the first token's decay ``[N, P, 1]`` and P^α."""
    rule, theta = parts.rule, parts.theta
    # Products from the boundary are the products after the first token times its decay.
    a = None if P is None or first is None else flush_subnormals(P[..., 0] * first)
    if parts.tau is not None:
        return Table(a=None, m=None, C=parts.tau.unsqueeze(-1) * parts.step_weights(None, lr))
    if theta is None or parts.first is None:
        return Table(a=a, m=None, C=parts.step_weights(P, lr))
    # Without decay, A is the sum of every S, and P^α is the plain sum.
    mixed = theta.cumsum(-2) if P is None else P @ theta
    eta = lr if rule.slot == "steps" else None
    C = parts.step_weights(mixed, eta)
    D = parts.step_weights(theta[..., -1:, :], eta).squeeze(-2)
    if rule.splits:
        C = torch.cat([C, parts.step_weights(P, lr)], dim=-1)
        D = torch.cat([D, torch.zeros_like(D)], dim=-1)
    m, s = mixed[..., 0] * parts.first, theta[..., -1, 0] * parts.first.squeeze(-1)
    return Table(a=a, m=m, C=C, s=s, D=D)


def _past(n: int, like: Tensor) -> Tensor:
    return torch.ones(n, n, dtype=like.dtype, device=like.device).tril()


def band(gamma: Tensor) -> Tensor:
    """Return ``[..., n, c]`` as a band ``[..., n, n + c − 1]``: row t starts at column t.

    Columns are in order of age, oldest first.
    """
    n, c = gamma.shape[-2:]
    wide = torch.nn.functional.pad(gamma.flip(-1), (0, n))  # [..., n, c + n]
    return wide.flatten(-2)[..., : n * (n + c - 1)].unflatten(-1, (n, n + c - 1))


def _tau(offset: Tensor, start: int) -> Tensor:
    """Return τ_t = 1/(t + 1) + offset, clamped to at least 0, ``[N, P, n]``."""
    n = offset.shape[2]
    position = torch.arange(start, start + n, device=offset.device)
    if offset.dim() == 4:
        offset = offset[..., start : start + n].diagonal(dim1=-2, dim2=-1)
    return (1 / (position + 1).to(offset.dtype) + offset).clamp_min(0)


def window_rows(x: Tensor, n: int, c: int) -> Tensor:
    """Gather associations ``[..., n + c − 1, D]`` by step and association, ``[..., n c, D]``.

    Pair (t, m) is association t − m.
    """
    steps = torch.arange(n, device=x.device)[:, None] + (c - 1)
    index = (steps - torch.arange(c, device=x.device)).flatten()
    return x.index_select(-2, index)


def paired(x: Tensor, n: int, c: int) -> Tensor:
    """Gather pairs of step and association of every stream."""
    parts = [window_rows(part, n, c) for part in x.split(n + c - 1, dim=1)]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


# -- one token ------------------------------------------------------------------------------------


@dataclass  # not frozen: created for every decoded token
class Row:
    """Coefficients after one token, ``[P, 1 + n]``, or ``[P, 2 + n]`` with momentum.

    Columns are A°, then S° with momentum, then the n associations of the batch.

    Attributes:
        C: coefficients of A.
        D: coefficients of S, or ``None`` without momentum. For averages, the sums ``[P, n]``.
        both: C and D as one tensor ``[P, 2, ·]``, if they share one.
    """

    C: Tensor
    D: Tensor | None = None
    both: Tensor | None = None


def _starts(P: int, size: int) -> Tensor:
    """Return C, and D with momentum, before the first token of a batch: ``[size, P, size]``."""
    return torch.eye(size).unsqueeze(1).repeat(1, P, 1)


def advance(
    row: Row | None, new: Tensor, theta: Tensor | None, alpha: Tensor | None, *, first: bool
) -> Row:
    """Advance the coefficients by one token: D = θ D − η γ and C = α C + D.

    Args:
        row: coefficients after the previous token, or ``None`` before the first of a batch.
        new: −η γ of the window's associations, oldest first, ``[P, c]``.
        theta: θ ``[P, 1]``, or ``None`` without momentum.
        alpha: α ``[P, 1]``, or ``None`` without decay.
        first: whether the token is the first of its batch.
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
        both = torch.cat([C, new, D, new], dim=-1).view(C.shape[0], 2, -1)  # a single operation
        C, D = both.unbind(1)
        return Row(C=C, D=D, both=both)
    return Row(C=added(C, new, first=first), D=added(D, new, first=first))


def added(row: Tensor, new: Tensor, *, first: bool) -> Tensor:
    """Append a column to a row and add weights to its last c columns.

    Args:
        row: coefficients of the earlier associations, ``[P, n]``.
        new: weights of the window ``[P, c]``.
        first: whether the token is the first of its batch, which adds c columns.
    """
    if first or new.shape[-1] == 1:
        return torch.cat([row, new], dim=-1)
    return pad(row, (0, 1)) + pad(new, (row.shape[-1] + 1 - new.shape[-1], 0))


def row_of(table: Table) -> Row:
    """Return the coefficients after the last token of the table of one batch."""
    C = table.C[0, :, -1]
    a = torch.ones_like(C[:, :1]) if table.a is None else table.a[0, :, -1:]
    if table.m is None or table.s is None or table.D is None:
        return Row(C=torch.cat([a, C], dim=-1))
    s = table.s[0].unsqueeze(-1)
    return Row(
        C=torch.cat([a, table.m[0, :, -1:], C], dim=-1),
        D=torch.cat([torch.zeros_like(s), s, table.D[0]], dim=-1),
    )
