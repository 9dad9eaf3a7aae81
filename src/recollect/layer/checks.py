"""Checks of a `MemoryLayer`: sizes, options, tokens, and states of other layers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from recollect.choices.devices import autocasts
from recollect.choices.fields import Param
from recollect.choices.member import RecipeError
from recollect.choices.memory.base import Stack
from recollect.fields import as_whole
from recollect.layer.options import GateOptions, LayerOptions
from recollect.layer.state import LayerState
from recollect.layer.ties import check_ties
from recollect.recall.arguments import DENSE, check_borders, check_mask, layout
from recollect.recipe.argument import named_system, recipe_of
from recollect.recipe.limit import step_limit
from recollect.recipe.recipe import Recipe
from recollect.wording import shown, word_for

__all__ = [
    "check_depth",
    "check_heads",
    "check_options",
    "check_sizes",
    "check_state",
    "check_tokens",
    "stated_layer",
]

LARGEST = 2**31 - 1
"""The largest width, as of a model's configuration; a matrix of two of them has a size."""
PLAIN = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
"""Types whose products are as they stand; quantised weights are multiplied in their own way."""


def stated_layer(d_model: object, recipe: object, options: object) -> tuple[Recipe, LayerOptions]:
    """Recipe and options that a caller means: a system's own options are part of what it is.

    Args:
        d_model: width of the tokens, or a recipe where the order of arguments was mistaken.
        recipe: one, the name of an architecture, or what has a recipe: a preset, a layer.
        options: in place of the system's own.

    Raises:
        RecipeError: something else, a name that nothing has, or a system that is not written to.
    """
    swapped = isinstance(d_model, str) and isinstance(recipe, int)
    if swapped or isinstance(d_model, Recipe) or hasattr(d_model, "recipe"):
        raise RecipeError(
            "MemoryLayer takes width, heads and recipe in this order: MemoryLayer(64, 4, recipe), "
            "or by name, MemoryLayer(recipe=..., d_model=64, heads=4)"
        )
    system = named_system(recipe)
    stated = recipe_of(system, "MemoryLayer")
    if options is None:
        own = getattr(system, "options", None)
        options = own if isinstance(own, LayerOptions) else LayerOptions()
        if options.persistent:
            name = getattr(system, "name", "preset")
            raise RecipeError(
                f"{name} reads learned pairs and writes none, so it is no MemoryLayer: "
                f"rc.zoo.get({name!r}).build(d_model, heads) makes its layer"
            )
    if not isinstance(options, LayerOptions):
        raise RecipeError(f"MemoryLayer needs rc.LayerOptions, not {shown(options)}")
    return stated, options


def check_sizes(
    d_model: int,
    heads: int,
    kv_heads: int | None,
    head_dim: int | None,
    value_dim: int | None,
    recipe: Recipe,
    options: LayerOptions,
) -> tuple[int, int, int | None, int | None, int | None]:
    """The sizes, of whatever kind of whole number they are given, if a layer can have them.

    Raises:
        RecipeError: it cannot.
    """
    sizes = {"d_model": d_model, "heads": heads, "kv_heads": kv_heads}
    for name, size in {**sizes, "head_dim": head_dim, "value_dim": value_dim}.items():
        # How large the others must be is said with what they must divide.
        if size is None and name not in ("d_model", "heads"):
            continue
        number = as_whole(size)
        if number is None or (number < 1 and name.endswith("_dim")):
            raise RecipeError(f"{word_for(name)} must be a whole number >= 1, not {shown(size)}")
        if number > LARGEST:
            raise RecipeError(f"{word_for(name)} must be at most {LARGEST:,}, not {shown(size)}")
    d_model, heads = int(d_model), int(heads)
    kv_heads, head_dim, value_dim = (
        None if size is None else int(size) for size in (kv_heads, head_dim, value_dim)
    )
    free = word_for("head_dim")
    check_heads(d_model, heads, divide=head_dim is None, instead=free and f", or give {free}")
    if kv_heads is not None and (kv_heads < 1 or heads % kv_heads):
        raise RecipeError(
            f"{word_for('heads')} = {heads} must be a multiple of {word_for('kv_heads')} = "
            f"{kv_heads}: several query heads share one memory, never the other way"
        )
    key_dim = head_dim or options.key_dim or d_model // heads
    if options.rope is not None and key_dim % 2:
        own = word_for("head_dim" if head_dim else "key_dim")
        shared = f"{word_for('d_model')} / {word_for('heads')}"
        raise RecipeError(
            "LayerOptions(rope=...) turns pairs of channels and needs an even "
            f"{own if head_dim or options.key_dim else shared}, not {key_dim}"
        )
    return d_model, heads, kv_heads, head_dim, value_dim


