"""Operators of flash-linear-attention in Triton's interpreter, against the reference in float64.

``python -m tests.gpu.operators quick`` (or another set, or names, of `tests.gpu.operator_cases`)
prints one JSON object per case: the functions of the package that ran, and the distances of
outputs, final states and every gradient from the reference. It is a separate program because the
interpreter changes its process.
"""

from __future__ import annotations

import importlib
import json
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
from tests.gpu import interpreter
from tests.gpu.operator_cases import CASES, SETS, distance, solved

from recollect.engines.fla import calls, choose, recurrences
from recollect.engines.fla.operators import OPERATORS, function


def import_all() -> None:
    """Import the package, and repair the interpreter for it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for operator in OPERATORS:
            importlib.import_module(operator.module)
    interpreter.mend("fla.ops")


def claim_hopper() -> None:
    """Make torch, Triton and the package report a Hopper GPU with Triton 3.6."""
    import triton

    triton.__version__ = "3.6.0"
    torch.cuda.device_count = lambda: 1
    torch.cuda.get_device_capability = lambda device=None: (9, 0)
    importlib.import_module("fla.ops.common.chunk_o").IS_NVIDIA_HOPPER = True


def watched(names: list[str]) -> Callable[..., Any]:
    """Record the functions of the package that `function` requests."""

    def record(module: str, name: str) -> Any:
        names.append(name)
        return function(module, name)

    return record


def measure(name: str) -> dict[str, Any]:
    """Return the functions of the package that a case runs, and errors against the reference."""
    case, ran = CASES[name], list[str]()
    recurrences.function = calls.function = watched(ran)  # type: ignore[assignment]
    theirs = solved(case, "fla")
    assert ran, "nothing of the package ran"
    exact = solved(case, "reference")
    assert theirs.keys() == exact.keys()
    distances = {part: distance(x, exact[part]) for part, x in theirs.items()}
    return {"name": name, "ran": sorted(set(ran)), "far": distances}


def main(names: list[str]) -> None:
    """Measure named cases, or those of a set."""
    warnings.simplefilter("ignore")
    choose.DEVICES.add("cpu")
    torch.set_float32_matmul_precision("high")
    if {"hopper", "hopper_long"} & {*names}:
        claim_hopper()
    import_all()
    for name in [case for named in names for case in SETS.get(named, [named])]:
        print(json.dumps(measure(name)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
