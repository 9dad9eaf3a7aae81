"""What an evaluation measured: per task, and all together, to print and to save."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any

from recollect.report.files import write_atomic

__all__ = ["SCHEMA", "Evaluation", "TaskResult"]

SCHEMA = 1
"""Of the JSON files."""


@dataclass(frozen=True, kw_only=True, repr=False)
class TaskResult:
    """One task, or one group of tasks.

    Attributes:
        task: its name.
        metrics: numbers by metric, such as ``{"acc": 0.31}``; ``acc (FILTER)`` where lm-eval reads
            what was written in more than one way.
        errors: standard errors of those metrics that have one.
        lower_is_better: the metrics of which less is better.
        documents: how many were asked.
        version: of the task.
        settings: under which it was measured; equal settings give equal numbers.
        batch: texts at once, as found by trying where nobody said.
        seconds: that it took.
        notes: what a reader of the numbers must know.
        members: tasks of which a group's numbers are the mean.

    Examples:
        >>> result = rc.lm.TaskResult(
        ...     task="piqa", metrics={"acc": 0.61}, errors={"acc": 0.01}, documents=1838,
        ...     version="1", settings={"limit": None},
        ... )
        >>> result.metrics["acc"], result.documents
        (0.61, 1838)
    """

    task: str
    metrics: Mapping[str, float]
    errors: Mapping[str, float]
    lower_is_better: tuple[str, ...] = ()
    documents: int
    version: str
    settings: Mapping[str, Any]
    batch: int = 0
    seconds: float = 0.0
    notes: tuple[str, ...] = ()
    members: tuple[str, ...] = ()

    @classmethod
    def of(cls, raw: Mapping[str, Any], better: Mapping[str, Any], **more: Any) -> TaskResult:
        """From lm-eval's numbers, whose keys are ``metric,filter`` and ``metric_stderr,filter``.

        Args:
            raw: of one task or group.
            better: whether higher is better, by metric.
            more: the other attributes.
        """
        numbers: dict[str, float] = {}
        errors: dict[str, float] = {}
        for key, value in raw.items():
            metric, comma, way = key.partition(",")
            if not comma or not isinstance(value, int | float):
                continue
            if metric.isdecimal() and value == -1:  # RULER's mark of a length without documents
                continue
            into = errors if metric.endswith("_stderr") else numbers
            metric = metric.removesuffix("_stderr")
            if into is errors and not math.isfinite(value):  # as of a single document
                continue
            into[metric if way == "none" else f"{metric} ({way})"] = float(value)
        lower = tuple(x for x in numbers if better.get(x.partition(" (")[0]) is False)
        return cls(metrics=numbers, errors=errors, lower_is_better=lower, **more)

    @property
    def finite(self) -> bool:
        """Whether there are metrics, and all of them are numbers that JSON knows."""
        return bool(self.metrics) and all(map(math.isfinite, self.metrics.values()))

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready; a metric that is not finite is ``None``."""
        data = {name: getattr(self, name) for name in self.__dataclass_fields__}
        for name in ("metrics", "errors", "settings"):
            data[name] = dict(data[name])
        data["metrics"] = {x: y if math.isfinite(y) else None for x, y in self.metrics.items()}
        return data | {name: list(data[name]) for name in ("lower_is_better", "notes", "members")}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> TaskResult:
        """What `to_dict` wrote.

        Raises:
            TypeError: fields that are missing or unknown.
        """
        lists = {name: tuple(data[name]) for name in ("lower_is_better", "notes", "members")}
        metrics = {x: math.nan if y is None else y for x, y in data["metrics"].items()}
        return cls(**{**data, **lists, "metrics": metrics})

    def to_harness(self) -> dict[str, Any]:
        """The numbers under lm-eval's keys, as its groups read them."""
        raw: dict[str, Any] = {"sample_len": self.documents}
        for end, numbers in (("", self.metrics), ("_stderr", self.errors)):
            for name, value in numbers.items():
                metric, _, way = name.removesuffix(")").partition(" (")
                raw[f"{metric}{end},{way or 'none'}"] = value
        return raw

    def told(self, metric: str) -> str:
        """A metric as it is read: its value, and the standard error where there is one."""
        error = self.errors.get(metric)
        return f"{self.metrics[metric]:.4g}" + ("" if error is None else f" ± {error:.2g}")

    def __repr__(self) -> str:
        said = ", ".join(f"{name} {self.told(name)}" for name in self.metrics)
        return f"TaskResult({self.task}: {said}; {self.documents} documents)"


@dataclass(frozen=True, kw_only=True, repr=False)
class Evaluation:
    """A model's results: ``print`` shows them as a table, `save` writes them as JSON.

    Attributes:
        model: what it is called: its folder, or its class.
        tasks: results, in the order in which they were asked for.
        groups: of groups of tasks, such as ``mmlu``: means over their members.
        failures: why a task was not measured: a sentence by its name.
        environment: device, versions, commit and date, as a mapping.

    Examples:
        >>> one = rc.lm.TaskResult(
        ...     task="t", metrics={"acc": 0.5}, errors={"acc": 0.1}, documents=9, version="1",
        ...     settings={},
        ... )
        >>> rc.lm.Evaluation(model="m", tasks=(one,), environment={})
        Evaluation(m: t acc 0.5 ± 0.1)
        >>> print(rc.lm.Evaluation(model="m", tasks=(one,), environment={}))
        task  metric  measured   documents
        t     acc     0.5 ± 0.1          9
    """

    model: str
    tasks: tuple[TaskResult, ...]
    groups: tuple[TaskResult, ...] = ()
    failures: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, Any]

    def __getitem__(self, task: str) -> TaskResult:
        """The result of a task or group by its name.

        Raises:
            KeyError: none was measured under that name.
        """
        for one in (*self.tasks, *self.groups):
            if one.task == task:
                return one
        raise KeyError(f"no task {task!r} was measured: {[one.task for one in self.tasks]}")

    def rows(self) -> list[tuple[str, str, str, str]]:
        """Task, metric, what was measured, documents: a row per metric."""
        return [
            (one.task, name, one.told(name), f"{one.documents:,}")
            for one in (*self.tasks, *self.groups)
            for name in one.metrics
        ]

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader of the numbers must know, by task."""
        return tuple(f"{one.task}: {note}" for one in self.tasks for note in one.notes)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "schema": SCHEMA,
            "model": self.model,
            "environment": dict(self.environment),
            "tasks": [one.to_dict() for one in self.tasks],
            "groups": [one.to_dict() for one in self.groups],
            "failures": dict(self.failures),
        }

    def save(self, folder: str | PathLike[str]) -> Path:
        """Write ``results.json`` into a folder, whole or not at all.

        Args:
            folder: it is made where it is missing.

        Raises:
            OSError: the folder cannot be written.
        """
        data = json.dumps(self.to_dict(), indent=2, allow_nan=False)
        return write_atomic(Path(folder) / "results.json", data)

    def __str__(self) -> str:
        return "\n".join([*_table(self.rows()), *self.notes, *self.failures.values()])

    def __repr__(self) -> str:
        said = [f"{task} {metric} {value}" for task, metric, value, _ in self.rows()]
        return f"Evaluation({self.model}: {'; '.join(said)})"


def _table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Rows as text, numbers to the right."""
    rows = [("task", "metric", "measured", "documents"), *rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if i == 3 else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
