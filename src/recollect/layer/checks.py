"""Checks of a `MemoryLayer`: sizes, options, tokens, and states of other layers."""

# More than 400 lines: all checks of a layer, and the options that fit a recipe.

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from recollect.choices.devices import autocasts
from recollect.choices.fields import Gate, Param
from recollect.choices.member import RecipeError
from recollect.choices.memory.base import Stack
from recollect.fields import as_whole
from recollect.layer.options import GateOptions, LayerOptions
from recollect.layer.rotation import phase_misfit
from recollect.layer.state import LayerState
from recollect.layer.ties import tie_misfits
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
    "fit_options",
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


@dataclass(frozen=True, kw_only=True)
class Misfit:
    """An option that does not fit a recipe.

    Attributes:
        option: name of the option.
        reason: message of the error.
        remedy: the options with this one reset to its default; ``None`` where no default fits.
    """

    option: str
    reason: str
    remedy: LayerOptions | None


def check_options(recipe: Recipe, options: LayerOptions) -> None:
    """Check that options fit a recipe.

    Raises:
        RecipeError: an option does not fit.
    """
    for misfit in _misfits(recipe, options):
        raise RecipeError(misfit.reason)


def fit_options(
    recipe: Recipe, options: LayerOptions, previous: Recipe
) -> tuple[LayerOptions, tuple[str, ...]]:
    """Reset the options that do not fit a recipe, and return the names of those options.

    Values of a gate are reset, too, where its default unit differs between the recipes.

    Args:
        recipe: the recipe that options must fit.
        options: the options of a layer of ``previous``.
        previous: the recipe that the options were written for.

    Raises:
        RecipeError: an option does not fit, and no default replaces it.
    """
    names: dict[str, None] = {}
    declared = {item.name for item in (*recipe.gates(), *recipe.params())}
    for name, gate_options in dict(options.gates).items():
        units = {gate_options.unit_of(name, one) for one in (previous, recipe)}
        fitted = _without_unit(options, name)
        if name in declared and len(units) > 1 and fitted != options:
            names[f"gates[{name!r}]"] = None
            options = fitted
    while (misfit := next(_misfits(recipe, options), None)) is not None:
        if misfit.remedy is None:
            raise RecipeError(misfit.reason)
        names[misfit.option] = None
        options = misfit.remedy
    return options, tuple(names)


def _misfits(recipe: Recipe, options: LayerOptions) -> Iterator[Misfit]:
    """Options that do not fit a recipe. Each holds for options without the misfits before it."""
    yield from _gate_misfits(recipe, options)
    for tie, reason in tie_misfits(recipe, options):
        yield Misfit(
            option=f"ties ({tie.target} by {tie.rule})",
            reason=reason,
            remedy=replace(options, ties=tuple(one for one in options.ties if one != tie)),
        )
    yield from _unit_misfits(recipe, options)
    resets: list[tuple[str, dict[str, Any]]] = []
    if recipe.associations > 1 and (options.skip or options.qk == "ones"):
        reason = (
            "LayerOptions(skip=..., qk=...) speak of one association per token, and this "
            f"recipe takes {recipe.associations}"
        )
        resets.append((reason, {"skip": False, "qk": "input"}))
    made_of_maps = isinstance(recipe.memory, Stack) and recipe.features.finite
    if options.last_map != 1 and not (made_of_maps and recipe.needs_init()):
        reason = (
            f"LayerOptions(last_map={options.last_map:g}) is about initial weights that are drawn, "
            "of a memory made of linear maps (memory.MLP, memory.GatedMLP) without a base, and "
            "this recipe has none: leave it out"
        )
        resets.append((reason, {"last_map": 1.0}))
    if options.memory_scale != 1 and recipe.learns_init and not recipe.needs_init():
        reason = (
            f"LayerOptions(memory_scale={options.memory_scale:g}) is about initial weights that "
            f"are drawn, and {recipe.memory.title} begins with zeros here: leave it out"
        )
        resets.append((reason, {"memory_scale": 1.0}))
    if options.phase != "none" and (reason := phase_misfit(recipe, options)) is not None:
        resets.append((reason, {"phase": "none"}))
    for reason, defaults in resets:
        remedy = replace(options, **defaults)
        yield Misfit(option=", ".join(defaults), reason=reason, remedy=remedy)
    if options.persistent and (not recipe.nonparametric or recipe.memory.degree != 0):
        yield Misfit(
            option="persistent",
            reason="LayerOptions(persistent=...) reads learned pairs, and "
            f"{recipe.memory.title} is written: use memory.LocalConstant()",
            remedy=None,
        )


