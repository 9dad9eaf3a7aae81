"""Mixers from plain data, as `Mixer.to_dict` writes it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from recollect.blocks.compositions import (
    SEVERAL,
    AsContext,
    Boosted,
    Chain,
    Gated,
    Routed,
    Together,
)
from recollect.blocks.mixers import Leaf, Mixer
from recollect.choices.member import RecipeError, not_too_deep
from recollect.layer.options import LayerOptions
from recollect.recipe.recipe import Recipe
from recollect.wording import shown

__all__ = ["KINDS", "read_mixer"]

KINDS: Mapping[str, type[Mixer]] = {
    cls.kind: cls for cls in (Chain, Gated, AsContext, Together, Boosted, Routed)
}
"""Compositions by their names in JSON."""


def read_mixer(data: Any) -> Mixer:
    """Rebuild what `Mixer.to_dict` wrote; nothing in it is run.

    Args:
        data: ``{"recipe": ..., "options": ...}``, or ``{"mixer": kind, ...}`` with the fields of a
            composition.

    Raises:
        RecipeError: an unknown kind or field, one that is missing, a value that it refuses, or
            mixers nested deeper than Python can follow.

    Examples:
        >>> gated = rc.blocks.Gated("gated_delta_net", "sliding_window_attention")
        >>> rc.blocks.read_mixer(gated.to_dict()) == gated
        True
    """
    with not_too_deep("mixers"):
        return _read(data)


def _read(data: Any) -> Mixer:
    if not isinstance(data, Mapping):
        raise RecipeError(f"a mixer is a mapping of fields, not {shown(data)}")
    if "mixer" not in data:
        unknown = sorted(set(data) - {"recipe", "options"}, key=str)
        if unknown or "recipe" not in data:
            said = f"has the field {unknown[0]!r}" if unknown else "has no recipe"
            raise RecipeError(
                "a mixer is {'recipe': ..., 'options': ...} or {'mixer': kind, ...}, and this one "
                f"{said}"
            )
        return Leaf(
            recipe=Recipe.from_dict(data["recipe"]),
            options=LayerOptions.from_dict(data.get("options", {})),
        )
    kind, fields = data["mixer"], {name: value for name, value in data.items() if name != "mixer"}
    cls = KINDS.get(kind) if isinstance(kind, str) else None
    if cls is None:
        raise RecipeError(f"there is no mixer {shown(kind)}; there are {', '.join(KINDS)}")
    known = [field.name for field in dataclasses.fields(cls)]  # type: ignore[arg-type]
    for name in fields:
        if name not in known:
            raise RecipeError(f"{cls.__name__} has no field {name!r}; it has {', '.join(known)}")
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]
        if field.default is dataclasses.MISSING and field.name not in fields:
            raise RecipeError(f"{cls.__name__} needs {field.name}, which is missing")
    for name in cls.holds:
        value = fields.get(name)
        if isinstance(value, list | tuple):
            fields[name] = [_read(one) for one in value]  # pyright: ignore[reportUnknownVariableType]
        elif name in SEVERAL:
            raise RecipeError(
                f"{cls.__name__}: {name} must be a list of mixers, not {shown(value)}"
            )
        elif value is not None:
            fields[name] = _read(value)
    return cls.rebuilt(fields)
