"""flash-linear-attention's kernels compiled before anything is timed, several at a time.

Triton tries every configuration of a kernel the first time that it meets a size: some 50 for the
gated delta rule and its gradients, 270 for GLA, a second of one processor each. What is compiled
stays on disk, and what is timed later only has to choose, which it does with the device to itself.

``python -m recollect.benchmarks.gpu.kernels --save FILE`` starts a process per recurrence and size.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from recollect.benchmarks.gpu.peers import OPERATORS, operator_case
from recollect.benchmarks.gpu.speed import FULL
from recollect.benchmarks.gpu.training import RECIPE
from recollect.benchmarks.suites.calls import Shape, recall_case
from recollect.lm.model.paper_sizes import PAPER_SIZES
from recollect.report.files import write_atomic

__all__ = ["compile_all"]


def _sizes() -> list[tuple[str, int, int]]:
    """Recurrence, heads and channels of all that is timed."""
    model = PAPER_SIZES["170M"]
    timed = [(name, FULL.heads, FULL.size) for name in OPERATORS]
    return [*timed, (RECIPE, model.heads, model.width // model.heads)]


def compile_all(seconds: float, device: str = "cuda") -> list[dict[str, Any]]:
    """Compile, in a process each, all at once.

    Args:
        seconds: after which those that have not ended are.
        device: where.

    Returns:
        For each its ``name``, ``seconds``, and ``why`` where it failed, else ``None``.
    """
    began, running = time.monotonic(), list[tuple[str, subprocess.Popen[str]]]()
    for name, heads, size in _sizes():
        command = [sys.executable, "-m", "recollect.benchmarks.gpu.kernels", "--device", device]
        process = subprocess.Popen(
            [*command, "--one", name, str(heads), str(size)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        running.append((f"{name}, {heads} heads of {size}", process))
    found: list[dict[str, Any]] = []
    for name, process in running:
        left = max(0.1, began + seconds - time.monotonic())
        try:
            _, said = process.communicate(timeout=left)
            why = said.strip()[-500:] if process.returncode else None
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            why = "its time was over"
        found.append({"name": name, "seconds": time.monotonic() - began, "why": why})
    return found


def _one(name: str, heads: int, size: int, device: str) -> None:
    """Forward and backward of an operator, by itself and as our own layers call it."""
    shape = Shape(B=1, T=2048, H=heads, K=size, V=size, dtype=torch.bfloat16, device=device)
    for backward in (False, True):
        recall_case(name, name, shape, backward=backward, engine="fla").make()()
        operator_case(name, name, shape, backward=backward).make()()


def main(arguments: Sequence[str] | None = None) -> None:
    """Compile all, or one.

    Args:
        arguments: of the command line.
    """
    parser = argparse.ArgumentParser(prog="python -m recollect.benchmarks.gpu.kernels")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seconds", type=float, default=500.0)
    parser.add_argument("--one", nargs=3)
    parser.add_argument("--save", type=Path)
    given = parser.parse_args(arguments)
    if given.one is not None:
        name, heads, size = given.one
        _one(name, int(heads), int(size), given.device)
        return
    found = {"compiled": compile_all(given.seconds, given.device)}
    text = json.dumps(found, indent=2)
    if given.save is not None:
        write_atomic(given.save, text + "\n")
    print(text)


if __name__ == "__main__":
    main()
