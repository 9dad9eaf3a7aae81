"""A manifest beside saved files: the size and SHA-256 of each, so that a change is seen.

Formats notice what was cut short; weights that were zeroed or flipped, or a number that was edited,
they do not.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

from recollect.lm.model.checkpoint import CheckpointError, check_json
from recollect.lm.publishing.card import CARD
from recollect.report.files import check_regular

__all__ = ["MANIFEST", "check_manifest", "of_model", "write_manifest"]

MANIFEST = "manifest.json"
SCHEMA = 1


def of_model(name: str) -> bool:
    """Whether a file holds a model's weights or configuration."""
    return name in ("config.json", "generation_config.json") or (
        name.startswith("model") and name.endswith((".safetensors", ".safetensors.index.json"))
    )


def write_manifest(folder: Path, which: Callable[[str], bool] = lambda name: True) -> None:
    """Write ``manifest.json`` for files of a folder and those below it.

    Args:
        folder: of the files.
        which: asked by a file's name, with its folder below this one.

    Raises:
        OSError: a file cannot be read, or the manifest not be written.
    """
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    files = {
        name: {"bytes": (folder / name).stat().st_size, "sha256": _digest(folder / name)}
        for name in names
        if name not in (MANIFEST, CARD) and which(name)  # a card is for people, and edited
    }
    text = json.dumps({"schema": SCHEMA, "files": files}, indent=2)
    (folder / MANIFEST).write_text(text + "\n", encoding="utf-8")


def check_manifest(
    folder: Path, which: Callable[[str], bool] = lambda name: True, *, advice: str
) -> int:
    """That files are as they were when their manifest was written.

    Args:
        folder: with a ``manifest.json``.
        which: the files to look at, as in `write_manifest`.
        advice: what to do about one that is not.

    Returns:
        How many files there are.

    Raises:
        CheckpointError: a file that is gone, was cut short or altered, or cannot be read; no
            manifest, or one that says nothing.
    """
    written = check_json(folder / MANIFEST)
    files = written.get("files")
    if written.get("schema") != SCHEMA or not isinstance(files, dict) or not files:
        raise CheckpointError(f"{folder / MANIFEST} lists no files that can be read: {advice}")
    names = [name for name in files if which(name)]
    for name in names:
        path, entry = folder / name, files[name]
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise CheckpointError(f"{folder / MANIFEST} names {name!r}, which is outside: {advice}")
        try:
            size = path.stat().st_size
            known = isinstance(entry, dict) and entry.get("bytes") == size
            same = known and entry["sha256"] == _digest(path)
        except FileNotFoundError:
            said = f"{folder} lacks {name}, which it was saved with: {advice}"
            raise CheckpointError(said) from None
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
        except KeyError:
            same = False
        if not same:
            raise CheckpointError(f"{path} was cut short or altered since it was saved: {advice}")
    return len(names)


def _digest(path: Path) -> str:
    check_regular(path)
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
