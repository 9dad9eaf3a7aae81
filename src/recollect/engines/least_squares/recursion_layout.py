"""Layout of recursive least squares: groups of chunks, and segments between resets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["Layout", "ResetSegments", "RidgeUpdate", "Saved", "decay_to_end"]

GROUP = 4096
"""Rows (tokens · heads · batch) of a group on a CPU; intermediates fit the cache."""


@dataclass(frozen=True)
class ResetSegments:
    """Independent segments of chunks, separated by resets.

    The first segment continues from the start of the chunk, the others from λ and W₀.
    """

    after_reset: Tensor  # [n, BH, C], whether a token follows a reset of its chunk
    same_segment: Tensor  # [n, BH, C, C], whether two tokens share a segment
    in_last: Tensor  # [n, BH, C], whether a token belongs to the last segment
    has_reset: Tensor  # [n, BH], whether a chunk contains a reset
    start: Tensor  # [n, BH, C], index of the first token of a token's segment

    @classmethod
    def of(cls, resets: Tensor) -> ResetSegments:  # [n, BH, C]
        """Divide chunks into segments."""
        index = resets.cumsum(-1)
        positions = torch.arange(resets.shape[-1], device=resets.device)
        return cls(
            after_reset=index > 0,
            same_segment=index.unsqueeze(-1) == index.unsqueeze(-2),
            in_last=index == index[..., -1:],
            has_reset=index[..., -1] > 0,
            start=torch.where(resets, positions, 0).cummax(-1).values,
        )


@dataclass(frozen=True)
class RidgeUpdate:
    """Ridge change after a chunk, ``[BH]``."""

    chunk: int  # index
    previous: Tensor  # κ
    updated: Tensor  # τ
    changed: Tensor  # whether τ replaces κ
    floor: Tensor  # smallest ridge if κ is below it, else 0


@dataclass
class Saved:
    """Intermediates of the forward pass for the backward pass, by groups of chunks."""

    states: list[Tensor]  # [n, BH, F, F + V]: P and M at chunk starts
    solved: list[Tensor]  # [n, BH, C, F + V]: −X and R
    factors: list[Tensor]  # [n, BH, C, C]
    ridge_updates: list[RidgeUpdate]
    losses: list[Tensor]  # [n, BH], see `common.precision_checks`
    token_losses: list[Tensor]  # [n, BH, C], only if the caller does not check
    nan: Tensor | None = None  # [B, S, H], whether a token's outputs are NaN


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Tokens ``[B, S, H, ...]`` as chunks ``[n, B·H, C, ...]``, with their spans and resets."""

    B: int
    H: int
    G: int
    chunk: int  # C, divides the number of tokens
    groups: Sequence[tuple[int, int]]
    span_ends: Tensor | None  # [n, B], whether a chunk ends a span and refreshes the ridge
    resets: Tensor | None  # [B, S, H], whether a token resets to D = 0, ρ = λ, W = W₀
    has_decay: bool
    # [B, H], whether the dtype fails to resolve the initial memory. Unresolved outputs and memories
    # become NaN until the next reset. None if the caller checks the losses.
    unresolved: Tensor | None
    needs_final_gram: bool

    @classmethod
    def of(cls, q: Tensor, chunk: int, **options: Any) -> Layout:
        """Group the chunks of queries ``[B, S, H, G, F]``."""
        B, S, H, G, _ = q.shape
        # On a GPU launches cost more than memory: use one group.
        rows = GROUP if q.device.type == "cpu" else B * S * H
        size = max(1, rows // max(1, B * H * chunk)) * chunk
        groups = [(start, min(start + size, S)) for start in range(0, S, size)]
        return cls(B=B, H=H, G=G, chunk=chunk, groups=groups, **options)

    def split(self, x: Tensor) -> Tensor:
        x = x.unflatten(1, (-1, self.chunk))  # [B, n, C, H, ...]
        return x.permute(1, 0, 3, 2, *range(4, x.dim())).flatten(1, 2)

    def join(self, x: Tensor) -> Tensor:
        """``[n, B·H, C, ...] -> [B, n C, H, ...]``."""
        x = x.unflatten(1, (self.B, self.H))
        return x.permute(1, 0, 3, 2, *range(4, x.dim())).flatten(1, 2)

    def split_queries(self, x: Tensor) -> Tensor:
        """``[B, t, H, G, ...] -> [n, B·H, C·G, ...]``."""
        return self.split(x).flatten(2, 3)

    def join_queries(self, x: Tensor) -> Tensor:
        return self.join(x.unflatten(2, (self.chunk, self.G)))

    def segments(self, start: int, stop: int) -> ResetSegments | None:
        """Return the segments of a group, or ``None`` without resets."""
        resets = self.resets
        return None if resets is None else ResetSegments.of(self.split(resets[:, start:stop]))

    def causal(self, scores: Tensor, segments: ResetSegments | None) -> Tensor:
        """Zero the scores of later tokens and of other segments, ``[..., C·G, C]``."""
        if segments is not None:
            scores.masked_fill_(~self.per_query(segments.same_segment), 0.0)
        if self.G == 1:
            return scores.tril_()
        C = self.chunk
        mask = scores.new_ones(C, C).tril().repeat_interleave(self.G, dim=0)
        return scores.mul_(mask)

    def per_query(self, x: Tensor) -> Tensor:  # [n, B·H, C, ...] -> [n, B·H, C·G, ...]
        """Repeat per-token values for every query."""
        return x if self.G == 1 else x.repeat_interleave(self.G, dim=2)

    def cumulative_log_decay(self, log_decay: Tensor, segments: ResetSegments | None) -> Tensor:
        """Return cumulative log decays within segments, ``[n, B·H, C]``."""
        # exp(−1000) is 0; −inf − (−inf) would be NaN.
        logs = self.split(log_decay).double().clamp_min(-1000.0).cumsum(-1)
        if segments is None:
            return logs
        # A reset has no decay.
        return logs - torch.where(segments.after_reset, logs.gather(-1, segments.start), 0.0)

    def merge_heads(self, x: Tensor) -> Tensor:
        return x.flatten(0, 1)


def decay_to_end(logs: Tensor, segments: ResetSegments | None) -> Tensor:  # [n, BH, C]
    """Return decays from tokens to chunk ends, 0 before the last segment."""
    fall = logs[..., -1:] - logs
    return (fall if segments is None else fall.masked_fill(~segments.in_last, -torch.inf)).exp()
