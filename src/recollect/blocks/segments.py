"""Tokens of a call in segments of equal length, counted from the start of each sequence."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from recollect.state.state import State

__all__ = ["SegmentSlice", "concat_segments", "split_segments"]


@dataclass(frozen=True, kw_only=True)
class SegmentSlice:
    """Tokens of one segment in every sequence."""

    # slice of the tokens, if all sequences are at an equal position
    token_slice: slice | None = None
    index: Tensor | None = None  # indices of each sequence's tokens [B, w], if not
    valid: Tensor | None = None  # mask [B, w] of the valid tokens; None if all are valid
    lengths: Tensor | None = None  # number of valid tokens [B]; None if all are valid
    # sequences whose first token starts a segment: all, none, or [B]
    starts_segment: Tensor | bool = False

    def take(self, x: Tensor) -> Tensor:
        """Return the tokens of ``x [B, T, ...]``, and 0 at positions without a token."""
        if torch.compiler.is_dynamo_compiling():
            # A graph per shape and stride of x would exceed the recompile limit.
            from recollect.functional.compile import uncompiled

            return cast(Tensor, uncompiled(self.take, x))
        if self.index is None:
            return x[:, self.token_slice]  # type: ignore[index]
        shape = (*self.index.shape, *(1,) * (x.dim() - 2))
        tokens = x.gather(1, self.index.view(shape).expand(-1, -1, *x.shape[2:]))
        return tokens if self.valid is None else torch.where(self.valid.view(shape), tokens, 0.0)


def split_segments(
    memory: State, x: Tensor, lengths: Tensor | None, C: int
) -> Iterator[SegmentSlice]:
    """Split the sequences of a call ``x [B, T, d_model]`` at the starts of segments of C tokens.

    The position of ``memory`` is a multiple of C at the start of a segment. ``lengths [B]`` has the
    numbers of valid tokens, if sequences are padded on the right.
    """
    B, T = x.shape[:2]
    position = memory.host_position if lengths is None else None
    if position is None:
        positions: list[int] = memory.position.tolist()
        if lengths is None and len(set(positions)) == 1:
            position = positions[0]
    if position is not None:
        start, stop = 0, C - position % C
        while start < T:
            starts_segment = (position + start) % C == 0
            token_slice = slice(start, min(stop, T))
            yield SegmentSlice(token_slice=token_slice, starts_segment=starts_segment)
            start, stop = stop, stop + C
        return
    device = x.device
    offset = memory.position.to(device) % C
    size = torch.full((B,), T, device=device) if lengths is None else lengths.to(device)
    num_done, num_left, at_start = torch.zeros_like(size), C - offset, offset == 0
    while B and int((size - num_done).max()):
        count = torch.minimum(size - num_done, num_left)
        steps = torch.arange(int(count.max()), device=device)
        valid = steps < count[:, None]
        starts = at_start & (count > 0)
        all_valid, all_start = bool(valid.all()), bool(starts.all())
        yield SegmentSlice(
            index=(num_done[:, None] + steps).clamp_max(T - 1),
            valid=None if all_valid else valid,
            lengths=None if all_valid else count,
            starts_segment=all_start or (starts if bool(starts.any()) else False),
        )
        num_done, num_left = num_done + count, torch.full_like(count, C)
        at_start = torch.ones_like(at_start)


def concat_segments(outputs: list[Tensor], segments: list[SegmentSlice], x: Tensor) -> Tensor:
    """Return the outputs ``[B, w, ...]`` of all segments at the positions of their tokens in x."""
    if not outputs:
        return torch.zeros_like(x)
    if segments[0].index is None:
        return torch.cat(outputs, dim=1)
    first = outputs[0]
    out = first.new_zeros(*x.shape[:2], *first.shape[2:])
    for y, segment in zip(outputs, segments, strict=True):
        assert segment.index is not None
        shape = (*segment.index.shape, *(1,) * (y.dim() - 2))
        if segment.valid is not None:
            y = torch.where(segment.valid.view(shape), y, 0.0)
        out = out.scatter_add(1, segment.index.view(shape).expand_as(y), y)
    return out
