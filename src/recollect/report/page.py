"""Reports: pages of tables, figures and notes, as one HTML file each."""

from __future__ import annotations

import base64
import html
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path

from recollect.report.figures import RenderedFigure
from recollect.report.files import next_free_path, write_atomic
from recollect.report.rendering import render_page, render_section
from recollect.report.tables import Table

__all__ = ["Figure", "Note", "Report", "data_uri"]


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A figure of a report, embedded in the page."""

    files: RenderedFigure  # drawings, for example from `recollect.report.figures.line_figure`
    alt: str  # content of the figure, for readers who cannot see it
    title: str = ""  # heading above the figure
    caption: str = ""  # text below the figure

    def to_html(self) -> str:
        """Return the drawings, and the values of their curves as data and as tables."""
        wide, narrow = data_uri(self.files.svg), data_uri(self.files.narrow)
        plots = [plot.to_dict() for plot in self.files.plots]
        return render_section("figure", self, wide, narrow, plots, self._value_tables())

    def _value_tables(self) -> list[Table]:
        tables = []
        for plot in self.files.plots:
            rows, points = plot.rows(), len({x for curve in plot.curves for x in curve.x})
            left_out = f" Of {points:,} places {len(rows)} are shown." if points > len(rows) else ""
            name = " · ".join(filter(None, (plot.title, plot.y.label)))
            columns = [plot.x.label, *(curve.name for curve in plot.curves)]
            tables.append(Table(columns=columns, rows=rows, caption=f"{name}.{left_out}"))
        return tables


@dataclass(frozen=True, kw_only=True)
class Note:
    """A paragraph of a report."""

    text: str  # plain text; line breaks are preserved
    title: str = ""  # heading above the paragraph
    code: bool = False  # whether the text is code

    def to_html(self) -> str:
        """Return the paragraph as HTML."""
        return render_section("note", self)


@dataclass(frozen=True, kw_only=True)
class Report:
    """A page of results. Every text is escaped, and code between backticks is shown as code."""

    title: str
    kind: str = ""  # kind of the page, one word such as "comparison"
    command: str = ""  # command that writes the page again
    summary: str = ""  # one or two sentences with the main result
    # names and values, such as describe_environment().facts()
    facts: Mapping[str, str] = field(default_factory=dict)
    sections: Sequence[Table | Figure | Note] = ()  # content in the order of the page

    def to_html(self) -> str:
        """Return the page."""
        title = self.title.replace("`", "")
        return render_page(title, render_section("report", self), kind=self.kind)

    def save(self, path: str | PathLike[str]) -> Path:
        """Write the page atomically; missing folders are created.

        Args:
            path: Path of the page. An earlier page of the same kind is replaced. Any other file is
                renamed first, ``report-1.html`` for ``report.html``.
        """
        path = Path(path)
        if path.is_file() and not _is_of_kind(path, self.kind):
            shutil.copy2(path, next_free_path(path))  # a copy, because the next write may fail
        return write_atomic(path, self.to_html())


def data_uri(svg: str) -> str:
    """Return the address of a drawing that is inside the page; empty without a drawing."""
    data = base64.b64encode(svg.encode("utf-8")).decode("ascii")
    return f"data:image/svg+xml;base64,{data}" if svg else ""


def _is_of_kind(path: Path, kind: str) -> bool:
    with path.open(encoding="utf-8", errors="replace") as file:
        head = file.read(2000)
    return bool(kind) and f'<meta name="recollect" content="{html.escape(kind)}">' in head
