"""How many pairs a memory stores exactly: ATLAS section 3.1, propositions 1 and 2, theorem 1."""

from __future__ import annotations

import math
from itertools import pairwise

import torch

from recollect.choices.features.finite import Polynomial
from recollect.choices.memory.maps import MLP
from recollect.experiments.framework.experiment import Claim, Config, Experiment
from recollect.experiments.framework.records import Cell, Results, Values
from recollect.experiments.framework.rules import Verdict, special, verdict
from recollect.recipe.recipe import Recipe
from recollect.report.figures import Panel, RenderedFigure, Series, panel_figure
from recollect.theory import capacity
from recollect.theory.capacity import capacity_bound, fit_error

__all__ = ["EXPERIMENTS"]


def _recipe(cell: Cell) -> Recipe:
    if cell["memory"] == "polynomial":
        return Recipe(features=Polynomial(degree=int(cell["order"])))
    if cell["memory"] == "MLP":
        return Recipe(memory=MLP(depth=int(cell["order"]), expansion=1, residual=False))
    return Recipe()


def _measure(config: Config, cell: Cell, seed: int, device: torch.device) -> Values:
    recipe, size = _recipe(cell), int(cell["d_k"])
    bound = capacity_bound(recipe, size, size).pairs
    most = round(bound) + 2
    tolerance = config["tolerance"]
    found = capacity(
        lambda n: fit_error(recipe, n, K=size, V=size, seed=seed), most=most, tolerance=tolerance
    )
    weights = sum(math.prod(shape) for shape in recipe.shapes(size, size))
    return {"pairs": float(found), "bound": float(bound), "weights": float(weights)}


def _matrix(results: Results) -> Verdict:
    told, holding = [], True
    for d in results.axis_values("d_k", memory="matrix"):
        found = results.values("pairs", memory="matrix", d_k=d)
        holding = holding and set(found) == {float(d)}
        told.append(f"{_one(found)} at d_k = {d}")
    return verdict(bool(told) and holding, f"Stored: {', '.join(told)}.")


def _polynomial(results: Results) -> Verdict:
    told, holding = [], True
    for cell in results.select(memory="polynomial").cells():
        d, p = int(cell["d_k"]), int(cell["order"])
        found = results.values("pairs", **cell)
        wanted = math.comb(d + p, p)
        holding = holding and set(found) == {float(wanted)}
        told.append(f"{_one(found)} of C({d + p}, {p}) = {wanted}")
    return verdict(bool(told) and holding, f"Stored: {', '.join(told)}.")


def _deep(results: Results) -> Verdict:
    told, holding = [], True
    for cell in results.select(memory="MLP").cells():
        found = results.values("pairs", **cell)
        matrix = results.mean("pairs", memory="matrix", d_k=cell["d_k"])
        holding = holding and min(found) > matrix
        told.append(
            f"{cell['order']} maps {_one(found)} against {matrix:.0f} (d_k = {cell['d_k']})"
        )
    return verdict(bool(told) and holding, f"Stored by an MLP: {', '.join(told)}.")


def _deeper(results: Results) -> Verdict:
    told, holding = [], True
    for d in results.axis_values("d_k", memory="MLP"):
        depths = sorted(results.axis_values("order", memory="MLP", d_k=d))
        means = [results.mean("pairs", memory="MLP", d_k=d, order=depth) for depth in depths]
        holding = holding and all(a < b for a, b in pairwise(means))
        told.append(f"d_k = {d}: {', '.join(f'{m:.1f}' for m in means)} with {depths} maps")
    return verdict(bool(told) and holding, f"Mean over seeds: {'; '.join(told)}.")


def _one(found: list[float]) -> str:
    low, high = min(found), max(found)
    return f"{low:.0f}" if low == high else f"{low:.0f} to {high:.0f}"


def _draw(results: Results) -> RenderedFigure:
    series = []
    lines = dict.fromkeys((cell["memory"], cell["order"]) for cell in results.cells())
    for memory, order in lines:
        cell = {"memory": memory, "order": order}
        sizes = results.axis_values("d_k", **cell)
        each = [results.values("pairs", d_k=d, **cell) for d in sizes]
        name = {"matrix": "matrix", "polynomial": f"polynomial, p = {order}"}.get(
            str(memory), f"MLP of {order} maps"
        )
        series.append(
            Series(
                name=name,
                x=sizes,
                y=[sum(some) / len(some) for some in each],
                low=[min(some) for some in each],
                high=[max(some) for some in each],
                style=len(series),
            )
        )
    sizes = results.axis_values("d_k", memory="polynomial")
    for p in results.axis_values("order", memory="polynomial"):
        wanted = [math.comb(d + p, p) for d in sizes]
        # Below the others, so that what was measured lies above it.
        series.insert(0, Series(name="C(d + p, p)", x=sizes, y=wanted, style=6))
    return panel_figure(
        [Panel(y="pairs stored exactly", series=series, log_y=True)],
        x="size of keys d_k",
        title="Capacity by fitting, keys and values of one size",
        height=4.0,
    )


CAPACITY = Experiment(
    name="atlas-capacity",
    title="Pairs that a memory stores exactly",
    source="ATLAS section 3.1, propositions 1 and 2, theorem 1",
    protocol=(
        "N random keys and values of one size; the weights are fitted (least squares where the "
        "memory is linear in them, Levenberg–Marquardt from three starts otherwise), and N grows "
        "by bisection while the largest relative error stays within a tolerance. Matrix, "
        "polynomial features of degree p on a matrix, MLPs without residual whose hidden layers "
        "are as wide as the key. float64. What an MLP was not found to store it may still be able "
        "to: its numbers are from below."
    ),
    claims=(
        Claim(
            name="matrix",
            text="A matrix memory stores d_k pairs.",
            rule=special(
                "The number found is d_k for every size and seed.",
                _matrix,
            ),
        ),
        Claim(
            name="polynomial",
            text="With polynomial features of degree p it stores O(d_k^p): C(d_k + p, p).",
            rule=special(
                "The number found is C(d_k + p, p) for every size, degree and seed.",
                _polynomial,
            ),
        ),
        Claim(
            name="deep memory",
            text="A deep memory stores more than a matrix of the same width.",
            rule=special(
                "Every MLP stores more pairs than the matrix at its d_k, with every seed.",
                _deep,
            ),
        ),
        Claim(
            name="depth",
            text="The advantage grows with depth.",
            rule=special(
                "At every d_k the mean over seeds grows with the number of maps.",
                _deeper,
            ),
        ),
    ),
    configs={
        "smoke": {"seeds": 1, "sizes": [2, 4], "degrees": [2], "deep": [2], "depths": [2, 3]}
        | {"tolerance": 1e-6},
        "small": {"seeds": 3, "sizes": [2, 3, 4, 6, 8], "degrees": [2, 3], "deep": [2, 3]}
        | {"depths": [2, 3], "tolerance": 1e-6},
        "paper": {"seeds": 5, "sizes": [4, 8, 12, 16], "degrees": [2, 3], "deep": [4, 6, 8, 12]}
        | {"depths": [2, 3, 4], "tolerance": 1e-6},
    },
    cells=lambda config: [
        *({"memory": "matrix", "order": 1, "d_k": d} for d in config["sizes"]),
        *(
            {"memory": "polynomial", "order": p, "d_k": d}
            for p in config["degrees"]
            for d in config["sizes"]
        ),
        *(
            {"memory": "MLP", "order": depth, "d_k": d}
            for depth in config["depths"]
            for d in config["deep"]
        ),
    ],
    measure=_measure,
    figure=_draw,
)


EXPERIMENTS = (CAPACITY,)
