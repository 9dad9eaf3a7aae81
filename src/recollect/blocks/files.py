"""Rebuild mixers from the plain data of `Mixer.to_dict`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from recollect.blocks.compositions import (
    LIST_FIELDS,
    MemoryAsContext,
    MemoryAsGate,
    MixtureOfMemories,
    ResidualMemory,
    Sequential,
)
from recollect.blocks.mixers import Mixer, RecipeMixer
from recollect.choices.member import RecipeError, recursion_error_as
from recollect.layer.options import LayerOptions
from recollect.messages import short_repr
from recollect.recipe.recipe import Recipe

__all__ = ["KINDS", "read_mixer"]

KINDS: Mapping[str, type[Mixer]] = {
    cls.kind: cls
    for cls in (
        Sequential,
        MemoryAsGate,
        MemoryAsContext,
        ResidualMemory,
        MixtureOfMemories,
    )
}
"""Compositions by their names in JSON."""


def read_mixer(data: Any) -> Mixer:
    """Rebuild a mixer from the result of `Mixer.to_dict`, without running code in it.

    Args:
        data: ``{"recipe": ..., "options": ...}``, or ``{"mixer": kind, ...}`` with the fields of a
            composition.

    Raises:
        RecipeError: an unknown kind or field, a missing field, an invalid value, or mixers nested
            deeper than Python's recursion limit.

    Examples:
        >>> gated = rc.blocks.MemoryAsGate("gated_delta_net", "sliding_window_attention")
        >>> rc.blocks.read_mixer(gated.to_dict()) == gated
        True
    """
    with recursion_error_as("mixers"):
        return _read(data)


def _read(data: Any) -> Mixer:
    if not isinstance(data, Mapping):
        raise RecipeError(f"a mixer is a mapping of fields, not {short_repr(data)}")
    if "mixer" not in data:
        unknown = sorted(set(data) - {"recipe", "options"}, key=str)
        if unknown or "recipe" not in data:
            fault = f"has the field {unknown[0]!r}" if unknown else "has no recipe"
            raise RecipeError(
                "a mixer is {'recipe': ..., 'options': ...} or {'mixer': kind, ...}, and this one "
                f"{fault}"
            )
        return RecipeMixer(
            recipe=Recipe.from_dict(data["recipe"]),
            options=LayerOptions.from_dict(data.get("options", {})),
        )
    kind, fields = data["mixer"], {name: value for name, value in data.items() if name != "mixer"}
    cls = KINDS.get(kind) if isinstance(kind, str) else None
    if cls is None:
        raise RecipeError(f"there is no mixer {short_repr(kind)}; there are {', '.join(KINDS)}")
    names = [field.name for field in dataclasses.fields(cls)]  # type: ignore[arg-type]
    for name in fields:
        if name not in names:
            raise RecipeError(f"{cls.__name__} has no field {name!r}; it has {', '.join(names)}")
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]
        if field.default is dataclasses.MISSING and field.name not in fields:
            raise RecipeError(f"{cls.__name__} needs {field.name}, which is missing")
    for name in cls.mixer_fields:
        value = fields.get(name)
        if isinstance(value, list | tuple):
            fields[name] = [_read(item) for item in value]  # pyright: ignore[reportUnknownVariableType]
        elif name in LIST_FIELDS:
            raise RecipeError(
                f"{cls.__name__}: {name} must be a list of mixers, not {short_repr(value)}"
            )
        elif value is not None:
            fields[name] = _read(value)
    return cls.from_fields(fields)
