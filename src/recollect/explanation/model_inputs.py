"""Inputs of a model, the tokens that its layers receive, and runs of their memories."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from recollect.blocks.builder import leaf_inputs
from recollect.blocks.layers import MixerLayer, layer_spec
from recollect.choices.memory.base import Read
from recollect.functional.read import read
from recollect.functional.recall import recall
from recollect.layer.inspection import InspectableLayer
from recollect.messages import RecipeError
from recollect.state.state import State

__all__ = [
    "MemoryRun",
    "model_inputs",
    "received_by_memory",
    "received_tokens",
    "refuse_composition",
]


class MemoryRun:
    """The memory of a layer that reads a sequence ``[B, T, d_model]`` in pieces."""

    def __init__(self, layer: InspectableLayer, x: Tensor) -> None:
        self.spec, self.inputs = layer.memory_spec, layer.memory_inputs(x)

    def recall(self, tokens: slice, state: State | None) -> tuple[Tensor, State]:
        """Return the outputs of some tokens and the state after them."""
        spec, inputs = self.spec, self.inputs
        y, next_state = recall(
            spec.recipe,
            *(inputs.q[:, tokens], inputs.k[:, tokens], inputs.v[:, tokens]),
            {name: gate[:, tokens] for name, gate in inputs.gates.items()},
            params=inputs.params,
            initial_memory=spec.initial_memory if state is None else None,
            state=state,
            engine=spec.engine,
            precision=spec.precision,
            chunk_size=spec.chunk_size,
        )
        assert next_state is not None
        return y, next_state

    def read(self, keys: Tensor, gates: Mapping[str, Tensor], state: State) -> Tensor:
        """Return the predictions of a state for keys ``[B, S, H, K]``."""
        spec, params, recipe = self.spec, self.inputs.params, self.spec.recipe
        if recipe.memory.read.transposed:  # keys predict values, and only queries are values
            recipe = recipe.replace(memory=replace(recipe.memory, read=Read()))  # type: ignore[call-arg]
            state = state.replace(recipe_id=None)
        precision = spec.precision
        return read(recipe, keys, gates=gates, state=state, params=params, precision=precision)


def model_inputs(model: nn.Module, x: Tensor | Sequence[int]) -> Tensor:
    """Return token ids ``[B, T]`` on the device of the model, or vectors as they are."""
    ids = x if isinstance(x, Tensor) else torch.tensor(x)
    if ids.is_floating_point():
        return ids
    if ids.dim() == 1:
        ids = ids[None]
    if ids.dim() != 2 or not ids.numel():
        raise ValueError(f"token ids must have shape [T] or [B, T] with T ≥ 1, not {[*ids.shape]}")
    device = next((weight.device for weight in model.parameters()), ids.device)
    return ids.to(device)


def refuse_composition(caller: str, layer: MixerLayer) -> NoReturn:
    """Refuse a composition in the place of one of its memories."""
    raise RecipeError(
        f"{caller} looks at one memory, and this layer composes {', '.join(layer.leaves)}: "
        "give one of layer.leaves and its tokens from rc.blocks.leaf_inputs(layer, x)"
    )


def received_by_memory(
    layers: Mapping[str, nn.Module], calls: Mapping[str, Sequence[Tensor]]
) -> Iterator[tuple[str, InspectableLayer, Tensor]]:
    """Yield name, layer and tokens of each memory; those of a composition have names of their own.

    ``calls`` are the results of `received_tokens`.
    """
    for name, layer in layers.items():
        for x in calls[name]:
            if not isinstance(layer, MixerLayer):
                assert isinstance(layer, InspectableLayer)
                yield name, layer, x
                continue
            for path, tokens in leaf_inputs(layer, x).items():
                leaf = layer.leaves[path]
                if isinstance(leaf, InspectableLayer):
                    yield f"{name}.{path}", leaf, tokens


@contextmanager
def received_tokens(layers: Mapping[str, nn.Module]) -> Iterator[dict[str, list[Tensor]]]:
    """Record the tokens ``[B, T, d_model]`` that layers receive in one call of their model.

    The list of a layer that is not called stays empty. Several calls of a layer raise an error.
    """
    calls: dict[str, list[Tensor]] = {name: [] for name in layers}
    hooks = [
        layer.register_forward_pre_hook(
            _record(calls[name], layer_spec(layer).d_model), with_kwargs=True
        )
        for name, layer in layers.items()
    ]
    try:
        yield calls
    finally:
        for hook in hooks:
            hook.remove()
    for name, tokens in calls.items():
        if len(tokens) > 1:
            raise RecipeError(
                f"{name} is called {len(tokens)} times for these inputs, and one call is expected: "
                "use the layer itself with the tokens that rc.blocks.leaf_inputs gives"
            )


def _record(calls: list[Tensor], d_model: int) -> Callable[..., None]:
    """Return a hook that appends the first argument of shape ``[B, T, d_model]``."""

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for x in (*args, *kwargs.values()):
            is_tensor = isinstance(x, Tensor) and x.is_floating_point()
            if is_tensor and x.dim() == 3 and x.shape[-1] == d_model:
                calls.append(x)
                return

    return hook
