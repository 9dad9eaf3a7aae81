"""The layer of a mixer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from recollect.blocks.as_context import AsContextLayer
from recollect.blocks.beside import ChainLayer, GatedLayer, TogetherLayer
from recollect.blocks.boosted import BoostedLayer, SecondMemory
from recollect.blocks.composed import Composed
from recollect.blocks.compositions import AsContext, Boosted, Chain, Gated, Routed, Together
from recollect.blocks.mixers import Leaf, Mixer, mixer_of
from recollect.blocks.routed import RoutedLayer
from recollect.choices.member import RecipeError
from recollect.layer.feed_forward import FeedForward, layer_of
from recollect.layer.memory_layer import MemoryLayer

__all__ = ["build", "received"]

_SIZES = ("kv_heads", "head_dim", "value_dim", "method", "chunk_size", "precision", "depth")


def build(
    mixer: Any, d_model: int, heads: int, **sizes: Any
) -> MemoryLayer | FeedForward | Composed:
    """The layer of a mixer, with fresh weights.

    Args:
        mixer: a mixer, or what stands for one (`mixer_of`); of a recipe this is its own layer.
        d_model: width of the tokens.
        heads: query heads of every part.
        **sizes: other keywords of `MemoryLayer`, for every part: kv_heads, head_dim, value_dim,
            method, chunk_size, precision, depth.

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

    A part that begins anew with every segment has the last segment alone; a memory that tokens are
    routed to has those that came to it. The second memory of `Boosted` has no tokens of its own.

    Args:
        layer: of a composition.
        x: tokens ``[B, T, d_model]``.

    Raises:
        ValueError: x of another shape, or rows that are routed differently.

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
    hooks = [*_notes(layer, "", pieces)]
    try:
        with torch.no_grad():
            layer(x, output_state=False)
    finally:
        for hook in hooks:
            hook.remove()
    return {name: torch.cat(seen, dim=1) for name, seen in pieces.items() if seen}


def _notes(layer: Composed, path: str, pieces: dict[str, list[Tensor]]) -> Iterator[Any]:
    """Hooks that note what the recipes of a layer receive, and forget it with the segments."""

    def note(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, given: Sequence[Any], told: dict[str, Any]) -> None:
            mask = given[2] if len(given) > 2 else told.get("attention_mask")
            if mask is not None and not bool((mask != 0).all()):
                raise ValueError(
                    f"{name} receives other tokens of every row: give received() one row at a time"
                )
            if given[0].shape[1]:
                pieces[name].append(given[0])

        return hook

    def begin(prefix: str) -> Callable[..., None]:
        def hook(module: nn.Module, given: tuple[Any, ...]) -> None:
            if given[1:2] in ((), (None,)):  # without a state: a new segment
                for name, seen in pieces.items():
                    if name == prefix or name.startswith(f"{prefix}."):
                        seen.clear()

        return hook

    for name in layer.reads_itself:
        hook: Any = note(path + name)
        yield layer.register_forward_pre_hook(hook, with_kwargs=True)
    for name, part in layer.parts.items():
        if name == "attention" and layer.keeps_attention:
            yield part.register_forward_pre_hook(begin(path + name))
        if isinstance(part, Composed):
            yield from _notes(part, f"{path}{name}.", pieces)
        elif path + name in pieces and name not in layer.reads_itself:
            hook = note(path + name)
            yield part.register_forward_pre_hook(hook, with_kwargs=True)


def _layer(
    mixer: Mixer, d_model: int, heads: int, **sizes: Any
) -> MemoryLayer | FeedForward | Composed:
    if isinstance(mixer, Leaf):
        return layer_of(d_model, heads, mixer.recipe, mixer.options, **sizes)
    if isinstance(mixer, Boosted):
        first = _layer(mixer.first, d_model, heads, **sizes)
        assert isinstance(first, MemoryLayer) and isinstance(mixer.second, Leaf)
        second = SecondMemory(first, mixer.second, mixer.share)
        return BoostedLayer(d_model, mixer, {"first": first, "second": second})
    parts = {name: _layer(child, d_model, heads, **sizes) for name, child in mixer.children.items()}
    if isinstance(mixer, Chain):
        return ChainLayer(d_model, mixer, parts)
    if isinstance(mixer, Gated):
        return GatedLayer(d_model, mixer, parts)
    if isinstance(mixer, Together):
        return TogetherLayer(d_model, mixer, parts)
    if isinstance(mixer, Routed):
        return RoutedLayer(d_model, mixer, parts)
    if isinstance(mixer, AsContext):
        return AsContextLayer(d_model, mixer, parts)
    raise RecipeError(f"there is no layer for {type(mixer).__name__}")
