"""Recurrences over the keys of a sequence: the previous key, and decayed sums of squares."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from recollect.engines.linear.chunked import chunked
from recollect.engines.linear.inputs import LinearProblem
from recollect.layer.token_shift import previous_tokens

__all__ = ["KeyHistory", "Sequences", "decayed_sums"]


@dataclass(frozen=True, kw_only=True)
class Sequences:
    """The sequences of a call.

    Attributes:
        keys: state of the recurrences before the call ``[B, n, H, K]``. Default: zeros.
        lengths: number of valid tokens per sequence ``[B]``, if sequences are padded on the right.
        cu_seqlens: ``[N + 1]`` boundaries of N documents packed in one sequence; ``keys`` then has
            N rows.
    """

    keys: Tensor | None = None
    lengths: Tensor | None = None
    cu_seqlens: Tensor | None = None

    def initial(self, index: int, like: Tensor) -> Tensor:
        """Return the state ``[B, H, K]`` of one recurrence before the call."""
        if self.keys is not None:
            return self.keys[:, index].to(like.dtype)
        rows = like.shape[0] if self.cu_seqlens is None else self.cu_seqlens.shape[0] - 1
        return like.new_zeros(rows, *like.shape[2:])

    def previous(self, x: Tensor, initial: Tensor) -> tuple[Tensor, Tensor]:
        """Return the values of ``x [B, T, H, K]`` one token earlier, and the last ones."""
        shifted, last = previous_tokens(
            x.flatten(2), initial.flatten(1).unsqueeze(1), self.lengths, self.cu_seqlens
        )
        return shifted.view(x.shape), last.view(initial.shape)


@dataclass(frozen=True, kw_only=True)
class KeyHistory:
    """States of the recurrences of a layer's keys.

    Attributes:
        per_token: state after every token ``[B, T, n, H, K]``.
        final: state after the last token of each sequence ``[B, n, H, K]``.
    """

    per_token: Tensor
    final: Tensor

    @classmethod
    def stack(cls, states: list[tuple[Tensor, Tensor]]) -> KeyHistory | None:
        """Join the states of several recurrences; ``None`` without any."""
        if not states:
            return None
        per_token, final = (
            torch.cat([x.unsqueeze(axis) for x in part], axis)
            for part, axis in zip(zip(*states, strict=True), (2, 1), strict=True)
        )
        return cls(per_token=per_token, final=final)


def decayed_sums(
    u: Tensor, log_decay: Tensor, initial: Tensor, cu_seqlens: Tensor | None = None
) -> Tensor:
    """Return A_t = α_t A_(t−1) + u_t, ``[B, T, H, K]``.

    Args:
        u: ``[B, T, H, K]``.
        log_decay: log α ``[B, T, H]``.
        initial: A before the first token of each sequence ``[B, H, K]``.
        cu_seqlens: ``[N + 1]`` boundaries of N documents packed in one sequence.
    """
    T = u.shape[1]
    if T == 0:
        return u
    log_decay = log_decay.to(u.dtype)
    if T == 1 and cu_seqlens is None:
        return torch.addcmul(u, log_decay.exp().unsqueeze(-1), initial.unsqueeze(1))
    # The first token of each sequence includes the initial state, and its decay is 0.
    if cu_seqlens is None:
        starts = torch.zeros(1, dtype=torch.long, device=u.device)
        carried = initial.unsqueeze(1)
    else:
        ends = cu_seqlens.to(device=u.device, dtype=torch.long)
        has_tokens = ends.diff() > 0
        starts, carried = ends[:-1][has_tokens], initial[has_tokens].unsqueeze(0)
    carried = log_decay[:, starts].exp().unsqueeze(-1) * carried
    u = u.index_add(1, starts, carried)
    log_decay = log_decay.index_fill(1, starts, -torch.inf)
    ones = torch.ones_like(u[..., :1])
    problem = LinearProblem(
        q=ones.unsqueeze(3),
        k=ones,
        v=u,
        lr=ones[..., 0],
        A0=u.new_zeros(u.shape[0], *u.shape[2:], 1),
        log_decay=log_decay,
        affine=(0.0, 1.0),
    )
    return chunked(problem)[0].squeeze(3)
