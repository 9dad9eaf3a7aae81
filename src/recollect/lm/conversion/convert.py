"""Convert saved models between published layouts and ours, tensor by tensor."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from recollect.lm.conversion.fla import FLA_LAYOUTS
from recollect.lm.conversion.huggingface import HUGGINGFACE_LAYOUTS
from recollect.lm.conversion.layout import QUANTIZED, Layout, Part, Piece
from recollect.lm.model.checkpoint import (
    INDEX_FILE,
    WEIGHTS_FILE,
    CheckpointError,
    check_finite,
    check_model_folder,
    check_names,
    read_header,
    weight_files,
)
from recollect.lm.model.config import RecollectConfig
from recollect.lm.model.manifest import is_model_file, write_manifest
from recollect.lm.model.model import RecollectForCausalLM
from recollect.lm.publishing.card import write_card
from recollect.messages import short_repr, suggestion
from recollect.report.files import remove_new_folders

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

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Types of weights by their names in a file."""

MAX_SHARD_SIZE = 5 * 10**9
_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"  # our names

Shapes = dict[str, tuple[int, ...]]
"""Shapes of tensors by name."""


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
        with remove_new_folders(out.parent):
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
    if not is_ours and to is not None and str(model_type) in LAYOUTS:
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


# -- tensors ---------------------------------------------------------------------------------------


def all_shapes(pieces: Iterable[Piece], model: nn.Module) -> tuple[Shapes, Shapes]:
    """Return the published shapes that the pieces give, and our shapes from a model.

    Raises RuntimeError if the pieces do not cover every tensor once: an error of the layout.
    """
    ours = {name: weight.detach() for name, weight in model.named_parameters()}
    published_parts: dict[str, list[tuple[Part, Tensor]]] = {}
    our_parts: dict[str, list[tuple[Part, Tensor]]] = {}
    for piece in pieces:
        x = piece.target.of(ours[piece.target.name])
        our_parts.setdefault(piece.target.name, []).append((piece.target, x))
        entry = piece.source, piece.to_published(x)
        published_parts.setdefault(piece.source.name, []).append(entry)
    published = {name: _joined_shape(name, entries) for name, entries in published_parts.items()}
    covered = {name: _joined_shape(name, entries) for name, entries in our_parts.items()}
    shapes = {name: tuple(weight.shape) for name, weight in ours.items()}
    if covered != shapes:
        names = sorted(name for name in shapes if covered.get(name) != shapes[name])
        raise RuntimeError(f"the pieces of a layout do not cover {names[0]!r}")
    return published, shapes


def _joined_shape(name: str, entries: Sequence[tuple[Part, Tensor]]) -> tuple[int, ...]:
    """Return the shape of a tensor whose parts follow each other."""
    dim, stop = entries[0][0].dim, 0
    for part, x in sorted(entries, key=lambda item: item[0].start):
        if part.start != stop or part.stop not in (None, stop + x.shape[dim]):
            raise RuntimeError(f"the pieces of {name!r} do not follow each other")
        stop += x.shape[dim]
    shape = list(entries[0][1].shape)
    shape[dim] = stop
    return tuple(shape)


