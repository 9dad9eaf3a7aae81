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

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from recollect.blocks.compositions import MemoryAsContext
from recollect.blocks.layers import (
    OutputGate,
    PersistentTokens,
    RowsLayer,
    initial_memory_of,
    trim_state,
)
from recollect.blocks.segments import SegmentSlice, concat_segments, split_segments
from recollect.blocks.state import MixerState
from recollect.functional.packing import prepend_tokens
from recollect.functional.read import read
from recollect.layer.memory_layer import NORM_EPS, MemoryLayer
from recollect.layer.recipe_module import state_after
from recollect.layer.state import LayerState

__all__ = ["MemoryAsContextLayer", "Retrieval"]


class MemoryAsContextLayer(RowsLayer):
    """The layer of `MemoryAsContext`, with the parts ``"memory"`` and ``"attention"``.

    Its state has four parts of constant size: the state of the memory, the memory at the start of
    the open segment, the attention's state of the open segment, and the tensors that the last
    retrieval leaves to the next, such as the tail of a convolution.
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

    def forward_rows(
        self,
        x: Tensor,
        state: MixerState | None,
        lengths: Tensor | None,
        *,
        output_final_state: bool,
    ) -> tuple[Tensor, MixerState]:
        current = self._initial_state(x) if state is None else _SegmentState.of(state)
        segments = [*split_segments(current.memory.memory, x, lengths, self.segment)]
        outputs = [self._forward_segment(part.take(x), current, part) for part in segments]
        return concat_segments(outputs, segments, x), current.mixer_state()

    def _initial_state(self, x: Tensor) -> _SegmentState:
        _, memory = self.memory(x[:, :0])
        assert memory is not None
        _, attention = self.parts["attention"](x[:, :0])
        return _SegmentState(
            memory=memory, segment_start=memory, query_state=memory, attention=attention
        )

    def _forward_segment(self, x: Tensor, state: _SegmentState, part: SegmentSlice) -> Tensor:
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
    """State of a call: of the memory, and of the attention to the open segment."""

    memory: LayerState
    segment_start: LayerState  # state of the memory at the start of the open segment
    query_state: LayerState  # state with the convolution, phase and token shift of the retrievals
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
