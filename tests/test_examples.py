"""Every example runs, at smoke size, as a person would run it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))

# Importing torch and transformers takes longer than most examples, so it is done once, and every
# example runs in a copy of that process: nothing that one registers or changes reaches another.
RUN_EACH = """
import os, runpy, sys, transformers, recollect.lm
from pathlib import Path

for path in map(Path, sys.argv[1:]):
    child = os.fork()
    if child == 0:
        Path(path.stem).mkdir()
        os.chdir(path.stem)
        sys.argv = [str(path), "--smoke"]
        runpy.run_path(str(path), run_name="__main__")
        sys.stdout.flush()
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        sys.exit(f"{path.name} failed")
    print("ran", path.name, flush=True)
"""


def test_every_example(tmp_path: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    environment["PYTHONPATH"] = str(ROOT / "src")
    run = subprocess.run(
        [sys.executable, "-c", RUN_EACH, *map(str, EXAMPLES)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    ran = [line.removeprefix("ran ") for line in run.stdout.splitlines() if line.startswith("ran ")]
    assert ran == [path.name for path in EXAMPLES]
