"""One table type for terminals, plain text, Markdown, notebooks and HTML pages."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple
from unicodedata import combining, east_asian_width

from recollect.report.rendering import render_section

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

__all__ = ["CellValue", "Column", "Table", "format_cell"]

CellValue = str | int | float | None

_NUMERAL = r"[+−-]?\d[\d,]*(\.\d+)?(e[+-]?\d+)?"
_NUMBER_WITH_UNIT = re.compile(
    rf"(?P<value>{_NUMERAL})( ?(?P<unit>%|[kMGT]?B|[KMGT]iB|[mµn]?s))?"
    rf"( ± {_NUMERAL}| \({_NUMERAL} ?[–…] ?{_NUMERAL}\))?"
    r"(, (grows|\d+ diverged))?"
)
"""A formatted number: with a unit, its spread over seeds, and a remark."""

_UNITS = {
    **{f"{k}B": 1000.0**n for n, k in enumerate(("", "k", "M", "G", "T"))},
    **{f"{k}iB": 1024.0**n for n, k in enumerate("KMGT", 1)},
    "%": 0.01,
    "s": 1.0,
    "ms": 1e-3,
    "µs": 1e-6,
    "ns": 1e-9,
}
"""Factor of each unit for sorting."""

WRAP_FROM = 40
"""Number of characters from which a cell of a page is wrapped."""

_BAR = re.compile(r"(?<!\\)\|")
"""A bar that is not escaped in Markdown."""

_TEXT_GAP = 2
_RICH_GAP = 3


@dataclass(frozen=True, kw_only=True)
class Column:
    """A column of a `Table`."""

    name: str  # heading, of one or more lines
    # alignment; by default "right" if all cells are numbers, else "left"
    align: Literal["left", "right"] | None = None
    # width in characters to which a terminal may wrap the cells; None if they are never wrapped
    min_width: int | None = None
    # The column with the largest priority is left out first if a terminal is too narrow. A column
    # with 0 is always shown.
    priority: int = 0


class _HtmlCell(NamedTuple):
    text: str
    attributes: dict[str, str | None]


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table of results.

    Args:
        columns: Headings, or `Column` objects. The first column names a row.
        rows: One sequence of cells per row. `format_cell` formats numbers and ``None``; pass a
            string for another format.
        title: Heading above the table.
        caption: Text below the table.
        styles: Styles of rich by the index of a row, such as ``{0: "dim"}``.

    Raises:
        ValueError: A row has more or fewer cells than there are columns.

    Examples:
        >>> from recollect.report.tables import Table
        >>> table = Table(columns=["model", "parameters"], rows=[["gla", 12345], ["rls", None]])
        >>> print(table.to_text())
        model  parameters
        gla        12,345
        rls             –
        >>> print(table.to_markdown())
        | model | parameters |
        |---|---:|
        | gla | 12,345 |
        | rls | – |
    """

    columns: Sequence[str | Column]
    rows: Sequence[Sequence[CellValue]]
    title: str = ""
    caption: str = ""
    styles: Mapping[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for index, row in enumerate(self.rows):
            if len(row) != len(self.columns):
                raise ValueError(
                    f"Table {self.title!r}: row {index} has {len(row)} cells for "
                    f"{len(self.columns)} columns"
                )

    @property
    def column_names(self) -> list[str]:
        """Headings of the columns."""
        return [column.name for column in self._columns]

    @property
    def label(self) -> str:
        """Name of the table for screen readers."""
        return (self.title or ", ".join(self.column_names)).replace("`", "")

    @property
    def width(self) -> int:
        """Width in characters of a terminal that shows all columns."""
        return self._width(range(len(self.columns)), _RICH_GAP)

    def to_text(self, width: int | None = None) -> str:
        """Return the table as plain text in aligned columns, with title and caption.

        Args:
            width: Width in characters. Columns that do not fit are left out and named below the
                table; rows become lists if too few columns fit. By default all columns are shown.
        """
        visible = self.visible_columns(width, _TEXT_GAP)
        if visible is None:
            lines = [
                line
                for name, cells in self._lists()
                for line in (name, *(f"  {column}: {cell}" for column, cell in cells))
            ]
        else:
            header = [name.replace("\n", " ") for name in self.column_names]
            rows = [header, *([cell.replace("\n", "; ") for cell in row] for row in self._cells)]
            aligned = [self._aligned([row[i] for row in rows], i) for i in visible]
            gap = " " * _TEXT_GAP
            lines = [gap.join(row).rstrip() for row in zip(*aligned, strict=True)]
        notes = [self._left_out(visible, width), self.caption]
        return "\n".join([*filter(None, [self.title]), *lines, *filter(None, notes)])

    def to_markdown(self) -> str:
        """Return the rows in Markdown, without title and caption; cells may contain Markdown."""
        rules = ["---:" if self._is_right(i) else "---" for i in range(len(self.columns))]
        rows = [self.column_names, *self._cells]
        escaped = [[_BAR.sub(r"\\|", cell).replace("\n", "<br>") for cell in row] for row in rows]
        lines = [f"| {' | '.join(row)} |" for row in escaped]
        return "\n".join([lines[0], f"|{'|'.join(rules)}|", *lines[1:]])

    def to_html(self, *, notebook: bool = False) -> str:
        """Return the table as HTML, with numbers to sort by in ``data-sort``.

        Args:
            notebook: Whether the table is shown without the style sheet of the pages.
        """
        sortable = [_is_sortable(values) for values in self._values]
        right = [self._is_right(i) for i in range(len(self.columns))]
        header = [
            _HtmlCell(column.name, {"class": "number" if right[i] else None})
            for i, column in enumerate(self._columns)
        ]
        rows = [
            [
                _HtmlCell(text, _attributes(row[i], right=right[i], sortable=sortable[i]))
                for i, text in enumerate(cells)
            ]
            for row, cells in zip(self.rows, self._cells, strict=True)
        ]
        return render_section("table", self, header, rows, notebook)

    def to_rich(self, width: int | None = None) -> RenderableType:
        """Return the table for a console of rich, without the caption.

        Args:
            width: Width of the console; see `to_text`.
        """
        from rich.box import SIMPLE_HEAD
        from rich.console import Group
        from rich.table import Table as RichTable
        from rich.text import Text

        title = [Text(self.title, style="italic")] if self.title else []
        visible = self.visible_columns(width)
        if visible is None:
            return Group(*title, *self._rich_lists())
        table = RichTable(box=SIMPLE_HEAD, pad_edge=False, show_edge=False)
        for i in visible:
            column = self._columns[i]
            table.add_column(
                Text(column.name),
                justify="right" if self._is_right(i) else "left",
                no_wrap=column.min_width is None,
                overflow="fold",
                min_width=self._min_width(i),
            )
        for index, cells in enumerate(self._cells):
            table.add_row(*(Text(cells[i]) for i in visible), style=self.styles.get(index))
        return Group(*title, table)

    def print(self, console: Console, *, also_in: str = "") -> None:
        """Print the table on a console of rich, and name the columns that do not fit.

        Args:
            console: If its attribute ``bounded`` is false, it is widened to show all columns.
            also_in: Name of an output that contains all columns, such as ``"--json"``.
        """
        if not getattr(console, "bounded", True):
            console.width = max(console.width, self.width)
        console.print(self.to_rich(console.width), markup=False, highlight=False)
        note = self._left_out(self.visible_columns(console.width), console.width)
        if note:
            note += f"; {also_in} has them" if also_in else ""
            console.print(note, markup=False, highlight=False)

    def visible_columns(self, width: int | None, gap: int = _RICH_GAP) -> list[int] | None:
        """Return the indices of the columns that fit; ``None`` if rows must become lists.

        Args:
            width: Width in characters; ``None`` shows all columns.
            gap: Number of characters between columns.
        """
        if width is None:
            return list(range(len(self.columns)))
        order = sorted(range(len(self.columns)), key=lambda i: (self._columns[i].priority, i))
        visible = [i for i in order if not self._columns[i].priority]
        if self._width(visible, gap) > width:
            return None
        for i in order[len(visible) :]:
            if self._width([*visible, i], gap) > width:
                break
            visible.append(i)
        # The names of the rows alone contain no result.
        return sorted(visible) if len(visible) > 1 or len(self.columns) == 1 else None

    @property
    def _columns(self) -> list[Column]:
        return [Column(name=x) if isinstance(x, str) else x for x in self.columns]

    @property
    def _cells(self) -> list[list[str]]:
        return [[format_cell(value) for value in row] for row in self.rows]

    @property
    def _values(self) -> list[list[CellValue]]:
        """Cells by column."""
        return [[row[i] for row in self.rows] for i in range(len(self.columns))]

    def _is_right(self, i: int) -> bool:
        align = self._columns[i].align
        return _is_numeric(self._values[i]) if align is None else align == "right"

    def _aligned(self, cells: Sequence[str], i: int) -> list[str]:
        widths = [_display_width(cell) for cell in cells]
        spaces = [" " * (max(widths) - width) for width in widths]
        right = self._is_right(i)
        return [s + c if right else c + s for s, c in zip(spaces, cells, strict=True)]

    def _min_width(self, i: int) -> int:
        column = self._columns[i]
        cells = [row[i] for row in self._cells]
        lines = [line for cell in cells for line in cell.split("\n")]
        width = max(map(_display_width, lines), default=0)
        if column.min_width is not None:
            longest_word = max(
                (_display_width(x) for cell in cells for x in cell.split()), default=0
            )
            width = max(min(width, column.min_width), longest_word)
        return max(width, *map(_display_width, column.name.split("\n")))

    def _width(self, columns: Sequence[int], gap: int) -> int:
        return sum(self._min_width(i) for i in columns) + gap * max(len(columns) - 1, 0)

    def _left_out(self, visible: Sequence[int] | None, width: int | None) -> str:
        names = [
            column.name
            for i, column in enumerate(self._columns)
            if visible is not None and i not in visible
        ]
        return f"left out at {width} columns: {', '.join(names)}" if names else ""

    def _lists(self) -> list[tuple[str, list[tuple[str, str]]]]:
        """The name of each row, and its other cells that are not empty with their headings."""
        head = next((i for i, column in enumerate(self._columns) if not column.priority), 0)
        names = [name.replace("\n", " ") for name in self.column_names]
        return [
            (
                row[head],
                [
                    (names[i], cell.replace("\n", "; "))
                    for i, cell in enumerate(row)
                    if cell and i != head
                ],
            )
            for row in self._cells
        ]

    def _rich_lists(self) -> list[RenderableType]:
        from rich.padding import Padding
        from rich.text import Text

        parts: list[RenderableType] = []
        for index, (name, cells) in enumerate(self._lists()):
            style = self.styles.get(index, "")
            parts.append(Text(name, style=f"bold {style}".strip(), overflow="fold"))
            for column, cell in cells:
                text = Text(f"{column}: {cell}", style=style, overflow="fold")
                parts.append(Padding(text, (0, 0, 0, 2), expand=False))
        return parts


def format_cell(value: CellValue) -> str:
    """Return a cell as text: four significant digits of a float, a dash for ``None``."""
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:.4g}"
    return f"{value:,}" if _is_number(value) else str(value)


