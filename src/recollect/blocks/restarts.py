"""Run a memory over the segments of a call, continued or restarted at each.

Segments of a memory that restarts do not depend on each other, so they run as rows of one batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from recollect.blocks.layers import trim_state
from recollect.blocks.segments import SegmentSlice
from recollect.functional.packing import CompactedBatch
from recollect.layer.recipe_module import RecipeModule, run_memory
from recollect.layer.state import LayerState, MemoryInputs
from recollect.state.state import State

__all__ = ["SegmentRun", "padded_right", "restarted", "run_segments", "take_inputs"]


@dataclass(frozen=True, kw_only=True, eq=False)
class SegmentRun:
    """One segment of a call."""

    tokens: SegmentSlice
    previous: State  # state before the first token, before any restart
    outputs: Tensor  # outputs of the memory [B, w, Hq, V]
    state: State  # state after the last token


def run_segments(
    layer: RecipeModule,
    inputs: MemoryInputs,  # inputs of the memory at all tokens of the call
    state: State,  # state before the call
    segments: Sequence[SegmentSlice],  # tokens of the call, from `split_segments`
    *,
    initial: State | None,  # state with which every segment starts; None if the memory continues
    size: int,  # number of tokens of a complete segment
) -> Iterator[SegmentRun]:
    """Yield the segments of a call in order."""
    independent = {} if initial is None else _run_independent(layer, inputs, segments, size)
    for index, part in enumerate(segments):
        previous = state
        if index in independent:
            y, state = independent[index]
            if part.lengths is not None:
                state = state.where(part.lengths > 0, previous)
        else:
            if initial is not None:
                state = restarted(initial, state, part.starts_segment)
            part_inputs = take_inputs(inputs, part)
            batch = padded_right(part_inputs.q, part.lengths)
            y, memory = run_memory(layer, part_inputs, LayerState(memory=state), batch=batch)
            assert memory is not None
            state = memory
        if initial is not None and part.index is not None:
            state = trim_state(layer, LayerState(memory=state), size).memory
        yield SegmentRun(tokens=part, previous=previous, outputs=y, state=state)


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


def _run_independent(
    layer: RecipeModule, inputs: MemoryInputs, segments: Sequence[SegmentSlice], size: int
) -> dict[int, tuple[Tensor, State]]:
    """Run segments that start with the initial memory as rows of one batch, by their numbers."""
    if not segments:
        return {}
    if segments[0].index is None:
        numbers = [i for i, part in enumerate(segments) if _is_complete(part, size)]
    else:  # all sequences that have tokens start each segment but the first
        numbers = [i for i, part in enumerate(segments) if i or part.starts_segment is True]
    if len(numbers) < 2:
        return {}
    rows, parts = inputs.q.shape[0], [segments[i] for i in numbers]
    stacked, batch = _as_rows(inputs, parts, size)
    y, state = run_memory(layer, stacked, None, batch=batch)
    assert state is not None
    position = state.host_position
    results: dict[int, tuple[Tensor, State]] = {}
    for i, (number, part) in enumerate(zip(numbers, parts, strict=True)):
        at = slice(i * rows, (i + 1) * rows)
        width = size if part.index is None else part.index.shape[1]
        one = state.map(lambda x, at=at: x[at]).with_position(position)
        if number == numbers[-1]:  # may be the final state, which would keep all rows in memory
            one = one.map(Tensor.clone).with_position(position)
        results[number] = y[at, :width], one
    return results


def _is_complete(part: SegmentSlice, size: int) -> bool:
    """Return whether all sequences start a segment together and end it."""
    tokens = part.token_slice
    return part.starts_segment is True and tokens is not None and tokens.stop - tokens.start == size


def _as_rows(
    inputs: MemoryInputs, parts: Sequence[SegmentSlice], size: int
) -> tuple[MemoryInputs, CompactedBatch | None]:
    """Return the inputs of n segments of B sequences as n B rows of ``size`` tokens."""
    count, rows = len(parts), inputs.q.shape[0]
    first, batch = parts[0].token_slice, None
    if first is not None:
        tokens = slice(first.start, first.start + count * size)

        def stack(x: Tensor) -> Tensor:  # [B, n size, ...] to [n B, size, ...]
            return x[:, tokens].unflatten(1, (count, size)).transpose(0, 1).flatten(0, 1)
    else:
        device = inputs.q.device
        sequence = torch.arange(rows, device=device).repeat(count).unsqueeze(1)
        indices, counts = [], []
        for part in parts:
            assert part.index is not None
            width = part.index.shape[1]
            indices.append(functional.pad(part.index, (0, size - width)))  # of no token at the end
            counts.append(torch.full((rows,), width) if part.lengths is None else part.lengths)
        index, lengths = torch.cat(indices), torch.cat([x.to(device) for x in counts])
        valid = torch.arange(size, device=device) < lengths.unsqueeze(1)
        batch = padded_right(valid, lengths)

        def stack(x: Tensor) -> Tensor:
            mask = valid.view(*valid.shape, *(1,) * (x.dim() - 2))
            return torch.where(mask, x[sequence, index], 0.0)

    gates = {name: stack(x) for name, x in inputs.gates.items()}
    stacked = replace(inputs, q=stack(inputs.q), k=stack(inputs.k), v=stack(inputs.v), gates=gates)
    return stacked, batch
