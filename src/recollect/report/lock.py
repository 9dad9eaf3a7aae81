"""A lock on the folder of a run, so that two runs never write to one folder.

The operating system releases the lock when the process ends, however it ends.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Iterator
from os import PathLike
from pathlib import Path

from filelock import FileLock, Timeout

__all__ = ["LOCK_NAME", "folder_lock"]

LOCK_NAME = ".run.lock"
"""Name of the lock in a folder. It contains the process and the host, and is removed at the end."""


@contextlib.contextmanager
def folder_lock(folder: str | PathLike[str]) -> Iterator[None]:
    """Lock a folder for writing; a thread may enter the lock that it holds again.

    Args:
        folder: Folder to lock; it is created if it is missing.

    Raises:
        ValueError: Another process or thread holds the lock. The message contains its process
            number, its host and the date.
        OSError: The folder cannot be written.
    """
    Path(folder).mkdir(parents=True, exist_ok=True)
    path = Path(folder).resolve() / LOCK_NAME
    lock = FileLock(path, timeout=0, is_singleton=True)
    try:
        lock.acquire()
    except Timeout:
        raise ValueError(_message(Path(folder))) from None
    try:
        if lock.lock_counter == 1:
            _write_holder(path)
        yield
    finally:
        if lock.lock_counter == 1:
            # Before the release: a process that waits for this file then sees that it is gone.
            with contextlib.suppress(OSError):
                path.unlink()
        lock.release()


def _write_holder(path: Path) -> None:
    """Write process and host, unless filelock did so on a file system without locks."""
    holder = f"{os.getpid()}\n{socket.gethostname()}\n"
    with contextlib.suppress(OSError):
        if not path.read_text(encoding="utf-8").startswith(holder):
            path.write_text(holder, encoding="utf-8")


def _message(folder: Path) -> str:
    path, holder = folder / LOCK_NAME, "another run"
    with contextlib.suppress(OSError, ValueError):
        pid, host, *_ = path.read_text(encoding="utf-8").splitlines()
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(path.stat().st_mtime))
        holder = f"another run (process {pid} on {host}, since {since})"
    return (
        f"{folder} belongs to {holder}: wait until it ends, name another folder, or, if no such "
        f"process runs, delete {path}"
    )
