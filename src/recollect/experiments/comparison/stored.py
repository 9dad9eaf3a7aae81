"""A comparison that was saved, read again: to print, to ask, and to draw its report anew."""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import Any

from recollect.experiments.comparison.comparison import Comparison
from recollect.experiments.comparison.results import ModelRun, Sizes
from recollect.experiments.comparison.training import Schedule
from recollect.report.environment import Environment
from recollect.report.files import MAX_FILE_BYTES, check_regular
from recollect.serialization import read_json

__all__ = ["load_comparison"]

SCHEMA = 1


def load_comparison(folder: str | PathLike[str]) -> Comparison:
    """What `Comparison.save` wrote, without its report and figures.

    Args:
        folder: of the comparison, or its ``results.json``. Only data is read.

    Returns:
        The comparison, whose `save` draws the report anew from the same numbers.

    Raises:
        ValueError: the file is no comparison, or one of another version.
        OSError: there is no such file, or no regular one.

    Examples:
        >>> sizes = rc.experiments.Sizes(
        ...     width=8, depth=1, heads=1, length=9,
        ...     schedule=rc.experiments.Schedule(steps=1, batch=1, lr=1e-3),
        ... )
        >>> found = rc.compare(["linear_attention"], ["mqar"], sizes=sizes)
        >>> paths = found.save("runs/mine")
        >>> rc.experiments.load_comparison("runs/mine").to_dict() == found.to_dict()
        True
    """
    path = Path(folder)
    path = path / "results.json" if path.is_dir() else path
    check_regular(path, limit=MAX_FILE_BYTES)
    try:
        data = read_json(path.read_bytes())
        if data["schema"] != SCHEMA:
            raise ValueError(f"schema {data['schema']!r}")
        return _comparison(data)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        said = f"{type(error).__name__}: {error}"
        raise ValueError(
            f"{path} is no comparison that this version reads ({said}): give the folder of one, or "
            "make it again with `recollect compare`"
        ) from None


def _comparison(data: dict[str, Any]) -> Comparison:
    fields = {name: data[name] for name in data if name not in ("schema", "summary")}
    fields["runs"] = tuple(map(_run, data["runs"]))
    fields["sizes"] = {
        task: Sizes(**{**size, "schedule": Schedule(**size["schedule"])})
        for task, size in data["sizes"].items()
    }
    fields["environment"] = Environment(**data["environment"])
    fields["failures"] = tuple(tuple(one) for one in data["failures"])
    fields["measured"] = {task: tuple(two) for task, two in data.get("measured", {}).items()}
    return Comparison(**fields)


def _run(data: dict[str, Any]) -> ModelRun:
    curve = tuple((tokens, value) for tokens, value in data["curve"])
    by_pairs = {int(count): share for count, share in data["by_pairs"].items()}
    return ModelRun(**{**data, "curve": curve, "by_pairs": by_pairs})
