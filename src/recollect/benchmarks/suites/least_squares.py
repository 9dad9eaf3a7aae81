"""Benchmarks of least squares against its approximations: speed and accuracy."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from os import PathLike
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from recollect.benchmarks.results import Case
from recollect.blocks.cost import cost
from recollect.choices.algorithm.base import Algorithm
from recollect.choices.algorithm.closed_form import LeastSquares, Preconditioned
from recollect.choices.context.windows import Prefix
from recollect.functional.recall import recall
from recollect.recipe.recipe import Recipe
from recollect.report.environment import describe_environment
from recollect.report.figures import Series, line_figure
from recollect.report.files import write_atomic

__all__ = ["Point", "conjugate_case", "save_trade_off", "step_case", "trade_off"]

Sizes = tuple[int, int, int, int, int]
"""B, T, H, K, V."""


def _draw(sizes: Sizes, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    B, T, H, K, V = sizes
    generator = torch.Generator().manual_seed(0)
    q, k = (
        functional.normalize(torch.randn(B, T, H, K, generator=generator), dim=-1) for _ in range(2)
    )
    return q.to(dtype), k.to(dtype), torch.randn(B, T, H, V, generator=generator).to(dtype)


def conjugate_case(label: str, sizes: Sizes, steps: int, *, device: str = "cpu") -> Case:
    """So many conjugate-gradient steps for every token, side by side in time."""
    B, T, H, K, V = sizes
    recipe = Recipe(context=Prefix(), algorithm=Preconditioned(steps=steps))

    def make() -> Callable[[], object]:
        q, k, v = (x.to(device) for x in _draw(sizes))
        return lambda: recall(recipe, q, k, v, output_final_state=False)

    price = cost(recipe, B=B, T=T, H=H, K=K, V=V)
    return Case(name=label, make=make, flops=float(price.total), bytes=None)


def step_case(label: str, sizes: Sizes, *, device: str = "cpu") -> Case:
    """The classical recursion: one Sherman–Morrison update per token."""
    B, T, H, K, V = sizes

    def make() -> Callable[[], object]:
        q, k, v = (x.to(device).transpose(1, 2) for x in _draw(sizes))

        def run() -> Tensor:
            P = torch.eye(K, device=device).expand(B, H, K, K).contiguous()
            W = torch.zeros(B, H, V, K, device=device)
            outputs: list[Tensor] = []
            for t in range(T):
                key = k[:, :, t].unsqueeze(-1)
                across = P @ key
                gain = (across / (1 + key.mT @ across)).mT
                P = P - across @ gain
                W = W + (v[:, :, t].unsqueeze(-1) - W @ key) @ gain
                outputs.append(W @ q[:, :, t].unsqueeze(-1))
            return torch.stack(outputs, dim=2)

        return run

    flops = B * H * T * (2 * K * K * 2 + 2 * K * V * 3)
    return Case(name=label, make=make, flops=float(flops), bytes=None)


@dataclass(frozen=True, kw_only=True)
class Point:
    """One rule on the way from linear attention to least squares.

    Attributes:
        name: of the rule. family: what it is a member of.
        flops: forward FLOPs per token and head.
        error: ‖y − y*‖/‖y*‖ of the outputs to those of exact least squares, float64.
        recall: mean ‖W_t k_t − v_t‖/‖v_t‖ over the last quarter of the tokens: what is asked again.
    """

    name: str
    family: str
    flops: float
    error: float
    recall: float


def _family() -> list[tuple[str, str, Algorithm]]:
    found: list[tuple[str, str, Algorithm]] = [
        ("linear attention", "conjugate gradients", Preconditioned(kind="identity"))
    ]
    found += [
        (f"{steps} CG steps", "conjugate gradients", Preconditioned(steps=steps))
        for steps in (1, 2, 3, 4, 6, 8, 12, 16, 24)
    ]
    for kind in ("diagonal", "spectral"):
        found += [
            (f"{kind}, p = {power:g}", kind, Preconditioned(kind=kind, power=power))
            for power in (0.25, 0.5, 0.75, 0.9)
        ]
    return [*found, ("least squares in float32", "least squares in float32", LeastSquares())]


def trade_off(*, T: int = 512, K: int = 32, spread: float = 10.0) -> list[Point]:
    """Error against FLOPs between linear attention and least squares (TTR leaves the way open).

    Keys have condition ``spread``; values are a fixed linear map of the key and noise of a tenth,
    so that there is something to be regressed. Pairs are asked for again by their keys.
    """
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    basis = torch.linalg.qr(normal(K, K))[0]
    scale = torch.logspace(0, -math.log10(spread), K, dtype=torch.float64)
    k = normal(1, T, 4, K) * scale @ basis.T
    k = k / k.norm(dim=-1).mean()
    v = k @ normal(K, K) + 0.1 * normal(1, T, 4, K)
    exact = recall(Recipe(context=Prefix(), algorithm=LeastSquares()), k, k, v)[0]
    points: list[Point] = []
    last = slice(3 * T // 4, None)
    for name, family, algorithm in _family():
        recipe = Recipe(context=Prefix(), algorithm=algorithm)
        dtype = torch.float32 if "float32" in name else torch.float64
        key, value = k.to(dtype), v.to(dtype)
        y = recall(recipe, key, key, value)[0].double()
        points.append(
            Point(
                name=name,
                family=family,
                flops=cost(recipe, T=T, K=K, V=K).per_token,
                error=float((y - exact).norm() / exact.norm()),
                recall=float(((y - v).norm(dim=-1) / v.norm(dim=-1))[:, last].mean()),
            )
        )
    return points


def save_trade_off(folder: str | PathLike[str]) -> None:
    """Measure `trade_off` and write ``trade-off.json``, ``.png`` and ``.svg`` into a folder.

    Raises:
        ImportError: without matplotlib.
        OSError: if the folder cannot be written.
    """
    points, target = trade_off(), Path(folder)
    unit = points[0].flops
    series = [
        Series(
            name=family,
            x=[p.flops / unit for p in points if p.family == family],
            y=[math.log10(p.error) for p in points if p.family == family],
        )
        for family in dict.fromkeys(p.family for p in points)
    ]
    line_figure(
        series,
        x="forward FLOPs, in units of linear attention's",
        y="log10 of the relative error to least squares",
        title="Between linear attention and least squares",
    ).save(target / "trade-off")
    found = {
        "what": "keys of condition 10, K = V = 32, T = 512, ridge 1; float64 but where named",
        "environment": asdict(describe_environment()),
        "points": [asdict(point) for point in points],
    }
    write_atomic(target / "trade-off.json", json.dumps(found, indent=1, ensure_ascii=False) + "\n")
