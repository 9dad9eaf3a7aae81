"""An evaluation's folder: a file per finished task, which a later run of equal settings takes."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from recollect.lm.evaluation.results import SCHEMA, TaskResult
from recollect.recipe.json_text import read_json
from recollect.report.files import write_atomic

__all__ = ["finished", "keep"]


def keep(folder: Path, result: TaskResult) -> Path:
    """Write a finished task, whole or not at all.

    Args:
        folder: of the evaluation.
        result: of the task.
    """
    data = {"schema": SCHEMA, **result.to_dict()}
    return write_atomic(_path(folder, result.task), json.dumps(data, indent=2))


def finished(folder: Path, settings: Mapping[str, Any]) -> dict[str, TaskResult]:
    """The tasks that were finished there, by name.

    Args:
        folder: of the evaluation.
        settings: under which tasks are about to be measured.

    Raises:
        ValueError: it holds an evaluation under other settings, or what is no result.
    """
    found: dict[str, TaskResult] = {}
    for path in sorted((folder / "tasks").glob("*.json")):
        result = _read(path)
        for name in settings:
            if settings[name] != result.settings.get(name, settings[name]):
                raise ValueError(
                    f"{folder} holds an evaluation with {_told(name, result.settings)} and this "
                    f"one has {_told(name, settings)}: give another --out, or delete that folder"
                )
        found[result.task] = result
    return found


def _told(name: str, settings: Mapping[str, Any]) -> str:
    value = settings[name]
    if name in ("model", "tokenizer", "text"):  # digests say nothing to a reader
        return f"the {name} {str(value)[:8]}"
    return f"no {name}" if value is None else f"{name} {value}"


def _path(folder: Path, task: str) -> Path:
    return folder / "tasks" / f"{re.sub(r'[^A-Za-z0-9._-]', '_', task)}.json"


def _read(path: Path) -> TaskResult:
    try:
        data = read_json(path.read_text(encoding="utf-8"))
        if not isinstance(data, dict) or data.pop("schema", None) != SCHEMA:
            raise ValueError("it has another schema")
        return TaskResult.from_dict(data)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path} is no result of a task ({error}): delete it to measure that task anew"
        ) from None