def _display_width(text: str) -> int:
    """Number of columns of a terminal that a line takes."""
    return sum(1 + (east_asian_width(x) in "WF") for x in text if not combining(x))


def _is_number(value: CellValue) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _sort_key(value: CellValue) -> float | None:
    """Number by which a cell is sorted, in the base unit; ``None`` if it is text."""
    if _is_number(value):
        return float(value or 0)
    match = _NUMBER_WITH_UNIT.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        return None
    number = float(match["value"].replace(",", "").replace("−", "-"))
    return number * _UNITS.get(match["unit"] or "", 1.0)


def _is_numeric(values: Sequence[CellValue]) -> bool:
    """Whether a column contains numbers and nothing else."""
    keys = [_sort_key(value) for value in values if value is not None]
    return bool(keys) and None not in keys


def _is_sortable(values: Sequence[CellValue]) -> bool:
    """Whether most cells are numbers, or all other cells are one word such as "diverged"."""
    filled = [value for value in values if value not in (None, "")]
    words = [str(value) for value in filled if _sort_key(value) is None]
    return 2 * len(words) < len(filled) or (len(words) < len(filled) and len(set(words)) == 1)


def _attributes(value: CellValue, *, right: bool, sortable: bool) -> dict[str, Any]:
    wraps = isinstance(value, str) and len(value) > WRAP_FROM
    key = _sort_key(value) if sortable else None
    return {
        "class": "number" if right else "sentence" if wraps else None,
        "data-sort": None if key is None or not math.isfinite(key) else f"{key:.12g}",
    }
