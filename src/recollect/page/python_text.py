"""Recipes, layer options and compositions as Python code, without defaults."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import recollect
from recollect import zoo
from recollect.blocks.mixers import Mixer, RecipeMixer
from recollect.choices.member import Member
from recollect.layer.options import GateOptions, LayerOptions, Tie
from recollect.recipe.recipe import CHOICES, Recipe

__all__ = ["as_python"]

_INDENT = "    "


def as_python(item: Recipe | LayerOptions | Mixer) -> str:
    """Return an expression over ``rc`` (``import recollect as rc``) that evaluates to the item.

    Recipes have a choice per line. A part of a composition that is a preset of the zoo is written
    as its name.

    Args:
        item: A recipe, the options of a layer, or a mixer of `recollect.blocks`.

    Raises:
        ValueError: A member that is not available under ``rc``.

    Examples:
        >>> from recollect.page.python_text import as_python
        >>> print(as_python(rc.zoo.get("gated_delta_net").recipe))
        rc.Recipe(
            retention=rc.retention.Decay(when="before"),
        )
        >>> as_python(rc.Recipe())
        'rc.Recipe()'
    """
    if isinstance(item, Recipe):
        return _call("rc.Recipe", _non_default_fields(item))
    if isinstance(item, LayerOptions):
        return _call("rc.LayerOptions", _non_default_fields(item))
    return _mixer(item)


def _call(name: str, arguments: dict[str, str], positional: str = "") -> str:
    """Return a call with an argument per line; positional arguments are lines already."""
    inside = positional + "".join(f"{key}={value},\n" for key, value in arguments.items())
    indented = "".join(f"{_INDENT}{line}\n" for line in inside.splitlines())
    return f"{name}(\n{indented})" if inside else f"{name}()"


def _non_default_fields(item: Any) -> dict[str, str]:
    """Return the fields of a dataclass that differ from their defaults, as code."""
    fields: dict[str, str] = {}
    for field in dataclasses.fields(item):
        value, default = getattr(item, field.name), field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        if default is dataclasses.MISSING or value != default:
            fields[field.name] = _value(value)
    return fields


def _value(value: Any) -> str:
    if isinstance(value, Member):
        return _inline(_import_path(value), value)
    if isinstance(value, GateOptions | Tie):
        return _inline(f"rc.{type(value).__name__}", value)
    if isinstance(value, tuple):
        if value and all(isinstance(x, tuple) and len(x) == 2 for x in value):  # gates by name
            inside = "".join(f"{_INDENT}{_value(k)}: {_value(v)},\n" for k, v in value)
            return f"{{\n{inside}}}"
        items = ", ".join(map(_value, value))
        return f"({items},)" if len(value) == 1 else f"({items})"
    if isinstance(value, str):
        return '"' + repr(value)[1:-1].replace('"', '\\"') + '"'
    return repr(value)


def _inline(name: str, item: Any) -> str:
    arguments = (f"{key}={value}" for key, value in _non_default_fields(item).items())
    return f"{name}({', '.join(arguments)})"


def _import_path(member: Member) -> str:
    name = type(member).__name__
    for choice in CHOICES:
        if getattr(getattr(recollect, choice), name, None) is type(member):
            return f"rc.{choice}.{name}"
    raise ValueError(f"{name} is not under rc: it cannot be written as code")


def _mixer(mixer: Mixer) -> str:
    if isinstance(mixer, RecipeMixer):
        for name in zoo.names():
            preset = zoo.get(name)
            if (preset.recipe, preset.options) == (mixer.recipe, mixer.options):
                return f'"{name}"'
        parts = {"recipe": as_python(mixer.recipe), "options": as_python(mixer.options)}
        return _call("rc.blocks.RecipeMixer", parts)
    arguments, positional = _non_default_fields(mixer), ""
    parameters = inspect.signature(type(mixer)).parameters
    for field in dataclasses.fields(mixer):  # pyright: ignore[reportArgumentType]
        value = getattr(mixer, field.name)
        if isinstance(value, Mixer):
            arguments[field.name] = _mixer(value)
        elif parameters[field.name].kind is inspect.Parameter.VAR_POSITIONAL:
            del arguments[field.name]
            positional = "".join(f"{_mixer(part)},\n" for part in value)
        elif isinstance(value, tuple) and value and isinstance(value[0], Mixer):
            arguments[field.name] = f"[{', '.join(map(_mixer, value))}]"
    return _call(f"rc.blocks.{type(mixer).__name__}", arguments, positional)
