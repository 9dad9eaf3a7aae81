"""What all pages of results share: one file, its style and scripts inside, nothing from any host.

The scripts sort tables and read curves off. A page without them says the same: tables in the order
in which they were written, drawings, and the values of their curves as tables.
"""

from __future__ import annotations

import html
from functools import cache
from importlib import resources

__all__ = ["SCRIPTS", "kind_mark", "shell", "source"]

SCRIPTS = ("tables.js", "curves.js")
"""The scripts of a page, in the order in which they run."""

_START = "recollectReport.startTables();\nrecollectReport.startCurves();\n"


@cache
def source(name: str) -> str:
    """The text of a file that pages are made of.

    Args:
        name: ``"report.css"`` or one of `SCRIPTS`.
    """
    return (resources.files("recollect.report") / "static" / name).read_text(encoding="utf-8")


def kind_mark(kind: str) -> str:
    """How a page says in its head what it reports of.

    Args:
        kind: one word.
    """
    return f'<meta name="recollect" content="{html.escape(kind)}">'


def shell(title: str, body: str, *, kind: str = "") -> str:
    """A whole page.

    Args:
        title: plain text, of the window.
        body: HTML, of which every text is escaped already.
        kind: what the page reports of, one word, or nothing.
    """
    mark = f"{kind_mark(kind)}\n" if kind else ""
    scripts = "\n".join(map(source, SCRIPTS))
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"{mark}<title>{html.escape(title)}</title>\n<style>\n{source('report.css')}</style>\n</head>\n"
        f"<body>\n<main>\n{body}</main>\n<script>\n{scripts}{_START}</script>\n</body>\n</html>\n"
    )
