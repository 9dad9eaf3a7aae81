"""Files, written so that a reader sees the old one or the new one, and checked before reading."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
import tempfile
from collections.abc import Mapping
from pathlib import Path

LARGEST = 64 * 2**20
"""Largest size in bytes of a JSON or TOML file that is read whole."""


def check_regular(path: str | os.PathLike[str], *, limit: int | None = None) -> None:
    """Check that a file is regular and not too large, before it is opened.

    Opening a pipe would wait for a writer, and a device can fill the memory.

    Args:
        path: of the file; links are followed.
        limit: largest size in bytes; any size when omitted.

    Raises:
        OSError: no file, a folder, a pipe, a socket, a device, or a file above the limit.
    """
    status = os.stat(path)
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(status.st_mode):
        reason = "it is a pipe, a socket or a device: give a regular file"
        raise OSError(errno.EINVAL, reason, str(path))
    if limit is not None and status.st_size > limit:
        reason = f"it has {status.st_size:,} bytes, and at most {limit:,} are read"
        raise OSError(errno.EFBIG, reason, str(path))


def read_regular(path: str | os.PathLike[str], *, limit: int | None = LARGEST) -> str:
    """Return the text of a regular UTF-8 file.

    Args:
        path: of the file.
        limit: largest size in bytes; any size when ``None``.

    Raises:
        OSError: as `check_regular`, or the file cannot be read.
        UnicodeDecodeError: it is not UTF-8 text.
    """
    check_regular(path, limit=limit)
    return Path(path).read_text(encoding="utf-8")


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
