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
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from recollect.choices.memory.base import LinearMap
from recollect.engines.common.coefficients import cumulative_log_decay, products

__all__ = [
    "Rule",
    "Table",
    "band",
    "decay_factors",
    "paired",
    "per_map",
    "sum_of",
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
        sums: whether S_n = θ̄ S° + Σ D[i] δ_i h_iᵀ, with the mean θ̄ of the inner batch.
    """

    slot: str
    splits: bool
    mean: bool
    side: str
    pairs: bool
    sums: bool = False


@dataclass(kw_only=True)  # not frozen: created for every decoded token
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

    def batches(self, G: int) -> tuple[list[Table], list[Table]]:
        """Return the tables of single batches: of all G reads per token, and of the end.

        They have a and m ``[P, rows, 1]``, C ``[P, rows, R]``, s ``[P, 1, 1]`` and D ``[P, 1, R]``.
        The end is one row.
        """
        a, m = (None if x is None else x.unsqueeze(-1) for x in (self.a, self.m))
        a_end, m_end, C_end = (None if x is None else x[:, :, -1:] for x in (a, m, self.C))
        s = None if self.s is None else self.s[..., None, None]
        D = None if self.D is None else self.D.unsqueeze(-2)
        rows = {"a": a, "m": m, "C": self.C}
        if G > 1:
            rows = {name: x.repeat_interleave(G, 2) for name, x in rows.items() if x is not None}
        channels = {"inner": self.inner, "outer": self.outer, "scale": self.scale}
        return (
            _batches({**rows, **channels}),
            _batches({"a": a_end, "m": m_end, "C": C_end, "s": s, "D": D, **channels}),
        )


def _batches(fields: Mapping[str, Tensor | None]) -> list[Table]:
    """Return one table per batch from fields ``[N, ...]``."""
    # A single call creates the views of all batches, and autograd stacks their gradients once.
    views = {name: x.unbind(0) for name, x in fields.items() if x is not None}
    absent: dict[str, Any] = {"a": None, "m": None}
    columns = zip(*views.values(), strict=True)
    return [Table(**{**absent, **dict(zip(views, xs, strict=True))}) for xs in columns]


def per_map(x: Tensor, side: str, maps: Sequence[LinearMap]) -> list[Tensor]:
    """Distribute a hyperparameter ``[N, P, n]``, ``[.., channels]`` or ``[.., out, in]`` to maps.

    The results are factors ``[N, P, n, out or 1, in or 1]``. Channels over ``"key"`` act on the
    inputs of the first maps, and a bias column takes their mean. Channels over ``"value"`` act on
    the outputs of the last map. Every other map takes the mean of the channels.
    """
    if x.dim() == 5:
        return [x] * len(maps)
    scalar = (x if x.dim() == 3 else x.mean(-1))[..., None, None]
    if x.dim() == 3:
        return [scalar] * len(maps)
    values: list[Tensor] = []
    for one in maps:
        if side == "key" and one.reads_features:
            inner = torch.cat([x, scalar[..., 0]], dim=-1) if one.bias else x
            values.append(inner.unsqueeze(-2))
        else:
            is_output = side == "value" and one.is_output
            values.append(x.unsqueeze(-1) if is_output else scalar)
    return values


def sum_of(factors: Sequence[Tensor]) -> Tensor:
    """Return the sum of at least one factor ``[..., out or 1, in or 1]``."""
    first, *rest = factors
    return sum(rest, first)


def _cumulative(factors: Sequence[Tensor], channels: int) -> Tensor | None:
    """Return the cumulative log decays over the channels of dim −1 or −2 of the factors."""
    other = -3 - channels
    logs = [x.squeeze(other) for x in factors if x.shape[channels] > 1 and x.shape[other] == 1]
    return cumulative_log_decay(sum_of(logs), -2) if logs else None


@dataclass(frozen=True, kw_only=True)
class _Parts:
    """Inputs of the coefficients that all maps share.

    Attributes:
        gamma: window weights ``[N, P, n, c]``.
        theta: P^θ ``[N, P, n + 1, n + 1]`` from the boundary on.
        tau: weights τ of TTT's averages ``[N, P, n]``.
        mean_theta: θ̄ of an inner batch ``[N, P]``.
    """

    rule: Rule
    gamma: Tensor
    theta: Tensor | None
    tau: Tensor | None
    mean_theta: Tensor | None = None

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
    numbers: Mapping[str, Tensor],  # hyperparameters of the step by name, [N, P, n, ...]
    gamma: Tensor,  # [N, P, n, c]
    *,
    start: int,
) -> list[Table]:
    """Return the coefficients of every map for tokens from ``start`` of their inner batch.

    Entry m of row t of ``gamma`` weights association t − m, and is 0 if there is no association.
    """
    c = gamma.shape[-1]
    theta = numbers.get("momentum") if rule.slot else None
    mean_theta = None
    if rule.sums:
        theta, mean_theta = None, None if theta is None else theta.mean(-1)
    decays = decay_factors(rule, maps, numbers)
    # Maps with the same decay per head share their coefficients.
    per_head = [[x for x in factors if x.shape[-2:] == (1, 1)] for factors in decays]
    keys = [tuple(map(id, factors)) for factors in per_head]
    logs = {key: factors for key, factors in zip(keys, per_head, strict=True) if factors}
    alphas = {key: sum_of(factors).flatten(-3).exp() for key, factors in logs.items()}
    gates = [*alphas.values(), *([] if theta is None else [theta])]
    # A single call for all gates: at small sizes every operation costs the same. Row and column 0
    # are those of the boundary.
    cumulative = [*products(pad(torch.stack(gates), (1, 0)))] if gates else list[Tensor]()
    P = dict(zip(alphas, cumulative, strict=False))
    parts = _Parts(
        rule=rule,
        gamma=gamma,
        theta=None if theta is None else cumulative[-1],
        tau=_tau(numbers["offset"], start) if rule.mean else None,
        mean_theta=mean_theta,
    )
    rates = per_map(numbers["lr"], "value", maps) if "lr" in numbers else [None] * len(maps)
    shared: dict[tuple[object, ...], Table] = {}
    map_tables: list[Table] = []
    for factors, key, rate in zip(decays, keys, rates, strict=True):
        eta, scale = None, None
        if rate is not None and rate.shape[-2] == 1:
            eta = rate.flatten(-3)
        elif rate is not None:
            scale = rate.squeeze(-1)
            scale = scale.repeat_interleave(c, dim=-2) if rule.pairs else scale
            scale = torch.cat([scale, scale], dim=-2) if rule.splits else scale
        same = (key, eta is None or id(rate))
        if same not in shared:
            shared[same] = _table(parts, P.get(key), eta)
        inner, outer = _cumulative(factors, -1), _cumulative(factors, -2)
        map_tables.append(replace(shared[same], inner=inner, outer=outer, scale=scale))
    return map_tables


def decay_factors(
    rule: Rule, maps: Sequence[LinearMap], numbers: Mapping[str, Tensor]
) -> list[list[Tensor]]:
    """Return the log decays of every map, as the factors of `per_map` whose sum they are."""
    decays: list[list[Tensor]] = [[] for _ in maps]
    for name, side in (("log_decay", rule.side), ("log_decay_value", "value")):
        if name in numbers:
            for factors, x in zip(decays, per_map(numbers[name], side, maps), strict=True):
                factors.append(x)
    return decays


def _table(parts: _Parts, P: Tensor | None, lr: Tensor | None) -> Table:
    """Return the table for P^α ``[N, P, n + 1, n + 1]`` from the boundary on."""
    # The gradients of splits are joined at once, and those of slices are added to zeros.
    rule, theta, a, n = parts.rule, parts.theta, None, parts.gamma.shape[-2]
    if P is not None:
        a, P = P[..., 1:, :].split([1, n], dim=-1)
        a = a.squeeze(-1)
    if parts.tau is not None:
        return Table(a=None, m=None, C=parts.tau.unsqueeze(-1) * parts.step_weights(None, lr))
    if rule.sums:
        ones = torch.ones_like(parts.gamma[:1, :1, :, 0]).unsqueeze(-2)
        D = parts.step_weights(ones, lr if rule.slot == "steps" else None)
        return Table(a=None, m=None, C=D, s=parts.mean_theta, D=D.squeeze(-2))
    if theta is None:
        return Table(a=a, m=None, C=parts.step_weights(P, lr))
    # Without decay, A is the sum of every S, and P^α is the plain sum.
    mixed = theta[..., 1:, :].cumsum(-2) if P is None else P @ theta[..., 1:, :]
    rows = torch.cat([mixed, theta[..., -1:, :]], dim=-2)  # of A_t, then of S_n
    initial, steps = rows.split([1, n], dim=-1)
    m, s = initial.squeeze(-1).split([n, 1], dim=-1)
    C = parts.step_weights(steps, lr if rule.slot == "steps" else None)
    C, D = C.split([n, 1], dim=-2)
    D = D.squeeze(-2)
    if rule.splits:
        C = torch.cat([C, parts.step_weights(P, lr)], dim=-1)
        D = torch.cat([D, torch.zeros_like(D)], dim=-1)
    return Table(a=a, m=m, C=C, s=s.squeeze(-1), D=D)


def _past(n: int, like: Tensor) -> Tensor:
    return torch.ones(n, n, dtype=like.dtype, device=like.device).tril()


def band(gamma: Tensor) -> Tensor:
    """Return ``[..., n, c]`` as a band ``[..., n, n + c − 1]``: row t starts at column t.

    Columns are in order of age, oldest first.
    """
    n, c = gamma.shape[-2:]
    wide = pad(gamma.flip(-1), (0, n))  # [..., n, c + n]
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
