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

from dataclasses import dataclass, field

import torch
from torch import Tensor

from recollect.engines.common.coefficients import Coefficients, shift
from recollect.engines.common.decayed_products import causal_mask, decayed_gram, decayed_mix
from recollect.engines.common.linalg import baddbmm

__all__ = ["ChunkTransition", "Streams", "solve"]


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


@dataclass(frozen=True, kw_only=True)
class ChunkTransition:
    """How contributions and states travel inside a chunk: coefficients, or decays to absorb.

    Attributes:
        table: coefficients for one decay per head, with or without momentum; or
        total: float64 cumulated log decays ``[N, B, H, C, K or 1]``; neither: nothing decays.
        total_v: the same over value channels, or ``None``.
        before: whether predictions are measured after their token's decay.
        tokens: C.
        absorbed: whether ``total`` may be split into exp(X) and exp(−Y).
    """

    table: Coefficients | None
    total: Tensor | None
    total_v: Tensor | None
    before: bool
    tokens: int
    absorbed: bool
    # The same rows are scaled the same way for the system, the read-out and the start.
    _scaled: dict[tuple[int, str], tuple[Tensor, Tensor]] = field(default_factory=dict, init=False)

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

    def gram(self, x: Tensor, y: Tensor, *, predict: bool, at_once: bool = False) -> Tensor:
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

    def from_state(self, x: Tensor, *, predict: bool) -> Tensor:
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

    def decay(self, like: Tensor) -> Tensor:
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
    transition: ChunkTransition, streams: Streams, queries: Tensor, Z: Tensor, Zs: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Outputs ``[N, B, H, C G, V]`` and the transposed states after the last chunk."""
    known = known_s = unknown = x = None
    if streams.known is not None:
        direction, values = streams.known
        known = transition.to_end(direction).mT @ transition.value_to_end(values)
        if Zs is not None:
            known_s = transition.to_momentum(direction).mT @ values
    if streams.measured is not None:
        unknown = _unknown(transition, streams, moving=Zs is not None)
    if unknown is not None and Zs is not None and Z.device.type == "cpu":
        starts, moments, x, Z, Zs = _thin_products(transition, unknown, (known, known_s), Z, Zs)
    else:
        starts, moments, Z, Zs = _affine_maps(transition, unknown, (known, known_s), Z, Zs)
    y = transition.from_state(queries, predict=False) @ starts
    if transition.total_v is not None:
        y = y * transition.spread(transition.total_v.exp().to(y.dtype), queries, -2)
    if moments is not None:
        y = baddbmm(y, transition.from_momentum(queries, predict=False), moments)
    if streams.known is not None:
        direction, values = streams.known
        scores = transition.gram(queries, direction, predict=False)
        if transition.total_v is None:
            y = baddbmm(y, scores, values)
        else:
            y = y + decayed_mix(scores, values, transition.total_v)
    if unknown is not None and streams.direction is not None:
        if x is None:
            x = baddbmm(unknown.constant, unknown.of_state, starts, -1)
            if moments is not None and unknown.of_momentum is not None:
                x = baddbmm(x, unknown.of_momentum, moments, -1)
        scores = transition.gram(
            queries, streams.direction, predict=False, at_once=streams.erases_at_once
        )
        y = baddbmm(y, scores, x)
    return y, Z, Zs


@dataclass(frozen=True, kw_only=True)
class _Unknown:
    """Minus the unknown rows, as an affine function of the chunk's start.

    −x = constant − of_state A°ᵀ − of_momentum S°ᵀ, what is added to the state in ``direction``.
    """

    constant: Tensor
    of_state: Tensor
    of_momentum: Tensor | None
    direction: Tensor
    erases_at_once: bool

    def into_states(self, transition: ChunkTransition) -> tuple[Tensor, Tensor | None]:
        """Directions in which −x is added to A_C, and to S_C where it does not bypass that."""
        into_state = transition.to_end(self.direction, at_once=self.erases_at_once).mT
        if self.of_momentum is None or self.erases_at_once:
            return into_state, None
        return into_state, transition.to_momentum(self.direction).mT


def _unknown(transition: ChunkTransition, streams: Streams, *, moving: bool) -> _Unknown:
    """Solve the triangular system of every chunk at once.

    The inverse is formed by substitution against the identity and then multiplied: for as many
    right sides as a state has rows and columns that is faster than substitution against them, and
    as accurate here (unit diagonal, entries bounded by η‖k‖²).
    """
    w, e, at_once = streams.measured, streams.direction, streams.erases_at_once
    assert w is not None and e is not None
    system = transition.gram(w, e, predict=True, at_once=at_once)
    eye = torch.eye(system.shape[-1], dtype=system.dtype, device=system.device)
    inverse = torch.linalg.solve_triangular(
        system, eye.expand_as(system), upper=False, unitriangular=True
    )
    if streams.target is not None:
        constant = inverse @ streams.target
    else:
        assert streams.known is not None
        direction, values = streams.known
        scores = transition.gram(w, direction, predict=True).tril(-1)
        constant = -(inverse @ (scores @ values))
    return _Unknown(
        constant=constant,
        of_state=inverse @ transition.from_state(w, predict=True),
        of_momentum=inverse @ transition.from_momentum(w, predict=True) if moving else None,
        direction=e,
        erases_at_once=at_once,
    )


def _affine_maps(
    transition: ChunkTransition,
    unknown: _Unknown | None,
    known: tuple[Tensor | None, Tensor | None],
    Z: Tensor,
    Zs: Tensor | None,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
    """The states at every chunk's start, and after the last: one affine map per chunk.

    ``known`` is what products without unknowns add to A_C and S_C.
    """
    decay, (N, N_s) = transition.decay(Z), known
    if unknown is None and Zs is None:
        assert N is not None
        starts, end = _decaying_sum(decay, N, Z)
        return starts, None, end, None
    eye = torch.eye(Z.shape[-2], dtype=Z.dtype, device=Z.device)
    M, into_state, into_momentum = eye * decay, None, None
    if unknown is not None:
        into_state, into_momentum = unknown.into_states(transition)
        M = M.expand(*unknown.constant.shape[:3], -1, -1)
        M = baddbmm(M, into_state, unknown.of_state, -1)
        N = _plus(N, into_state @ unknown.constant)
        if into_momentum is not None:
            N_s = _plus(N_s, into_momentum @ unknown.constant)
    assert N is not None
    if Zs is None:
        starts, end = _affine_scan(M, N, Z)
        return starts, None, end, None
    table = transition.table
    assert table is not None and table.m is not None and table.theta_end is not None
    assert N_s is not None
    A_S = eye * table.m[..., -1][..., None, None]
    S_S = eye * table.theta_end[..., None, None]
    S_A = torch.zeros_like(S_S)
    if unknown is not None and unknown.of_momentum is not None and into_state is not None:
        A_S = A_S - into_state @ unknown.of_momentum
        if into_momentum is not None:
            S_A = S_A - into_momentum @ unknown.of_state
            S_S = S_S - into_momentum @ unknown.of_momentum
    whole = torch.cat([torch.cat([M, A_S], -1), torch.cat([S_A, S_S], -1)], -2)
    starts, end = _affine_scan(whole, torch.cat([N, N_s], -2), torch.cat([Z, Zs], -2))
    K = Z.shape[-2]
    return starts[..., :K, :], starts[..., K:, :], end[..., :K, :], end[..., K:, :]


def _plus(x: Tensor | None, y: Tensor) -> Tensor:
    return y if x is None else x + y


def _thin_products(
    transition: ChunkTransition,
    unknown: _Unknown,
    known: tuple[Tensor | None, Tensor | None],
    Z: Tensor,
    Zs: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """As `_affine_maps`, and the unknown rows, by products of the chunk's own rows.

    With momentum two thin products per state take the place of a map of 2K × 2K that must be
    formed first: less work and memory, at more and smaller steps, which a GPU would notice.
    """
    table, decay = transition.table, transition.decay(Z)
    assert table is not None and table.m is not None and table.theta_end is not None
    lead, count = Z.shape[:2], unknown.constant.shape[0]

    def steps(x: Tensor | None) -> tuple[Tensor, ...]:
        return () if x is None else x.flatten(1, 2).unbind(0)

    keep = steps(decay.expand(count, *lead, *decay.shape[3:]))
    carried, moved = (steps(x[..., None, None]) for x in (table.m[..., -1], table.theta_end))
    into_state, into_momentum = map(steps, unknown.into_states(transition))
    known_a, known_s = map(steps, known)
    constant, of_state = steps(unknown.constant), steps(unknown.of_state)
    of_momentum = steps(unknown.of_momentum)
    A, S = Z.flatten(0, 1), Zs.flatten(0, 1)
    starts: list[Tensor] = []
    moments: list[Tensor] = []
    rows: list[Tensor] = []
    for n in range(count):
        starts.append(A)
        moments.append(S)
        x = torch.baddbmm(constant[n], of_state[n], A, alpha=-1)
        x = torch.baddbmm(x, of_momentum[n], S, alpha=-1)
        rows.append(x)
        A = torch.addcmul(known_a[n], A, keep[n]) if known_a else A * keep[n]
        A = torch.baddbmm(torch.addcmul(A, S, carried[n]), into_state[n], x)
        S = torch.addcmul(known_s[n], S, moved[n]) if known_s else S * moved[n]
        S = torch.baddbmm(S, into_momentum[n], x) if into_momentum else S
    starts_, moments_, rows_ = (torch.stack(x).unflatten(1, lead) for x in (starts, moments, rows))
    return starts_, moments_, rows_, A.unflatten(0, lead), S.unflatten(0, lead)


def _affine_scan(M: Tensor, N: Tensor, Z: Tensor) -> tuple[Tensor, Tensor]:
    """Z ← M Z + N over chunks: the state before each, and after the last."""
    lead = Z.shape[:2]
    state, starts = Z.flatten(0, 1), []
    for m, n in zip(M.flatten(1, 2).unbind(0), N.flatten(1, 2).unbind(0), strict=True):
        starts.append(state)
        state = torch.baddbmm(n, m, state)
    return torch.stack(starts).unflatten(1, lead), state.unflatten(0, lead)


def _decaying_sum(decay: Tensor, N: Tensor, Z: Tensor) -> tuple[Tensor, Tensor]:
    """Z ← decay ⊙ Z + N over chunks: the state before each, and after the last."""
    starts: list[Tensor] = []
    factors = decay.expand(N.shape[0], *decay.shape[1:]).unbind(0)
    for factor, n in zip(factors, N.unbind(0), strict=True):
        starts.append(Z)
        Z = torch.addcmul(n, factor, Z)
    return torch.stack(starts), Z
