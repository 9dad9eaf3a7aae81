"""The report of a comparison: one HTML page, its figures, a CSV table and JSON."""

from __future__ import annotations

import csv
import io
import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

from recollect.experiments.comparison.found import found
from recollect.experiments.comparison.results import ModelRun, Outcomes, Summary
from recollect.experiments.comparison.tasks import RECALLS
from recollect.report.figures import Series, line_figure
from recollect.report.files import backup_existing, save_to_temp_on_error, write_atomic
from recollect.report.lock import folder_lock
from recollect.report.page import Figure, Note, Report
from recollect.report.signals import defer_signals
from recollect.report.tables import Table

__all__ = ["measured_on", "options_table", "reach", "save_comparison", "table"]

_TITLES = {
    "text": "Text: held-out bits per byte (lower is better)",
    "mqar": "Recall: accuracy on multi-query associative recall (higher is better)",
    "capacity": "Capacity: recall of more pairs than keys have channels (higher is better)",
}
_MEASURES = {"text": "held-out bits per byte", **dict.fromkeys(RECALLS, "recall accuracy")}


def _size(run: ModelRun) -> str:
    kib = run.state_bytes / 1024
    return f"{kib:,.1f} KiB{', grows' if run.grows else ''}"


def table(comparison: Outcomes, task: str) -> Table:
    """Return one row per model of a task, with the mean and the spread of several seeds.

    The last row of the task text is the byte bigram.
    """
    models = comparison.summaries(task)
    pairs = sorted({count for one in models for count in one.by_pairs})
    value = "bits per byte" if task == "text" else "accuracy"
    columns = ["model", value, *(f"{count} pairs" for count in pairs)]
    columns += ["parameters", "tokens", "state per sequence", "tokens/s", "finished"]
    rows: list[list[str | int | float | None]] = []
    for one in models:
        run, found = one.runs[0], one.by_pairs
        row: list[str | int | float | None] = [one.model, one.told()]
        row += [f"{found[c][0]:.3f}" if c in found else None for c in pairs]
        row += [f"{run.parameters:,}", f"{max(r.tokens for r in one.runs):,}", _size(run)]
        ended = "yes" if run.finished else "interrupted"
        if comparison.seeds > 1:
            ended = f"{len(one.finished)} of {comparison.seeds} seeds"
        row += [f"{one.mean('tokens_per_second'):,.0f}", ended]
        rows.append(row)
    if task == "text" and comparison.bigram is not None:
        rows.append(["byte bigram", f"{comparison.bigram:.3f}", *[None] * (len(columns) - 2)])
    return Table(
        columns=columns, rows=rows, title=_TITLES[task], caption=_caption(comparison, task)
    )


def options_table(comparison: Outcomes, task: str) -> Table | None:
    """Return the layer options in which the models differ, one row per layer; ``None`` if none do.

    Args:
        comparison: complete or interrupted.
        task: name of the task.
    """
    layers = [
        (one.model, layer, options)
        for one in comparison.summaries(task)
        for layer, options in one.runs[0].options.items()
    ]
    names = list(dict.fromkeys(name for _, _, options in layers for name in options))
    differing = [
        name for name in names if any(x.get(name) != layers[0][2].get(name) for _, _, x in layers)
    ]
    if not differing or len({model for model, _, _ in layers}) == 1:
        return None
    return Table(
        title="Layer options in which the models differ",
        columns=["model", "layer", *differing],
        rows=[
            [model, layer, *(_option(options.get(name)) for name in differing)]
            for model, layer, options in layers
        ],
        caption="A dash is none. `--layer-options same` gives all models the same short "
        "convolution, output norm and output gate, no token shift and no skip of the values.",
    )


def _option(value: Any) -> str | None:
    """Return an option as a cell: of gates and ties only the names of the numbers they set."""
    if isinstance(value, Mapping):
        value = [*value]
    if isinstance(value, list):
        value = ", ".join(one["target"] if isinstance(one, Mapping) else one for one in value)
    return None if value in (None, "", "none") else str(value)


def measured_on(comparison: Outcomes, task: str) -> str:
    """Why a value of the table is not where its curve ends; nothing where they are the same."""
    glance, whole = comparison.measured.get(task, (0, 0))
    if glance == whole:
        return ""
    ends = next((f" ({said})" for one in comparison.summaries(task) if (said := _ends(one))), "")
    what = "bytes of held-out text" if task == "text" else "examples of each number of pairs"
    spread = ", evenly spread" if task == "text" else ""
    said = f"Values are measured once, after training, on {whole:,} {what}; points of the learning "
    said += f"curves on {glance:,} of them{spread}, so that a curve may end elsewhere{ends}."
    if not all(run.finished for run in comparison.of(task)):
        said += " A model that was interrupted has its curve's last point in the table."
    return said


