"""Checks of saved models before loading, with errors that say what is wrong.

A checkpoint is ``config.json`` and safetensors: data, whose reading runs nothing. Names, shapes and
types are compared with what the configuration asks for before any weight is read, so that nothing
is left out, filled in at random or cut silently.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from recollect.report.files import LARGEST, check_regular, read_regular
from recollect.serialization import read_json

__all__ = [
    "CheckpointError",
    "check_attributes",
    "check_config",
    "check_finite",
    "check_folder",
    "check_json",
    "check_names",
    "check_regular_files",
    "check_safetensors",
    "read_tensors",
]

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json", "model.pt", "model.pth")
REAL = ("F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2")
AGAIN = "copy it again, or take another checkpoint"


class CheckpointError(ValueError):
    """A saved model, state or configuration that cannot be read or could not be written.

    Nothing of it was used; what stood before it stands.

    Examples:
        >>> try:
        ...     rc.lm.RecollectForCausalLM.from_pretrained("./nowhere")
        ... except rc.lm.CheckpointError as error:
        ...     print(error)
        there is no folder ./nowhere: name that of a saved model
    """


def check_regular_files(folder: Path) -> None:
    """Check that a folder holds regular files and folders alone, before others open them.

    Raises:
        CheckpointError: a pipe, a socket or a device.
    """
    for path in sorted(folder.iterdir()):
        if path.exists() and not path.is_dir():
            _check_regular(path)


def _check_regular(path: Path) -> None:
    try:
        check_regular(path)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None


def check_json(path: Path, *, limit: int | None = LARGEST) -> dict[str, Any]:
    """Return the mapping in a JSON file.

    Args:
        path: of the file.
        limit: largest size in bytes; any size when ``None``.

    Raises:
        CheckpointError: no such file, no regular one, a larger one, no UTF-8, no JSON, or no
            mapping.
    """
    try:
        data = read_json(read_regular(path, limit=limit))
    except FileNotFoundError:
        raise CheckpointError(f"{path.parent} is no checkpoint: it has no {path.name}") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise CheckpointError(f"{path} is not UTF-8 text: {AGAIN}") from None
    except ValueError as error:
        raise CheckpointError(f"{path} is not JSON ({error}): {AGAIN}") from None
    if not isinstance(data, dict):
        raise CheckpointError(f"{path} must hold a mapping, not a {type(data).__name__}: {AGAIN}")
    return data


def check_config(path: Path) -> dict[str, Any]:
    """Return the mapping in a JSON file whose keys become attributes.

    Raises:
        CheckpointError: as `check_json` and `check_attributes`.
    """
    data = check_json(path)
    check_attributes(str(path), data)
    return data


def check_attributes(path: str, data: Mapping[str, Any]) -> None:
    """Check that no key is an attribute that Python reserves, such as ``__class__``.

    Args:
        path: of the file, or a description of it.
        data: the keys and their values.

    Raises:
        CheckpointError: naming the key.
    """
    for name in data:
        if name.startswith("__"):
            raise CheckpointError(f"{path} has the key {name[:60]!r}, which is no option: {AGAIN}")


def check_folder(
    folder: Path,
    model: nn.Module,
    *,
    head: str,
    partial: bool = False,
    unread: tuple[str, ...] = (),
    drawn: tuple[str, ...] = (),
) -> None:
    """That the weights in a folder are those of a model, name by name.

    Args:
        folder: of ``config.json`` and safetensors.
        model: of the same configuration; it may be on the meta device.
        head: prefix of the names that the file may have and the model not, or the other way round:
            a model with its head, and one without.
        partial: shapes may differ (``ignore_mismatched_sizes``).
        unread: beginnings of names that the file may have and the model not: of another head.
        drawn: beginnings of names that the model may have and the file not: of a head that is new.

    Raises:
        CheckpointError: weights that are missing, too many, of other shapes or types, or that
            cannot be read.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    files = _weights(folder)
    where = str(files[0] if len(files) == 1 else folder)
    for path in files:
        for name, (kind, shape) in check_safetensors(path).items():
            if kind not in REAL:
                raise CheckpointError(
                    f"{path}: the weight {name!r} has type {kind}, and weights are floating-point "
                    f"numbers: {AGAIN}"
                )
            if name in shapes:
                raise CheckpointError(
                    f"{folder}: the weight {name!r} is in two files, and only one can be right: "
                    f"{AGAIN}"
                )
            shapes[name] = shape
    wanted = {name: tuple(x.shape) for name, x in model.state_dict(keep_vars=True).items()}
    shapes = _renamed(shapes, wanted, head)
    tied = _aliases(model)
    check_names(
        where,
        missing=[
            name
            for name in wanted
            if name not in shapes and name not in tied and not name.startswith(drawn)
        ],
        unexpected=[name for name in shapes if name not in wanted and not name.startswith(unread)],
    )
    if partial:
        return
    for name, shape in shapes.items():
        if name in wanted and shape != wanted[name]:
            raise CheckpointError(
                f"{where}: the weight {name!r} has shape {list(shape)} and config.json asks for "
                f"{list(wanted[name])}: they are not of one model"
            )


