"""Tables of the papers as data, with their sources.

Each CSV file in this folder is one table. Lines that begin with ``#`` have its source, its units
and a note for comparisons. A header and a row per model follow::

    table = rc.experiments.published("atlas_table2")
    table.value("Titans (LMM)", "wikitext ppl", group="760M / 30B tokens")
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Published", "PublishedRow", "published", "published_names"]


@dataclass(frozen=True, kw_only=True)
class PublishedRow:
    """One model's numbers."""

    model: str  # its name in the table
    group: str  # part of the table, or ""
    values: Mapping[str, float]  # numbers by column


@dataclass(frozen=True, kw_only=True)
class Published:
    """A table of a paper.

    Attributes:
        name: argument of `published`.
        source: the paper.
        table: its number in the paper.
        units: of the numbers.
        note: differences to consider in comparisons, or ``""``.
        grouping: meaning of the groups, or ``""``.
        columns: names of the numbers, in order.
        rows: in the table's order.

    Examples:
        >>> table = rc.experiments.published("miras_table2")
        >>> table.groups[0], table.columns[0]
        ('340M / 15B tokens', 'wikitext ppl')
        >>> table.value(table.rows[0].model, "wikitext ppl", group=table.groups[0])
        31.52
    """

    name: str
    source: str
    table: str
    units: str
    note: str
    grouping: str
    columns: tuple[str, ...]
    rows: tuple[PublishedRow, ...]

    @property
    def groups(self) -> tuple[str, ...]:
        """Names of the parts of the table, in order."""
        return tuple(dict.fromkeys(row.group for row in self.rows))

    def value(self, model: str, column: str, *, group: str | None = None) -> float:
        """Return one number.

        Args:
            model: its name in the table; unique within the group.
            column: one of ``columns``.
            group: part of the table, if it has several rows of the model.

        Raises:
            KeyError: if the table has no such row or column, or several rows.
        """
        if column not in self.columns:
            raise KeyError(
                f"{self.name} has no column {column!r}; it has {', '.join(self.columns)}"
            )
        matches = [row for row in self.rows if row.model == model and group in (None, row.group)]
        if len(matches) != 1:
            models = ", ".join(sorted({row.model for row in self.rows}))
            many = f"{len(matches)} rows: give group=, one of {', '.join(self.groups)}"
            raise KeyError(
                f"{self.name}, model {model!r}: " + (many if matches else f"no row among {models}")
            )
        return matches[0].values[column]


def published_names() -> tuple[str, ...]:
    """Return the names of all tables.

    Examples:
        >>> "miras_table2" in rc.experiments.published_names()
        True
    """
    files = resources.files(__name__).iterdir()
    return tuple(sorted(f.name.removesuffix(".csv") for f in files if f.name.endswith(".csv")))


@lru_cache
def published(name: str) -> Published:
    """Return a table by name, such as ``"miras_table2"``.

    Raises:
        KeyError: if there is no such table.
        ValueError: if its file has no source, table or units, or lacks a number.

    Examples:
        >>> rc.experiments.published("atlas_table4").units
        'accuracy in per cent on MAD'
    """
    if name not in published_names():
        raise KeyError(f"no published table {name!r}: there are {', '.join(published_names())}")
    text = resources.files(__name__).joinpath(f"{name}.csv").read_text(encoding="utf-8")
    return _parse(name, text)


def _parse(name: str, text: str) -> Published:
    lines = text.splitlines()
    comments = [line[1:].strip() for line in lines if line.startswith("#")]
    facts = dict(line.split(": ", 1) for line in comments)
    for key in ("source", "table", "units"):
        if not facts.get(key):
            raise ValueError(f"{name}.csv has no {key}: add a line '# {key}: ...'")
    header, *body = csv.reader(line for line in lines if not line.startswith("#"))
    lead = header.index("model") + 1
    columns = tuple(header[lead:])
    rows: list[PublishedRow] = []
    for cells in body:
        if len(cells) != len(header):
            raise ValueError(f"{name}.csv: a row of {len(cells)} cells in a table of {len(header)}")
        values = {column: float(x) for column, x in zip(columns, cells[lead:], strict=True)}
        group = cells[0] if lead == 2 else ""
        rows.append(
            PublishedRow(model=cells[lead - 1], group=group, values=MappingProxyType(values))
        )
    return Published(
        name=name,
        source=facts["source"],
        table=facts["table"],
        units=facts["units"],
        note=facts.get("note", ""),
        grouping=facts.get("group", ""),
        columns=columns,
        rows=tuple(rows),
    )
