"""Load a saved model and its tokenizer from its folder, the folder of a run, or the hub."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from recollect.lm.data.tokenizers import byte_tokenizer, read_tokenizer
from recollect.lm.hub import offline, offline_kwargs
from recollect.lm.model.checkpoint import check_config, check_model_folder
from recollect.lm.model.config import RecollectConfig
from recollect.lm.model.model import RecollectForCausalLM
from recollect.lm.replacement.config import MODEL_TYPE as SWAPPED_TYPE

__all__ = ["load_model_and_tokenizer", "load_saved_model", "load_saved_tokenizer", "load_start"]

_BYTE_VOCAB_SIZES = (256, 257)  # without and with a token for the end of a document


def load_model_and_tokenizer(name: str, *, any_decoder: bool = False) -> tuple[Any, Any]:
    """Return a model as `load_saved_model` does, and its tokenizer."""
    model = load_saved_model(name, any_decoder=any_decoder)
    return model, load_saved_tokenizer(name, model)


def load_saved_model(name: str, *, any_decoder: bool = False) -> Any:
    """Return a model in evaluation mode. No code of its folder is run.

    The model is one that recollect trained, a decoder whose layers were replaced, or, with
    ``any_decoder``, a decoder of transformers in safetensors. It is in a folder, in the folder of
    the run that trained it, or on the hub.
    """
    folder = Path(name)
    if not folder.is_dir() and (folder.exists() or folder.is_absolute() or name[:1] == "."):
        raise ValueError(f"there is no folder {name!r}: name that of a saved model")
    name = _resolve_model_folder(name)
    folder = Path(name)
    model_class = _model_class(folder, any_decoder=any_decoder)
    kwargs: dict[str, Any] = {}
    if model_class is not RecollectForCausalLM:
        kwargs = {"trust_remote_code": False, "use_safetensors": True, **offline_kwargs(name)}
    try:
        with offline() if "local_files_only" in kwargs else contextlib.nullcontext():
            return model_class.from_pretrained(name, **kwargs).eval()
    except (OSError, ValueError) as error:
        if folder.is_dir() and isinstance(error, ValueError):
            raise
        if isinstance(error, OSError) and not folder.is_dir():
            raise ValueError(
                f"there is no folder {name!r}, and no model of that name can be fetched from the "
                "hub: name the folder of a saved model, such as runs/train/model"
            ) from None
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise ValueError(f"{name} cannot be loaded: {reason}") from None


def load_start(name: str) -> Any:
    """Return the model that a run starts from: of recollect, or with replaced layers."""
    config = Path(name) / "config.json"
    if config.exists() and check_config(config).get("model_type") == SWAPPED_TYPE:
        return load_saved_model(name)
    return RecollectForCausalLM.from_pretrained(name)


def load_saved_tokenizer(name: str, model: Any) -> Any:
    """Return the tokenizer of a saved model, or that of bytes for a vocabulary of bytes."""
    name = _resolve_model_folder(name)
    folder, vocab_size = Path(name), model.config.vocab_size
    files = ("tokenizer.json", "tokenizer_config.json")
    if folder.is_dir() and not any((folder / file).exists() for file in files):
        if vocab_size in _BYTE_VOCAB_SIZES:
            return byte_tokenizer(add_eos=vocab_size > 256)
        raise ValueError(
            f"{name} has no tokenizer, and its vocabulary of {vocab_size} tokens is not that of "
            "bytes: save its tokenizer there (tokenizer.save_pretrained)"
        )
    try:
        return read_tokenizer(name)
    except ValueError as error:
        raise ValueError(f"the tokenizer of {name} cannot be loaded: {error}") from None


def _resolve_model_folder(name: str) -> str:
    """Return the folder of a model, which may be in the folder of a run."""
    folder = Path(name)
    if (folder / "config.json").exists():
        return name
    if (folder / "adapter_config.json").exists():
        raise ValueError(
            f"{name} holds an adapter of PEFT without its model: merge it, by "
            f"PeftModel.from_pretrained(model, {name!r}).merge_and_unload(), save the result with "
            "save_pretrained and its tokenizer, and name that folder"
        )
    if (folder / "model" / "config.json").exists():
        return str(folder / "model")
    if not (folder / "plan.json").exists():
        return name
    from recollect.lm.training.atomic_checkpoints import last_checkpoint  # loads the Trainer

    last = last_checkpoint(folder)
    raise ValueError(
        f"{name} is a run that has not come to its end"
        + (f": name its last checkpoint, {last}" if last else ", and has no checkpoint yet")
    )


def _model_class(folder: Path, *, any_decoder: bool) -> Any:
    """Return the class that loads the model of a folder."""
    if not (folder / "config.json").exists():  # on the hub, or the class raises the error
        use_auto = any_decoder and not folder.is_dir()
        return AutoModelForCausalLM if use_auto else RecollectForCausalLM
    model_type = check_config(folder / "config.json").get("model_type")
    if model_type == RecollectConfig.model_type:
        return RecollectForCausalLM
    if model_type == SWAPPED_TYPE:
        return AutoModelForCausalLM
    message = f"{folder} holds a model of type {model_type!r}"
    if not any_decoder:
        raise ValueError(
            f"{message}: generate takes one that recollect has trained, or a decoder whose layers "
            "rc.lm.replace_attention replaced"
        )
    if model_type not in CONFIG_MAPPING:
        raise ValueError(f"{message}, which transformers does not have; code of a model is not run")
    if CONFIG_MAPPING[str(model_type)] not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ValueError(
            f"{message}, which is not a decoder: give a model that AutoModelForCausalLM loads"
        )
    check_model_folder(folder)
    return AutoModelForCausalLM
