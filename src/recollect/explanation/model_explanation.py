"""Explanations of the layers of a model, one for all equal layers."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

from recollect.blocks.layers import MixerLayer, layer_spec
from recollect.explanation.labelled_text import fields_to_json

if TYPE_CHECKING:
    from recollect.explanation.composition import Composition
    from recollect.explanation.explain import Explanation

__all__ = ["LayerGroup", "ModelExplanation", "layer_title", "layers_in_groups"]


@dataclass(frozen=True, kw_only=True)
class LayerGroup:
    """Equal layers of a model.

    Attributes:
        title: name of their class, with the family of adopted layers.
        names: their names in the model.
        sizes: number of memories H, size of keys K, and size of values V.
        explanation: the explanation of their recipe or composition.
    """

    title: str
    names: tuple[str, ...]
    sizes: Mapping[str, int]
    explanation: Explanation | Composition

    def __str__(self) -> str:
        sizes = ", ".join(f"{name} = {size}" for name, size in self.sizes.items())
        lines = [
            f"{len(self.names)} × {self.title}",
            f"layers   {_join_names(self.names)}",
            f"sizes    {sizes}",
        ]
        return "\n".join([*lines, f"recipe   {self.explanation}"])


@dataclass(frozen=True, kw_only=True)
class ModelExplanation:
    """Explanations of the memory layers of a model.

    Attributes:
        model: name of the model's class.
        groups: groups of equal layers, in the order of their first layers.

    Examples:
        >>> config = rc.lm.RecollectConfig.from_recipes(
        ...     "gated_delta_net", vocab_size=32, hidden_size=16, num_hidden_layers=2,
        ...     num_attention_heads=2,
        ... )
        >>> (group,) = rc.explain(rc.lm.RecollectForCausalLM(config)).groups
        >>> group.names, group.sizes
        (('model.blocks.0.layer', 'model.blocks.1.layer'), {'H': 2, 'K': 8, 'V': 8})
    """

    model: str
    groups: tuple[LayerGroup, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return all fields as data for JSON."""
        return fields_to_json(self)

    def __str__(self) -> str:
        count = sum(len(group.names) for group in self.groups)
        return "\n\n".join([f"{self.model}: {count} memory layers", *map(str, self.groups)])


def layer_title(layer: nn.Module) -> str:
    """Return the title of a layer, which is the name of its class by default."""
    title = "" if isinstance(layer, MixerLayer) else layer_spec(layer).title
    return title or type(layer).__name__


def layers_in_groups(
    layers: Mapping[str, nn.Module],
) -> Iterator[tuple[nn.Module, tuple[str, ...]]]:
    """Iterate over groups of equal layers: the first layer, and the names of all."""
    groups: list[tuple[Any, nn.Module, list[str]]] = []
    for name, layer in layers.items():
        spec = layer_spec(layer)
        composition = layer.mixer if isinstance(layer, MixerLayer) else None
        sizes = (spec.num_kv_heads, spec.num_heads, spec.head_dim, spec.value_dim)
        key = (layer_title(layer), composition, spec.recipe, spec.options, sizes)
        key = (*key, spec.engine, spec.precision)
        # Recipes with a member of the user may be unhashable.
        names = next((names for other, _, names in groups if other == key), None)
        if names is None:
            groups.append((key, layer, [name]))
        else:
            names.append(name)
    for _, layer, names in groups:
        yield layer, tuple(names)


def _join_names(names: Sequence[str]) -> str:
    """Return names in one text; names that differ in one number, with the numbers in braces."""
    parts = [re.split(r"(?<=\.)(\d+)(?=\.|$)", name) for name in names]
    if len(names) > 1 and len({len(part) for part in parts}) == 1:
        columns = [*zip(*parts, strict=True)]
        different = [index for index, column in enumerate(columns) if len(set(column)) > 1]
        if len(different) == 1 and different[0] % 2:
            (index,) = different
            first = [*parts[0]]
            first[index] = "{" + ", ".join(columns[index]) + "}"
            return "".join(first)
    return ", ".join(names)
