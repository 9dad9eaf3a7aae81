"""The page is operated (chosen, stepped, linked, copied) in a small document and in a browser."""

from __future__ import annotations

import functools
import html.parser
import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.page.browser import Browser, opened
from tests.page.node import FOLDER, node

from recollect.page.write import PAGE, SCRIPTS, read_static, save


def test_the_page_is_driven_in_a_small_document(table: dict[str, Any]) -> None:
    """Every step of the scenario succeeds, in a document of the test."""
    around = {"ahead": "small_dom.js", "between": "scenario.js"}
    result = node("drive.js", {"table": table}, SCRIPTS, **around)
    assert isinstance(result, list), result
    assert len(result) == len(_steps())


def _steps() -> list[str]:
    return re.findall(r'see\("', (FOLDER / "scenario.js").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    yield from opened(tmp_path_factory.mktemp("profile"))


@pytest.mark.slow  # the small document above runs this scenario
@pytest.mark.parametrize(("width", "dark"), [(390, True), (1280, False)])
def test_the_page_is_driven_in_a_browser(
    width: int, dark: bool, page: str, browser: Browser, tmp_path: Path
) -> None:
    """The page is no wider than the window and requests only itself."""
    path = tmp_path / PAGE
    path.write_text(page, encoding="utf-8")
    browser.open(path, width=width, dark=dark)
    script = (FOLDER / "scenario.js").read_text(encoding="utf-8")
    result = browser.run(f"{script}\nscenario().catch((error) => ({{ error: error.message }}))")
    assert isinstance(result, list), result
    assert len(result) == len(_steps())
    for link in ("", "#recipe=titans&with=delta_net", "#recipe=linear_attention"):
        browser.open(path, width=width, dark=dark, link=link)
        size = browser.run("[document.documentElement.scrollWidth, innerWidth]")
        assert size == [width, width]
        assert {x.split(":")[0] for x in browser.requested_addresses()} <= {"file", "data"}
        assert path.as_uri() in [x.split("#")[0] for x in browser.requested_addresses()]
    ground = browser.run("getComputedStyle(document.body).backgroundColor")
    assert ground == ("rgb(21, 24, 28)" if dark else "rgb(255, 255, 255)")
    small = browser.run(
        "[...document.querySelectorAll('body *')].filter((x) => x.textContent && "
        "x.getBoundingClientRect().width && parseFloat(getComputedStyle(x).fontSize) < 10).length"
    )
    assert small == 0


# -- requests and markup --------------------------------------------------------------------------


def test_no_host_is_requested(page: str) -> None:
    text = re.sub(r'<script type="application/json".*?</script>', "", page, flags=re.DOTALL)
    allowed = {"http://www.w3.org/2000/svg"}  # a name that is not opened
    assert set(re.findall(r"https?://[^\s\"'`]+", text)) == allowed
    for word in ("fetch(", "XMLHttpRequest", "import(", "@import", "WebSocket", "url(", "eval("):
        assert word not in text, word
    assert "default-src 'none'" in text  # so that the browser would refuse it
    sources = re.findall(r'\b(?:src|href)="(.*?)"', text)
    assert sources == ["data:,"]


class _Tags(html.parser.HTMLParser):
    """Open elements, and every attribute."""

    VOID = ("meta", "link", "input", "br")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_file_is_well_formed(page: str) -> None:
    tags = _Tags()
    tags.feed(page)
    tags.close()
    assert tags.open == []
    recorded = dict(tags.elements)
    assert recorded["html"]["lang"] == "en"
    assert {"title", "main", "header", "h1", "noscript"} <= set(recorded)
    assert ("meta", {"charset": "utf-8"}) in tags.elements
    assert "width=device-width" in str([x for tag, x in tags.elements if tag == "meta"])
    # Text in the data cannot end the element that contains it.
    data = re.search(r'id="table">(.*?)</script>', page, re.DOTALL)
    assert data is not None and "<" not in data[1]
    assert json.loads(data[1])["version"]
    for mark in ("/* style */", "/* scripts */", "/* table */"):
        assert mark not in page


def test_saving_makes_the_folder(tmp_path: Path) -> None:
    path = save(tmp_path / "a" / "b", ["delta_net"])
    assert path.name == PAGE
    assert path.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert [x.name for x in path.parent.iterdir()] == [PAGE]


# -- colours ---------------------------------------------------------------------------------------


@functools.cache
def _themes() -> dict[str, dict[str, str]]:
    """Return colours by name, in light and in dark."""
    result = re.findall(r":root \{(.*?)\}", read_static("page.css"), re.DOTALL)[:2]
    return {
        theme: dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", block))
        for theme, block in zip(("light", "dark"), result, strict=True)
    }


def _luminance(colour: str) -> float:
    """Return the relative luminance of WCAG 2 of ``#rrggbb``."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [x / 12.92 if x <= 0.03928 else ((x + 0.055) / 1.055) ** 2.4 for x in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    """Return the ratio of WCAG 2: 1 to 21."""
    high, low = sorted((_luminance(one), _luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def test_contrast_is_that_of_wcag() -> None:
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.01)  # just below the limit


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_every_pair_of_colours_can_be_read(theme: str) -> None:
    """WCAG AA: 4.5 for texts, 3 for lines, borders of controls and marks."""
    colours = _themes()[theme]
    grounds = ("paper", "band")
    for ink, ground in itertools.product(("ink", "faint", "bad", "accent"), grounds):
        assert contrast(colours[ink], colours[ground]) >= 4.5, (ink, ground)
    assert contrast(colours["on-accent"], colours["accent"]) >= 4.5
    for line, ground in itertools.product(("accent", "second", "edge", "bad"), grounds):
        assert contrast(colours[line], colours[ground]) >= 3, (line, ground)


def test_all_colours_are_in_the_themes() -> None:
    rules = re.sub(r":root \{.*?\}", "", read_static("page.css"), flags=re.DOTALL)
    assert re.findall(r"#[0-9a-fA-F]{3,8}\b(?=[;} ])", rules) == []
    for name in SCRIPTS:
        assert not re.search(r"[\"'`]#[0-9a-fA-F]{3,6}[\"'`]", read_static(name)), name
    assert set(_themes()["light"]) == set(_themes()["dark"])
