"""Tests cannot hang, and do not depend on signals that the shell ignores."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = """
import os, signal, time
import pytest

def test_interrupts_itself():
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(1e6)

def test_waits():
    time.sleep(1e6)

@pytest.mark.slow
def test_is_slow():
    time.sleep(0.8)

def test_hears_nothing():
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})
    time.sleep(1e6)
"""
LIMITS = ("-o", "timeout=0.5", "-o", "faulthandler_timeout=2")


@pytest.mark.slow
def test_hanging_tests_fail_when_interrupts_are_ignored(tmp_path: Path) -> None:
    """With the project's settings and shorter limits, in a process that ignores interrupts."""
    folder = Path(__file__).parent
    shutil.copy(folder / "conftest.py", tmp_path)
    (tmp_path / "test_endless.py").write_text(TESTS)
    settings = ("-c", str(folder.parent / "pyproject.toml"), "--rootdir", str(tmp_path))
    ignoring = ("sh", "-c", 'trap "" INT; exec "$@"', "sh")
    result = subprocess.run(
        [*ignoring, sys.executable, "-m", "pytest", "-v", *settings, *LIMITS, str(tmp_path)],
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert result.returncode == 1
    assert "test_interrupts_itself PASSED" in result.stdout
    assert "test_waits FAILED" in result.stdout
    assert "test_is_slow PASSED" in result.stdout
    assert "test_hears_nothing" in result.stdout
    assert "in test_hears_nothing" in result.stderr  # the stack of the hanging test
