"""A ranking as a figure: a row for each name, the least at the top, with a range around its dot."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from recollect.report.figures import FigureFiles, figure_files, new_canvas

__all__ = ["ranking_figure"]

_LOOKS = (("o", "#0072B2"), ("s", "#D55E00"), ("^", "#009E73"), ("D", "#CC79A7"))


def ranking_figure(
    values: Mapping[str, Sequence[float]],
    *,
    x: str,
    title: str,
    marked: Mapping[str, Sequence[str]] | None = None,
    baselines: Mapping[str, float] | None = None,
) -> FigureFiles:
    """Dots in rows, the least mean at the top; a line runs from the least value to the greatest.

    Args:
        values: for each name its values, one per seed; a name whose mean is not finite stands last,
            without a dot.
        x: the horizontal axis with its unit.
        title: what the figure shows.
        marked: what the names of a kind are, and these names, whose dots look alike; at most three
            kinds.
        baselines: vertical dashed lines by name.

    Raises:
        ImportError: if matplotlib is not installed.
        ValueError: if there is nothing to draw, or a name without a value.
    """
    if not values or not all(values.values()):
        raise ValueError(f"ranking_figure {title!r}: there is no name, or one without a value")
    means = {name: sum(some) / len(some) for name, some in values.items()}
    finite = {name: mean for name, mean in means.items() if math.isfinite(mean)}
    order = [*sorted(finite, key=lambda name: finite[name]), *(n for n in means if n not in finite)]
    with new_canvas() as canvas:
        canvas.set_size_inches(7.2, 1.6 + 0.27 * len(order))
        axes = canvas.subplots()
        legend: dict[str, Any] = {}
        axes.set_title(title, loc="left", fontsize=11, fontweight="bold")
        kinds = {name: kind for kind, names in (marked or {}).items() for name in names}
        looks = dict(zip(("", *(marked or {})), _LOOKS, strict=False))
        for row, name in enumerate(order):
            if name not in finite:
                continue
            kind, some = kinds.get(name, ""), values[name]
            marker, colour = looks[kind]
            axes.plot([min(some), max(some)], [row, row], color=colour, linewidth=1.4)
            dot = axes.plot([means[name]], [row], marker=marker, color=colour, linestyle="")
            legend.setdefault(kind, dot[0])
            axes.annotate(
                f"{means[name]:.3f}",
                (max(some), row),
                xytext=(7, 0),
                textcoords="offset points",
                va="center",
                fontsize=8,
            )
        labels = [name if name in finite else f"{name} (diverged)" for name in order]
        axes.set_yticks(range(len(order)), labels)
        axes.set_ylim(len(order) - 0.5, -0.5)
        axes.margins(x=0.1)
        axes.set_xlabel(x)
        for name, level in (baselines or {}).items():
            line = axes.axvline(level, color="0.35", linestyle="--", linewidth=1.0)
            legend[f"{name} ({level:.3f})"] = line
        legend.pop("", None)
        if legend:
            canvas.legend(list(legend.values()), list(legend), loc="outside lower center", ncols=3)
        return figure_files(canvas)
