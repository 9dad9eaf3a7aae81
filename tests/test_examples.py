"""Every example runs at smoke size in a separate process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
SLOW = ("continue_training", "pipeline", "swap_attention", "train_on_your_text")
"""The slowest examples."""

# The import of torch and transformers takes longer than most examples, so it runs once. Every
# example runs in a copy of that process, so registrations of one do not affect another.
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


@pytest.mark.parametrize(
    "is_slow", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["short", "long"]
)
def test_every_example(is_slow: bool, tmp_path: Path) -> None:
    examples = [path for path in EXAMPLES if (path.stem in SLOW) == is_slow]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    environment["PYTHONPATH"] = str(ROOT / "src")
    run = subprocess.run(
        [sys.executable, "-c", RUN_EACH, *map(str, examples)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    ran = [line.removeprefix("ran ") for line in run.stdout.splitlines() if line.startswith("ran ")]
    assert ran == [path.name for path in examples]
