"""Results of an evaluation, per task and together, to print and to save.

A folder has a file per finished task, which a later run does not repeat.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any

from recollect.lm.evaluation.local_tasks import local_tasks, local_version
from recollect.report.files import read_regular, write_atomic
from recollect.serialization import read_json

__all__ = [
    "SCHEMA",
    "Evaluation",
    "TaskResult",
    "load_finished_groups",
    "load_finished_tasks",
    "save_task",
]

SCHEMA = 1
"""Version of the JSON files."""


@dataclass(frozen=True, kw_only=True, repr=False)
class TaskResult:
    """Result of one task, or of one group of tasks.

    Attributes:
        task: name of the task or group.
        metrics: values by metric, such as ``{"acc": 0.31}``; the name is ``acc (FILTER)`` if
            lm-eval extracts answers in more than one manner.
        errors: standard errors of the metrics that have one.
        lower_is_better: the metrics of which a smaller value is better.
        documents: number of documents.
        version: version of the task.
        settings: settings of the measurement; equal settings give equal values.
        batch: batch size; with ``"auto"`` the one that was found.
        seconds: duration of the measurement.
        notes: restrictions on the meaning of the metrics.
        members: tasks over which the metrics of a group are averaged.

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
    def from_harness(
        cls, raw: Mapping[str, Any], higher_is_better: Mapping[str, Any], **attributes: Any
    ) -> TaskResult:
        """Return the result with lm-eval's values of one task or group.

        Args:
            raw: values by ``metric,filter`` and ``metric_stderr,filter``.
            higher_is_better: whether higher is better, by metric.
            attributes: the other attributes.
        """
        metrics: dict[str, float] = {}
        errors: dict[str, float] = {}
        for key, value in raw.items():
            metric, comma, filter_name = key.partition(",")
            if not comma or not isinstance(value, int | float):
                continue
            if metric.isdecimal() and value == -1:  # RULER's mark of a length without documents
                continue
            is_error, metric = metric.endswith("_stderr"), metric.removesuffix("_stderr")
            if is_error and not math.isfinite(value):  # as of a single document
                continue
            name = metric if filter_name == "none" else f"{metric} ({filter_name})"
            (errors if is_error else metrics)[name] = float(value)
        lower = tuple(x for x in metrics if higher_is_better.get(x.partition(" (")[0]) is False)
        return cls(metrics=metrics, errors=errors, lower_is_better=lower, **attributes)

    @property
    def finite(self) -> bool:
        """Whether there are metrics and all of them are finite."""
        return bool(self.metrics) and all(map(math.isfinite, self.metrics.values()))

    def to_dict(self) -> dict[str, Any]:
        """Return the result for JSON; a metric that is not finite is ``None``."""
        metrics = {x: y if math.isfinite(y) else None for x, y in self.metrics.items()}
        return asdict(self) | {"metrics": metrics}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> TaskResult:
        """Return the result that `to_dict` described.

        Raises:
            TypeError: fields are missing or unknown.
        """
        tuples = {name: tuple(data[name]) for name in ("lower_is_better", "notes", "members")}
        metrics = {x: math.nan if y is None else y for x, y in data["metrics"].items()}
        return cls(**{**data, **tuples, "metrics": metrics})

    def to_harness(self) -> dict[str, Any]:
        """Return the values under lm-eval's keys, from which groups compute theirs."""
        raw: dict[str, Any] = {"sample_len": self.documents}
        for suffix, values in (("", self.metrics), ("_stderr", self.errors)):
            for name, value in values.items():
                metric, _, filter_name = name.removesuffix(")").partition(" (")
                raw[f"{metric}{suffix},{filter_name or 'none'}"] = value
        return raw

    def format(self, metric: str) -> str:
        """Return the value of a metric as text, with its standard error if it has one."""
        error = self.errors.get(metric)
        return f"{self.metrics[metric]:.4g}" + ("" if error is None else f" ± {error:.2g}")

    def __repr__(self) -> str:
        metrics = ", ".join(f"{name} {self.format(name)}" for name in self.metrics)
        return f"TaskResult({self.task}: {metrics}; {self.documents} documents)"


