"""A manifest with the size and SHA-256 of each file in a folder.

File formats detect truncation but not changed values; checksums detect both.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from recollect.lm.model.checkpoint import CheckpointError, check_json
from recollect.lm.publishing.card import CARD
from recollect.report.files import check_regular

__all__ = ["MANIFEST", "check_manifest", "is_model_file", "write_manifest"]

MANIFEST = "manifest.json"
SCHEMA = 1


def is_model_file(name: str) -> bool:
    """Whether a file holds a model's weights or configuration."""
    return name in ("config.json", "generation_config.json") or (
        name.startswith("model") and name.endswith((".safetensors", ".safetensors.index.json"))
    )


def write_manifest(folder: Path, include: Callable[[str], bool] = lambda name: True) -> None:
    """Write ``manifest.json`` for the files below a folder whose relative path is included."""
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    files = {
        name: _size_and_checksum(folder / name)
        for name in names
        if name not in (MANIFEST, CARD) and include(name)  # users edit the card
    }
    text = json.dumps({"schema": SCHEMA, "files": files}, indent=2)
    (folder / MANIFEST).write_text(text + "\n", encoding="utf-8")


def check_manifest(
    folder: Path, include: Callable[[str], bool] = lambda name: True, *, advice: str
) -> int:
    """Check that included files have the size and checksum in the manifest; return their number.

    ``advice`` ends the message of a `CheckpointError`.
    """
    manifest = check_json(folder / MANIFEST)
    files = manifest.get("files")
    if manifest.get("schema") != SCHEMA or not isinstance(files, dict) or not files:
        raise CheckpointError(f"{folder / MANIFEST} lists no files that can be read: {advice}")
    names = [name for name in files if include(name)]
    for name in names:
        path = folder / name
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise CheckpointError(f"{folder / MANIFEST} names {name!r}, which is outside: {advice}")
        try:
            is_same = files[name] == _size_and_checksum(path)
        except FileNotFoundError:
            raise CheckpointError(
                f"{folder} lacks {name}, which it was saved with: {advice}"
            ) from None
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
        if not is_same:
            raise CheckpointError(f"{path} was cut short or altered since it was saved: {advice}")
    return len(names)


def _size_and_checksum(path: Path) -> dict[str, Any]:
    check_regular(path)
    with path.open("rb") as file:
        checksum = hashlib.file_digest(file, "sha256").hexdigest()
    return {"bytes": path.stat().st_size, "sha256": checksum}
