"""Base class of the layers of compositions, and the modules that these layers share."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from recollect.blocks.mixers import Mixer
from recollect.blocks.state import AnyState, MixerState
from recollect.choices.runtime import can_read_values
from recollect.functional.packing import compact, document_batches, scatter
from recollect.layer.checks import check_tokens
from recollect.layer.feed_forward import FeedForward
from recollect.layer.inspection import InspectableLayer, MemorySpec
from recollect.layer.memory_layer import NORM_EPS, MemoryLayer
from recollect.layer.recipe_module import RecipeModule
from recollect.layer.recorded_call import RecordedCall
from recollect.messages import RecipeError

__all__ = [
    "MixerLayer",
    "OutputGate",
    "PersistentTokens",
    "RowsLayer",
    "initial_memory_of",
    "layer_spec",
    "memory_layers",
    "rows_at_start",
    "trim_state",
]


def initial_memory_of(layer: nn.Module) -> Any:
    """Return the initial memory of a layer, as ``state.reset`` takes it."""
    return layer.initial_memory if isinstance(layer, RecipeModule | MixerLayer) else None


class PersistentTokens(nn.Module):
    """Learned tokens in front of the text, equal for every input (Titans section 3.3).

    Their initial root mean square is 1, as that of the normalised tokens that a layer receives.
    """

    def __init__(self, count: int, d_model: int) -> None:
        super().__init__()
        self.tokens = nn.Parameter(torch.empty(count, d_model))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Sample new tokens."""
        nn.init.normal_(self.tokens)

    def rows(self, x: Tensor) -> Tensor:
        """Return the tokens for every sequence of ``x``, ``[B, count, d_model]``."""
        return self.tokens.to(x.dtype).expand(x.shape[0], -1, -1)


class OutputGate(nn.Module):
    """One stream as the gate of another: w_a ⊙ RMS(a) ⊙ σ(w_m ⊙ RMS(m)) (Titans, after eq. 28)."""

    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(d_model, eps=NORM_EPS)
        self.memory_norm = nn.RMSNorm(d_model, eps=NORM_EPS)

    def forward(self, attention: Tensor, memory: Tensor) -> Tensor:
        """Return the gated attention ``[..., d_model]``; it is 0 if the attention is 0."""
        dtype = self.attention_norm.weight.dtype
        normed = self.attention_norm(attention.to(dtype))
        gate = functional.sigmoid(self.memory_norm(memory.to(dtype)))
        return (normed * gate).to(attention.dtype)


