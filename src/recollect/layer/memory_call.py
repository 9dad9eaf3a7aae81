"""The call of a layer's memory, and the state of the layer after it."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from recollect.engines.common.problem import Problem
from recollect.functional.packing import CompactedBatch
from recollect.functional.recall import memorise
from recollect.layer.recipe_module import RecipeModule
from recollect.layer.state import LayerState, MemoryInputs
from recollect.state.state import State

__all__ = ["make_call", "run_call", "run_memory", "state_after"]


def run_memory(
    layer: RecipeModule,
    inputs: MemoryInputs,
    state: LayerState | None,
    *,
    batch: CompactedBatch | None = None,
    cu_seqlens: Tensor | None = None,
    output_final_state: bool = True,
) -> tuple[Tensor, State | None]:
    """Write and read the memory of a layer; return outputs ``[B, T, heads, V]`` and its state."""
    call = make_call(
        *(layer, inputs, None if state is None else state.memory),
        batch=batch,
        cu_seqlens=cu_seqlens,
        output_final_state=output_final_state,
    )
    return run_call(call)


def run_call(call: Problem) -> tuple[Tensor, State | None]:
    """Run the memory of a layer, as one operation of a graph that is compiled."""
    if torch.compiler.is_compiling():
        # The import loads the compiler, which is slow.
        from recollect.functional.one_operation import memorise_op, use_custom_op

        if use_custom_op(call):
            return memorise_op(call)
    return memorise(call)


def make_call(
    layer: RecipeModule,
    inputs: MemoryInputs,
    state: State | None,
    *,
    batch: CompactedBatch | None = None,
    cu_seqlens: Tensor | None = None,
    output_final_state: bool = True,
) -> Problem:
    """Return the call of a layer's memory, with the arguments of `run_memory`."""
    bound = layer._bound
    sources = [*layer.params.parameters(), *layer.ties.parameters()] if bound.params else ()
    return Problem(
        bound=bound,
        q=inputs.q,
        k=inputs.k,
        v=inputs.v,
        gates=inputs.gates,
        params=inputs.params,
        initial_memory=layer.initial_memory if state is None else None,
        state=cast(State, state),
        cu_seqlens=cu_seqlens,
        chunk_size=layer.chunk_size,
        output_final_state=output_final_state,
        lengths=None if batch is None else batch.lengths,
        source_index=None if batch is None else batch.index,
        # Gates of a decoded token come from the projections of the prompt, which were checked.
        trusted=state is not None and inputs.q.shape[1] == 1,
        param_sources=sources,
    )


def state_after(inputs: MemoryInputs, memory: State) -> LayerState:
    """Return the state of a layer after its inputs, with the state of its memory."""
    return LayerState(
        memory=memory,
        conv=inputs.conv,
        phase=inputs.final_phase,
        shift=inputs.shift,
        keys=inputs.final_keys,
    )
