"""Measurements of an experiment: one record per grid cell and seed, and queries on them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from recollect.serialization import plain

__all__ = ["Cell", "NotMeasured", "Record", "Results", "Values"]

Cell = Mapping[str, Any]
"""One point of an experiment's grid: the varied values (text, numbers, booleans) by name."""

Values = Mapping[str, float | Sequence[float]]
"""Measured numbers and curves, by name."""


class NotMeasured(ValueError):
    """Raised when a query matches no measurement.

    Examples:
        >>> results = rc.experiments.Results.from_rows([({"model": "gla"}, 0, {"accuracy": 0.5})])
        >>> try:
        ...     results.mean("accuracy", model="atlas")
        ... except rc.experiments.NotMeasured as error:
        ...     print(error)
        accuracy was not measured at model = atlas
    """


@dataclass(frozen=True, kw_only=True)
class Record:
    """One cell measured with one seed.

    Attributes:
        cell: the point of the grid.
        seed: of the run.
        values: measured numbers and curves, by name.
        seconds: duration of the measurement.
        commit, device, date: of the measurement.
        rules: digest of the experiment's rules at that time (`Experiment.rules_digest`).

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
        """Return JSON-ready data. Numbers have seven digits, the precision of float32."""
        return {**plain(asdict(self)), "values": plain(_rounded(self.values))}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Record:
        """Rebuild a record from the output of `to_dict`."""
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


def _extreme(pick: Any, values: Sequence[float]) -> float:
    return math.nan if any(map(math.isnan, values)) else pick(values)


@dataclass(frozen=True, kw_only=True)
class Results:
    """All records of a run.

    Every query takes the cell as keyword arguments: records that agree with all of them count,
    whatever the rest of their cells. It raises `NotMeasured` if there are none. A run that diverged
    has the value NaN. Means, minima and maxima over it are NaN, whatever the order of the records.

    Attributes:
        records: one per cell and seed.
        scale: ``"smoke"``, ``"small"`` or ``"paper"``.
        config: the configuration of the run.

    Examples:
        >>> results = rc.experiments.Results.from_rows(
        ...     [({"model": "gla"}, seed, {"accuracy": 0.4 + seed / 10}) for seed in (0, 1)]
        ... )
        >>> results.mean("accuracy", model="gla")
        0.45
    """

    records: tuple[Record, ...]
    scale: str = "small"
    config: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def from_rows(
        cls,
        rows: Iterable[tuple[Cell, int, Values]],
        *,
        scale: str = "small",
        config: Mapping[str, Any] | None = None,
    ) -> Results:
        """Build results from tuples of a cell, a seed and its values.

        Args:
            rows: one tuple per cell and seed.
            scale: ``"smoke"``, ``"small"`` or ``"paper"``.
            config: the configuration of that scale.
        """
        records = tuple(Record(cell=cell, seed=seed, values=values) for cell, seed, values in rows)
        return cls(records=records, scale=scale, config=config or {})

    def __iter__(self) -> Iterator[Record]:
        return iter(self.records)

    def select(self, **cell: Any) -> Results:
        """Return the results of the cells that agree with ``cell``, perhaps none."""
        selected = (r for r in self if all(r.cell.get(name) == x for name, x in cell.items()))
        return replace(self, records=tuple(selected))

    def has_cell(self, **cell: Any) -> bool:
        """Whether a record agrees with ``cell``."""
        return bool(self.select(**cell).records)

    def axis_values(self, name: str, **cell: Any) -> list[Any]:
        """Return the values along the axis ``name`` of the grid, in the order of the run.

        Args:
            name: of the axis.
            cell: the cells, see `Results`.

        Raises:
            NotMeasured: if no record agrees with them.
        """
        values = [record.cell[name] for record in self.select(**cell) if name in record.cell]
        if not values:
            raise NotMeasured(f"nothing was measured along {name}" + _at(cell))
        return list(dict.fromkeys(values))

    def cells(self) -> list[Cell]:
        """Return the grid, in the order of the run.

        Raises:
            NotMeasured: if it is empty.
        """
        if not self.records:
            raise NotMeasured("there is no such cell")
        return list({tuple(record.cell.items()): record.cell for record in self}.values())

    def _values(self, measure: str, cell: Cell) -> list[float | Sequence[float]]:
        values = [r.values[measure] for r in self.select(**cell) if measure in r.values]
        if not values:
            raise NotMeasured(f"{measure} was not measured" + _at(cell))
        return values

    def values(self, measure: str, **cell: Any) -> list[float]:
        """Return a number for each record. A curve counts as the mean of its points.

        Args:
            measure, cell: the name of a value and the cells, see `Results`.
        """
        return [
            sum(x) / len(x) if isinstance(x, Sequence) else float(x)
            for x in self._values(measure, cell)
        ]

    def mean(self, measure: str, **cell: Any) -> float:
        """Return the mean over seeds, and over all axes that ``cell`` leaves open.

        Args:
            measure, cell: the name of a value and the cells, see `Results`.
        """
        values = self.values(measure, **cell)
        return sum(values) / len(values)

    def max(self, measure: str, **cell: Any) -> float:
        """Return the largest value over seeds, and over all axes that ``cell`` leaves open.

        Args:
            measure, cell: the name of a value and the cells, see `Results`.
        """
        return _extreme(max, self.values(measure, **cell))

    def min(self, measure: str, **cell: Any) -> float:
        """Return the smallest value over seeds, and over all axes that ``cell`` leaves open.

        Args:
            measure, cell: the name of a value and the cells, see `Results`.
        """
        return _extreme(min, self.values(measure, **cell))

    def best_cell(self, measure: str, **cell: Any) -> Cell:
        """Return the cell with the largest mean over seeds. A run that diverged is the last.

        Args:
            measure, cell: the name of a value and the cells, see `Results`.
        """
        selected = self.select(**cell)
        means = [(selected.mean(measure, **one), one) for one in selected.cells()]
        return max(means, key=lambda pair: -math.inf if math.isnan(pair[0]) else pair[0])[1]

    def curves(self, measure: str, **cell: Any) -> list[list[float]]:
        """Return a curve for each record.

        Args:
            measure, cell: the name of a value and the cells, see `Results`.
        """
        return [list(curve) for curve in self._values(measure, cell) if isinstance(curve, Sequence)]

    def mean_and_range(
        self, measure: str, **cell: Any
    ) -> tuple[list[float], list[float], list[float]]:
        """Return mean, minimum and maximum of a curve over seeds, up to the shortest one's end.

        Args:
            measure, cell: the name of a value and the cells, see `Results`.
        """
        columns = list(zip(*self.curves(measure, **cell), strict=False))
        return (
            [sum(column) / len(column) for column in columns],
            [_extreme(min, column) for column in columns],
            [_extreme(max, column) for column in columns],
        )

    @property
    def seconds(self) -> float:
        """Sum of the records' durations; the wall-clock time if they ran one after the other."""
        return sum(record.seconds for record in self.records)
