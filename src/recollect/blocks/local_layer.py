"""The layer of `LocalMemories`: a memory of the text, and memories that restart.

P q is the output of a memory that learns the value k at the key k, both of length 1, and that
restarts with every inner batch.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from recollect.blocks.layers import RowsLayer
from recollect.blocks.local import LocalMemories, batch_size
from recollect.blocks.restarts import padded_right, run_segments
from recollect.blocks.segments import concat_segments, split_segments
from recollect.blocks.state import MixerState
from recollect.blocks.two_memories import SecondMemory
from recollect.layer.gates import normalize_to_length
from recollect.layer.recipe_module import run_memory, state_after
from recollect.layer.state import LayerState, MemoryInputs
from recollect.state.state import State

__all__ = ["LocalMemoriesLayer"]


class LocalMemoriesLayer(RowsLayer):
    """The layer of `LocalMemories`: the part ``"first"``, and a `SecondMemory` per other child."""

    shares_heads = True
    parts_fed_directly = ("first",)
    mixer: LocalMemories

    def forward_rows(
        self,
        x: Tensor,
        state: MixerState | None,
        lengths: Tensor | None,
        *,
        output_final_state: bool,
    ) -> tuple[Tensor, MixerState]:
        first, mixer = self.first, self.mixer
        states: dict[str, LayerState] = {}
        for name, part in ({} if state is None else state.parts).items():
            assert isinstance(part, LayerState)
            states[name] = part
        inputs = first.memory_inputs(x, states.get("first"), lengths)
        y, memory = run_memory(first, inputs, states.get("first"), batch=padded_right(x, lengths))
        assert memory is not None
        final = {"first": state_after(inputs, memory)}
        for index, leaf in enumerate(mixer.local):
            name, read_inputs = f"local_{index}", inputs
            if mixer.project_queries:
                unit = normalize_to_length(inputs.k, 1.0)
                keys = replace(inputs, k=unit, v=unit, gates={}, params={})
                projection, size = f"projection_{index}", batch_size(leaf)
                q, final[projection] = self._run_restarting(
                    projection, keys, states.get(projection), x, lengths, size
                )
                read_inputs = replace(inputs, q=q)
            local = self._memory(name)
            gates, params = local.gates_and_params(x, inputs.k, {})
            read_inputs = replace(read_inputs, gates=gates, params=params)
            output, final[name] = self._run_restarting(
                name, read_inputs, states.get(name), x, lengths, mixer.segment
            )
            y = y + output
        return first.output(y, inputs), MixerState(parts=final, clock="first")

    def _memory(self, name: str) -> SecondMemory:
        memory = self.parts[name]
        assert isinstance(memory, SecondMemory)
        return memory

    def _run_restarting(
        self,
        name: str,
        inputs: MemoryInputs,
        state: LayerState | None,
        x: Tensor,
        lengths: Tensor | None,
        size: int,
    ) -> tuple[Tensor, LayerState]:
        """Return the outputs of a memory that restarts every ``size`` tokens, and its state."""
        layer = self._memory(name)
        _, initial = run_memory(layer, inputs.first(0), None)
        assert initial is not None
        memory: State = initial if state is None else state.memory
        segments = [*split_segments(memory, x, lengths, size)]
        outputs: list[Tensor] = []
        for part in run_segments(layer, inputs, memory, segments, initial=initial, size=size):
            outputs.append(part.outputs)
            memory = part.state
        y = inputs.q.new_zeros(*inputs.q.shape[:3], layer.memory_value_dim)
        if outputs:
            y = concat_segments(outputs, segments, x)
        return y, LayerState(memory=memory)
