"""What is made of compute-sanitizer's answers, with a program in its place that gives them."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.gpu.sanitizer import CHECKS, checked, find_tool

from recollect.benchmarks.gpu.stages import STAGES

SANITIZER = next(stage for stage in STAGES if stage.name == "sanitizer")
HELP = 'case "$*" in *--help*) echo "--kernel-regex {kns=}"; exit 0;; esac\n'
CLEAN = 'echo "========= ERROR SUMMARY: 0 errors"; exit 0'


def tool(folder: Path, script: str) -> str:
    path = folder / "compute-sanitizer"
    path.write_text(f"#!/bin/sh\n{HELP}{script}\n", encoding="utf-8")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(
    ("script", "outcome", "good"),
    [
        (CLEAN, "clean", True),
        ('echo "========= ERROR SUMMARY: 2 errors"; exit 86', "found something", False),
        ("exit 0", "did not run", True),  # it has looked at nothing
        ('echo "Device not supported"; exit 1', "did not run", True),
        ("sleep 30", "took too long", True),
    ],
)
def test_an_answer(script: str, outcome: str, good: bool, tmp_path: Path) -> None:
    one = checked(tool(tmp_path, script), "memcheck", 1.0)
    assert one["outcome"] == outcome
    said, sound = SANITIZER.read({"tool": "x", "checks": [one]})
    assert (said, sound) == (f"memcheck {outcome}", good)


def test_only_the_walks_are_looked_at(tmp_path: Path) -> None:
    one = checked(tool(tmp_path, 'echo "$*"; exit 1'), "racecheck", 5.0)
    for words in ("--tool racecheck", "--kernel-regex kns=fused_walk", "tests.gpu.sanitizer once"):
        assert words in one["tail"]
    assert len(set(CHECKS)) == 4


def test_it_is_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    monkeypatch.delenv("CUDA_PATH", raising=False)
    home = tmp_path / "cuda"
    (home / "bin").mkdir(parents=True)
    made = tool(home / "bin", CLEAN)
    monkeypatch.setenv("CUDA_HOME", str(home))
    assert find_tool() == made
    said, good = SANITIZER.read({"tool": None, "checks": []})
    assert good and said.startswith("not run: compute-sanitizer was not found")
