"""What a drawing's curves say, as data: where its axes lie in it, and the points of its curves."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["Axis", "Curve", "Drawn", "Plot"]

DIGITS = 6
"""Significant digits of a number of a curve: more than a reader can use."""


@dataclass(frozen=True, kw_only=True)
class Axis:
    """One axis.

    Attributes:
        label: what it measures, with its unit.
        low, high: its ends, in that unit.
        log: whether it is logarithmic.
    """

    label: str
    low: float
    high: float
    log: bool = False

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {"label": self.label, "low": self.low, "high": self.high, "log": self.log}


@dataclass(frozen=True, kw_only=True)
class Curve:
    """One curve, and the colour in which it is drawn.

    Attributes:
        name: as in the legend. colour: ``#rrggbb``.
        x, y: its points; a y that is not finite is a gap.
        low, high: edges of its band, or ``None``.
    """

    name: str
    colour: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    low: tuple[float, ...] | None = None
    high: tuple[float, ...] | None = None

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready; what is not finite is ``None``."""
        data: dict[str, Any] = {"name": self.name, "colour": self.colour}
        for name in ("x", "y", "low", "high"):
            numbers = getattr(self, name)
            if numbers is not None:
                data[name] = [_short(number) for number in numbers]
        return data


@dataclass(frozen=True, kw_only=True)
class Plot:
    """The axes of a drawing and the curves in them.

    Attributes:
        box: of the axes in the drawing, (left, top, width, height) as shares of its width and
            height, from its upper left corner.
        x, y: the axes.
        curves: in the order of the legend.
        levels: horizontal lines by name.
        title: of these axes, where a drawing has several.
        narrow_box: of the axes in the drawing for narrow screens, as ``box``.
    """

    box: tuple[float, float, float, float]
    x: Axis
    y: Axis
    curves: Sequence[Curve]
    levels: Mapping[str, float]
    title: str = ""
    narrow_box: tuple[float, float, float, float] | None = None

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "box": [round(share, 5) for share in self.box],
            "narrow_box": [round(share, 5) for share in self.narrow_box or self.box],
            "x": self.x.to_dict(),
            "y": self.y.to_dict(),
            "curves": [curve.to_dict() for curve in self.curves],
            "levels": [[name, _short(level)] for name, level in self.levels.items()],
            "title": self.title,
        }

    def rows(self, most: int = 60) -> list[list[float | None]]:
        """A row for every x with a point: it, and what each curve has there, ``None`` for nothing.

        Args:
            most: rows; of more, about as many are taken evenly, the first and the last among them.
        """
        found: dict[float, list[float | None]] = {}
        for index, curve in enumerate(self.curves):
            for x, y in zip(curve.x, curve.y, strict=True):
                if not math.isfinite(y):
                    continue
                row = found.setdefault(_short(x) or 0.0, [None] * len(self.curves))
                row[index] = _short(y)
        places = sorted(found)
        if len(places) > most:
            step = (len(places) - 1) / (most - 1)
            places = [places[round(step * i)] for i in range(most)]
        return [[x, *found[x]] for x in places]


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """Axes of matplotlib and what was drawn in them; `plot` reads them off once they are laid out.

    Attributes:
        axes: of a canvas.
        curves: that were drawn in them. levels: horizontal lines by name.
        x, y: what they measure, where one label serves several axes. title: of these axes.
    """

    axes: Axes
    curves: Sequence[Curve]
    levels: Mapping[str, float]
    x: str
    y: str
    title: str = ""

    def plot(self) -> Plot:
        """Where the axes lie and what they hold; the canvas was drawn before."""
        place = self.axes.get_position()
        (x0, x1), (y0, y1) = self.axes.get_xlim(), self.axes.get_ylim()
        across, up = self.axes.get_xscale() == "log", self.axes.get_yscale() == "log"
        return Plot(
            box=(place.x0, 1 - place.y1, place.width, place.height),
            x=Axis(label=self.x, low=float(x0), high=float(x1), log=across),
            y=Axis(label=self.y, low=float(y0), high=float(y1), log=up),
            curves=self.curves,
            levels=self.levels,
            title=self.title,
        )


def _short(number: float) -> float | None:
    number = float(number)
    if not math.isfinite(number):
        return None
    return int(number) if number.is_integer() and abs(number) < 2**53 else _rounded(number)


def _rounded(number: float) -> float:
    return float(f"{number:.{DIGITS}g}")
