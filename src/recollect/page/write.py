"""The page as one HTML file with its style, scripts and data; it needs no other host."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from importlib import resources
from os import PathLike
from pathlib import Path

from recollect.page.table import make_table
from recollect.report.files import write_atomic

__all__ = ["PAGE", "SCRIPTS", "fill_placeholders", "read_static", "render", "save"]

PAGE = "six-knobs.html"
"""Name of the file."""

SCRIPTS = ("memory.js", "recipes.js", "charts.js", "panel.js", "page.js")
"""Scripts of the page, in the order in which they run."""


@cache
def read_static(name: str) -> str:
    """Return the text of a file in ``static/``, such as ``"page.html"``."""
    return (resources.files("recollect.page") / "static" / name).read_text(encoding="utf-8")


def render(
    names: Iterable[str] | None = None, *, progress: Callable[[int, int], None] | None = None
) -> str:
    """Return the page.

    Args:
        names: Names of presets; all presets of the zoo if omitted.
        progress: Function that is called with the number of finished presets and of all.

    Raises:
        RecipeError: Unknown name.

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
        "/* style */": read_static("page.css"),
        "/* scripts */": "\n".join(map(read_static, SCRIPTS)),
        # Escaped, so that no text of the data can end its element.
        "/* table */": table.replace("<", "\\u003c"),
    }
    page = read_static("page.html")
    assert all(page.count(placeholder) == 1 for placeholder in parts)
    return fill_placeholders(page, parts)


def fill_placeholders(page: str, parts: Mapping[str, str]) -> str:
    """Replace each placeholder of a page, and none in the texts that replace them."""
    pattern = "|".join(map(re.escape, parts))
    return re.sub(pattern, lambda match: parts[match[0]], page)


def save(
    folder: str | PathLike[str],
    names: Iterable[str] | None = None,
    *,
    progress: Callable[[int, int], None] | None = None,
) -> Path:
    """Write the page atomically into a folder, which is created if it is missing.

    Args:
        folder: Folder of the file.
        names: Names of presets; all presets of the zoo if omitted.
        progress: Function that is called with the number of finished presets and of all.

    Returns:
        The path of the file.

    Raises:
        OSError: The folder cannot be written.
    """
    return write_atomic(Path(folder) / PAGE, render(names, progress=progress))