class MixerLayer(nn.Module):
    """The layer of a composition, from tokens ``[B, T, d_model]`` to tokens and a `MixerState`.

    ``parts`` has a layer for each child of the composition, by name.
    """

    resets_attention = False  # whether the layer resets and trims the state of its attention
    shares_heads = False  # whether all parts have one set of heads and one output map
    parts_fed_directly: Sequence[str] = ()  # parts that learn the layer's tokens without a call
    restart_every = 0  # number of tokens after which these parts restart; 0: never

    def __init__(self, d_model: int, mixer: Mixer, parts: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self.d_model, self.mixer = d_model, mixer
        self.parts = nn.ModuleDict(parts)

    @property
    def initial_memory(self) -> dict[str, Any]:
        """Initial memories of the parts by name, as ``state.reset`` takes them."""
        return {name: initial_memory_of(part) for name, part in self.parts.items()}

    @property
    def memory(self) -> MemoryLayer:
        """The part ``"memory"`` of a composition that has one, which is a recipe."""
        return self._memory_part("memory")

    @property
    def first(self) -> MemoryLayer:
        """The part ``"first"``, whose queries, keys and values the memories of a layer use."""
        return self._memory_part("first")

    def _memory_part(self, name: str) -> MemoryLayer:
        layer = dict(self.parts.items()).get(name)
        if not isinstance(layer, MemoryLayer):
            raise AttributeError(name)  # `torch.nn.Module` adds the name of the class
        return layer

    @property
    def leaves(self) -> dict[str, MemoryLayer | FeedForward]:
        """Layers of all recipes, by the dotted path of part names."""
        leaves: dict[str, MemoryLayer | FeedForward] = {}
        for name, part in self.parts.items():
            if isinstance(part, MixerLayer):
                leaves |= {f"{name}.{path}": leaf for path, leaf in part.leaves.items()}
            elif isinstance(part, MemoryLayer | FeedForward):
                leaves[name] = part
        return leaves

    def reset_parameters(self) -> None:
        """Sample new values of all weights."""
        for module in self.modules():
            if not isinstance(module, MixerLayer) and hasattr(module, "reset_parameters"):
                module.reset_parameters()  # type: ignore[operator]

    def forward(
        self,
        x: Tensor,
        state: MixerState | None = None,
        attention_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        *,
        output_final_state: bool = True,
        calls: list[RecordedCall] | None = None,
    ) -> tuple[Tensor, MixerState | None]:
        """Return outputs and the state after the last token, as `MemoryLayer` does.

        Args:
            x: tokens ``[B, T, d_model]``.
            state: state of an earlier call, to continue from.
            attention_mask: ``[B, T]``, nonzero at valid tokens, padded on either side.
            cu_seqlens: ``[N + 1]`` boundaries of N documents packed in one sequence (B = 1).
            output_final_state: whether to return the state; if not, ``None``.
            calls: list to which this call is appended, as in `MemoryLayer`.

        Raises:
            ValueError: shapes, types or devices that do not fit, or a state of another layer.
        """
        weight = next(self.parameters())
        rows = check_tokens(x, attention_mask, cu_seqlens, d_model=self.d_model, weight=weight)
        self._check_state(state, rows)
        if calls is not None:
            calls.append(RecordedCall.of_forward(self, x, state, attention_mask))
        y, final_state = self.forward_checked(
            x, state, attention_mask, cu_seqlens, output_final_state=output_final_state
        )
        return y, final_state if output_final_state else None

    @abstractmethod
    def forward_checked(
        self,
        x: Tensor,
        state: MixerState | None,
        mask: Tensor | None,
        cu_seqlens: Tensor | None,
        *,
        output_final_state: bool,
    ) -> tuple[Tensor, MixerState | None]:
        """Run `forward` with checked arguments."""
        raise NotImplementedError

    def _check_state(self, state: object, rows: int) -> None:
        if state is None:
            return
        if not isinstance(state, MixerState):
            raise ValueError(
                f"state must be a state that this layer returned, not {type(state).__name__}"
            )
        missing = sorted(self.parts.keys() - state.parts.keys())
        if missing:
            raise ValueError(
                f"this state belongs to another layer: it has parts {', '.join(state.parts)}, and "
                f"not {missing[0]}"
            )
        if state.rows != rows:
            raise ValueError(f"the state has {state.rows} rows, and this call has {rows}")

    def extra_repr(self) -> str:
        return f"{self.d_model}, {self.mixer.kind}"


class RowsLayer(MixerLayer):
    """Base of layers that run packed documents as rows of a batch."""

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
            return self.forward_rows(x, state, None, output_final_state=output_final_state)
        batch = compact(mask)
        y, final_state = self.forward_rows(
            batch.gather(x), state, batch.lengths, output_final_state=output_final_state
        )
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
            outputs, final_state = self.forward_rows(
                batch.gather(x), initial, batch.lengths, output_final_state=output_final_state
            )
            y = y.index_copy(0, batch.index[batch.mask], outputs[batch.mask].to(y.dtype))
        return y.unsqueeze(0), final_state

    @abstractmethod
    def forward_rows(
        self,
        x: Tensor,
        state: MixerState | None,
        lengths: Tensor | None,
        *,
        output_final_state: bool,
    ) -> tuple[Tensor, MixerState | None]:
        """Run sequences without padding, or with padding on the right only."""
        raise NotImplementedError


def memory_layers(model: object, function: str) -> dict[str, nn.Module]:
    """Return the layers of a model that have a recipe or a composition, by name.

    Layers inside another one are left out, because they are parts of it. If the model is a layer,
    its name is ``""``.

    Raises:
        RecipeError: a model without such a layer. The message names the calling ``function``.
    """
    layers: dict[str, nn.Module] = {}
    for name, module in model.named_modules() if isinstance(model, nn.Module) else ():
        is_inside = any(not outer or name.startswith(f"{outer}.") for outer in layers)
        has_memory = any(isinstance(module, kind) for kind in (InspectableLayer, MixerLayer))
        if has_memory and not is_inside:
            layers[name] = module
    if not layers:
        raise RecipeError(
            f"{function} takes a layer or a model with an rc.MemoryLayer, not "
            f"{type(model).__name__}: rc.lm.adopt(model) adopts the recurrent layers of a "
            "published model"
        )
    return layers


def layer_spec(layer: nn.Module) -> MemorySpec:
    """Return the recipe, sizes and engine of a layer; of a composition, those of its first part."""
    if isinstance(layer, MixerLayer):
        layer = next(leaf for leaf in layer.leaves.values() if isinstance(leaf, MemoryLayer))
    assert isinstance(layer, InspectableLayer)
    return layer.memory_spec


def trim_state(layer: nn.Module, state: Any, num_tokens: int) -> Any:
    """Drop the empty slots of a state whose sequences were reset at different tokens.

    Every sequence has at most ``num_tokens`` tokens since its reset.
    """
    if isinstance(layer, RecipeModule):
        grows = layer.recipe.buffer_size is None or layer.recipe.uses_kernel_rows
        return state.trim(num_tokens) if grows else state
    if not isinstance(layer, MixerLayer):
        return state
    if not layer.resets_attention:
        num_tokens += getattr(layer.mixer, "persistent", 0)
    parts = dict(state.parts)
    for name, part in parts.items():
        if not (layer.resets_attention and name == "attention"):
            # A name that is not a part is an earlier state of the memory.
            source = layer.parts[name if name in layer.parts else "memory"]
            parts[name] = trim_state(source, part, num_tokens)
    return replace(state, parts=parts)


def rows_at_start(state: AnyState | None, device: torch.device) -> Tensor | bool:
    """Return which sequences are before their first token: all, none, or a mask ``[B]``."""
    if state is None:
        return True
    if state.host_position is not None:
        return state.host_position == 0
    at_start = state.position.to(device) == 0
    if can_read_values(at_start) and not bool(at_start.any()):
        return False
    return at_start
