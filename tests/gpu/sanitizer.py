"""The fused walk under NVIDIA's compute-sanitizer: memory, races in shared memory, barriers.

``python -m tests.gpu.sanitizer --save FILE`` looks for the tool, runs `once` in a process under
each of its checks and writes what they said; ``python -m tests.gpu.sanitizer once`` is that
process. Torch's allocator is switched off for it, so that every tensor ends where its memory does.
"""

from __future__ import annotations

import argparse
import json
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

CHECKS = ("memcheck", "racecheck", "synccheck", "initcheck")
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


def checked(tool: str, check: str, seconds: float) -> dict[str, Any]:
    """What one check says.

    Args:
        tool: its program.
        check: by name.
        seconds: after which it is ended.
    """
    options = ["--tool", check, "--error-exitcode", str(FAULTS), "--print-limit", "20"]
    told = subprocess.run([tool, "--help"], capture_output=True, text=True, check=False).stdout
    if "--kernel-regex" in told:  # all of torch's own kernels would take minutes
        options += ["--kernel-regex", "kns=fused_walk"]
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    command = [tool, *options, sys.executable, "-m", "tests.gpu.sanitizer", "once"]
    began = time.monotonic()
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
        code, said = done.returncode, done.stdout
    except subprocess.TimeoutExpired as error:
        code = None
        said = error.stdout.decode(errors="replace") if isinstance(error.stdout, bytes) else ""
    summary = re.findall(r"=+ (.*SUMMARY.*)", said)
    return {
        "check": check,
        "outcome": outcome(code, summary),
        "summary": "; ".join(summary),
        "seconds": time.monotonic() - began,
        "tail": "" if code == 0 else said[-3000:],
    }


def outcome(code: int | None, summary: list[str]) -> str:
    """What an exit status means.

    Args:
        code: of the tool; ``None`` where it was ended.
        summary: the lines with which it sums up.
    """
    if code is None:
        return "took too long"
    if code == 0:
        # Without its last line it has looked at nothing, whatever the program said.
        return "clean" if summary else "did not run"
    return "found something" if code == FAULTS else "did not run"


def main() -> None:
    """Run all checks, each with its share of the time."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.sanitizer")
    parser.add_argument("what", nargs="?", choices=["once"])
    parser.add_argument("--save", type=Path)
    parser.add_argument("--seconds", type=float, default=100.0)
    given = parser.parse_args()
    if given.what == "once":
        once()
        return
    tool, until = find_tool(), time.monotonic() + given.seconds
    found: dict[str, Any] = {"tool": tool, "checks": []}
    for place, check in enumerate(CHECKS if tool is not None else ()):
        left = (until - time.monotonic()) / (len(CHECKS) - place)
        found["checks"].append(checked(str(tool), check, left))
    text = json.dumps(found, indent=2)
    if given.save is not None:
        given.save.write_text(text + "\n", encoding="utf-8")
    print(text)
    if any(one["outcome"] == "found something" for one in found["checks"]):
        sys.exit(1)


if __name__ == "__main__":
    main()
