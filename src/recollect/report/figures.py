"""Figures that a person can read: in colour, in grey, on a phone, in print.

A figure is drawn twice: for a page, and for narrow screens with its panels stacked and its legend
below. Where a page is dark, both turn dark: a style inside the SVG inverts its lightness.

Each series has a colour of a palette that colour-blind readers can tell apart (Okabe and Ito 2008),
and a marker and a line style of its own, so that colour is never the only difference. Matplotlib is
imported when a figure is drawn, and no window or global state is touched.
"""

from __future__ import annotations

import io
import math
import textwrap
from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recollect.report.files import write_atomic
from recollect.report.plots import Curve, Drawn, Plot

if TYPE_CHECKING:
    from collections.abc import Iterator

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Canvas

# Yellow is left out: it cannot be seen on white paper.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*", "<", ">")
_LINES = ("-", (0, (5, 1.5)), (0, (3, 1, 1, 1)), (0, (1, 1)), (0, (7, 1, 1, 1, 1, 1)))
_HATCHES = ("", "//", "..", "\\\\", "xx", "--", "++")
_STYLE = {
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.axisbelow": True,
    "figure.facecolor": "white",
    "font.size": 10.0,
    "grid.alpha": 0.3,
    "legend.frameon": False,
    "savefig.facecolor": "white",
    "svg.fonttype": "path",  # a reader's machine may lack the font
    "svg.hashsalt": "recollect",  # the same figure gives the same bytes
}
_LEGEND_BELOW = 9  # names of more series than this go below the axes
NARROW = 4.1
"""Width of the drawing for narrow screens, in inches."""

_DARK = (
    "<style>@media (prefers-color-scheme: dark) "
    "{ svg { filter: invert(0.92) hue-rotate(180deg) } }</style>"
)
"""An image of an SVG has the colour scheme of the element that shows it."""


@dataclass(frozen=True, kw_only=True)
class Series:
    """One line of a figure.

    Args:
        name: what the legend says.
        x: places on the horizontal axis, at least one, finite.
        y: as many values; NaN leaves a gap.
        low, high: edges of a band around the line, as the least and the greatest over seeds.
        look: which of the palette's colours, dashes and markers; by default the line's place.
    """

    name: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None
    look: int | None = None

    def __post_init__(self) -> None:
        if len(self.x) != len(self.y) or not len(self.x):
            raise ValueError(
                f"Series {self.name!r}: x has {len(self.x)} and y has {len(self.y)} values; "
                f"give as many of both, and at least one"
            )
        for edge in (self.low, self.high):
            if (self.low is None) != (self.high is None) or (
                edge is not None and len(edge) != len(self.x)
            ):
                raise ValueError(
                    f"Series {self.name!r}: a band needs low and high, with as many values as y"
                )


@dataclass(frozen=True, kw_only=True)
class FigureFiles:
    """A finished figure as the bytes of its two files.

    Args:
        png: raster image, 200 dots per inch.
        svg: vector image without external parts.
        plots: its axes with curves, as data to read values off.
        narrow: the vector image for narrow screens: panels stacked, legend below.
    """

    png: bytes
    svg: str
    plots: tuple[Plot, ...] = ()
    narrow: str = ""

    def save(self, path: str | PathLike[str]) -> tuple[Path, Path]:
        """Write ``path`` with the endings .png, .svg and -narrow.svg.

        Returns:
            The paths of the first two.
        """
        stem = Path(path)
        if stem.suffix in (".png", ".svg"):
            stem = stem.with_suffix("")
        if self.narrow:
            write_atomic(stem.with_name(stem.name + "-narrow.svg"), self.narrow)
        return (
            write_atomic(stem.with_name(stem.name + ".png"), self.png),
            write_atomic(stem.with_name(stem.name + ".svg"), self.svg),
        )


