"""The linear engine in chunks: exact at every token, and parallel in time.

`_common` runs memories without momentum, window, probe or decay over values: linear attention,
RetNet, Mamba-2, GLA, DeltaNet, Gated DeltaNet, Longhorn and leaky LMS. It computes the operands of
a group of chunks in differentiable operations, and `chunk_recurrence` carries the state through
them. `chunk_general` runs the other memories, except those that do not separate, which `recurrent`
runs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from recollect.engines.common.coefficients import (
    coefficients,
    cumulative_log_decay,
    decay_matrix,
    fits_float32_range,
    shift_right,
)
from recollect.engines.common.decayed_products import decayed_gram
from recollect.engines.linear.chunk_general import ChunkTransition, RankOneUpdates, solve
from recollect.engines.linear.chunk_recurrence import ChunkOperands, GroupedSequence, run_chunks
from recollect.engines.linear.inputs import LinearProblem
from recollect.engines.linear.recurrent import recurrent

__all__ = ["chunk_length", "chunked"]

GROUP = 4096
"""Rows (tokens · heads · batch) of a group on a CPU; 1 MB per intermediate of 64 channels."""


def chunk_length(*, solves: bool, cpu: bool = True) -> int:
    """Return the default number of tokens per chunk, which does not affect results.

    On a CPU, a smaller triangular system saves more time than additional chunks cost. Without a
    system, and on a GPU, fewer and larger operations are faster.
    """
    return 32 if solves and cpu else 64


def chunked(p: LinearProblem) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return outputs ``[B, T, H, G, V]``, A and S (``None`` without momentum) after all tokens.

    Raises:
        ValueError: If a decay over value channels meets an error that depends on the prediction.
    """
    (B, T, H), cpu = p.k.shape[:3], p.k.device.type == "cpu"
    has_error, has_momentum = p.affine[0] != 0, p.momentum is not None
    over_values = p.log_decay_value is not None
    if over_values and has_error:
        raise ValueError("a decay over value channels needs a = 0: give each channel its own head")
    channels = over_values or (p.log_decay is not None and p.log_decay.dim() == 4)
    if B == 0 or T == 0 or (has_momentum and channels):
        # Momentum with decay per channel is a difference of two separable terms that cancel.
        return recurrent(p)
    p = p.masked()
    chunk = min(p.chunk_size or chunk_length(solves=has_error, cpu=cpu), T)
    if p.window is None and p.probe is None and not has_momentum and not over_values:
        return *_common(p, chunk), None
    span = chunk * max(1, GROUP // (B * H * chunk))
    if p.window is not None or not cpu or span >= T:
        return _general(p, chunk)
    # Run groups of chunks that fit the cache sequentially.
    outputs: list[Tensor] = []
    A, S = p.A0, p.S0
    for part in p.split(span):
        y, A, S = _general(replace(part, A0=A, S0=S), chunk)
        outputs.append(y)
    return torch.cat(outputs, dim=1), A, S


def _general(p: LinearProblem, chunk: int) -> tuple[Tensor, Tensor, Tensor | None]:
    """Split tokens into chunks, build the transition inside a chunk, and solve."""
    (_, T, H, G, _), (a, b) = p.q.shape, p.affine
    layout = _ChunkLayout(T=T, C=min(chunk, T))
    keys, values, weights = _rows(p, layout)
    transition = _transition(p, layout)
    values = values if b == 1 else b * values
    write_keys = keys * weights
    if a == 0:
        updates = RankOneUpdates(fixed_writes=(write_keys, values))
    elif p.probe is not None and p.erase is not None:
        erase = layout.split(p.erase)
        updates = RankOneUpdates(
            probe_keys=layout.split(p.probe),
            erase_keys=erase if a == 1 else a * erase,
            fixed_writes=(write_keys, values),
        )
    elif p.momentum_on == "value" and p.momentum is not None:
        updates = RankOneUpdates(
            probe_keys=keys,
            erase_keys=write_keys if a == 1 else a * write_keys,
            fixed_writes=(write_keys, values),
            bypasses_momentum=True,
        )
    else:
        # Erase and write share keys and coefficients: solve for the error.
        probe_keys = keys if a == 1 else a * keys
        updates = RankOneUpdates(probe_keys=probe_keys, erase_keys=write_keys, target=values)
    queries = layout.split(p.q.flatten(2, 3)).unflatten(2, (H, G))
    queries = queries.transpose(3, 4).flatten(3, 4)  # [N, B, H, C G, F]
    y, Z, Zs = solve(transition, updates, queries, p.A0.mT, None if p.S0 is None else p.S0.mT)
    y = layout.join(y.unflatten(3, (layout.C, G)).transpose(3, 4).flatten(2, 3))
    return y.unflatten(2, (H, G)), Z.mT, None if Zs is None else Zs.mT


def _transition(p: LinearProblem, layout: _ChunkLayout) -> ChunkTransition:
    """Return decays to absorb if that is exact, and coefficients otherwise."""
    log_decay, momentum, log_decay_sums, table, mask = (
        p.log_decay,
        p.momentum,
        None,
        None,
        None,
    )
    can_absorb = True
    if log_decay is not None and momentum is None:
        channels = log_decay.dim() == 4
        log_decay_sums = cumulative_log_decay(
            layout.split(log_decay if channels else log_decay.unsqueeze(-1)), -2
        )
        # Absorption needs the decay of the full chunk within range, and needs no matrix.
        can_absorb = fits_float32_range(log_decay_sums)
        if not channels and not can_absorb:
            log_decay_sums, can_absorb = (
                None,
                True,
            )  # a matrix of coefficients per head is exact for any decay
    if momentum is not None and (p.token_mask is not None or layout.missing):
        # Padding of the last chunk must not add S to A.
        mask = (
            p.lr.new_ones(p.lr.shape[:2]) if p.token_mask is None else p.token_mask.to(p.lr.dtype)
        )
        mask = layout.scalars(mask.unsqueeze(-1))
    if log_decay_sums is None and (log_decay is not None or momentum is not None):
        table = coefficients(
            None if log_decay is None else layout.scalars(log_decay),
            None if momentum is None else layout.scalars(momentum, fill=1.0),
            mask,
            layout.scalars(p.lr.new_zeros(1, 1, 1).expand(p.lr.shape)),
        )
    return ChunkTransition(
        table=table,
        log_decay_sums=log_decay_sums,
        value_log_decay_sums=None
        if p.log_decay_value is None
        else cumulative_log_decay(layout.split(p.log_decay_value), -2),
        decays_first=p.decays_first,
        tokens=layout.C,
        can_absorb=can_absorb,
    )


@dataclass(frozen=True, kw_only=True)
class _ChunkLayout:
    """Layout of T tokens in N chunks of C, padded at the end with zeros."""

    T: int
    C: int

    @property
    def N(self) -> int:
        return -(-self.T // self.C)

    @property
    def missing(self) -> int:
        """Number of padded tokens in the last chunk."""
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


def _rows(p: LinearProblem, layout: _ChunkLayout) -> tuple[Tensor, Tensor, Tensor]:
    """Return keys, values and η γ of every row ``[N, B, H, C c, ·]``: c rows per token."""
    if p.window is None:
        return layout.split(p.k), layout.split(p.v), layout.scalars(p.lr).unsqueeze(-1)
    (B, T), c = p.k.shape[:2], p.window.shape[-1]
    if p.past is None:
        k, v = (torch.cat([x.new_zeros(B, c - 1, *x.shape[2:]), x], dim=1) for x in (p.k, p.v))
        mask = k.new_zeros(B, c - 1)
    else:
        k, v = torch.cat([p.past.k, p.k], dim=1), torch.cat([p.past.v, p.v], dim=1)
        mask = p.past.mask.to(k.dtype)
    present = torch.cat([mask, mask.new_ones(B, T)], dim=1)

    # Row (t, m) is association t − m: index t + c − 1 − m of the concatenated associations.
    def windows(x: Tensor, dim: int) -> Tensor:
        return torch.stack([x[:, c - 1 - m : c - 1 - m + T] for m in range(c)], dim=dim)

    def rows(x: Tensor) -> Tensor:  # [B, T, H, c, D] -> [N, B, H, C c, D]
        D = x.shape[-1]
        return layout.split(x.flatten(3)).unflatten(-1, (c, D)).flatten(3, 4)

    weights = p.lr.unsqueeze(-1) * p.window * windows(present, -1).unsqueeze(2)  # [B, T, H, c]
    return rows(windows(k, 3)), rows(windows(v, 3)), rows(weights.unsqueeze(-1))


# -- the common case -----------------------------------------------------------------------------


def _common(p: LinearProblem, chunk: int) -> tuple[Tensor, Tensor]:
    """Return outputs ``[B, T, H, G, V]`` and A after all tokens, for T ≥ 1.

    Args:
        p: problem without momentum, window, probe and decay over values.
        chunk: tokens of a chunk, at most T.
    """
    (B, T, H, G, _), v = p.q.shape, p.v
    layout = _GroupLayout(B=B, H=H, G=G, C=chunk, affine=p.affine, decays_first=p.decays_first)
    # On a GPU launches cost more than memory: use one group.
    rows = GROUP if p.q.device.type == "cpu" else B * H * T
    size = chunk * max(1, rows // (B * H * chunk))
    sequence = GroupedSequence(
        prepare=layout.prepare,
        groups=[(start, min(start + size, T)) for start in range(0, T, size)],
        outputs=lambda: v.new_empty(B, T, H, G, v.shape[-1]),
        from_chunks=layout.from_chunks,
        to_chunks=layout.to_chunks,
    )
    tokens = (p.q, p.k, v, p.lr)
    tokens = tokens if p.log_decay is None else (*tokens, p.log_decay)
    y, Z = run_chunks(sequence, p.A0.mT.flatten(0, 1), *tokens)
    return y, Z.unflatten(0, (B, H)).mT


@dataclass(frozen=True, kw_only=True)
class _GroupLayout:
    """Layout of tokens ``[B, t, H, ...]`` as chunks ``[n, B·H, C, ...]``, padded with zeros."""

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

    def from_chunks(self, y: Tensor, tokens: int) -> Tensor:  # [n, B·H, C·G, V] -> [B, t, H, G, V]
        """Join the outputs of chunks."""
        y = y.unflatten(1, (self.B, self.H)).unflatten(3, (self.C, self.G))
        return y.permute(1, 0, 3, 2, 4, 5).flatten(1, 2)[:, :tokens]

    def to_chunks(self, y: Tensor) -> Tensor:
        """Invert `from_chunks`."""
        return self.split(y).flatten(2, 3).contiguous()

    def prepare(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        lr: Tensor,
        log_decay: Tensor | None = None,
    ) -> ChunkOperands:
        """Return the operands of one group.

        If the total decay of every chunk is above e^−30, both sides of every product absorb the
        cumulative decays. Otherwise, or if reading the decays would synchronize the device,
        coefficients use differences of log decays, with exponents ≤ 0.
        """
        a, b = self.affine
        # Make operands contiguous once: every product would copy them otherwise.
        Q = self.split(q).flatten(2, 3).contiguous()  # [n, BH, C G, K]
        k = self.split(k).contiguous()
        c = self.split(v) if b == 1 else b * self.split(v)
        c = c.contiguous() if a == 0 else c
        X = None if a == 0 else (k if a == 1 else a * k)
        eta = self.split(lr).unsqueeze(-1)  # [n, BH, C, 1]
        if log_decay is None:
            D = k * eta
            system = None if X is None else X @ D.mT
            return ChunkOperands(system, self._causal(Q @ D.mT), X, Q, D, c, None)
        logs = self.split(log_decay)
        logs = logs if log_decay.dim() == 4 else logs.unsqueeze(-1)
        total = cumulative_log_decay(logs, 2)  # [n, BH, C, K or 1]
        reach = total.exp().to(c.dtype)
        end = reach[..., -1:, :]
        visible = total if self.decays_first else shift_right(total, 2, 0.0)
        if X is None:
            Xs = None
        else:
            Xs = X * (reach if self.decays_first else visible.exp().to(c.dtype))
        Qs = Q * self._queries(reach)
        if fits_float32_range(total):
            back = (-total).exp().to(c.dtype)
            D = k * (eta * back)
            system = None if Xs is None else Xs @ D.mT
            return ChunkOperands(system, self._causal(Qs @ D.mT), Xs, Qs, D * end, c, end.mT)
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
                earlier = shift_right(P, -2, 0.0)
                earlier = earlier * logs.exp().to(c.dtype) if self.decays_first else earlier
                system = (X @ D.mT) * earlier
        return ChunkOperands(system, scores, Xs, Qs, to_end, c, end.mT)

    def _queries(self, x: Tensor) -> Tensor:
        """Repeat per-token values for every query."""
        return x if self.G == 1 else x.repeat_interleave(self.G, dim=-2)

    def _causal(self, scores: Tensor) -> Tensor:
        """Zero the scores of later tokens."""
        if self.G == 1:
            return scores.tril_()  # in place: autograd does not save the product
        return scores * self._queries(scores.new_ones(self.C, self.C).tril())
