"""The linear engine in chunks: exact at every token, and parallel in time.

Inside a chunk the state is affine in the state at its start. One unit-lower-triangular system per
chunk therefore gives the errors of all its tokens (see `docs/design/linear-engine.md`).
`ChunkEquations` computes its operands in differentiable operations, and `chunk_recurrence` carries
the state through the chunks. `recurrent` runs memories that do not separate.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from recollect.choices.runtime import cached_constant
from recollect.engines.common.coefficients import (
    Coefficients,
    causal,
    coefficients,
    cumulative_log_decay,
    fits_float32_range,
    repeat_rows,
    shift_right,
)
from recollect.engines.common.decayed_products import decayed_gram, decayed_matmul
from recollect.engines.linear.chunk_recurrence import (
    ChunkLayout,
    ChunkOperands,
    ChunkSystem,
    run_chunks,
)
from recollect.engines.linear.inputs import LinearProblem
from recollect.engines.linear.recurrent import recurrent

__all__ = ["chunk_length", "chunked"]

MIN_CHUNK = 16
"""Smallest default number of tokens per chunk."""

GROUP = 4096
"""Rows (tokens · heads · batch) of a group on a CPU; 1 MB per intermediate of 64 channels."""


def chunk_length(*, solves: bool, cpu: bool = True, associations: int = 1) -> int:
    """Return the default number of tokens per chunk, which does not affect results.

    On a CPU, a smaller triangular system saves more time than additional chunks cost. Without a
    system, and on a GPU, fewer and larger operations are faster. Tokens with several associations
    that are written at once have shorter chunks.
    """
    return max((32 if solves and cpu else 64) // associations, MIN_CHUNK)


def chunked(p: LinearProblem) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return outputs ``[B, T, H, G, V]``, A and S (``None`` without momentum) after all tokens.

    Raises:
        ValueError: a decay over value channels and an error that depends on the prediction.
    """
    (B, T, H), cpu = p.k.shape[:3], p.k.device.type == "cpu"
    over_values = p.log_decay_value is not None
    if over_values and p.affine[0] != 0:
        raise ValueError("a decay over value channels needs a = 0: give each channel its own head")
    channels = over_values or (p.log_decay is not None and p.log_decay.dim() == 4)
    if B == 0 or T <= 1 or (p.momentum is not None and channels):
        # Momentum with decay per channel is a difference of two separable terms that cancel.
        return recurrent(p)
    if p.token_mask is not None:
        p = p.masked()
    C = min(p.chunk_size or chunk_length(solves=p.affine[0] != 0, cpu=cpu), T)
    tokens = p.tokens()
    if p.window is None:
        tokens |= {"k": p.k.unsqueeze(3), "v": p.v.unsqueeze(3), "lr": p.lr.unsqueeze(-1)}
    else:
        tokens |= _window_rows(p, tokens.pop("window"))
    if p.momentum is not None:
        mask = p.lr.new_ones(p.lr.shape) if p.token_mask is None else p.token_mask.unsqueeze(-1)
        mask = mask.expand(p.lr.shape).to(p.lr.dtype)
        tokens["outer_lr"] = mask if p.outer_lr is None else mask * p.outer_lr
    n = p.steps_per_token
    is_merged = n > 1 and p.affine[0] == 0 and p.momentum is None and p.erase is None
    if is_merged:
        tokens, T = _merged_substeps(tokens, n), T // n
        C = min(p.chunk_size or chunk_length(solves=False, cpu=cpu, associations=n), T)
    # On a GPU launches cost more than memory: use one group.
    chunks = max(1, GROUP // (B * H * C * tokens["k"].shape[3])) if cpu else -(-T // C)
    equations = ChunkEquations(
        layout=ChunkLayout(B=B, T=T, H=H, G=p.q.shape[3], C=C, size=C * chunks),
        names=tuple(tokens),
        affine=p.affine,
        decays_first=p.decays_first,
        separate=p.erase is not None or (p.momentum is not None and p.momentum_on == "value"),
        momentum_on=p.momentum_on,
    )
    states = p.A0 if p.S0 is None else torch.cat([p.A0, p.S0], dim=-1)
    y, Z = run_chunks(equations.layout, equations, states.mT.flatten(0, 1), *tokens.values())
    Z = Z.unflatten(0, (B, H))
    if is_merged:  # restore the axis of sub-steps
        y = y.unsqueeze(2).expand(-1, -1, n, -1, -1, -1).flatten(1, 2)
    if p.S0 is None:
        return y, Z.mT, None
    # Tensors of a state have memory of their own.
    A, S = (z.clone(memory_format=torch.contiguous_format).mT for z in Z.chunk(2, dim=2))
    return y, A, S


def _window_rows(p: LinearProblem, window: Tensor) -> dict[str, Tensor]:
    """Return c written rows per token: k and v ``[B, T, H, c, ·]``, and lr ``[B, T, H, c]``."""
    (B, T), c, n = p.k.shape[:2], window.shape[-1], p.steps_per_token
    if p.past is None:
        past = [x.new_zeros(B, (c - 1) * n, *x.shape[2:]) for x in (p.k, p.v, p.lr[..., 0])]
    else:
        past = [p.past.k, p.past.v, p.past.mask.to(p.k.dtype)]
    # Row m of token t is association t + m n of the past and present ones.
    k, v, present = (
        torch.cat([old, x], dim=1).unflatten(1, (-1, n)).unfold(1, c, 1).flatten(1, 2)
        for old, x in zip(past, (p.k, p.v, p.lr.new_ones(B, T)), strict=True)
    )
    return {"k": k.mT, "v": v.mT, "lr": p.lr.unsqueeze(-1) * window.flip(-1) * present.unsqueeze(2)}


def _merged_substeps(tokens: dict[str, Tensor], n: int) -> dict[str, Tensor]:
    """Return tokens that write the rows of n sub-steps at once, which no error separates."""
    merged: dict[str, Tensor] = {}
    for name, x in tokens.items():
        if name in ("k", "v", "lr"):  # [B, T n, H, r, ...] -> [B, T, H, n r, ...]
            merged[name] = x.unflatten(1, (-1, n)).movedim(2, 3).flatten(3, 4)
        else:
            merged[name] = x[:, n - 1 :: n] if name == "q" else x[:, ::n]
    return merged


class _ReadRows(NamedTuple):
    """Keys of reads, or of predictions before the token's write."""

    inner: Tensor  # factor of products inside the chunk, [n, B·H, C r, K]
    outer: Tensor  # factor of the state at the start of the chunk, [.., K or 2 K]
    before_write: bool


class _WriteRows(NamedTuple):
    """Directions of writes."""

    inner: Tensor  # factor of products inside the chunk, [n, B·H, C r, K]
    outer: Tensor  # factor of the state after the chunk, [.., K or 2 K]
    bypasses_momentum: bool


class _Decays:
    """Decays inside a chunk, without momentum.

    If the total decay of every chunk is above e^−30, both sides of every product absorb the
    cumulative decays. Otherwise, or if reading the decays would synchronize the device, products
    use differences of log decays, with exponents ≤ 0.
    """

    def __init__(self, C: int, log_decay: Tensor | None, like: Tensor, *, decays_first: bool):
        self.C, self.decays_first = C, decays_first
        self.now = self.total = self.coupling = None
        if log_decay is None:
            one = cached_constant(torch.ones, 1, 1, 1, device=like.device, dtype=like.dtype)
            self.decay = one.expand(like.shape[0], 1, 1, 1)
            return
        total = cumulative_log_decay(log_decay, 2)  # [n, B·H, C, K or 1]
        self.now = total.exp().to(like.dtype)
        self.decay = self.now[..., -1:, :].mT
        if fits_float32_range(total):
            self.rest = (-total).exp().to(like.dtype)
        else:
            self.total, self.rest = total, (total[..., -1:, :] - total).exp().to(like.dtype)

    def read(self, x: Tensor, *, before_write: bool) -> _ReadRows:
        if self.now is None:
            return _ReadRows(x, x, before_write)
        factor = (
            shift_right(self.now, 2, 1.0) if before_write and not self.decays_first else self.now
        )
        outer = x * repeat_rows(factor, x.shape[2] // self.C)
        return _ReadRows(outer if self.total is None else x, outer, before_write)

    def write(self, y: Tensor, weight: Tensor | float, *, bypass: bool) -> _WriteRows:
        if self.now is None:
            inner = outer = y * weight
        elif self.total is None:
            inner = y * (repeat_rows(self.rest, y.shape[2] // self.C) * weight)
            outer = inner * self.now[..., -1:, :]
        else:
            inner = y * weight
            outer = inner * repeat_rows(self.rest, y.shape[2] // self.C)
        return _WriteRows(inner, outer, bypass)

    def products(self, x: _ReadRows, y: _WriteRows) -> Tensor:
        """Return the products ``[n, B·H, C r, C s]`` of reads with earlier writes."""
        if self.total is None:
            return causal(x.inner @ y.inner.mT, self.C, strict=x.before_write)
        total = self.total
        if x.before_write and not self.decays_first:
            total = shift_right(total, 2, 0.0)
        return decayed_gram(x.inner, total, y.inner, self.total, strict=x.before_write)


class _Momentum:
    """Momentum, and decays per head, inside a chunk: the state is A next to S."""

    def __init__(self, C: int, table: Coefficients, K: int, *, decays_first: bool) -> None:
        assert table.m is not None and table.theta is not None and table.theta_end is not None
        self.C, self.table, self.decays_first = C, table, decays_first
        self.m, self.theta = table.m, table.theta
        ends = torch.stack([table.a[..., -1], table.theta_end], dim=-1)
        self.decay = ends.repeat_interleave(K, dim=-1).unsqueeze(-1)
        self.coupling = table.m[..., -1:].unsqueeze(-1)

    def _stacked(self, x: Tensor, *factors: Tensor) -> Tensor:  # factors: [n, B·H, C]
        rows = x.shape[2] // self.C
        return torch.cat([x * repeat_rows(f.unsqueeze(-1), rows) for f in factors], dim=-1)

    def read(self, x: Tensor, *, before_write: bool) -> _ReadRows:
        a, m, decayed = self.table.a, self.m, self.decays_first
        if before_write:
            a = self.table.at_previous_token(a, decayed=decayed, first=1.0)
            m = self.table.at_previous_token(m, decayed=decayed, first=0.0)
        return _ReadRows(x, self._stacked(x, a, m), before_write)

    def write(self, y: Tensor, weight: Tensor | float, *, bypass: bool) -> _WriteRows:
        E = self.table.P if bypass else self.table.E
        theta = self.theta[..., -1, :]
        inner = y * weight
        outer = self._stacked(inner, E[..., -1, :], torch.zeros_like(theta) if bypass else theta)
        return _WriteRows(inner, outer, bypass)

    def products(self, x: _ReadRows, y: _WriteRows) -> Tensor:
        """Return the products ``[n, B·H, C r, C s]`` of reads with earlier writes."""
        E = self.table.P if y.bypasses_momentum else self.table.E
        if x.before_write:
            E = self.table.matrix_at_previous_token(E, decayed=self.decays_first)
        rows, columns = (z.inner.shape[2] // self.C for z in (x, y))
        return (x.inner @ y.inner.mT) * repeat_rows(repeat_rows(E, rows).mT, columns).mT


@dataclass(frozen=True, kw_only=True)
class ChunkEquations:
    """Equations of the chunks of a `LinearProblem`, as a function of the tokens of a group."""

    layout: ChunkLayout
    names: tuple[str, ...]
    affine: tuple[float, float]
    decays_first: bool
    separate: bool  # whether erasure and writes differ
    momentum_on: str

    def __call__(self, *tokens: Tensor) -> ChunkOperands:
        x, split, (a, b) = (
            dict(zip(self.names, tokens, strict=True)),
            self.layout.split,
            self.affine,
        )
        keys, c, weight = split(x["k"]), split(x["v"]), split(x["lr"].unsqueeze(-1))
        c = c if b == 1 else b * c
        if "momentum" in x:
            steps = self._momentum(x)
        else:
            log_decay = x.get("log_decay")
            if log_decay is not None:
                log_decay = split(log_decay.reshape(*log_decay.shape[:3], 1, -1))
            steps = _Decays(self.layout.C, log_decay, keys, decays_first=self.decays_first)
        queries = steps.read(split(x["q"]), before_write=False)
        writes = steps.write(keys, weight, bypass=False)
        p = ChunkOperands(Q=queries.outer, decay=steps.decay, coupling=steps.coupling)
        if a == 0 or self.separate:
            p = self._fixed_writes(p, steps.products(queries, writes), writes.outer, c, x)
        if a == 0:
            return p
        probe = split(x["probe"].unsqueeze(3)) if "probe" in x else keys
        if self.separate:
            probe = steps.read(probe, before_write=True)
            c = -(steps.products(probe, writes) @ c)
            if "erase" in x:
                bypass = self.momentum_on == "value"
                writes = steps.write(split(x["erase"].unsqueeze(3)), a, bypass=bypass)
            else:
                writes = steps.write(keys, a * weight, bypass=True)
        else:
            probe = steps.read(probe if a == 1 else a * probe, before_write=True)
        return p._replace(
            system=ChunkSystem(
                L=steps.products(probe, writes),
                scores=steps.products(queries, writes),
                X=probe.outer,
                D=writes.outer,
                c=c,
            )
        )

    def _momentum(self, x: dict[str, Tensor]) -> _Momentum:
        def scalars(name: str, fill: float = 0.0) -> Tensor:
            return self.layout.split(x[name][..., None, None], fill).squeeze(-1)

        theta = scalars("momentum", fill=1.0)
        log_decay = scalars("log_decay") if "log_decay" in x else None
        # Padding of the last chunk must not add S to A.
        table = coefficients(log_decay, theta, scalars("outer_lr"), theta)
        return _Momentum(self.layout.C, table, x["k"].shape[-1], decays_first=self.decays_first)

    def _fixed_writes(
        self, p: ChunkOperands, scores: Tensor, direction: Tensor, c: Tensor, x: dict[str, Tensor]
    ) -> ChunkOperands:
        """Add the contributions of writes that do not depend on the state."""
        if "log_decay_value" not in x:
            return p._replace(outputs=scores @ c, writes=direction.mT @ c)
        total = cumulative_log_decay(self.layout.split(x["log_decay_value"].unsqueeze(3)), 2)
        rows, end = c.shape[2] // self.layout.C, total[..., -1:, :]
        rest = repeat_rows((end - total).exp().to(c.dtype), rows)
        now = total.exp().to(c.dtype)
        return p._replace(
            decay=p.decay * now[..., -1:, :],
            outputs=decayed_matmul(scores, c, total),
            writes=direction.mT @ (rest * c),
            output_decay=repeat_rows(now, p.Q.shape[2] // self.layout.C),
        )
