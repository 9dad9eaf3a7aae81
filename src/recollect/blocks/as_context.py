"""The layer of `MemoryAsContext`: a memory as the context of attention to segments (Titans' MAC).

Segments run in sequence, because each segment reads the memory that the previous one updated. The
tokens of a segment run in parallel. The attention layer runs from an empty state over the stream

    p_1 … p_P, h_1, x_1, h_2, x_2, …, h_C, x_C

and its output at x_j is y_j. A causal layer then attends from x_j to the persistent tokens, the
retrievals h_1 … h_j and the tokens x_1 … x_j, which is the mask of eqs. 22–23. The state of the
attention layer continues the stream at any token.

There is no residual stream between the parts. So h and the input of the memory are RMS-normalised,
with learned weights, as in a pre-norm block.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from recollect.blocks.compositions import MemoryAsContext
from recollect.blocks.layers import (
    MixerLayer,
    OutputGate,
    PersistentTokens,
    initial_memory_of,
    trim_state,
)
from recollect.blocks.state import MixerState
from recollect.functional.packing import compact, document_batches, prepend_tokens, scatter
from recollect.functional.read import read
from recollect.layer.memory_layer import NORM_EPS, MemoryLayer, state_after
from recollect.layer.state import LayerState

__all__ = ["MemoryAsContextLayer", "Retrieval"]


class MemoryAsContextLayer(MixerLayer):
    """The layer of `MemoryAsContext`.

    Its state has four parts of constant size: the state of the memory, the memory at the start of
    the open segment, the attention's state of the open segment, and the tensors that the last
    retrieval leaves to the next, such as the tail of a convolution.

    Args:
        d_model: width of the tokens.
        mixer: the composition.
        parts: the layers ``"memory"`` and ``"attention"``.
    """

    resets_attention = True

    def __init__(
        self, d_model: int, mixer: MemoryAsContext, parts: Mapping[str, nn.Module]
    ) -> None:
        super().__init__(d_model, mixer, parts)
        self.segment, self.count = mixer.segment, mixer.persistent
        self.persistent = PersistentTokens(self.count, d_model) if self.count else None
        self.retrieved_norm = nn.RMSNorm(d_model, eps=NORM_EPS)
        self.learned_norm = nn.RMSNorm(d_model, eps=NORM_EPS)
        self.gate = OutputGate(d_model)
        self.retrieval = Retrieval()

    @property
    def memory(self) -> MemoryLayer:
        """The layer that learns the outputs of the attention."""
        layer = self.parts["memory"]
        assert isinstance(layer, MemoryLayer)
        return layer

    def forward_checked(
        self,
        x: Tensor,
        state: MixerState | None,
        mask: Tensor | None,
        cu_seqlens: Tensor | None,
        *,
        output_final_state: bool,
    ) -> tuple[Tensor, MixerState | None]:
        if cu_seqlens is not None:
            return self._forward_packed(x, state, cu_seqlens, output_final_state)
        if mask is None:
            return self._forward_rows(x, state, None)
        batch = compact(mask)
        y, final_state = self._forward_rows(batch.gather(x), state, batch.lengths)
        return scatter(y, batch), final_state

    def _forward_packed(
        self, x: Tensor, state: MixerState | None, cu_seqlens: Tensor, output_final_state: bool
    ) -> tuple[Tensor, MixerState | None]:
        """Run documents as rows; without a final state, in groups of similar length.

        A row of a group is padded to at most twice its length.
        """
        y, final_state = torch.zeros_like(x[0]), None
        for batch in document_batches(cu_seqlens, x, in_one_batch=output_final_state):
            initial = None if state is None else state.select(batch.documents)
            outputs, final_state = self._forward_rows(batch.gather(x), initial, batch.lengths)
            y = y.index_copy(0, batch.index[batch.mask], outputs[batch.mask].to(y.dtype))
        return y.unsqueeze(0), final_state

    def _forward_rows(
        self, x: Tensor, state: MixerState | None, lengths: Tensor | None
    ) -> tuple[Tensor, MixerState]:
        """Run sequences without padding, or with padding on the right only."""
        current = self._initial_state(x) if state is None else _SegmentState.of(state)
        segments = [*_segments(current.memory, x, lengths, self.segment)]
        outputs = [self._forward_segment(part.take(x), current, part) for part in segments]
        return _concat_segments(outputs, segments, x), current.mixer_state()

    def _initial_state(self, x: Tensor) -> _SegmentState:
        _, memory = self.memory(x[:, :0])
        assert memory is not None
        _, attention = self.parts["attention"](x[:, :0])
        return _SegmentState(
            memory=memory, segment_start=memory, query_state=memory, attention=attention
        )

    def _forward_segment(self, x: Tensor, state: _SegmentState, part: _SegmentSlice) -> Tensor:
        """Return the outputs of tokens of one segment per sequence, and update ``state``."""
        valid, starts = part.valid, part.starts_segment
        if starts is True:
            state.segment_start, state.attention = state.memory, None
        elif starts is not False:
            state.segment_start = state.memory.where(starts, state.segment_start)
            initial = initial_memory_of(self.parts["attention"])
            state.attention = state.attention.reset(starts, initial)
        h = _norm(self.retrieved_norm, self._retrieve(x, state, part.lengths))
        stream = torch.stack([h, x], dim=2).flatten(1, 2)  # h_1, x_1, h_2, x_2, ...
        mask = None if valid is None else valid.repeat_interleave(2, dim=1)
        num_prefix_tokens = 0
        if self.persistent is not None and starts is not False:
            num_prefix_tokens = self.count
            stream, mask = prepend_tokens(self.persistent.rows(x), stream, mask, starts)
        y, state.attention = self.parts["attention"](stream, state.attention, mask)
        if part.index is not None:
            length = self.count + 2 * self.segment
            state.attention = trim_state(self.parts["attention"], state.attention, length)
        y = y[:, num_prefix_tokens:][:, 1::2]
        learned = _norm(self.learned_norm, y)
        memory_output, state.memory = self.memory(learned, state.memory, valid)
        return self.gate(y, memory_output)

    def _retrieve(self, x: Tensor, state: _SegmentState, lengths: Tensor | None) -> Tensor:
        """Return h = M(q(x)) of the memory at the start of the segment, without writing (21)."""
        # Positions are those of the text: the memory has learned all earlier tokens.
        query_state = LayerState(memory=state.memory.memory, **state.query_state.layer_tensors)
        h, state.query_state = self.retrieval(
            x, self.memory, state.segment_start, query_state, lengths
        )
        return h


class Retrieval(nn.Module):
    """Queries of a memory layer without writing; a module, so that hooks can be registered."""

    def forward(
        self,
        x: Tensor,
        layer: MemoryLayer,
        start: LayerState,
        state: LayerState,
        lengths: Tensor | None,
    ) -> tuple[Tensor, LayerState]:
        """Return the outputs of the layer, and its state after these queries.

        The memory of ``start`` is read. ``state`` is that of the layer before the tokens, whose
        memory is returned unchanged.
        """
        inputs = layer.memory_inputs(x, state, lengths)
        params = inputs.params or None
        h = read(layer.recipe, inputs.q, gates=inputs.gates, state=start.memory, params=params)
        return layer.output(h, inputs), state_after(inputs, state.memory)


def _norm(norm: nn.RMSNorm, x: Tensor) -> Tensor:
    """Normalise in the dtype of the weights."""
    return norm(x.to(norm.weight.dtype)).to(x.dtype)


@dataclass(kw_only=True)
class _SegmentState:
    """State of a call: of the memory, and of the attention to the open segment.

    Attributes:
        memory: state of the memory.
        segment_start: state of the memory at the start of the open segment.
        query_state: state with the convolution, phase and token shift of the retrievals.
        attention: state of the attention.
    """

    memory: LayerState
    segment_start: LayerState
    query_state: LayerState
    attention: Any

    @classmethod
    def of(cls, state: MixerState) -> _SegmentState:
        memory, start = state.parts["memory"], state.parts["start"]
        assert isinstance(memory, LayerState) and isinstance(start, LayerState)
        return cls(
            memory=memory,
            segment_start=start,
            query_state=LayerState(memory=memory.memory, **state.tensors),
            attention=state.parts.get("attention"),
        )

    def mixer_state(self) -> MixerState:
        parts = {"memory": self.memory, "start": self.segment_start, "attention": self.attention}
        return MixerState(parts=parts, tensors=self.query_state.layer_tensors, clock="memory")


@dataclass(frozen=True, kw_only=True)
class _SegmentSlice:
    """Tokens of one segment in every sequence.

    Attributes:
        token_slice: slice of the tokens, if all sequences are at an equal position.
        index: indices of each sequence's tokens ``[B, w]``, if not.
        valid: mask ``[B, w]`` of the valid tokens; ``None`` if all are valid.
        lengths: number of valid tokens ``[B]``; ``None`` if all are valid.
        starts_segment: sequences whose first token starts a segment: all, none, or ``[B]``.
    """

    token_slice: slice | None = None
    index: Tensor | None = None
    valid: Tensor | None = None
    lengths: Tensor | None = None
    starts_segment: Tensor | bool = False

    def take(self, x: Tensor) -> Tensor:
        """Return the tokens, and 0 at positions without a token."""
        if self.index is None:
            return x[:, self.token_slice]  # type: ignore[index]
        tokens = x.gather(1, self.index[..., None].expand(-1, -1, x.shape[2]))
        return tokens if self.valid is None else torch.where(self.valid[..., None], tokens, 0.0)


def _segments(
    memory: LayerState, x: Tensor, lengths: Tensor | None, C: int
) -> Iterator[_SegmentSlice]:
    """Split the sequences of a call at the starts of segments of C tokens."""
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
            yield _SegmentSlice(token_slice=token_slice, starts_segment=starts_segment)
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
        yield _SegmentSlice(
            index=(num_done[:, None] + steps).clamp_max(T - 1),
            valid=None if all_valid else valid,
            lengths=None if all_valid else count,
            starts_segment=all_start or (starts if bool(starts.any()) else False),
        )
        num_done, num_left = num_done + count, torch.full_like(count, C)
        at_start = torch.ones_like(at_start)


def _concat_segments(outputs: list[Tensor], segments: list[_SegmentSlice], x: Tensor) -> Tensor:
    """Return the outputs of all segments at the positions of their tokens."""
    if not outputs:
        return torch.zeros_like(x)
    if segments[0].index is None:
        return torch.cat(outputs, dim=1)
    out = torch.zeros_like(x, dtype=outputs[0].dtype)
    for y, segment in zip(outputs, segments, strict=True):
        assert segment.index is not None
        if segment.valid is not None:
            y = torch.where(segment.valid[..., None], y, 0.0)
        out = out.scatter_add(1, segment.index[..., None].expand_as(y), y)
    return out
