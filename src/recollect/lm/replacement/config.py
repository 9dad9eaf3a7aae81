"""The configuration of a decoder whose layers were replaced.

In memory it is the decoder's configuration with a list of replacements. ``config.json`` nests it
under a model type of recollect: without recollect, transformers refuses the file, instead of
initializing the missing weights of the original decoder at random.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, ClassVar

from torch import nn
from transformers import AutoConfig, PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from recollect.layer.options import LayerOptions
from recollect.lm.adoption.subclass import specialize
from recollect.lm.model.checkpoint import RECOPY_HINT, CheckpointError, check_attributes
from recollect.lm.publishing.remote_code import RemoteConfig
from recollect.messages import short_repr
from recollect.recipe.recipe import Recipe

__all__ = ["MODEL_TYPE", "Swapped", "parse_decoder_config", "record_replacement"]

MODEL_TYPE = "recollect_swapped"
"""Value of ``model_type`` in ``config.json``."""

SCHEMA = 2

# A text where a plain decoder's configuration expects a number: its error quotes the text.
_VOCAB_SIZE_PLACEHOLDER = (
    "layers of this decoder were replaced by recollect's: import recollect.lm and load it with "
    "transformers.AutoModelForCausalLM"
)
_TOP_LEVEL_KEYS = ("architectures", "auto_map", "dtype", "transformers_version")


class Swapped(RemoteConfig):
    """A mixin for the configuration of a decoder, in which layers were replaced."""

    # layers, recipe, options and engine of each replacement, in order; and the part "mlp" if it
    # replaces MLPs
    swaps: list[dict[str, Any]]
    remote_classes: ClassVar[dict[str, str]] = {"AutoConfig": "SwappedConfig"}

    def all_recipes(self) -> dict[str, Recipe]:
        """Return the recipes that replaced layers, by the layers' indices."""
        recipes: dict[str, Recipe] = {}
        for swap in self.swaps:
            name = f"layers {', '.join(map(str, swap['layers']))}"
            recipes[f"MLPs of {name}" if "part" in swap else name] = Recipe.from_dict(
                swap["recipe"]
            )
        return recipes

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, **kwargs: Any) -> Any:
        """Return the configuration in a folder, whose file has `MODEL_TYPE`."""
        return AutoConfig.from_pretrained(pretrained_model_name_or_path, **kwargs)

    def to_diff_dict(self) -> dict[str, Any]:
        """Return the content of ``config.json``."""
        decoder = super().to_diff_dict()  # type: ignore[misc]
        return {
            **{name: decoder.pop(name) for name in _TOP_LEVEL_KEYS if name in decoder},
            "model_type": MODEL_TYPE,
            "schema": SCHEMA,
            "swaps": decoder.pop("swaps", []),
            "decoder_type": decoder.pop("model_type"),
            "decoder": decoder,
            "vocab_size": _VOCAB_SIZE_PLACEHOLDER,
        }


def record_replacement(
    model: nn.Module,
    *,
    layers: list[int],
    recipe: Recipe,
    options: LayerOptions,
    engine: str,
    part: str = "attention",
) -> None:
    """Add a replacement to a copy of a model's configuration, which other models may share."""
    old: Any = model.config
    new = copy.deepcopy(old)
    specialize(new, Swapped)
    swap = {"layers": layers, "recipe": recipe.to_dict(), "options": options.to_dict()}
    swap |= {"engine": engine} | ({} if part == "attention" else {"part": part})
    new.swaps = [*getattr(old, "swaps", []), swap]
    for module in model.modules():
        if getattr(module, "config", None) is old:
            module.config = new


def parse_decoder_config(data: Mapping[str, Any]) -> tuple[type[PretrainedConfig], dict[str, Any]]:
    """Return the class of the decoder's configuration in ``config.json``, and its arguments."""
    path = "config.json of a decoder with replaced layers"
    if data.get("schema") != SCHEMA:
        raise CheckpointError(
            f"{path} has schema {short_repr(data.get('schema'))} and this version of recollect "
            f"reads schema {SCHEMA}: rename its fields as "
            "CHANGELOG.md lists, or install the version that wrote it"
        )
    decoder_type, decoder, swaps = (data.get(n) for n in ("decoder_type", "decoder", "swaps"))
    required = {"layers", "recipe", "options", "engine"}
    has_swaps = isinstance(swaps, list) and all(
        isinstance(swap, Mapping)
        and set(swap) - {"part"} == required
        and swap.get("part", "mlp") == "mlp"
        for swap in swaps
    )
    if not isinstance(decoder, Mapping) or not swaps or not has_swaps:
        raise CheckpointError(
            f"{path} lacks its decoder or what replaced its layers: {RECOPY_HINT}"
        )
    check_attributes(path, decoder)
    is_known = isinstance(decoder_type, str) and decoder_type in CONFIG_MAPPING
    base = CONFIG_MAPPING[str(decoder_type)] if is_known else None
    if base is None or not base.__module__.startswith("transformers."):
        raise CheckpointError(
            f"{path} names the decoder {decoder_type!r}, which this version of transformers lacks: "
            "install the version that it was saved with"
        )
    top_level = {name: data[name] for name in _TOP_LEVEL_KEYS if name in data}
    return base, {**decoder, **top_level, "swaps": copy.deepcopy(swaps)}
