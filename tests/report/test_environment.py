from __future__ import annotations

import datetime
import json
import re
import subprocess
from pathlib import Path

import pytest
import torch

from recollect.report import describe_environment
from recollect.report import environment as module


def git(folder: Path, *arguments: str) -> None:
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.invalid"]
    subprocess.run(["git", *identity, *arguments], cwd=folder, check=True, capture_output=True)


def test_environment_of_this_machine() -> None:
    environment = describe_environment("cpu")
    assert environment.device
    assert environment.device_type == "cpu"
    assert environment.threads == torch.get_num_threads()
    assert environment.torch == torch.__version__
    assert re.fullmatch(r"unknown|[0-9a-f]{12}(-dirty)?", environment.commit)
    moment = datetime.datetime.fromisoformat(environment.date.replace("Z", "+00:00"))
    age = datetime.datetime.now(datetime.UTC) - moment
    assert abs(age) < datetime.timedelta(minutes=1)
    json.dumps(environment.to_dict())
    assert environment.commit in environment.facts().values()


def test_commit_marks_uncommitted_changes(tmp_path: Path) -> None:
    commit = module._commit
    assert commit(tmp_path) == "unknown"
    git(tmp_path, "init", "-q")
    (tmp_path / "environment.py").write_text("")
    assert commit(tmp_path) == "unknown", "there is no commit yet"
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-q", "-m", "first")
    clean = commit(tmp_path)
    assert re.fullmatch("[0-9a-f]{12}", clean)
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "measured.json").write_text("{}")
    assert commit(tmp_path) == clean, "what is measured changes no measurement"
    (tmp_path / "more.txt").write_text("")
    assert commit(tmp_path) == clean + "-dirty"


def test_a_copy_inside_another_tree_has_no_commit(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q")
    git(tmp_path, "commit", "-q", "--allow-empty", "-m", "theirs")
    (tmp_path / "environment.py").write_text("")
    assert module._commit(tmp_path) == "unknown"


def test_a_machine_without_git_has_no_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert module._commit(tmp_path) == "unknown"
