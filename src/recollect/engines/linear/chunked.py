"""The linear engine in chunks: exact at every token, and parallel in time.

The common memories go to `chunk_simple`; momentum, windows, probes and decays over values to
`chunk_general`; what does not separate, to `recurrent`. This file checks, pads and lays out.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from recollect.engines.common.coefficients import coefficients, cumulated
from recollect.engines.common.decayed_products import absorbable
from recollect.engines.linear.chunk_general import ChunkTransition, Streams, solve
from recollect.engines.linear.chunk_simple import GROUP, chunk_simple
from recollect.engines.linear.inputs import LinearProblem
from recollect.engines.linear.recurrent import recurrent

__all__ = ["chunk_length", "chunked"]


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
        return *chunk_simple(p, chunk), None
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
    elif p.momentum_of == "value" and p.momentum is not None:
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
