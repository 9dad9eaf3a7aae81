"""Tensors of a conversion: their shapes on both sides, and their way from file to file."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from recollect.lm.conversion.layout import Part, Piece
from recollect.lm.model.checkpoint import (
    INDEX_FILE,
    WEIGHTS_FILE,
    CheckpointError,
    check_finite,
    check_names,
    read_header,
    weight_files,
)

__all__ = [
    "DTYPES",
    "MAX_SHARD_SIZE",
    "Shapes",
    "all_shapes",
    "main_dtype",
    "plan_tensors",
    "tensor_names",
    "write_tensors",
]

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Types of weights by their names in a file."""

MAX_SHARD_SIZE = 5 * 10**9
_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"  # our names


Shapes = dict[str, tuple[int, ...]]
"""Shapes of tensors by name."""


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
