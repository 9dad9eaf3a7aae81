"""Writing a file so that a reader sees the old one or the new one, never half of either."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path


def write_atomic(path: str | os.PathLike[str], data: str | bytes) -> Path:
    """Write a file under its name only once it is whole and on disk.

    Args:
        path: where to; missing folders are made.
        data: the content; text is written as UTF-8.

    Returns:
        The path.

    Raises:
        OSError: if the folder cannot be written or the disk is full, with the path; the old file
            stays as it was.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    content = data.encode("utf-8") if isinstance(data, str) else data
    # Beside the target, because a rename is atomic only within one file system.
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".partial")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        # mkstemp makes files that only their owner may read; a report is meant to be shared.
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(name, 0o666 & ~mask)
        os.replace(name, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            os.unlink(name)
        if isinstance(error, OSError) and error.filename in (None, name):
            error.filename = str(path)  # a full disk says no name, and the temporary one is gone
        raise
    return path


def free_name(path: Path) -> Path:
    """The first of ``results-1.json``, ``results-2.json``, … that is free beside ``results.json``.

    Args:
        path: a file whose name is taken.
    """
    number = 1
    while (free := path.with_stem(f"{path.stem}-{number}")).exists():
        number += 1
    return free


def set_aside(path: Path, data: str) -> Path | None:
    """Copy the file that stands where another is about to be written to the next free name.

    Args:
        path: where to. data: what will be written there.

    Returns:
        Where the copy is, ``results-1.json`` for ``results.json``; ``None`` if there
        was none, or the same.
    """
    if not path.is_file() or path.read_bytes() == data.encode("utf-8"):
        return None
    kept = free_name(path)
    shutil.copy2(path, kept)  # a copy: if nothing more can be written, the earlier one still stands
    return kept


def rescue(files: Mapping[str, str], *, wanted: Path, error: OSError) -> str:
    """Keep elsewhere what could not be written where it belongs, and say so.

    Args:
        files: contents by name.
        wanted: the folder where they belong.
        error: why they are not there.

    Returns:
        A sentence to raise: where they are now, or that they are nowhere.
    """
    reason = error.strerror or str(error)
    said = f"{wanted} cannot be written to ({reason})"
    try:
        place = Path(tempfile.mkdtemp(prefix="recollect-"))
        for name, text in files.items():
            write_atomic(place / name, text)
    except OSError as second:
        return f"{said}, and neither can {tempfile.gettempdir()} ({second.strerror})"
    return f"{said}: what was measured is in {place}, to be copied there"