def _gate_misfits(recipe: Recipe, options: LayerOptions) -> Iterator[Misfit]:
    """Options of gates and params that the recipe does not have, or has of another kind."""
    declared = {item.name: item for item in (*recipe.gates(), *recipe.params())}
    for name, gate_options in dict(options.gates).items():
        option, item = f"gates[{name!r}]", declared.get(name)
        if item is None:
            yield Misfit(
                option=option,
                reason=f"LayerOptions(gates=...) names {name!r}, which this recipe does not ask "
                f"for; it asks for: {', '.join(sorted(declared)) or 'none'}",
                remedy=_with_gate(options, name, None),
            )
        elif isinstance(item, Param) and gate_options.source == "input":
            other = "; give the member 'token' for one value per token" * item.per_token
            yield Misfit(
                option=option,
                reason=f"options of {name!r}: {item.owner} holds it for all tokens, so its "
                f"source is 'learned' or 'fixed'{other}",
                remedy=_with_gate(options, name, replace(gate_options, source=None)),
            )
        elif gate_options.schedule == "xpos" and not item.axes:
            yield Misfit(
                option=option,
                reason=f"options of {name!r}: schedule='xpos' is for decays of an even number of "
                "channels, as Decay(per='key') has",
                remedy=_with_gate(options, name, replace(gate_options, schedule=None)),
            )


def _with_gate(options: LayerOptions, name: str, gate_options: GateOptions | None) -> LayerOptions:
    """Options with those of one gate in place of its own, or without any."""
    gates = {key: value for key, value in dict(options.gates).items() if key != name}
    if gate_options is not None:
        gates[name] = gate_options
    return replace(options, gates=gates)


def _without_unit(options: LayerOptions, name: str) -> LayerOptions:
    """Options without the values of a gate that its unit states."""
    gate_options = options.gate(name)
    gate_options = replace(gate_options, unit=None, squash=None, low=None, high=None, init=None)
    return _with_gate(options, name, gate_options)


def _unit_misfits(recipe: Recipe, options: LayerOptions) -> Iterator[Misfit]:
    """Numbers that are stated in a unit that they do not have."""
    for name, gate_options in dict(options.gates).items():
        if (reason := _unit_misfit(recipe, name, gate_options)) is not None:
            remedy = _without_unit(options, name)
            yield Misfit(
                option=f"gates[{name!r}]", reason=f"options of {name!r}: {reason}", remedy=remedy
            )


def _unit_misfit(recipe: Recipe, name: str, gate_options: GateOptions) -> str | None:
    """The reason why a number does not have the unit of its options."""
    if gate_options.unit in (None, "own"):
        return None
    declared = next(one for one in (*recipe.gates(), *recipe.params()) if one.name == name)
    title = recipe.algorithm.title
    if gate_options.unit == "rms":
        return _length_misfit(recipe, name, gate_options, declared)
    if gate_options.unit == "mean":
        averaged = name == "offset" and recipe.algorithm.reduce == "mean"
        if averaged and declared.axes == ("b",):
            return None
        return (
            "unit='mean' is 1/place, which only a correction 'offset' of averaged steps with one "
            "value per place of the inner batch (axes 'b') is added to: leave unit out"
        )
    if name != "lr":
        return (
            "unit='share' is a share of the stability limit of steps, which only the rate 'lr' "
            "has: leave unit out"
        )
    if step_limit(recipe) is None:
        return (
            f"unit='share' needs steps measured by the error that they correct, and {title} takes "
            "plain ones: give it normalize=True, or leave unit out"
        )
    if isinstance(declared, Param):
        return (
            f"unit='share' follows the token's momentum and window, and {title} holds one rate for "
            "all tokens: use lr='token' (with source='learned' the share is still one number per "
            "head)"
        )
    return None


def _length_misfit(
    recipe: Recipe, name: str, gate_options: GateOptions, declared: Gate | Param
) -> str | None:
    """The reason why a number may not have any length, or does not start at one."""
    span, owner = declared.range, declared.owner
    if name not in recipe.bias.numbers or span.low not in (None, 0.0) or span.high is not None:
        return (
            "unit='rms' is for numbers that a bias compares with values or errors, of any length, "
            f"and {owner} takes {span}: leave unit out"
        )
    drawn = isinstance(declared, Param) and declared.draw is not None
    if gate_options.schedule is not None or drawn or isinstance(declared.init, tuple):
        who = "schedule" if gate_options.schedule is not None else owner
        return (
            f"unit='rms' is for numbers that begin at one value, and {who} gives several: leave "
            "unit out"
        )
    return None


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
