"""Axes and curves of a figure as data, from which the script of a page reads values."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["Axis", "Curve", "Plot", "PlottedAxes"]


@dataclass(frozen=True, kw_only=True)
class Axis:
    """One axis."""

    label: str  # measured quantity, with its unit
    low: float  # lower limit
    high: float  # upper limit
    log: bool = False  # whether the axis is logarithmic


@dataclass(frozen=True, kw_only=True)
class Curve:
    """One curve."""

    name: str  # name in the legend
    colour: str  # colour as #rrggbb
    x: tuple[float, ...]  # positions
    y: tuple[float, ...]  # values; one that is not finite is a gap
    low: tuple[float, ...] | None = None  # lower edge of the band, or None
    high: tuple[float, ...] | None = None  # upper edge of the band, or None

    def to_dict(self) -> dict[str, Any]:
        """Return the curve for JSON; a value that is not finite is ``None``."""
        data: dict[str, Any] = {"name": self.name, "colour": self.colour}
        for name in ("x", "y", "low", "high"):
            numbers = getattr(self, name)
            if numbers is not None:
                data[name] = [_shorten(number) for number in numbers]
        return data


@dataclass(frozen=True, kw_only=True)
class Plot:
    """A pair of axes and its curves."""

    # position of the axes from the upper left corner of the drawing: left, top, width and height as
    # fractions of its width and height
    bounds: tuple[float, float, float, float]
    x: Axis
    y: Axis
    curves: Sequence[Curve]  # curves in the order of the legend
    baselines: Mapping[str, float]  # horizontal lines by name
    title: str = ""  # title of these axes, if the drawing has several
    # position of the axes in the drawing for narrow screens
    narrow_bounds: tuple[float, float, float, float] | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the plot for JSON."""
        return {
            "bounds": [round(part, 5) for part in self.bounds],
            "narrow_bounds": [round(part, 5) for part in self.narrow_bounds or self.bounds],
            "x": vars(self.x),
            "y": vars(self.y),
            "curves": [curve.to_dict() for curve in self.curves],
            "baselines": [[name, _shorten(value)] for name, value in self.baselines.items()],
            "title": self.title,
        }

    def rows(self, max_rows: int = 60) -> list[list[float | None]]:
        """Return a row per x: its value, and the value of each curve, ``None`` for a gap.

        Args:
            max_rows: Maximum number of rows; of more, evenly spaced rows are returned, with the
                first and the last.
        """
        rows: dict[float, list[float | None]] = {}
        for index, curve in enumerate(self.curves):
            for x, y in zip(curve.x, curve.y, strict=True):
                if not math.isfinite(y):
                    continue
                row = rows.setdefault(_shorten(x) or 0.0, [None] * len(self.curves))
                row[index] = _shorten(y)
        positions = sorted(rows)
        if len(positions) > max_rows:
            step = (len(positions) - 1) / (max_rows - 1)
            positions = [positions[round(step * i)] for i in range(max_rows)]
        return [[x, *rows[x]] for x in positions]


@dataclass(frozen=True, kw_only=True)
class PlottedAxes:
    """Axes of matplotlib with their curves."""

    axes: Axes
    curves: Sequence[Curve]
    baselines: Mapping[str, float]  # horizontal lines by name
    x: str  # label of the horizontal axis
    y: str  # label of the vertical axis
    title: str = ""  # title of these axes

    def extract_plot(self) -> Plot:
        """Return position, limits and curves of the axes; the figure must have been drawn."""
        box = self.axes.get_position()
        (x0, x1), (y0, y1) = self.axes.get_xlim(), self.axes.get_ylim()
        x_log, y_log = self.axes.get_xscale() == "log", self.axes.get_yscale() == "log"
        return Plot(
            bounds=(box.x0, 1 - box.y1, box.width, box.height),
            x=Axis(label=self.x, low=float(x0), high=float(x1), log=x_log),
            y=Axis(label=self.y, low=float(y0), high=float(y1), log=y_log),
            curves=self.curves,
            baselines=self.baselines,
            title=self.title,
        )


def _shorten(number: float) -> float | None:
    """Round to six significant digits; ``None`` if the number is not finite."""
    number = float(number)
    if not math.isfinite(number):
        return None
    if number.is_integer() and abs(number) < 2**53:
        return int(number)
    return float(f"{number:.6g}")
