"""Names of a recipe: the architectures that share it, and which of five properties it has."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from recollect.choices.member import Member
from recollect.fields import field_spec
from recollect.layer.options import GateOptions, LayerOptions
from recollect.recipe.recipe import CHOICES, Recipe

__all__ = ["PROPERTIES", "Named", "fingerprint", "named", "properties"]

PROPERTIES = {
    "dynamic decay": "what is forgotten depends on the token",
    "deep memory": "the memory is not linear in its weights",
    "nonlinear capacity": "the number of features grows faster than the key's size",
    "locally optimal": "the step uses, or approximates, second-order information",
    "flexible context": "a step sees more than the current association",
}
"""The five questions of ATLAS table 1, as they are asked of a recipe."""

_SIZE = 64  # of the key whose features are counted


@dataclass(frozen=True, kw_only=True)
class Named:
    """A system of the literature with the same recipe.

    Attributes:
        apart: the layer options in which the systems named together differ, without defaults.
        options: whether its layer has options of its own, which the recipe does not carry.
    """

    name: str
    title: str
    apart: Mapping[str, Any] = field(default_factory=dict)
    options: bool = False

    def __str__(self) -> str:
        if not self.apart:
            return self.name
        return f"{self.name} ({', '.join(f'{key}={_plain(x)}' for key, x in self.apart.items())})"


# -- the five properties -------------------------------------------------------------------------


def properties(recipe: Recipe) -> dict[str, bool]:
    """The five properties of ATLAS table 1, by the questions of `PROPERTIES`."""
    features, nonparametric = recipe.features, recipe.nonparametric
    if features.finite and not nonparametric:
        # Linear growth doubles with the key's size; a polynomial does more.
        grows = features.dim(2 * _SIZE) > 2 * features.dim(_SIZE)
    else:
        grows = True
    return {
        "dynamic decay": any(gate.role == "decay" for gate in recipe.gates()),
        "deep memory": not recipe.memory.linear and not nonparametric,
        "nonlinear capacity": grows,
        "locally optimal": recipe.algorithm.curvature,
        "flexible context": recipe.context.horizon != 1,
    }


# -- names ---------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=1024)
def fingerprint(recipe: Recipe) -> Any:
    """What two recipes of one name share: everything but sizes.

    Integers that only make the same thing larger are left out; of others (steps, depth) it counts
    whether they are at their least.
    """
    canonical = recipe.canonical()
    return tuple(_print(getattr(canonical, name)) for name in CHOICES)


def _print(part: Any) -> Any:
    if isinstance(part, tuple):
        return tuple(_print(item) for item in part)
    if not isinstance(part, Member):
        return part
    parts: list[Any] = [type(part).__name__]
    for item in part._fields():
        rule, value = field_spec(item), getattr(part, item.name)
        if rule is not None and rule.kind == "integer":
            if rule.is_size:
                continue
            value = value is not None and value > (rule.range.low or 0)
        parts.append((item.name, _print(value)))
    return tuple(parts)


def named(recipe: Recipe, options: LayerOptions | None = None) -> tuple[tuple[Named, ...], int]:
    """Architectures of the zoo with the same recipe, and how many there are.

    Args:
        recipe: to look for in the zoo.
        options: of the layer, to name first the systems that share them.
    """
    from recollect import zoo

    wanted = fingerprint(recipe)
    presets = [zoo.get(name) for name in zoo.names()]
    same = [preset for preset in presets if fingerprint(preset.recipe) == wanted]
    if options is not None:
        same.sort(key=lambda preset: preset.options != options)
    flat = [dict(_leaves(preset.options.to_dict())) for preset in same]
    keys = dict.fromkeys(key for f in flat for key in f)
    differ = [key for key in keys if len({_plain(f.get(key)) for f in flat}) > 1]
    same_named = [
        Named(
            name=preset.name,
            title=preset.title,
            apart={key: f[key] for key in differ if key in f and f[key] != _default(key)},
            options=preset.options != LayerOptions(),
        )
        for preset, f in zip(same, flat, strict=True)
    ]
    return tuple(same_named), len(presets)


def _leaves(data: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Nested mappings as dotted names."""
    for key, value in data.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _default(key: str) -> Any:
    """The default of a layer option, or of a field of its gates."""
    options = LayerOptions() if not key.startswith("gate_options.") else GateOptions()
    return options.to_dict()[key.rpartition(".")[2]]


def _plain(value: Any) -> str:
    """The text of an option; of ties, their rules."""
    if isinstance(value, list):
        ties: list[Mapping[str, str]] = value
        return " and ".join(f"{tie['target']} by {tie['rule']}" for tie in ties)
    return f"{value:g}" if isinstance(value, float) else str(value)
