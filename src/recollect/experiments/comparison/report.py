"""The report of a comparison: one HTML page, its figures, a CSV table and JSON."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from os import PathLike
from pathlib import Path

from recollect.experiments.comparison.results import Comparison, ModelRun
from recollect.experiments.comparison.tasks import RECALLS
from recollect.report.figures import Series, line_figure
from recollect.report.files import rescue, write_atomic
from recollect.report.html import Figure, Note, Report, Table
from recollect.report.ownership import owned_folder
from recollect.report.signals import deferred

__all__ = ["measured_on", "save_comparison", "table"]

_TITLES = {
    "text": "Text: held-out bits per byte (lower is better)",
    "mqar": "Recall: accuracy on multi-query associative recall (higher is better)",
    "capacity": "Capacity: recall of more pairs than keys have channels (higher is better)",
}
_MEASURES = {"text": "held-out bits per byte", **dict.fromkeys(RECALLS, "recall accuracy")}


def _size(run: ModelRun) -> str:
    kib = run.state_bytes / 1024
    return f"{kib:,.1f} KiB{', grows' if run.grows else ''}"


def table(comparison: Comparison, task: str) -> Table:
    """One row per model of a task."""
    runs = comparison.of(task)
    pairs = sorted({count for run in runs for count in run.by_pairs})
    value = "bits per byte" if task == "text" else "accuracy"
    columns = ["model", value, *(f"{count} pairs" for count in pairs)]
    columns += ["parameters", "tokens", "state per sequence", "tokens/s", "finished"]
    rows: list[list[str | int | float | None]] = []
    for run in runs:
        row: list[str | int | float | None] = [run.model]
        row.append(None if run.value is None else f"{run.value:.3f}")
        row += [f"{run.by_pairs[c]:.3f}" if c in run.by_pairs else None for c in pairs]
        row += [f"{run.parameters:,}", f"{run.tokens:,}", _size(run)]
        row += [f"{run.tokens_per_second:,.0f}", "yes" if run.finished else "interrupted"]
        rows.append(row)
    return Table(
        columns=columns, rows=rows, title=_TITLES[task], caption=_caption(comparison, task)
    )


def measured_on(comparison: Comparison, task: str) -> str:
    """Why a value of the table is not where its curve ends; nothing where they are the same."""
    glance, whole = comparison.measured.get(task, (0, 0))
    if glance == whole:
        return ""
    first = next((run for run in comparison.of(task) if run.finished and run.curve), None)
    ends = ""
    if first is not None and first.value is not None:
        at = first.curve[-1][1]
        ends = f" ({first.model} ends at {at:.3f} there and at {first.value:.3f} here)"
    what = "bytes of held-out text" if task == "text" else "examples of each number of pairs"
    spread = ", evenly spread" if task == "text" else ""
    said = f"Values are measured once, after training, on {whole:,} {what}; points of the learning "
    said += f"curves on {glance:,} of them{spread}, so that a curve may end elsewhere{ends}."
    if not all(run.finished for run in comparison.of(task)):
        said += " A model that was interrupted has its curve's last point in the table."
    return said


def _caption(comparison: Comparison, task: str) -> str:
    size = comparison.sizes[task]
    shape = (
        f"{size.depth} layer{'s' if size.depth > 1 else ''} of width {size.width}, "
        f"{size.schedule.steps} steps of "
        f"{size.schedule.batch} × {size.length} tokens, peak learning rate {size.schedule.lr:g}, "
        f"seed {comparison.seed}. The feed-forward width is set so that parameters are equal. "
        "State "
        f"is what decoding keeps per sequence after {size.length} tokens."
    )
    if measured_on(comparison, task):
        shape += f" {measured_on(comparison, task)}"
    if comparison.processes > 1:
        shape += f" Speeds are those of one of {comparison.processes} processes side by side."
    if task == "text" and comparison.bigram is not None:
        return (
            f"A smoothed byte bigram fitted to the same training text reaches "
            f"{comparison.bigram:.3f} bits per byte. {shape} Text: {comparison.text['source']}, "
            f"sha256 {comparison.text['sha256'][:16]}."
        )
    if task in RECALLS:
        recall = RECALLS[task]
        channels = size.head_dim or size.width // size.heads
        return (
            f"Keys and values have {channels} channels, in each of {size.heads} heads. "
            f"Trained on {', '.join(map(str, recall.trained))} pairs; more are asked without "
            f"training. Guessing among the values is right {recall.chance:.1%} of the time. Every "
            f"model has a short convolution, as in the benchmark. {shape}"
        )
    return shape


def _curves(comparison: Comparison, task: str) -> Figure | None:
    runs = [run for run in comparison.of(task) if run.curve]
    if not runs:
        return None
    series = [
        Series(name=run.model, x=[t for t, _ in run.curve], y=[v for _, v in run.curve])
        for run in runs
    ]
    levels = {}
    if task == "text" and comparison.bigram is not None:
        levels = {"byte bigram": comparison.bigram}
    if task in RECALLS:
        levels = {"guessing": RECALLS[task].chance}
    files = line_figure(
        series,
        x="training tokens",
        y=_MEASURES[task],
        title="Learning curves" if task == "text" else "Recall learned over training",
        baselines=levels,
        y_range=None if task == "text" else (0.0, 1.05),
    )
    return Figure(
        files=files,
        alt=f"{_MEASURES[task]} against training tokens for {', '.join(s.name for s in series)}",
        caption=f"{_MEASURES[task].capitalize()} against training tokens."
        f"{_of_points(comparison, task)}",
    )


def _of_points(comparison: Comparison, task: str) -> str:
    """On what a curve is measured, where that is not what the table is."""
    glance, whole = comparison.measured.get(task, (0, 0))
    if glance == whole:
        return ""
    what = "bytes" if task == "text" else "examples of each number of pairs"
    return f" Each point is measured on {glance:,} of the {whole:,} {what} of the table."


def _recall_by_state(comparison: Comparison, task: str) -> Figure | None:
    """What a model of a task keeps and how much of it it recalls, at the most pairs that it has."""
    runs = [run for run in comparison.of(task) if run.by_pairs]
    if not runs:
        return None
    most = max(runs[0].by_pairs)
    size = comparison.sizes[task]
    files = line_figure(
        [Series(name=run.model, x=[run.state_bytes], y=[run.by_pairs[most]]) for run in runs],
        x=f"bytes of state per sequence after {size.length} tokens",
        y=f"accuracy at {most} pairs",
        title="What is kept, and what is recalled of it",
        log_x=True,
        y_range=(0.0, 1.05),
    )
    return Figure(
        files=files,
        alt=f"Recall accuracy at {most} pairs against the bytes of a model's state",
        caption=f"Accuracy at {most} pairs against the bytes that decoding keeps per sequence.",
    )


def _recall_by_pairs(comparison: Comparison, task: str) -> Figure | None:
    runs = [run for run in comparison.of(task) if run.by_pairs]
    if not runs:
        return None
    files = line_figure(
        [
            Series(
                name=run.model,
                x=sorted(run.by_pairs),
                y=[run.by_pairs[c] for c in sorted(run.by_pairs)],
            )
            for run in runs
        ],
        x="key–value pairs to remember",
        y="recall accuracy",
        title="Recall by number of pairs",
        log_x=True,
        y_range=(0.0, 1.05),
    )
    return Figure(
        files=files,
        alt="Recall accuracy against the number of key-value pairs",
        caption="Accuracy at the end of training, by how many pairs stand in the context.",
    )


def save_comparison(
    comparison: Comparison, out: str | PathLike[str], *, command: str = ""
) -> dict[str, Path]:
    """Write ``report.html``, ``results.json``, ``results.csv`` and the figures into a folder.

    Args:
        comparison: what `compare` returned.
        out: the folder; it is made where it is missing.
        command: the command line to print on the page.

    Returns:
        Paths by what they are. Every file is written whole or not at all.

    Raises:
        ValueError: a run that is under way owns the folder; or it cannot be written, and the
            results are kept in a temporary one, which is named.
    """
    folder = Path(out)
    with owned_folder(folder), deferred():
        try:
            return _written(comparison, folder, command)
        except OSError as error:
            files = {"results.json": _json(comparison), "results.csv": _csv(comparison.runs)}
            raise ValueError(rescue(files, wanted=folder, error=error)) from error


def _written(comparison: Comparison, folder: Path, command: str) -> dict[str, Path]:
    sections: list[Table | Figure | Note] = []
    paths: dict[str, Path] = {}
    if comparison.interrupted:
        sections.append(
            Note(
                title="Interrupted",
                text="This comparison was stopped early; it shows what was done.",
            )
        )
    for task in comparison.sizes:
        if not comparison.of(task):
            continue
        sections.append(table(comparison, task))
        for name, figure in _figures(comparison, task):
            sections.append(figure)
            paths[name], _ = figure.files.save(folder / name)
    for task, model, reason in comparison.failures:
        sections.append(Note(title=f"{model} could not be trained on {task}", text=reason))
    report = Report(
        title="Sequence layers compared",
        command=command,
        summary=_summary(comparison),
        facts=comparison.environment.facts(),
        sections=sections,
    )
    paths["json"] = write_atomic(folder / "results.json", _json(comparison))
    paths["csv"] = write_atomic(folder / "results.csv", _csv(comparison.runs))
    paths["report"] = report.save(folder / "report.html")
    return paths


def _json(comparison: Comparison) -> str:
    return json.dumps(comparison.to_dict(), indent=2, allow_nan=False) + "\n"


def _figures(comparison: Comparison, task: str) -> list[tuple[str, Figure]]:
    found = [(f"{task}-curves", _curves(comparison, task))]
    if task in RECALLS:
        found.append((f"{task}-pairs", _recall_by_pairs(comparison, task)))
    if task == "capacity":
        found.append(("capacity-state", _recall_by_state(comparison, task)))
    return [(name, figure) for name, figure in found if figure is not None]


def _summary(comparison: Comparison) -> str:
    parts: list[str] = []
    for task, best in (("text", min), *((name, max) for name in RECALLS)):
        runs = [run for run in comparison.of(task) if run.value is not None and run.finished]
        if runs:
            top = best(runs, key=lambda run: run.value or 0.0)
            parts.append(f"Best on {task}: {top.model} with {top.value:.3f} {_MEASURES[task]}.")
    below = [r for r in comparison.of("text") if r.value is not None]
    if comparison.bigram is not None and below:
        count = sum((run.value or 0.0) < comparison.bigram for run in below)
        parts.append(
            f"{count} of {len(below)} are below the byte bigram's {comparison.bigram:.3f}."
        )
    return " ".join(parts)


def _csv(runs: Sequence[ModelRun]) -> str:
    pairs = sorted({count for run in runs for count in run.by_pairs})
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    plain = ["task", "model", "value", "parameters", "state_bytes", "grows", "tokens"]
    plain += ["tokens_per_second", "seconds", "finished"]
    writer.writerow([*plain, *(f"accuracy_{count}_pairs" for count in pairs)])
    for run in runs:
        writer.writerow(
            [getattr(run, name) for name in plain] + [run.by_pairs.get(c, "") for c in pairs]
        )
    return out.getvalue()
