"""The page as one HTML file that asks nothing of any host: text, style, scripts and data inside."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from functools import cache
from importlib import resources
from os import PathLike
from pathlib import Path

from recollect.page.table import make_table
from recollect.report.files import write_atomic

__all__ = ["PAGE", "SCRIPTS", "render", "save", "source"]

PAGE = "six-knobs.html"
"""Name of the file."""

SCRIPTS = ("memory.js", "recipes.js", "charts.js", "panel.js", "page.js")
"""Its scripts, in the order in which they run."""


@cache
def source(name: str) -> str:
    """The text of a file that the page is made of.

    Args:
        name: ``"page.html"``, ``"page.css"`` or one of `SCRIPTS`.
    """
    return (resources.files("recollect.page") / "static" / name).read_text(encoding="utf-8")


def render(
    names: Iterable[str] | None = None, *, progress: Callable[[int, int], None] | None = None
) -> str:
    """The whole page.

    Args:
        names: of presets that it knows; all of the zoo's when omitted.
        progress: told after each preset how many are done, of how many.

    Raises:
        RecipeError: an unknown name.

    Examples:
        >>> from recollect.page import render
        >>> render(["delta_net"]).startswith("<!doctype html>")
        True
    """
    table = json.dumps(
        make_table(names, progress=progress),
        ensure_ascii=False,
        allow_nan=False,
        separators=(",", ":"),
    )
    parts = {
        "/* style */": source("page.css"),
        "/* scripts */": "\n".join(map(source, SCRIPTS)),
        # No text of the data can end the element that it stands in.
        "/* table */": table.replace("<", "\\u003c"),
    }
    page = source("page.html")
    for mark, text in parts.items():
        before, found, after = page.partition(mark)
        assert found, mark
        page = before + text + after
    return page


def save(
    folder: str | PathLike[str],
    names: Iterable[str] | None = None,
    *,
    progress: Callable[[int, int], None] | None = None,
) -> Path:
    """Write the page atomically into a folder, which is made if it is missing.

    Args:
        folder: where to.
        names: as of `render`. progress: as of `render`.

    Returns:
        The path of the file.

    Raises:
        OSError: the folder cannot be written to.
    """
    return write_atomic(Path(folder) / PAGE, render(names, progress=progress))
