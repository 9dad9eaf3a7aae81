"""Base classes of models: strict loading, model cards, and initialization."""

from __future__ import annotations

from abc import abstractmethod
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GenericForSequenceClassification

from recollect.blocks.layers import PersistentTokens
from recollect.layer.block import ZeroCenteredRMSNorm
from recollect.layer.depth_floors import DepthFloors
from recollect.layer.gates import GateProjection
from recollect.layer.recipe_module import InitialMemory
from recollect.layer.short_conv import ShortConvolution
from recollect.lm.hub import offline_kwargs
from recollect.lm.model.checkpoint import (
    FLOAT_DTYPES,
    INDEX_FILE,
    RECOPY_HINT,
    WEIGHTS_FILE,
    CheckpointError,
    check_config,
    check_finite,
    check_model_folder,
    check_names,
    check_regular_files,
)
from recollect.lm.model.config import RecollectConfig
from recollect.lm.model.manifest import MANIFEST, check_manifest, is_model_file, write_manifest
from recollect.lm.publishing.card import write_card
from recollect.lm.publishing.remote_code import is_external_class, set_remote_code

__all__ = ["RecollectForSequenceClassification", "RecollectPreTrainedModel", "StrictLoadingMixin"]

_MANIFEST_HINT = f"{RECOPY_HINT}; if the change is meant, delete {MANIFEST}"


