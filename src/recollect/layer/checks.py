"""Checks of a `MemoryLayer`: sizes, options, tokens, and states of other layers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from recollect.choices.memory.base import Stack
from recollect.choices.retention.row_norm import RowNorm
from recollect.choices.runtime import autocast_enabled
from recollect.fields import Gate, Param, as_int
from recollect.functional.checks import DENSE, check_rows, layout_name
from recollect.layer.options import GateOptions, LayerOptions
from recollect.layer.rotary import phase_misfit, transposed_misfit
from recollect.layer.state import LayerState
from recollect.layer.ties import tie_gates, tie_misfits
from recollect.messages import RecipeError, argument_name, short_repr
from recollect.recipe.compatibility import check_size
from recollect.recipe.recipe import Recipe
from recollect.recipe.resolve import as_recipe, resolve_name
from recollect.recipe.stability import step_limit

__all__ = [
    "check_depth",
    "check_heads",
    "check_options",
    "check_sizes",
    "check_state",
    "check_state_shapes",
    "check_tokens",
    "fit_options",
    "resolve_layer",
]

MAX_WIDTH = 2**31 - 1
"""Largest width; the size of a square matrix of this width fits 64 bits."""
FLOAT_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
"""Dtypes of ordinary weights; quantised weights have products of their own."""
_STATE_PARTS = {
    "conv": "convolution tail",
    "phase": "angle",
    "shift": "last token",
    "keys": "history of keys",
}


def resolve_layer(d_model: object, recipe: object, options: object) -> tuple[Recipe, LayerOptions]:
    """Return the recipe and options of a layer; a preset contains its options."""
    wrong_order = isinstance(d_model, str) and isinstance(recipe, int)
    if wrong_order or isinstance(d_model, Recipe) or hasattr(d_model, "recipe"):
        raise RecipeError(
            "MemoryLayer takes d_model, num_heads and recipe in this order: MemoryLayer(64, 4, "
            "recipe), or by name, MemoryLayer(recipe=..., d_model=64, num_heads=4)"
        )
    system = resolve_name(recipe)
    resolved = as_recipe(system, "MemoryLayer")
    if options is None:
        options = getattr(system, "options", None)
        options = options if isinstance(options, LayerOptions) else LayerOptions()
        if options.persistent:
            name = getattr(system, "name", "preset")
            raise RecipeError(
                f"{name} only reads learned pairs, which a MemoryLayer cannot do: create its layer "
                f"by rc.zoo.get({name!r}).build(d_model, num_heads)"
            )
    if not isinstance(options, LayerOptions):
        raise RecipeError(f"MemoryLayer needs rc.LayerOptions, not {short_repr(options)}")
    return resolved, options


def check_sizes(
    d_model: int,
    num_heads: int,
    num_kv_heads: int | None,
    head_dim: int | None,
    value_dim: int | None,
    recipe: Recipe,
    options: LayerOptions,
) -> tuple[int, int, int | None, int | None, int | None]:
    """Return the sizes as `int`; raise `RecipeError` for sizes that a layer cannot have."""
    optional = {"num_kv_heads": num_kv_heads, "head_dim": head_dim, "value_dim": value_dim}
    num_kv_heads, head_dim, value_dim = (
        None if size is None else check_size(argument_name(name), size, at_most=MAX_WIDTH)
        for name, size in optional.items()
    )
    name = argument_name("head_dim")
    d_model, num_heads = check_heads(
        d_model, num_heads, divide=head_dim is None, hint=name and f", or give {name}"
    )
    if num_kv_heads is not None and num_heads % num_kv_heads:
        raise RecipeError(
            f"{argument_name('num_heads')} = {num_heads} must be a multiple of "
            f"{argument_name('num_kv_heads')} = {num_kv_heads}: several "
            "query heads share one memory, never the other way"
        )
    memories = num_kv_heads or num_heads
    if options.key_group_size > 1 and (memories != num_heads or num_heads % options.key_group_size):
        raise RecipeError(
            f"LayerOptions(key_group_size={options.key_group_size}) needs one query head per "
            f"memory and a number of memories that it divides, not {num_heads} heads of "
            f"{memories} memories: set another key_group_size, and leave "
            f"{argument_name('num_kv_heads')} out"
        )
    if num_heads % (options.norm_group_size or 1):
        raise RecipeError(
            f"LayerOptions(norm_group_size={options.norm_group_size}) must divide "
            f"{argument_name('num_heads')} = {num_heads}: set another norm_group_size"
        )
    key_dim = head_dim or options.key_dim or d_model // num_heads
    if options.rope_theta is not None and key_dim % 2:
        if head_dim or options.key_dim:
            name = argument_name("head_dim" if head_dim else "key_dim")
        else:
            name = f"{argument_name('d_model')} / {argument_name('num_heads')}"
        raise RecipeError(
            "LayerOptions(rope_theta=...) rotates pairs of channels and needs an even "
            f"{name}, not {key_dim}"
        )
    return d_model, num_heads, num_kv_heads, head_dim, value_dim


def check_heads(
    d_model: int, num_heads: int, *, divide: bool = True, hint: str = ""
) -> tuple[int, int]:
    """Return width and heads, or raise RecipeError, which ``hint`` ends, if they do not divide."""
    width, count = argument_name("d_model"), argument_name("num_heads")
    d_model = check_size(width, d_model, at_most=MAX_WIDTH)
    num_heads = check_size(count, num_heads, at_most=MAX_WIDTH)
    if divide and d_model % num_heads:
        raise RecipeError(
            f"{width} = {d_model} is not a multiple of {count} = {num_heads}: choose other sizes"
            f"{hint}"
        )
    return d_model, num_heads


@dataclass(frozen=True, kw_only=True)
class Misfit:
    """An option that does not fit a recipe."""

    option: str
    reason: str  # message of the error
    # the options with this one reset to its default; None if no default fits
    remedy: LayerOptions | None


def check_options(recipe: Recipe, options: LayerOptions) -> None:
    """Raise `RecipeError` if an option does not fit a recipe."""
    for misfit in _misfits(recipe, options):
        raise RecipeError(misfit.reason)


def fit_options(
    recipe: Recipe, options: LayerOptions, previous: Recipe
) -> tuple[LayerOptions, tuple[str, ...]]:
    """Reset the options that do not fit a recipe, and return the names of those options.

    Values of a gate are reset, too, if its default unit differs between the recipes. Options were
    written for the recipe ``previous``. An option without a default that fits raises RecipeError.
    """
    names: dict[str, None] = {}
    declared = {item.name for item in (*recipe.gates(), *recipe.params())}
    for name, gate_options in dict(options.gate_options).items():
        units = {gate_options.resolve_unit(name, one) for one in (previous, recipe)}
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
    """Yield the options that do not fit a recipe; each assumes the remedies of earlier ones."""
    yield from _gate_misfits(recipe, options)
    for tie, reason in tie_misfits(recipe, options):
        yield Misfit(
            option=f"ties ({tie.target} by {tie.rule})",
            reason=reason,
            remedy=replace(options, ties=tuple(one for one in options.ties if one != tie)),
        )
    yield from _unit_misfits(recipe, options)
    resets: list[tuple[str, dict[str, Any]]] = []
    n = recipe.associations_per_token
    if options.mimo and n == 1:
        reason = (
            "LayerOptions(mimo=True) is for several associations per token: set updates_per_token "
            f"of the algorithm, which {recipe.algorithm.title} has at 1"
        )
        resets.append((reason, {"mimo": False}))
    for option, default in (("zero_values", 0), ("norm_group_size", None)):
        value = getattr(options, option)
        if options.mimo and value != default:
            reason = (
                "LayerOptions(mimo=True) has one value per token, and outputs that are normalized "
                f"by themselves: leave out {option}={value}"
            )
            resets.append((reason, {option: default}))
    if n > 1 and ((options.value_skip and not options.mimo) or options.qk == "ones"):
        reason = (
            "LayerOptions(value_skip=..., qk=...) need one association per token, and this "
            f"recipe takes {n}: leave them out; value_skip also works with mimo=True"
        )
        resets.append((reason, {"value_skip": False, "value_skip_per": "value", "qk": "input"}))
    if options.zero_values >= n:
        reason = (
            f"LayerOptions(zero_values={options.zero_values}) leaves a token without a value: this "
            f"recipe takes {n} per token, as updates_per_token sets"
        )
        resets.append((reason, {"zero_values": 0}))
    makes_keys = any(tie.rule == "complement" for tie in options.ties)
    if options.qk_affine and (options.qk == "ones" or makes_keys):
        reason = "LayerOptions(qk_affine=True) needs projections of queries and keys: qk='input'"
        resets.append((reason, {"qk_affine": False}))
    if options.qk_scale != "none" and (options.qk == "ones" or makes_keys):
        reason = (
            f"LayerOptions(qk_scale={options.qk_scale!r}) needs projections of queries and keys: "
            "qk='input'"
        )
        resets.append((reason, {"qk_scale": "none"}))
    if options.key_group_size > 1 and (options.qk == "ones" or makes_keys):
        reason = (
            f"LayerOptions(key_group_size={options.key_group_size}) shares projections of queries "
            "and keys: qk='input'"
        )
        resets.append((reason, {"key_group_size": 1}))
    if options.rope_theta is not None and recipe.memory.read.transposed:
        reason = transposed_misfit(recipe, f"LayerOptions(rope_theta={options.rope_theta:g})")
        resets.append((reason, {"rope_theta": None}))
    rotates = options.rope_theta is not None or options.complex_decay != "none"
    if options.partial_rotary_factor != 1 and not rotates:
        reason = (
            f"LayerOptions(partial_rotary_factor={options.partial_rotary_factor:g}) needs "
            "rope_theta or complex_decay, which rotate queries and keys"
        )
        resets.append((reason, {"partial_rotary_factor": 1.0}))
    made_of_maps = isinstance(recipe.memory, Stack) and recipe.features.finite
    if options.last_map_init_scale != 1 and not (made_of_maps and recipe.needs_init()):
        reason = (
            f"LayerOptions(last_map_init_scale={options.last_map_init_scale:g}) scales random "
            "initial weights of a memory made of linear maps (memory.MLP, memory.GatedMLP) "
            "without static weights, and this recipe has none: leave it out"
        )
        resets.append((reason, {"last_map_init_scale": 1.0}))
    elif options.last_map_init_scale == 0 and isinstance(recipe.retention, RowNorm):
        reason = (
            "LayerOptions(last_map_init_scale=0) starts with rows of length 0, and "
            f"{recipe.retention.title} keeps the length of rows: set a scale above 0, or leave it "
            "out"
        )
        resets.append((reason, {"last_map_init_scale": 1.0}))
    if options.memory_init_scale != 1 and recipe.learns_init and not recipe.needs_init():
        reason = (
            f"LayerOptions(memory_init_scale={options.memory_init_scale:g}) scales random "
            f"initial weights, and {recipe.memory.title} begins with zeros here: leave it out"
        )
        resets.append((reason, {"memory_init_scale": 1.0}))
    if options.complex_decay != "none" and (reason := phase_misfit(recipe, options)) is not None:
        resets.append((reason, {"complex_decay": "none"}))
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
    """Yield the options of gates and params that the recipe declares differently or not at all."""
    gates = (*recipe.gates(), *tie_gates(options))
    declared = {item.name: item for item in (*gates, *recipe.params())}
    for name, gate_options in dict(options.gate_options).items():
        option, item = f"gates[{name!r}]", declared.get(name)
        if item is None:
            yield Misfit(
                option=option,
                reason=f"LayerOptions(gate_options=...) names {name!r}, which this recipe does not "
                f"declare; it declares: {', '.join(sorted(declared)) or 'none'}",
                remedy=_with_gate(options, name, None),
            )
        elif isinstance(item, Param) and gate_options.source == "input":
            other = "; set it to 'input' in the member for one value per token" * item.per_token
            yield Misfit(
                option=option,
                reason=f"options of {name!r}: {item.owner} has one value for all tokens, so the "
                f"source is 'learned' or 'constant'{other}",
                remedy=_with_gate(options, name, replace(gate_options, source=None)),
            )
        elif gate_options.init_schedule == "xpos" and not item.axes:
            yield Misfit(
                option=option,
                reason=f"options of {name!r}: init_schedule='xpos' is for decays of an even number "
                "of channels, as Decay(per='key') has",
                remedy=_with_gate(options, name, replace(gate_options, init_schedule=None)),
            )


def _with_gate(options: LayerOptions, name: str, gate_options: GateOptions | None) -> LayerOptions:
    """Return options with the options of one gate replaced or removed."""
    gates = {key: value for key, value in dict(options.gate_options).items() if key != name}
    if gate_options is not None:
        gates[name] = gate_options
    return replace(options, gate_options=gates)


def _without_unit(options: LayerOptions, name: str) -> LayerOptions:
    """Return options without the values of a gate that are in its unit."""
    gate_options = options.gate(name)
    gate_options = replace(gate_options, unit=None, activation=None, low=None, high=None, init=None)
    return _with_gate(options, name, gate_options)


def _unit_misfits(recipe: Recipe, options: LayerOptions) -> Iterator[Misfit]:
    """Yield the gates and params with options in a unit that they do not have."""
    for name, gate_options in dict(options.gate_options).items():
        if (reason := _unit_misfit(recipe, options, name, gate_options)) is not None:
            remedy = _without_unit(options, name)
            yield Misfit(
                option=f"gates[{name!r}]", reason=f"options of {name!r}: {reason}", remedy=remedy
            )


def _unit_misfit(
    recipe: Recipe, options: LayerOptions, name: str, gate_options: GateOptions
) -> str | None:
    """Return the reason why a gate or param does not have the unit of its options."""
    if gate_options.unit in (None, "raw"):
        return None
    gates = (*recipe.gates(), *tie_gates(options))
    declared = next(x for x in (*gates, *recipe.params()) if x.name == name)
    title = recipe.algorithm.title
    if gate_options.unit == "value_rms":
        return _value_unit_misfit(recipe, name, gate_options, declared)
    if gate_options.unit == "batch_mean":
        averaged = name == "offset" and recipe.algorithm.reduction == "mean"
        if averaged and declared.axes == ("b",):
            return None
        return (
            "unit='batch_mean' is 1/position, for the correction 'offset' of averaged steps with "
            "one value per position of the inner batch (axes 'b'): leave unit out"
        )
    if name != "lr":
        return (
            "unit='stability_limit' is a multiple of the stability limit, which only 'lr' has: "
            "leave unit out"
        )
    if step_limit(recipe) is None:
        return (
            f"unit='stability_limit' needs normalised steps: set {title}(normalized_steps=True), "
            "or leave unit out"
        )
    if isinstance(declared, Param):
        return (
            "unit='stability_limit' depends on the token's momentum and window, and the rate of "
            f"{title} is constant over tokens: use lr='input' (and source='learned' for one value "
            "per head)"
        )
    return None


def _value_unit_misfit(
    recipe: Recipe, name: str, gate_options: GateOptions, declared: Gate | Param
) -> str | None:
    """Return the reason why a gate or param cannot be in units of √V."""
    range_, owner = declared.range, declared.owner
    if (
        name not in recipe.bias.quantity_axes
        or range_.low not in (None, 0.0)
        or range_.high is not None
    ):
        return (
            "unit='value_rms' is for numbers that a bias compares with values or errors, of any "
            f"length, and {owner} takes {range_}: leave unit out"
        )
    is_random = isinstance(declared, Param) and declared.draw is not None
    if gate_options.init_schedule is not None or is_random or isinstance(declared.init, tuple):
        source = "init_schedule" if gate_options.init_schedule is not None else owner
        return f"unit='value_rms' needs one initial value, and {source} has several: leave unit out"
    return None


def check_tokens(
    x: Tensor, mask: Tensor | None, cu_seqlens: Tensor | None, *, d_model: int, weight: object
) -> int:
    """Check tokens, which need the dtype and device of ``weight``, and the mask or boundaries.

    Return the number of sequences. A ``weight`` that is no tensor is the method of a quantised map,
    which checks its inputs.
    """
    if not isinstance(x, Tensor) or not x.is_floating_point():
        kind = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise ValueError(f"x must be a floating-point tensor [B, T, {d_model}], not {kind}")
    if x.layout is not torch.strided or x.is_nested:
        raise ValueError(
            f"x must be a dense tensor [B, T, {d_model}], not {layout_name(x)}: {DENSE}"
        )
    if isinstance(weight, Tensor) and (x.dtype, x.device) != (weight.dtype, weight.device):
        _check_dtype_and_device(x, weight)
    if x.dim() != 3 or x.shape[-1] != d_model:
        raise ValueError(f"x must have shape [B, T, {d_model}], not {list(x.shape)}")
    return check_rows(mask, cu_seqlens, x)


def _check_dtype_and_device(x: Tensor, weight: Tensor) -> None:
    is_mixed = x.dtype != weight.dtype and weight.dtype in FLOAT_DTYPES
    is_cast = autocast_enabled(x.device.type) and torch.float64 not in (x.dtype, weight.dtype)
    if is_mixed and not is_cast:
        raise ValueError(
            f"x is {x.dtype} and the layer {weight.dtype}: cast one of them, by "
            f"x.to({weight.dtype}) or layer.to({x.dtype}), or run float32 under torch.autocast"
        )
    if x.device != weight.device and weight.device.type != "meta":  # offloaded weights are on meta
        raise ValueError(f"x is on {x.device} and the layer on {weight.device}: move one of them")


def check_depth(depth: Any) -> tuple[int, int]:
    """Return the index of a layer and the number of layers as `int`."""
    pair = depth if isinstance(depth, tuple | list) and len(depth) == 2 else (None, None)
    index, layers = map(as_int, pair)
    if index is None or layers is None or not 0 <= index < layers:
        raise RecipeError(
            "depth must be (index of this layer, number of layers), such as (0, 12), not "
            f"{short_repr(depth)}"
        )
    return index, layers


def check_state(state: LayerState | None, *, rows: int) -> None:
    """Check the type and the batch size of a state."""
    if state is None:
        return
    if not isinstance(state, LayerState):
        raise ValueError(
            f"state must be a state that this layer returned, not {type(state).__name__}"
        )
    if state.rows != rows:
        raise ValueError(f"the state has {state.rows} rows, and this call has {rows}")


def check_state_shapes(state: LayerState, shapes: Mapping[str, tuple[int, ...] | None]) -> None:
    """Check that a state belongs to a layer.

    Args:
        state: the state.
        shapes: shapes of the tensors of a state of the layer by name, without the batch axis;
            of ``keys``, the number of recurrences. ``None`` for a tensor that such a state lacks.
    """
    for name, shape in shapes.items():
        tensor = getattr(state, name)
        stored = None if tensor is None else tuple(tensor.shape[1:])
        if name == "keys" and stored is not None:
            stored = stored[:1]
        if stored != shape:
            raise ValueError(
                f"this state belongs to another layer: its {_STATE_PARTS[name]} is {stored} and "
                f"that of this layer is {shape}"
            )
