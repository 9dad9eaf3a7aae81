from __future__ import annotations

import io
import math
import struct
import sys
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest

pytest.importorskip("matplotlib")

from recollect.report import Panel, RenderedFigure, Series, line_figure, panel_figure
from recollect.report import figures as module
from recollect.report.figures import log_ticks, ranking_figure


def lines(count: int, points: int = 5) -> list[Series]:
    return [
        Series(
            name=f"model {i}",
            x=[20_000 * p for p in range(points)],
            y=[i + math.exp(-p) for p in range(points)],
        )
        for i in range(count)
    ]


def check(figure: RenderedFigure) -> None:
    assert figure.png.startswith(b"\x89PNG")
    width, height = struct.unpack(">II", figure.png[16:24])
    assert (width, height) == (1440, 880)
    root = ElementTree.fromstring(figure.svg)
    assert root.tag.endswith("svg")
    links = [v for e in root.iter() for k, v in e.attrib.items() if k.endswith("href")]
    assert all(link.startswith(("#", "data:")) for link in links), "nothing outside the file"
    narrow = ElementTree.fromstring(figure.narrow)
    assert float(narrow.attrib["width"].removesuffix("pt")) == pytest.approx(4.1 * 72)
    for svg in (figure.svg, figure.narrow):
        assert svg.count("@media (prefers-color-scheme: dark)") == 1


@pytest.mark.parametrize("count", [1, 5, 12])
def test_a_line_figure(count: int) -> None:
    check(line_figure(lines(count), x="tokens", y="bits", title="T", baselines={"bigram": 3.7}))


def test_a_line_figure_on_a_logarithmic_axis_with_gaps() -> None:
    series = [Series(name="a", x=[2, 4, 8], y=[1.0, math.nan, 0.2])]
    check(line_figure(series, x="pairs", y="accuracy", title="T", log_x=True, y_range=(0, 1)))


def test_the_same_figure_gives_the_same_bytes() -> None:
    first, repeated = (line_figure(lines(3), x="x", y="y", title="T") for _ in range(2))
    assert first == repeated


def test_lines_are_distinguishable_in_grey() -> None:
    n = 12
    styles = {
        (module._MARKERS[i % len(module._MARKERS)], str(module._LINES[i % len(module._LINES)]))
        for i in range(10)
    }
    assert len(styles) == 10
    coloured = {
        (i % len(module._COLOURS), i % len(module._MARKERS), i % len(module._LINES))
        for i in range(n)
    }
    assert len(coloured) == n


