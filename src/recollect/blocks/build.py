"""The layer of a mixer."""

from __future__ import annotations

from typing import Any

from recollect.blocks.as_context import AsContextLayer
from recollect.blocks.beside import ChainLayer, GatedLayer
from recollect.blocks.composed import Composed
from recollect.blocks.mixers import AsContext, Chain, Gated, Leaf, Mixer, mixer_of
from recollect.choices.member import RecipeError
from recollect.layer.feed_forward import FeedForward, layer_of
from recollect.layer.memory_layer import MemoryLayer

__all__ = ["build"]

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
