"""How recursive least squares lays out a call: groups of chunks, and the parts they fall into."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Border", "Layout", "Parts", "Saved", "Spans", "to_end"]

GROUP = 4096
"""Rows (tokens · heads · batch) of a group on a CPU: what is made of them stays in the cache."""


@dataclass(frozen=True, kw_only=True)
class Spans:
    """How aligned tokens are cut.

    Attributes:
        chunk: C, tokens of a chunk; the number of tokens is a multiple of it.
        ends: ``[n, B]``, which rows reach the end of a span with a chunk, at which the ridge is
            refreshed; ``None`` for never.
        anew: ``[B, S, H]``, which memories start anew with a token: D = 0, ρ = λ, W = W₀; ``None``
            for none.
        forgets: whether there is any decay; without, there is nothing to refresh.
        unresolved: ``[B, H]``, which memories the dtype does not resolve before the first token,
            where nobody will look at what is lost: outputs and memories that are not resolved are
            NaN then, until a memory starts anew. ``None`` where the caller looks.
        continues: whether the Gram matrix after all tokens will be looked at.
    """

    chunk: int
    ends: Tensor | None
    anew: Tensor | None = None
    forgets: bool
    unresolved: Tensor | None = None
    continues: bool = True


@dataclass(frozen=True)
class Parts:
    """Where memories start anew inside chunks: each chunk falls into parts that share nothing.

    The first part goes on from the chunk's start, every other from λ and W₀.

    Attributes:
        fresh: ``[n, BH, C]``, which tokens are of another part than the first.
        same: ``[n, BH, C, C]``, which are of the same.
        last: ``[n, BH, C]``, which are of the last.
        reset: ``[n, BH]``, which chunks have more than one part, or start anew with a token.
        first: ``[n, BH, C]``, the place of each token's part's first token.
    """

    fresh: Tensor
    same: Tensor
    last: Tensor
    reset: Tensor
    first: Tensor

    @classmethod
    def of(cls, anew: Tensor) -> Parts:
        """The parts of chunks in which memories start anew at tokens ``[n, BH, C]``."""
        part = anew.cumsum(-1)
        places = torch.arange(anew.shape[-1], device=anew.device)
        return cls(
            fresh=part > 0,
            same=part.unsqueeze(-1) == part.unsqueeze(-2),
            last=part == part[..., -1:],
            reset=part[..., -1] > 0,
            first=torch.where(anew, places, 0).cummax(-1).values,
        )


@dataclass(frozen=True)
class Border:
    """What happened after a chunk: κ before, τ after, and which rows were set to it, ``[BH]``.

    ``floor`` is what κ was raised to because the dtype resolves no smaller ridge, else 0.
    """

    chunk: int
    before: Tensor
    after: Tensor
    fixed: Tensor
    floor: Tensor


@dataclass
class Saved:
    """What the backward pass needs of the forward pass, by groups of chunks."""

    states: list[Tensor]  # [n, BH, F, F + V]: P and M at chunk starts
    solved: list[Tensor]  # [n, BH, C, F + V]: −X and R
    factors: list[Tensor]  # [n, BH, C, C]
    borders: list[Border]
    lost: list[Tensor]  # [n, BH], `common.resolution`
    tokens: list[Tensor]  # [n, BH, C], the same of tokens, where nobody looks
    nan: Tensor | None = None  # [B, S, H], which tokens' outputs are


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Tokens ``[B, S, H, ...]`` as chunks ``[n, B·H, C, ...]``."""

    B: int
    H: int
    G: int
    spans: Spans
    groups: Sequence[tuple[int, int]]

    @classmethod
    def of(cls, q: Tensor, spans: Spans) -> Layout:
        B, S, H, G, _ = q.shape
        C = spans.chunk
        # Elsewhere than on a CPU, launches cost more than memory: one group.
        rows = GROUP if q.device.type == "cpu" else B * S * H
        size = max(1, rows // max(1, B * H * C)) * C
        groups = [(start, min(start + size, S)) for start in range(0, S, size)]
        return cls(B=B, H=H, G=G, spans=spans, groups=groups)

    def split(self, x: Tensor) -> Tensor:
        x = x.unflatten(1, (-1, self.spans.chunk))  # [B, n, C, H, ...]
        return x.permute(1, 0, 3, 2, *range(4, x.dim())).flatten(1, 2)

    def join(self, x: Tensor) -> Tensor:
        """``[n, B·H, C, ...] -> [B, n C, H, ...]``."""
        x = x.unflatten(1, (self.B, self.H))
        return x.permute(1, 0, 3, 2, *range(4, x.dim())).flatten(1, 2)

    def queries(self, x: Tensor) -> Tensor:
        """``[B, t, H, G, ...] -> [n, B·H, C·G, ...]``."""
        return self.split(x).flatten(2, 3)

    def unqueries(self, x: Tensor) -> Tensor:
        return self.join(x.unflatten(2, (self.spans.chunk, self.G)))

    def parts(self, start: int, stop: int) -> Parts | None:
        """Where memories start anew among the tokens of a group, if any may."""
        anew = self.spans.anew
        return None if anew is None else Parts.of(self.split(anew[:, start:stop]))

    def causal(self, scores: Tensor, parts: Parts | None) -> Tensor:
        """Zero where the written token is later than the reading one, ``[..., C·G, C]``.

        And where it is of another part.
        """
        if parts is not None:
            scores.masked_fill_(~self.per_query(parts.same), 0.0)
        if self.G == 1:
            return scores.tril_()
        C = self.spans.chunk
        mask = scores.new_ones(C, C).tril().repeat_interleave(self.G, dim=0)
        return scores.mul_(mask)

    def per_query(self, x: Tensor) -> Tensor:
        """What is known of tokens ``[n, B·H, C, ...]`` for their queries ``[n, B·H, C·G, ...]``."""
        return x if self.G == 1 else x.repeat_interleave(self.G, dim=2)

    def cumulated(self, log_decay: Tensor, parts: Parts | None) -> Tensor:
        """Sums of log decays inside the parts of chunks ``[n, B·H, C]``."""
        # exp(−1000) is 0 already, and −inf − (−inf) would be NaN.
        logs = self.split(log_decay).double().clamp_min(-1000.0).cumsum(-1)
        if parts is None:
            return logs
        # The token that starts anew decays by nothing.
        return logs - torch.where(parts.fresh, logs.gather(-1, parts.first), 0.0)

    def heads(self, x: Tensor) -> Tensor:
        return x.flatten(0, 1)


def to_end(logs: Tensor, parts: Parts | None) -> Tensor:
    """Decays from tokens to the ends of their chunks, 0 where another part ends them.

    Args:
        logs: of `Layout.cumulated`, ``[n, BH, C]``.
        parts: of the same chunks.
    """
    fall = logs[..., -1:] - logs
    return (fall if parts is None else fall.masked_fill(~parts.last, -torch.inf)).exp()
