"""Measure error against FLOPs between linear attention and least squares.

``python results/least_squares/trade_off.py`` writes ``trade-off.json`` and its figure next to this
file. The rules are conjugate-gradient steps and powers of the Gram matrix (TTR section 3.3).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import recollect as rc
from recollect.report import Series, describe_environment, line_figure, write_atomic

FOLDER = Path(__file__).parent
CONDITION = 10.0

Point = dict[str, Any]
"""Name and family of a rule, and its measurements.

``flops`` are those of the forward pass per token and head, ``error`` is ‖y − y*‖/‖y*‖ for the
outputs y* of exact least squares in float64, and ``recall`` the mean of ‖W_t k_t − v_t‖/‖v_t‖ over
the last quarter of the tokens.
"""


def rules() -> Iterator[tuple[str, str, Any]]:
    """Yield name, family and algorithm of each rule."""
    Preconditioned = rc.algorithm.Preconditioned
    yield "linear attention", "conjugate gradients", Preconditioned(kind="identity")
    for steps in (1, 2, 3, 4, 6, 8, 12, 16, 24):
        yield f"{steps} CG steps", "conjugate gradients", Preconditioned(steps=steps)
    for kind in ("diagonal", "spectral"):
        for power in (0.25, 0.5, 0.75, 0.9):
            yield f"{kind}, p = {power:g}", kind, Preconditioned(kind=kind, power=power)
    yield "least squares in float32", "least squares in float32", rc.algorithm.LeastSquares()


def measure(*, T: int = 512, K: int = 32) -> list[Point]:
    """Return the points of all rules.

    Keys have condition number `CONDITION`. Values are a fixed linear map of the key and noise of a
    tenth. Queries are the keys.
    """
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    basis = torch.linalg.qr(normal(K, K))[0]
    scale = torch.logspace(0, -math.log10(CONDITION), K, dtype=torch.float64)
    k = normal(1, T, 4, K) * scale @ basis.T
    k = k / k.norm(dim=-1).mean()
    v = k @ normal(K, K) + 0.1 * normal(1, T, 4, K)
    solution = rc.Recipe(context=rc.context.Prefix(), algorithm=rc.algorithm.LeastSquares())
    exact = rc.recall(solution, k, k, v)[0]
    points: list[Point] = []
    for name, family, algorithm in rules():
        recipe = solution.replace(algorithm=algorithm)
        dtype = torch.float32 if "float32" in name else torch.float64
        keys, values = k.to(dtype), v.to(dtype)
        y = rc.recall(recipe, keys, keys, values)[0].double()
        recall_errors = (y - v).norm(dim=-1) / v.norm(dim=-1)
        points.append(
            {
                "name": name,
                "family": family,
                "flops": rc.cost(recipe, T=T, K=K, V=K).per_token,
                "error": float((y - exact).norm() / exact.norm()),
                "recall": float(recall_errors[:, 3 * T // 4 :].mean()),
            }
        )
    return points


def draw(points: Sequence[Point], folder: Path) -> None:
    """Write the figure."""
    unit = points[0]["flops"]
    series = [
        Series(
            name=family,
            x=[p["flops"] / unit for p in points if p["family"] == family],
            y=[math.log10(p["error"]) for p in points if p["family"] == family],
        )
        for family in dict.fromkeys(p["family"] for p in points)
    ]
    line_figure(
        series,
        x="forward FLOPs, in units of linear attention's",
        y="log10 of the relative error to least squares",
        title="Between linear attention and least squares",
    ).save(folder / "trade-off")


def main() -> None:
    """Measure, and write the results and the figure."""
    points = measure()
    results = {
        "what": "keys of condition 10, K = V = 32, T = 512, ridge 1; float64 but where named",
        "environment": describe_environment().to_dict(),
        "points": points,
    }
    text = json.dumps(results, indent=1, ensure_ascii=False) + "\n"
    write_atomic(FOLDER / "trade-off.json", text)
    draw(points, FOLDER)


if __name__ == "__main__":
    main()
