"""The layer of `ResidualMemory`: a second memory learns the errors of the first one.

The first memory must output its value for k_(t+1) before that key is written. So token t has two
kinds of queries: q_t and k_(t+1), which M_t answers. One call of the first memory, by any engine,
then gives the residuals of all tokens but the first. The key of the first token reads the initial
state, without writing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from recollect.blocks.compositions import ResidualMemory
from recollect.blocks.state import MixerState
from recollect.blocks.two_memories import TwoMemoriesLayer
from recollect.functional.packing import CompactedBatch
from recollect.functional.read import read
from recollect.layer.recipe_module import run_memory, state_after
from recollect.layer.state import LayerState, MemoryInputs
from recollect.recipe.recipe import Recipe

__all__ = ["ResidualMemoryLayer"]


class ResidualMemoryLayer(TwoMemoriesLayer):
    """The layer of `ResidualMemory`."""

    parts_fed_directly = ("first",)
    mixer: ResidualMemory

    def forward_rows(
        self,
        x: Tensor,
        state: MixerState | None,
        batch: CompactedBatch | None,
        cu_seqlens: Tensor | None,
        output_final_state: bool,
    ) -> tuple[Tensor, MixerState | None]:
        first, second, mixer = self.first, self.second, self.mixer
        first_state, second_state = self._initial_states(x, state, cu_seqlens)
        lengths = None if batch is None else batch.lengths
        inputs = first.memory_inputs(x, first_state, lengths, cu_seqlens)
        q = inputs.q.unflatten(2, (first.num_kv_heads, -1))  # [B, T, H, G, K]
        # Queries of M_(t−1) are moved to the token before, and those of M_t stay at their token.
        early, on_time = [inputs.k.unsqueeze(3)], [q]
        if mixer.read == "before":
            early, on_time = [*early, q], []
        early_queries = torch.cat(early, dim=3)
        # The early queries of the last token are those of the first token, and are not used.
        queries = torch.cat([*on_time, early_queries.roll(-1, dims=1)], dim=3)
        outputs, memory = run_memory(
            first,
            replace(inputs, q=queries.flatten(2, 3)),
            first_state,
            batch=batch,
            cu_seqlens=cu_seqlens,
            output_final_state=output_final_state,
        )
        outputs = outputs.unflatten(2, (first.num_kv_heads, -1))  # [B, T, H, ·, V]
        G = q.shape[3] if mixer.read == "after" else 0
        previous = self._previous_outputs(
            outputs[:, :, :, G:], early_queries, inputs, first_state, cu_seqlens
        )
        residual = inputs.v - previous[:, :, :, 0].to(inputs.v.dtype)
        if mixer.clip is not None:
            residual = residual.clamp(-mixer.clip, mixer.clip)
        y = outputs[:, :, :, :G] if mixer.read == "after" else previous[:, :, :, 1:]
        shared = {name: inputs.gates[name] for name in mixer.share}
        gates, params = second.gates_and_params(x, inputs.k, shared)
        residual_output, second_memory = run_memory(
            second,
            replace(inputs, v=residual, gates=gates, params=params),
            second_state,
            batch=batch,
            cu_seqlens=cu_seqlens,
            output_final_state=output_final_state,
        )
        residual_output = residual_output.unflatten(2, (first.num_kv_heads, -1))
        y = _weighted(y, inputs.gates, mixer.weigh_first, first.recipe)
        total = y + _weighted(residual_output, gates, mixer.weigh_second, second.recipe)
        y = first.output(total.flatten(2, 3), inputs)
        if memory is None or second_memory is None:
            return y, None
        parts = {"first": state_after(inputs, memory), "second": LayerState(memory=second_memory)}
        return y, MixerState(parts=parts, clock="first")

    def _initial_states(
        self, x: Tensor, state: MixerState | None, cu_seqlens: Tensor | None
    ) -> tuple[LayerState, LayerState | None]:
        """Return the states of both memories before the first token."""
        if state is not None:
            return self.states(state)
        rows = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
        _, first_state = self.first(x.new_zeros(rows, 0, x.shape[2]))
        assert first_state is not None
        return first_state, None

    def _previous_outputs(
        self,
        outputs: Tensor,
        queries: Tensor,
        inputs: MemoryInputs,
        state: LayerState,
        cu_seqlens: Tensor | None,
    ) -> Tensor:
        """Return M_(t−1) of the queries of token t ``[B, T, H, ·, V]``.

        ``outputs`` are those of M_t for the queries of token t + 1. The queries of the first token
        of a sequence or document read the initial state.
        """
        T = queries.shape[1]
        if T == 0:
            return outputs

        def read_initial(first: Tensor) -> Tensor:  # [rows, H, ·, K] to [rows, 1, H, ·, V]
            q = first.flatten(1, 2).unsqueeze(1)
            y = read(self.first.recipe, q, state=state.memory, params=inputs.params or None)
            return y.unflatten(2, first.shape[1:3])

        if cu_seqlens is None:
            first = read_initial(queries[:, 0]).to(outputs.dtype)
            return torch.cat([first, outputs[:, :-1]], dim=1)
        starts = cu_seqlens[:-1].to(device=outputs.device, dtype=torch.long)
        has_tokens = cu_seqlens.diff().to(outputs.device) > 0
        first = read_initial(queries[0, starts.clamp_max(T - 1)])[has_tokens, 0]
        shifted = outputs.roll(1, dims=1)
        return shifted.index_copy(1, starts[has_tokens], first.to(outputs).unsqueeze(0))


def _weighted(y: Tensor, gates: Mapping[str, Tensor], name: str | None, recipe: Recipe) -> Tensor:
    """Multiply outputs ``[B, T, H, G, V]`` by the gate ``[B, T, H]`` of that name, if any."""
    if name is None:
        return y
    gate = gates[name].exp() if name in recipe.log_gates else gates[name]
    return y * gate[..., None, None].to(y.dtype)
