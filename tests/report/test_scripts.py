"""The reports' scripts by node: sorting of tables, and values of curves, also on log axes."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from recollect.report.plots import Axis, Curve, Plot
from recollect.report.rendering import SCRIPTS, read_static

FOLDER = Path(__file__).parent
SMALL_DOM = FOLDER.parent / "page" / "small_dom.js"


def node(script: str, data: object, *, ahead: str = "") -> Any:
    """Return the result of a script of this folder, after the scripts of a page."""
    program = shutil.which("node")
    if program is None:
        pytest.skip("node is not installed: what the reports' scripts do is not checked")
    texts = [ahead, *map(read_static, SCRIPTS), (FOLDER / script).read_text(encoding="utf-8")]
    start = (
        "const input = JSON.parse(require('fs').readFileSync(0, 'utf8'));\n"
        "const answer = (x) => process.stdout.write(JSON.stringify(x));\n"
    )
    ran = subprocess.run(
        [program, "-e", start + "\n".join(texts)],
        input=json.dumps(data),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


def cell(text: str, number: float | None = None) -> dict[str, Any]:
    return {"text": text, "number": number}


LOG = Plot(
    bounds=(0.1, 0.2, 0.8, 0.6),
    x=Axis(label="pairs", low=1, high=64, log=True),
    y=Axis(label="loss", low=0.01, high=100, log=True),
    curves=(
        Curve(name="a", colour="#0072B2", x=(1, 8, 64), y=(100, 1, 0.01)),
        Curve(name="b", colour="#D55E00", x=(1, 16, 64), y=(100, math.nan, 10), low=(90, 0, 5),
              high=(110, 0, 20)),
    ),
    baselines={"guessing": 50},
)  # fmt: skip


def test_rows_are_sorted_with_missing_numbers_last() -> None:
    numbers = [cell("10", 10), cell("–"), cell("9", 9), cell("diverged"), cell("9", 9)]
    words = [cell("b10"), cell("a"), cell("B2"), cell("é")]
    result = node(
        "ask.js",
        [
            ["sorted", x, order]
            for x in (numbers, words)
            for order in ("ascending", "descending", "none")
        ],
    )
    assert result[:3] == [[2, 4, 0, 1, 3], [0, 2, 4, 1, 3], [0, 1, 2, 3, 4]]
    assert result[3:] == [[1, 2, 0, 3], [3, 0, 2, 1], [0, 1, 2, 3]]


def test_position_on_a_logarithmic_axis() -> None:
    plot = LOG.to_dict()
    requested = [["share", plot["x"], 8], ["share", plot["y"], 10], ["share", plot["x"], 1]]
    assert node("ask.js", requested) == pytest.approx([0.5, 0.75, 0.0])


def test_nearest_point_and_values_of_every_curve() -> None:
    plot = LOG.to_dict()
    # In the middle a's (8, 1) is nearest; near the upper right corner b's (64, 10), not a's (64,
    # 0.01).
    requested = [["nearest", plot, 0.52, 0.49], ["nearest", plot, 0.97, 0.9], ["stops", plot]]
    near, corner, stops = node("ask.js", requested)
    assert near == {"curve": 0, "point": 1} and corner == {"curve": 1, "point": 2}
    assert stops == [1, 8, 64]  # b has no value at 16
    readings = node("ask.js", [["readings", plot, 64], ["readings", plot, 8]])
    assert [(x["name"], x["x"], x["y"], x["here"]) for x in readings[0]] == [
        ("a", 64, 0.01, True),
        ("b", 64, 10, True),
    ]
    assert (readings[0][1]["low"], readings[0][1]["high"]) == (5, 20)
    # b has none at 8; 1 and 64 are equally far on this axis, and the first is used.
    assert [(x["name"], x["x"], x["here"]) for x in readings[1]] == [
        ("a", 8, True),
        ("b", 1, False),
    ]


def test_format_of_numbers() -> None:
    texts = node("ask.js", [["told", x] for x in (57344, 2.674112, 1e-7, 0, 3e15, 0.00012, -3.5)])
    assert texts == ["57,344", "2.674", "1.000e-7", "0", "3.000e+15", "0.00012", "-3.5"]


def test_a_page_is_sorted_and_read_by_the_keyboard_and_by_the_pointer() -> None:
    result = node(
        "drive_page.js",
        {
            "columns": ["model", "value"],
            "rows": [
                [["b", None], ["2", 2]],
                [["a", None], ["10", 10]],
                [["c", None], ["–", None]],
            ],
            "clicks": [1, 1, 1, 0],
            "plots": [LOG.to_dict()],
            "keys": ["ArrowRight", "ArrowRight", "End", "Escape", "ArrowLeft"],
            # In the middle of the axes: the box begins at 100 and is 800 wide, and 300 high from
            # 100 on.
            "at": [505, 255],
        },
        ahead=SMALL_DOM.read_text(encoding="utf-8") + TREE,
    )
    assert [x["order"] for x in result["sorts"]] == [
        ["b", "a", "c"],
        ["a", "b", "c"],
        ["b", "a", "c"],
        ["a", "b", "c"],
    ]
    assert [x["sorted"] for x in result["sorts"]] == [
        [None, "ascending"],
        [None, "descending"],
        [None, None],
        ["ascending", None],
    ]
    assert [(stop, text) for stop, text, _ in result["keys"]] == [
        ("0", "pairs 1 · loss: a 100, b 100 (90 … 110)"),
        ("1", "pairs 8 · loss: a 1, b 100 (90 … 110) at 1"),
        ("2", "pairs 64 · loss: a 0.01, b 10 (5 … 20)"),
        ("0", "no place chosen"),
        ("2", "pairs 64 · loss: a 0.01, b 10 (5 … 20)"),
    ]
    assert result["pointed"][:2] == result["keys"][1][:2]
    assert "guessing 50" in result["pointed"][2]
    assert result["dots"] == 2


TREE = """
// What these scripts use of a tree beside what the page of six knobs does.
Object.defineProperty(Element.prototype, "children", {
  get() { return this.childNodes.filter((node) => node instanceof Element); },
});
Element.prototype.removeAttribute = function (name) { this.attributes.delete(name); };
const plainly = Element.prototype.append;
Element.prototype.append = function (...nodes) { // a node that moves leaves where it was
  for (const node of nodes) {
    const old = node instanceof Element || node instanceof TextNode ? node.parentNode : null;
    if (old) old.childNodes = old.childNodes.filter((other) => other !== node);
  }
  plainly.apply(this, nodes);
};
"""


def test_figure_states_the_position_of_its_axes() -> None:
    pytest.importorskip("matplotlib")
    import re

    from recollect.report import Panel, Series, line_figure, panel_figure

    line = Series(name="a", x=[2, 4, 8], y=[1.0, math.nan, 10.0])
    other = Series(name="b", x=[2, 8], y=[5.0, 2.0], style=0)
    figure = line_figure(
        [line, other], x="x", y="y", title="T", log_x=True, log_y=True, baselines={"level": 3.0}
    )
    (plot,) = figure.plots
    assert plot.x.log and plot.y.log and plot.baselines == {"level": 3.0}
    assert plot.curves[0].colour == plot.curves[1].colour == "#0072B2"
    assert plot.narrow_bounds is not None and plot.narrow_bounds != plot.bounds
    # Markers of the figure give the points (2, 1) and (8, 10) of the first curve.
    for svg, box in ((figure.svg, plot.bounds), (figure.narrow, plot.narrow_bounds)):
        width, height = map(float, re.findall(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', svg)[0])
        uses = re.findall(
            r'<use xlink:href="#\w+" x="([\d.]+)" y="([\d.]+)" style="fill: #0072b2', svg
        )
        points = [(float(x) / width, float(y) / height) for x, y in uses]
        x0, top, wide, high = box
        for x, y in ((2, 1.0), (8, 10.0), (8, 2.0)):
            across = math.log(x / plot.x.low) / math.log(plot.x.high / plot.x.low)
            fraction = math.log(y / plot.y.low) / math.log(plot.y.high / plot.y.low)
            at = x0 + wide * across, top + high * (1 - fraction)
            assert any(at == pytest.approx(one, abs=2e-3) for one in points), (x, y)
    several = panel_figure(
        [Panel(y="p", series=[line], title="one", log_x=True), Panel(y="q", series=[other], x="z")],
        x="x",
        title="T",
    )
    assert [(one.title, one.x.label, one.y.label) for one in several.plots] == [
        ("one", "x", "p"),
        ("", "z", "q"),
    ]
    assert several.plots[0].x.log and not several.plots[1].x.log


def test_curves_are_also_a_table() -> None:
    rows = LOG.rows()
    assert rows == [[1, 100, 100], [8, 1, None], [64, 0.01, 10]]
    long = Plot(
        bounds=LOG.bounds,
        x=LOG.x,
        y=LOG.y,
        curves=[Curve(name="a", colour="#000", x=tuple(range(1000)), y=tuple(range(1000)))],
        baselines={},
    )
    shortened = long.rows(max_rows=50)
    assert len(shortened) == 50 and shortened[0] == [0, 0] and shortened[-1] == [999, 999]
