"""Tables that notebooks show in place of a ``repr``: plain HTML in the notebook's own style."""

from __future__ import annotations

import html
import importlib
import re
from collections.abc import Iterable, Sequence

__all__ = ["Rows", "equations_of", "facts", "grid", "prose"]

Rows = Iterable[tuple[str, Sequence[str]]]
"""A label and the lines beside it."""

CODE = 'style="text-align:left;white-space:pre-wrap;font-family:monospace"'
HEAD = 'style="text-align:left;vertical-align:top"'


_CODE = re.compile(r"`([^`\n]+)`")


def prose(value: object) -> str:
    """A text as HTML: escaped, and what stands between backticks as code."""
    return _CODE.sub(r"<code>\1</code>", html.escape(str(value), quote=True))


def facts(title: str, rows: Rows, *, equations: Iterable[str] = ()) -> str:
    """A table of labels and lines.

    Args:
        title: above it.
        rows: what it says; a label without lines is left out.
        equations: labels whose lines are equations or code, and keep their spaces.
    """
    code, body = set(equations), []
    for label, lines in rows:
        if not any(lines):
            continue
        if label in code:
            shown = html.escape("\n".join(lines))
            cell = f"<td {CODE}>{shown}</td>"
        else:
            cell = f'<td style="text-align:left">{"<br>".join(map(prose, lines))}</td>'
        body.append(f'<tr><th scope="row" {HEAD}>{html.escape(label)}</th>{cell}</tr>')
    return _table(title, "", body)


def grid(
    title: str,
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    notes: Iterable[str] = (),
) -> str:
    """A table with headings.

    Args:
        title: above it.
        columns: headings.
        rows: a cell for each of them; the first one names the row.
        notes: sentences below it.
    """
    head = "".join(f'<th scope="col">{html.escape(name)}</th>' for name in columns)
    body = [
        "<tr>"
        + f'<th scope="row" {HEAD}>{html.escape(first)}</th>'
        + "".join(f"<td>{html.escape(cell)}</td>" for cell in rest)
        + "</tr>"
        for first, *rest in rows
    ]
    below = "".join(f"<li>{prose(note)}</li>" for note in notes)
    return _table(title, f"<thead><tr>{head}</tr></thead>", body) + (
        f"<ul>{below}</ul>" if below else ""
    )


def _table(title: str, head: str, body: Iterable[str]) -> str:
    said = f"<caption>{prose(title)}</caption>" if title else ""
    return f"<table>{said}{head}<tbody>{''.join(body)}</tbody></table>"


def equations_of(recipe: object) -> Rows:
    """The equations of a recipe; none if the recipe has no explanation."""
    # Recipes do not depend on their explanations: these are imported when a notebook shows one.
    try:
        return importlib.import_module("recollect.explanation.explain").explain(recipe).equations
    except ValueError:  # a RecipeError
        return ()
