"""Division of a call into chunks, by its decays and by the spans of the ridge.

Every span starts a new chunk. Empty tokens (zero keys, no decay) fill incomplete chunks and change
nothing. When values cannot be read, shapes bound the number of empty tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from recollect.engines.common.precision_checks import RESET_LOG_DECAY
from recollect.engines.common.problem import Problem

__all__ = [
    "DecayStats",
    "SlotLayout",
    "candidate_chunk_sizes",
    "decay_stats",
    "default_chunk",
    "gather_tokens",
    "safe_chunk_size",
    "scatter_tokens",
    "slot_layout",
]

MIN_CHUNK = 8
"""Smallest number of tokens per chunk in float32."""


def default_chunk(features: int) -> int:
    """Return the default number of tokens per chunk.

    In a chunk longer than there are features, the last tokens lose digits next to a small ridge.
    """
    return min(64, max(32, features))


@dataclass(frozen=True, kw_only=True)
class DecayStats:
    """Statistics that determine the chunks and the dtype of a call."""

    has_resets: bool
    spans_aligned: bool  # whether the first token of every batch element starts a span
    max_decay: Mapping[int, float]  # n -> largest total log decay of n tokens, without resets


def decay_stats(
    problem: Problem, log_decay: Tensor, tokens: Iterable[int], *, interval: int
) -> DecayStats:
    """Read log decays ``[B, T, H]`` and positions with one synchronization."""
    log_decay, tokens = log_decay.detach().double(), sorted(set(tokens))
    resets = log_decay < RESET_LOG_DECAY
    sums = torch.nn.functional.pad(log_decay.masked_fill(resets, 0.0).cumsum(1), (0, 0, 1, 0))
    lengths = [min(n, log_decay.shape[1]) for n in tokens]
    decays = [(sums[:, :-length] - sums[:, length:]).max() for length in lengths]
    flags = [resets.any(), (problem.state.position % max(interval, 1) == 0).all()]
    any_reset, spans_aligned, *max_decay = torch.stack(
        [*(x.double() for x in flags), *decays]
    ).tolist()
    return DecayStats(
        has_resets=any_reset > 0,
        spans_aligned=spans_aligned > 0,
        max_decay=dict(zip(tokens, max_decay, strict=True)),
    )


def candidate_chunk_sizes(tokens: int) -> list[int]:
    """Return candidate chunk sizes, by halving."""
    return [tokens >> i for i in range(tokens.bit_length())]


def safe_chunk_size(stats: DecayStats, tokens: int, dtype: torch.dtype) -> int:
    """Return the largest chunk size whose total decay the dtype resolves.

    Inside a chunk, subtraction separates the decayed past from noise.
    """
    bound, minimum = (12.0, 1) if dtype == torch.float64 else (4.0, MIN_CHUNK)
    while tokens > minimum and stats.max_decay[tokens] > bound:
        tokens //= 2
    return tokens


@dataclass(frozen=True, kw_only=True)
class SlotLayout:
    """Assignment of tokens to slots, some of which stay empty."""

    chunk: int
    slots: int
    slot_index: Tensor | None = None  # [B, T], or None for the order of the tokens
    span_ends: Tensor | None = None  # [n, B], whether a chunk ends a span; None without spans

    def last_token(self, element: int, chunks: int, tokens: int) -> int:
        """Return the index of the last of the first ``tokens`` tokens in the first ``chunks``."""
        slot_index = (
            torch.arange(tokens) if self.slot_index is None else self.slot_index[element, :tokens]
        )
        return max(int((slot_index < chunks * self.chunk).sum()) - 1, 0)


def slot_layout(
    problem: Problem,
    tokens: int,
    *,
    interval: int,  # tokens of a span, 0 for none
    stats: DecayStats | None,  # None if values cannot be read: shapes then bound the slots
) -> SlotLayout:
    """Divide a call into chunks of at most ``tokens`` tokens."""
    T = problem.k.shape[1]
    # Divide a span evenly.
    chunk = min(T, -(-interval // -(-interval // tokens)) if interval else tokens)
    layout = SlotLayout(chunk=chunk, slots=-(-T // chunk) * chunk)
    if not interval:
        return layout
    index = problem.state.position[:, None] + torch.arange(T, device=problem.k.device)
    spans_aligned = stats is not None and stats.spans_aligned
    if T > 1 and not (spans_aligned and (interval >= T or interval % chunk == 0)):
        # Each span takes complete chunks; a sequence starts at its position in the current span.
        width = -(-interval // chunk) * chunk
        first_slot = problem.state.position[:, None] % interval // chunk * chunk
        offset = index - index[:, :1] // interval * interval
        slot_index = offset // interval * width + offset % interval - first_slot
        max_boundaries = (T + interval - 2) // interval  # most boundaries inside T tokens
        num_slots = T + chunk - 1 + max_boundaries * (width - interval)
        if stats is not None:
            num_slots = min(num_slots, int(slot_index.max()) + 1)
        layout = SlotLayout(
            chunk=chunk, slots=-(-num_slots // chunk) * chunk, slot_index=slot_index
        )
    is_span_end = ((index + 1) % interval == 0) & (index < problem.end[:, None])
    span_ends = (
        scatter_tokens(is_span_end, layout).unflatten(1, (-1, layout.chunk)).transpose(0, 1).any(-1)
    )
    return replace(layout, span_ends=span_ends)


def scatter_tokens(x: Tensor, layout: SlotLayout) -> Tensor:  # [B, T, ...] -> [B, slots, ...]
    """Write tokens to their slots, with zeros elsewhere."""
    if layout.slot_index is None:
        missing = layout.slots - x.shape[1]
        if missing == 0:
            return x
        return torch.cat([x, x.new_zeros(x.shape[0], missing, *x.shape[2:])], dim=1)
    index = layout.slot_index.view(*layout.slot_index.shape, *(1,) * (x.dim() - 2)).expand_as(x)
    return x.new_zeros(x.shape[0], layout.slots, *x.shape[2:]).scatter(1, index, x)


def gather_tokens(y: Tensor, layout: SlotLayout, tokens: int) -> Tensor:
    """Invert `scatter_tokens`."""
    if layout.slot_index is None:
        return y[:, :tokens]
    index = layout.slot_index.view(*layout.slot_index.shape, *(1,) * (y.dim() - 2))
    return y.gather(1, index.expand(-1, -1, *y.shape[2:]))
