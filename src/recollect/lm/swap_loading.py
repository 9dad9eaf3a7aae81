"""Loading a decoder whose layers were replaced: built anew from its configuration, then filled.

`transformers.AutoModelForCausalLM.from_pretrained` does it once `recollect.lm` is imported. No code
comes with the weights, and a checkpoint is loaded whole or not at all.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PretrainedConfig,
    PreTrainedModel,
)

from recollect.layer.options import LayerOptions
from recollect.lm.model.checkpoint import CheckpointError
from recollect.lm.model.pretrained import StrictLoading
from recollect.lm.publishing.remote_code import RemoteConfig
from recollect.lm.swap import SwappedAttention, place_layers
from recollect.lm.swap_config import SWAPPED, decoder_config
from recollect.recipe.recipe import Recipe

__all__ = ["SwappedConfig", "register"]

_HEADS: dict[Any, tuple[str, ...]] = {
    AutoModel: (),
    AutoModelForCausalLM: ("lm_head.",),
    AutoModelForSequenceClassification: ("score.", "classifier."),
    AutoModelForTokenClassification: ("score.", "classifier."),
}
"""What begins the names of a head's weights, by transformers' class that finds the model."""


class SwappedConfig(RemoteConfig, PretrainedConfig):
    """What transformers finds under our model type; it reads as the decoder's own configuration."""

    model_type = SWAPPED

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:  # type: ignore[override]
        """The decoder's configuration, with what replaced its layers.

        Raises:
            CheckpointError: as `decoder_config`.
        """
        kind, _ = decoder_config(config_dict)
        _register_models(kind)
        return kind.from_dict(config_dict, **kwargs)


@functools.cache
def _register_models(kind: type[PretrainedConfig]) -> None:
    """Have transformers' automatic classes build decoders of this configuration."""
    _, base = kind.__bases__
    every = {name for own in _HEADS.values() for name in own}
    for auto, own in _HEADS.items():
        if base in auto._model_mapping:
            model_class = _swapped_model(auto, auto._model_mapping[base], kind)
            model_class._unread = tuple(sorted(every - {*own})) if "lm_head." not in own else ()
            model_class._optional_weights = own if "lm_head." not in own else ()
            auto.register(kind, model_class, exist_ok=True)


def _swapped_model(
    auto: Any, base: type[PreTrainedModel], kind: type[PretrainedConfig]
) -> type[Any]:
    """A decoder's class, whose instances have the layers that their configuration names."""

    def __init__(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        base.__init__(self, config, *args, **kwargs)
        if any(isinstance(module, SwappedAttention) for module in self.modules()):
            return  # a head over a decoder that transformers found by this configuration
        for swap in config.swaps:
            recipe, options = Recipe.from_dict(swap["recipe"]), swap["options"]
            named = recipe, LayerOptions.from_dict(options)
            place_layers(self, named, swap["layers"], engine=swap["engine"])

    def _configured(folder: Path, written: dict[str, Any]) -> Any:
        if written.get("model_type") != SWAPPED:
            raise CheckpointError(
                f"{folder} holds a model of type {written.get('model_type')!r}, and none of its "
                "layers were replaced: load it with AutoModelForCausalLM"
            )
        found = SwappedConfig.from_dict(written)
        if type(found) is not kind:
            raise CheckpointError(
                f"{folder} holds another decoder than {base.__name__}: load it with "
                "AutoModelForCausalLM"
            )
        return found

    def _loads(cls: Any) -> tuple[str, str]:
        load = f'model = transformers.{auto.__name__}.from_pretrained(".")'
        return "import recollect.lm, transformers", load

    body = {
        "__init__": __init__,
        "__module__": __name__,
        "__doc__": f"{base.__name__} with replaced layers.",
        "config_class": kind,
        "_configured": staticmethod(_configured),
        "_loads": classmethod(_loads),
    }
    return type(f"Swapped{base.__name__}", (StrictLoading, base), body)


def register() -> None:
    """Have transformers know our model type."""
    AutoConfig.register(SWAPPED, SwappedConfig, exist_ok=True)
