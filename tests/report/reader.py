"""A page of results as its reader gets it: matching tags, its text, and its requests."""

from __future__ import annotations

from html.parser import HTMLParser

VOID = {"meta", "img", "source"}


class Reader(HTMLParser):
    """Collects tags and text, and fails on tags that do not match."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.links: list[str] = []
        self.scripts: list[dict[str, str | None]] = []
        self.ids: list[str | None] = []
        self.text: list[str] = []
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "srcset", "href")]
        self.ids += [value for name, value in attrs if name == "id"]
        if tag == "script":
            self.scripts.append(dict(attrs))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def check_page(page: str) -> str:
    """Check that a page is well formed and requests nothing; return its text without scripts."""
    read = Reader(page)
    assert all(link.startswith("data:") for link in read.links)
    assert [x for x in read.scripts if "src" in x] == []
    ids = [value for value in read.ids if value]
    assert len(ids) == len(set(ids))
    assert read.tags.count("main") == read.tags.count("h1") == 1
    return "".join(read.text)