ENOUGH = 20
"""Training tokens per parameter, from which on more of both are worth as much (Hoffmann et al.
2022, section 3): a model of fewer has hardly begun."""


def reach(comparison: Outcomes, task: str) -> str:
    """How far a table of text may be read; nothing where there is nothing to say.

    Args:
        comparison: whole or interrupted.
        task: of it.
    """
    models = comparison.summaries(task)
    if task != "text" or not models:
        return ""
    said: list[str] = []
    share = max(run.tokens / run.parameters for one in models for run in one.runs)
    if 0 < share < ENOUGH:
        said.append(
            f"With {share:.2g} training tokens per parameter the table tells how fast models begin "
            "to learn, not which is best at scale."
        )
    options = {one.model: one.runs[0].options.values() for one in models}
    without = [model for model, layers in options.items() if not _has_conv(layers)]
    if len(without) not in (0, len(models)):
        verb = "has" if len(without) == 1 else "have"
        said.append(
            f"{', '.join(without)} {verb} no short convolution, which helps small models to begin."
        )
    return " ".join(said)


def _has_conv(layers: Iterable[Mapping[str, Any]]) -> bool:
    """Whether a model has a short convolution in some layer; true if its options are not stored."""
    convolutions = [options["conv_size"] for options in layers]
    return not convolutions or any(convolutions)


def _ends(one: Summary) -> str:
    """A model whose curve ends elsewhere than its value, as both are printed; or nothing."""
    ended = [run for run in one.finished if run.curve]
    if one.value is None or len(ended) < len(one.runs) or len(one.values) < len(one.runs):
        return ""
    there, here = f"{statistics.fmean(run.curve[-1][1] for run in ended):.3f}", f"{one.value:.3f}"
    of = f"{one.model}'s mean" if len(ended) > 1 else one.model
    return "" if there == here else f"{of} ends at {there} there and at {here} here"


def _caption(comparison: Outcomes, task: str) -> str:
    size = comparison.sizes[task]
    shape = (
        f"{size.depth} layer{'s' if size.depth > 1 else ''} of width {size.width}, "
        f"{size.schedule.steps} steps of "
        f"{size.schedule.batch} × {size.length} tokens, peak learning rate {size.schedule.lr:g}, "
        f"{_seeds(comparison)}. The feed-forward width is set so that parameters are equal. "
        "State "
        f"is what decoding keeps per sequence after {size.length} tokens."
    )
    if measured_on(comparison, task):
        shape += f" {measured_on(comparison, task)}"
    if reach(comparison, task):
        shape += f" {reach(comparison, task)}"
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
        each = f", in each of {size.heads} heads" if size.heads > 1 else ""
        return (
            f"Keys and values have {channels} channels{each}. "
            f"Trained on {', '.join(map(str, recall.trained))} pairs; more are asked without "
            f"training. Guessing among the values is right {recall.chance:.1%} of the time. Every "
            f"model has a short convolution, as in the benchmark. {shape}"
        )
    return shape


def _seeds(comparison: Outcomes) -> str:
    first, last = comparison.seed, comparison.seed + comparison.seeds - 1
    if first == last:
        return f"seed {first}"
    if last == first + 1:
        return f"seeds {first} and {last} (the mean, and both values)"
    return f"seeds {first} to {last} (the mean ± the standard deviation of {comparison.seeds})"


def _curve(one: Summary) -> Series:
    """The mean over the seeds, with a band from the least to the greatest."""
    curves = [run.curve for run in one.finished or one.runs if run.curve]
    points = list(zip(*curves, strict=False))
    several = len(curves) > 1
    return Series(
        name=one.model,
        x=[point[0][0] for point in points],
        y=[statistics.fmean(value for _, value in point) for point in points],
        low=[min(value for _, value in point) for point in points] if several else None,
        high=[max(value for _, value in point) for point in points] if several else None,
    )


def _curves(comparison: Outcomes, task: str) -> Figure | None:
    models = [one for one in comparison.summaries(task) if any(run.curve for run in one.runs)]
    if not models:
        return None
    series = [_curve(one) for one in models]
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


def _of_points(comparison: Outcomes, task: str) -> str:
    """On what a curve is measured, where that is not what the table is."""
    glance, whole = comparison.measured.get(task, (0, 0))
    if glance == whole:
        return ""
    what = "bytes" if task == "text" else "examples of each number of pairs"
    return f" Each point is measured on {glance:,} of the {whole:,} {what} of the table."


