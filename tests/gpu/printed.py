"""What a module of this folder prints: JSON, a line each, from a process of its own."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

__all__ = ["interprets", "printed"]


@functools.cache
def interprets() -> bool:
    """Whether there is a Triton whose interpreter runs kernels: 3.5 does not end."""
    if importlib.util.find_spec("triton") is None:
        return False
    return tuple(map(int, importlib.metadata.version("triton").split(".")[:2])) >= (3, 6)


def printed(module: str, *arguments: str) -> list[Any]:
    """Every line that it prints, read.

    Args:
        module: of `tests.gpu`.
        arguments: of its command line.
    """
    done = subprocess.run(
        [sys.executable, "-m", f"tests.gpu.{module}", *arguments],
        cwd=Path(__file__).parents[2],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines()]
