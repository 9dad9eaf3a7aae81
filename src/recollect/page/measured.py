"""What the committed results hold of each system, as tables for its page.

Three kinds of files are read: `results/language_models/NAME.json` (a language model at equal
parameters and tokens), `results/demo/results.json` (a comparison) and the
`results/reproduce/*/results.json` whose cells name systems. Nothing is computed here but means over
seeds.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

__all__ = ["Measured", "bits_per_byte", "measured"]

# Of a record's values, those that say how it was made and not what was found.
_TERMS = ("FLOPs", "byte bigram", "lost steps", "lr", "parameters", "steps", "tokens")
_NAMES = ("model", "architecture")  # keys of a cell under which a system may stand


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One table of numbers of a system.

    Attributes:
        title: what was measured.
        columns, rows: the table's.
        note: how much it means, on what, and the command that makes it again.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str


def measured(name: str, results: Path) -> list[Measured]:
    """All that the results hold of a system.

    Args:
        name: of the zoo.
        results: the folder; one that is missing holds nothing.
    """
    found = [_language_model(name, results), _demo(name, results)]
    return [table for table in found if table] + list(_experiments(name, results))


def bits_per_byte(name: str, results: Path) -> float | None:
    """Of its row among the language models, if it has one."""
    row = _read(results / "language_models" / f"{name}.json")
    return row["run"]["value"] if row else None


@cache
def _read(path: Path) -> dict[str, Any] | None:
    return json.loads(path.read_text("utf-8")) if path.exists() else None


def _where(environment: Mapping[str, Any]) -> str:
    return (
        f"{environment['device']}, torch {environment['torch']}, commit "
        f"{environment['commit'].removesuffix('-dirty')[:8]}"
    )


def _state(run: Mapping[str, Any]) -> str:
    return f"{run['state_bytes']:,} bytes{', grows' if run['grows'] else ''}"


def _language_model(name: str, results: Path) -> Measured | None:
    paths = {
        layers: results / "language_models" / f"{name}{suffix}.json"
        for layers, suffix in (("the preset's", ""), ("`--layer-options same`", "-same"))
    }
    stored = {layers: data for layers, path in paths.items() if (data := _read(path)) is not None}
    if not stored:
        return None
    first = next(iter(stored.values()))
    run, terms = first["run"], first["terms"]
    return Measured(
        title="A language model at equal parameters and tokens",
        columns=(
            *("layer options", "bits per byte", "byte bigram", "parameters"),
            *("state per sequence", "CPU minutes"),
        ),
        rows=tuple((layers, *_cells(data)) for layers, data in stored.items()),
        note=(
            f"Held-out text after {run['tokens']:,} training bytes; {terms['depth']} layers of "
            f"width {terms['width']}, {terms['heads']} heads, rows of {terms['length']} bytes, "
            f"seed {terms['seed']}. {_where(first['environment'])}. "
            "[Beside the others, and the command](../results/language_models/README.md)."
        ),
    )


def _cells(data: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the numbers of a row of the language models."""
    run = data["run"]
    return (
        f"{run['value']:.3f}",
        f"{data['bigram']:.3f}",
        f"{run['parameters']:,}",
        _state(run),
        f"{run['cpu_seconds'] / 60:.1f}" if run.get("cpu_seconds") else "–",
    )


def _demo(name: str, results: Path) -> Measured | None:
    data = _read(results / "demo" / "results.json")
    runs = [run for run in data["runs"] if run["model"] == name] if data else []
    if data is None or not runs:
        return None
    unit = {"text": "held-out bits per byte", "capacity": "share of pairs recalled"}
    rows = [
        (task, unit[task], f"{run['value']:.3f}", f"{run['parameters']:,}", _state(run))
        for run in runs
        for task in [run["task"]]
    ]
    return Measured(
        title="The demo: text, and more pairs than keys have channels",
        columns=("task", "value is", "value", "parameters", "state per sequence"),
        rows=tuple(rows),
        note=f"Seed {data['seed']}. {_where(data['environment'])}. Made again by `make demo`.",
    )


def _experiments(name: str, results: Path) -> Iterator[Measured]:
    for path in sorted(results.glob("reproduce/*/results.json")):
        data = _read(path)
        assert data is not None
        mine = [
            record
            for record in data["records"]
            if any(record["cell"].get(key) == name for key in _NAMES)
        ]
        if mine:
            yield _experiment(data, mine)


def _experiment(data: Mapping[str, Any], records: list[dict[str, Any]]) -> Measured:
    cells: dict[str, list[dict[str, Any]]] = {}
    for record in records:
        at = {key: value for key, value in record["cell"].items() if key not in _NAMES}
        said = ", ".join(f"{key} {value}" for key, value in at.items())
        cells.setdefault(said, []).append(record)
    shown = _shown(records[0]["values"])
    means = {
        at: [_mean(r["values"].get(key) for r in of) for key in shown] for at, of in cells.items()
    }
    if list(means) == [""]:
        columns, rows = ("measured", "value"), [*zip(shown, means[""], strict=True)]
    else:
        columns, rows = ("at", *shown), [(at, *values) for at, values in means.items()]
    seeds, last = len({record["seed"] for record in records}), records[-1]
    experiment, scale = data["experiment"], data["scale"]
    claims = (
        f"claims and verdicts in the [gallery](../gallery.md#{experiment})"
        if data["complete"]
        else "not all of its models are measured so far ([results](../results/README.md))"
    )
    return Measured(
        title=f"{experiment}: {data['source']}",
        columns=columns,
        rows=tuple(rows),
        note=(
            f"{scale.capitalize()} scale, {_seeds(seeds)}. {last['device']}, commit "
            f"{last['commit'][:8]}. Made again by `recollect reproduce {experiment} --scale "
            f"{scale}`; {claims}."
        ),
    )


def _shown(values: Mapping[str, Any]) -> list[str]:
    """What was found: single numbers, without those of parts that another number sums up."""
    return [
        key
        for key, value in values.items()
        if key not in _TERMS and isinstance(value, int | float) and not key.endswith(", tokens")
    ]


def _mean(values: Iterable[float | None]) -> str:
    numbers = [math.nan if value is None else value for value in values]
    if any(map(math.isnan, numbers)):
        return "diverged"
    mean, low, high = (_number(x) for x in (fmean(numbers), min(numbers), max(numbers)))
    return mean if low == high else f"{mean} ({low} to {high})"


def _number(value: float) -> str:
    whole = value.is_integer() and abs(value) > 1
    return f"{value:,.0f}" if whole or abs(value) >= 1000 else f"{value:.3f}"


def _seeds(many: int) -> str:
    return "1 seed" if many == 1 else f"means over {many} seeds (least to greatest)"