def _recall_by_state(comparison: Outcomes, task: str) -> Figure | None:
    """What a model of a task keeps and how much of it it recalls, at the most pairs that it has."""
    models = [one for one in comparison.summaries(task) if one.by_pairs]
    if not models:
        return None
    most = max(models[0].by_pairs)
    size = comparison.sizes[task]
    files = line_figure(
        [
            Series(name=one.model, x=[one.runs[0].state_bytes / 1024], y=[one.by_pairs[most][0]])
            for one in models
        ],
        x=f"KiB of state per sequence after {size.length} tokens",
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


def _recall_by_pairs(comparison: Outcomes, task: str) -> Figure | None:
    models = [one for one in comparison.summaries(task) if one.by_pairs]
    if not models:
        return None
    several = comparison.seeds > 1
    lines = [(one.model, sorted(one.by_pairs.items())) for one in models]
    files = line_figure(
        [
            Series(
                name=name,
                x=[count for count, _ in found],
                y=[mean for _, (mean, _, _) in found],
                low=[least for _, (_, least, _) in found] if several else None,
                high=[greatest for _, (_, _, greatest) in found] if several else None,
            )
            for name, found in lines
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
    comparison: Outcomes, out: str | PathLike[str], *, command: str = ""
) -> dict[str, Path]:
    """Write ``report.html``, ``results.json``, ``results.csv`` and the figures into a folder.

    Args:
        comparison: what `compare` returned.
        out: the folder; it is made where it is missing.
        command: the command line to print on the page.

    Returns:
        Paths by what they are. Every file is written whole or not at all; an earlier comparison's
        ``results.json`` is kept under another name, ``"earlier"``.

    Raises:
        ValueError: a run that is under way owns the folder; or it cannot be written, and the
            results are kept in a temporary one, which is named.

    Examples:
        >>> sizes = rc.experiments.Sizes(
        ...     width=8, depth=1, heads=1, length=16,
        ...     schedule=rc.experiments.Schedule(steps=1, batch=1, evaluations=1),
        ... )
        >>> found = rc.compare(["linear_attention"], "mqar", sizes=sizes)
        >>> paths = rc.experiments.save_comparison(found, "runs/one")
        >>> {"report.html", "results.json"} <= {path.name for path in paths.values()}
        True
    """
    folder = Path(out)
    with folder_lock(folder), defer_signals():
        try:
            return _written(comparison, folder, command)
        except OSError as error:
            files = {"results.json": _json(comparison), "results.csv": _csv(comparison.runs)}
            raise ValueError(save_to_temp_on_error(files, target=folder, error=error)) from error


def _written(comparison: Outcomes, folder: Path, command: str) -> dict[str, Path]:
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
        if (options := options_table(comparison, task)) is not None:
            sections.append(options)
        for name, figure in _figures(comparison, task):
            sections.append(figure)
            paths[name], _ = figure.files.save(folder / name)
    for task, model, reason in comparison.failures:
        sections.append(Note(title=f"{model} could not be trained on {task}", text=reason))
    report = Report(
        kind="comparison",
        title="Sequence layers compared",
        command=command,
        summary=found(comparison),
        facts=comparison.environment.facts(),
        sections=sections,
    )
    earlier = backup_existing(folder / "results.json", _json(comparison))
    if earlier is not None:
        paths["earlier"] = earlier
    paths["json"] = write_atomic(folder / "results.json", _json(comparison))
    paths["csv"] = write_atomic(folder / "results.csv", _csv(comparison.runs))
    paths["report"] = report.save(folder / "report.html")
    return paths


def _json(comparison: Outcomes) -> str:
    return json.dumps(comparison.to_dict(), indent=2, allow_nan=False) + "\n"


def _figures(comparison: Outcomes, task: str) -> list[tuple[str, Figure]]:
    found = [(f"{task}-curves", _curves(comparison, task))]
    if task in RECALLS:
        found.append((f"{task}-pairs", _recall_by_pairs(comparison, task)))
    if task == "capacity":
        found.append(("capacity-state", _recall_by_state(comparison, task)))
    return [(name, figure) for name, figure in found if figure is not None]


def _csv(runs: Sequence[ModelRun]) -> str:
    pairs = sorted({count for run in runs for count in run.by_pairs})
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    plain = ["task", "model", "value", "parameters", "state_bytes", "grows", "tokens"]
    plain += ["tokens_per_second", "seconds", "finished"]
    if any(run.seed is not None for run in runs):
        plain.insert(2, "seed")
    writer.writerow([*plain, *(f"accuracy_{count}_pairs" for count in pairs)])
    for run in runs:
        writer.writerow(
            [getattr(run, name) for name in plain] + [run.by_pairs.get(c, "") for c in pairs]
        )
    return out.getvalue()
