"""An evaluation's folder: a file per finished task, which a later run of equal settings takes."""

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

__all__ = ["earlier_groups", "finished", "keep"]


def keep(folder: Path, result: TaskResult) -> Path:
    """Write a finished task, whole or not at all.

    Args:
        folder: of the evaluation.
        result: of the task.
    """
    data = {"schema": SCHEMA, **result.to_dict()}
    return write_atomic(_path(folder, result.task), json.dumps(data, indent=2, allow_nan=False))


def finished(folder: Path, settings: Mapping[str, Any]) -> dict[str, TaskResult]:
    """The tasks that were finished there, by name.

    Args:
        folder: of the evaluation.
        settings: under which tasks are about to be measured.

    Raises:
        ValueError: it holds an evaluation under other settings, or what is no result.
    """
    found: dict[str, TaskResult] = {}
    local = local_tasks()
    for path in sorted((folder / "tasks").glob("*.json")):
        result = _read(path)
        for name in settings:
            if name == "text" and result.task not in local:
                continue  # tasks of lm-eval do not read it
            if _differ(settings, result.settings, name):
                raise ValueError(
                    f"{folder} holds an evaluation with {_told(name, result.settings)} and this "
                    f"one has {_told(name, settings)}: give another --out, or delete that folder"
                )
        if result.task in local and result.version != local_version(result.task):
            raise ValueError(
                f"{folder} holds {result.task} of version {result.version} and this one has "
                f"version {local_version(result.task)}: give another --out, or delete {path}"
            )
        found[result.task] = result
    return found


def earlier_groups(
    folder: Path, settings: Mapping[str, Any], tasks: Mapping[str, TaskResult]
) -> tuple[TaskResult, ...]:
    """Groups of ``results.json`` whose members are all among the finished tasks.

    Args:
        folder: of the evaluation.
        settings: under which groups are about to be measured; others are left out.
        tasks: what `finished` found.

    Raises:
        ValueError: the file is no evaluation.
    """
    path = folder / "results.json"
    if not path.exists():
        return ()
    try:
        groups = [TaskResult.from_dict(one) for one in _data(path)["groups"]]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path} is no evaluation ({error}): give another --out, or, if the file is of no use, "
            "delete it; finished tasks have files of their own"
        ) from None
    return tuple(
        one
        for one in groups
        if not any(_differ(settings, one.settings, name) for name in settings)
        and all(member in tasks for member in one.members)
    )


def _differ(one: Mapping[str, Any], other: Mapping[str, Any], name: str) -> bool:
    """Whether a setting has another value there, or none."""
    return name not in other or one[name] != other[name]


def _told(name: str, settings: Mapping[str, Any]) -> str:
    if name not in settings:
        return f"nothing said of its {name}"
    value = settings[name]
    if name in ("model", "tokenizer", "text"):  # digests say nothing to a reader
        return f"the {name} {str(value)[:8]}"
    return f"no {name}" if value is None else f"{name} {value}"


def _path(folder: Path, task: str) -> Path:
    return folder / "tasks" / f"{re.sub(r'[^A-Za-z0-9._-]', '_', task)}.json"


def _data(path: Path) -> dict[str, Any]:
    data = read_json(read_regular(path))
    if not isinstance(data, dict) or data.pop("schema", None) != SCHEMA:
        raise ValueError("it has another schema")
    return data


def _read(path: Path) -> TaskResult:
    try:
        return TaskResult.from_dict(_data(path))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path} is no result of a task ({error}): delete it to measure that task anew"
        ) from None
