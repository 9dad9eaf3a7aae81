"""Figures of several axes whose lines of one name look alike, with one legend below them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from recollect.report.figures import (
    FigureFiles,
    Series,
    draw_line,
    draw_log_x,
    figure_files,
    new_canvas,
)
from recollect.report.plots import Curve, Drawn

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["Panel", "panel_figure"]


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One of several axes.

    Args:
        y: the vertical axis.
        series: its lines; lines of one name look alike in every panel.
        baselines: horizontal dashed lines by name, drawn where the data come near them.
        x: a horizontal axis of its own, in place of the figure's.
        title: above the panel, or nothing.
        log_x: whether its horizontal axis is logarithmic (base 2), with a tick at each value (of
            many: at powers of two).
        log_y: the same of the vertical axis (base 10); by default where values span decades.
        y_range: bottom and top; by default what the data needs.
    """

    y: str
    series: Sequence[Series]
    baselines: Mapping[str, float] | None = None
    x: str | None = None
    title: str = ""
    log_x: bool = False
    log_y: bool | None = None
    y_range: tuple[float, float] | None = None


def panel_figure(
    panels: Sequence[Panel], *, x: str, title: str, height: float = 2.3
) -> FigureFiles:
    """Panels of lines in two columns.

    Args:
        panels: one or more.
        x: the horizontal axis, with its unit, of panels without one of their own.
        title: what the figure shows.
        height: of a row of panels, in inches.

    Raises:
        ImportError: if matplotlib is not installed.
        ValueError: if there is nothing to draw.
    """
    if not panels or not all(panel.series for panel in panels):
        raise ValueError(f"panel_figure {title!r}: there is a panel without a line, or none")
    with new_canvas() as canvas:
        rows, shared = math.ceil(len(panels) / 2), all(panel.x is None for panel in panels)
        columns = min(2, len(panels))
        looks = _looks(panels)
        canvas.set_size_inches(7.2, 0.6 + height * rows + 0.2 * math.ceil(len(looks) / 4))
        grid = canvas.subplots(rows, columns, sharex=shared, squeeze=False).flatten()
        canvas.suptitle(title, x=0.01, ha="left", fontsize=11, fontweight="bold")
        drawn = [
            _draw_panel(axes, panel, looks, solo=len(panels) == 1, x=panel.x or x)
            for axes, panel in zip(grid, panels, strict=False)
        ]
        for place, axes in enumerate(grid):
            if place >= len(panels):
                axes.remove()
            elif not shared or place + columns >= len(panels):
                axes.set_xlabel(panels[place].x or x)
                axes.tick_params(labelbottom=True)
        found: dict[str, Any] = {}
        for axes in grid[: len(panels)]:
            for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
                found.setdefault(label, handle)
        across = max(1, min(len(found), 6, 90 // (7 + max(map(len, found)))))
        canvas.legend(
            list(found.values()),
            list(found),
            loc="outside lower center",
            ncols=across,
            handlelength=3.5,
        )
        return figure_files(canvas, drawn)


def _looks(panels: Sequence[Panel]) -> dict[str, int]:
    """Which look belongs to a name, the same in every panel."""
    looks: dict[str, int] = {}
    for panel in panels:
        for line in panel.series:
            looks.setdefault(line.name, len(looks) if line.look is None else line.look)
    return looks


def _draw_panel(axes: Axes, panel: Panel, looks: Mapping[str, int], *, solo: bool, x: str) -> Drawn:
    finite: list[float] = []
    curves: list[Curve] = []
    levels: dict[str, float] = {}
    for line in panel.series:
        look = looks[line.name]
        curves.append(draw_line(axes, line, look, marks=6, markersize=4, linewidth=1.3))
        finite += [value for value in line.y if math.isfinite(value)]
    low, high = min(finite, default=0.0), max(finite, default=1.0)
    wide = low > 0 and high > 100 * low and panel.y_range is None
    if panel.log_y or (panel.log_y is None and wide):
        axes.set_yscale("log")
    for name, level in (panel.baselines or {}).items():
        if low < level < 2 * high or panel.y_range is not None:
            levels[name] = level
            axes.axhline(level, color="0.35", linestyle="--", linewidth=1.0)
            axes.annotate(
                name,
                (1, level),
                xycoords=("axes fraction", "data"),
                ha="right",
                va="bottom",
                fontsize=8,
                color="0.35",
            )
    if panel.log_x:
        draw_log_x(axes, panel.series, room=45 if solo else 30)
    if panel.y_range is not None:
        axes.set_ylim(*panel.y_range)
    if panel.title:
        axes.set_title(panel.title, loc="left", fontsize=9)
    axes.set_ylabel(panel.y)
    return Drawn(axes=axes, curves=curves, levels=levels, x=x, y=panel.y, title=panel.title)