def line_figure(
    series: Sequence[Series],
    *,
    x: str,
    y: str,
    title: str,
    baselines: Mapping[str, float] | None = None,
    log_x: bool = False,
    log_y: bool = False,
    y_range: tuple[float, float] | None = None,
) -> FigureFiles:
    """Lines over a common horizontal axis.

    Args:
        series: one or more lines.
        x: the horizontal axis with its unit, as in ``"training tokens"``.
        y: the vertical axis with its unit, as in ``"held-out bits per byte"``.
        title: what the figure shows.
        baselines: horizontal dashed lines by name, such as a bigram's bits per byte.
        log_x: whether the horizontal axis is logarithmic (base 2), with a tick at each value,
            or at powers of two where those would run into each other.
        log_y: whether the vertical axis is logarithmic (base 10).
        y_range: bottom and top of the vertical axis; by default what the data needs.

    Returns:
        The figure's files.

    Raises:
        ImportError: if matplotlib is not installed.
        ValueError: if there is nothing to draw.
    """
    if not series:
        raise ValueError(f"line_figure {title!r}: there is no series to draw")
    with _axes(title, x, y) as (canvas, axes):
        # Markers of crowded lines would hide the lines; some ten of each are enough.
        curves = [
            draw_line(axes, line, index, marks=10, markersize=5, linewidth=1.6)
            for index, line in enumerate(series)
        ]
        for index, (name, level) in enumerate((baselines or {}).items()):
            axes.axhline(
                level,
                label=f"{name} ({level:.3g})",
                color="0.35",
                linestyle=("--", ":", "-.")[index % 3],
                linewidth=1.4,
            )
        if log_x:
            draw_log_x(axes, series, room=45)
        elif max(abs(value) for line in series for value in line.x) >= 10_000:
            axes.xaxis.set_major_formatter(_engineering())
        if log_y:
            axes.set_yscale("log")
        if y_range is not None:
            axes.set_ylim(*y_range)
        _legend(canvas, axes, len(series) + len(baselines or {}))
        return figure_files(
            canvas, [Drawn(axes=axes, curves=curves, levels=baselines or {}, x=x, y=y)]
        )


def bar_figure(
    groups: Sequence[str],
    series: Mapping[str, Sequence[float]],
    *,
    y: str,
    title: str,
    x: str = "",
    baselines: Mapping[str, float] | None = None,
) -> FigureFiles:
    """Bars in groups: one bar per series over each group.

    Args:
        groups: names along the horizontal axis.
        series: for each name of the legend, one value per group; NaN leaves the bar out.
        y: the vertical axis with its unit.
        title: what the figure shows.
        x: the horizontal axis, if the groups' names do not say it.
        baselines: horizontal dashed lines by name.

    Returns:
        The figure's files.

    Raises:
        ImportError: if matplotlib is not installed.
        ValueError: if there is nothing to draw, or a series has not one value per group.
    """
    if not groups or not series:
        raise ValueError(f"bar_figure {title!r}: there is nothing to draw")
    for name, values in series.items():
        if len(values) != len(groups):
            raise ValueError(
                f"bar_figure {title!r}: series {name!r} has {len(values)} values for "
                f"{len(groups)} groups"
            )
    width = 0.8 / len(series)
    with _axes(title, x, y) as (canvas, axes):
        for index, (name, values) in enumerate(series.items()):
            shift = (index - (len(series) - 1) / 2) * width
            bars = axes.bar(
                [place + shift for place in range(len(groups))],
                list(values),
                width * 0.92,
                label=name,
                color=_COLOURS[index % len(_COLOURS)],
                hatch=_HATCHES[index % len(_HATCHES)],
                edgecolor="white",
                linewidth=0.5,
            )
            if len(groups) * len(series) <= 12:
                axes.bar_label(bars, labels=list(map(_short, values)), padding=2, fontsize=8)
        for index, (name, level) in enumerate((baselines or {}).items()):
            axes.axhline(
                level,
                label=f"{name} ({level:.3g})",
                color="0.35",
                linestyle=("--", ":", "-.")[index % 3],
                linewidth=1.4,
            )
        crowded = max(map(len, groups)) * len(groups) > 60
        axes.set_xticks(
            range(len(groups)),
            list(groups),
            rotation=30 if crowded else 0,
            ha="right" if crowded else "center",
        )
        axes.grid(visible=False, axis="x")
        if max(abs(value) for values in series.values() for value in values) >= 10_000:
            axes.yaxis.set_major_formatter(_engineering())
        if len(series) > 1 or baselines:
            _legend(canvas, axes, len(series) + len(baselines or {}))
        return figure_files(canvas)


