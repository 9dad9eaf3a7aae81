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

from recollect.recipe.json_text import read_json

__all__ = [
    "CheckpointError",
    "check_finite",
    "check_folder",
    "check_json",
    "check_names",
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


def check_json(path: Path) -> dict[str, Any]:
    """The mapping in a JSON file.

    Raises:
        CheckpointError: no such file, no UTF-8, no JSON, or no mapping.
    """
    try:
        data = read_json(path.read_text(encoding="utf-8"))
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
        for name, (kind, shape) in _header(path).items():
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
    """The tensors of a safetensors file, and its metadata.

    Raises:
        CheckpointError: it cannot be read.
    """
    try:
        with safe_open(path, framework="pt") as file:
            names = list(file.keys())
            return {name: file.get_tensor(name) for name in names}, file.metadata() or {}
    except (SafetensorError, OSError, UnicodeDecodeError, RuntimeError) as error:
        raise _unreadable(path, error) from None


def _header(path: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Type and shape of every tensor in a file, by name; the numbers are not read."""
    try:
        with safe_open(path, framework="pt") as file:
            names = list(file.keys())
            parts = {name: file.get_slice(name) for name in names}
            return {name: (x.get_dtype(), tuple(x.get_shape())) for name, x in parts.items()}
    except (SafetensorError, OSError, UnicodeDecodeError, RuntimeError) as error:
        raise _unreadable(path, error) from None


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
