"""Atomic writes, and checks before a file is read."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

__all__ = [
    "MAX_FILE_BYTES",
    "backup_existing",
    "check_regular",
    "next_free_path",
    "read_regular",
    "remove_new_folders",
    "save_to_temp_on_error",
    "write_atomic",
]

MAX_FILE_BYTES = 64 * 2**20
"""Largest size in bytes of a JSON or TOML file that is read into memory."""


def check_regular(path: str | os.PathLike[str], *, limit: int | None = None) -> None:
    """Check that a file is regular and not too large, before it is opened.

    Opening a pipe would wait for a writer, and a device can fill the memory.

    Raises:
        OSError: There is no file, or it is a folder, a pipe, a socket, a device, or too large.
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


def read_regular(path: str | os.PathLike[str], *, limit: int | None = MAX_FILE_BYTES) -> str:
    """Return the text of a regular UTF-8 file, checked by `check_regular`."""
    check_regular(path, limit=limit)
    return Path(path).read_text(encoding="utf-8")


@contextlib.contextmanager
def remove_new_folders(path: Path) -> Iterator[None]:
    """Remove the folders of a path that are new and empty after an error."""
    new: list[Path] = []
    with contextlib.suppress(OSError):  # names that no folder can have
        new = [folder for folder in (path, *path.parents) if not folder.exists()]
    try:
        yield
    except BaseException:
        for folder in new:
            with contextlib.suppress(OSError):  # it is missing or not empty
                folder.rmdir()
        raise


def write_atomic(path: str | os.PathLike[str], data: str | bytes) -> Path:
    """Write a file so that readers see the old file or the complete new one.

    Args:
        path: Path of the file; missing folders are created.
        data: Content; text is written as UTF-8.

    Raises:
        OSError: The folder cannot be written or the disk is full. The old file is unchanged.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    content = data.encode("utf-8") if isinstance(data, str) else data
    # In the same folder, because a rename is atomic only within one file system.
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".partial")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        # mkstemp creates files that only their owner may read, and other users read a report.
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(name, 0o666 & ~mask)
        os.replace(name, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            os.unlink(name)
        if isinstance(error, OSError) and error.filename in (None, name):
            error.filename = str(path)  # the temporary file no longer exists
        raise
    return path


def next_free_path(path: Path) -> Path:
    """Return the first free path of ``results-1.json``, ``results-2.json``, … for a path."""
    number = 1
    while (free := path.with_stem(f"{path.stem}-{number}")).exists():
        number += 1
    return free


def backup_existing(path: Path, data: str) -> Path | None:
    """Copy the file at a path to the next free path, unless it contains the data already.

    Return the path of the copy, or ``None``.
    """
    if not path.is_file() or path.read_bytes() == data.encode("utf-8"):
        return None
    backup = next_free_path(path)
    shutil.copy2(path, backup)  # a copy: if the next write fails, the earlier file is unchanged
    return backup


def save_to_temp_on_error(files: Mapping[str, str], *, target: Path, error: OSError) -> str:
    """Write files that could not be written to their folder to a temporary folder.

    Return a sentence for an error message: the location of the files, or that there is none.
    """
    reason = f"{target} cannot be written to ({error.strerror or error})"
    try:
        folder = Path(tempfile.mkdtemp(prefix="recollect-"))
        for name, text in files.items():
            write_atomic(folder / name, text)
    except OSError as second:
        return f"{reason}, and neither can {tempfile.gettempdir()} ({second.strerror})"
    return f"{reason}: what was measured is in {folder}, to be copied there"
