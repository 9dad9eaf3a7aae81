"""Recurrences over the keys and values of a sequence: previous ones, decayed sums, precisions."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from recollect.engines.linear.chunked import chunked
from recollect.engines.linear.inputs import LinearProblem
from recollect.layer.token_shift import previous_tokens

__all__ = ["KeyHistory", "Sequences", "decayed_sums", "filtered_precisions"]


@dataclass(frozen=True, kw_only=True)
class Sequences:
    """The sequences of a call."""

    # state of the recurrences before the call [B, n, H, D], with D at least the number of channels;
    # by default 0
    keys: Tensor | None = None
    # number of valid tokens per sequence [B], if sequences are padded on the right
    lengths: Tensor | None = None
    # [N + 1] boundaries of N documents packed in one sequence; keys then has N rows
    cu_seqlens: Tensor | None = None

    def initial(self, index: int, like: Tensor) -> Tensor:
        """Return the state ``[B, H, K]`` of one recurrence before the call.

        Raises:
            ValueError: a state of another number of heads, or of fewer channels.
        """
        if self.keys is not None:
            (heads, channels), (*_, H, K) = self.keys.shape[2:], like.shape
            if heads != H or channels < K:
                raise ValueError(
                    f"this state belongs to another layer: its history of keys has {heads} heads "
                    f"of {channels} channels, and this layer has {H} of {K}"
                )
            return self.keys[:, index, :, : like.shape[-1]].to(like.dtype)
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
    """States of the recurrences of a layer's keys and values."""

    per_token: Tensor  # state after every token [B, T, n, H, D], D = max(K, V) if both have some
    final: Tensor  # state after the last token of each sequence [B, n, H, D]

    @classmethod
    def stack(cls, states: list[tuple[Tensor, Tensor]]) -> KeyHistory | None:
        """Join the states of several recurrences; ``None`` without any."""
        if not states:
            return None
        width = max(final.shape[-1] for _, final in states)
        per_token, final = (
            torch.cat([_widened(x, width).unsqueeze(axis) for x in part], axis)
            for part, axis in zip(zip(*states, strict=True), (2, 1), strict=True)
        )
        return cls(per_token=per_token, final=final)


def _widened(x: Tensor, width: int) -> Tensor:
    missing = width - x.shape[-1]
    return nn.functional.pad(x, (0, missing)) if missing else x


def decayed_sums(
    u: Tensor, log_decay: Tensor, initial: Tensor, cu_seqlens: Tensor | None = None
) -> Tensor:
    """Return A_t = α_t A_(t−1) + u_t for ``u [B, T, H, K]`` and ``log α [B, T, H]``.

    ``initial [B, H, K]`` is A before the first token of each sequence, or of each packed document.
    """
    T = u.shape[1]
    if T == 0:
        return u
    log_decay = log_decay.to(u.dtype)
    if T == 1 and cu_seqlens is None:
        return torch.addcmul(u, log_decay.exp().unsqueeze(-1), initial.unsqueeze(1))
    # The first token of each sequence includes the initial state, and its decay is 0.
    starts, carried = _starts(initial, cu_seqlens)
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


def filtered_precisions(
    u: Tensor,  # precision of the observation of a token [B, T, H, K], ≥ 0
    log_decay: Tensor,  # log α [B, T, H, K]
    noise: Tensor,  # variance p of the process noise [B, T, H, K], ≥ 0
    initial: Tensor,  # Λ before the first token of each sequence [B, H, K], > 0
    cu_seqlens: Tensor | None = None,  # [N + 1] boundaries of N documents packed in one sequence
) -> Tensor:
    """Return the precisions Λ_t = Λ_(t−1)/(α_t² + p_t Λ_(t−1)) + u_t of scalar Kalman filters.

    A token maps Λ = n/d to (n', d') = ((1 + u p) n + u α² d, p n + α² d). Products of these maps
    have no negative entries. They are formed token by token inside blocks, for all blocks at once,
    and Λ is passed from block to block.
    """
    B, T = u.shape[:2]
    if T == 0:
        return u
    square, noise = (2 * log_decay).exp().to(u.dtype), noise.to(u.dtype)

    def step(precision: Tensor, u: Tensor, square: Tensor, noise: Tensor) -> Tensor:
        return precision / (square + noise * precision) + u

    if T == 1 and cu_seqlens is None:
        return step(initial.unsqueeze(1), u, square, noise)
    # The first token of each sequence maps every Λ to its own.
    starts, carried = _starts(initial, cu_seqlens)
    first = step(carried, u[:, starts], square[:, starts], noise[:, starts])
    block = math.isqrt(T - 1) + 1
    padding = -T % block
    maps = [
        nn.functional.pad(x, (0, 0, 0, 0, 0, padding), value=value).unflatten(1, (-1, block))
        for x, value in (
            ((1 + u * noise).index_fill(1, starts, 0.0), 1.0),
            ((u * square).index_copy(1, starts, first.expand(B, -1, -1, -1)), 0.0),
            (noise.index_fill(1, starts, 0.0), 0.0),
            (square.index_fill(1, starts, 1.0), 1.0),
        )
    ]
    tokens = list(zip(*(x.unbind(2) for x in maps), strict=True))
    products = [tokens[0]]
    for a, b, c, d in tokens[1:]:
        e, f, g, h = products[-1]
        product = (a * e + b * g, a * f + b * h, c * e + d * g, c * f + d * h)
        scale = 1 / sum(product).detach()  # type: ignore[union-attr]
        products.append(tuple(x * scale for x in product))  # type: ignore[arg-type]
    a, b, c, d = (torch.stack(x, dim=2) for x in zip(*products, strict=True))  # [B, n, C, H, K]
    at_start = [torch.zeros_like(u[:, 0])]
    for n in range(a.shape[1] - 1):
        precision = at_start[-1]
        at_start.append(
            (a[:, n, -1] * precision + b[:, n, -1]) / (c[:, n, -1] * precision + d[:, n, -1])
        )
    start = torch.stack(at_start, dim=1).unsqueeze(2)
    return ((a * start + b) / (c * start + d)).flatten(1, 2)[:, :T]


def _starts(initial: Tensor, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the first tokens of all sequences with tokens, and their initial states.

    The states are ``[B, 1, H, K]``, or ``[1, N, H, K]`` of N documents.
    """
    if cu_seqlens is None:
        return torch.zeros(1, dtype=torch.long, device=initial.device), initial.unsqueeze(1)
    ends = cu_seqlens.to(device=initial.device, dtype=torch.long)
    has_tokens = ends.diff() > 0
    return ends[:-1][has_tokens], initial[has_tokens].unsqueeze(0)
