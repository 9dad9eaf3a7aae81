"""The layer of `SelfModifyingMemory`: a loop over inner batches.

Inside an inner batch the memories do not change, so keys, values and gates of its tokens are
computed at once. The memories of keys, values and gates are further heads of one state.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from recollect.blocks.layers import RowsLayer
from recollect.blocks.restarts import padded_right, take_inputs
from recollect.blocks.segments import concat_segments, split_segments
from recollect.blocks.self_modifying import SelfModifyingMemory
from recollect.blocks.state import MixerState
from recollect.choices.runtime import without_autocast
from recollect.layer.memory_layer import MemoryLayer, run_memory, state_after
from recollect.layer.recipe_module import RecipeModule
from recollect.layer.state import LayerState, MemoryInputs
from recollect.messages import RecipeError
from recollect.state.state import State

__all__ = ["ProjectionMemories", "SelfModifyingMemoryLayer"]


class ProjectionMemories(RecipeModule):
    """Params and initial memories of further memories of a layer's recipe, as heads of one memory.

    ``count`` is the number of further memories per head of the layer.
    """

    def __init__(self, first: MemoryLayer, count: int) -> None:
        super().__init__()
        if first.head_dim != first.value_dim:
            raise RecipeError(
                "SelfModifyingMemory reads its memories at values, which need the size of keys: "
                f"K = {first.head_dim} and V = {first.value_dim} must be equal"
            )
        self.d_model, self.num_kv_heads = first.d_model, count * first.num_kv_heads
        self.head_dim = self.value_dim = self.memory_value_dim = first.head_dim
        self._recipe, self.options = first.recipe, first.options
        self.depth, self.chunk_size = first.depth, first.chunk_size
        self._bind(first.engine, first.precision)
        self._build_ties()
        self._build_gates(skip=[gate.name for gate in first.recipe.gates()])
        self.memory = self._build_initial_memory()


class SelfModifyingMemoryLayer(RowsLayer):
    """The layer of `SelfModifyingMemory`: the part ``"memory"``, and its `ProjectionMemories`."""

    shares_heads = True
    parts_fed_directly = ("memory",)
    mixer: SelfModifyingMemory

    def __init__(
        self, d_model: int, mixer: SelfModifyingMemory, parts: Mapping[str, nn.Module]
    ) -> None:
        super().__init__(d_model, mixer, parts)
        width = self.memory.num_kv_heads * self.memory.value_dim
        has_gates = bool(mixer.gate_names)
        self.gate_map = nn.Linear(width, d_model, bias=False) if has_gates else None

    @property
    def projections(self) -> ProjectionMemories:
        """The memories of keys, values and gates."""
        memories = self.parts["projections"]
        assert isinstance(memories, ProjectionMemories)
        return memories

    def forward_rows(
        self,
        x: Tensor,
        state: MixerState | None,
        lengths: Tensor | None,
        *,
        output_final_state: bool,
    ) -> tuple[Tensor, MixerState]:
        first, others = self.memory, self.projections
        old, old_others = (
            (None, None) if state is None else (state.parts[name] for name in self.parts)
        )
        assert old is None or isinstance(old, LayerState)
        assert old_others is None or isinstance(old_others, LayerState)
        inputs = first.memory_inputs(x, old, lengths)
        other_inputs = self._inputs_of_projections(inputs, x)
        _, memory = run_memory(first, inputs.first(0), old)
        _, projections = run_memory(others, other_inputs.first(0), old_others)
        assert memory is not None and projections is not None
        segments = [*split_segments(memory, x, lengths, first.recipe.algorithm.batch_size)]
        outputs: list[Tensor] = []
        for part in segments:
            y, memory, projections = self._run_segment(
                (take_inputs(inputs, part), take_inputs(other_inputs, part)),
                (memory, projections),
                part.lengths,
            )
            outputs.append(y)
        y = inputs.q.new_zeros(*inputs.q.shape[:3], first.value_dim)
        if outputs:
            y = concat_segments(outputs, segments, x)
        parts = {
            "memory": state_after(inputs, memory),
            "projections": LayerState(memory=projections),
        }
        return first.output(y, inputs), MixerState(parts=parts, clock="memory")

    def _inputs_of_projections(self, inputs: MemoryInputs, x: Tensor) -> MemoryInputs:
        """Return the inputs at which the memories of keys, values and gates are read."""
        others = self.projections
        count = others.num_kv_heads // self.memory.num_kv_heads
        (v,) = self.memory._normalize([inputs.v], {})
        read_at = torch.cat([inputs.k, *[v] * (count - 1)], dim=2)
        _, params = others._apply_stability_limit(others.compute_gates(x, {}))
        gates = {name: torch.cat([gate] * count, dim=2) for name, gate in inputs.gates.items()}
        return replace(inputs, q=read_at, k=read_at, v=read_at, gates=gates, params=params)

    def _run_segment(
        self,
        inputs: tuple[MemoryInputs, MemoryInputs],
        states: tuple[State, State],
        lengths: Tensor | None,
    ) -> tuple[Tensor, State, State]:
        """Return the outputs of the memory for tokens of one inner batch, and the next states."""
        first, others = self.memory, self.projections
        of_first, of_others = inputs
        memory, projections = states
        H, batch = first.num_kv_heads, padded_right(of_first.q, lengths)
        y = self._read(of_first.q, memory.weights, of_first.params)
        read = self._read(of_others.q, projections.weights, of_others.params)
        k, v, *gate_reads = read.split(H, dim=2)
        k, v = first._normalize([k, v], {})
        gates, _ = first._apply_stability_limit({**self._gates(gate_reads), **of_first.params})
        weights = [
            torch.cat(pair, 1) for pair in zip(memory.weights, projections.weights, strict=True)
        ]
        params = {
            name: torch.cat([p, of_others.params[name]]) for name, p in of_first.params.items()
        }
        count = others.num_kv_heads // H
        values = self._read(torch.cat([v] * (1 + count), dim=2), weights, params)
        of_first = replace(of_first, q=k, k=k, v=values[:, :, :H], gates=gates)
        repeated = torch.cat([k] * count, dim=2)
        of_others = replace(
            of_others,
            q=repeated,
            k=repeated,
            v=values[:, :, H:],
            gates={name: torch.cat([gate] * count, dim=2) for name, gate in gates.items()},
        )
        _, next_memory = run_memory(first, of_first, LayerState(memory=memory), batch=batch)
        _, next_projections = run_memory(
            others, of_others, LayerState(memory=projections), batch=batch
        )
        assert next_memory is not None and next_projections is not None
        return y, next_memory, next_projections

    def _gates(self, reads: list[Tensor]) -> dict[str, Tensor]:
        """Return the gates of tokens from the outputs of their memories ``[B, w, H, V]``."""
        gates: dict[str, Tensor] = {}
        for name, read in zip(self.mixer.gate_names, reads, strict=True):
            assert self.gate_map is not None
            gates[name] = self.memory.gates[name](self.gate_map(read.flatten(2)))
        return gates

    def _read(
        self, x: Tensor, weights: tuple[Tensor, ...] | list[Tensor], params: Mapping[str, Tensor]
    ) -> Tensor:
        """Return M(W°; x) ``[B, w, heads, V]`` for weights ``[B, H, out, in]``.

        The weights of a state are those at the start of its open inner batch.
        """
        B, w, heads, K = x.shape
        H = weights[0].shape[1]
        with without_autocast(x.device.type):
            rows = x.to(weights[0].dtype).unflatten(2, (H, heads // H))
            rows = rows.permute(0, 2, 1, 3, 4).reshape(B, H, w * heads // H, K)
            y = self.memory.recipe.memory.forward(weights, rows, rows, params)
        y = y.unflatten(2, (w, heads // H)).permute(0, 2, 1, 3, 4).flatten(2, 3)
        return y.to(x.dtype)