@pytest.mark.parametrize(
    "names",
    [
        ["a", "softmax_attention"],
        [f"name {i}" for i in range(14)],
        ["a name so long that it would take more than half of the figure's width on its own"],
    ],
)
def test_the_legend_of_a_narrow_figure_is_inside_and_below_the_axes(
    names: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded: list[bool] = []
    save = module.render_figure

    def look(canvas, drawing):  # type: ignore[no-untyped-def]
        files = save(canvas, drawing)
        box = canvas.legends[0].get_window_extent()
        axes = canvas.axes[0].get_window_extent()
        page = canvas.bbox
        inside = box.x0 >= 0 and box.y0 >= 0 and box.x1 <= page.x1 and box.y1 <= page.y1
        recorded.append(inside and box.y1 <= axes.y0)
        return files

    monkeypatch.setattr(module, "render_figure", look)
    series = [Series(name=name, x=[1, 2], y=[1, 2]) for name in names]
    line_figure(series, x="x", y="y", title="T")
    assert recorded == [True]


@pytest.mark.parametrize("names", [["a", "softmax_attention"], [f"name {i}" for i in range(14)]])
def test_the_legend_is_inside_the_figure_and_off_the_axes(
    names: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fits: list[bool] = []

    def look(canvas, axes):  # type: ignore[no-untyped-def]
        canvas.savefig(io.BytesIO(), format="svg")
        box = canvas.legends[0].get_window_extent()
        page = canvas.bbox
        inside = box.x0 >= 0 and box.y0 >= 0 and box.x1 <= page.x1 and box.y1 <= page.y1
        fits.append(inside and not box.overlaps(canvas.axes[0].get_window_extent()))

    monkeypatch.setattr(module, "render_figure", look)
    line_figure([Series(name=n, x=[1, 2], y=[1, 2]) for n in names], x="x", y="y", title="T")
    assert fits == [True]


def test_panels_of_a_narrow_figure_are_stacked() -> None:
    panels = [Panel(y=f"y {i}", series=lines(2), title=f"panel {i}") for i in range(3)]
    figure = panel_figure(panels, x="tokens", title="a title that is longer than a phone is wide")
    wide = [plot.bounds for plot in figure.plots]
    narrow = [plot.narrow_bounds for plot in figure.plots if plot.narrow_bounds is not None]
    assert wide[0][1] == pytest.approx(wide[1][1], abs=0.01) and wide[0][0] < wide[1][0]
    for (x0, top, _, height), (other_left, other_top, _, _) in pairwise(narrow):
        assert x0 == pytest.approx(other_left, abs=0.01) and top + height < other_top
    assert len(narrow) == 3
    assert [plot.title for plot in figure.plots] == ["panel 0", "panel 1", "panel 2"]


def test_saving_writes_all_files(tmp_path: Path) -> None:
    figure = line_figure(lines(1), x="x", y="y", title="T")
    for name in ("v1.5", "v1.5.png"):
        png, svg = figure.save(tmp_path / name)
        assert (png.name, svg.name) == ("v1.5.png", "v1.5.svg")
        assert png.read_bytes() == figure.png
        assert svg.read_text("utf-8") == figure.svg
        assert svg.with_name("v1.5-narrow.svg").read_text("utf-8") == figure.narrow


def test_nothing_to_draw_is_refused() -> None:
    with pytest.raises(ValueError, match="no series"):
        line_figure([], x="x", y="y", title="T")
    with pytest.raises(ValueError, match="x has 2 and y has 1"):
        Series(name="s", x=[1, 2], y=[1])
    with pytest.raises(ValueError, match="x has 0"):
        Series(name="s", x=[], y=[])


def test_without_matplotlib_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"\.\[plot\]"):
        line_figure(lines(1), x="x", y="y", title="T")


def test_labels_of_a_logarithmic_axis_do_not_run_into_each_other() -> None:
    stored = [5256 / 1024, 13496 / 1024, 17548 / 1024, 70791 / 1024]
    assert log_ticks(stored, width=45) == [8, 16, 32, 64]
    assert log_ticks([4, 8, 16, 32, 48], width=45) == [4, 8, 16, 32, 48]
    assert log_ticks([0.0, 2.0, 4.0], width=45) == [2, 4]
    assert log_ticks([0.0], width=45) == []
    for values in (range(1, 200), [2.0**n for n in range(40)], [1000.0, 1001.0, 1002.0]):
        labels = [f"{value:g}" for value in log_ticks(list(values), width=45)]
        assert len(labels) >= 2 and len("".join(labels)) <= 45


def test_a_logarithmic_axis_of_many_odd_values_has_ticks() -> None:
    values = [0.26 * 1.7**n for n in range(12)]  # none of them is a power of two
    line = Series(name="a", x=values, y=[0.5] * len(values))
    figure = panel_figure([Panel(y="y", series=[line], log_x=True)], x="KiB", title="t")
    for label in ("0.5", "2", "32"):
        assert f"<!-- {label} -->" in figure.svg


def test_a_ranking_is_ordered_and_a_name_without_a_number_is_last() -> None:
    values = {"worse": [3.0, 3.2], "none": [math.nan, 1.0], "better": [2.0]}
    figure = ranking_figure(values, x="bits", title="T", groups={"first": ["better"]})
    assert figure.png.startswith(b"\x89PNG")
    order = {"better": [2.0], "worse": [3.0, 3.2], "none": [math.nan, 1.0]}
    same = ranking_figure(order, x="bits", title="T", groups={"first": ["better"]})
    assert figure.svg == same.svg != ranking_figure(values, x="bits", title="T").svg


def test_groups_and_baselines_change_a_ranking() -> None:
    values = {"a": [2.0], "b": [3.0]}
    plain = ranking_figure(values, x="bits", title="T").svg
    grouped = ranking_figure(values, x="bits", title="T", groups={"ours": ["a"]}).svg
    with_baseline = ranking_figure(values, x="bits", title="T", baselines={"c": 2.5}).svg
    assert len({plain, grouped, with_baseline}) == 3


def test_a_ranking_of_diverged_runs() -> None:
    assert ranking_figure({"none": [math.inf]}, x="bits", title="T").png


@pytest.mark.parametrize("values", [{}, {"a": []}])
def test_a_ranking_without_values_is_refused(values: dict[str, list[float]]) -> None:
    with pytest.raises(ValueError, match="there is no name, or one without a value"):
        ranking_figure(values, x="bits", title="T")
