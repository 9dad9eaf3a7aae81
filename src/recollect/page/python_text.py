"""Recipes, options of layers and compositions as Python that one can paste, defaults left out."""

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


def as_python(thing: Recipe | LayerOptions | Mixer) -> str:
    """An expression over ``rc`` (``import recollect as rc``) that makes it again.

    Recipes are written a choice per line. A part of a composition that is a system of the zoo is
    written as its name.

    Args:
        thing: a recipe, the options of a layer, or a mixer of `recollect.blocks`.

    Raises:
        ValueError: a member that does not stand under ``rc``, as one of somebody's own.

    Examples:
        >>> from recollect.page.python_text import as_python
        >>> print(as_python(rc.zoo.get("gated_delta_net").recipe))
        rc.Recipe(
            retention=rc.retention.Decay(when="before"),
        )
        >>> as_python(rc.Recipe())
        'rc.Recipe()'
    """
    if isinstance(thing, Recipe):
        plain = Recipe()
        said = {
            name: _value(getattr(thing, name))
            for name in CHOICES
            if getattr(thing, name) != getattr(plain, name)
        }
        return _call("rc.Recipe", said)
    if isinstance(thing, LayerOptions):
        return _call("rc.LayerOptions", _said(thing))
    return _mixer(thing)


def _call(name: str, said: dict[str, str], first: str = "") -> str:
    """A call with an argument per line; ``first`` are lines of those without a name."""
    inside = first + "".join(f"{key}={value},\n" for key, value in said.items())
    indented = "".join(f"{_INDENT}{line}\n" for line in inside.splitlines())
    return f"{name}(\n{indented})" if inside else f"{name}()"


def _said(thing: Any) -> dict[str, str]:
    """The fields of a dataclass that are not at their defaults, written out."""
    found: dict[str, str] = {}
    for field in dataclasses.fields(thing):
        value, default = getattr(thing, field.name), field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        if default is dataclasses.MISSING or value != default:
            found[field.name] = _value(value)
    return found


def _value(value: Any) -> str:
    if isinstance(value, Member):
        return _inline(f"{_place(value)}", _said(value))
    if isinstance(value, GateOptions | Tie):
        return _inline(f"rc.{type(value).__name__}", _said(value))
    if isinstance(value, tuple):
        if value and all(isinstance(x, tuple) and len(x) == 2 for x in value):  # gates, by name
            inside = "".join(f"{_INDENT}{_value(k)}: {_value(v)},\n" for k, v in value)
            return f"{{\n{inside}}}"
        items = ", ".join(map(_value, value))
        return f"({items},)" if len(value) == 1 else f"({items})"
    if isinstance(value, str):
        return '"' + repr(value)[1:-1].replace('"', '\\"') + '"'
    return repr(value)


def _inline(name: str, said: dict[str, str]) -> str:
    return f"{name}({', '.join(f'{key}={value}' for key, value in said.items())})"


def _place(member: Member) -> str:
    """Where a member's class is found."""
    name = type(member).__name__
    for choice in CHOICES:
        if getattr(getattr(recollect, choice), name, None) is type(member):
            return f"rc.{choice}.{name}"
    raise ValueError(f"{name} does not stand under rc: it has no place to be written as")


def _mixer(mixer: Mixer) -> str:
    if isinstance(mixer, RecipeMixer):
        for name in zoo.names():
            preset = zoo.get(name)
            if (preset.recipe, preset.options) == (mixer.recipe, mixer.options):
                return f'"{name}"'
        parts = {"recipe": as_python(mixer.recipe), "options": as_python(mixer.options)}
        return _call("rc.blocks.RecipeMixer", parts)
    said, several = _said(mixer), ""
    parameters = inspect.signature(type(mixer)).parameters
    for field in dataclasses.fields(mixer):  # pyright: ignore[reportArgumentType]
        value = getattr(mixer, field.name)
        if isinstance(value, Mixer):
            said[field.name] = _mixer(value)
        elif parameters[field.name].kind is inspect.Parameter.VAR_POSITIONAL:
            del said[field.name]
            several = "".join(f"{_mixer(one)},\n" for one in value)
    return _call(f"rc.blocks.{type(mixer).__name__}", said, several)
