from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from recollect.report import write_atomic
from recollect.report.files import check_regular, read_regular


def test_writes_create_folders_and_replace_files(tmp_path: Path) -> None:
    path = write_atomic(tmp_path / "a" / "b.txt", "first")
    write_atomic(path, "zweites, größer".encode())
    assert path.read_text("utf-8") == "zweites, größer"
    assert [p.name for p in path.parent.iterdir()] == ["b.txt"]


def test_a_failed_write_leaves_the_old_file_and_no_rubbish(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_atomic(tmp_path / "b.txt", "old")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=rf"No space left on device: '{path}'"):
        write_atomic(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_is_checked_before_it_is_opened(tmp_path: Path) -> None:
    path, pipe, device = tmp_path / "a.txt", tmp_path / "pipe", tmp_path / "device"
    path.write_text("größer")
    os.mkfifo(pipe)
    device.symlink_to("/dev/zero")
    (tmp_path / "link").symlink_to(path)
    assert read_regular(tmp_path / "link", limit=8) == "größer"
    for wrong, reason in (
        (pipe, "it is a pipe"),
        (device, "or a device: give a regular file"),
        (tmp_path, "Is a directory"),
        (tmp_path / "absent", "No such file"),
    ):
        with pytest.raises(OSError, match=reason) as caught:
            check_regular(wrong)
        assert Path(caught.value.filename) == wrong
    with pytest.raises(OSError, match="it has 8 bytes, and at most 7 are read"):
        read_regular(path, limit=7)


def test_mode_follows_the_umask(tmp_path: Path) -> None:
    initial = os.umask(0o022)
    try:
        mode = write_atomic(tmp_path / "b.txt", "x").stat().st_mode
    finally:
        os.umask(initial)
    assert stat.S_IMODE(mode) == 0o644