@dataclass(frozen=True, kw_only=True, repr=False)
class Evaluation:
    """Results of a model: ``print`` shows them as a table, `save` writes them as JSON.

    Attributes:
        model: folder of the model, or its class.
        tasks: results, in the order of the request.
        groups: results of groups of tasks, such as ``mmlu``: means over their members.
        failures: reasons why tasks were not measured, by task.
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
        """Return the result of a task or group.

        Raises:
            KeyError: no task or group of that name was measured.
        """
        for result in (*self.tasks, *self.groups):
            if result.task == task:
                return result
        raise KeyError(f"no task {task!r} was measured: {[x.task for x in self.tasks]}")

    def rows(self) -> list[tuple[str, str, str, str]]:
        """Return task, metric, value and number of documents of each metric."""
        return [
            (result.task, name, result.format(name), f"{result.documents:,}")
            for result in (*self.tasks, *self.groups)
            for name in result.metrics
        ]

    @property
    def notes(self) -> tuple[str, ...]:
        """Restrictions on the meaning of the metrics, by task."""
        return tuple(f"{result.task}: {note}" for result in self.tasks for note in result.notes)

    def to_dict(self) -> dict[str, Any]:
        """Return the results for JSON."""
        results = {name: [x.to_dict() for x in getattr(self, name)] for name in ("tasks", "groups")}
        return {"schema": SCHEMA} | vars(self) | results

    def save(self, folder: str | PathLike[str]) -> Path:
        """Write ``results.json`` into a folder atomically.

        Args:
            folder: is created if it is missing.

        Raises:
            OSError: the folder cannot be written.
        """
        data = json.dumps(self.to_dict(), indent=2, allow_nan=False)
        return write_atomic(Path(folder) / "results.json", data)

    def __str__(self) -> str:
        rows = [("task", "metric", "measured", "documents"), *self.rows()]
        *widths, last = (max(map(len, column)) for column in zip(*rows, strict=True))
        table = [
            "  ".join([*map(str.ljust, cells, widths), documents.rjust(last)])
            for *cells, documents in rows
        ]
        return "\n".join([*table, *self.notes, *self.failures.values()])

    def __repr__(self) -> str:
        metrics = [f"{task} {metric} {value}" for task, metric, value, _ in self.rows()]
        return f"Evaluation({self.model}: {'; '.join(metrics)})"


# -- folders ---------------------------------------------------------------------------------------


_NOT_A_RESULT = (AttributeError, KeyError, TypeError, ValueError)


def save_task(folder: Path, result: TaskResult) -> Path:
    """Write the result of a finished task atomically."""
    path = folder / "tasks" / f"{re.sub(r'[^A-Za-z0-9._-]', '_', result.task)}.json"
    data = {"schema": SCHEMA, **result.to_dict()}
    return write_atomic(path, json.dumps(data, indent=2, allow_nan=False))


def load_finished_tasks(folder: Path, settings: Mapping[str, Any]) -> dict[str, TaskResult]:
    """Return the finished tasks of a folder by name.

    Raises ValueError for results of other settings, or a file that is not a result.
    """
    results: dict[str, TaskResult] = {}
    for path in sorted((folder / "tasks").glob("*.json")):
        try:
            result = TaskResult.from_dict(_read(path))
        except _NOT_A_RESULT as error:
            raise ValueError(
                f"{path} is not a result of a task ({error}): delete it to measure that task again"
            ) from None
        is_local = result.task in local_tasks()
        for name in settings:
            # Tasks of lm-eval do not read the local text.
            if (is_local or name != "text") and _differs(settings, result.settings, name):
                raise ValueError(
                    f"{folder} holds an evaluation with {_describe_setting(name, result.settings)} "
                    f"and this one has {_describe_setting(name, settings)}: give another --out, or "
                    "delete that folder"
                )
        if is_local and result.version != local_version(result.task):
            raise ValueError(
                f"{folder} holds {result.task} of version {result.version} and this one has "
                f"version {local_version(result.task)}: give another --out, or delete {path}"
            )
        results[result.task] = result
    return results


def load_finished_groups(
    folder: Path, settings: Mapping[str, Any], tasks: Mapping[str, TaskResult]
) -> tuple[TaskResult, ...]:
    """Return the groups in ``results.json`` of equal settings whose members are finished tasks.

    Raises ValueError if the file is not an evaluation.
    """
    path = folder / "results.json"
    if not path.exists():
        return ()
    try:
        groups = [TaskResult.from_dict(data) for data in _read(path)["groups"]]
    except _NOT_A_RESULT as error:
        raise ValueError(
            f"{path} is not an evaluation ({error}): give another --out, or, if the file is of no "
            "use, delete it; finished tasks have files of their own"
        ) from None
    return tuple(
        group
        for group in groups
        if not any(_differs(settings, group.settings, name) for name in settings)
        and all(member in tasks for member in group.members)
    )


def _differs(settings: Mapping[str, Any], saved: Mapping[str, Any], name: str) -> bool:
    """Return whether a saved setting is missing or has another value."""
    return name not in saved or settings[name] != saved[name]


def _describe_setting(name: str, settings: Mapping[str, Any]) -> str:
    if name not in settings:
        return f"no record of its {name}"
    value = settings[name]
    if name in ("model", "tokenizer", "text"):  # a digest
        return f"the {name} {str(value)[:8]}"
    return f"no {name}" if value is None else f"{name} {value}"


def _read(path: Path) -> dict[str, Any]:
    data = read_json(read_regular(path))
    if not isinstance(data, dict) or data.pop("schema", None) != SCHEMA:
        raise ValueError("it has another schema")
    return data
