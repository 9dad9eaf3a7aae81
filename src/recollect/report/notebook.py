"""Definition tables that notebooks show in place of a ``repr``, without a style sheet."""

from __future__ import annotations

import html
import importlib
import re
from collections.abc import Iterable, Sequence

__all__ = ["Rows", "definition_table", "get_equations", "text_to_html"]

Rows = Iterable[tuple[str, Sequence[str]]]
"""Labels, and the lines next to each."""

_CODE = re.compile(r"`([^`\n]+)`")


def text_to_html(value: object) -> str:
    """Return a text as HTML: escaped, with code between backticks."""
    return _CODE.sub(r"<code>\1</code>", html.escape(str(value), quote=True))


def definition_table(title: str, rows: Rows, *, equations: Iterable[str] = ()) -> str:
    """Return a table of labels and lines as HTML; a label without lines is left out.

    ``equations`` are the labels whose lines are equations or code, with significant spaces.
    """
    code, body = set(equations), []
    for label, lines in rows:
        if not any(lines):
            continue
        style, content = "text-align:left", "<br>".join(map(text_to_html, lines))
        if label in code:
            style += ";white-space:pre-wrap;font-family:monospace"
            content = html.escape("\n".join(lines))
        body.append(
            '<tr><th scope="row" style="text-align:left;vertical-align:top">'
            f'{html.escape(label)}</th><td style="{style}">{content}</td></tr>'
        )
    caption = f"<caption>{text_to_html(title)}</caption>" if title else ""
    return f"<table>{caption}<tbody>{''.join(body)}</tbody></table>"


def get_equations(recipe: object) -> Rows:
    """Return the equations of a recipe; none if the recipe cannot be explained."""
    # Recipes do not depend on their explanations, which are imported when a notebook shows one.
    try:
        return importlib.import_module("recollect.explanation.explain").explain(recipe).equations
    except ValueError:  # a RecipeError
        return ()
