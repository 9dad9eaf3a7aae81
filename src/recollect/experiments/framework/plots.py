"""Figures of experiments, as data: lines over an axis of the grid, and rankings.

::

    Lines(x="pairs", y="accuracy", by="model", panels="width", x_label="pairs", title="Recall")
    ranking("model", y="bits per byte", title="Language models", groups={"MIRAS": ("yaad",)})

A line is the mean over seeds, its band runs from the smallest to the largest. Titles and names are
format strings over the configuration and the cell (``"n = {n} items"``), or functions of both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from recollect.experiments.framework.records import Cell, NotMeasured, Results
from recollect.report.figures import Panel, RenderedFigure, Series, panel_figure, ranking_figure

__all__ = ["Figure", "Lines", "plot_panels", "ranking"]

Figure = Callable[[Results], RenderedFigure]
Text = str | Callable[[Mapping[str, Any]], str]
Axes = str | Sequence[str] | Mapping[str, Sequence[Any] | None]


@dataclass(frozen=True, kw_only=True)
class Lines:
    """Lines of one or several panels. Calling it draws the figure."""

    # a measured number or curve; or a function from the configuration to a dictionary of measures
    # by their positions on the horizontal axis
    y: str | Callable[[Mapping[str, Any]], Mapping[float, str]]
    # an axis of the grid, whose values are numbered if they are text; or the positions of a curve's
    # points, as a function of the configuration and their number (1, 2, … if empty)
    x: str | Callable[[Mapping[str, Any], int], Sequence[float]] = ""
    # axes of the grid, a line for each value; a dictionary also gives the values' order
    by: Axes = ()
    panels: Axes = ()  # axes of the grid in the same form, a panel for each value
    name: Text = ""  # name of a line
    panel_title: Text = ""  # title of a panel
    x_label: Text = ""  # label of the horizontal axis
    panel_x: str | None = None  # label of the horizontal axis in a panel, if it differs
    y_label: str = ""  # label of the vertical axis
    title: Text = ""  # title of the figure
    height: float = 2.3  # height of the figure
    log_x: bool = False  # as in `recollect.report.figures.Panel`
    log_y: bool | None = None  # as in `recollect.report.figures.Panel`
    # limits of the vertical axis, also as a function of the results
    y_range: tuple[float, float] | Callable[[Results], tuple[float, float]] | None = None
    # horizontal lines by name: a number, or the name of a measure
    baselines: Mapping[str, float | str] = field(default_factory=dict)
    # values of the first axis of by in the order of their colours and markers
    style_order: Sequence[Any] = ()
    # colour and marker of all lines, as in `recollect.report.figures.Series`
    style: int | None = None
    band: bool = True  # whether a band runs from the smallest to the largest value
    underlays: Sequence[Lines] = ()  # further lines of every panel, below these
    overlays: Sequence[Lines] = ()  # further lines of every panel, above these
    cell: Cell = field(default_factory=dict)  # values of axes that select the cells

    def __call__(self, results: Results) -> RenderedFigure:
        return plot_panels(self, x_label=self.x_label, title=self.title, height=self.height)(
            results
        )

    def make_panels(self, results: Results) -> list[Panel]:
        """Return the panels without drawing them."""
        y_range = self.y_range(results) if callable(self.y_range) else self.y_range
        selected, panels = results.select(**self.cell), []
        for cell in _grid(selected, self.panels):
            part = selected.select(**cell)
            groups = (*self.underlays, self, *self.overlays)
            series = [line for group in groups for line in group._series(part)]
            levels = {name: _level(part, level) for name, level in self.baselines.items()}
            panels.append(
                Panel(
                    y=self.y_label or str(self.y),
                    series=series,
                    baselines={name: x for name, x in levels.items() if x is not None},
                    x=self.panel_x,
                    title=_format(self.panel_title, results, cell),
                    log_x=self.log_x,
                    log_y=self.log_y,
                    y_range=y_range,
                )
            )
        return panels

    def _series(self, results: Results) -> list[Series]:
        selected = results.select(**self.cell)
        return [
            self._line(selected.select(**cell), cell, _format(self.name, results, cell))
            for cell in _grid(selected, self.by)
        ]

    def _line(self, results: Results, cell: Cell, name: str) -> Series:
        x, (y, low, high) = self._points(results)
        first = next(iter(cell.values()), None)
        return Series(
            name=name or ", ".join(map(str, cell.values())),
            x=x,
            y=y,
            low=low if self.band else None,
            high=high if self.band else None,
            style=self.style_order.index(first) if self.style_order else self.style,
        )

    def _points(self, results: Results) -> tuple[Sequence[float], tuple[list[float], ...]]:
        if callable(self.y):
            measures = self.y(results.config)
            points = [(measure, results) for measure in measures.values()]
            return list(measures), _statistics(points)
        if isinstance(self.x, str) and self.x:
            places = results.axis_values(self.x)
            is_text = any(isinstance(place, str) for place in places)
            places = places if is_text else sorted(places)
            points = [(self.y, results.select(**{self.x: place})) for place in places]
            return range(1, len(places) + 1) if is_text else places, _statistics(points)
        curve = results.mean_and_range(self.y)
        count = len(curve[0])
        return self.x(results.config, count) if callable(self.x) else range(1, count + 1), curve


def plot_panels(
    *groups: Lines, x_label: Text = "", title: Text = "", height: float = 2.3
) -> Figure:
    """Return a figure with the panels of all groups."""

    def draw(results: Results) -> RenderedFigure:
        return panel_figure(
            [panel for group in groups for panel in group.make_panels(results)],
            x=_format(x_label, results, {}),
            title=_format(title, results, {}),
            height=height,
        )

    return draw


def ranking(
    by: str,
    *,
    y: str,
    title: str,
    x_label: str = "",
    groups: Mapping[str, Sequence[str]] | None = None,
    baseline: str = "",
) -> Figure:
    """Return a figure with a row for each value of an axis, the smallest mean at the top.

    Values of a group have a colour and marker in common. ``baseline`` is a measure that is drawn as
    a vertical line if it was measured.
    """

    def draw(results: Results) -> RenderedFigure:
        level = _level(results, baseline) if baseline else None
        return ranking_figure(
            {str(name): results.values(y, **{by: name}) for name in results.axis_values(by)},
            x=x_label or y,
            title=title,
            groups=groups or {},
            baselines={} if level is None else {baseline: level},
        )

    return draw


def _statistics(points: Sequence[tuple[str, Results]]) -> tuple[list[float], ...]:
    """Return means, minima and maxima of a measure in each of several results."""
    return (
        [results.mean(measure) for measure, results in points],
        [results.min(measure) for measure, results in points],
        [results.max(measure) for measure, results in points],
    )


def _level(results: Results, level: float | str) -> float | None:
    """Return a number, or that of a measure, or ``None`` if it was not measured."""
    if not isinstance(level, str):
        return level
    return results.values(level)[0] if any(level in r.values for r in results) else None


def _grid(results: Results, axes: Axes) -> list[dict[str, Any]]:
    """Return the measured cells over some axes, nested in their order."""
    if not results.records:
        raise NotMeasured("there is no such cell")
    names = (axes,) if isinstance(axes, str) else axes
    orders = axes if isinstance(axes, Mapping) else dict.fromkeys(names)
    cells: list[dict[str, Any]] = [{}]
    for axis, values in orders.items():
        cells = [
            {**cell, axis: value}
            for cell in cells
            for value in values or results.axis_values(axis, **cell)
            if results.has_cell(**cell, **{axis: value})
        ]
    return cells


def _format(text: Text, results: Results, cell: Cell) -> str:
    context = {**results.config, **cell}
    return text(context) if callable(text) else text.format_map(context)
