"""The linear engine in chunks: exact at every token, and parallel in time.

`_common` serves memories without momentum, window, probe or decay over values: linear attention,
RetNet, Mamba-2, GLA, DeltaNet, Gated DeltaNet, Longhorn and leaky LMS. It writes the pieces of a
group of chunks in ordinary differentiable operations, and `chunk_recurrence` carries the state
through them. `chunk_general` serves the other memories, except those that do not separate, which
`recurrent` runs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from recollect.engines.common.coefficients import (
    absorbable,
    coefficients,
    cumulated,
    decay_matrix,
    shift,
)
from recollect.engines.common.decayed_products import decayed_gram
from recollect.engines.linear.chunk_general import ChunkTransition, Streams, solve
from recollect.engines.linear.chunk_recurrence import Pieces, Plan, run_chunks
from recollect.engines.linear.inputs import LinearProblem
from recollect.engines.linear.recurrent import recurrent

__all__ = ["chunk_length", "chunked"]

GROUP = 4096
"""Rows (tokens · heads · batch) of a group on a CPU, about 1 MB per intermediate of 64 channels."""


def chunk_length(*, solves: bool, cpu: bool = True) -> int:
    """Tokens per chunk when nobody asks for a number: measured, and without influence on results.

    On a CPU a triangular system of 32 rows costs less than what the extra chunks do; without a
    system, and on a GPU, fewer and larger operations win.
    """
    return 32 if solves and cpu else 64


def chunked(p: LinearProblem) -> tuple[Tensor, Tensor, Tensor | None]:
    """Outputs ``[B, T, H, G, V]``, A and S (``None`` without momentum) after all tokens.

    Raises:
        ValueError: a decay over value channels with an error that sees the prediction.
    """
    (B, T, H), cpu = p.k.shape[:3], p.k.device.type == "cpu"
    sees, moves = p.affine[0] != 0, p.momentum is not None
    over_values = p.log_decay_value is not None
    if over_values and sees:
        raise ValueError("a decay over value channels needs a = 0: give each channel its own head")
    channels = over_values or (p.log_decay is not None and p.log_decay.dim() == 4)
    if B == 0 or T == 0 or (moves and channels):
        # Momentum under a decay per channel is a difference of two separable terms that cancel.
        return recurrent(p)
    p = p.masked()
    chunk = min(p.chunk_size or chunk_length(solves=sees, cpu=cpu), T)
    if p.window is None and p.probe is None and not moves and not over_values:
        return *_common(p, chunk), None
    span = chunk * max(1, GROUP // (B * H * chunk))
    if p.window is not None or not cpu or span >= T:
        return _general(p, chunk)
    # Groups of chunks that fit the cache, one after the other.
    outputs: list[Tensor] = []
    A, S = p.A0, p.S0
    for part in p.split(span):
        y, A, S = _general(replace(part, A0=A, S0=S), chunk)
        outputs.append(y)
    return torch.cat(outputs, dim=1), A, S


def _general(p: LinearProblem, chunk: int) -> tuple[Tensor, Tensor, Tensor | None]:
    """Lay tokens out in chunks, say how contributions travel inside one, and solve."""
    (_, T, H, G, _), (a, b) = p.q.shape, p.affine
    cut = _Cut(T=T, C=min(chunk, T))
    keys, values, weights = _rows(p, cut)
    transition = _transition(p, cut)
    values = values if b == 1 else b * values
    written = keys * weights
    if a == 0:
        streams = Streams(known=(written, values))
    elif p.probe is not None and p.erase is not None:
        erase = cut.split(p.erase)
        streams = Streams(
            measured=cut.split(p.probe),
            direction=erase if a == 1 else a * erase,
            known=(written, values),
        )
    elif p.momentum_on == "value" and p.momentum is not None:
        streams = Streams(
            measured=keys,
            direction=written if a == 1 else a * written,
            known=(written, values),
            erases_at_once=True,
        )
    else:
        # Erase and write share keys and coefficients: solve for the error itself.
        measured = keys if a == 1 else a * keys
        streams = Streams(measured=measured, direction=written, target=values)
    queries = cut.split(p.q.flatten(2, 3)).unflatten(2, (H, G))
    queries = queries.transpose(3, 4).flatten(3, 4)  # [N, B, H, C G, F]
    y, Z, Zs = solve(transition, streams, queries, p.A0.mT, None if p.S0 is None else p.S0.mT)
    y = cut.join(y.unflatten(3, (cut.C, G)).transpose(3, 4).flatten(2, 3))
    return y.unflatten(2, (H, G)), Z.mT, None if Zs is None else Zs.mT


def _transition(p: LinearProblem, cut: _Cut) -> ChunkTransition:
    """Decays to absorb where that is exact, coefficients where it is not."""
    log_decay, momentum, total, table, live = p.log_decay, p.momentum, None, None, None
    absorbed = True
    if log_decay is not None and momentum is None:
        channels = log_decay.dim() == 4
        total = cumulated(cut.split(log_decay if channels else log_decay.unsqueeze(-1)), -2)
        # Absorbing a decay needs the whole chunk within range; then it needs no matrix at all.
        absorbed = absorbable(total)
        if not channels and not absorbed:
            total, absorbed = None, True  # per head coefficients stand in a matrix, at any depth
    if momentum is not None and (p.live is not None or cut.missing):
        # The last chunk's own padding must not move A by S.
        live = p.lr.new_ones(p.lr.shape[:2]) if p.live is None else p.live.to(p.lr.dtype)
        live = cut.scalars(live.unsqueeze(-1))
    if total is None and (log_decay is not None or momentum is not None):
        table = coefficients(
            None if log_decay is None else cut.scalars(log_decay),
            None if momentum is None else cut.scalars(momentum, fill=1.0),
            live,
            cut.scalars(p.lr.new_zeros(1, 1, 1).expand(p.lr.shape)),
        )
    return ChunkTransition(
        table=table,
        total=total,
        total_v=None if p.log_decay_value is None else cumulated(cut.split(p.log_decay_value), -2),
        before=p.before,
        tokens=cut.C,
        absorbed=absorbed,
    )


@dataclass(frozen=True, kw_only=True)
class _Cut:
    """T tokens in N chunks of C, padded at the end with zeros."""

    T: int
    C: int

    @property
    def N(self) -> int:
        return -(-self.T // self.C)

    @property
    def missing(self) -> int:
        """Tokens that the last chunk lacks."""
        return -self.T % self.C

    def split(self, x: Tensor, fill: float = 0.0) -> Tensor:
        """``[B, T, H, D] -> [N, B, H, C, D]``."""
        if self.missing:
            x = torch.cat([x, x.new_full((x.shape[0], self.missing, *x.shape[2:]), fill)], dim=1)
        return x.unflatten(1, (self.N, self.C)).permute(1, 0, 3, 2, 4).contiguous()

    def scalars(self, x: Tensor, fill: float = 0.0) -> Tensor:
        """``[B, T, H] -> [N, B, H, C]``."""
        return self.split(x.unsqueeze(-1), fill).squeeze(-1)

    def join(self, x: Tensor) -> Tensor:
        """``[N, B, H, C, D] -> [B, T, H, D]``."""
        return x.permute(1, 0, 3, 2, 4).flatten(1, 2)[:, : self.T]


def _rows(p: LinearProblem, cut: _Cut) -> tuple[Tensor, Tensor, Tensor]:
    """Keys, values and η γ of every row ``[N, B, H, C c, ·]``: c rows per token under a window."""
    if p.window is None:
        return cut.split(p.k), cut.split(p.v), cut.scalars(p.lr).unsqueeze(-1)
    (B, T), c = p.k.shape[:2], p.window.shape[-1]
    if p.past is None:
        k, v = (torch.cat([x.new_zeros(B, c - 1, *x.shape[2:]), x], dim=1) for x in (p.k, p.v))
        mask = k.new_zeros(B, c - 1)
    else:
        k, v = torch.cat([p.past.k, p.k], dim=1), torch.cat([p.past.v, p.v], dim=1)
        mask = p.past.mask.to(k.dtype)
    present = torch.cat([mask, mask.new_ones(B, T)], dim=1)

    # Row (t, m) is association t − m: the joined run seen from c − 1 − m tokens in.
    def windows(x: Tensor, dim: int) -> Tensor:
        return torch.stack([x[:, c - 1 - m : c - 1 - m + T] for m in range(c)], dim=dim)

    def rows(x: Tensor) -> Tensor:  # [B, T, H, c, D] -> [N, B, H, C c, D]
        D = x.shape[-1]
        return cut.split(x.flatten(3)).unflatten(-1, (c, D)).flatten(3, 4)

    weights = p.lr.unsqueeze(-1) * p.window * windows(present, -1).unsqueeze(2)  # [B, T, H, c]
    return rows(windows(k, 3)), rows(windows(v, 3)), rows(weights.unsqueeze(-1))


# -- the common case -----------------------------------------------------------------------------


def _common(p: LinearProblem, chunk: int) -> tuple[Tensor, Tensor]:
    """Outputs ``[B, T, H, G, V]`` and A after all tokens, for T ≥ 1.

    Args:
        p: without momentum, window, probe and decay over values.
        chunk: tokens of a chunk, at most T.
    """
    (B, T, H, G, _), v = p.q.shape, p.v
    layout = _Layout(B=B, H=H, G=G, C=chunk, affine=p.affine, decays_first=p.before)
    # Elsewhere than on a CPU, launches cost more than memory: one group.
    rows = GROUP if p.q.device.type == "cpu" else B * H * T
    size = chunk * max(1, rows // (B * H * chunk))
    plan = Plan(
        prepare=layout.prepare,
        groups=[(start, min(start + size, T)) for start in range(0, T, size)],
        outputs=lambda: v.new_empty(B, T, H, G, v.shape[-1]),
        finish=layout.finish,
        unfinish=layout.unfinish,
    )
    tokens = (p.q, p.k, v, p.lr)
    tokens = tokens if p.log_decay is None else (*tokens, p.log_decay)
    y, Z = run_chunks(plan, p.A0.mT.flatten(0, 1), *tokens)
    return y, Z.unflatten(0, (B, H)).mT


@dataclass(frozen=True, kw_only=True)
class _Layout:
    """Tokens ``[B, t, H, ...]`` as chunks ``[n, B·H, C, ...]``, the last padded with zeros."""

    B: int
    H: int
    G: int
    C: int
    affine: tuple[float, float]
    decays_first: bool

    def split(self, x: Tensor) -> Tensor:
        missing = -x.shape[1] % self.C
        if missing:
            x = torch.cat([x, x.new_zeros(x.shape[0], missing, *x.shape[2:])], dim=1)
        x = x.unflatten(1, (x.shape[1] // self.C, self.C))  # [B, n, C, H, ...]
        return x.permute(1, 0, 3, 2, *range(4, x.dim())).flatten(1, 2)

    def finish(self, y: Tensor, tokens: int) -> Tensor:
        """``[n, B·H, C·G, V] -> [B, t, H, G, V]``."""
        y = y.unflatten(1, (self.B, self.H)).unflatten(3, (self.C, self.G))
        return y.permute(1, 0, 3, 2, 4, 5).flatten(1, 2)[:, :tokens]

    def unfinish(self, y: Tensor) -> Tensor:
        """The way back."""
        return self.split(y).flatten(2, 3).contiguous()

    def prepare(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        lr: Tensor,
        log_decay: Tensor | None = None,
    ) -> Pieces:
        """The pieces of one group.

        While chunks decay by less than e^−30, cumulated decays are absorbed on both sides of every
        product; otherwise, and where the host would wait to know it, coefficients are differences
        whose exponents are never positive.
        """
        a, b = self.affine
        # Products copy what is not contiguous, each time: copy once.
        Q = self.split(q).flatten(2, 3).contiguous()  # [n, BH, C G, K]
        k = self.split(k).contiguous()
        c = self.split(v) if b == 1 else b * self.split(v)
        c = c.contiguous() if a == 0 else c
        X = None if a == 0 else (k if a == 1 else a * k)
        eta = self.split(lr).unsqueeze(-1)  # [n, BH, C, 1]
        if log_decay is None:
            D = k * eta
            system = None if X is None else X @ D.mT
            return Pieces(system, self._causal(Q @ D.mT), X, Q, D, c, None)
        logs = self.split(log_decay)
        logs = logs if log_decay.dim() == 4 else logs.unsqueeze(-1)
        total = cumulated(logs, 2)  # [n, BH, C, K or 1]
        reach = total.exp().to(c.dtype)
        end = reach[..., -1:, :]
        visible = total if self.decays_first else shift(total, 2, 0.0)
        if X is None:
            Xs = None
        else:
            Xs = X * (reach if self.decays_first else visible.exp().to(c.dtype))
        Qs = Q * self._queries(reach)
        if absorbable(total):
            back = (-total).exp().to(c.dtype)
            D = k * (eta * back)
            system = None if Xs is None else Xs @ D.mT
            return Pieces(system, self._causal(Qs @ D.mT), Xs, Qs, D * end, c, end.mT)
        D = k * eta
        to_end = D * (total[..., -1:, :] - total).exp().to(c.dtype)
        if log_decay.dim() == 4:
            scores = decayed_gram(Q, total, D, total, strict=False)
            system = None if X is None else decayed_gram(X, visible, D, total, strict=True)
        else:
            P = decay_matrix(total.squeeze(-1), c.dtype)
            scores = (Q @ D.mT) * self._queries(P)
            system = None
            if X is not None:
                earlier = shift(P, -2, 0.0)
                earlier = earlier * logs.exp().to(c.dtype) if self.decays_first else earlier
                system = (X @ D.mT) * earlier
        return Pieces(system, scores, Xs, Qs, to_end, c, end.mT)

    def _queries(self, x: Tensor) -> Tensor:
        """Numbers per token spread over its G queries."""
        return x if self.G == 1 else x.repeat_interleave(self.G, dim=-2)

    def _causal(self, scores: Tensor) -> Tensor:
        """Zero where the written token is later than the reading one."""
        if self.G == 1:
            return scores.tril_()  # a fresh product, which autograd does not keep
        return scores * self._queries(scores.new_ones(self.C, self.C).tril())
