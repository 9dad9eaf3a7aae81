"""The figure of the design page on steps: errors after normalised steps, by their rate.

    python docs/hooks/stability.py docs/assets

Rates are multiples of the stability limit. Left: one pair, repeated. Right: different keys. Nothing
is trained.
"""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import normalize

from recollect.choices import algorithm, memory, retention
from recollect.choices.memory.base import Memory
from recollect.functional.read import read
from recollect.functional.recall import recall
from recollect.recipe.recipe import Recipe
from recollect.recipe.stability import step_limit
from recollect.report.figures import Panel, RenderedFigure, Series, panel_figure

__all__ = ["BATCHES", "MULTIPLES", "errors", "render"]

MULTIPLES = tuple(i / 20 for i in range(1, 41))
"""Rates as multiples of the stability limit."""

BATCHES, BATCH_SIZE, WIDTH, TRIALS = 4, 32, 32, 8
_NORM = 0.7  # initial weight of the norm in presets


def errors(memory: Memory, overlap: str, *, repeated: bool) -> list[float]:
    """Return ‖y − v‖ / ‖v‖ after `BATCHES` inner batches with equal pairs, for each multiple.

    Keys are random unit vectors, and values are normal. An inner batch contains one pair
    ``repeated``, or `BATCH_SIZE` different pairs.
    """
    generator = torch.Generator().manual_seed(0)
    shape = (TRIALS, 1 if repeated else BATCH_SIZE, 1, WIDTH)
    k = normalize(torch.randn(shape, generator=generator, dtype=torch.float64), dim=-1)
    v = torch.randn(shape, generator=generator, dtype=torch.float64)
    length = BATCHES * BATCH_SIZE
    keys, values = (x.repeat(1, length // x.shape[1], 1, 1) for x in (k, v))
    descent = algorithm.GradientDescent(
        batch_size=BATCH_SIZE, normalized_steps=True, batch_overlap=overlap
    )
    recipe = Recipe(memory=memory, retention=retention.Keep(), algorithm=descent)
    limit = step_limit(recipe)
    assert limit is not None
    weights = None
    if not memory.linear:
        weights = [
            torch.randn(1, *size, generator=generator, dtype=torch.float64) * size[-1] ** -0.5
            for size in memory.shapes(WIDTH, WIDTH)
        ]
    params = {
        param.name: torch.full((1, WIDTH), value, dtype=torch.float64)
        for param, value in zip(memory.params(), (_NORM, 0.0), strict=False)
    }
    results: list[float] = []
    for multiple in MULTIPLES:
        lr = torch.full((TRIALS, length, 1), multiple * 2 / limit.batch_size, dtype=torch.float64)
        _, state = recall(
            recipe, keys, keys, values, {"lr": lr}, params=params, initial_memory=weights
        )
        results.append(_relative_error(read(recipe, k, state=state, params=params), v))
    return results


def _relative_error(y: Tensor, v: Tensor) -> float:
    return float(((y - v).norm(dim=-1) / v.norm(dim=-1)).mean())


_CURVES = {
    "matrix": (memory.Matrix(), "worst_case"),
    "MLP under a layer norm": (memory.MLP(norm="layer"), "worst_case"),
    "matrix, overlap measured": (memory.Matrix(), "measured"),
    "MLP under a layer norm, overlap measured": (memory.MLP(norm="layer"), "measured"),
}


@cache
def render() -> RenderedFigure:
    """Return the figure.

    Raises:
        ImportError: Matplotlib is not installed.
    """
    panels = [
        Panel(
            y="relative error",
            title=title,
            y_range=(0.0, 2.0),
            series=[
                Series(name=name, x=MULTIPLES, y=errors(*curve, repeated=repeated))
                for name, curve in _CURVES.items()
            ],
            baselines={"output 0": 1.0},
        )
        for title, repeated in (("one pair, repeated", True), ("32 different keys", False))
    ]
    return panel_figure(
        panels,
        x="rate, as a multiple of the stability limit",
        title="Error after four inner batches of 32 tokens",
    )


if __name__ == "__main__":
    figure = render()
    for name, text in {"stability.svg": figure.svg, "stability-narrow.svg": figure.narrow}.items():
        Path(sys.argv[1], name).write_text(text, encoding="utf-8")
