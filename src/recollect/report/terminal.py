"""Tables on a terminal of any width: no number is ever cut.

Of a table that is too wide, columns are left out, the least important first, and a line below names
them. Where not even what must stay fits, each row becomes a list of all that it holds.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table

__all__ = ["Column", "TerminalTable", "hung"]


def hung(text: str, width: int | None, *, indent: int = 9) -> str:
    """Wrap lines that are too long, with a hanging indent; words stay whole.

    Equations that share a line, which three spaces separate, go on lines of their own.

    Args:
        text: lines whose first words are labels of one width.
        width: number of columns of the terminal; ``None`` or 0 leaves the text unwrapped.
        indent: number of columns of the labels; 0 where the terminal is narrow.

    Examples:
        >>> from recollect.report.terminal import hung
        >>> print(hung("engine   one that runs all of it", 24))
        engine   one that runs
                   all of it
    """
    if width is None or width < 1:
        return text
    indent = indent if width > 3 * indent else 0
    lines: list[str] = []
    for line in text.splitlines():
        parts = [line] if len(line) <= width else re.split(r"(?<=[,;]) {3}", line)
        for part in (parts[0], *(" " * indent + rest for rest in parts[1:])):
            lines += textwrap.wrap(
                part,
                width,
                subsequent_indent=" " * (indent + 2),
                break_long_words=False,
                break_on_hyphens=False,
            ) or [""]
    return "\n".join(lines)


@dataclass(frozen=True, kw_only=True)
class Column:
    """A column of a `TerminalTable`.

    Args:
        name: its heading, which may have several lines.
        right: whether it stands to the right, as numbers do.
        least: of text that may be broken, the columns of a terminal that it needs. ``None``: it is
            never broken.
        rank: 0 stays; of the others the greatest is left out first.
    """

    name: str
    right: bool = False
    least: int | None = None
    rank: int = 0


@dataclass(frozen=True, kw_only=True)
class TerminalTable:
    """A table that fits the terminal that it is shown on; needs rich.

    Args:
        columns: what it has; the first of rank 0 names a row.
        rows: cells, as many in each as there are columns. They are shown as they are: brackets in
            them are no markup.
        title: a line above it, or nothing.
        styles: of rows by their index, such as ``{0: "dim"}``.

    Raises:
        ValueError: a row has more or fewer cells than there are columns.
    """

    columns: Sequence[Column]
    rows: Sequence[Sequence[str]]
    title: str = ""
    styles: Mapping[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for index, row in enumerate(self.rows):
            if len(row) != len(self.columns):
                raise ValueError(
                    f"TerminalTable {self.title!r}: row {index} has {len(row)} cells for "
                    f"{len(self.columns)} columns"
                )

    @property
    def width(self) -> int:
        """Columns of a terminal that the whole table needs."""
        return self._needs(range(len(self.columns)))

    def shown(self, width: int) -> list[int] | None:
        """Which columns fit, by index; ``None`` where rows must become lists.

        Args:
            width: of the terminal.
        """
        order = sorted(range(len(self.columns)), key=lambda i: (self.columns[i].rank, i))
        here = [i for i in order if not self.columns[i].rank]
        if self._needs(here) > width:
            return None
        for i in order[len(here) :]:
            if self._needs(sorted([*here, i])) > width:
                break
            here.append(i)
        # A row's name alone says nothing of it.
        return sorted(here) if len(here) > 1 or len(self.columns) == 1 else None

    def fitted(self, width: int) -> RenderableType:
        """The table with the columns that fit, or lists.

        Args:
            width: of the terminal.
        """
        from rich.console import Group
        from rich.text import Text

        here = self.shown(width)
        head = [Text(self.title, style="italic")] if self.title else []
        return Group(*head, *(self._lists() if here is None else [self._table(here)]))

    def print(self, console: Console, *, elsewhere: str = "") -> None:
        """Show it, and name the columns that were left out.

        Args:
            console: where. If nothing bounds it (``bounded`` is false), it is as wide as need be.
            elsewhere: what has them, such as ``"--json"``, or nothing.
        """
        if not getattr(console, "bounded", True):
            console.width = max(console.width, self.width)
        width = console.width
        here = self.shown(width)
        console.print(self.fitted(width), markup=False, highlight=False)
        lost = [c.name for i, c in enumerate(self.columns) if here is not None and i not in here]
        if lost:
            there = f"; {elsewhere} has them" if elsewhere else ""
            console.print(
                f"left out at {width} columns: {', '.join(lost)}{there}",
                markup=False,
                highlight=False,
            )

    def _needs(self, here: Sequence[int]) -> int:
        from rich.measure import Measurement

        if not here:
            return 0
        wide = _wide_console()
        return Measurement.get(wide, wide.options, self._table(here)).minimum

    def _least(self, i: int) -> int:
        """The least width of a column."""
        from rich.cells import cell_len

        column = self.columns[i]
        lines = [line for row in self.rows for line in row[i].split("\n")]
        widest = max(map(cell_len, lines), default=0)
        if column.least is not None:
            widest = min(widest, column.least)
        return max(widest, *map(cell_len, column.name.split("\n")))

    def _table(self, here: Sequence[int]) -> Table:
        from rich.box import SIMPLE_HEAD
        from rich.table import Table
        from rich.text import Text

        table = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False)
        for i in here:
            column = self.columns[i]
            table.add_column(
                Text(column.name),
                justify="right" if column.right else "left",
                no_wrap=column.least is None,
                overflow="fold",
                min_width=self._least(i),
            )
        for index, row in enumerate(self.rows):
            table.add_row(*(Text(row[i]) for i in here), style=self.styles.get(index))
        return table

    def _lists(self) -> list[RenderableType]:
        from rich.padding import Padding
        from rich.text import Text

        parts: list[RenderableType] = []
        head = next((i for i, column in enumerate(self.columns) if not column.rank), 0)
        for index, row in enumerate(self.rows):
            style = self.styles.get(index, "")
            parts.append(Text(row[head], style=f"bold {style}".strip(), overflow="fold"))
            for i, (column, cell) in enumerate(zip(self.columns, row, strict=True)):
                if cell and i != head:
                    name = column.name.replace("\n", " ")
                    said = Text(f"{name}: ", style=style, overflow="fold")
                    said.append(cell.replace("\n", "; "))
                    parts.append(Padding(said, (0, 0, 0, 2), expand=False))
        return parts


def _wide_console() -> Console:
    """A console that bounds nothing, to measure on."""
    from rich.console import Console

    return Console(width=10_000, force_terminal=False, markup=False)
