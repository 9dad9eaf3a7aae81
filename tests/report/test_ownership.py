"""A folder that is written to has one owner, and one that is gone owns nothing."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from recollect.report import ownership
from recollect.report.ownership import LOCK, owned_folder, process_start

# The module alone, for torch takes seconds to import.
HOLDER = f"""
import sys
from importlib.util import module_from_spec, spec_from_file_location

spec = spec_from_file_location("ownership", {ownership.__file__!r})
module = module_from_spec(spec)
spec.loader.exec_module(module)
with module.owned_folder(sys.argv[1]):
    print("owned", flush=True)
    sys.stdin.read()
"""


@contextmanager
def held(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that owns the folder until it is told to end."""
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert holder.stdout is not None and holder.stdout.readline() == "owned\n"
        yield holder
    finally:
        holder.communicate()


def test_a_second_process_is_refused_and_told_who_owns_the_folder(tmp_path: Path) -> None:
    with held(tmp_path) as holder:
        with (
            pytest.raises(ValueError, match="belongs to another run") as caught,
            owned_folder(tmp_path),
        ):
            pass
        said = str(caught.value)
        assert f"process {holder.pid} on {socket.gethostname()}" in said
        assert "\n" not in said and len(said) < 400
        assert (tmp_path / LOCK).exists()  # the refused one takes nothing away
    assert not (tmp_path / LOCK).exists()
    with owned_folder(tmp_path):
        pass


def test_what_a_kill_leaves_is_no_owner(tmp_path: Path) -> None:
    with held(tmp_path) as holder:
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        assert json.loads((tmp_path / LOCK).read_text())["pid"] == holder.pid
        with owned_folder(tmp_path):
            assert json.loads((tmp_path / LOCK).read_text())["pid"] == os.getpid()


@pytest.mark.parametrize(
    ("change", "lives"),
    [
        (lambda owner: owner, True),
        pytest.param(
            lambda owner: {**owner, "process_start": "another"}, False, marks=pytest.mark.slow
        ),
        (lambda owner: {**owner, "pid": 2**22 + 1}, False),
        (lambda owner: {**owner, "host": "elsewhere"}, True),
        (lambda owner: {"pid": "x"}, False),
    ],
    ids=["lives", "another process of this number", "gone", "of another machine", "junk"],
)
def test_without_locks_of_the_system_the_record_tells(
    change: Callable[[dict], dict], lives: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with held(tmp_path / "other") as holder:
        owner = json.loads((tmp_path / "other" / LOCK).read_text())
        assert owner["process_start"] == process_start(holder.pid)
        (tmp_path / LOCK).write_text(json.dumps(change(owner)))
        monkeypatch.setattr(ownership, "_flock", lambda path, handle: False)
        if lives:
            with pytest.raises(ValueError, match="belongs to another run"), owned_folder(tmp_path):
                pass
            assert json.loads((tmp_path / LOCK).read_text()) == change(owner)
        else:
            with owned_folder(tmp_path):
                assert json.loads((tmp_path / LOCK).read_text())["pid"] == os.getpid()
            assert not (tmp_path / LOCK).exists()


def test_a_record_of_another_machine_whose_lock_is_free_is_stale(tmp_path: Path) -> None:
    record = {"host": "elsewhere", "pid": 1, "process_start": "then"}
    (tmp_path / LOCK).write_text(json.dumps(record))
    with owned_folder(tmp_path):
        assert json.loads((tmp_path / LOCK).read_text())["pid"] == os.getpid()


def test_its_thread_enters_again_and_another_does_not(tmp_path: Path) -> None:
    refused: list[str] = []

    def other() -> None:
        try:
            with owned_folder(tmp_path / "." / ""):
                pass
        except ValueError as error:
            refused.append(str(error))

    with owned_folder(tmp_path):
        with owned_folder(tmp_path):
            pass
        assert (tmp_path / LOCK).exists()
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert len(refused) == 1 and f"process {os.getpid()}" in refused[0]
    assert not (tmp_path / LOCK).exists()


def test_a_folder_that_vanished_is_given_back_in_silence(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with owned_folder(folder):
        (folder / LOCK).unlink()
        folder.rmdir()
    with owned_folder(folder):
        assert (folder / LOCK).exists()


def test_a_process_is_known_by_its_start() -> None:
    own = process_start(os.getpid())
    assert own is not None and own == process_start(os.getpid())
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert process_start(child.pid) not in (None, own)
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert process_start(child.pid) is None  # a zombie runs nothing
    child.communicate()
    assert process_start(child.pid) is None
