"""Checks of saved models, whose errors name the file and the cause.

A saved model is ``config.json`` and safetensors, so loading one runs no code of the folder.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from recollect.report.files import MAX_FILE_BYTES, check_regular, read_regular
from recollect.serialization import read_json

__all__ = [
    "CheckpointError",
    "check_attributes",
    "check_config",
    "check_finite",
    "check_json",
    "check_model_folder",
    "check_names",
    "check_regular_files",
    "check_weights",
    "read_header",
    "read_tensors",
    "weight_files",
]

INDEX_FILE, WEIGHTS_FILE = "model.safetensors.index.json", "model.safetensors"
FLOAT_DTYPES = ("F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2")
RECOPY_HINT = "copy it again, or take another checkpoint"


class CheckpointError(ValueError):
    """A saved model, state or configuration that cannot be read or written.

    Examples:
        >>> try:
        ...     rc.lm.RecollectForCausalLM.from_pretrained("./nowhere")
        ... except rc.lm.CheckpointError as error:
        ...     print(error)
        there is no folder ./nowhere: name that of a saved model
    """


def check_model_folder(folder: Path, dtypes: Collection[str] | None = None) -> dict[str, Any]:
    """Check the files of a saved model except the values of its weights; return its configuration.

    ``dtypes`` are the allowed types of weights that are not quantized.
    """
    check_regular_files(folder)
    config = check_config(folder / "config.json")
    if (folder / "generation_config.json").exists():
        check_config(folder / "generation_config.json")
    is_quantized = config.get("quantization_config") is not None
    names: set[str] = set()
    for path in weight_files(folder):
        for name, (dtype, _) in read_header(path).items():
            if name in names:
                raise CheckpointError(
                    f"{folder} has the weight {name!r} in two files: {RECOPY_HINT}"
                )
            names.add(name)
            if dtypes and dtype not in dtypes and not is_quantized:
                advice = "save it in one of them" if dtype in FLOAT_DTYPES else RECOPY_HINT
                raise CheckpointError(
                    f"{path}: the weight {name!r} has type {dtype}, which is none of "
                    f"{', '.join(dtypes)}: {advice}"
                )
    return config


def check_regular_files(folder: Path) -> None:
    """Check that a folder has only regular files and folders, before other code opens them."""
    for path in sorted(folder.iterdir()):
        if path.exists() and not path.is_dir():
            _check_regular(path)


def _check_regular(path: Path) -> None:
    try:
        check_regular(path)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None


def check_json(path: Path, *, limit: int | None = MAX_FILE_BYTES) -> dict[str, Any]:
    """Return the mapping in a JSON file of at most ``limit`` bytes."""
    try:
        data = read_json(read_regular(path, limit=limit))
    except FileNotFoundError:
        raise CheckpointError(f"{path.parent} is not a checkpoint: it has no {path.name}") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise CheckpointError(f"{path} is not UTF-8 text: {RECOPY_HINT}") from None
    except ValueError as error:
        raise CheckpointError(f"{path} is not JSON ({error}): {RECOPY_HINT}") from None
    if not isinstance(data, dict):
        kind = type(data).__name__
        raise CheckpointError(f"{path} must hold a mapping, not a {kind}: {RECOPY_HINT}")
    return data


def check_config(path: Path) -> dict[str, Any]:
    """Return the mapping in a JSON file whose keys become attributes."""
    data = check_json(path)
    check_attributes(str(path), data)
    return data


def check_attributes(path: str, data: Iterable[str]) -> None:
    """Check that no key is an attribute that Python reserves, such as ``__class__``."""
    for name in data:
        if name.startswith("__"):
            raise CheckpointError(
                f"{path} has the key {name[:60]!r}, which is not an option: {RECOPY_HINT}"
            )


def check_weights(path: Path, model: nn.Module) -> None:
    """Check that a safetensors file has the names and shapes of a model's parameters."""
    saved = {name: shape for name, (_, shape) in read_header(path).items()}
    shapes = {name: tuple(x.shape) for name, x in model.state_dict(keep_vars=True).items()}
    unique = {name for name, _ in model.named_parameters()}  # a file leaves out tied weights
    tied = {name for name, _ in model.named_parameters(remove_duplicate=False)} - unique
    check_names(
        str(path),
        missing=shapes.keys() - saved.keys() - tied,
        unexpected=saved.keys() - shapes.keys(),
        mismatched=[(n, saved[n], x) for n, x in shapes.items() if saved.get(n, x) != x],
    )


