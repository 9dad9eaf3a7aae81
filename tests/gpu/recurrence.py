"""The recurrence over inner batches by its Triton kernels, on the pretended device.

``python -m tests.gpu.recurrence parity [NAME...]`` prints one JSON object per case: how often each
kernel ran, and how far outputs, states and every gradient are from the definition. ``... factors``
prints distances by the precision of products, ``... launches`` the number of operations on the
device by the number of tokens and groups. ``... trial COUNT`` tries correct and wrong kernels. A
program of its own, because the device and Triton's interpreter stay with their process.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tests.gpu import pretend
from tests.gpu.recurrence_cases import (
    CASES,
    MUTANTS,
    TITANS,
    Case,
    errors_of,
    expected_of,
    inputs_of,
    results_of,
)

from recollect.choices.matmul_precision import matmul_precision
from recollect.engines.deep import recurrence
from recollect.engines.deep.chain import engine
from recollect.engines.deep.recurrence import launch, trial

RAN: Counter[str] = Counter()
"""How often each kernel was launched."""


def install(kernels: Any = None) -> None:
    """Let the pretended device launch the kernels in Triton's interpreter.

    Args:
        kernels: their module; the library's when omitted.
    """
    importlib.import_module("tests.gpu.interpreter")
    if kernels is None:
        kernels = importlib.import_module("recollect.engines.deep.recurrence.kernels")
    recurrence.LAUNCHERS[pretend.NAME] = pretend.interpreted(kernels, RAN)
    launch.DTYPES = (torch.float32, torch.float64)


def parity(names: Sequence[str]) -> None:
    """Run the named cases, or all."""
    for name in names or CASES:
        case = CASES[name]
        RAN.clear()
        with pretend.counted():
            results = results_of(case, inputs_of(case), case.engine, pretend.put)
        errors = errors_of(results, expected_of(case))
        print(json.dumps({"name": name, "ran": dict(RAN), "errors": errors}), flush=True)


def factors() -> None:
    """Products of rounded factors, with and without gradients."""
    case = Case(TITANS, dtype=torch.float32, T=40)
    expected = expected_of(case)
    for precision in ("float32", "tf32"):
        with pretend.counted(), matmul_precision(precision, "cuda"):
            results = results_of(case, inputs_of(case), case.engine, pretend.put)
        error = max(errors_of(results, expected).values())
        print(json.dumps({"precision": precision, "error": error}), flush=True)


def launches() -> None:
    """Print operations on the device, forward and backward, by the number of tokens and groups."""
    for T, chunk in ((48, None), (96, None), (96, 48)):
        case = Case(TITANS, dtype=torch.float32, T=T, chunk=chunk)
        leaves = inputs_of(case)
        with pretend.counted() as counts:
            results_of(case, leaves, case.engine, pretend.put)
        print(json.dumps([T, counts.launches, sum(counts.syncs.values())]), flush=True)


def trials(count: int) -> None:
    """Print whether the trial accepts the kernels, and each of the first ``count`` mutants."""
    source = Path(recurrence.__file__).with_name("kernels.py").read_text(encoding="utf-8")
    folder = Path(tempfile.mkdtemp())
    case = Case(TITANS, dtype=torch.float32, T=20)
    for number, (right, wrong) in enumerate([("", ""), *MUTANTS[:count]]):
        assert not right or source.count(right) == 1, right
        path = folder / f"mutant_{number}.py"
        path.write_text(source.replace(right, wrong) if right else source, encoding="utf-8")
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        install(module)
        engine.launch_recurrence = recurrence.LAUNCHERS[pretend.NAME]  # the trial runs for it, too
        trial._RESULTS.clear()
        RAN.clear()
        with pretend.counted(), warnings.catch_warnings(record=True) as messages:
            warnings.simplefilter("always")
            for _ in range(2):  # one trial for both
                results_of(case, inputs_of(case), case.engine, pretend.put)
        texts = [str(one.message) for one in messages if "Triton kernels" in str(one.message)]
        print(json.dumps({"wrong": wrong, "warned": texts, "ran": dict(RAN)}), flush=True)


def main(kind: str, *names: str) -> None:
    """Print the results of ``kind``."""
    warnings.simplefilter("ignore")
    install()
    match kind:
        case "parity":
            parity(names)
        case "factors":
            factors()
        case "launches":
            launches()
        case "trial":
            trials(int(names[0]))


if __name__ == "__main__":
    main(*sys.argv[1:])
    sys.stdout.flush()
    os._exit(0)
