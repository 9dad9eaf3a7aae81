"""The layer of `ResidualMemory`: a second memory learns the errors of the first one.

The first memory must output its value for k_(t+1) before that key is written. So token t has two
kinds of queries: q_t and k_(t+1), which M_t answers. One call of the first memory, by any engine,
then gives the residuals of all tokens but the first. The key of the first token reads the initial
state, without writing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from recollect.blocks.compositions import ResidualMemory
from recollect.blocks.layers import MixerLayer
from recollect.blocks.mixers import RecipeMixer
from recollect.blocks.state import MixerState
from recollect.functional.packing import CompactedBatch, compact, scatter
from recollect.functional.read import read
from recollect.layer.checks import check_options, check_sizes
from recollect.layer.key_recurrence import Sequences
from recollect.layer.memory_layer import MemoryLayer, run_memory, state_after
from recollect.layer.recipe_module import RecipeModule
from recollect.layer.state import LayerState, MemoryInputs
from recollect.messages import RecipeError
from recollect.recipe.recipe import Recipe

__all__ = ["ResidualMemoryLayer", "SecondMemory"]


class SecondMemory(RecipeModule):
    """Gates, params and initial memory of a recipe that uses the q, k and v of another layer.

    Args:
        first: layer whose q, k and v are used.
        leaf: the recipe, and the options of its gates, params and initial memory.
        share: names of gates that come from the first memory.

    Raises:
        RecipeError: a recipe that needs keys of its own, or sizes that do not fit the recipe.
    """

    def __init__(self, first: MemoryLayer, leaf: RecipeMixer, share: Sequence[str]) -> None:
        super().__init__()
        options = replace(
            leaf.options, qk_norm=first.options.qk_norm, complex_decay=first.options.complex_decay
        )
        self.d_model, self.num_kv_heads = first.d_model, first.num_kv_heads
        self.head_dim, self.value_dim = first.head_dim, first.value_dim
        check_sizes(
            *(first.d_model, first.num_heads, first.num_kv_heads, first.head_dim, first.value_dim),
            *(leaf.recipe, options),
        )
        check_options(leaf.recipe, options)
        self._recipe, self.options = leaf.recipe, options
        self.depth, self.chunk_size = first.depth, first.chunk_size
        self._bind(first.engine, first.precision)
        self._build_ties()
        self._build_gates(skip=share)
        follows_query = any(tie.source == "q" for tie in options.ties)
        if self.key_like_gates or self.ties.changes_qk or follows_query:
            keys = ", ".join(self.key_like_gates) or ("a value of q" if follows_query else "k")
            raise RecipeError(
                "the second memory of ResidualMemory has the keys of the first, and its recipe or "
                f"its ties compute {keys}: leave that out"
            )
        self.memory = self._build_initial_memory()

    def gates_and_params(
        self, x: Tensor, k: Tensor, shared: Mapping[str, Tensor]
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Compute gates and params of tokens; ``shared`` are gates of the first memory."""
        values = {**self.compute_gates(x, {}), **shared}
        if self.options.ties:
            values = self.ties.apply_ties(k, k, values, self.gates, Sequences()).values
        return self._apply_stability_limit(values)


class ResidualMemoryLayer(MixerLayer):
    """The layer of `ResidualMemory`; projections, norm and output map are the first part's.

    Args:
        d_model: width of the tokens.
        mixer: the composition.
        parts: the layer ``"first"``, and the `SecondMemory` ``"second"``.
    """

    parts_fed_directly = ("first",)
    mixer: ResidualMemory

    @property
    def first(self) -> MemoryLayer:
        """The layer whose queries, keys and values both memories use."""
        layer = self.parts["first"]
        assert isinstance(layer, MemoryLayer)
        return layer

    @property
    def second(self) -> SecondMemory:
        """The memory of the residuals."""
        memory = self.parts["second"]
        assert isinstance(memory, SecondMemory)
        return memory

    def forward_checked(
        self,
        x: Tensor,
        state: MixerState | None,
        mask: Tensor | None,
        cu_seqlens: Tensor | None,
        *,
        output_final_state: bool,
    ) -> tuple[Tensor, MixerState | None]:
        if mask is None:
            return self._forward_rows(x, state, None, cu_seqlens, output_final_state)
        batch = compact(mask)
        y, final_state = self._forward_rows(batch.gather(x), state, batch, None, output_final_state)
        return scatter(y, batch), final_state

    def _forward_rows(
        self,
        x: Tensor,
        state: MixerState | None,
        batch: CompactedBatch | None,
        cu_seqlens: Tensor | None,
        output_final_state: bool,
    ) -> tuple[Tensor, MixerState | None]:
        """Run sequences without padding, or with padding on the right only."""
        first, second, mixer = self.first, self.second, self.mixer
        first_state, second_state = self._initial_states(x, state, cu_seqlens)
        lengths = None if batch is None else batch.lengths
        inputs = first.memory_inputs(x, first_state, lengths, cu_seqlens)
        q = inputs.q.unflatten(2, (first.num_kv_heads, -1))  # [B, T, H, G, K]
        # Queries of M_(t−1) are asked one token early, and those of M_t at their own token.
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
        parts = {
            "first": state_after(inputs, memory),
            "second": LayerState(memory=second_memory),
        }
        return y, MixerState(parts=parts, clock="first")

    def _initial_states(
        self, x: Tensor, state: MixerState | None, cu_seqlens: Tensor | None
    ) -> tuple[LayerState, LayerState | None]:
        """Return the states of both memories before the first token."""
        if state is not None:
            first, second = state.parts["first"], state.parts["second"]
            assert isinstance(first, LayerState) and isinstance(second, LayerState)
            return first, second
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
