"""Figures of lines and rankings, readable in colour, in grey, on narrow screens and in print.

Every figure is drawn twice: for a page, and for narrow screens with panels stacked and the legend
below. On a dark page, a style inside the SVG inverts the lightness of both.

Each series has a colour of a palette for colour-blind readers (Okabe and Ito 2008), a marker and a
line style. Matplotlib is imported when a figure is drawn; no global state is changed.
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
from recollect.report.plots import Curve, Plot, PlottedAxes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Canvas

__all__ = [
    "Panel",
    "RenderedFigure",
    "Series",
    "line_figure",
    "log_ticks",
    "new_figure",
    "panel_figure",
    "plot_series",
    "ranking_figure",
    "render_figure",
]

# Without yellow, which is invisible on white paper.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*", "<", ">")
_LINES = ("-", (0, (5, 1.5)), (0, (3, 1, 1, 1)), (0, (1, 1)), (0, (7, 1, 1, 1, 1, 1)))
_GROUP_STYLES = (("o", "#0072B2"), ("s", "#D55E00"), ("^", "#009E73"), ("D", "#CC79A7"))
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
_TITLE: dict[str, Any] = {"fontsize": 11, "fontweight": "bold"}
_LEGEND_BELOW = 9  # with more entries, the legend is below the axes
NARROW = 4.1
"""Width of the drawing for narrow screens, in inches."""

_DARK = (
    "<style>@media (prefers-color-scheme: dark) "
    "{ svg { filter: invert(0.92) hue-rotate(180deg) } }</style>"
)
"""Style inside an SVG, which has the colour scheme of the element that shows the image."""


@dataclass(frozen=True, kw_only=True)
class Series:
    """One line of a figure.

    Raises:
        ValueError: The lengths differ, or there is no value.
    """

    name: str  # name in the legend
    x: Sequence[float]  # positions on the horizontal axis, at least one, finite
    y: Sequence[float]  # values, as many as positions; NaN leaves a gap
    # lower edge of a band around the line, such as the minimum over seeds
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None  # upper edge of the band
    # index of the colour, line style and marker; by default the index of the series
    style: int | None = None
    points_only: bool = False  # whether there is no line between the points

    def __post_init__(self) -> None:
        if len(self.x) != len(self.y) or not len(self.x):
            raise ValueError(
                f"Series {self.name!r}: x has {len(self.x)} and y has {len(self.y)} values; "
                f"give as many of both, and at least one"
            )
        edges = [edge for edge in (self.low, self.high) if edge is not None]
        if len(edges) == 1 or any(len(edge) != len(self.x) for edge in edges):
            raise ValueError(
                f"Series {self.name!r}: a band needs low and high, with as many values as y"
            )


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One of several axes of a figure."""

    y: str  # label of the vertical axis
    series: Sequence[Series]  # lines; those of one name have one style in every panel
    # horizontal dashed lines by name, drawn if they are near the data
    baselines: Mapping[str, float] | None = None
    x: str | None = None  # label of the horizontal axis, if it differs from the figure's
    title: str = ""
    log_x: bool = False  # whether the horizontal axis is logarithmic (base 2)
    # whether the vertical axis is logarithmic (base 10); by default if it spans decades
    log_y: bool | None = None
    # limits of the vertical axis; by default those of the data
    y_range: tuple[float, float] | None = None


