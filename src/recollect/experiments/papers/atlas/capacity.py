"""Number of pairs that a memory stores exactly: ATLAS section 3.1, propositions 1, 2, theorem 1."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import torch

from recollect.choices.features.finite import Polynomial
from recollect.choices.memory.maps import MLP
from recollect.experiments.framework import (
    Cell,
    Claim,
    Config,
    Experiment,
    Lines,
    Results,
    Values,
    Verdict,
    for_each,
    increasing,
    special,
    verdict,
)
from recollect.recipe.recipe import Recipe
from recollect.report.figures import RenderedFigure, Series, panel_figure
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
    pairs = capacity(
        lambda n: fit_error(recipe, n, K=size, V=size, seed=seed),
        max_pairs=round(bound) + 2,
        tolerance=config["tolerance"],
    )
    weights = sum(math.prod(shape) for shape in recipe.shapes(size, size))
    return {"pairs": float(pairs), "bound": float(bound), "weights": float(weights)}


def _format_range(values: list[float]) -> str:
    low, high = min(values), max(values)
    return f"{low:.0f}" if low == high else f"{low:.0f} to {high:.0f}"


def _stores(results: Results, memory: str) -> Verdict:
    """Compare with C(d + p, p) pairs of a polynomial of degree p, or with d pairs of a matrix."""
    parts, satisfied = [], True
    for cell in results.select(memory=memory).cells():
        d, p = int(cell["d_k"]), int(cell["order"])
        values = results.values("pairs", **cell)
        expected = math.comb(d + p, p) if memory == "polynomial" else d
        satisfied = satisfied and set(values) == {float(expected)}
        parts.append(f"{_format_range(values)} of {expected} at d_k = {d}, p = {p}")
    return verdict(bool(parts) and satisfied, f"Stored: {', '.join(parts)}.")


def _more_than_matrix(results: Results) -> Verdict:
    parts, satisfied = [], True
    for cell in results.select(memory="MLP").cells():
        values = results.values("pairs", **cell)
        matrix = results.mean("pairs", memory="matrix", d_k=cell["d_k"])
        satisfied = satisfied and min(values) > matrix
        parts.append(
            f"{cell['order']} maps {_format_range(values)} against {matrix:.0f} "
            f"(d_k = {cell['d_k']})"
        )
    return verdict(bool(parts) and satisfied, f"Stored by an MLP: {', '.join(parts)}.")


_NAMES = {"matrix": "matrix", "polynomial": "polynomial, p = {order}", "MLP": "MLP of {order} maps"}


def _figure(results: Results) -> RenderedFigure:
    (panel,) = Lines(
        x="d_k",
        y="pairs",
        by=("memory", "order"),
        name=lambda cell: _NAMES[cell["memory"]].format(**cell),
        y_label="pairs stored exactly",
        log_y=True,
    ).make_panels(results)
    series = [replace(line, style=index) for index, line in enumerate(panel.series)]
    sizes = results.axis_values("d_k", memory="polynomial")
    for p in results.axis_values("order", memory="polynomial"):
        y = [math.comb(d + p, p) for d in sizes]
        series.insert(0, Series(name="C(d + p, p)", x=sizes, y=y, style=6))  # below the others
    return panel_figure(
        [replace(panel, series=series)],
        x="size of keys d_k",
        title="Capacity by fitting, keys and values of one size",
        height=4.0,
    )


CAPACITY = Experiment(
    name="atlas-capacity",
    title="Pairs that a memory stores exactly",
    source="ATLAS section 3.1, propositions 1 and 2, theorem 1",
    protocol=(
        "N random keys and values of one size; the weights are fitted (least squares if the memory "
        "is linear in them, Levenberg–Marquardt from three starts otherwise), and N grows by "
        "bisection while the largest relative error stays within a tolerance. Matrix, polynomial "
        "features of degree p on a matrix, MLPs without residual whose hidden layers are as wide "
        "as the key. float64. The numbers of an MLP are lower bounds, because a fit can fail."
    ),
    claims=(
        Claim(
            name="matrix",
            text="A matrix memory stores d_k pairs.",
            rule=special(
                "The number of pairs is d_k for every size and seed.",
                partial(_stores, memory="matrix"),
            ),
        ),
        Claim(
            name="polynomial",
            text="With polynomial features of degree p it stores O(d_k^p): C(d_k + p, p).",
            rule=special(
                "The number of pairs is C(d_k + p, p) for every size, degree and seed.",
                partial(_stores, memory="polynomial"),
            ),
        ),
        Claim(
            name="deep memory",
            text="A deep memory stores more than a matrix of the same width.",
            rule=special(
                "Every MLP stores more pairs than the matrix at its d_k, with every seed.",
                _more_than_matrix,
            ),
        ),
        Claim(
            name="depth",
            text="The advantage grows with depth.",
            rule=for_each("d_k", increasing("pairs", along="order"), memory="MLP"),
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
    figure=_figure,
)

EXPERIMENTS = (CAPACITY,)
