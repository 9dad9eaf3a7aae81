"""Results folder of an evaluation: a file per finished task, which a later run does not repeat."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from recollect.lm.evaluation.local_tasks import local_tasks, local_version
from recollect.lm.evaluation.results import SCHEMA, TaskResult
from recollect.report.files import read_regular, write_atomic
from recollect.serialization import read_json

__all__ = ["load_finished_groups", "load_finished_tasks", "save_task"]

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
