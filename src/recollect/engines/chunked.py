"""The linear engine in chunks: exact at every token, and parallel in time.

Inside a chunk the state is affine in what stood at its start, so one unit-lower-triangular system per
chunk gives the predictions of all its tokens at once (3-algorithms §3.3):

    (I + E⁻ ⊙ (W Dᵀ)) X = [known part | coefficients of A° | coefficients of S°]

with W the keys at which predictions are measured, D the directions in which they are written, and E⁻
the coefficients of earlier steps. Solved against coefficients instead of the states themselves, all
chunks are solved in parallel; what remains sequential is one small affine map per chunk,

    [A; S] ← M [A; S] + N,

which is a single batched product. Decay, momentum, step and window enter through coefficients only.

Layout: chunks first and contiguous, ``[N, B, H, C, ·]``, so that a step of the sequential pass reads
consecutive memory. States are kept transposed, ``[B, H, K, V]``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import overload

import torch
from torch import Tensor

from recollect.engines.coefficients import Coefficients, coefficients, cumulated, shift
from recollect.engines.gram import absorbable, causal_mask, decayed_gram, decayed_mix
from recollect.engines.plain import plain
from recollect.engines.recurrent import recurrent

__all__ = ["CHUNK", "chunked"]

CHUNK = 64


def chunked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    lr: Tensor | None,
    affine: tuple[float, float] = (1.0, 1.0),
    log_decay: Tensor | None = None,
    log_decay_value: Tensor | None = None,
    before: bool = False,
    momentum: Tensor | None = None,
    momentum_of: str = "gradient",
    window: Tensor | None = None,
    k_past: Tensor | None = None,
    v_past: Tensor | None = None,
    past_mask: Tensor | None = None,
    probe: Tensor | None = None,
    erase: Tensor | None = None,
    A0: Tensor | None = None,
    S0: Tensor | None = None,
    live: Tensor | None = None,
    chunk_size: int | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Run a matrix memory under an error a·prediction − b·value.

    Per head and token, with D_t the decay, P_t = A_{t−1} (``before``: D_t A_{t−1}) and i the
    associations of the window::

        g_t = Σ_i γ_(t,i) (a P_t k_i − b v_i) k_iᵀ
        S_t = θ_t S_{t−1} − η_t g_t           (momentum_of="value": on the part −b v kᵀ only)
        A_t = D_t A_{t−1} + S_t               (no momentum: D_t A_{t−1} − η_t g_t)
        A_t = D_t A_{t−1} − a (P_t w_t) e_tᵀ + η_t b v_t k_tᵀ       with a probe w and direction e

    Args:
        q: ``[B, T, H, G, K]``. k: ``[B, T, H, K]``. v: ``[B, T, H, V]``.
        lr: η ``[B, T, H]``, or ``None`` where it is 1.
        log_decay: ``[B, T, H]``, or ``[B, T, H, K]`` over columns of A; ≤ 0, −inf forgets all.
        log_decay_value: ``[B, T, H, V]`` over rows of A; needs a = 0.
        momentum: θ in [0, 1), ``[B, T, H]``.
        window: γ ``[B, T, H, c]``, entry m for association t − m; absent associations come in
            ``k_past, v_past [B, c − 1, H, ·]`` where ``past_mask``.
        probe, erase: w and e, ``[B, T, H, K]``.
        A0, S0: ``[B, H, V, K]``, zeros when omitted.
        live: ``[B, T]``; False only on the right. Dead tokens move nothing.
        chunk_size: tokens per chunk; no influence on results.

    Returns:
        y ``[B, T, H, G, V]``, A and S (``None`` without momentum) in float32 (float64 for float64
        inputs).

    Raises:
        ValueError: a decay over value channels with an error that sees the prediction.
    """
    if log_decay_value is not None and affine[0] != 0:
        raise ValueError("a decay over value channels needs a = 0: give each channel its own head")
    channels = log_decay is not None and log_decay.dim() == 4
    separable = momentum is None or not (channels or log_decay_value is not None)
    if q.shape[0] == 0 or q.shape[1] == 0 or not separable:
        # Momentum under a decay per channel is a difference of two separable terms that cancel.
        return recurrent(
            *(q, k, v),
            lr=lr,
            affine=affine,
            log_decay=log_decay,
            log_decay_value=log_decay_value,
            before=before,
            momentum=momentum,
            momentum_of=momentum_of,
            window=window,
            k_past=k_past,
            v_past=v_past,
            past_mask=past_mask,
            probe=probe,
            erase=erase,
            A0=A0,
            S0=S0,
            live=live,
        )
    T = q.shape[1]
    work = torch.float64 if v.dtype == torch.float64 else torch.float32
    cut = _Cut(T=T, C=min(chunk_size or CHUNK, T))
    gamma = None if window is None else window.to(work)
    step = None if lr is None else lr.to(work)
    alive = None if live is None else live.to(work)
    if alive is None and momentum is not None and T % cut.C:
        # The last chunk's own padding must not move A by S.
        alive = torch.ones(k.shape[:2], dtype=work, device=k.device)
    if live is not None:
        # Padding may hold anything: NaN times zero would reach its neighbours.
        q, k, v = (_idle(x, live, 0.0) for x in (q, k, v))
        probe, erase = _idle(probe, live, 0.0), _idle(erase, live, 0.0)
        step, gamma = _idle(step, live, 0.0), _idle(gamma, live, 0.0)
    if alive is not None:
        if step is None:
            step = alive.unsqueeze(-1).expand(k.shape[:3])
        log_decay = _idle(log_decay, alive, 0.0)
        log_decay_value = _idle(log_decay_value, alive, 0.0)
        momentum = _idle(momentum, alive, 1.0)
    if window is None and probe is None and momentum is None and log_decay_value is None:
        y, A = plain(
            *(q.to(work), k.to(work), v.to(work)),
            lr=step,
            affine=affine,
            log_decay=log_decay,
            before=before,
            A0=A0,
            chunk=cut.C,
        )
        return y.to(v.dtype), A, None
    keys, values, weights = _rows(
        k.to(work), v.to(work), step, gamma, k_past, v_past, past_mask, cut
    )
    like = cut.scalars(k.new_zeros(1, 1, 1, dtype=work).expand(k.shape[:3]))
    total = None
    if log_decay is not None and momentum is None:
        total = cumulated(cut.split(log_decay if channels else log_decay.unsqueeze(-1)), -2)
        if not channels and not absorbable(total):
            total = None  # one decay per head has its coefficients in a matrix, exact at any depth
    table = None
    if total is None and (log_decay is not None or momentum is not None):
        table = coefficients(
            None if log_decay is None else cut.scalars(log_decay),
            None if momentum is None else cut.scalars(momentum.to(work), fill=1.0),
            None if alive is None or momentum is None else cut.scalars(alive.unsqueeze(-1)),
            like,
        )
    total_v = None if log_decay_value is None else cumulated(cut.split(log_decay_value), -2)
    queries = cut.split(q.to(work).flatten(2, 3)).unflatten(2, (q.shape[2], q.shape[3]))
    queries = queries.transpose(3, 4).flatten(3, 4)  # [N, B, H, C G, K]
    flow = _Flow(
        table=table,
        total=total,
        total_v=total_v,
        before=before,
        tokens=cut.C,
        # Absorbing a decay needs the whole chunk within range; then it needs no matrix at all.
        absorbed=total is None or absorbable(total),
    )
    slope, values = affine[0], values if affine[1] == 1 else affine[1] * values
    measured = keys if slope == 1 else slope * keys
    written = keys if weights is None else keys * weights
    if slope == 0:
        streams = _Streams(known=(written, values))
    elif probe is not None and erase is not None:
        drop = cut.split(erase.to(work))
        if alive is not None:
            drop = drop * cut.scalars(alive.unsqueeze(-1)).unsqueeze(-1)
        streams = _Streams(
            measured=cut.split(probe.to(work)),
            direction=drop if slope == 1 else slope * drop,
            known=(written, values),
        )
    elif momentum_of == "value" and momentum is not None:
        streams = _Streams(
            measured=keys,
            direction=written if slope == 1 else slope * written,
            known=(written, values),
            erases_at_once=True,
        )
    else:
        # Erase and write share keys and coefficients: solve for the error itself.
        streams = _Streams(measured=measured, direction=written, target=values)
    Z = _start(A0, like, k.shape[-1], v.shape[-1])
    Zs = _start(S0, like, k.shape[-1], v.shape[-1]) if momentum is not None else None
    y, Z, Zs = _solve(flow, streams, queries, Z, Zs)
    y = cut.join(y.unflatten(3, (cut.C, q.shape[3])).transpose(3, 4).flatten(2, 3))
    y = y.unflatten(2, (q.shape[2], q.shape[3])).to(v.dtype)
    return y, Z.transpose(-1, -2), None if Zs is None else Zs.transpose(-1, -2)


