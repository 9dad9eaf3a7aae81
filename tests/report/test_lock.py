"""Two runs never write to one folder, and the lock of a dead process is ignored."""

from __future__ import annotations

import datetime
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from recollect.report import lock
from recollect.report.lock import LOCK_NAME, folder_lock

# Only this module, because the import of torch takes seconds.
HOLDER = f"""
import sys
from importlib.util import module_from_spec, spec_from_file_location

spec = spec_from_file_location("lock", {lock.__file__!r})
module = module_from_spec(spec)
spec.loader.exec_module(module)
with module.folder_lock(sys.argv[1]):
    print("locked", flush=True)
    sys.stdin.read()
"""


@contextmanager
def locked(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Hold the lock in another process until the block ends."""
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert holder.stdout is not None and holder.stdout.readline() == "locked\n"
        yield holder
    finally:
        holder.communicate()


def test_a_second_process_is_refused_with_process_host_and_date(tmp_path: Path) -> None:
    with locked(tmp_path) as holder:
        initial = (tmp_path / LOCK_NAME).read_bytes()
        with (
            pytest.raises(ValueError, match="belongs to another run") as caught,
            folder_lock(tmp_path),
        ):
            pass
        message = str(caught.value)
        today = datetime.date.today().isoformat()[:8]
        assert f"process {holder.pid} on {socket.gethostname()}, since {today}" in message
        assert "\n" not in message and len(message) < 400
        assert (tmp_path / LOCK_NAME).read_bytes() == initial
    assert not (tmp_path / LOCK_NAME).exists()
    with folder_lock(tmp_path):
        pass


def test_the_lock_of_a_killed_process_is_free(tmp_path: Path) -> None:
    with locked(tmp_path) as holder:
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        assert str(holder.pid) in (tmp_path / LOCK_NAME).read_text()
        with folder_lock(tmp_path):
            assert (tmp_path / LOCK_NAME).read_text().split()[0] == str(os.getpid())
    assert not (tmp_path / LOCK_NAME).exists()


def test_a_lock_file_of_another_host_or_with_other_text_is_free(tmp_path: Path) -> None:
    for text in ("1\nelsewhere\n", '{"host": "elsewhere", "pid": 1}', ""):
        (tmp_path / LOCK_NAME).write_text(text)
        with folder_lock(tmp_path):
            assert (tmp_path / LOCK_NAME).read_text().split()[0] == str(os.getpid())


def test_a_thread_enters_again_and_another_thread_does_not(tmp_path: Path) -> None:
    refused: list[str] = []

    def other() -> None:
        try:
            with folder_lock(tmp_path / "." / ""):
                pass
        except ValueError as error:
            refused.append(str(error))

    with folder_lock(tmp_path):
        with folder_lock(tmp_path):
            pass
        assert (tmp_path / LOCK_NAME).exists()
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert len(refused) == 1 and f"process {os.getpid()}" in refused[0]
    assert not (tmp_path / LOCK_NAME).exists()


def test_an_error_inside_releases_the_lock(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), folder_lock(tmp_path):
        raise RuntimeError
    assert not (tmp_path / LOCK_NAME).exists()
    with locked(tmp_path):
        pass


def test_deleted_folder_is_released_without_an_error(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with folder_lock(folder):
        (folder / LOCK_NAME).unlink()
        folder.rmdir()
    with folder_lock(folder):
        assert (folder / LOCK_NAME).exists()
