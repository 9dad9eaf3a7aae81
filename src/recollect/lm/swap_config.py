"""The configuration of a decoder whose layers were replaced.

In memory it stays the decoder's configuration, with the replacements beside. In its file the
decoder's part is inside, under a model type of our own, so that nobody who knows nothing of the
replacements builds the plain decoder from it and draws its missing weights at random.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping
from typing import Any, ClassVar

import transformers
from torch import nn
from transformers import PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from recollect.lm.model.checkpoint import AGAIN, CheckpointError, check_attributes
from recollect.lm.publishing.remote_code import RemoteConfig
from recollect.messages import short_repr
from recollect.recipe.recipe import Recipe

__all__ = ["SWAPPED", "decoder_config", "record", "swapped_type"]

SWAPPED = "recollect_swapped"
"""The model type in the file."""

SCHEMA = 2

# Stands where a plain decoder's configuration expects a number: its message then quotes this.
_INSTEAD = (
    "layers of this decoder were replaced by recollect's: import recollect.lm and load it with "
    "transformers.AutoModelForCausalLM"
)
_OUTSIDE = ("architectures", "auto_map", "dtype", "transformers_version")


class _Swapped(RemoteConfig):
    """What a decoder's configuration has more when layers were replaced.

    Attributes:
        swaps: what was done, in order: layers, recipe, options and engine of each.
    """

    swaps: list[dict[str, Any]]
    remote_classes: ClassVar[dict[str, str]] = {"AutoConfig": "SwappedConfig"}

    def all_recipes(self) -> dict[str, Recipe]:
        """Return the recipes that replaced layers, by the layers' numbers."""
        return {
            f"layers {', '.join(map(str, swap['layers']))}": Recipe.from_dict(swap["recipe"])
            for swap in self.swaps
        }

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, **kwargs: Any) -> Any:
        """As in transformers, of a file of our model type."""
        data, rest = PretrainedConfig.get_config_dict(pretrained_model_name_or_path, **kwargs)
        return cls.from_dict(data, **rest)

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """From what the file holds, or from the decoder's own arguments."""
        if config_dict.get("model_type") != SWAPPED:
            return super().from_dict(config_dict, **kwargs)  # type: ignore[misc]
        kind, arguments = decoder_config(config_dict)
        return kind.from_dict(arguments, **kwargs)

    def to_diff_dict(self) -> dict[str, Any]:
        """What ``config.json`` holds."""
        inside = super().to_diff_dict()  # type: ignore[misc]
        outside = {name: inside.pop(name) for name in _OUTSIDE if name in inside}
        return {
            **outside,
            "model_type": SWAPPED,
            "schema": SCHEMA,
            "swaps": inside.pop("swaps", []),
            "decoder_type": inside.pop("model_type"),
            "decoder": inside,
            "vocab_size": _INSTEAD,
        }


@functools.cache
def swapped_type(base: type[PretrainedConfig]) -> type[PretrainedConfig]:
    """The class of a decoder's configuration with replacements."""
    if issubclass(base, _Swapped):
        return base
    name = f"Swapped{base.__name__}"
    made = type(name, (_Swapped, base), {"__module__": __name__, "__doc__": _Swapped.__doc__})
    globals()[name] = made  # where pickle looks for it
    return made


def __getattr__(name: str) -> Any:
    """A class that another process made, as pickle asks for it."""
    base = getattr(transformers, name.removeprefix("Swapped"), None)
    if name.startswith("Swapped") and isinstance(base, type) and issubclass(base, PretrainedConfig):
        return swapped_type(base)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def record(model: nn.Module, *, layers: list[int], recipe: Any, options: Any, engine: str) -> None:
    """Write a replacement into a model's configuration; others that share it keep theirs."""
    old: Any = model.config
    new = copy.deepcopy(old)
    new.__class__ = swapped_type(type(old))
    swap = {"layers": layers, "recipe": recipe.to_dict(), "options": options.to_dict()}
    new.swaps = [*getattr(old, "swaps", []), {**swap, "engine": engine}]
    for module in model.modules():
        if getattr(module, "config", None) is old:
            module.config = new


def decoder_config(data: Mapping[str, Any]) -> tuple[type[PretrainedConfig], dict[str, Any]]:
    """The class of a saved configuration, and its arguments.

    Raises:
        CheckpointError: it lacks something, has another schema, or its decoder is none of
            transformers'.
    """
    where = "config.json of a decoder with replaced layers"
    if data.get("schema") != SCHEMA:
        raise CheckpointError(
            f"{where} has schema {short_repr(data.get('schema'))} and this version of recollect "
            f"reads schema {SCHEMA}: rename its fields as "
            "CHANGELOG.md lists, or install the version that wrote it"
        )
    kind, inside, swaps = data.get("decoder_type"), data.get("decoder"), data.get("swaps")
    required = {"layers", "recipe", "options", "engine"}
    if (
        not isinstance(inside, Mapping)
        or not isinstance(swaps, list)
        or not swaps
        or not all(isinstance(swap, Mapping) and set(swap) == required for swap in swaps)
    ):
        raise CheckpointError(f"{where} lacks its decoder or what replaced its layers: {AGAIN}")
    check_attributes(where, inside)
    base = CONFIG_MAPPING[kind] if isinstance(kind, str) and kind in CONFIG_MAPPING else None
    if base is None or not base.__module__.startswith("transformers."):
        raise CheckpointError(
            f"{where} names the decoder {kind!r}, which this version of transformers has not: "
            "install the one that it was saved with"
        )
    outside = {name: data[name] for name in _OUTSIDE if name in data}
    return swapped_type(base), {**inside, **outside, "swaps": copy.deepcopy(swaps)}
