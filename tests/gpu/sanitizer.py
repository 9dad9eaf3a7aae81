"""The fused kernels under NVIDIA's compute-sanitizer: memory and barriers.

`check_kernels` runs ``python -m tests.gpu.sanitizer`` under one check of the tool. Torch's
allocator is switched off there, so that every tensor ends where its memory does. The checks for
races and for memory that was never written take minutes, and are not run.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import recollect as rc

CHECKS = ("memcheck", "synccheck")
FAULTS = 86
"""What the tool ends with where it found something; the program itself ends otherwise."""


def once() -> None:
    """All kernels, of two memories: products of warps, and in batches of 64 of warpgroups."""
    recipe = rc.zoo.get("titans").recipe.replace(memory=rc.memory.MLP())
    walked(recipe, 40)
    walked(replace(recipe, algorithm=replace(recipe.algorithm, batch_size=64)), 150)


def walked(recipe: rc.Recipe, T: int) -> None:
    """A walk with reads, tokens one by one, and a training step.

    Args:
        recipe: of Titans' kind.
        T: tokens of two memories.
    """
    g = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 1, T, 2, 64, generator=g).cuda()
    each = torch.rand(3, 1, T, 2, generator=g).cuda()
    gates = {"lr": 0.05 * each[0], "log_decay": -0.05 * each[1], "momentum": 0.9 * each[2]}
    init = [
        torch.randn(2, *shape, generator=g).cuda() * shape[1] ** -0.5
        for shape in recipe.memory.shapes(64, 64)
    ]
    k = torch.nn.functional.normalize(k, dim=-1)
    with torch.no_grad():
        y, _ = rc.recall(recipe, q, k, v, gates, initial_memory=init, engine="fused")
        layer, state = rc.MemoryLayer(128, 2, recipe, engine="fused").cuda().eval(), None
        over = recipe.algorithm.batch_size + 1  # a border
        for token in torch.randn(over, 1, 1, 128, generator=g).cuda():
            told, state = layer(token, state)
            assert bool(told.isfinite().all())
    assert bool(y.isfinite().all())
    v.requires_grad_()
    y, _ = rc.recall(recipe, q, k, v, gates, initial_memory=init, engine="fused")
    (slope,) = torch.autograd.grad(y.square().sum(), v)
    assert bool(slope.isfinite().all())
    torch.cuda.synchronize()


def find_tool() -> str | None:
    """compute-sanitizer: on the path, in CUDA's usual places, or in a wheel of NVIDIA's."""
    name = "compute-sanitizer"
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    places = [Path(home) / "bin" / name for home in homes if home]
    places += [Path(home) / name / name for home in homes if home]
    places += [
        found for path in sys.path for found in sorted(Path(path).glob(f"nvidia/*/**/{name}"))
    ]
    on_path = shutil.which(name)
    for place in ([Path(on_path)] if on_path else []) + places:
        if place.is_file() and os.access(place, os.X_OK):
            return str(place)
    return None


def check_kernels(tool: str, check: str, seconds: float) -> dict[str, Any]:
    """Run the kernels under one check, and return its outcome and its first error.

    Args:
        tool: path of compute-sanitizer.
        check: name of the check.
        seconds: time limit.
    """
    options = ["--tool", check, "--error-exitcode", str(FAULTS), "--print-limit", "5"]
    usage = subprocess.run([tool, "--help"], capture_output=True, text=True, check=False).stdout
    if "--kernel-regex" in usage:  # all of torch's own kernels would take minutes
        options += ["--kernel-regex", "kns=fused_walk"]
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    command = [tool, *options, sys.executable, "-m", "tests.gpu.sanitizer"]
    start = time.monotonic()
    try:
        done = subprocess.run(
            command,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=max(1.0, seconds),
            check=False,
        )
        code, output = done.returncode, done.stdout
    except subprocess.TimeoutExpired as error:
        code = None
        output = error.stdout.decode(errors="replace") if isinstance(error.stdout, bytes) else ""
    summary = re.findall(r"=+ (.*SUMMARY.*)", output)
    return {
        "check": check,
        "outcome": outcome(code, summary),
        "summary": "; ".join(summary),
        "seconds": round(time.monotonic() - start, 1),
        "first_error": first_error(output),
        "tail": "" if code in (0, FAULTS) else output[-1500:],
    }


def first_error(output: str) -> str:
    """Return the first error that the tool prints: its lines up to an empty one."""
    blocks = re.findall(r"(?:^=+ .*\n)+", output, re.MULTILINE)
    lines = [line for line in "".join(blocks[:1]).splitlines() if "COMPUTE-SANITIZER" not in line]
    errors = [line.lstrip("= ") for line in lines if "SUMMARY" not in line]
    return "\n".join(errors)


def outcome(code: int | None, summary: list[str]) -> str:
    """Return the meaning of an exit status.

    Args:
        code: exit status of the tool; ``None`` after its time limit.
        summary: its summary lines.
    """
    if code is None:
        return "took too long"
    if code == 0:
        # Without its last line it has looked at nothing, whatever the program said.
        return "clean" if summary else "did not run"
    return "found something" if code == FAULTS else "did not run"


if __name__ == "__main__":
    once()