@dataclass(frozen=True, kw_only=True)
class RenderedFigure:
    """A finished figure as the contents of its files."""

    png: bytes  # raster image, 200 dots per inch
    svg: str  # vector image without external parts
    plots: tuple[Plot, ...] = ()  # axes and curves as data
    narrow: str = ""  # vector image for narrow screens: panels stacked, legend below

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
) -> RenderedFigure:
    """Draw lines in one pair of axes, with the values of the baselines in the legend.

    Args:
        series: One or more lines.
        x: Label of the horizontal axis with its unit, such as ``"training tokens"``.
        y: Label of the vertical axis with its unit, such as ``"held-out bits per byte"``.
        title: Title of the figure.
        baselines: Horizontal dashed lines by name, such as the bits per byte of a bigram.
        log_x: Whether the horizontal axis is logarithmic (base 2).
        log_y: Whether the vertical axis is logarithmic (base 10).
        y_range: Limits of the vertical axis; by default those of the data.

    Raises:
        ImportError: Matplotlib is not installed.
        ValueError: There is no series.
    """
    if not series:
        raise ValueError(f"line_figure {title!r}: there is no series to draw")
    baselines = baselines or {}
    with new_figure() as canvas:
        axes = canvas.subplots()
        axes.set_title(title, loc="left", **_TITLE)
        axes.set_xlabel(x)
        axes.set_ylabel(y)
        # Markers of crowded lines would hide the lines; about ten of each are enough.
        curves = [
            plot_series(axes, line, index, marks=10, markersize=5, linewidth=1.6)
            for index, line in enumerate(series)
        ]
        for index, (name, value) in enumerate(baselines.items()):
            axes.axhline(
                value,
                label=f"{name} ({value:.3g})",
                color="0.35",
                linestyle=("--", ":", "-.")[index % 3],
                linewidth=1.4,
            )
        if log_x:
            _set_log_x(axes, series, width=45)
        elif max(abs(value) for line in series for value in line.x) >= 10_000:
            from matplotlib.ticker import EngFormatter

            axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        if log_y:
            axes.set_yscale("log")
        if y_range is not None:
            axes.set_ylim(*y_range)
        handles, labels = axes.get_legend_handles_labels()
        # Outside the axes, so that the legend hides no line.
        longest = max(map(len, labels))
        if len(series) + len(baselines) > _LEGEND_BELOW or longest > 28:
            columns = 1 if longest > 40 else 2
            canvas.legend(
                handles, labels, loc="outside lower center", ncols=columns, handlelength=3.5
            )
        else:
            canvas.legend(handles, labels, loc="outside right upper", handlelength=3.5)
        plotted = PlottedAxes(axes=axes, curves=curves, baselines=baselines, x=x, y=y)
        return render_figure(canvas, [plotted])