def draw_line(
    axes: Axes, line: Series, index: int, *, marks: int, markersize: float, linewidth: float
) -> Curve:
    """One series in the colour, dash and marker of its place, with about so many markers."""
    index = index if line.look is None else line.look
    colour = _COLOURS[index % len(_COLOURS)]
    if line.low is not None and line.high is not None:
        axes.fill_between(line.x, line.low, line.high, color=colour, alpha=0.18, linewidth=0)
    axes.plot(
        line.x,
        line.y,
        label=line.name,
        color=colour,
        linestyle=_LINES[index % len(_LINES)],
        marker=_MARKERS[index % len(_MARKERS)],
        markersize=markersize,
        markevery=max(1, len(line.x) // marks),
        linewidth=linewidth,
    )
    low, high = (None if edge is None else tuple(edge) for edge in (line.low, line.high))
    return Curve(
        name=line.name, colour=colour, x=tuple(line.x), y=tuple(line.y), low=low, high=high
    )


def draw_log_x(axes: Axes, series: Sequence[Series], *, room: int) -> None:
    """A horizontal axis of base 2, with the ticks of `log_ticks`.

    Args:
        axes: where the lines are drawn.
        series: the lines.
        room: about how many digits have room beside each other below the axis.
    """
    ticks = log_ticks([value for line in series for value in line.x], room=room)
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [f"{value:g}" for value in ticks])
    axes.minorticks_off()


def log_ticks(values: Sequence[float], *, room: int) -> list[float]:
    """Ticks of a logarithmic axis: at its values if their labels fit, else at powers of two.

    Args:
        values: those above 0 have a place on it.
        room: about how many digits have room beside each other below the axis.
    """
    ticks = sorted({value for value in values if value > 0})
    if not ticks:
        return []
    span = math.log2(ticks[-1] / ticks[0])

    def fit(some: Sequence[float]) -> bool:
        labels = [f"{value:g}" for value in some]
        places = [room * math.log2(value / ticks[0]) / span if span else 0.0 for value in some]
        near = zip(places, places[1:], labels, labels[1:], strict=False)
        return all(b - a > 1 + (len(x) + len(y)) / 2 for a, b, x, y in near)

    if fit(ticks):
        return ticks
    low, high = math.ceil(math.log2(ticks[0])), math.floor(math.log2(ticks[-1]))
    for step in range(1, max(high - low, 1) + 1):
        powers = [2.0**power for power in range(low, high + 1, step)]
        if powers and fit(powers):
            return powers
    return [ticks[0], ticks[-1]]  # no two powers of two between them


@contextmanager
def _axes(title: str, x: str, y: str) -> Iterator[tuple[Canvas, Axes]]:
    with new_canvas() as canvas:
        axes = canvas.subplots()
        axes.set_title(title, loc="left", fontsize=11, fontweight="bold")
        axes.set_xlabel(x)
        axes.set_ylabel(y)
        yield canvas, axes


@contextmanager
def new_canvas() -> Iterator[Canvas]:
    """An empty figure in the house's style."""
    try:
        import matplotlib
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure as Canvas
    except ImportError as error:
        raise ImportError(
            'figures need matplotlib: pip install -e ".[plot]" in its checkout'
        ) from error
    with matplotlib.rc_context(_STYLE):  # pyright: ignore[reportArgumentType]
        # Made directly rather than by pyplot, which would keep every figure alive.
        canvas = Canvas(figsize=(7.2, 4.4), layout="constrained")
        FigureCanvasAgg(canvas)
        yield canvas


def _engineering() -> Any:
    from matplotlib.ticker import EngFormatter

    return EngFormatter(sep="")


def _short(value: float) -> str:
    """A bar's value in some three digits: 0.0312, 1.4k, 25k; nothing for a bar left out."""
    if math.isnan(value):
        return ""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}"


