"""Systems of the zoo that share a recipe, and the five properties of a recipe."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from recollect import zoo
from recollect.choices.member import Member
from recollect.explanation.labelled_text import SIZE
from recollect.fields import field_spec
from recollect.layer.options import GateOptions, LayerOptions
from recollect.recipe.recipe import CHOICES, Recipe

__all__ = ["PROPERTIES", "MatchingSystem", "properties", "structure_key", "systems_with_recipe"]

PROPERTIES = {
    "dynamic decay": "the decay depends on the token",
    "deep memory": "the memory is not linear in its weights",
    "nonlinear capacity": "the number of features grows faster than the key's size",
    "locally optimal": "the step uses, or approximates, second-order information",
    "flexible context": "a step sees more than the current association",
}
"""The five questions of ATLAS table 1."""


@dataclass(frozen=True, kw_only=True)
class MatchingSystem:
    """A system of the zoo with a given recipe.

    Attributes:
        name, title: name and title of the preset.
        differing_options: layer options in which the matching systems differ, without defaults.
        has_options: whether its layer has options, which the recipe does not contain.
    """

    name: str
    title: str
    differing_options: Mapping[str, Any] = field(default_factory=dict)
    has_options: bool = False

    def __str__(self) -> str:
        options = [f"{key}={_format_value(x)}" for key, x in self.differing_options.items()]
        return f"{self.name} ({', '.join(options)})" if options else self.name


def properties(recipe: Recipe) -> dict[str, bool]:
    """Return the answers to the questions in `PROPERTIES`."""
    features, nonparametric = recipe.features, recipe.nonparametric
    # Linear growth doubles with the size of the key. A polynomial grows faster.
    is_finite = features.finite and not nonparametric
    grows = not is_finite or features.dim(2 * SIZE) > 2 * features.dim(SIZE)
    return {
        "dynamic decay": any(gate.role == "decay" for gate in recipe.gates()),
        "deep memory": not recipe.memory.linear and not nonparametric,
        "nonlinear capacity": grows,
        "locally optimal": recipe.algorithm.curvature,
        "flexible context": recipe.context.horizon != 1,
    }


@functools.lru_cache(maxsize=1024)
def structure_key(recipe: Recipe) -> Any:
    """Return a key that recipes share if they differ only in sizes.

    Sizes are left out. Of other integers (steps, depth) the key has whether they exceed their
    minimum.
    """
    canonical = recipe.canonical()
    return tuple(_member_key(getattr(canonical, name)) for name in CHOICES)


def _member_key(part: Any) -> Any:
    if isinstance(part, tuple):
        return tuple(_member_key(item) for item in part)
    if not isinstance(part, Member):
        return part
    parts: list[Any] = [type(part).__name__]
    for item in part._fields():
        spec, value = field_spec(item), getattr(part, item.name)
        if spec is not None and spec.kind == "integer":
            if spec.is_size:
                continue
            value = value is not None and value > (spec.range.low or 0)
        parts.append((item.name, _member_key(value)))
    return tuple(parts)


def systems_with_recipe(
    recipe: Recipe, options: LayerOptions | None = None
) -> tuple[tuple[MatchingSystem, ...], int]:
    """Return the presets with the same recipe up to sizes, and the number of all presets.

    Args:
        recipe: the recipe.
        options: layer options; presets with equal options come first.
    """
    key = structure_key(recipe)
    presets = [zoo.get(name) for name in zoo.names()]
    matches = [preset for preset in presets if structure_key(preset.recipe) == key]
    if options is not None:
        matches.sort(key=lambda preset: preset.options != options)
    values = [dict(_flatten(preset.options.to_dict())) for preset in matches]
    names = dict.fromkeys(name for entry in values for name in entry)
    different = [
        name for name in names if len({_format_value(entry.get(name)) for entry in values}) > 1
    ]
    systems = [
        MatchingSystem(
            name=preset.name,
            title=preset.title,
            differing_options={
                name: entry[name]
                for name in different
                if name in entry and entry[name] != _default(name)
            },
            has_options=preset.options != LayerOptions(),
        )
        for preset, entry in zip(matches, values, strict=True)
    ]
    return tuple(systems), len(presets)


def _flatten(data: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Iterate over the items of nested mappings, with dotted names."""
    for key, value in data.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _default(key: str) -> Any:
    """Return the default of a layer option, or of a field of its gates."""
    options = LayerOptions() if not key.startswith("gate_options.") else GateOptions()
    return options.to_dict()[key.rpartition(".")[2]]


def _format_value(value: Any) -> str:
    """Return the text of an option; the rules of ties."""
    if isinstance(value, list):
        ties: list[Mapping[str, str]] = value
        return " and ".join(f"{tie['target']} by {tie['rule']}" for tie in ties)
    return f"{value:g}" if isinstance(value, float) else str(value)
