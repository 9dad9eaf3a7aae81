"""Build the layers of mixers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from recollect.blocks.as_context import MemoryAsContextLayer
from recollect.blocks.cached import CachedMemory
from recollect.blocks.cached_layer import CachedMemoryLayer
from recollect.blocks.compositions import (
    MemoryAsContext,
    MemoryAsGate,
    MixtureOfMemories,
    ResidualMemory,
    Sequential,
)
from recollect.blocks.layers import MixerLayer
from recollect.blocks.levels import Levels
from recollect.blocks.levels_layer import LevelsLayer
from recollect.blocks.local import LocalMemories
from recollect.blocks.local_layer import LocalMemoriesLayer
from recollect.blocks.mixers import Mixer, RecipeMixer, as_mixer
from recollect.blocks.residual_memory import ResidualMemoryLayer
from recollect.blocks.routed import MixtureOfMemoriesLayer
from recollect.blocks.self_modifying import SelfModifyingMemory
from recollect.blocks.self_modifying_layer import ProjectionMemories, SelfModifyingMemoryLayer
from recollect.blocks.sequential import MemoryAsGateLayer, SequentialLayer
from recollect.blocks.slot_layer import SlotMemoryLayer
from recollect.blocks.slots import SlotMemory
from recollect.blocks.two_memories import SecondMemory
from recollect.layer.feed_forward import FeedForward, build_layer
from recollect.layer.memory_layer import MemoryLayer
from recollect.messages import RecipeError

__all__ = ["build", "leaf_inputs"]

_SIZES = (
    *("num_kv_heads", "head_dim", "value_dim"),
    *("engine", "chunk_size", "precision", "depth"),
)


def build(
    mixer: Any, d_model: int, num_heads: int, **sizes: Any
) -> MemoryLayer | FeedForward | MixerLayer:
    """Build the layer of a mixer, with new weights.

    Args:
        mixer: a mixer, or a value that `as_mixer` converts. The layer of a recipe is a
            `MemoryLayer` or a `FeedForward`.
        d_model: width of the tokens.
        num_heads: number of query heads of every part.
        **sizes: other keywords of `MemoryLayer`, for every part: num_kv_heads, head_dim, value_dim,
            engine, chunk_size, precision, depth.

    Raises:
        RecipeError: sizes that do not fit a part, or a keyword that `MemoryLayer` does not take.

    Examples:
        >>> mag = rc.blocks.MemoryAsGate("gated_delta_net", "sliding_window_attention")
        >>> layer = rc.blocks.build(mag, d_model=8, num_heads=2)
        >>> y, state = layer(torch.randn(1, 6, 8))
        >>> first, state = layer(torch.randn(1, 4, 8))
        >>> y.shape, state.position
        (torch.Size([1, 6, 8]), tensor([4]))
    """
    for name in sizes:
        if name not in _SIZES:
            raise RecipeError(f"build has no argument {name!r}; it has {', '.join(_SIZES)}")
    return _build(as_mixer(mixer), d_model, num_heads, **sizes)


def leaf_inputs(layer: MixerLayer, x: Tensor) -> dict[str, Tensor]:
    """Return the tokens that every recipe of a composition learns from.

    A part that is reset with every segment has the tokens of the last segment only. A memory of a
    mixture has the tokens that are routed to it. The second memory of `ResidualMemory`, the local
    memories of `LocalMemories` and the memories of `SlotMemory` have no tokens of their own. Keys,
    values and gates of `SelfModifyingMemory` differ from those of its layer alone.

    Args:
        layer: layer of a composition.
        x: tokens ``[B, T, d_model]``.

    Raises:
        ValueError: x of another shape, or sequences that are routed differently.

    Examples:
        >>> mac = rc.blocks.MemoryAsContext("titans", "softmax_attention", segment=4)
        >>> layer = rc.blocks.build(mac, d_model=8, num_heads=2)
        >>> inputs = rc.blocks.leaf_inputs(layer, torch.randn(1, 10, 8))
        >>> {name: list(tokens.shape) for name, tokens in inputs.items()}
        {'memory': [1, 10, 8], 'attention': [1, 4, 8]}
        >>> diagnosis = rc.diagnose(layer.leaves["memory"], inputs["memory"])
        >>> diagnosis.engine
        'deep'
    """
    pieces: dict[str, list[Tensor]] = {name: [] for name in layer.leaves}
    with ExitStack() as hooks, torch.no_grad():
        for hook in _input_hooks(layer, "", pieces):
            hooks.enter_context(hook)
        layer(x, output_final_state=False)
    return {name: torch.cat(inputs, dim=1) for name, inputs in pieces.items() if inputs}


def _input_hooks(layer: MixerLayer, path: str, pieces: dict[str, list[Tensor]]) -> Iterator[Any]:
    """Register hooks that record the inputs of recipes, and drop them at the start of a segment."""

    def record(name: str, module: nn.Module, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        mask = args[2] if len(args) > 2 else kwargs.get("attention_mask")
        if mask is not None and not bool((mask != 0).all()):
            raise ValueError(
                f"{name} receives other tokens of every row: give leaf_inputs() one row at a time"
            )
        x, segment = args[0], layer.restart_every if module is layer else 0
        if segment:
            x = x[:, (x.shape[1] - 1) // segment * segment :]
        if x.shape[1]:
            pieces[name].append(x)

    def clear(prefix: str, module: nn.Module, args: tuple[Any, ...]) -> None:
        if args[1:2] in ((), (None,)):  # without a state: a new segment
            for name, inputs in pieces.items():
                if name == prefix or name.startswith(f"{prefix}."):
                    inputs.clear()

    for name in layer.parts_fed_directly:
        hook = partial(record, path + name)
        yield layer.register_forward_pre_hook(hook, with_kwargs=True)
    for name, part in layer.parts.items():
        if name == "attention" and layer.resets_attention:
            yield part.register_forward_pre_hook(partial(clear, path + name))
        if isinstance(part, MixerLayer):
            yield from _input_hooks(part, f"{path}{name}.", pieces)
        elif path + name in pieces and name not in layer.parts_fed_directly:
            hook = partial(record, path + name)
            yield part.register_forward_pre_hook(hook, with_kwargs=True)


_LAYERS: dict[type[Mixer], Callable[..., MixerLayer]] = {
    Sequential: SequentialLayer,
    MemoryAsGate: MemoryAsGateLayer,
    MemoryAsContext: MemoryAsContextLayer,
    MixtureOfMemories: MixtureOfMemoriesLayer,
    ResidualMemory: ResidualMemoryLayer,
    SlotMemory: SlotMemoryLayer,
    CachedMemory: CachedMemoryLayer,
    Levels: LevelsLayer,
    LocalMemories: LocalMemoriesLayer,
    SelfModifyingMemory: SelfModifyingMemoryLayer,
}


def _build(
    mixer: Mixer, d_model: int, num_heads: int, **sizes: Any
) -> MemoryLayer | FeedForward | MixerLayer:
    if isinstance(mixer, RecipeMixer):
        return build_layer(d_model, num_heads, mixer.recipe, mixer.options, **sizes)
    layer = _LAYERS.get(type(mixer))
    if layer is None:
        raise RecipeError(f"there is no layer for {type(mixer).__name__}")
    if isinstance(mixer, ResidualMemory | SlotMemory):
        return layer(d_model, mixer, _two_memories(mixer, d_model, num_heads, **sizes))
    if isinstance(mixer, LocalMemories):
        return layer(d_model, mixer, _local_memories(mixer, d_model, num_heads, **sizes))
    if isinstance(mixer, SelfModifyingMemory):
        first = _build(mixer.memory, d_model, num_heads, **sizes)
        assert isinstance(first, MemoryLayer)
        projections = ProjectionMemories(first, len(mixer.children) - 1)
        return layer(d_model, mixer, {"memory": first, "projections": projections})
    parts = {n: _build(child, d_model, num_heads, **sizes) for n, child in mixer.children.items()}
    return layer(d_model, mixer, parts)


def _two_memories(
    mixer: ResidualMemory | SlotMemory, d_model: int, num_heads: int, **sizes: Any
) -> dict[str, nn.Module]:
    """Build a layer and a second memory that uses its projections."""
    first, second = mixer.first, mixer.second
    assert isinstance(first, RecipeMixer) and isinstance(second, RecipeMixer)
    num_slots = None
    if isinstance(mixer, SlotMemory):
        num_slots = mixer.num_slots or sizes.get("head_dim") or first.options.key_dim
        num_slots = num_slots or d_model // num_heads
    layer = MemoryLayer(
        *(d_model, num_heads, first.recipe, first.options), memory_value_dim=num_slots, **sizes
    )
    if isinstance(mixer, SlotMemory) and mixer.write == "running_softmax":
        layer.gates.pop("log_decay")  # the composition computes it
    memory = SecondMemory(
        *(layer, second, mixer.share), composition=type(mixer).__name__, head_dim=num_slots
    )
    return {"first": layer, "second": memory}


def _local_memories(
    mixer: LocalMemories, d_model: int, num_heads: int, **sizes: Any
) -> dict[str, nn.Module]:
    """Build a layer, and memories that use its projections."""
    first = _build(mixer.first, d_model, num_heads, **sizes)
    assert isinstance(first, MemoryLayer)
    parts: dict[str, nn.Module] = {"first": first}
    for name, child in mixer.children.items():
        if name == "first":
            continue
        assert isinstance(child, RecipeMixer)
        value_dim = first.head_dim if name.startswith("projection") else None
        parts[name] = SecondMemory(
            first, child, (), composition="LocalMemories", value_dim=value_dim
        )
    return parts