class StrictLoadingMixin:
    """A mixin before a class of transformers that loads saved models completely or not at all."""

    # values of model_type and decoder_type in config.json
    _saved_type: ClassVar[tuple[str, str | None]]
    _ignore_unexpected: ClassVar[tuple[str, ...]] = ()  # prefixes of weights of other heads
    # prefixes of weights of the head, which a model with another head lacks
    _ignore_missing: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def from_pretrained(  # type: ignore[override]
        cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Load a model as transformers does, but only if all its weights are complete and finite.

        Args:
            pretrained_model_name_or_path: folder of a saved model, or a name on the hub.
            args, kwargs: as in transformers; ``ignore_mismatched_sizes`` lets shapes differ.

        Raises:
            CheckpointError: files that are missing, cut short or altered since the manifest was
                written; weights that are missing, unexpected, not finite or of other shapes.
            RecipeError: an invalid configuration, or an unregistered member in it.
        """
        path = str(pretrained_model_name_or_path)
        folder, return_info = Path(path), kwargs.pop("output_loading_info", False)
        unchecked = {"state_dict", "variant", "gguf_file", "subfolder", "quantization_config"}
        if not kwargs.setdefault("use_safetensors", True):
            raise CheckpointError(
                f"{path}: use_safetensors=False would read a pickle, which can run code: leave it "
                "out, and save such weights with save_pretrained first"
            )
        if folder.is_file() or (path[:1] in ("/", ".", "~") and not folder.exists()):
            raise CheckpointError(f"there is no folder {path}: name that of a saved model")
        is_local = folder.is_dir() and not unchecked & set(kwargs)
        if is_local:
            cls._check_folder(folder)
        if "local_files_only" not in kwargs:
            kwargs |= offline_kwargs(path)
        any_shapes = kwargs.pop("ignore_mismatched_sizes", False)
        kwargs |= {"ignore_mismatched_sizes": True, "output_loading_info": True}
        try:
            model, info = super().from_pretrained(  # type: ignore[misc]
                pretrained_model_name_or_path, *args, **kwargs
            )
        except (SafetensorError, RuntimeError) as error:
            reason = str(error).partition("\n")[0]
            raise CheckpointError(f"the model in {path} cannot be loaded: {reason}") from None
        classes = {kind.__name__ for kind in cls.__mro__}
        has_head = not classes.isdisjoint(model.config.architectures or ())
        ignored = () if has_head else cls._ignore_missing
        check_names(
            path,
            missing=[n for n in info["missing_keys"] if not n.startswith(ignored)],
            unexpected=[
                n for n in info["unexpected_keys"] if not n.startswith(cls._ignore_unexpected)
            ],
            mismatched=() if any_shapes else info["mismatched_keys"],
        )
        check_finite(path, model.state_dict(keep_vars=True).items())
        if is_local and (folder / MANIFEST).exists():
            check_manifest(folder, is_model_file, advice=_MANIFEST_HINT)
        return (model, info) if return_info else model

    @classmethod
    def _check_folder(cls, folder: Path) -> None:
        """Check a saved model as far as possible without reading its weights."""
        check_regular_files(folder)
        config = check_config(folder / "config.json")
        saved_type = config.get("model_type"), config.get("decoder_type")
        if saved_type != cls._saved_type:
            raise CheckpointError(
                f"{folder} holds a model of type {_join(saved_type)!r}, and this class loads "
                f"{_join(cls._saved_type)!r}: use AutoModelForCausalLM"
            )
        if cls._saved_type == RecollectPreTrainedModel._saved_type:
            RecollectConfig.from_dict(config)  # its errors come before those of the weights
        check_model_folder(folder, FLOAT_DTYPES)

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoModel") -> None:
        """Register a class as transformers does, unless it is part of recollect."""
        if is_external_class(cls):
            super().register_for_auto_class(auto_class)  # type: ignore[misc]

    def save_pretrained(
        self, save_directory: Any, *args: Any, remote_code: bool | None = None, **kwargs: Any
    ) -> None:
        """Save as transformers does, with checksums of the files and a model card.

        The card is ``README.md``, which shows how to load the model. A card that you wrote or
        edited is kept.

        Args:
            save_directory: folder of the model.
            remote_code: whether to add ``modeling_recollect.py``, which imports recollect, so that
                transformers loads the folder by ``trust_remote_code=True`` without an import of
                recollect. When omitted, it is added if the model was loaded with it.
            args, kwargs: as in transformers.
        """
        model: Any = self
        if remote_code is not None:
            set_remote_code(model.config, remote_code)
        folder = Path(save_directory)
        weights = folder / WEIGHTS_FILE
        old_time = weights.stat().st_mtime_ns if weights.exists() else None
        super().save_pretrained(save_directory, *args, **kwargs)  # type: ignore[misc]
        if not kwargs.get("is_main_process", True) or not folder.is_dir():
            return
        is_old = old_time is not None and weights.stat().st_mtime_ns == old_time
        if is_old and (folder / INDEX_FILE).exists():
            weights.unlink()  # of an earlier save; it would be read instead of the shards
        write_manifest(folder, is_model_file)
        if (folder / "config.json").exists():  # an adapter alone has none
            write_card(
                folder, model, load_lines=self._load_lines(), recipes=model.config.all_recipes()
            )

    @classmethod
    @abstractmethod
    def _load_lines(cls) -> tuple[str, str]:
        """Return two lines of Python that load a model from the current folder."""


def _join(saved_type: tuple[Any, Any]) -> str:
    return " of ".join(str(name) for name in saved_type if name is not None)


class RecollectPreTrainedModel(StrictLoadingMixin, PreTrainedModel):
    """Base class of models whose layers are recipes."""

    config_class = RecollectConfig
    _saved_type = (RecollectConfig.model_type, None)
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["Block"]  # noqa: RUF012
    _skip_keys_device_placement = ["cache", "past_key_values"]  # noqa: RUF012

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False

    @classmethod
    def _load_lines(cls) -> tuple[str, str]:
        base = next(kind for kind in cls.__mro__ if not is_external_class(kind))
        return "import recollect as rc", f'model = rc.lm.{base.__name__}.from_pretrained(".")'

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        std = self.config.initializer_range
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=std)
        elif isinstance(module, nn.RMSNorm):
            is_zero_centered = isinstance(module, ZeroCenteredRMSNorm)
            (nn.init.zeros_ if is_zero_centered else nn.init.ones_)(module.weight)
        elif isinstance(
            module,
            GateProjection | ShortConvolution | InitialMemory | PersistentTokens | DepthFloors,
        ):
            loaded = [
                (weight, weight.clone())
                for weight in module.parameters()
                if getattr(weight, "_is_hf_initialized", False)
            ]
            module.reset_parameters()  # which also changes loaded weights
            for weight, value in loaded:
                weight.copy_(value)


class RecollectForSequenceClassification(
    GenericForSequenceClassification, RecollectPreTrainedModel
):
    """`RecollectModel` with a head of ``config.num_labels`` scores per text.

    A batch of several texts needs ``config.pad_token_id``: the scores are those of the last other
    token. The head is initialized if a folder of a language model is loaded.

    Raises:
        RecipeError: sizes do not fit a recipe.

    Examples:
        >>> config = rc.lm.RecollectConfig.from_recipes("gla", vocab_size=32, hidden_size=16)
        >>> config.num_labels = 3
        >>> rc.lm.RecollectForSequenceClassification(config)(torch.tensor([[1, 2, 3]])).logits.shape
        torch.Size([1, 3])
    """

    _ignore_unexpected = ("lm_head.",)
    _ignore_missing = ("score.",)
