"""Results of compute-sanitizer, with a script in its place."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.gpu.sanitizer import CHECKS, check_kernels, find_tool

HELP = 'case "$*" in *--help*) echo "--kernel-regex {kns=}"; exit 0;; esac\n'
CLEAN = 'echo "========= ERROR SUMMARY: 0 errors"; exit 0'
ERROR = """========= COMPUTE-SANITIZER
========= Barrier error detected. Divergent thread(s) in block
=========     at fused_walk+0x1a20 in walk.cu:310
=========     by thread (0,0,0) in block (1,0,0)
=========
========= Barrier error detected. Divergent thread(s) in warp
=========     at fused_walk+0x1b00 in walk.cu:320
=========
a line of the program
========= ERROR SUMMARY: 2 errors"""


def tool(folder: Path, script: str) -> str:
    path = folder / "compute-sanitizer"
    path.write_text(f"#!/bin/sh\n{HELP}{script}\n", encoding="utf-8")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(
    ("script", "outcome"),
    [
        (CLEAN, "clean"),
        (f"cat <<'END'\n{ERROR}\nEND\nexit 86", "found something"),
        ("exit 0", "did not run"),  # a tool that ran prints a summary
        ('echo "Device not supported"; exit 1', "did not run"),
        ("sleep 30", "took too long"),
    ],
)
def test_outcomes(script: str, outcome: str, tmp_path: Path) -> None:
    assert check_kernels(tool(tmp_path, script), "memcheck", 1.0)["outcome"] == outcome


def test_the_first_error_is_complete(tmp_path: Path) -> None:
    result = check_kernels(tool(tmp_path, f"cat <<'END'\n{ERROR}\nEND\nexit 86"), "memcheck", 5.0)
    assert result["first_error"].splitlines() == [
        "Barrier error detected. Divergent thread(s) in block",
        "at fused_walk+0x1a20 in walk.cu:310",
        "by thread (0,0,0) in block (1,0,0)",
    ]
    assert result["summary"] == "ERROR SUMMARY: 2 errors"


def test_only_the_fused_kernels_are_checked(tmp_path: Path) -> None:
    result = check_kernels(tool(tmp_path, 'echo "$*"; exit 1'), "synccheck", 5.0)
    for words in ("--tool synccheck", "--kernel-regex kns=fused_walk", "tests.gpu.sanitizer"):
        assert words in result["tail"]
    assert CHECKS == ("memcheck", "synccheck")


def test_the_tool_is_found_in_cuda_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    monkeypatch.delenv("CUDA_PATH", raising=False)
    home = tmp_path / "cuda"
    (home / "bin").mkdir(parents=True)
    path = tool(home / "bin", CLEAN)
    monkeypatch.setenv("CUDA_HOME", str(home))
    assert find_tool() == path
