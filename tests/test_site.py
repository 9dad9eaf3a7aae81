"""The built documentation: links resolve, no other host is requested, search works."""

from __future__ import annotations

import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag, urlparse

import pytest
from tests.page.browser import Browser, opened

import recollect as rc

ROOT = Path(__file__).parents[1]
LOADED = {
    ("script", "src"),
    ("img", "src"),
    ("iframe", "src"),
    ("source", "src"),
    ("source", "srcset"),
}
"""Attributes that a browser loads when it shows a page, besides links of styles and icons."""

pytestmark = pytest.mark.slow


class Page(HTMLParser):
    """Links, loaded files, and anchors."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.names: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.names |= {values[name] for name in ("id", "name") if name in values}
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        self.loads += [values[name] for on, name in LOADED if on == tag and name in values]
        if tag == "link" and not {"canonical", "next", "prev"} & set(values["rel"].split()):
            self.loads.append(values["href"])


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    build = pytest.importorskip("mkdocs.commands.build")
    from mkdocs.config import load_config

    for name in ("mkdocstrings", "material", "matplotlib"):
        pytest.importorskip(name)
    folder = tmp_path_factory.mktemp("site")
    config = load_config(str(ROOT / "mkdocs.yml"), site_dir=str(folder), strict=True)
    config.plugins.on_startup(command="build", dirty=False)
    build.build(config)
    return folder


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Page]:
    return {path: Page(path.read_text(encoding="utf-8")) for path in site.glob("**/*.html")}


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    yield from opened(tmp_path_factory.mktemp("profile"))


def test_links_and_files_exist(pages: dict[Path, Page], site: Path) -> None:
    missing = []
    for path, page in pages.items():
        if path.name == "404.html":  # its links begin at the root of a server
            continue
        for link in (*page.links, *page.loads):
            address, name = urldefrag(link)
            if urlparse(link).scheme:
                continue
            target = (path.parent / unquote(address)).resolve() if address else path
            named = target.suffix != ".html" or not name or "=" in name
            if not target.is_file() or not (named or unquote(name) in pages[target].names):
                missing.append((path.relative_to(site).as_posix(), link))
    assert missing == []


def test_links_to_the_options_page_name_a_system(pages: dict[Path, Page]) -> None:
    linked = {
        link.partition("#recipe=")[2]
        for page in pages.values()
        for link in page.links
        if "six-knobs.html#recipe=" in link
    }
    assert linked == set(rc.zoo.names())


def test_nothing_is_loaded_from_another_host(pages: dict[Path, Page], site: Path) -> None:
    elsewhere = [link for page in pages.values() for link in page.loads if urlparse(link).netloc]
    assert elsewhere == []
    for path in site.glob("**/*.css"):
        assert re.findall(r"(?:url\(|@import)\s*[\"']?(https?:|//)", path.read_text("utf-8")) == []


# A full name, a name in code, and names with a common prefix or suffix.
@pytest.mark.parametrize(
    ("query", "page"),
    [
        ("DeltaProduct", "delta_product"),
        ("titans", "titans"),
        ("gated_delta_net", "gated_delta_net"),
        ("DeltaNet", "delta_net"),
        ("mamba2", "mamba2"),
    ],
)
def test_search_finds_without_a_server(site: Path, browser: Browser, query: str, page: str) -> None:
    """The page of a system comes first."""
    browser.open(site / "index.html", width=1280)
    result = browser.run(
        """(async () => {
          const field = document.querySelector('[data-md-component="search-query"]');
          field.focus();
          field.value = "ASKED";
          field.dispatchEvent(new Event("keyup", { bubbles: true }));
          field.dispatchEvent(new Event("input", { bubbles: true }));
          for (let i = 0; i < 300; i++) {
            const links = [...document.querySelectorAll(".md-search-result__link")];
            if (links.length) return links.map((link) => link.getAttribute("href"));
            await new Promise((again) => setTimeout(again, 100));
          }
          return [];
        })()""".replace("ASKED", query)
    )
    assert result and f"/zoo/{page}.html" in result[0], result
    assert [
        query for query in browser.requested_addresses() if not query.startswith(("file:", "data:"))
    ] == []
