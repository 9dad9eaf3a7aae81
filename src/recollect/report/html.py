"""A report is one HTML file that needs nothing else: no network, no other files, and no scripts.

Its scripts, which stand in it, sort tables and read curves off; without them it says the same.
"""

from __future__ import annotations

import base64
import html
import json
import math
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path

from recollect.report.figures import FigureFiles
from recollect.report.files import free_name, write_atomic
from recollect.report.notebook import prose
from recollect.report.shell import kind_mark, shell

_NUMERAL = r"[+−-]?\d[\d,]*(\.\d+)?(e[+-]?\d+)?"
_WRITTEN = re.compile(
    rf"(?P<value>{_NUMERAL})( ?(?P<unit>%|[kMGT]?B|[KMGT]iB|[mµn]?s))?"
    rf"( ± {_NUMERAL}| \({_NUMERAL} ?[–…] ?{_NUMERAL}\))?"
    r"(, (grows|\d+ diverged))?"
)
"""A number as it is written out: with a unit, its spread over seeds, and a word beside it."""

_UNITS = {
    **{f"{k}B": 1000.0**n for n, k in enumerate(("", "k", "M", "G", "T"))},
    **{f"{k}iB": 1024.0**n for n, k in enumerate("KMGT", 1)},
    "%": 0.01,
    "s": 1.0,
    "ms": 1e-3,
    "µs": 1e-6,
    "ns": 1e-9,
}
"""How much a unit is of the one by which a column is sorted."""

NARROW_SCREEN = "(max-width: 40em)"
"""Media query of screens that show the narrow drawing; `report.css` and `curves.js` have it too."""

SENTENCE = 40
"""Characters from which a cell of a table is taken for a sentence."""

Cell = str | int | float | None


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table of a report.

    Args:
        columns: headings.
        rows: cells, as many in each row as there are headings. Numbers stand to the right; a float
            is shown with four significant digits (format it yourself for others); None is a dash.
        title: a heading above the table, or nothing.
        caption: a sentence below it, or nothing.

    Raises:
        ValueError: if a row has more or fewer cells than there are columns.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    title: str = ""
    caption: str = ""

    def __post_init__(self) -> None:
        for index, row in enumerate(self.rows):
            if len(row) != len(self.columns):
                raise ValueError(
                    f"Table {self.title!r}: row {index} has {len(row)} cells for "
                    f"{len(self.columns)} columns"
                )

    def render(self) -> str:
        """As HTML; its first cell names a row, and numbers stand beside cells to be sorted by."""
        # A column is one of numbers, heading included, if nothing else is in it: as they are, or
        # written out with their spread, unit or separators.
        columns = [[row[i] for row in self.rows] for i in range(len(self.columns))]
        numeric = [
            any(_number(cell) is not None for cell in column)
            and all(cell is None or _number(cell) is not None for cell in column)
            for column in columns
        ]
        sortable = [_sorted_by_numbers(column) for column in columns]
        mark = [' class="number"' if flag else "" for flag in numeric]
        head = "".join(
            f'<th scope="col"{m}>{prose(c)}</th>' for c, m in zip(self.columns, mark, strict=True)
        )
        body = "\n".join(
            "<tr>"
            + "".join(
                _drawn(cell, first=i == 0, mark=mark[i], sortable=sortable[i])
                for i, cell in enumerate(row)
            )
            + "</tr>"
            for row in self.rows
        )
        name = _text((self.title or ", ".join(self.columns)).replace("`", ""))
        return (
            f"{_heading(self.title)}"
            f'<div class="wide" role="group" tabindex="0" aria-label="{name}"><table>\n'
            f"<thead><tr>{head}</tr></thead>\n"
            f"<tbody>\n{body}\n</tbody></table></div>\n{_caption(self.caption)}"
        )


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A figure of a report, embedded in the page.

    Args:
        files: what :func:`~recollect.report.figures.line_figure` and its like return.
        alt: what the figure shows, for readers who cannot see it.
        title: a heading above the figure, or nothing.
        caption: a sentence below it, or nothing.
    """

    files: FigureFiles
    alt: str
    title: str = ""
    caption: str = ""

    def render(self) -> str:
        """As HTML; the drawing is an image, so that nothing inside it can act on the page."""
        caption = f"<figcaption>{prose(self.caption)}</figcaption>" if self.caption else ""
        image = picture(self.alt, embedded(self.files.svg), embedded(self.files.narrow))
        figure = (
            f'<figure><div class="wide"><div class="drawing">{image}</div></div>{caption}</figure>'
        )
        if not self.files.plots:
            return f"{_heading(self.title)}{figure}\n"
        plots = json.dumps([plot.to_dict() for plot in self.files.plots], allow_nan=False)
        # No text of the data can end the element that it stands in.
        plots = plots.replace("<", "\\u003c")
        return (
            f'{_heading(self.title)}<div class="curves">{figure}\n<div class="reading"></div>\n'
            f'<script type="application/json" class="plots">{plots}</script>\n'
            f"<details><summary>Values of the curves</summary>\n{self._values()}</details></div>\n"
        )

    def _values(self) -> str:
        """The curves' points as tables."""
        tables: list[str] = []
        for plot in self.files.plots:
            rows, points = plot.rows(), len({x for curve in plot.curves for x in curve.x})
            left = f" Of {points:,} places {len(rows)} are shown." if points > len(rows) else ""
            where = " · ".join(filter(None, (plot.title, plot.y.label)))
            table = Table(
                columns=[plot.x.label, *(curve.name for curve in plot.curves)],
                rows=rows,
                caption=f"{where}.{left}",
            )
            tables.append(table.render())
        return "".join(tables)