def check_names(
    path: str,
    *,
    missing: Collection[str],
    unexpected: Collection[str],
    mismatched: Collection[tuple[str, Iterable[int], Iterable[int]]],
) -> None:
    """Check that there are no missing or unexpected weights, nor weights of another shape.

    Items of ``mismatched`` are a name, its shape in the file and its shape in the model.
    """
    for names, verb in ((missing, "lacks"), (unexpected, "has")):
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            reason = "which config.json requires" if verb == "lacks" else "unknown to config.json"
            raise CheckpointError(
                f"{path} {verb} the weight {min(names)!r}{more}, {reason}: it does not match "
                "config.json"
            )
    for name, saved, expected in mismatched:
        raise CheckpointError(
            f"{path}: the weight {name!r} has shape {[*saved]}, and config.json requires "
            f"{[*expected]}"
        )


def check_finite(path: str, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Check that no value is NaN or infinite."""
    for name, x in tensors:
        if x.device.type == "meta" or not x.is_floating_point():
            continue
        # A sum is finite unless a value is not, or it overflows. Only then a copy is made.
        if not bool(x.detach().float().sum().isfinite()) and not bool(x.float().isfinite().all()):
            raise CheckpointError(
                f"{path}: the weight {name!r} holds NaN or infinity, so this model's training had "
                "failed: take an earlier checkpoint (safetensors.torch.load_file reads this one)"
            )


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors of a safetensors file, and its metadata."""
    read_header(path)
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in [*file.keys()]}, file.metadata() or {}
    except (SafetensorError, OSError, UnicodeDecodeError, RuntimeError) as error:
        raise _unreadable_error(path, error) from None


def read_header(path: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return type and shape of each tensor in a file by name.

    A name that occurs twice, of which safetensors reads the last tensor, raises an error.
    """
    if path.exists():
        _check_regular(path)
    try:
        with safe_open(path, framework="pt") as file:
            slices = {name: file.get_slice(name) for name in [*file.keys()]}
            entries = {name: (x.get_dtype(), tuple(x.get_shape())) for name, x in slices.items()}
        with path.open("rb") as raw:
            read_json(raw.read(int.from_bytes(raw.read(8), "little")))
    except (SafetensorError, OSError, ValueError, RuntimeError) as error:
        raise _unreadable_error(path, error) from None
    return entries


def _unreadable_error(path: Path, error: Exception) -> CheckpointError:
    if not path.exists():
        return CheckpointError(f"there is no file {path}")
    reason = " ".join(str(getattr(error, "strerror", None) or error).split())
    reason = reason.removeprefix("Error while deserializing header: ")
    reason = reason.partition(", expected one of")[0]
    return CheckpointError(
        f"{path} is not a complete safetensors file ({reason}): it was cut short or altered; "
        f"{RECOPY_HINT}"
    )


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files of a saved model."""
    if (folder / WEIGHTS_FILE).exists():
        return [folder / WEIGHTS_FILE]
    if not (folder / INDEX_FILE).exists():
        if next(folder.glob("model-*-of-*.safetensors"), None) is not None:
            raise CheckpointError(
                f"{folder} has shards and no {INDEX_FILE}, which names the shard of each weight: "
                f"{RECOPY_HINT}"
            )
        raise CheckpointError(
            f"{folder} has no {WEIGHTS_FILE}: save the model as safetensors, by save_pretrained"
        )
    index = check_json(folder / INDEX_FILE).get("weight_map")
    names = list(index.values()) if isinstance(index, Mapping) else []
    if not names or not all(isinstance(name, str) and Path(name).name == name for name in names):
        raise CheckpointError(
            f"{folder / INDEX_FILE} must map weights to files of this folder: {RECOPY_HINT}"
        )
    return [folder / name for name in dict.fromkeys(names)]
