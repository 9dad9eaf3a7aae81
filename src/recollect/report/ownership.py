"""A run owns its folder: a second one that would write there ends before it has begun.

The owner holds a lock of the operating system on ``.run.lock``, which ends with the process however
it ends, and writes there who it is: host, process, and when that process started. Where a file
system knows no such locks, that record decides: a lock is stale when its process is gone, or when
another one has its number now.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from os import PathLike
from pathlib import Path
from typing import Any

__all__ = ["LOCK", "owned_folder", "process_start"]

LOCK = ".run.lock"
"""Name of the lock in a folder that is being written to; it is removed when the run ends."""

_SOON = 10.0  # seconds within which who makes a lock writes its record
_UNKNOWN = (errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK)
_mine: dict[Path, tuple[int, int]] = {}  # folder: thread that owns it, how often it entered
_guard = threading.Lock()


@contextlib.contextmanager
def owned_folder(folder: str | PathLike[str]) -> Iterator[None]:
    """Own a folder while something is written there; the thread that owns it may enter again.

    Args:
        folder: made where it is missing.

    Raises:
        ValueError: another run owns it, with its process and since when.
        OSError: the folder cannot be written.
    """
    place = Path(folder)
    place.mkdir(parents=True, exist_ok=True)
    key, me = place.resolve(), threading.get_ident()
    with _guard:
        thread, times = _mine.get(key, (me, 0))
        handle = None if times else _locked(place / LOCK)
        if thread != me:
            raise ValueError(_taken(place, _record()))
        _mine[key] = me, times + 1
    try:
        yield
    finally:
        with _guard:
            thread, times = _mine.pop(key)
            if times > 1:
                _mine[key] = thread, times - 1
            if handle is not None:
                _release(place / LOCK, handle)


def process_start(pid: int) -> str | None:
    """When a process of this machine started, in words that no later one of its number shares.

    Returns:
        ``None`` where there is no such process, or a zombie is all that is left of it.
    """
    stat = Path(f"/proc/{pid}/stat")
    if Path("/proc/self/stat").exists():
        try:
            # The name, in parentheses, may hold anything; the fields after it are numbers.
            fields = stat.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        except OSError:
            return None
        if fields[0] in "ZX":
            return None
        boot = Path("/proc/sys/kernel/random/boot_id")
        epoch = boot.read_text("utf-8").strip() if boot.exists() else ""
        return f"{fields[19]} ticks after boot {epoch}".strip()
    found = subprocess.run(
        ["ps", "-o", "lstart=", "-p", str(pid)], capture_output=True, text=True, check=False
    )
    return found.stdout.strip() or None


def _record() -> dict[str, Any]:
    """Who this process is."""
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "process_start": process_start(os.getpid()),
        "since": time.strftime("%Y-%m-%d %H:%M:%S"),
    }


def _locked(path: Path) -> int:
    """The lock, open; the file says who holds it."""
    while True:
        handle, new = _opened(path)
        try:
            known = _flock(path, handle)
            if not _is(path, handle):  # its owner ended and took the file along
                os.close(handle)
                continue
            owner = _read(handle)
            if _lives(owner, locks_known=known) or not (known or new or _rests(owner, handle)):
                raise ValueError(_taken(path.parent, owner))
            if not known and not new:  # only one of those who find it stale may have it
                path.unlink(missing_ok=True)
                os.close(handle)
                continue
            data = json.dumps(_record()).encode()
            os.ftruncate(handle, 0)
            os.pwrite(handle, data, 0)
            return handle
        except BaseException:
            with contextlib.suppress(OSError):
                os.close(handle)
            raise


def _opened(path: Path) -> tuple[int, bool]:
    """The file, open, and whether it was made just now."""
    flags = os.O_RDWR | getattr(os, "O_CLOEXEC", 0)
    with contextlib.suppress(FileExistsError):
        return os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o666), True
    return os.open(path, flags | os.O_CREAT, 0o666), False


def _rests(owner: dict[str, Any], handle: int) -> bool:
    """Whether a record stands, or none has come for a while: its writer died before it wrote."""
    return bool(owner) or time.time() - os.fstat(handle).st_mtime > _SOON


def _flock(path: Path, handle: int) -> bool:
    """Take the operating system's lock; False where there are none.

    Raises:
        ValueError: another process holds it.
    """
    try:
        import fcntl
    except ImportError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ValueError(_taken(path.parent, _written(handle))) from None
    except OSError as error:
        if error.errno in _UNKNOWN:
            return False
        raise
    return True


def _is(path: Path, handle: int) -> bool:
    """Whether the file of that name is still the one that is open."""
    try:
        return os.path.samestat(path.stat(), os.fstat(handle))
    except FileNotFoundError:
        return False


def _read(handle: int) -> dict[str, Any]:
    """Who a lock says holds it; nothing where that cannot be read."""
    try:
        found = json.loads(os.pread(handle, 4096, 0))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _written(handle: int) -> dict[str, Any]:
    """Who a lock that is held says holds it; its holder may be about to write."""
    for _ in range(20):
        owner = _read(handle)
        if owner:
            return owner
        time.sleep(0.05)
    return {}


def _lives(owner: dict[str, Any], *, locks_known: bool) -> bool:
    """Whether a record is of a process that still runs."""
    pid, start = owner.get("pid"), owner.get("process_start")
    if not isinstance(pid, int) or pid < 1:
        return False
    if owner.get("host") != socket.gethostname():
        # Of another machine only the lock tells, or nothing does.
        return not locks_known
    if pid == os.getpid():
        return False  # a lock of this process is known by `_mine`
    now = process_start(pid)
    return now is not None and now == start


def _taken(folder: Path, owner: dict[str, Any]) -> str:
    who = "another run"
    if owner.get("pid") is not None:
        who = f"another run (process {owner['pid']} on {owner.get('host')}"
        who += f", since {owner['since']})" if owner.get("since") else ")"
    return (
        f"{folder} belongs to {who}: wait until it ends, name another folder, or, if no such "
        f"process runs, delete {folder / LOCK}"
    )


def _release(path: Path, handle: int) -> None:
    """Give the lock back; its folder may be gone."""
    with contextlib.suppress(OSError):
        if _is(path, handle):
            path.unlink()
    with contextlib.suppress(OSError):
        os.close(handle)