@dataclass(frozen=True, kw_only=True)
class Move:
    """A part of a tensor of the source, its place in the result, and the map between them."""

    source: Part
    target: Part
    transform: Callable[[Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class PlannedTensor:
    """A tensor of the result, which is read from parts of tensors of the source."""

    dtype: torch.dtype  # type of its numbers
    num_bytes: int  # size
    moves: Sequence[Move]  # its parts in order
    files: Mapping[str, Path]  # file of each tensor that they come from

    def read(self) -> Tensor:
        """Read and transform all parts.

        Raises:
            CheckpointError: a value of NaN or infinity, with which no model is loaded.
        """
        tensors: dict[str, Tensor] = {}
        for name, path in self.files.items():
            with safe_open(path, framework="pt") as file:
                tensors[name] = file.get_tensor(name)
        for name, path in self.files.items():
            check_finite(str(path), [(name, tensors[name])])
        outputs = [move.transform(move.source.of(tensors[move.source.name])) for move in self.moves]
        return torch.cat(outputs, self.moves[0].target.dim)


def tensor_names(source: Path) -> list[str]:
    """Return the names of the tensors in a folder."""
    return [name for path in weight_files(source) for name in read_header(path)]


def plan_tensors(
    source: Path,
    pieces: Sequence[Piece],
    shapes: tuple[Shapes, Shapes],  # published, ours
    *,
    to_ours: bool,
    ignored_prefixes: tuple[str, ...] = (),
) -> dict[str, PlannedTensor]:
    """Check names, shapes and types of the tensors of a folder, and plan those of the result.

    Tensors whose names have ``ignored_prefixes`` are left out. A head must equal the embedding that
    it is tied to.
    """
    headers = {
        name: (path, dtype, shape)
        for path in weight_files(source)
        for name, (dtype, shape) in read_header(path).items()
        if not name.startswith(ignored_prefixes)
    }
    expected, results = shapes if to_ours else reversed(shapes)
    repeated_head = None if _HEAD in expected else headers.pop(_HEAD, None)  # of a tied model
    check_names(
        str(source),
        missing=expected.keys() - headers.keys(),
        unexpected=headers.keys() - expected.keys(),
        mismatched=[
            (name, headers[name][2], shape)
            for name, shape in expected.items()
            if name in headers and headers[name][2] != shape
        ],
    )
    if repeated_head is not None:
        piece = next(piece for piece in pieces if piece.target.name == _EMBEDDING)
        name = (piece.source if to_ours else piece.target).name
        _check_repeated_head(source, repeated_head[0], name, headers[name][0])
    by_target: dict[str, list[Move]] = {}
    for piece in pieces:
        move = Move(source=piece.source, target=piece.target, transform=piece.to_ours)
        if not to_ours:
            move = Move(source=piece.target, target=piece.source, transform=piece.to_published)
        by_target.setdefault(move.target.name, []).append(move)
    planned: dict[str, PlannedTensor] = {}
    for name, shape in results.items():
        moves = sorted(by_target[name], key=lambda move: move.target.start)
        files = {move.source.name: headers[move.source.name][0] for move in moves}
        dtypes = {headers[move.source.name][1] for move in moves}
        if len(dtypes) > 1:
            raise CheckpointError(
                f"{source} has {', '.join(files)} in the types {' and '.join(sorted(dtypes))}, and "
                "they become one tensor: save them in one type"
            )
        dtype = DTYPES[dtypes.pop()]
        size = torch.Size(shape).numel() * dtype.itemsize
        planned[name] = PlannedTensor(dtype=dtype, num_bytes=size, moves=moves, files=files)
    return planned


def _check_repeated_head(source: Path, head_file: Path, name: str, file: Path) -> None:
    """Check that the head in a file of a tied model is equal to the embedding."""
    with safe_open(head_file, framework="pt") as opened:
        head = opened.get_tensor(_HEAD)
    with safe_open(file, framework="pt") as opened:
        embedding = opened.get_tensor(name)
    if head.dtype != embedding.dtype or not torch.equal(head, embedding):
        raise CheckpointError(
            f"{source} has {_HEAD!r} that differs from {name!r}, and config.json ties them: set "
            "tie_word_embeddings to false there"
        )


def main_dtype(tensors: Mapping[str, PlannedTensor]) -> torch.dtype:
    """Return the type of most numbers."""
    counts: Counter[torch.dtype] = Counter()
    for tensor in tensors.values():
        counts[tensor.dtype] += tensor.num_bytes // tensor.dtype.itemsize
    return counts.most_common(1)[0][0]


def write_tensors(folder: Path, tensors: Mapping[str, PlannedTensor], max_shard_size: int) -> None:
    """Write files of at most a size, one after the other, and an index if there are several."""
    shards: list[list[str]] = [[]]
    size = 0
    for name, tensor in tensors.items():
        if shards[-1] and size + tensor.num_bytes > max_shard_size:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += tensor.num_bytes
    weight_map: dict[str, str] = {}
    for index, names in enumerate(shards, start=1):
        is_single = len(shards) == 1
        file = WEIGHTS_FILE if is_single else f"model-{index:05}-of-{len(shards):05}.safetensors"
        read = {name: tensors[name].read() for name in names}
        save_file(read, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(names, file)
    if len(shards) > 1:
        total = sum(tensor.num_bytes for tensor in tensors.values())
        data = {"metadata": {"total_size": total}, "weight_map": weight_map}
        text = json.dumps(data, indent=2, sort_keys=True)
        (folder / INDEX_FILE).write_text(text + "\n", encoding="utf-8")
