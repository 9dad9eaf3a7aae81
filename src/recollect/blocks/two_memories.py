"""Memories of a composition that share the projections of one layer."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from recollect.blocks.layers import MixerLayer
from recollect.blocks.mixers import RecipeMixer
from recollect.blocks.state import MixerState
from recollect.functional.packing import CompactedBatch, compact, scatter
from recollect.layer.checks import check_options, check_sizes
from recollect.layer.key_recurrence import Sequences
from recollect.layer.memory_layer import MemoryLayer
from recollect.layer.options import LayerOptions
from recollect.layer.recipe_module import RecipeModule
from recollect.layer.state import LayerState
from recollect.messages import RecipeError

__all__ = ["SecondMemory", "TwoMemoriesLayer"]


class SecondMemory(RecipeModule):
    """Gates, params and initial memory of a recipe that uses the q, k and v of another layer."""

    def __init__(
        self,
        first: MemoryLayer,  # layer whose q, k and v are used
        leaf: RecipeMixer,  # the recipe, and the options of its gates, params and initial memory
        share: Sequence[str],  # names of gates that come from the first memory
        *,
        composition: str,  # name of the class of the composition, for messages
        head_dim: int | None = None,  # K of the memory, if its keys are not those of first
        value_dim: int | None = None,  # V of the memory; by default that of first
    ) -> None:
        super().__init__()
        options = replace(
            leaf.options,
            qk_norm=first.options.qk_norm if head_dim is None else "none",
            qk_norm_eps=LayerOptions().qk_norm_eps,  # keys have their length already
            complex_decay=first.options.complex_decay,
        )
        self.d_model, self.num_kv_heads = first.d_model, first.num_kv_heads
        self.head_dim = head_dim or first.head_dim
        self.value_dim = value_dim or first.value_dim
        self.memory_value_dim = self.value_dim
        check_sizes(
            *(first.d_model, first.num_heads, first.num_kv_heads, self.head_dim, self.value_dim),
            *(leaf.recipe, options),
        )
        check_options(leaf.recipe, options)
        self._recipe, self.options = leaf.recipe, options
        self.depth, self.chunk_size = first.depth, first.chunk_size
        self._bind(first.engine, first.precision)
        self._build_ties()
        self._build_gates(skip=share)
        follows_query = self.ties.follows_query
        changes_qkv = any(tie.target in ("q", "k", "v") for tie in options.ties)
        if self.key_like_gates or changes_qkv or follows_query:
            keys = ", ".join(self.key_like_gates) or ("a value of q" if follows_query else "k or v")
            raise RecipeError(
                f"the second memory of {composition} receives its keys, and its recipe or its ties "
                f"compute {keys}: leave that out"
            )
        self.memory = self._build_initial_memory()

    def gates_and_params(
        self, x: Tensor, k: Tensor, shared: Mapping[str, Tensor]
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Compute gates and params of tokens; ``shared`` are gates of the first memory."""
        values = {**self.compute_gates(x, {}), **shared}
        if self.options.ties:
            values = self.ties.apply_ties(k, k, k, values, self.gates, Sequences()).gates
        return self._apply_stability_limit(values)


class TwoMemoriesLayer(MixerLayer):
    """Base of layers of two memories; projections, norm and output map are the first part's."""

    shares_heads = True

    @property
    def second(self) -> SecondMemory:
        """The memory that uses the inputs of the first layer."""
        memory = self.parts["second"]
        assert isinstance(memory, SecondMemory)
        return memory

    @staticmethod
    def states(state: MixerState) -> tuple[LayerState, LayerState]:
        """Return the states of both memories."""
        first, second = state.parts["first"], state.parts["second"]
        assert isinstance(first, LayerState) and isinstance(second, LayerState)
        return first, second

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
            return self.forward_rows(x, state, None, cu_seqlens, output_final_state)
        batch = compact(mask)
        y, final_state = self.forward_rows(batch.gather(x), state, batch, None, output_final_state)
        return scatter(y, batch), final_state

    @abstractmethod
    def forward_rows(
        self,
        x: Tensor,
        state: MixerState | None,
        batch: CompactedBatch | None,
        cu_seqlens: Tensor | None,
        output_final_state: bool,
    ) -> tuple[Tensor, MixerState | None]:
        """Run sequences without padding, or with padding on the right only."""
        raise NotImplementedError
