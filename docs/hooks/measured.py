"""Committed results of each system, as tables for its page.

The tables come from `results/language_models/NAME.json` (a language model at equal parameters and
tokens), `results/demo/results.json` (a comparison) and `results/reproduce/*/results.json`. The only
computed numbers are means over seeds.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

from recollect.report.tables import Column, Table

__all__ = ["bits_per_byte", "choices", "results_for", "speed"]

# Values of a record that are settings, not results.
_SETTINGS = ("FLOPs", "byte bigram", "lost steps", "lr", "parameters", "steps", "tokens")
_SYSTEM_KEYS = ("model", "architecture")  # keys of a cell whose value may be a system


def results_for(name: str, results: Path) -> list[Table]:
    """Return the results of a system as tables whose captions give settings and command.

    Args:
        name: Name of the system.
        results: Folder of the results; it may be missing.
    """
    tables = [_language_model(name, results), _demo(name, results)]
    return [table for table in tables if table] + list(_experiments(name, results))


def bits_per_byte(name: str, results: Path) -> float | None:
    """Return the result of a system's language model, if one was trained."""
    row = _read(results / "language_models" / f"{name}.json")
    return row["run"]["value"] if row else None


def choices(results: Path) -> str:
    """Return the table of the page `choose.md`: systems with a language model, the best first."""
    paths = sorted((results / "language_models").glob("*.json"))
    data = {path.stem: stored for path in paths if (stored := _read(path)) is not None}
    times: dict[str, float] = {}
    for suite in ("presets-2025", "presets"):
        bench = _read(results / "bench" / f"{suite}-cpu.json")
        assert bench is not None
        times |= {timing["name"]: timing["ratio"] for timing in bench["timings"]}
    lines = [
        "| preset | bits per byte | state per sequence | time / Gated DeltaNet |",
        "|---|---:|---:|---:|",
    ]
    for name in sorted(data, key=lambda name: data[name]["run"]["value"]):
        if not name.endswith("-same"):
            run, ratio = data[name]["run"], times.get(name)
            cells = [f"`{name}`", f"{run['value']:.3f}", _state_size(run)]
            lines.append(f"| {' | '.join(cells)} | {f'{ratio:.2f}' if ratio else '–'} |")
    return "\n".join(lines)


def speed(results: Path, suite: str, names: Mapping[str, str]) -> str:
    """Return a table of time ratios of a suite, for names of its timings and their labels."""
    bench = _read(results / "bench" / f"{suite}-cpu.json")
    assert bench is not None
    ratios = {timing["name"]: timing["ratio"] for timing in bench["timings"]}
    first = next(iter(names))
    lines = ["| | forward | forward and backward |", "|---|---:|---:|"]
    for name, label in names.items():
        cells = [f"{ratios[name + x] / ratios[first + x]:.2f}" for x in ("", ", fwd+bwd")]
        lines.append(f"| {label} | {' | '.join(cells)} |")
    return "\n".join(lines)


@cache
def _read(path: Path) -> dict[str, Any] | None:
    return json.loads(path.read_text("utf-8")) if path.exists() else None


def _environment_note(environment: Mapping[str, Any]) -> str:
    return (
        f"{environment['device']}, torch {environment['torch']}, commit "
        f"{environment['commit'].removesuffix('-dirty')[:8]}"
    )


def _state_size(run: Mapping[str, Any]) -> str:
    return f"{run['state_bytes']:,} bytes{', grows' if run['grows'] else ''}"


def _language_model(name: str, results: Path) -> Table | None:
    paths = {
        layers: results / "language_models" / f"{name}{suffix}.json"
        for layers, suffix in (("the preset's", ""), ("`--layer-options same`", "-same"))
    }
    stored = {layers: data for layers, path in paths.items() if (data := _read(path)) is not None}
    if not stored:
        return None
    first = next(iter(stored.values()))
    run, terms = first["run"], first["terms"]
    return Table(
        title="A language model at equal parameters and tokens",
        columns=[
            *("layer options", "bits per byte", "byte bigram", "parameters"),
            *("state per sequence", Column(name="CPU minutes", align="right")),
        ],
        rows=[[layers, *_model_cells(data)] for layers, data in stored.items()],
        caption=(
            f"Held-out text after {run['tokens']:,} training bytes; {terms['depth']} layers of "
            f"width {terms['width']}, {terms['heads']} heads, rows of {terms['length']} bytes, "
            f"seed {terms['seed']}. {_environment_note(first['environment'])}. "
            "[All systems, and the command](../results/language_models/README.md)."
        ),
    )


