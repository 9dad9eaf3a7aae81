"""The recurrence over inner batches by its Triton kernels, on the pretended device.

``python -m tests.gpu.recurrence parity [NAME...]`` prints one JSON object per case: how often each
kernel ran, and how far outputs, states and every gradient are from the definition. ``... factors``
prints distances by the precision of products. ``... trial`` tries correct and wrong kernels. A
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
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tests.gpu import pretend
from tests.gpu.row_cases import Case, TwiceLessThrice, apart, drawn, recipe, solved, told
from torch import Tensor

import recollect as rc
from recollect.choices.matmul_precision import matmul_precision
from recollect.engines.deep import recurrence
from recollect.engines.deep.chain import engine
from recollect.engines.deep.recurrence import launch, trial

NORM = {"norm": "layer"}
TITANS = recipe(memory=NORM)
CASES = {
    "titans": Case(TITANS),
    "titans in float32": Case(TITANS, dtype=torch.float32),
    "rows that end early": Case(TITANS, B=2, padded=True),
    "without momentum": Case(recipe(momentum=False, memory=NORM), B=2, padded=True),
    "plain steps": Case(recipe(share=False, memory=NORM)),
    "without a norm": Case(recipe()),
    "another affine error": Case(recipe(bias=TwiceLessThrice()), T=24),
    "no decay, no residual": Case(
        recipe(
            momentum=False,
            share=False,
            retention=rc.retention.Keep(),
            memory={"residual": False, "activation": "silu"},
        ),
        T=24,
    ),
    "zeros": Case(TITANS, zeros=True),
    "several groups": Case(TITANS, T=72, chunk=32),
    "gradients of gradients": Case(TITANS, T=20, again=True),
    **{
        f"{name} between": Case(recipe(memory={**NORM, "activation": name}), T=24)
        for name in ("gelu_tanh", "tanh", "relu", "identity")
    },
    "one batch": Case(TITANS, T=16, taken=False),
    "batches of 5 tokens": Case(recipe(b=5, memory=NORM), T=17, taken=False),
    "8 channels": Case(TITANS, K=8, T=20, taken=False),
    "a root mean square": Case(recipe(memory={"norm": "rms"}), T=20, taken=False),
    "three maps": Case(recipe(memory={**NORM, "depth": 3}), T=20, taken=False),
    "PyTorch operations": Case(TITANS, T=20, engine="torch", taken=False),
}

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

    def interpreted(
        kernel: str,
        programs: int,
        arguments: Sequence[Tensor | int],
        constants: Mapping[str, object],
    ) -> None:
        inputs = [pretend.host(x) if isinstance(x, Tensor) else x for x in arguments]

        def run() -> None:
            getattr(kernels, kernel)[(programs,)](*inputs, **constants)

        RAN[kernel] += 1
        run()
        pretend.enqueued(run)

    recurrence.LAUNCHERS[pretend.NAME] = interpreted
    launch.DTYPES = (torch.float32, torch.float64)


def parity(names: Sequence[str]) -> None:
    """Cases by name, or all."""
    for name in names or CASES:
        case = CASES[name]
        RAN.clear()
        with pretend.counted():
            results = solved(case, drawn(case), case.engine, pretend.put)
        errors = apart(results, told(case))
        print(json.dumps({"name": name, "ran": dict(RAN), "errors": errors}), flush=True)


def factors() -> None:
    """Products of rounded factors, with and without gradients."""
    case = Case(TITANS, dtype=torch.float32, T=64)
    expected = told(case)
    for precision in ("float32", "tf32", "bf16"):
        with pretend.counted(), matmul_precision(precision):
            results = solved(case, drawn(case), case.engine, pretend.put)
        error = max(apart(results, expected).values())
        print(json.dumps({"precision": precision, "error": error}), flush=True)


MUTANTS = (
    ("share = tl.maximum(above, 0.0) / below", "share = above / above"),
    ("next1 += m * one", "next1 += one"),
    ("up_k += d1_sq * twice * key", "up_k += 0.0"),
    ("of_g += to_N * apart + to_size * g", "of_g += to_size * g"),
    ("bend * tl.load(u1 + wide + t + rw) * up_d", "bend * up_d"),
    ("next2 = _dot(up_zt, h, next2, PRECISION)", "next2 = next2 + 0.0"),
)
"""Code of `kernels`, and incorrect code in its place."""


def trials() -> None:
    """Whether the trial accepts the kernels, and each of the mutants."""
    source = Path(recurrence.__file__).with_name("kernels.py").read_text(encoding="utf-8")
    folder = Path(tempfile.mkdtemp())
    case = Case(TITANS, dtype=torch.float32, T=20)
    for number, (right, wrong) in enumerate([("", ""), *MUTANTS]):
        assert not right or source.count(right) == 1, right
        path = folder / f"mutant_{number}.py"
        path.write_text(source.replace(right, wrong) if right else source, encoding="utf-8")
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        install(module)
        engine.launch_recurrence = recurrence.LAUNCHERS[pretend.NAME]  # it is tried too
        trial._RESULTS.clear()
        RAN.clear()
        with pretend.counted(), warnings.catch_warnings(record=True) as messages:
            warnings.simplefilter("always")
            for _ in range(2):  # one trial serves both
                solved(case, drawn(case), case.engine, pretend.put)
        texts = [str(one.message) for one in messages if "Triton kernels" in str(one.message)]
        print(json.dumps({"wrong": wrong, "warned": texts, "ran": dict(RAN)}), flush=True)


def main(kind: str, *names: str) -> None:
    """Print what ``kind`` names."""
    warnings.simplefilter("ignore")
    install()
    {"parity": lambda: parity(names), "factors": factors, "trial": trials}[kind]()


if __name__ == "__main__":
    main(*sys.argv[1:])
    sys.stdout.flush()
    os._exit(0)
