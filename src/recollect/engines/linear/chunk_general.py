"""Chunks under momentum, windows, probes and decays over values, in differentiable operations.

Inside a chunk the state is affine in what stood at its start, so one unit-lower-triangular system
per chunk gives the predictions of all its tokens at once (see `docs/design/linear-engine.md`):

    (I + E⁻ ⊙ (W Dᵀ)) X = [known part | coefficients of A° | coefficients of S°]

with W the keys at which predictions are measured, D the directions in which they are written, and
E⁻ the coefficients of earlier steps. Solved against coefficients instead of the states themselves,
all chunks are solved in parallel; what remains sequential is one small affine map per chunk,

    [A; S] ← M [A; S] + N,

which is a single batched product. Decay, momentum, step and window enter through coefficients.

Layout: chunks first and contiguous, ``[N, B, H, C, ·]``, so that a step of the sequential pass
reads consecutive memory. States are kept transposed, ``[B, H, K, V]``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from recollect.engines.common.coefficients import Coefficients, shift
from recollect.engines.common.decayed_products import causal_mask, decayed_gram, decayed_mix
from recollect.engines.common.linalg import baddbmm

__all__ = ["Flow", "Streams", "solve"]


@dataclass(frozen=True, kw_only=True)
class Streams:
    """Rank-one contributions of a chunk's steps.

    Attributes:
        measured: keys w at which the unknown predictions (or errors) are taken, ``[..., J, K]``.
        direction: e, in which they are subtracted.
        target: subtracted from a·prediction, when the unknown is the error itself.
        known: directions and values that need no prediction.
        erases_at_once: the unknown stream bypasses momentum.
    """

    measured: Tensor | None = None
    direction: Tensor | None = None
    target: Tensor | None = None
    known: tuple[Tensor, Tensor] | None = None
    erases_at_once: bool = False


class Flow:
    """How contributions and states travel inside a chunk: coefficients, or decays to absorb.

    Args:
        table: coefficients for one decay per head, with or without momentum; or
        total: float64 cumulated log decays ``[N, B, H, C, K or 1]``; neither: nothing decays.
        total_v: the same over value channels, or ``None``.
        absorbed: whether ``total`` may be split into exp(X) and exp(−Y).
    """

    def __init__(
        self,
        *,
        table: Coefficients | None,
        total: Tensor | None,
        total_v: Tensor | None,
        before: bool,
        tokens: int,
        absorbed: bool,
    ) -> None:
        self.table, self.total, self.total_v = table, total, total_v
        self.before, self.tokens, self.absorbed = before, tokens, absorbed
        # The same rows are scaled the same way for the system, the read-out and the start.
        self._scaled: dict[tuple[int, str], tuple[Tensor, Tensor]] = {}

    def spread(self, x: Tensor, like: Tensor, dim: int) -> Tensor:
        """Numbers per token spread over the rows that ``like`` has per token."""
        each = like.shape[-2] // self.tokens
        return x if each == 1 else x.repeat_interleave(each, dim=dim)

    def _scale(self, x: Tensor, how: str) -> Tensor:
        """x times exp of ±its token's cumulated decay, remembered."""
        if self.total is None:
            return x
        key = (id(x), how)
        if key not in self._scaled:
            total = shift(self.total, -2, 0.0) if how == "earlier" else self.total
            total = -total if how == "back" else total
            factor = self.spread(total.exp().to(x.dtype), x, -2)
            self._scaled[key] = (x, x * factor)  # x is kept, so that its id stays its own
        return self._scaled[key][1]

    def _seen(self, predict: bool) -> str:
        return "earlier" if predict and not self.before else "now"

    def meet(self, x: Tensor, y: Tensor, *, predict: bool, at_once: bool = False) -> Tensor:
        """Coefficient times inner product of every x row with every earlier y row.

        ``predict``: x is measured before its own step, and only the strictly lower part of the
        result means anything when x and y have one row per token; ``at_once``: y's contributions
        bypass momentum.
        """
        several = x.shape[-2] > self.tokens or y.shape[-2] > self.tokens
        if self.table is None and self.absorbed:
            product = self._scale(x, self._seen(predict)) @ self._scale(y, "back").mT
            if several:
                return product * causal_mask(x, y, self.tokens, strict=predict)
            return product if predict else product.tril_()
        if self.total is not None:
            seen = shift(self.total, -2, 0.0) if self._seen(predict) == "earlier" else self.total
            return decayed_gram(x, seen, y, self.total, strict=predict)
        assert self.table is not None
        E = self.table.P if at_once else self.table.E
        if predict:
            E = self.table.matrix_before(E, decayed=self.before)
        E = self.spread(self.spread(E, x, -2), y, -1)
        return (x @ y.mT) * E

    def from_start(self, x: Tensor, *, predict: bool) -> Tensor:
        """x times the coefficient of A° at its token."""
        if self.table is None:
            return self._scale(x, self._seen(predict))
        a = self.table.a
        if predict:
            a = self.table.before(a, decayed=self.before, first=1.0)
        return x * self.spread(a, x, -1).unsqueeze(-1)

    def from_momentum(self, x: Tensor, *, predict: bool) -> Tensor:
        """x times the coefficient of S° at its token."""
        assert self.table is not None and self.table.m is not None
        m = self.table.m
        if predict:
            m = self.table.before(m, decayed=self.before, first=0.0)
        return x * self.spread(m, x, -1).unsqueeze(-1)

    def to_end(self, y: Tensor, *, at_once: bool = False) -> Tensor:
        """y times the coefficient of its step in A_C."""
        if self.total is not None:
            rest = (self.total[..., -1:, :] - self.total).exp().to(y.dtype)
            return y * self.spread(rest, y, -2)
        if self.table is None:
            return y
        E = self.table.P if at_once else self.table.E
        return y * self.spread(E[..., -1, :], y, -1).unsqueeze(-1)

    def to_momentum(self, y: Tensor) -> Tensor:
        """y times the coefficient of its step in S_C."""
        assert self.table is not None and self.table.theta is not None
        return y * self.spread(self.table.theta[..., -1, :], y, -1).unsqueeze(-1)

    def value_to_end(self, values: Tensor) -> Tensor:
        """Values times their channels' decay to the end of the chunk."""
        if self.total_v is None:
            return values
        rest = (self.total_v[..., -1:, :] - self.total_v).exp().to(values.dtype)
        return values * self.spread(rest, values, -2)

    def kept(self, like: Tensor) -> Tensor:
        """The factor of A° in A_C, on the transposed state: ``[N, B, H, K or 1, V or 1]``."""
        if self.total is not None:
            factor = self.total[..., -1, :].exp().to(like.dtype).unsqueeze(-1)
        elif self.table is not None:
            factor = self.table.a[..., -1][..., None, None]
        else:
            factor = like.new_ones(1, 1, 1, 1, 1)
        if self.total_v is not None:
            factor = factor * self.total_v[..., -1, :].exp().to(like.dtype).unsqueeze(-2)
        return factor


