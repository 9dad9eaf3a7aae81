"""A report in a browser: it fits, sorts, shows values under the pointer, and requests nothing."""

from __future__ import annotations

import base64
import io
import math
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.page.browser import Browser, opened

pytest.importorskip("matplotlib")
from matplotlib.image import imread

from recollect.report import Figure, Note, Report, Series, Table, line_figure

FRAME = (
    "(({left, top, width, height}) => ({left, top, width, height}))"
    "(document.querySelector('.pointer').getBoundingClientRect())"
)
TEXT = "(selector) => [...document.querySelectorAll(selector)].map((x) => x.textContent)"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    yield from opened(tmp_path_factory.mktemp("profile"))


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    lines = [
        Series(name="one", x=[1, 4, 16], y=[1.0, 10.0, 100.0]),
        Series(name="two", x=[1, 4, 16], y=[2.0, 3.0, math.nan]),
    ]
    files = line_figure(lines, x="pairs", y="loss", title="T", log_x=True, log_y=True)
    table = Table(
        columns=["model", "bytes", *(f"a wide column {i}" for i in range(9))],
        rows=[[name, state, *["0.123"] * 9] for name, state in (("b", "2 KiB"), ("a", "300 B"))],
    )
    report = Report(
        title="A report",
        command="recollect compare " + "--models a_name_that_is_long," * 9,
        summary="What was found.",
        facts={"device": "cpu"},
        sections=[table, Figure(files=files, alt="loss against pairs"), Note(text="words " * 99)],
    )
    return report.save(tmp_path_factory.mktemp("page") / "report.html")


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("dark", [False, True])
def test_page_fits_the_window_and_requests_nothing(
    browser: Browser, page: Path, width: int, dark: bool
) -> None:
    browser.open(page, width=width, dark=dark)
    assert browser.run("document.documentElement.scrollWidth") <= width
    assert all(
        requested.startswith(("file:", "data:", "about:"))
        for requested in browser.requested_addresses()
    )
    read = "['color', 'backgroundColor'].map((x) => getComputedStyle(document.body)[x])"
    ink, paper = (sum(map(int, re.findall(r"\d+", x))) for x in browser.run(read))
    assert (ink > paper) is dark and abs(ink - paper) > 500


def test_a_heading_sorts_by_click_and_by_key(browser: Browser, page: Path) -> None:
    browser.open(page, width=1280)
    order = f"({TEXT})('table:first-of-type tbody th').slice(0, 2).join()"
    assert browser.run(order) == "b,a"
    browser.run("document.querySelectorAll('thead .sort')[1].click()")
    assert browser.run(order) == "a,b"
    browser.run("document.querySelectorAll('thead .sort')[1].focus()")
    for kind in ("keyDown", "keyUp"):
        enter = {"key": "Enter", "code": "Enter", "windowsVirtualKeyCode": 13, "text": "\r"}
        browser.call("Input.dispatchKeyEvent", type=kind, **enter)
    assert browser.run(order) == "b,a"
    assert browser.run("document.querySelectorAll('thead th')[1].ariaSort") == "descending"


@pytest.mark.parametrize("dark", [False, True])
def test_a_figure_of_a_narrow_screen_is_narrow_and_of_a_dark_page_dark(
    browser: Browser, page: Path, dark: bool
) -> None:
    images = {}
    for width in (1280, 390):
        browser.open(page, width=width, dark=dark)
        browser.run("document.querySelector('.drawing').scrollIntoView()")
        images[width] = browser.run("document.querySelector('.drawing img').currentSrc")
        frame = browser.run(FRAME)
        assert frame["left"] + frame["width"] <= width and frame["width"] > 300
        shot = browser.call("Page.captureScreenshot", format="png")["data"]
        pixels = imread(io.BytesIO(base64.b64decode(shot)))[..., :3]
        x, y = (round(frame[side]) for side in ("left", "top"))
        figure = pixels[max(y, 0) :, x : x + round(frame["width"])][: round(frame["height"])]
        mean = float(figure.mean())
        assert mean < 0.3 if dark else mean > 0.7
    assert images[1280] != images[390]


@pytest.mark.parametrize(("width", "bounds"), [(1280, "bounds"), (390, "narrow_bounds")])
def test_curves_are_read_off_under_the_pointer(
    browser: Browser, page: Path, width: int, bounds: str
) -> None:
    browser.open(page, width=width)
    browser.run("document.querySelector('.drawing').scrollIntoView()")
    frame = browser.run(FRAME)
    plot = browser.run("JSON.parse(document.querySelector('.plots').textContent)[0]")
    x0, top, wide, high = plot[bounds]
    fraction = (math.log(10) - math.log(plot["y"]["low"])) / math.log(
        plot["y"]["high"] / plot["y"]["low"]
    )
    x = frame["left"] + frame["width"] * (x0 + wide / 2)  # 4 is between 1 and 16
    y = frame["top"] + frame["height"] * (top + high * (1 - fraction))
    browser.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
    output = browser.run("document.querySelector('.reading').textContent")
    assert "pairs 4" in output and "one 10" in output and "two 3" in output
    assert browser.run("document.querySelector('.nearest').textContent") == "one 10"
    dot = browser.run(
        "(({x, width, y, height}) => [x + width / 2, y + height / 2])"
        "(document.querySelector('.dot').getBoundingClientRect())"
    )
    assert dot == pytest.approx([x, y], abs=1.5)