def check_heads(d_model: int, heads: int, *, divide: bool = True, instead: str = "") -> None:
    """Whether a width can be divided among so many heads.

    Args:
        d_model: width of the tokens.
        heads: that share it.
        divide: whether it must be a multiple of them.
        instead: what else there is to do than to choose other sizes.

    Raises:
        RecipeError: it cannot, in the words of whoever gave the sizes.
    """
    width, count = word_for("d_model"), word_for("heads")
    if d_model < 1 or heads < 1:
        raise RecipeError(f"{width} and {count} must be at least 1, not {d_model} and {heads}")
    if divide and d_model % heads:
        raise RecipeError(
            f"{width} = {d_model} is no multiple of {count} = {heads}: choose other sizes{instead}"
        )


def check_options(recipe: Recipe, options: LayerOptions) -> None:
    """Names in the options that the recipe knows nothing of, and ties that cannot be."""
    names = [item.name for item in (*recipe.gates(), *recipe.params())]
    for name, _ in options.gates:
        if name not in names:
            raise RecipeError(
                f"LayerOptions(gates=...) names {name!r}, which this recipe does not ask for; "
                f"it asks for: {', '.join(sorted(names)) or 'none'}"
            )
    check_ties(recipe, options)
    _check_units(recipe, options)
    if recipe.associations > 1 and (options.skip or options.qk == "ones"):
        raise RecipeError(
            "LayerOptions(skip=..., qk=...) speak of one association per token, and this "
            f"recipe takes {recipe.associations}"
        )
    made_of_maps = isinstance(recipe.memory, Stack) and recipe.features.finite
    if options.last_map != 1 and not (made_of_maps and recipe.needs_init()):
        raise RecipeError(
            f"LayerOptions(last_map={options.last_map:g}) is about initial weights that are drawn, "
            "of a memory made of linear maps (memory.MLP, memory.GatedMLP) without a base, and "
            "this recipe has none: leave it out"
        )
    if options.memory_scale != 1 and recipe.learns_init and not recipe.needs_init():
        raise RecipeError(
            f"LayerOptions(memory_scale={options.memory_scale:g}) is about initial weights that "
            f"are drawn, and {recipe.memory.title} begins with zeros here: leave it out"
        )


def _check_units(recipe: Recipe, options: LayerOptions) -> None:
    """Whether what is stated in a unit is a number that has it."""
    for name, own in dict(options.gates).items():
        if own.unit in (None, "own"):
            continue
        if own.unit == "rms":
            _check_lengths(recipe, name, own)
            continue
        if own.unit == "mean":
            declared = next(one for one in (*recipe.gates(), *recipe.params()) if one.name == name)
            averaged = name == "offset" and recipe.algorithm.reduce == "mean"
            if not averaged or declared.axes != ("b",):
                raise RecipeError(
                    f"options of {name!r}: unit='mean' is 1/place, which only a correction "
                    "'offset' of averaged steps with one value per place of the inner batch "
                    "(axes 'b') is added to: leave unit out"
                )
            continue
        if name != "lr":
            raise RecipeError(
                f"options of {name!r}: unit='share' is a share of the stability limit of steps, "
                "which only the rate 'lr' has: leave unit out"
            )
        title = recipe.algorithm.title
        if step_limit(recipe) is None:
            raise RecipeError(
                f"options of {name!r}: unit='share' needs steps measured by the error that they "
                f"correct, and {title} takes plain ones: give it normalize=True, or leave unit out"
            )
        if name not in {gate.name for gate in recipe.gates()}:
            raise RecipeError(
                f"options of {name!r}: unit='share' follows the token's momentum and window, and "
                f"{title} holds one rate for all tokens: use lr='token' (with source='learned' the "
                "share is still one number per head)"
            )