def panel_figure(
    panels: Sequence[Panel], *, x: str, title: str, height: float = 2.3
) -> RenderedFigure:
    """Draw panels of lines in two columns, with one legend below them.

    Args:
        panels: One or more panels.
        x: Label of the horizontal axis, with its unit, of panels without a label of their own.
        title: Title of the figure.
        height: Height of a row of panels, in inches.

    Raises:
        ImportError: Matplotlib is not installed.
        ValueError: There is no panel, or a panel without a line.
    """
    if not panels or not all(panel.series for panel in panels):
        raise ValueError(f"panel_figure {title!r}: there is a panel without a line, or none")
    styles: dict[str, int] = {}
    for line in (line for panel in panels for line in panel.series):
        styles.setdefault(line.name, len(styles) if line.style is None else line.style)
    with new_figure() as canvas:
        rows, columns = math.ceil(len(panels) / 2), min(2, len(panels))
        share_x = all(panel.x is None for panel in panels)
        canvas.set_size_inches(7.2, 0.6 + height * rows + 0.2 * math.ceil(len(styles) / 4))
        grid = canvas.subplots(rows, columns, sharex=share_x, squeeze=False).flatten()
        canvas.suptitle(title, x=0.01, ha="left", **_TITLE)
        plotted = [
            _draw_panel(axes, panel, styles, x=panel.x or x, tick_width=30 if columns > 1 else 45)
            for axes, panel in zip(grid, panels, strict=False)
        ]
        for index, axes in enumerate(grid):
            if index >= len(panels):
                axes.remove()
            elif not share_x or index + columns >= len(panels):
                axes.set_xlabel(panels[index].x or x)
                axes.tick_params(labelbottom=True)
        legend: dict[str, Any] = {}
        for axes in grid[: len(panels)]:
            for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
                legend.setdefault(label, handle)
        canvas.legend(
            list(legend.values()),
            list(legend),
            loc="outside lower center",
            ncols=max(1, min(len(legend), 6, 90 // (7 + max(map(len, legend))))),
            handlelength=3.5,
        )
        return render_figure(canvas, plotted)


def _draw_panel(
    axes: Axes, panel: Panel, styles: Mapping[str, int], *, x: str, tick_width: int
) -> PlottedAxes:
    curves = [
        plot_series(axes, line, styles[line.name], marks=6, markersize=4, linewidth=1.3)
        for line in panel.series
    ]
    finite = [value for line in panel.series for value in line.y if math.isfinite(value)]
    low, high = min(finite, default=0.0), max(finite, default=1.0)
    spans_decades = low > 0 and high > 100 * low and panel.y_range is None
    if panel.log_y or (panel.log_y is None and spans_decades):
        axes.set_yscale("log")
    baselines = {
        name: value
        for name, value in (panel.baselines or {}).items()
        if low < value < 2 * high or panel.y_range is not None
    }
    for name, value in baselines.items():
        axes.axhline(value, color="0.35", linestyle="--", linewidth=1.0)
        axes.annotate(
            name,
            (1, value),
            xycoords=("axes fraction", "data"),
            ha="right",
            va="bottom",
            fontsize=8,
            color="0.35",
        )
    if panel.log_x:
        _set_log_x(axes, panel.series, width=tick_width)
    if panel.y_range is not None:
        axes.set_ylim(*panel.y_range)
    if panel.title:
        axes.set_title(panel.title, loc="left", fontsize=9)
    axes.set_ylabel(panel.y)
    return PlottedAxes(
        axes=axes, curves=curves, baselines=baselines, x=x, y=panel.y, title=panel.title
    )


def ranking_figure(
    values: Mapping[str, Sequence[float]],
    *,
    x: str,
    title: str,
    groups: Mapping[str, Sequence[str]] | None = None,
    baselines: Mapping[str, float] | None = None,
) -> RenderedFigure:
    """Draw one row per name, the smallest mean at the top, with a line from minimum to maximum.

    Args:
        values: Values by name, one per seed. A name whose mean is not finite comes last, without a
            dot.
        x: Label of the horizontal axis with its unit.
        title: Title of the figure.
        groups: At most three groups of names, each with dots of one style.
        baselines: Vertical dashed lines by name.

    Raises:
        ImportError: Matplotlib is not installed.
        ValueError: There is no name, or a name without a value.
    """
    if not values or not all(values.values()):
        raise ValueError(f"ranking_figure {title!r}: there is no name, or one without a value")
    means = {name: sum(numbers) / len(numbers) for name, numbers in values.items()}
    finite = {name: mean for name, mean in means.items() if math.isfinite(mean)}
    order = [*sorted(finite, key=lambda name: finite[name]), *(n for n in means if n not in finite)]
    group_of = {name: group for group, names in (groups or {}).items() for name in names}
    styles = dict(zip(("", *(groups or {})), _GROUP_STYLES, strict=False))
    with new_figure() as canvas:
        canvas.set_size_inches(7.2, 1.6 + 0.27 * len(order))
        axes = canvas.subplots()
        legend: dict[str, Any] = {}
        axes.set_title(title, loc="left", **_TITLE)
        for row, name in enumerate(order[: len(finite)]):
            group, numbers = group_of.get(name, ""), values[name]
            marker, colour = styles[group]
            axes.plot([min(numbers), max(numbers)], [row, row], color=colour, linewidth=1.4)
            dot = axes.plot([means[name]], [row], marker=marker, color=colour, linestyle="")
            legend.setdefault(group, dot[0])
            axes.annotate(
                f"{means[name]:.3f}",
                (max(numbers), row),
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
        for name, value in (baselines or {}).items():
            line = axes.axvline(value, color="0.35", linestyle="--", linewidth=1.0)
            legend[f"{name} ({value:.3f})"] = line
        legend.pop("", None)
        if legend:
            canvas.legend(list(legend.values()), list(legend), loc="outside lower center", ncols=3)
        return render_figure(canvas)


def plot_series(
    axes: Axes, line: Series, index: int, *, marks: int, markersize: float, linewidth: float
) -> Curve:
    """Draw a series with about `marks` markers, in its own style or that of the index."""
    index = index if line.style is None else line.style
    colour = _COLOURS[index % len(_COLOURS)]
    if line.low is not None and line.high is not None:
        axes.fill_between(line.x, line.low, line.high, color=colour, alpha=0.18, linewidth=0)
    axes.plot(
        line.x,
        line.y,
        label=line.name,
        color=colour,
        linestyle="" if line.points_only else _LINES[index % len(_LINES)],
        marker=_MARKERS[index % len(_MARKERS)],
        markersize=markersize,
        markevery=1 if line.points_only else max(1, len(line.x) // marks),
        linewidth=linewidth,
    )
    low, high = (None if edge is None else tuple(edge) for edge in (line.low, line.high))
    return Curve(
        name=line.name, colour=colour, x=tuple(line.x), y=tuple(line.y), low=low, high=high
    )


def _set_log_x(axes: Axes, series: Sequence[Series], *, width: int) -> None:
    """Give the horizontal axis base 2 and ticks of a total width in digits."""
    ticks = log_ticks([value for line in series for value in line.x], width=width)
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [f"{value:g}" for value in ticks])
    axes.minorticks_off()


def log_ticks(values: Sequence[float], *, width: int) -> list[float]:
    """Return ticks of a logarithmic axis: the values if their labels fit, else powers of two.

    ``width`` is that of the axis, in digits of a label. Values that are not positive get no tick.
    """
    ticks = sorted({value for value in values if value > 0})
    if not ticks:
        return []
    span = math.log2(ticks[-1] / ticks[0])

    def fit(candidates: Sequence[float]) -> bool:
        labels = [f"{value:g}" for value in candidates]
        positions = [
            width * math.log2(value / ticks[0]) / span if span else 0.0 for value in candidates
        ]
        neighbours = zip(positions, positions[1:], labels, labels[1:], strict=False)
        return all(b - a > 1 + (len(x) + len(y)) / 2 for a, b, x, y in neighbours)

    if fit(ticks):
        return ticks
    low, high = math.ceil(math.log2(ticks[0])), math.floor(math.log2(ticks[-1]))
    for step in range(1, max(high - low, 1) + 1):
        powers = [2.0**power for power in range(low, high + 1, step)]
        if powers and fit(powers):
            return powers
    return [ticks[0], ticks[-1]]  # no two powers of two between them


@contextmanager
def new_figure() -> Iterator[Canvas]:
    """Yield an empty figure of matplotlib in the style of all figures."""
    try:
        import matplotlib
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure as Canvas
    except ImportError as error:
        raise ImportError(
            'figures need matplotlib: pip install -e ".[plot]" in its checkout'
        ) from error
    with matplotlib.rc_context(_STYLE):  # pyright: ignore[reportArgumentType]
        # Without pyplot, which would keep a reference to every figure.
        canvas = Canvas(figsize=(7.2, 4.4), layout="constrained")
        FigureCanvasAgg(canvas)
        yield canvas


def render_figure(canvas: Canvas, plotted: Sequence[PlottedAxes] = ()) -> RenderedFigure:
    """Return the files of a finished figure; equal figures give equal bytes.

    The layout of the canvas changes. The curves of ``plotted`` become data.
    """
    png = io.BytesIO()
    canvas.savefig(png, format="png", dpi=200, metadata={"Software": None})
    svg = _render_svg(canvas)
    plots = [axes.extract_plot() for axes in plotted]  # savefig computed the layout
    _stack(canvas)
    narrow = _render_svg(canvas)
    return RenderedFigure(
        png=png.getvalue(),
        svg=svg,
        plots=tuple(
            replace(plot, narrow_bounds=axes.extract_plot().bounds)
            for plot, axes in zip(plots, plotted, strict=True)
        ),
        narrow=narrow,
    )


def _render_svg(canvas: Canvas) -> str:
    """Return the drawing as SVG that follows the colour scheme of its page."""
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
    font: dict[str, Any] = _TITLE if len(stacked) == 1 else {"fontsize": 9}
    for index, axes in enumerate(stacked):
        axes.set_subplotspec(grid[index])
        axes.tick_params(labelbottom=True)
        axes.set_title(_wrap(axes.get_title("left"), font["fontsize"]), loc="left", **font)
        repeated = axes is not stacked[-1] and axes.get_xlabel() == stacked[-1].get_xlabel()
        axes.set_xlabel("" if repeated else _wrap(axes.get_xlabel(), 10))
        if axes.get_xscale() == "log":
            ticks = log_ticks([float(tick) for tick in axes.get_xticks()], width=26)
            axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        elif isinstance(axes.xaxis.get_major_locator(), MaxNLocator):
            axes.locator_params(axis="x", nbins=5)
    title = canvas.get_suptitle()
    if title:
        canvas.suptitle(_wrap(title, 11), x=0.01, ha="left", **_TITLE)


def _wrap(text: str, font_size: float) -> str:
    """Wrap a text to the width of the narrow drawing; the font size is in points."""
    return textwrap.fill(text, int(0.85 * NARROW * 72 / (0.58 * font_size)))