@dataclass(frozen=True, kw_only=True)
class Note:
    """A paragraph of a report.

    Args:
        text: plain text; line breaks are kept.
        title: a heading above it, or nothing.
        code: whether to show it as code.
    """

    text: str
    title: str = ""
    code: bool = False

    def render(self) -> str:
        """As HTML."""
        if self.code:
            return f"{_heading(self.title)}<pre>{_text(self.text)}</pre>\n"
        return f"{_heading(self.title)}<p>{prose(self.text)}</p>\n"


@dataclass(frozen=True, kw_only=True)
class Report:
    """A page: title, how it was made, then sections in order.

    Args:
        title: what the page is about.
        command: the command that makes the page again, or nothing.
        summary: one or two sentences that a reader in a hurry should see.
        facts: names and values for the block below the command, such as
            ``describe_environment().facts()``.
        sections: tables, figures and notes, in order.
        kind: what it reports of, one word such as ``"comparison"``; a page of another kind that
            stands where this one is saved is kept under another name.
    """

    title: str
    kind: str = ""
    command: str = ""
    summary: str = ""
    facts: Mapping[str, str] = field(default_factory=dict)
    sections: Sequence[Table | Figure | Note] = ()

    def render(self) -> str:
        """The whole page. Every text in it is escaped, and `code` in it is shown as code."""
        summary = f'<p class="found">{prose(self.summary)}</p>\n' if self.summary else ""
        command = f"<pre>{_text(self.command)}</pre>\n" if self.command else ""
        facts = "".join(
            f"<dt>{_text(name)}</dt><dd>{prose(value)}</dd>\n" for name, value in self.facts.items()
        )
        block = f"<dl>\n{facts}</dl>\n" if facts else ""
        sections = "".join(section.render() for section in self.sections)
        body = f"<h1>{prose(self.title)}</h1>\n{summary}{command}{block}{sections}"
        return shell(self.title.replace("`", ""), body, kind=self.kind)

    def save(self, path: str | PathLike[str]) -> Path:
        """Write the page atomically; missing folders are made.

        Args:
            path: of the page. An earlier page of the same kind gives way; one of another kind, or
                a file of somebody else, is renamed first, ``report-1.html`` for ``report.html``.
        """
        path = Path(path)
        if path.is_file() and not _is_of_kind(path, self.kind):
            shutil.copy2(path, free_name(path))  # a copy: the new page may not come to be
        return write_atomic(path, self.render())


def embedded(svg: str) -> str:
    """The address of a drawing that is inside the page; empty without one.

    Args:
        svg: the drawing.
    """
    data = base64.b64encode(svg.encode("utf-8")).decode("ascii")
    return f"data:image/svg+xml;base64,{data}" if svg else ""


def picture(alt: str, wide: str, narrow: str = "") -> str:
    """A drawing as HTML, with another one for narrow screens.

    Args:
        alt: the content of the drawing, as plain text.
        wide: address of the drawing.
        narrow: address of the one for narrow screens.
    """
    image = f'<img alt="{_text(alt)}" src="{_text(wide)}">'
    if not narrow:
        return image
    return f'<picture><source media="{NARROW_SCREEN}" srcset="{_text(narrow)}">{image}</picture>'


def _is_of_kind(path: Path, kind: str) -> bool:
    with path.open(encoding="utf-8", errors="replace") as file:
        head = file.read(2000)
    return bool(kind) and kind_mark(kind) in head


def _is_number(cell: Cell) -> bool:
    return isinstance(cell, int | float) and not isinstance(cell, bool)


def _number(cell: Cell) -> float | None:
    """What a cell is sorted by: the number, in its column's least unit, or ``None``."""
    if _is_number(cell):
        return float(cell or 0)
    found = _WRITTEN.fullmatch(cell) if isinstance(cell, str) else None
    if found is None:
        return None
    value = float(found["value"].replace(",", "").replace("−", "-"))
    return value * _UNITS.get(found["unit"] or "", 1.0)


def _sorted_by_numbers(column: Sequence[Cell]) -> bool:
    """Whether most cells are numbers, or all others are one word, such as "diverged".

    What has no number comes last.
    """
    said = [cell for cell in column if cell not in (None, "")]
    words = [str(cell) for cell in said if _number(cell) is None]
    return 2 * len(words) < len(said) or (len(words) < len(said) and len(set(words)) == 1)


def _drawn(cell: Cell, *, first: bool, mark: str, sortable: bool) -> str:
    """A cell of a table."""
    number = _number(cell) if sortable else None
    order = "" if number is None or not math.isfinite(number) else f' data-sort="{number:.12g}"'
    name, scope = ("th", ' scope="row"') if first else ("td", "")
    return f"<{name}{scope}{mark or _long(cell)}{order}>{prose(_cell(cell))}</{name}>"


def _long(cell: Cell) -> str:
    """A sentence may be broken; numbers and names may not, and a table that is too wide scrolls."""
    return ' class="sentence"' if isinstance(cell, str) and len(cell) > SENTENCE else ""


def _cell(cell: Cell) -> str:
    if cell is None:
        return "–"
    if isinstance(cell, float):
        return f"{cell:.4g}"
    return f"{cell:,}" if _is_number(cell) else str(cell)


def _text(value: object) -> str:
    return html.escape(str(value), quote=True)


def _heading(title: str) -> str:
    return f"<h2>{prose(title)}</h2>\n" if title else ""


def _caption(caption: str) -> str:
    return f'<p class="caption">{prose(caption)}</p>\n' if caption else ""