def _check_lengths(recipe: Recipe, name: str, own: GateOptions) -> None:
    """Whether a number stated in √V may have any length, and begins at one."""
    declared = next(one for one in (*recipe.gates(), *recipe.params()) if one.name == name)
    span, owner = declared.range, declared.owner
    if name not in recipe.bias.numbers or span.low not in (None, 0.0) or span.high is not None:
        raise RecipeError(
            f"options of {name!r}: unit='rms' is for numbers that a bias compares with values or "
            f"errors, of any length, and {owner} takes {span}: leave unit out"
        )
    drawn = isinstance(declared, Param) and declared.draw is not None
    if own.schedule is not None or drawn or isinstance(declared.init, tuple):
        who = "schedule" if own.schedule is not None else owner
        raise RecipeError(
            f"options of {name!r}: unit='rms' is for numbers that begin at one value, and {who} "
            "gives several: leave unit out"
        )


def check_tokens(
    x: Tensor, mask: Tensor | None, borders: Tensor | None, *, d_model: int, weight: Tensor
) -> None:
    """Whether tokens, and what says where documents are, are such as a layer takes.

    Args:
        x: tokens.
        mask: which of them are real.
        borders: of documents.
        d_model: width of the layer.
        weight: one of the layer's, whose type and device x must have.

    Raises:
        ValueError: other shapes, types, layouts or devices.
    """
    if not isinstance(x, Tensor) or not x.is_floating_point():
        given = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise ValueError(f"x must be a floating-point tensor [B, T, {d_model}], not {given}")
    if x.layout is not torch.strided or x.is_nested:
        raise ValueError(f"x must be a dense tensor [B, T, {d_model}], not {layout(x)}: {DENSE}")
    if x.dtype != weight.dtype and weight.dtype in PLAIN and not autocasts(x.device.type):
        raise ValueError(
            f"x is {x.dtype} and the layer {weight.dtype}: cast one of them, by "
            f"x.to({weight.dtype}) or layer.to({x.dtype}), or run it under torch.autocast"
        )
    if x.device != weight.device and weight.device.type != "meta":  # weights may come when needed
        raise ValueError(f"x is on {x.device} and the layer on {weight.device}: move one of them")
    if x.dim() != 3 or x.shape[-1] != d_model:
        raise ValueError(f"x must have shape [B, T, {d_model}], not {list(x.shape)}")
    if mask is not None and borders is not None:
        raise ValueError(
            "attention_mask and cu_seqlens exclude each other: packed rows have no padding"
        )
    if mask is not None:
        check_mask(mask, x)
    if borders is not None:
        check_borders(borders, x)


def check_depth(depth: Any) -> tuple[int, int]:
    """A layer's place: its index and the number of layers.

    Raises:
        RecipeError: something else, or an index beyond the last layer.
    """
    pair = depth if isinstance(depth, tuple | list) and len(depth) == 2 else (None, None)
    index, layers = map(as_whole, pair)
    if index is None or layers is None or not 0 <= index < layers:
        raise RecipeError(
            "depth must be (index of this layer, number of layers), such as (0, 12), not "
            f"{shown(depth)}"
        )
    return index, layers


def check_state(
    state: LayerState | None,
    *,
    rows: int,
    tail: tuple[int, int] | None,
    phase: bool,
    shift: bool,
) -> None:
    """Whether a state continues this layer, which has these parts (``tail``: its convolution's)."""
    if state is None:
        return
    if not isinstance(state, LayerState):
        raise ValueError(
            f"state must be what this layer returned earlier, not {type(state).__name__}"
        )
    if state.rows != rows:
        raise ValueError(f"the state has {state.rows} rows and this call {rows}")
    own_tail = None if state.conv is None else tuple(state.conv.shape[1:])
    if tail != own_tail:
        raise ValueError(
            f"this state belongs to another layer: its convolution tail is {own_tail} and this "
            f"layer's is {tail}"
        )
    for name, has, needs in (
        ("an angle", state.phase is not None, phase),
        ("a last token", state.shift is not None, shift),
    ):
        if has != needs:
            raise ValueError(
                f"this state belongs to another layer: {name} is {'there' if has else 'missing'}"
            )
