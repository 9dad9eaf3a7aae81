"""Stretches of deep memories by their Triton kernels, on the pretended device.

``python -m tests.gpu.rows parity [NAME...]`` prints one JSON object per case of
`tests.gpu.row_cases`: how often each kernel ran, and how far outputs, states and every gradient are
from the definition. ``... extremes`` holds numbers with no answer (beyond float32, or not finite)
to those of torch's operations on the same device, and ``... mutants`` runs kernels in which one
factor is left out. A program of its own, because the device and Triton's interpreter stay with
their process.
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
from tests.gpu.passes import distance
from tests.gpu.printed import interprets
from tests.gpu.row_cases import CASES, TITANS, Case, apart, drawn, recipe, solved, told
from torch import Tensor

from recollect.choices.matmul_precision import matmul_precision
from recollect.engines.deep.chain import rows
from recollect.engines.deep.chain.engine import _tried
from recollect.engines.deep.chain.rows import agree

RAN: Counter[str] = Counter()
"""How often each kernel was launched."""


def install(kernels: Any = None) -> None:
    """From now on the pretended device runs the stretches, where there is a Triton.

    Args:
        kernels: the module that has them; the library's when omitted.
    """
    if not interprets():
        return
    importlib.import_module("tests.gpu.interpreter")
    if kernels is None:
        kernels = importlib.import_module("recollect.engines.deep.chain.rows.kernels")
    rows.LAUNCHERS[pretend.NAME] = pretend.interpreted(kernels, RAN)


def there(case: Case) -> dict[str, Tensor]:
    """What the device says."""
    RAN.clear()
    with pretend.counted():
        return solved(case, drawn(case), case.engine, pretend.put)


def parity(names: Sequence[str]) -> None:
    """Cases by name, or all."""
    for name in names or CASES:
        found, ran = there(CASES[name]), dict(RAN)
        far = apart(found, told(CASES[name]))
        print(json.dumps({"name": name, "ran": ran, "far": far}), flush=True)


# -- numbers with no answer ------------------------------------------------------------------------

EXTREMES = {
    "beyond float32": Case(TITANS, dtype=torch.float32, scale=1e25),
    "squares beyond float32": Case(TITANS, dtype=torch.float32, scale=1e18),
    "products of squares beyond float32": Case(TITANS, dtype=torch.float32, scale=1e12),
    "keys too": Case(TITANS, dtype=torch.float32, keys=1e12),
    "next to nothing": Case(TITANS, dtype=torch.float32, scale=1e-25),
    "beyond float32, plain steps": Case(recipe(share=False), dtype=torch.float32, scale=1e37),
}


def extremes() -> None:
    """Of each case: what is finite by one of two ways alone, and how far the rest is apart."""
    for name, case in EXTREMES.items():
        install()
        found, ran = there(case), dict(RAN)
        rows.LAUNCHERS.clear()
        said = there(case)
        assert not RAN
        other = sum(int((x.isfinite() != said[part].isfinite()).sum()) for part, x in found.items())
        lost = sum(int((~x.isfinite()).sum()) for x in said.values())
        far = {
            part: distance(x.where(x.isfinite(), 0.0), said[part].where(x.isfinite(), 0.0))
            for part, x in found.items()
        }
        print(json.dumps({"name": name, "ran": ran, "other": other, "lost": lost, "far": far}))


# -- kernels that are wrong ------------------------------------------------------------------------

MUTANTS = (
    ("delta = _pull(u_1, z_1, h, CURVE)", "delta = u_1"),
    ("(0.5 + 0.5 * tl.math.erf(z * 0.7071067811865476) + z * density)",
     "(0.5 + 0.5 * tl.math.erf(z * 0.7071067811865476))"),
    ("tl.sum(h * h, 1) + EPS + gain", "tl.sum(h * h, 1) + EPS"),
    ("tl.sum(k * k, 1) * tl.sum(delta * delta, 1) /", "tl.sum(delta * delta, 1) /"),
    ("tl.sum(h * h, 1) + EPS + gain", "tl.sum(h * h, 1) + gain"),
    ("(tl.sum(e * e, 1) + TINY)", "tl.sum(e * e, 1)"),
    ("each = each * share\n", "each = each\n"),
    ("each[:, None] * k, mask", "k, mask"),
    ("each[:, None] * e, mask", "e, mask"),
    ("tl.store(weights + here * J + x, each, mask=there)",
     "tl.store(weights + here * J + x, each / share, mask=there)"),
    ("tl.store(rho + here, share, mask=there)", "tl.store(rho + here, share / share, mask=there)"),
    ("(tl.sum(h * h, 1) + EPS) * e_2", "tl.sum(h * h, 1) * e_2"),
    ("-2.0 / tl.maximum(below, TINY, propagate_nan=tl.PropagateNan.ALL)", "-2.0 / below"),
    ("own = tl.maximum(e_2, TINY, propagate_nan=tl.PropagateNan.ALL)", "own = e_2"),
    ("up_k += each *", "up_k +="),
    ("up_e += each *", "up_e +="),
    ("tl.sum(up_delta * delta, 1) + tl.sum(up_h * h, 1)", "tl.sum(up_delta * delta, 1)"),
    ("up_delta += pi * (delta * (k_2 * twice)[:, None])", "up_delta += 0.0"),
    ("(delta * (k_2 * twice)[:, None])", "(delta * twice[:, None])"),
    ("(h * (e_2 * twice)[:, None])", "(h * twice[:, None])"),
    ("(k * (delta_2 * twice)[:, None])", "(k * twice[:, None])"),
    ("(e * (-gain * twice / own)[:, None])", "(e * (-twice / own)[:, None])"),
    ("bend * up_delta", "up_delta"),
    ("slope * up_delta", "up_delta"),
)  # fmt: skip
"""Places of `kernels`, and what stands there where a factor is left out."""


def mutants() -> None:
    """How far the worst part of an answer is from the definition, with each of them."""
    # Keys of another length than 1, and tokens of which nothing is left but what is added to 0.
    case = Case(TITANS, K=8, T=24, keys=1.7, zeros=True)
    said = told(case)
    source = Path(rows.__file__).with_name("kernels.py").read_text(encoding="utf-8")
    folder = Path(tempfile.mkdtemp())
    importlib.import_module("tests.gpu.interpreter")
    for number, (right, wrong) in enumerate([("", ""), *MUTANTS]):
        assert not right or source.count(right) == 1, right
        path = folder / f"mutant_{number}.py"
        path.write_text(source.replace(right, wrong) if right else source, encoding="utf-8")
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        install(module)
        worst = max(apart(there(case), said).values())
        # Where products round their factors, numbers next to each other may come apart.
        with pretend.counted(), matmul_precision("tf32", "cuda"):
            trusted = agree(_tried, rows.LAUNCHERS[pretend.NAME], pretend.put(torch.ones(1)).device)
        print(json.dumps([wrong, worst, trusted]), flush=True)


def main(kind: str, *names: str) -> None:
    """What is asked for."""
    warnings.simplefilter("ignore")
    if kind == "parity":
        install()
        parity(names)
    else:
        {"extremes": extremes, "mutants": mutants}[kind]()


if __name__ == "__main__":
    main(*sys.argv[1:])
    sys.stdout.flush()
    os._exit(0)
