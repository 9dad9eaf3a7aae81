"""Classes that load a decoder whose layers were replaced.

`transformers.AutoModelForCausalLM.from_pretrained` finds them after an import of `recollect.lm`.
The model is built from its configuration, its layers are replaced, and its weights are loaded.
"""

from __future__ import annotations

import functools
from typing import Any, ClassVar

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PretrainedConfig,
)

from recollect.layer.options import LayerOptions
from recollect.lm.adoption.subclass import original_class, specialize
from recollect.lm.model.pretrained import StrictLoadingMixin
from recollect.lm.publishing.remote_code import RemoteConfig
from recollect.lm.replacement.config import MODEL_TYPE, Swapped, parse_decoder_config
from recollect.lm.replacement.mlp import InPlaceMLP, replace_mlp_layers
from recollect.lm.replacement.swap import SwappedAttention, replace_layers
from recollect.recipe.recipe import Recipe

__all__ = ["SwappedConfig", "register"]

_LM_HEAD, _CLASSIFIER = ("lm_head.",), ("score.", "classifier.")
_HEAD_WEIGHTS: dict[Any, tuple[tuple[str, ...], tuple[str, ...]]] = {
    AutoModel: ((), (*_LM_HEAD, *_CLASSIFIER)),
    AutoModelForCausalLM: ((), ()),
    AutoModelForSequenceClassification: (_CLASSIFIER, _LM_HEAD),
    AutoModelForTokenClassification: (_CLASSIFIER, _LM_HEAD),
}
"""Prefixes of weights that may be missing, and that may be unexpected, by automatic class."""


class SwappedConfig(RemoteConfig, PretrainedConfig):
    """The class of our model type, which loads a configuration of the decoder's own class."""

    model_type = MODEL_TYPE

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:  # type: ignore[override]
        """Return the decoder's configuration with its replacements."""
        base, arguments = parse_decoder_config(config_dict)
        result: Any = base.from_dict(arguments, **kwargs)
        config = result[0] if isinstance(result, tuple) else result  # with unused arguments
        specialize(config, Swapped)
        _register_models(type(config), original_class(config))
        return result


class SwappedModel(StrictLoadingMixin):
    """A mixin before a decoder's class, which replaces the layers that its configuration lists."""

    _auto_class_name: ClassVar[str]

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)  # type: ignore[call-arg]
        model: Any = self
        if any(isinstance(m, SwappedAttention | InPlaceMLP) for m in model.modules()):
            return  # AutoModel built the decoder below the head from this configuration
        for swap in config.swaps:
            recipe, options = Recipe.from_dict(swap["recipe"]), swap["options"]
            options = LayerOptions.from_dict(options)
            replace = replace_mlp_layers if "part" in swap else replace_layers
            replace(model, recipe, options, swap["layers"], engine=swap["engine"])

    @classmethod
    def _load_lines(cls) -> tuple[str, str]:
        load = f'model = transformers.{cls._auto_class_name}.from_pretrained(".")'
        return "import recollect.lm, transformers", load


@functools.cache
def _register_models(config_class: type[Any], base_config: type[PretrainedConfig]) -> None:
    """Register classes of decoders with this configuration at the automatic classes."""
    for auto, (ignore_missing, ignore_unexpected) in _HEAD_WEIGHTS.items():
        if base_config not in auto._model_mapping:
            continue
        base = auto._model_mapping[base_config]
        namespace = {
            "__module__": __name__,
            "__doc__": f"{base.__name__} with replaced layers.",
            "config_class": config_class,
            "_auto_class_name": auto.__name__,
            "_saved_type": (MODEL_TYPE, base_config.model_type),
            "_ignore_missing": ignore_missing,
            "_ignore_unexpected": ignore_unexpected,
        }
        model_class = type(f"Swapped{base.__name__}", (SwappedModel, base), namespace)
        auto.register(config_class, model_class, exist_ok=True)


def register() -> None:
    """Register our model type at `transformers.AutoConfig`."""
    AutoConfig.register(MODEL_TYPE, SwappedConfig, exist_ok=True)
