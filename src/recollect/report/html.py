"""A report is one HTML file that needs nothing else: no network, no scripts, no other files."""

from __future__ import annotations

import base64
import html
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path

from recollect.report.figures import FigureFiles
from recollect.report.files import write_atomic
from recollect.report.notebook import prose

_STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --faint: #5b6470; --paper: #ffffff;
  --line: #d5dae0; --band: #f4f6f8; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ed; --faint: #a0a9b4;
  --paper: #15181c; --line: #363c44; --band: #1d2126; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.5rem 1rem 4rem; max-width: 60rem; background: var(--paper);
  color: var(--ink); font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
h1 { font-size: 1.6rem; line-height: 1.25; margin: 0 0 .5rem; }
h2 { font-size: 1.15rem; margin: 2.2rem 0 .5rem; }
p { margin: .6rem 0; white-space: pre-line; }
pre { margin: 1rem 0; padding: .7rem .9rem; overflow-x: auto; background: var(--band);
  border-radius: 6px; font: .85rem/1.5 ui-monospace, Menlo, Consolas, monospace;
  white-space: pre-wrap; overflow-wrap: anywhere; }
code { font: .92em ui-monospace, Menlo, Consolas, monospace; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .15rem 1rem; margin: 1rem 0;
  font-size: .9rem; }
dt { color: var(--faint); }
dd { margin: 0; overflow-wrap: anywhere; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: .9rem;
  font-variant-numeric: tabular-nums; }
th, td { padding: .35rem .6rem; text-align: left; border-bottom: 1px solid var(--line);
  white-space: nowrap; }
th { color: var(--faint); font-weight: 600; border-bottom-width: 2px; }
.number { text-align: right; }
.sentence { white-space: normal; min-width: 18rem; }
figure { margin: 1.2rem 0; }
figure img { display: block; width: 100%; max-width: 52rem; height: auto; background: #fff;
  border-radius: 6px; }
figcaption, .caption { color: var(--faint); font-size: .9rem; margin: .4rem 0; }
@media print { :root { --ink: #000; --faint: #444; --paper: #fff; --line: #bbb; --band: #f4f4f4; }
  body { max-width: none; padding: 0; font-size: 11pt; }
  figure, table, pre { break-inside: avoid; } h2 { break-after: avoid; }
  .wide { overflow: visible; } th, td { white-space: normal; } }
"""


_NUMERAL = r"[+−-]?\d[\d,]*(\.\d+)?(e[+-]?\d+)?"
_WRITTEN = re.compile(
    rf"{_NUMERAL}( ?(%|[kMGT]?B|[KMGT]iB|s))?( ± {_NUMERAL}| \({_NUMERAL} ?[–…] ?{_NUMERAL}\))?"
    r"(, (grows|\d+ diverged))?"
)
"""A number as it is written out: with a unit, its spread over seeds, and a word beside it."""

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
        """As HTML."""
        # A column is one of numbers, heading included, if nothing else is in it: as they are, or
        # written out with their spread, unit or separators.
        numeric = [
            any(_reads_as_number(row[i]) for row in self.rows)
            and all(row[i] is None or _reads_as_number(row[i]) for row in self.rows)
            for i in range(len(self.columns))
        ]
        mark = [' class="number"' if flag else "" for flag in numeric]
        head = "".join(
            f'<th scope="col"{m}>{prose(c)}</th>' for c, m in zip(self.columns, mark, strict=True)
        )
        body = "\n".join(
            "<tr>"
            + "".join(
                f"<td{m or _long(c)}>{prose(_cell(c))}</td>" for c, m in zip(row, mark, strict=True)
            )
            + "</tr>"
            for row in self.rows
        )
        return (
            f"{_heading(self.title)}"
            f'<div class="wide"><table>\n<thead><tr>{head}</tr></thead>\n'
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
        data = base64.b64encode(self.files.svg.encode("utf-8")).decode("ascii")
        caption = f"<figcaption>{prose(self.caption)}</figcaption>" if self.caption else ""
        return (
            f"{_heading(self.title)}<figure>"
            f'<img alt="{_text(self.alt)}" src="data:image/svg+xml;base64,{data}">'
            f"{caption}</figure>\n"
        )


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
    """

    title: str
    command: str = ""
    summary: str = ""
    facts: Mapping[str, str] = field(default_factory=dict)
    sections: Sequence[Table | Figure | Note] = ()

    def render(self) -> str:
        """The whole page. Every text in it is escaped, and `code` in it is shown as code."""
        title = _text(self.title.replace("`", ""))
        summary = f"<p>{prose(self.summary)}</p>\n" if self.summary else ""
        command = f"<pre>{_text(self.command)}</pre>\n" if self.command else ""
        facts = "".join(
            f"<dt>{_text(name)}</dt><dd>{prose(value)}</dd>\n" for name, value in self.facts.items()
        )
        block = f"<dl>\n{facts}</dl>\n" if facts else ""
        sections = "".join(section.render() for section in self.sections)
        return (
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
            '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
            f"<title>{title}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
            f"<h1>{prose(self.title)}</h1>\n{summary}{command}{block}{sections}</body>\n</html>\n"
        )

    def save(self, path: str | PathLike[str]) -> Path:
        """Write the page atomically; missing folders are made."""
        return write_atomic(path, self.render())


def _is_number(cell: Cell) -> bool:
    return isinstance(cell, int | float) and not isinstance(cell, bool)


def _reads_as_number(cell: Cell) -> bool:
    return _is_number(cell) or (isinstance(cell, str) and _WRITTEN.fullmatch(cell) is not None)


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
