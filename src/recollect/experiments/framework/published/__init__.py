"""Tables of the papers as data, to stand beside a run: facts and figures, with their source.

Each CSV file here is one table. Lines that begin with ``#`` say where it is from, its units and
what is to be known before it is compared; then follow a header and a row per model::

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
    """One model's numbers.

    Attributes:
        model: as the table calls it.
        group: the part of the table, ``""`` where it has none.
        values: numbers by column.
    """

    model: str
    group: str
    values: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class Published:
    """A table of a paper.

    Attributes:
        name: what `published` calls it.
        source: the paper. table: its number there.
        units: of the numbers. note: what is to be known before comparing, or ``""``.
        grouping: what a row's group says, ``""`` where there are none.
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
        """The parts of the table, in order."""
        return tuple(dict.fromkeys(row.group for row in self.rows))

    def value(self, model: str, column: str, *, group: str | None = None) -> float:
        """One number.

        Args:
            model: as the table calls it; unique within the group.
            column: one of ``columns``.
            group: the part of the table, where a model is in several.

        Raises:
            KeyError: a model, column or group that the table does not have, or several rows.
        """
        if column not in self.columns:
            raise KeyError(
                f"{self.name} has no column {column!r}; it has {', '.join(self.columns)}"
            )
        found = [row for row in self.rows if row.model == model and group in (None, row.group)]
        if len(found) != 1:
            models = ", ".join(sorted({row.model for row in self.rows}))
            many = f"{len(found)} rows: give group=, one of {', '.join(self.groups)}"
            raise KeyError(
                f"{self.name}, model {model!r}: " + (many if found else f"no row among {models}")
            )
        return found[0].values[column]


def published_names() -> tuple[str, ...]:
    """The tables there are.

    Examples:
        >>> "miras_table2" in rc.experiments.published_names()
        True
    """
    files = resources.files(__name__).iterdir()
    return tuple(sorted(f.name.removesuffix(".csv") for f in files if f.name.endswith(".csv")))


@lru_cache
def published(name: str) -> Published:
    """A table by name, e.g. ``"miras_table2"``.

    Raises:
        KeyError: another name, listing these.
        ValueError: a file without source, table or units, or with a number missing.

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
    said = [line[1:].strip() for line in lines if line.startswith("#")]
    facts = dict(line.split(": ", 1) for line in said)
    for key in ("source", "table", "units"):
        if not facts.get(key):
            raise ValueError(f"{name}.csv does not say its {key}: add a line '# {key}: ...'")
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