@dataclass(frozen=True, kw_only=True)
class _Cut:
    """T tokens in N chunks of C, padded at the end with zeros."""

    T: int
    C: int

    @property
    def N(self) -> int:
        return -(-self.T // self.C)

    def split(self, x: Tensor, fill: float = 0.0) -> Tensor:
        """``[B, T, H, D] -> [N, B, H, C, D]``."""
        missing = self.N * self.C - self.T
        if missing:
            x = torch.cat([x, x.new_full((x.shape[0], missing, *x.shape[2:]), fill)], dim=1)
        return x.unflatten(1, (self.N, self.C)).permute(1, 0, 3, 2, 4).contiguous()

    def scalars(self, x: Tensor, fill: float = 0.0) -> Tensor:
        """``[B, T, H] -> [N, B, H, C]``."""
        return self.split(x.unsqueeze(-1), fill).squeeze(-1)

    def join(self, x: Tensor) -> Tensor:
        """``[N, B, H, C, D] -> [B, T, H, D]``."""
        return x.permute(1, 0, 3, 2, 4).flatten(1, 2)[:, : self.T]


@overload
def _idle(x: Tensor, alive: Tensor, value: float) -> Tensor: ...
@overload
def _idle(x: None, alive: Tensor, value: float) -> None: ...
@overload
def _idle(x: Tensor | None, alive: Tensor, value: float) -> Tensor | None: ...
def _idle(x: Tensor | None, alive: Tensor, value: float) -> Tensor | None:
    """Numbers of padded tokens replaced by the one that does nothing."""
    if x is None:
        return None
    return torch.where(alive.bool().view(*alive.shape, *(1,) * (x.dim() - 2)), x, value)


def _start(state: Tensor | None, like: Tensor, K: int, V: int) -> Tensor:
    if state is None:
        return like.new_zeros(*like.shape[1:3], K, V)
    return state.to(like.dtype).transpose(-1, -2)


def _rows(
    k: Tensor,
    v: Tensor,
    step: Tensor | None,
    gamma: Tensor | None,
    k_past: Tensor | None,
    v_past: Tensor | None,
    past_mask: Tensor | None,
    cut: _Cut,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Keys, values and η γ of every row ``[N, B, H, C c, ·]``: c rows per token under a window."""
    if gamma is None:
        weights = None if step is None else cut.scalars(step).unsqueeze(-1)
        return cut.split(k), cut.split(v), weights
    if step is None:
        step = torch.ones_like(gamma[..., 0])
    B, T, H = k.shape[:3]
    c = gamma.shape[-1]
    past = k.new_zeros(B, c - 1)
    if k_past is None or v_past is None:
        k_past, v_past = k.new_zeros(B, c - 1, *k.shape[2:]), v.new_zeros(B, c - 1, *v.shape[2:])
    else:
        past = past + 1 if past_mask is None else past_mask.to(k.dtype)
    # Row (t, m) is association t − m: the joined run seen from c − 1 − m tokens in.
    joined = [torch.cat([a.to(k.dtype), x], dim=1) for a, x in ((k_past, k), (v_past, v))]
    present = torch.cat([past, k.new_ones(B, T)], dim=1)

    def seen(x: Tensor) -> Tensor:
        return torch.stack([x[:, c - 1 - m : c - 1 - m + T] for m in range(c)], dim=3)

    def flat(x: Tensor) -> Tensor:  # [B, T, H, c, D] -> [N, B, H, C c, D]
        D = x.shape[-1]
        return cut.split(x.flatten(3)).unflatten(-1, (c, D)).flatten(3, 4)

    there = torch.stack([present[:, c - 1 - m : c - 1 - m + T] for m in range(c)], dim=-1)
    weights = step.unsqueeze(-1) * gamma * there.unsqueeze(2)  # [B, T, H, c]
    return flat(seen(joined[0])), flat(seen(joined[1])), flat(weights.unsqueeze(-1))


@dataclass(frozen=True, kw_only=True)
class _Streams:
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


class _Flow:
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

    def _rows(self, x: Tensor, like: Tensor, dim: int) -> Tensor:
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
            factor = self._rows(total.exp().to(x.dtype), x, -2)
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
        E = self._rows(self._rows(E, x, -2), y, -1)
        return (x @ y.mT) * E

    def from_start(self, x: Tensor, *, predict: bool) -> Tensor:
        """x times the coefficient of A° at its token."""
        if self.table is None:
            return self._scale(x, self._seen(predict))
        a = self.table.a
        if predict:
            a = self.table.before(a, decayed=self.before, first=1.0)
        return x * self._rows(a, x, -1).unsqueeze(-1)

    def from_momentum(self, x: Tensor, *, predict: bool) -> Tensor:
        """x times the coefficient of S° at its token."""
        assert self.table is not None and self.table.m is not None
        m = self.table.m
        if predict:
            m = self.table.before(m, decayed=self.before, first=0.0)
        return x * self._rows(m, x, -1).unsqueeze(-1)

    def to_end(self, y: Tensor, *, at_once: bool = False) -> Tensor:
        """y times the coefficient of its step in A_C."""
        if self.total is not None:
            rest = (self.total[..., -1:, :] - self.total).exp().to(y.dtype)
            return y * self._rows(rest, y, -2)
        if self.table is None:
            return y
        E = self.table.P if at_once else self.table.E
        return y * self._rows(E[..., -1, :], y, -1).unsqueeze(-1)

    def to_momentum(self, y: Tensor) -> Tensor:
        """y times the coefficient of its step in S_C."""
        assert self.table is not None and self.table.theta is not None
        return y * self._rows(self.table.theta[..., -1, :], y, -1).unsqueeze(-1)

    def value_to_end(self, values: Tensor) -> Tensor:
        """Values times their channels' decay to the end of the chunk."""
        if self.total_v is None:
            return values
        rest = (self.total_v[..., -1:, :] - self.total_v).exp().to(values.dtype)
        return values * self._rows(rest, values, -2)

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


def _solve(
    flow: _Flow, streams: _Streams, queries: Tensor, Z: Tensor, Zs: Tensor | None
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
    starts, moments, Z, Zs = _scan(flow, streams, unknown, N, N_s, Z, Zs)
    y = flow.from_start(queries, predict=False) @ starts
    if flow.total_v is not None:
        y = y * flow._rows(flow.total_v.exp().to(y.dtype), queries, -2)
    if moments is not None:
        y = _plus(y, flow.from_momentum(queries, predict=False), moments)
    if streams.known is not None:
        direction, values = streams.known
        scores = flow.meet(queries, direction, predict=False)
        if flow.total_v is None:
            y = _plus(y, scores, values)
        else:
            y = y + decayed_mix(scores, values, flow.total_v)
    if unknown is not None and streams.direction is not None:
        x = _plus(unknown.constant, unknown.of_start, starts, -1)
        if moments is not None and unknown.of_momentum is not None:
            x = _plus(x, unknown.of_momentum, moments, -1)
        scores = flow.meet(
            queries, streams.direction, predict=False, at_once=streams.erases_at_once
        )
        y = _plus(y, scores, x)
    return y, Z, Zs


def _plus(x: Tensor, left: Tensor, right: Tensor, sign: int = 1) -> Tensor:
    """x ± left @ right in one pass, over all leading axes at once."""
    lead = x.shape[:-2]
    flat = torch.baddbmm(x.flatten(0, -3), left.flatten(0, -3), right.flatten(0, -3), alpha=sign)
    return flat.unflatten(0, lead)


@dataclass(frozen=True, kw_only=True)
class _Unknown:
    """Minus the unknown rows, as an affine function of the chunk's start.

    −x = constant − of_start A°ᵀ − of_momentum S°ᵀ, what is added to the state in direction e.
    """

    constant: Tensor
    of_start: Tensor
    of_momentum: Tensor | None


def _unknown(flow: _Flow, streams: _Streams, *, moving: bool) -> _Unknown:
    """Solve the triangular system of every chunk at once.

    The inverse is formed by substitution against the identity and then multiplied: for as many right
    sides as a state has rows and columns that is faster than substitution against them, and as
    accurate here (unit diagonal, entries bounded by η‖k‖²).
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
    flow: _Flow,
    streams: _Streams,
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
        M = _plus(M, into_end, unknown.of_start, -1)
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
    return *starts.chunk(2, dim=-2), *end.chunk(2, dim=-2)


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
