"""Convert saved models between published layouts and ours, tensor by tensor."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from torch import nn

from recollect.lm.conversion.fla import FLA_LAYOUTS
from recollect.lm.conversion.huggingface import HUGGINGFACE_LAYOUTS
from recollect.lm.conversion.layout import QUANTIZED, Layout
from recollect.lm.conversion.tensors import (
    DTYPES,
    MAX_SHARD_SIZE,
    all_shapes,
    main_dtype,
    plan_tensors,
    tensor_names,
    write_tensors,
)
from recollect.lm.model.checkpoint import CheckpointError, check_model_folder
from recollect.lm.model.config import RecollectConfig
from recollect.lm.model.manifest import is_model_file, write_manifest
from recollect.lm.model.model import RecollectForCausalLM
from recollect.lm.publishing.card import write_card
from recollect.messages import short_repr, suggestion

__all__ = ["LAYOUTS", "convert", "published_config"]

LAYOUTS: dict[str, Layout] = {
    layout.model_type: layout for layout in (*FLA_LAYOUTS, *HUGGINGFACE_LAYOUTS)
}
"""Published layouts by ``model_type``."""

_REFUSED = {
    "qwen3_5": (
        "they have images, too; save the text model by "
        "Qwen3_5ForCausalLM.from_pretrained(...).save_pretrained(...), and convert that"
    ),
    "rwkv7": (
        "their layers mix values with those of the first layer, and their MLPs mix each token with "
        "the previous one, which layers of recollect do not do"
    ),
}
"""Reasons why there is no converter, by ``model_type``."""

_COPIED_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("tokenizer.model", "spiece.model", "tekken.json", "vocab.json", "vocab.txt", "merges.txt"),
    *("chat_template.jinja", "chat_template.json", "generation_config.json"),
)
_CHAT_TEMPLATES = "additional_chat_templates"


def convert(
    source: str | Path,
    out: str | Path,
    *,
    to: str | None = None,
    max_shard_size: int = MAX_SHARD_SIZE,
) -> Path:
    """Convert a saved model from a published layout to ours, or from ours to a published layout.

    No code of the folder is run. Configuration, names, shapes and types are checked before anything
    is written. Then one file is written at a time, so that memory holds one file of weights. A
    model that was converted there and back has the same tensors, bit for bit.

    Args:
        source: folder with ``config.json`` and safetensors files, of a published model or of ours.
        out: new folder of the result, with the tokenizer of ``source``.
        to: ``model_type`` of the published layout, if ``source`` is a model of ours.
        max_shard_size: largest size of a file of weights in bytes.

    Returns:
        The folder of the result.

    Raises:
        CheckpointError: a model that does not fit, or files that cannot be read or written.

    Examples:
        >>> config = rc.lm.published_config("gla", num_hidden_layers=1, vocab_size=32)
        >>> rc.lm.RecollectForCausalLM(config).save_pretrained("mine")
        >>> rc.lm.convert("mine", "published", to="gla").name
        'published'
    """
    source, out = Path(source), Path(out)
    if not source.is_dir():
        raise CheckpointError(f"there is no folder {source}: name that of a saved model")
    if out.name in ("", ".."):
        raise CheckpointError(
            f"{str(out)!r} has no name to create a folder with: name a new folder"
        )
    if type(max_shard_size) is not int or max_shard_size < 1:
        raise CheckpointError(
            "max_shard_size must be a number of bytes of at least 1, not "
            f"{short_repr(max_shard_size)}"
        )
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise CheckpointError(f"{out} exists already: name a new folder")
    saved = check_model_folder(source, tuple(DTYPES))
    is_ours = saved.get("model_type") == RecollectConfig.model_type
    layout = _find_layout(source, saved.get("model_type"), to, is_ours=is_ours)
    try:
        if is_ours:
            if saved.get("quantization_config") is not None:
                raise ValueError(QUANTIZED)
            config = RecollectConfig.from_dict(saved)
            options = _published_options(layout, config)
        else:
            options = layout.options(saved)
            config = layout.to_ours(options)
        with torch.device("meta"):
            model = RecollectForCausalLM(config)
    except (ValueError, OverflowError, RuntimeError) as error:  # sizes, too, that torch refuses
        reason = " ".join(str(error).split())
        raise CheckpointError(f"{source} cannot be converted: {reason}") from None
    pieces = layout.named_pieces(options, config, () if is_ours else tensor_names(source))
    shapes = all_shapes(pieces, model)
    ignored = () if is_ours else layout.ignored_prefixes
    tensors = plan_tensors(source, pieces, shapes, to_ours=not is_ours, ignored_prefixes=ignored)
    dtype = main_dtype(tensors)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as temporary:
            staged = Path(temporary) / "model"  # its permissions are those of a new folder
            staged.mkdir()
            write_tensors(staged, tensors, max_shard_size)
            _copy_files(source, staged)
            if is_ours:
                _write_published_config(staged, layout, options, dtype)
            else:
                config.architectures, config.dtype = [RecollectForCausalLM.__name__], dtype
                config.save_pretrained(staged)
                lines = RecollectForCausalLM._load_lines()
                write_card(
                    staged,
                    cast(nn.Module, model).to(dtype=dtype),
                    load_lines=lines,
                    recipes=config.all_recipes(),
                )
                write_manifest(staged, is_model_file)
            staged.replace(out)
    except (OSError, SafetensorError) as error:
        reason = " ".join(str(getattr(error, "strerror", None) or error).split())
        raise CheckpointError(f"{out} could not be written: {reason}") from error
    return out


def published_config(model_type: str, **options: Any) -> RecollectConfig:
    """Return our configuration of a model that `convert` can write in a published layout.

    Args:
        model_type: name of the layout.
        options: options of its ``config.json``; others have the defaults of the layout.

    Raises:
        ValueError: an unknown layout, or an option without a counterpart here.

    Examples:
        >>> config = rc.lm.published_config("gla", hidden_size=64, num_heads=2)
        >>> config.head_dim, config.value_dim
        (16, 32)
    """
    if model_type not in LAYOUTS:
        raise ValueError(
            f"there is no layout {model_type!r}: {suggestion(model_type, list(LAYOUTS))}"
        )
    layout = LAYOUTS[model_type]
    return layout.to_ours(layout.options(options))


def _find_layout(source: Path, model_type: Any, to: str | None, *, is_ours: bool) -> Layout:
    known = ", ".join(sorted(LAYOUTS))
    if not is_ours and to is not None:
        raise CheckpointError(
            f"{source} has a model of type {model_type!r}, which is converted to recollect: leave "
            "out the layout to convert to"
        )
    name = to if is_ours else model_type
    if name is None and is_ours:
        raise CheckpointError(
            f"{source} is a model of recollect: name the layout to convert to, one of {known}"
        )
    if isinstance(name, str) and name in _REFUSED:
        raise CheckpointError(f"models of type {name!r} cannot be converted: {_REFUSED[name]}")
    if name is None:
        raise CheckpointError(
            f"{source / 'config.json'} has no model_type, which names the layout: add one of "
            f"{known}"
        )
    if not isinstance(name, str) or name not in LAYOUTS:
        raise CheckpointError(
            f"there is no converter for models of type {short_repr(name)}: the known ones are "
            f"{known}"
        )
    return LAYOUTS[name]


# -- configurations --------------------------------------------------------------------------------


def _published_options(layout: Layout, config: RecollectConfig) -> dict[str, Any]:
    """Return the options of the published model with the outputs of a model of ours."""
    options = layout.options(layout.to_published(config))
    difference = _first_difference(_facts(config), _facts(layout.to_ours(options)))
    if difference is not None:
        path, ours, expected = difference
        raise ValueError(
            f"{path} is {short_repr(ours)}, and a model of type {layout.model_type} has "
            f"{short_repr(expected)}"
        )
    return options


def _facts(config: RecollectConfig) -> dict[str, Any]:
    """Return everything in a configuration that shapes the outputs of a model."""
    names = "vocab_size hidden_size intermediate_size rms_norm_eps zero_centered_norms"
    names += " tie_word_embeddings logit_scale"
    layers: list[dict[str, Any]] = []
    for name, (mixer, has_mlp) in zip(config.layer_names, config.layer_specs, strict=True):
        sizes: dict[str, Any] = config.sizes_of(name)
        sizes["head_dim"] = sizes["head_dim"] or config.hidden_size // sizes["num_attention_heads"]
        sizes["value_dim"] = sizes["value_dim"] or sizes["head_dim"]
        layers.append({**mixer.to_dict(), "has_mlp": has_mlp, **sizes})
    return {**{name: getattr(config, name) for name in names.split()}, "layers": layers}


def _first_difference(a: Any, b: Any, path: str = "") -> tuple[str, Any, Any] | None:
    """Return the path and both values at which nested data first differ."""
    if isinstance(a, Mapping) and isinstance(b, Mapping) and a.keys() == b.keys():
        pairs = [(f"{path}.{key}" if path else str(key), a[key], b[key]) for key in a]
    elif isinstance(a, list | tuple) and isinstance(b, list | tuple) and len(a) == len(b):
        pairs = [(f"{path}[{i}]", *pair) for i, pair in enumerate(zip(a, b, strict=True))]
    else:
        return None if a == b and type(a) is type(b) else (path, a, b)
    differences = (_first_difference(x, y, name) for name, x, y in pairs)
    return next((difference for difference in differences if difference is not None), None)


def _write_published_config(
    folder: Path, layout: Layout, options: Mapping[str, Any], dtype: torch.dtype
) -> None:
    aliases = {alias: options[name] for alias, name in layout.aliases.items()}
    config = {
        **options,
        **aliases,
        "model_type": layout.model_type,
        "architectures": [layout.architecture],
        "dtype": str(dtype).removeprefix("torch."),
    }
    text = json.dumps(config, indent=2, sort_keys=True)
    (folder / "config.json").write_text(text + "\n", encoding="utf-8")


# -- files -----------------------------------------------------------------------------------------


def _copy_files(source: Path, folder: Path) -> None:
    """Copy the tokenizer and the defaults of generation."""
    for name in _COPIED_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)
    for path in sorted((source / _CHAT_TEMPLATES).glob("*.jinja")):
        (folder / _CHAT_TEMPLATES).mkdir(exist_ok=True)
        shutil.copyfile(path, folder / _CHAT_TEMPLATES / path.name)
