"""The figure of the README and of the first page: five solutions of one regression problem.

    python docs/hooks/picture.py docs/assets

Left: the number of pairs that a memory of 16 × 16 stores. Right: the error after a change of the
map. The recipes differ in one or two choices; nothing is trained.
"""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import normalize

from recollect.choices import algorithm, bias, context, features, memory, retention
from recollect.functional.read import read
from recollect.functional.recall import recall
from recollect.recipe.recipe import Recipe
from recollect.report.figures import (
    RenderedFigure,
    Series,
    new_figure,
    plot_series,
    render_figure,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = [
    "CHANGE",
    "PAIRS",
    "RECIPES",
    "WIDTH",
    "render_picture",
    "storage_errors",
    "switch_errors",
]

WIDTH = 16
"""Channels of keys and values."""

PAIRS = (1, 4, 8, 12, 16, 18, 20, 24, 28, 32, 36, 40)
"""Numbers of written pairs."""

CHANGE, LENGTH = 48, 96
TRIALS = 32

RECIPES = {
    "Hebbian: linear attention": Recipe(
        bias=bias.DotProduct(), algorithm=algorithm.GradientDescent(lr=1.0)
    ),
    "gradient step: DeltaNet": Recipe(algorithm=algorithm.GradientDescent(lr=1.0)),
    "exact least squares: RLS": Recipe(
        context=context.Prefix(), algorithm=algorithm.LeastSquares(ridge=1e-4)
    ),
    "least squares that forgets": Recipe(
        context=context.Prefix(decay=0.85), algorithm=algorithm.LeastSquares(ridge=1e-4)
    ),
    "all pairs stored: softmax attention": Recipe(
        memory=memory.LocalConstant(),
        context=context.KernelWeighted(kernel=features.Exponential(temperature=0.08)),
        retention=retention.Keep(),
        algorithm=algorithm.Analytic(),
    ),
}
"""Recipes of the curves, by name."""


def _relative_error(output: Tensor, target: Tensor) -> Tensor:
    """Return ‖y − v‖ / ‖v‖ of each pair."""
    return ((output - target).norm(dim=-1) / target.norm(dim=-1))[..., 0]  # [B, T]


@cache
def storage_errors() -> dict[str, list[float]]:
    """Return for each recipe the mean error over all pairs after the last write.

    Keys are random unit vectors and values are normal. There is a number for each of `PAIRS`.
    """
    generator = torch.Generator().manual_seed(0)
    shape = (TRIALS, PAIRS[-1], 1, WIDTH)
    k = normalize(torch.randn(shape, generator=generator, dtype=torch.float64), dim=-1)
    v = torch.randn(shape, generator=generator, dtype=torch.float64)
    errors: dict[str, list[float]] = {}
    for name, recipe in RECIPES.items():
        errors[name] = []
        for pairs in PAIRS:
            key, value = k[:, :pairs], v[:, :pairs]
            _, state = recall(recipe, key, key, value)
            output = read(recipe, key, state=state)
            errors[name].append(float(_relative_error(output, value).mean()))
    return errors


@cache
def switch_errors() -> dict[str, list[float]]:
    """Return for each recipe the error of each new pair of v = A k before it is written.

    A changes at token `CHANGE`. There are `LENGTH` numbers, means over trials.
    """
    generator = torch.Generator().manual_seed(1)
    shape = (TRIALS, LENGTH, 1, WIDTH)
    k = normalize(torch.randn(shape, generator=generator, dtype=torch.float64), dim=-1)
    maps = torch.randn(2, TRIALS, WIDTH, WIDTH, generator=generator, dtype=torch.float64)
    v = torch.cat(
        [
            torch.einsum("bij,bthj->bthi", maps[0], k[:, :CHANGE]),
            torch.einsum("bij,bthj->bthi", maps[1], k[:, CHANGE:]),
        ],
        dim=1,
    )
    means: dict[str, list[float]] = {}
    for name, recipe in RECIPES.items():
        errors, state = [torch.ones(TRIALS, dtype=torch.float64)], None
        for t in range(LENGTH - 1):
            key = k[:, t : t + 1]
            _, state = recall(recipe, key, key, v[:, t : t + 1], state=state)
            output = read(recipe, k[:, t + 1 : t + 2], state=state)
            errors.append(_relative_error(output, v[:, t + 1 : t + 2])[:, 0])
        means[name] = [float(error.mean()) for error in errors]
    return means


def render_picture() -> RenderedFigure:
    """Return the figure.

    Raises:
        ImportError: Matplotlib is not installed.
    """
    with new_figure() as canvas:
        canvas.set_size_inches(9.0, 4.0)
        left, right = canvas.subplots(1, 2)
        _draw_panel(left, storage_errors(), list(PAIRS))
        _draw_panel(right, switch_errors(), list(range(1, LENGTH + 1)))
        left.axvline(WIDTH, color="0.2", linestyle=":", linewidth=1.2)
        left.text(WIDTH + 0.6, 1.5, "one pair per feature", fontsize=8.5)
        right.axvline(CHANGE + 0.5, color="0.2", linestyle=":", linewidth=1.2)
        right.text(CHANGE + 2, 1.5, "the map changes", fontsize=8.5)
        left.set_title("How many pairs does it store?", loc="left", fontsize=11, fontweight="bold")
        right.set_title("What if the map changes?", loc="left", fontsize=11, fontweight="bold")
        left.set_xlabel("pairs written into 16 × 16 numbers")
        right.set_xlabel("tokens")
        left.set_ylabel("error, read back")
        right.set_ylabel("error of the next pair")
        names = left.get_legend_handles_labels()
        canvas.legend(*names, loc="outside lower center", ncols=2, handlelength=3.0)
        return render_figure(canvas)


def _draw_panel(axes: Axes, curves: dict[str, list[float]], x: list[int]) -> None:
    for index, (name, y) in enumerate(curves.items()):
        line = Series(name=name, x=x, y=y)
        plot_series(axes, line, index, marks=8, markersize=4.5, linewidth=1.7)
    axes.set_ylim(0, 1.6)


if __name__ == "__main__":
    figure = render_picture()
    for name, text in {"memories.svg": figure.svg, "memories-narrow.svg": figure.narrow}.items():
        Path(sys.argv[1], name).write_text(text, encoding="utf-8")
