"""Base classes of models: loading that is strict; initialisation and supported features of ours."""

from __future__ import annotations

from abc import abstractmethod
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import PreTrainedModel

from recollect.blocks.layers import PersistentTokens
from recollect.layer.gates import GateProjection
from recollect.layer.recipe_module import InitialMemory
from recollect.layer.short_conv import ShortConvolution
from recollect.lm.hub import hub_options
from recollect.lm.model.checkpoint import (
    AGAIN,
    INDEX,
    SINGLE,
    CheckpointError,
    check_config,
    check_finite,
    check_folder,
    check_names,
    check_regular_files,
)
from recollect.lm.model.config import RecollectConfig
from recollect.lm.model.manifest import MANIFEST, check_manifest, of_model, write_manifest
from recollect.lm.publishing.card import write_card
from recollect.lm.publishing.remote_code import registered_outside, set_remote_code

_MEANT = f"{AGAIN}; if the change is meant, delete {MANIFEST}"

__all__ = ["RecollectPreTrainedModel", "StrictLoading"]


class StrictLoading:
    """A `PreTrainedModel` whose checkpoints are loaded whole and sane, or not at all.

    It stands before the model's own class.
    """

    base_model_prefix: ClassVar[str]
    config_class: ClassVar[Any]
    # Beginnings of names: of weights of another head, which may stay unread, and of a head's own,
    # which begin anew in a folder that was saved with another head.
    _unread: ClassVar[tuple[str, ...]] = ()
    _optional_weights: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def from_pretrained(  # type: ignore[override]
        cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """As in transformers, and strict: a checkpoint is loaded whole and sane, or not at all.

        Args:
            pretrained_model_name_or_path: folder of a saved model, or a name on the hub.
            args, kwargs: as in transformers; ``ignore_mismatched_sizes`` lets shapes differ.

        Raises:
            CheckpointError: files that are missing, cut short or altered (by their manifest, where
                there is one); weights that are missing,
                too many, of other shapes, or not finite.
            RecipeError: a configuration that means nothing, or names an unregistered member.
        """
        where, report = str(pretrained_model_name_or_path), kwargs.pop("output_loading_info", False)
        unusual = {"state_dict", "variant", "gguf_file", "subfolder", "quantization_config"}
        if not kwargs.setdefault("use_safetensors", True):  # never a pickle
            raise CheckpointError(
                f"{where}: use_safetensors=False would read a pickle, which can run code: leave it "
                "out, and save weights that are one with save_pretrained first"
            )
        if Path(where).is_file() or (where[:1] in ("/", ".", "~") and not Path(where).exists()):
            raise CheckpointError(f"there is no folder {where}: name that of a saved model")
        plain = Path(where).is_dir() and not unusual & set(kwargs)
        if plain:
            cls._check_folder(Path(where), **kwargs)
        if "local_files_only" not in kwargs:
            kwargs |= hub_options(where)
        try:
            model, info = super().from_pretrained(  # type: ignore[misc]
                pretrained_model_name_or_path, *args, output_loading_info=True, **kwargs
            )
        except SafetensorError as error:
            raise CheckpointError(f"the weights of {where} cannot be read: {error}") from None
        check_names(
            where,
            missing=[n for n in info["missing_keys"] if not n.startswith(cls._optional_weights)],
            unexpected=[n for n in info["unexpected_keys"] if not n.startswith(cls._unread)],
        )
        check_finite(where, model.state_dict(keep_vars=True).items())
        if plain and (Path(where) / MANIFEST).exists():
            check_manifest(Path(where), of_model, advice=_MEANT)
        return (model, info) if report else model

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoModel") -> None:
        """Register a class as transformers does, unless it is of recollect, which is installed."""
        if registered_outside(cls):
            super().register_for_auto_class(auto_class)  # type: ignore[misc]

    def save_pretrained(
        self, save_directory: Any, *args: Any, remote_code: bool | None = None, **kwargs: Any
    ) -> None:
        """Save as transformers does, with checksums of the files and a model card.

        The card is ``README.md``, which shows how to load the model. One that you wrote or edited
        stays.

        Args:
            save_directory: the folder.
            remote_code: whether to add ``modeling_recollect.py``, which imports recollect, so that
                transformers loads the folder by ``trust_remote_code=True`` without an import of
                recollect. When omitted, it is added if the model was loaded with it.
            args, kwargs: as in transformers.
        """
        model: Any = self
        if remote_code is not None:
            set_remote_code(model.config, remote_code)
        folder = Path(save_directory)
        single = folder / SINGLE
        before = single.stat().st_mtime_ns if single.exists() else None
        super().save_pretrained(save_directory, *args, **kwargs)  # type: ignore[misc]
        if not kwargs.get("is_main_process", True) or not folder.is_dir():
            return
        if before is not None and (folder / INDEX).exists() and single.stat().st_mtime_ns == before:
            single.unlink()  # of an earlier save, and it would be read in place of the parts
        write_manifest(folder, of_model)
        if (folder / "config.json").exists():  # an adapter alone has none
            write_card(folder, model, loads=self._loads(), recipes=model.config.all_recipes())

    @classmethod
    @abstractmethod
    def _loads(cls) -> tuple[str, str]:
        """Two lines of Python that load a model from the folder they run in."""

    @staticmethod
    @abstractmethod
    def _configured(folder: Path, written: dict[str, Any]) -> Any:
        """The configuration that a folder's config.json holds."""

    @classmethod
    def _check_folder(cls, folder: Path, **kwargs: Any) -> None:
        """Check a checkpoint as far as possible without reading its numbers."""
        check_regular_files(folder)
        data = check_config(folder / "config.json")
        if (folder / "generation_config.json").exists():
            check_config(folder / "generation_config.json")
        if "quantization_config" in data:
            return  # its weights have names and types of their own
        config = kwargs.get("config")
        if not isinstance(config, cls.config_class):
            config = cls._configured(folder, data)
        try:
            kind: Any = cls
            with torch.device("meta"):
                model = kind(config)
        except RuntimeError as error:  # sizes whose product is no size
            raise CheckpointError(
                f"{folder}: config.json asks for the impossible: {error}"
            ) from None
        partial = bool(kwargs.get("ignore_mismatched_sizes"))
        classes = {kind.__name__ for kind in cls.__mro__}
        check_folder(
            folder,
            model,
            head=f"{cls.base_model_prefix}.",
            partial=partial,
            unread=cls._unread,
            drawn=()
            if classes & {*map(str, data.get("architectures") or [])}
            else cls._optional_weights,
        )


class RecollectPreTrainedModel(StrictLoading, PreTrainedModel):
    """What both models share: how they start, and what the library may do with them."""

    config_class = RecollectConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["Block"]  # noqa: RUF012
    _skip_keys_device_placement = ["cache", "past_key_values"]  # noqa: RUF012

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False

    @classmethod
    def _loads(cls) -> tuple[str, str]:
        base = next(kind for kind in cls.__mro__ if not registered_outside(kind))
        return "import recollect as rc", f'model = rc.lm.{base.__name__}.from_pretrained(".")'

    @staticmethod
    def _configured(folder: Path, written: dict[str, Any]) -> RecollectConfig:
        if written.get("model_type") != RecollectConfig.model_type:
            raise CheckpointError(
                f"{folder} holds a model of type {written.get('model_type')!r}, and this class "
                f"reads {RecollectConfig.model_type!r}: use AutoModelForCausalLM"
            )
        return RecollectConfig.from_dict(written)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        std = self.config.initializer_range
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=std)
        elif isinstance(module, nn.RMSNorm):
            nn.init.ones_(module.weight)
        elif isinstance(
            module, GateProjection | ShortConvolution | InitialMemory | PersistentTokens
        ):
            # These know their own start; what came from a checkpoint stays.
            loaded = [
                (weight, weight.clone())
                for weight in module.parameters()
                if getattr(weight, "_is_hf_initialized", False)
            ]
            module.reset_parameters()
            for weight, value in loaded:
                weight.copy_(value)