def _legend(canvas: Canvas, axes: Axes, entries: int) -> None:
    """Outside the axes, where constrained layout makes room and no line is hidden."""
    handles, labels = axes.get_legend_handles_labels()
    if entries > _LEGEND_BELOW or max(map(len, labels)) > 28:
        columns = 1 if max(map(len, labels)) > 40 else 2
        canvas.legend(handles, labels, loc="outside lower center", ncols=columns, handlelength=3.5)
    else:
        canvas.legend(handles, labels, loc="outside right upper", handlelength=3.5)


def figure_files(canvas: Canvas, drawn: Sequence[Drawn] = ()) -> FigureFiles:
    """The finished canvas as files, the same bytes every time.

    Args:
        canvas: with all that it shall show; its layout is changed.
        drawn: its axes whose curves can be read off.
    """
    png = io.BytesIO()
    canvas.savefig(png, format="png", dpi=200, metadata={"Software": None})
    svg = _svg(canvas)
    plots = [one.plot() for one in drawn]  # the last drawing placed the axes
    _stack(canvas)
    narrow = _svg(canvas)
    return FigureFiles(
        png=png.getvalue(),
        svg=svg,
        plots=tuple(
            replace(plot, narrow_box=one.plot().box) for plot, one in zip(plots, drawn, strict=True)
        ),
        narrow=narrow,
    )


def _svg(canvas: Canvas) -> str:
    """The drawing as SVG that follows the colour scheme of its page."""
    text = io.StringIO()
    canvas.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    return text.getvalue().replace("<defs>", f"{_DARK}\n <defs>", 1)


def _stack(canvas: Canvas) -> None:
    """Change the layout for narrow screens: axes in one column, legends below, texts wrapped."""
    from matplotlib.gridspec import GridSpec
    from matplotlib.ticker import MaxNLocator

    stacked = [axes for axes in canvas.axes if axes.get_subplotspec() is not None]
    rows = max((axes.get_gridspec().nrows for axes in stacked), default=1)  # type: ignore[union-attr]
    height = canvas.get_figheight() * len(stacked) / rows
    for old in list(canvas.legends):
        labels = [text.get_text() for text in old.get_texts()]
        columns = max(1, min(len(labels), 48 // (7 + max(map(len, labels)))))
        canvas.legend(
            [handle for handle in old.legend_handles if handle is not None],
            [textwrap.fill(label, 40) for label in labels],
            loc="outside lower center",
            ncols=columns,
            handlelength=old.handlelength,
            fontsize=9,
        )
        old.remove()
        height += 0.2 * math.ceil(len(labels) / columns)
    canvas.set_size_inches(NARROW, height)
    grid = GridSpec(len(stacked), 1, figure=canvas)
    look: dict[str, Any] = {"fontsize": 9}
    if len(stacked) == 1:
        look = {"fontsize": 11, "fontweight": "bold"}
    for index, axes in enumerate(stacked):
        axes.set_subplotspec(grid[index])
        axes.tick_params(labelbottom=True)
        axes.set_title(_wrapped(axes.get_title("left"), look["fontsize"]), loc="left", **look)
        repeated = axes is not stacked[-1] and axes.get_xlabel() == stacked[-1].get_xlabel()
        axes.set_xlabel("" if repeated else _wrapped(axes.get_xlabel(), 10))
        if axes.get_xscale() == "log":
            ticks = log_ticks([float(tick) for tick in axes.get_xticks()], room=26)
            axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        elif isinstance(axes.xaxis.get_major_locator(), MaxNLocator):
            axes.locator_params(axis="x", nbins=5)
    title = canvas.get_suptitle()
    if title:
        canvas.suptitle(_wrapped(title, 11), x=0.01, ha="left", fontsize=11, fontweight="bold")


def _wrapped(text: str, size: float) -> str:
    """A text in lines that fit the narrow drawing.

    Args:
        text: of one or several lines.
        size: of the font, in points.
    """
    return textwrap.fill(text, int(0.85 * NARROW * 72 / (0.58 * size)))