def _model_cells(data: Mapping[str, Any]) -> list[str]:
    run = data["run"]
    return [
        f"{run['value']:.3f}",
        f"{data['bigram']:.3f}",
        f"{run['parameters']:,}",
        _state_size(run),
        f"{run['cpu_seconds'] / 60:.1f}" if run.get("cpu_seconds") else "–",
    ]


def _demo(name: str, results: Path) -> Table | None:
    data = _read(results / "demo" / "results.json")
    runs = [run for run in data["runs"] if run["model"] == name] if data else []
    if data is None or not runs:
        return None
    unit = {"text": "held-out bits per byte", "capacity": "fraction of pairs recalled"}
    return Table(
        title="The demo: text, and more pairs than keys have channels",
        columns=["task", "value is", "value", "parameters", "state per sequence"],
        rows=[
            [
                *(run["task"], unit[run["task"]], f"{run['value']:.3f}", run["parameters"]),
                _state_size(run),
            ]
            for run in runs
        ],
        caption=f"Seed {data['seed']}. {_environment_note(data['environment'])}. "
        "`make demo` measures it again.",
    )


def _experiments(name: str, results: Path) -> Iterator[Table]:
    for path in sorted(results.glob("reproduce/*/results.json")):
        data = _read(path)
        assert data is not None
        records = [
            record
            for record in data["records"]
            if any(record["cell"].get(key) == name for key in _SYSTEM_KEYS)
        ]
        if records:
            yield _experiment(data, records)


def _experiment(data: Mapping[str, Any], records: list[dict[str, Any]]) -> Table:
    cells: dict[str, list[dict[str, Any]]] = {}
    for record in records:
        axes = (f"{key} {x}" for key, x in record["cell"].items() if key not in _SYSTEM_KEYS)
        cells.setdefault(", ".join(axes), []).append(record)
    names = _scalar_names(records[0]["values"])
    means = {
        cell: [_mean(record["values"].get(name) for record in group) for name in names]
        for cell, group in cells.items()
    }
    if list(means) == [""]:
        columns, rows = ["measured", "value"], [*zip(names, means[""], strict=True)]
    else:
        columns, rows = ["at", *names], [(cell, *values) for cell, values in means.items()]
    seeds, last = len({record["seed"] for record in records}), records[-1]
    seeds_text = "1 seed" if seeds == 1 else f"means over {seeds} seeds (least to greatest)"
    experiment, scale = data["experiment"], data["scale"]
    claims = (
        f"claims and verdicts in the [gallery](../gallery.md#{experiment})"
        if data["complete"]
        else "some of its models have no results yet ([results](../results/README.md))"
    )
    return Table(
        title=f"{experiment}: {data['source']}",
        columns=columns,
        rows=rows,
        caption=(
            f"{scale.capitalize()} scale, {seeds_text}. {last['device']}, commit "
            f"{last['commit'][:8]}. `recollect reproduce {experiment} --scale {scale}` measures it "
            f"again; {claims}."
        ),
    )


def _scalar_names(values: Mapping[str, Any]) -> list[str]:
    """Return the names of scalar results, without parts that another number sums up."""
    return [
        key
        for key, value in values.items()
        if key not in _SETTINGS and isinstance(value, int | float) and not key.endswith(", tokens")
    ]


def _mean(values: Iterable[float | None]) -> str:
    numbers = [math.nan if value is None else value for value in values]
    if any(map(math.isnan, numbers)):
        return "diverged"
    mean, low, high = map(_format, (fmean(numbers), min(numbers), max(numbers)))
    return mean if low == high else f"{mean} ({low} to {high})"


def _format(value: float) -> str:
    is_count = value.is_integer() and abs(value) > 1
    return f"{value:,.0f}" if is_count or abs(value) >= 1000 else f"{value:.3f}"
