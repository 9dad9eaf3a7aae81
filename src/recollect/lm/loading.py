"""A saved model and its tokenizer, for commands: from a folder, a run's folder, or the hub."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from recollect.lm.data.tokenizers import byte_tokenizer, read_tokenizer
from recollect.lm.hub import hub_options, offline
from recollect.lm.model.checkpoint import check_config, check_regular_files, check_safetensors
from recollect.lm.model.model import RecollectForCausalLM
from recollect.lm.swap_config import SWAPPED

__all__ = ["load_saved", "load_saved_model", "load_saved_tokenizer"]

_BYTES = (256, 257)  # vocabularies of bytes, without and with an end of the document


def load_saved(checkpoint: str, *, others: bool = False) -> tuple[Any, Any]:
    """Model, in evaluation mode, and tokenizer; no code that comes with them is run.

    Args:
        checkpoint: folder of a saved model, or of the run that trained it, or a name on the hub.
        others: whether any decoder of transformers will do; only its safetensors are read. Else one
            that recollect has trained, or a decoder whose layers were replaced.

    Raises:
        ValueError: none can be loaded, or it is another model, or it has no tokenizer; a
            `CheckpointError` for files that are not as they were written.
    """
    model = load_saved_model(checkpoint, others=others)
    return model, load_saved_tokenizer(_of_a_run(checkpoint), model)


def load_saved_model(checkpoint: str, *, others: bool = False) -> Any:
    """Return the model of `load_saved`, which needs no tokenizer.

    Raises:
        ValueError: as `load_saved`.
    """
    folder = Path(checkpoint)
    if not folder.is_dir() and (folder.exists() or folder.is_absolute() or checkpoint[:1] == "."):
        raise ValueError(f"there is no folder {checkpoint!r}: name that of a saved model")
    checkpoint = _of_a_run(checkpoint)
    folder = Path(checkpoint)
    kind = _model_class(folder, others=others)
    how: dict[str, Any] = {}
    if kind is not RecollectForCausalLM:
        how = {"trust_remote_code": False, "use_safetensors": True, **hub_options(checkpoint)}
    quietly = offline() if "local_files_only" in how else contextlib.nullcontext()
    try:
        with quietly:
            return kind.from_pretrained(checkpoint, **how).eval()
    except OSError as error:
        if not folder.is_dir():
            raise ValueError(
                f"there is no folder {checkpoint!r}, and no model of that name can be fetched from "
                "the hub: name the folder of a saved model, such as runs/train/model"
            ) from None
        raise ValueError(f"{checkpoint} cannot be loaded: {_first(error)}") from None
    except ValueError as error:
        if folder.is_dir():
            raise
        raise ValueError(f"{checkpoint} cannot be loaded: {_first(error)}") from None


def _of_a_run(checkpoint: str) -> str:
    """The folder of a model; of the folder of a run, the one in it that holds its model.

    Raises:
        ValueError: a run that has not saved its model yet, or an adapter without its model.
    """
    folder = Path(checkpoint)
    if (folder / "adapter_config.json").exists() and not (folder / "config.json").exists():
        raise ValueError(
            f"{checkpoint} holds an adapter of PEFT and no model: merge it into its own, by "
            f"PeftModel.from_pretrained(model, {checkpoint!r}).merge_and_unload(), save that with "
            "save_pretrained, its tokenizer beside it, and name that folder"
        )
    if (folder / "config.json").exists():
        return checkpoint
    if (folder / "model" / "config.json").exists():
        return str(folder / "model")
    if not (folder / "plan.json").exists():
        return checkpoint
    from recollect.lm.training.atomic_checkpoints import last_checkpoint  # loads the Trainer

    last = last_checkpoint(folder)
    raise ValueError(
        f"{checkpoint} is a run that has not come to its end"
        + (f": name its last checkpoint, {last}" if last else ", and has no checkpoint yet")
    )


def load_saved_tokenizer(checkpoint: str, model: Any) -> Any:
    """The tokenizer beside a saved model; where none is, a vocabulary of bytes means bytes.

    Args:
        checkpoint: folder of the model, or its name on the hub.
        model: which was loaded from there.

    Raises:
        ValueError: none is there, or it cannot be loaded.
    """
    folder = Path(checkpoint)
    has = any((folder / name).exists() for name in ("tokenizer.json", "tokenizer_config.json"))
    if folder.is_dir() and not has:
        if model.config.vocab_size in _BYTES:
            return byte_tokenizer(add_eos=model.config.vocab_size > 256)
        raise ValueError(
            f"{checkpoint} has no tokenizer, and {model.config.vocab_size} tokens are not bytes: "
            "save its tokenizer beside the model (tokenizer.save_pretrained)"
        )
    try:
        return read_tokenizer(checkpoint)
    except ValueError as error:
        raise ValueError(f"the tokenizer of {checkpoint} cannot be loaded: {error}") from None


def _model_class(folder: Path, *, others: bool) -> Any:
    """What loads a folder's model: ours, or a decoder whose layers were replaced, or any.

    Raises:
        ValueError: it holds another model.
    """
    if not (folder / "config.json").exists():  # on the hub, or the class says what is missing
        return AutoModelForCausalLM if others and not folder.is_dir() else RecollectForCausalLM
    check_regular_files(folder)
    kind = check_config(folder / "config.json").get("model_type")
    own = RecollectForCausalLM.config_class.model_type
    if kind not in (SWAPPED, own) and not others:
        raise ValueError(
            f"{folder} holds a model of type {kind!r}: generate takes one that recollect has "
            "trained, or a decoder whose layers rc.lm.replace_attention replaced"
        )
    for path in folder.glob("*.safetensors"):  # which transformers reads with fewer checks
        check_safetensors(path)
    if kind not in CONFIG_MAPPING:
        raise ValueError(
            f"{folder} holds a model of type {kind!r}, which transformers does not know; code that "
            "comes with a model is not run"
        )
    is_decoder = kind == SWAPPED or CONFIG_MAPPING[str(kind)] in MODEL_FOR_CAUSAL_LM_MAPPING
    if not is_decoder:
        raise ValueError(
            f"{folder} holds a model of type {kind!r}, which is no decoder: give a model that "
            "AutoModelForCausalLM loads"
        )
    return RecollectForCausalLM if kind == own else AutoModelForCausalLM


def _first(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
