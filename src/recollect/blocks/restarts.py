"""Run a memory over the segments of a call, continued or restarted at each.

Segments of a memory that restarts do not depend on each other, so complete ones run as rows of
one batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from recollect.blocks.layers import trim_state
from recollect.blocks.segments import SegmentSlice
from recollect.functional.packing import CompactedBatch
from recollect.layer.memory_layer import run_memory
from recollect.layer.recipe_module import RecipeModule
from recollect.layer.state import LayerState, MemoryInputs
from recollect.state.state import State

__all__ = ["SegmentRun", "padded_right", "restarted", "run_segments", "take_inputs"]


@dataclass(frozen=True, kw_only=True, eq=False)
class SegmentRun:
    """One segment of a call.

    Attributes:
        tokens: the tokens.
        inputs: inputs of the memory at these tokens.
        previous: state before the first token, before any restart.
        outputs: outputs of the memory ``[B, w, Hq, V]``.
        state: state after the last token.
    """

    tokens: SegmentSlice
    inputs: MemoryInputs
    previous: State
    outputs: Tensor
    state: State


def run_segments(
    layer: RecipeModule,
    inputs: MemoryInputs,
    state: State,
    segments: Sequence[SegmentSlice],
    *,
    initial: State | None,
    size: int,
) -> Iterator[SegmentRun]:
    """Yield the segments of a call in order.

    Args:
        layer: layer of the memory.
        inputs: inputs of the memory at all tokens of the call.
        state: state before the call.
        segments: tokens of the call, from `split_segments`.
        initial: state with which every segment starts; ``None`` if the memory continues.
        size: number of tokens of a complete segment.
    """
    complete = {} if initial is None else _run_complete(layer, inputs, segments, size)
    for index, part in enumerate(segments):
        part_inputs, previous = take_inputs(inputs, part), state
        if initial is not None:
            state = restarted(initial, state, part.starts_segment)
        if index in complete:
            y, state = complete[index]
        else:
            batch = padded_right(part_inputs.q, part.lengths)
            y, memory = run_memory(layer, part_inputs, LayerState(memory=state), batch=batch)
            assert memory is not None
            state = memory
            if initial is not None and part.index is not None:
                state = trim_state(layer, LayerState(memory=state), size).memory
        yield SegmentRun(tokens=part, inputs=part_inputs, previous=previous, outputs=y, state=state)


def padded_right(x: Tensor, lengths: Tensor | None) -> CompactedBatch | None:
    """Return the batch of sequences ``x [B, T, ...]`` that are padded on the right, if any are."""
    if lengths is None:
        return None
    steps = torch.arange(x.shape[1], device=x.device)
    return CompactedBatch(index=steps.expand(x.shape[0], -1), lengths=lengths)


def restarted(initial: State, state: State, starts: Tensor | bool) -> State:
    """Return the state with the sequences that start a segment restarted."""
    if starts is True:
        return initial
    return state if starts is False else initial.where(starts, state)


def take_inputs(inputs: MemoryInputs, part: SegmentSlice) -> MemoryInputs:
    """Return queries, keys, values and gates at the tokens of a segment."""
    q, k, v = (part.take(x) for x in (inputs.q, inputs.k, inputs.v))
    gates = {name: part.take(x) for name, x in inputs.gates.items()}
    return replace(inputs, q=q, k=k, v=v, gates=gates)


def _run_complete(
    layer: RecipeModule, inputs: MemoryInputs, segments: Sequence[SegmentSlice], size: int
) -> dict[int, tuple[Tensor, State]]:
    """Run the complete segments that all sequences start together, as rows of one batch."""
    slices = {
        index: part.token_slice
        for index, part in enumerate(segments)
        if part.starts_segment is True
        and part.token_slice is not None
        and part.token_slice.stop - part.token_slice.start == size
    }
    if len(slices) < 2:
        return {}
    tokens = slice(min(s.start for s in slices.values()), max(s.stop for s in slices.values()))
    count, rows = len(slices), inputs.q.shape[0]

    def as_rows(x: Tensor) -> Tensor:  # [B, n size, ...] to [n B, size, ...]
        return x[:, tokens].unflatten(1, (count, size)).transpose(0, 1).flatten(0, 1)

    gates = {name: as_rows(x) for name, x in inputs.gates.items()}
    stacked = replace(
        inputs, q=as_rows(inputs.q), k=as_rows(inputs.k), v=as_rows(inputs.v), gates=gates
    )
    y, state = run_memory(layer, stacked, None)
    assert state is not None
    position = state.host_position
    return {
        index: (
            y[i * rows : (i + 1) * rows],
            state.map(lambda x, i=i: x[i * rows : (i + 1) * rows]).with_position(position),
        )
        for i, index in enumerate(slices)
    }