def solve(
    flow: Flow, streams: Streams, queries: Tensor, Z: Tensor, Zs: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Outputs ``[N, B, H, C G, V]`` and the transposed states after the last chunk."""
    N = N_s = None
    if streams.known is not None:
        direction, values = streams.known
        N = flow.to_end(direction).mT @ flow.value_to_end(values)
        if Zs is not None:
            N_s = flow.to_momentum(direction).mT @ values
    unknown = None
    if streams.measured is not None:
        unknown = _unknown(flow, streams, moving=Zs is not None)
    x = None
    if unknown is not None and Zs is not None and Z.device.type == "cpu":
        starts, moments, x, Z, Zs = _walk(flow, streams, unknown, N, N_s, Z, Zs)
    else:
        starts, moments, Z, Zs = _scan(flow, streams, unknown, N, N_s, Z, Zs)
    y = flow.from_start(queries, predict=False) @ starts
    if flow.total_v is not None:
        y = y * flow.spread(flow.total_v.exp().to(y.dtype), queries, -2)
    if moments is not None:
        y = baddbmm(y, flow.from_momentum(queries, predict=False), moments)
    if streams.known is not None:
        direction, values = streams.known
        scores = flow.meet(queries, direction, predict=False)
        if flow.total_v is None:
            y = baddbmm(y, scores, values)
        else:
            y = y + decayed_mix(scores, values, flow.total_v)
    if unknown is not None and streams.direction is not None:
        if x is None:
            x = baddbmm(unknown.constant, unknown.of_start, starts, -1)
            if moments is not None and unknown.of_momentum is not None:
                x = baddbmm(x, unknown.of_momentum, moments, -1)
        scores = flow.meet(
            queries, streams.direction, predict=False, at_once=streams.erases_at_once
        )
        y = baddbmm(y, scores, x)
    return y, Z, Zs


@dataclass(frozen=True, kw_only=True)
class _Unknown:
    """Minus the unknown rows, as an affine function of the chunk's start.

    −x = constant − of_start A°ᵀ − of_momentum S°ᵀ, what is added to the state in direction e.
    """

    constant: Tensor
    of_start: Tensor
    of_momentum: Tensor | None


def _unknown(flow: Flow, streams: Streams, *, moving: bool) -> _Unknown:
    """Solve the triangular system of every chunk at once.

    The inverse is formed by substitution against the identity and then multiplied: for as many
    right sides as a state has rows and columns that is faster than substitution against them, and
    as accurate here (unit diagonal, entries bounded by η‖k‖²).
    """
    w, e = streams.measured, streams.direction
    assert w is not None and e is not None
    system = flow.meet(w, e, predict=True, at_once=streams.erases_at_once)
    eye = torch.eye(system.shape[-1], dtype=system.dtype, device=system.device)
    inverse = torch.linalg.solve_triangular(
        system, eye.expand_as(system), upper=False, unitriangular=True
    )
    if streams.target is not None:
        constant = inverse @ streams.target
    else:
        assert streams.known is not None
        direction, values = streams.known
        scores = flow.meet(w, direction, predict=True).tril(-1)
        constant = -(inverse @ (scores @ values))
    return _Unknown(
        constant=constant,
        of_start=inverse @ flow.from_start(w, predict=True),
        of_momentum=inverse @ flow.from_momentum(w, predict=True) if moving else None,
    )


def _scan(
    flow: Flow,
    streams: Streams,
    unknown: _Unknown | None,
    N: Tensor | None,
    N_s: Tensor | None,
    Z: Tensor,
    Zs: Tensor | None,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
    """The states at every chunk's start, and after the last: one affine map per chunk."""
    kept = flow.kept(Z)
    if unknown is None and Zs is None:
        assert N is not None
        starts, end = _decaying_sum(kept, N, Z)
        return starts, None, end, None
    eye = torch.eye(Z.shape[-2], dtype=Z.dtype, device=Z.device)
    M = eye * kept if unknown is None else (eye * kept).expand(*unknown.constant.shape[:3], -1, -1)
    into_end = into_momentum = None
    if unknown is not None and streams.direction is not None:
        into_end = flow.to_end(streams.direction, at_once=streams.erases_at_once).mT
        M = baddbmm(M, into_end, unknown.of_start, -1)
        added = into_end @ unknown.constant
        N = added if N is None else N + added
        if Zs is not None and not streams.erases_at_once:
            into_momentum = flow.to_momentum(streams.direction).mT
            added = into_momentum @ unknown.constant
            N_s = added if N_s is None else N_s + added
    assert N is not None
    if Zs is None:
        starts, end = _affine_scan(M, N, Z)
        return starts, None, end, None
    table = flow.table
    assert table is not None and table.m is not None and table.theta_end is not None
    assert N_s is not None
    A_S = eye * table.m[..., -1][..., None, None]
    S_S = eye * table.theta_end[..., None, None]
    S_A = torch.zeros_like(S_S)
    if unknown is not None and unknown.of_momentum is not None and into_end is not None:
        A_S = A_S - into_end @ unknown.of_momentum
        if into_momentum is not None:
            S_A = S_A - into_momentum @ unknown.of_start
            S_S = S_S - into_momentum @ unknown.of_momentum
    whole = torch.cat([torch.cat([M, A_S], -1), torch.cat([S_A, S_S], -1)], -2)
    starts, end = _affine_scan(whole, torch.cat([N, N_s], -2), torch.cat([Z, Zs], -2))
    K = Z.shape[-2]
    return starts[..., :K, :], starts[..., K:, :], end[..., :K, :], end[..., K:, :]


def _walk(
    flow: Flow,
    streams: Streams,
    unknown: _Unknown,
    N: Tensor | None,
    N_s: Tensor | None,
    Z: Tensor,
    Zs: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """As `_scan`, and the unknown rows, by the chunk's own products instead of one map per chunk.

    With momentum two thin products per state take the place of a map of 2K × 2K that must be
    formed first: less work and memory, at more and smaller steps, which a GPU would notice.
    """
    table = flow.table
    assert streams.direction is not None and table is not None
    assert table.m is not None and table.theta_end is not None
    lead, count = Z.shape[:2], unknown.constant.shape[0]

    def steps(x: Tensor | None) -> tuple[Tensor, ...]:
        return () if x is None else x.flatten(1, 2).unbind(0)

    kept = flow.kept(Z)
    keep = steps(kept.expand(count, *lead, *kept.shape[3:]))
    carried, moved = (steps(x[..., None, None]) for x in (table.m[..., -1], table.theta_end))
    into = steps(flow.to_end(streams.direction, at_once=streams.erases_at_once).mT)
    into_momentum: tuple[Tensor, ...] = ()
    if not streams.erases_at_once:
        into_momentum = steps(flow.to_momentum(streams.direction).mT)
    known, known_s = steps(N), steps(N_s)
    constant, of_start = steps(unknown.constant), steps(unknown.of_start)
    of_momentum = steps(unknown.of_momentum)
    A, S = Z.flatten(0, 1), Zs.flatten(0, 1)
    starts: list[Tensor] = []
    moments: list[Tensor] = []
    rows: list[Tensor] = []
    for n in range(count):
        starts.append(A)
        moments.append(S)
        x = torch.baddbmm(constant[n], of_start[n], A, alpha=-1)
        x = torch.baddbmm(x, of_momentum[n], S, alpha=-1)
        rows.append(x)
        A = torch.addcmul(known[n], A, keep[n]) if known else A * keep[n]
        A = torch.baddbmm(torch.addcmul(A, S, carried[n]), into[n], x)
        S = torch.addcmul(known_s[n], S, moved[n]) if known_s else S * moved[n]
        S = torch.baddbmm(S, into_momentum[n], x) if into_momentum else S
    found = [torch.stack(x).unflatten(1, lead) for x in (starts, moments, rows)]
    return found[0], found[1], found[2], A.unflatten(0, lead), S.unflatten(0, lead)


def _affine_scan(M: Tensor, N: Tensor, Z: Tensor) -> tuple[Tensor, Tensor]:
    """Z ← M Z + N over chunks: the state before each, and after the last."""
    lead = Z.shape[:2]
    state, starts = Z.flatten(0, 1), []
    for m, n in zip(M.flatten(1, 2).unbind(0), N.flatten(1, 2).unbind(0), strict=True):
        starts.append(state)
        state = torch.baddbmm(n, m, state)
    return torch.stack(starts).unflatten(1, lead), state.unflatten(0, lead)


def _decaying_sum(kept: Tensor, N: Tensor, Z: Tensor) -> tuple[Tensor, Tensor]:
    """Z ← kept ⊙ Z + N over chunks: the state before each, and after the last."""
    starts: list[Tensor] = []
    factors = kept.expand(N.shape[0], *kept.shape[1:]).unbind(0)
    for factor, n in zip(factors, N.unbind(0), strict=True):
        starts.append(Z)
        Z = torch.addcmul(n, factor, Z)
    return torch.stack(starts), Z