def check_names(where: str, *, missing: Iterable[str], unexpected: Iterable[str]) -> None:
    """That every weight is there, and no other.

    Raises:
        CheckpointError: naming the first.
    """
    for names, what in (
        (list(missing), "lacks {} that config.json asks for"),
        (list(unexpected), "has {} that config.json knows nothing of"),
    ):
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            said = what.format(f"the weight {names[0]!r}{more}")
            raise CheckpointError(f"{where} {said}: they are not of one model")


def check_finite(where: str, named: Iterable[tuple[str, Tensor]]) -> None:
    """That no number is NaN or infinite.

    Raises:
        CheckpointError: naming the tensor.
    """
    for name, x in named:
        if x.device.type == "meta" or not x.is_floating_point():
            continue
        # A sum is finite unless a number is not, or it overflows: only then is it worth a copy.
        if not bool(x.detach().float().sum().isfinite()) and not bool(x.float().isfinite().all()):
            raise CheckpointError(
                f"{where}: the weight {name!r} holds NaN or infinity, so this model's training had "
                "failed: take an earlier checkpoint (safetensors.torch.load_file reads this one)"
            )


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors of a safetensors file, and its metadata.

    Raises:
        CheckpointError: as `check_safetensors`.
    """
    check_safetensors(path)
    try:
        with safe_open(path, framework="pt") as file:
            names = list(file.keys())
            return {name: file.get_tensor(name) for name in names}, file.metadata() or {}
    except (SafetensorError, OSError, UnicodeDecodeError, RuntimeError) as error:
        raise _unreadable(path, error) from None


def check_safetensors(path: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return type and shape of every tensor in a file, by name; the numbers are not read.

    Raises:
        CheckpointError: no regular file, no whole safetensors file, or one that names a tensor
            twice, of which safetensors takes the last without a word.
    """
    if path.exists():
        _check_regular(path)
    try:
        with safe_open(path, framework="pt") as file:
            names = list(file.keys())
            parts = {name: file.get_slice(name) for name in names}
            entries = {name: (x.get_dtype(), tuple(x.get_shape())) for name, x in parts.items()}
        with path.open("rb") as raw:
            read_json(raw.read(int.from_bytes(raw.read(8), "little")))
    except (SafetensorError, OSError, ValueError, RuntimeError) as error:
        raise _unreadable(path, error) from None
    return entries


def _unreadable(path: Path, error: Exception) -> CheckpointError:
    if isinstance(error, FileNotFoundError) or not path.exists():
        return CheckpointError(f"there is no file {path}")
    reason = " ".join(str(getattr(error, "strerror", None) or error).split())
    reason = reason.removeprefix("Error while deserializing header: ").partition(
        ", expected one of"
    )[0]
    return CheckpointError(
        f"{path} is no whole safetensors file ({reason}): it was cut short or altered; {AGAIN}"
    )


def _weights(folder: Path) -> list[Path]:
    """The safetensors files of a checkpoint."""
    if (folder / SINGLE).exists():
        return [folder / SINGLE]
    if (folder / INDEX).exists():
        names = check_json(folder / INDEX).get("weight_map")
        if not isinstance(names, Mapping) or not names:
            raise CheckpointError(f"{folder / INDEX} has no weight_map: {AGAIN}")
        files = dict.fromkeys(names.values())
        for name in files:
            # A name that climbs out of the folder would read another's file.
            if not isinstance(name, str) or Path(name).name != name:
                raise CheckpointError(
                    f"{folder / INDEX} names {name!r}, which is no file of this folder: {AGAIN}"
                )
            if not (folder / name).is_file():
                raise CheckpointError(f"{folder} lacks {name}, which {INDEX} names: {AGAIN}")
        return [folder / name for name in files]
    for name in PICKLED:
        if (folder / name).exists():
            raise CheckpointError(
                f"{folder} has its weights in {name}, whose reading could run code: save them as "
                "safetensors"
            )
    raise CheckpointError(f"{folder} has no {SINGLE}: {AGAIN}")


def _renamed(
    shapes: dict[str, tuple[int, ...]], wanted: Mapping[str, object], head: str
) -> dict[str, tuple[int, ...]]:
    """Names as the model has them: with or without its head."""
    inner = {name for name in wanted if name.startswith(head)}
    within = any(name.startswith(head) for name in shapes)
    if inner and not within:
        return {head + name: shape for name, shape in shapes.items()}
    if not inner and within:
        return {name[len(head) :]: s for name, s in shapes.items() if name.startswith(head)}
    return shapes


def _aliases(model: nn.Module) -> set[str]:
    """Parameters that are another one under a second name, which files leave out."""
    every = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return every - {name for name, _ in model.named_parameters()}
