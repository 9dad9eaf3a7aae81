"""Measurements of an experiment: one record per grid cell and seed, and queries on them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

__all__ = ["Cell", "Missing", "Record", "Results", "Values", "plain"]

Cell = Mapping[str, str | int | float | bool]
"""One place of an experiment's grid: what varies, by name."""

Values = Mapping[str, float | Sequence[float]]
"""What was measured there: numbers and curves, by name."""


class Missing(ValueError):
    """Something was asked of results in which it was not measured."""


def plain(data: object) -> Any:
    """JSON-ready: numbers that are none (a run that diverged) become null."""
    if isinstance(data, Mapping):
        return {key: plain(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [plain(value) for value in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data


@dataclass(frozen=True, kw_only=True)
class Record:
    """One cell measured with one seed.

    Attributes:
        seconds: it took. commit, device, date: of the measurement. rules: a digest of the
            experiment's verdict rules at that time.

    Examples:
        >>> record = rc.experiments.Record(cell={"model": "gla"}, seed=0, values={"accuracy": 0.5})
        >>> rc.experiments.Record.from_dict(record.to_dict()) == record
        True
    """

    cell: Cell
    seed: int
    values: Values
    seconds: float = 0.0
    commit: str = ""
    device: str = ""
    date: str = ""
    rules: str = ""

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready; numbers in seven digits, which is what float32 has."""
        return {**plain(asdict(self)), "values": plain(_rounded(self.values))}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Record:
        """Rebuild what `to_dict` wrote."""
        values = {
            name: [_number(x) for x in value] if isinstance(value, list) else _number(value)
            for name, value in data["values"].items()
        }
        return cls(**{**data, "values": values})


def _number(value: float | None) -> float:
    return math.nan if value is None else float(value)


def _at(cell: Cell) -> str:
    return " at " + ", ".join(f"{name} = {value}" for name, value in cell.items()) if cell else ""


def _rounded(values: Values) -> dict[str, Any]:
    def short(x: float) -> float:
        return float(f"{x:.7g}")

    return {
        name: short(value) if isinstance(value, int | float) else [short(x) for x in value]
        for name, value in values.items()
    }


@dataclass(frozen=True, kw_only=True)
class Results:
    """All records of a run.

    Attributes:
        scale: ``"smoke"``, ``"small"`` or ``"paper"``.
        config: the configuration that was run.

    Examples:
        >>> results = rc.experiments.Results.of(
        ...     [({"model": "gla"}, seed, {"accuracy": 0.4 + seed / 10}) for seed in (0, 1)]
        ... )
        >>> results.mean("accuracy", model="gla")
        0.45
    """

    records: tuple[Record, ...]
    scale: str = "small"
    config: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        rows: Iterable[tuple[Cell, int, Values]],
        *,
        scale: str = "small",
        config: Mapping[str, Any] | None = None,
    ) -> Results:
        """Results from (cell, seed, values).

        Args:
            rows: what was measured, one triple per cell and seed.
            scale: ``"smoke"``, ``"small"`` or ``"paper"``.
            config: the configuration of that scale.
        """
        records = tuple(Record(cell=cell, seed=seed, values=values) for cell, seed, values in rows)
        return cls(records=records, scale=scale, config=config or {})

    def __iter__(self) -> Iterator[Record]:
        return iter(self.records)

    def where(self, **cell: str | float | bool) -> Results:
        """Those whose cells agree with what is named."""
        kept = tuple(
            record
            for record in self.records
            if all(record.cell.get(name) == value for name, value in cell.items())
        )
        return Results(records=kept, scale=self.scale, config=self.config)

    def has(self, **cell: str | float | bool) -> bool:
        """Whether there is a record of such a cell."""
        return bool(self.where(**cell).records)

    def along(self, name: str, **cell: str | float | bool) -> list[Any]:
        """The values that an axis of the grid takes, in the order they were run.

        Args:
            name: of the axis.
            **cell: what the grid varies, by name; records that agree with all of it count.

        Raises:
            Missing: it takes none.
        """
        found = [record.cell[name] for record in self.where(**cell) if name in record.cell]
        if not found:
            raise Missing(f"nothing was measured along {name}" + _at(cell))
        return list(dict.fromkeys(found))

    def cells(self) -> list[Cell]:
        """The grid, in the order it was run.

        Raises:
            Missing: it is empty.
        """
        if not self.records:
            raise Missing("there is no such cell")
        return list({tuple(record.cell.items()): record.cell for record in self.records}.values())

    def each(self, measure: str, **cell: str | float | bool) -> list[float]:
        """A number for each seed.

        Args:
            measure: name of a measured number.
            **cell: what the grid varies, by name; records that agree with all of it count.

        Raises:
            Missing: it was not measured.
        """
        found = [r.values[measure] for r in self.where(**cell) if measure in r.values]
        if not found:
            raise Missing(f"{measure} was not measured" + _at(cell))
        return [float(value) for value in found if not isinstance(value, Sequence)]

    def mean(self, measure: str, **cell: str | float | bool) -> float:
        """The mean over seeds.

        Args:
            measure: name of a measured number.
            **cell: what the grid varies, by name; records that agree with all of it count.

        Raises:
            Missing: it was not measured.
        """
        each = self.each(measure, **cell)
        return sum(each) / len(each)

    def best(self, measure: str, **cell: str | float | bool) -> float:
        """The largest over seeds (and over whatever the cell leaves open).

        Args:
            measure: name of a measured number.
            **cell: what the grid varies, by name; records that agree with all of it count.

        Raises:
            Missing: it was not measured.
        """
        return max(self.each(measure, **cell))

    def worst(self, measure: str, **cell: str | float | bool) -> float:
        """The smallest over seeds (and over whatever the cell leaves open); NaN if one is.

        Args:
            measure: name of a measured number.
            **cell: what the grid varies, by name; records that agree with all of it count.

        Raises:
            Missing: it was not measured.
        """
        each = self.each(measure, **cell)
        return math.nan if any(math.isnan(x) for x in each) else min(each)

    def curves(self, measure: str, **cell: str | float | bool) -> list[list[float]]:
        """A curve for each seed.

        Args:
            measure: name of a measured curve.
            **cell: what the grid varies, by name; records that agree with all of it count.

        Raises:
            Missing: it was not measured.
        """
        found = [r.values[measure] for r in self.where(**cell) if measure in r.values]
        if not found:
            raise Missing(f"the curve {measure} was not measured" + _at(cell))
        return [list(curve) for curve in found if isinstance(curve, Sequence)]

    def band(
        self, measure: str, **cell: str | float | bool
    ) -> tuple[list[float], list[float], list[float]]:
        """Mean, least and greatest of a curve over seeds, up to the shortest one's end.

        Args:
            measure: name of a measured curve.
            **cell: what the grid varies, by name; records that agree with all of it count.

        Raises:
            Missing: it was not measured.
        """
        columns = list(zip(*self.curves(measure, **cell), strict=False))
        return (
            [sum(column) / len(column) for column in columns],
            [min(column) for column in columns],
            [max(column) for column in columns],
        )

    @property
    def seconds(self) -> float:
        """Time of all cells, summed: of the clock where they ran one after the other."""
        return sum(record.seconds for record in self.records)
