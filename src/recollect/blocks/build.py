"""The layer of a mixer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from recollect.blocks.as_context import AsContextLayer
from recollect.blocks.beside import ChainLayer, GatedLayer
from recollect.blocks.composed import Composed
from recollect.blocks.mixers import AsContext, Chain, Gated, Leaf, Mixer, mixer_of
from recollect.choices.member import RecipeError
from recollect.layer.feed_forward import FeedForward, layer_of
from recollect.layer.memory_layer import MemoryLayer

__all__ = ["build", "received"]

_SIZES = ("kv_heads", "head_dim", "value_dim", "method", "chunk_size", "depth")


def build(
    mixer: Any, d_model: int, heads: int, **sizes: Any
) -> MemoryLayer | FeedForward | Composed:
    """The layer of a mixer, with fresh weights.

    Args:
        mixer: a mixer, or what stands for one (`mixer_of`); of a recipe this is its own layer.
        d_model: width of the tokens.
        heads: query heads of every part.
        **sizes: other keywords of `MemoryLayer`, for every part: kv_heads, head_dim, value_dim,
            method, chunk_size, depth.

    Raises:
        RecipeError: sizes that do not fit a part, or a keyword that `MemoryLayer` does not take.

    Examples:
        >>> mag = rc.blocks.Gated("gated_delta_net", "sliding_window_attention")
        >>> layer = rc.blocks.build(mag, d_model=8, heads=2)
        >>> y, state = layer(torch.randn(1, 6, 8))
        >>> first, state = layer(torch.randn(1, 4, 8))
        >>> y.shape, state.position
        (torch.Size([1, 6, 8]), tensor([4]))
    """
    for name in sizes:
        if name not in _SIZES:
            raise RecipeError(f"build has no argument {name!r}; it has {', '.join(_SIZES)}")
    return _layer(mixer_of(mixer), d_model, heads, **sizes)


def received(layer: Composed, x: Tensor) -> dict[str, Tensor]:
    """The tokens that every recipe of a composition learns from when the layer reads x.

    A part that begins anew with every segment has the last segment alone.

    Args:
        layer: of a composition.
        x: tokens ``[B, T, d_model]``.

    Raises:
        ValueError: x of another shape.

    Examples:
        >>> mac = rc.blocks.AsContext("titans", "softmax_attention", segment=4)
        >>> layer = rc.blocks.build(mac, d_model=8, heads=2)
        >>> seen = rc.blocks.received(layer, torch.randn(1, 10, 8))
        >>> {name: list(tokens.shape) for name, tokens in seen.items()}
        {'memory': [1, 10, 8], 'attention': [1, 4, 8]}
        >>> found = rc.diagnose(layer.leaves["memory"], seen["memory"])
        >>> found.engine
        'deep'
    """
    pieces: dict[str, list[Tensor]] = {name: [] for name in layer.leaves}

    def note(name: str, anew: bool) -> Any:
        def hook(module: Any, given: tuple[Any, ...], answer: Any) -> None:
            if given[0].shape[1] == 0:
                return
            if anew and given[1] is None:  # without a state: a new segment
                pieces[name].clear()
            pieces[name].append(given[0])

        return hook

    hooks = [
        leaf.register_forward_hook(note(name, name.endswith("attention")))
        for name, leaf in layer.leaves.items()
    ]
    try:
        with torch.no_grad():
            layer(x, output_state=False)
    finally:
        for hook in hooks:
            hook.remove()
    return {name: torch.cat(seen, dim=1) for name, seen in pieces.items() if seen}


def _layer(
    mixer: Mixer, d_model: int, heads: int, **sizes: Any
) -> MemoryLayer | FeedForward | Composed:
    if isinstance(mixer, Leaf):
        return layer_of(d_model, heads, mixer.recipe, mixer.options, **sizes)
    parts = {name: _layer(child, d_model, heads, **sizes) for name, child in mixer.children.items()}
    if isinstance(mixer, Chain):
        return ChainLayer(d_model, mixer, parts)
    if isinstance(mixer, Gated):
        return GatedLayer(d_model, mixer, parts)
    if isinstance(mixer, AsContext):
        return AsContextLayer(d_model, mixer, parts)
    raise RecipeError(f"there is no layer for {type(mixer).__name__}")
