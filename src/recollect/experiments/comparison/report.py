"""The report of a comparison: one HTML page, its figures, a CSV table and JSON."""

from __future__ import annotations

import csv
import io
import json
import math
import statistics
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recollect.experiments.comparison.results import Summary
from recollect.experiments.comparison.tasks import RECALL_TASKS
from recollect.report.figures import Series, line_figure
from recollect.report.files import backup_existing, save_to_temp_on_error, write_atomic
from recollect.report.lock import folder_lock
from recollect.report.page import Figure, Note, Report
from recollect.report.signals import defer_signals
from recollect.report.tables import CellValue, Column, Table

if TYPE_CHECKING:
    from recollect.experiments.comparison.comparison import Comparison

__all__ = [
    "comparison_caveats",
    "eval_size_note",
    "options_table",
    "save_report",
    "summarize",
    "table",
]

_TITLES = {
    "text": "Text: held-out bits per byte (lower is better)",
    "mqar": "Recall: accuracy on multi-query associative recall (higher is better)",
    "capacity": "Capacity: recall of more pairs than keys have channels (higher is better)",
}

COMPUTE_OPTIMAL_TOKENS_PER_PARAMETER = 20
"""Training tokens per parameter at which more of either helps equally (Hoffmann et al. 2022)."""


def table(comparison: Comparison, task: str) -> Table:
    """Return one row per model with mean and spread over seeds, and one for the byte bigram."""
    models = comparison.summaries(task)
    pairs = sorted({count for model in models for count in model.by_pairs})
    columns = [
        Column(name="model"),
        Column(name="bits per byte" if task == "text" else "accuracy", align="right"),
        # The largest numbers of pairs tell the models apart best.
        *(Column(name=f"{x} pairs", align="right", priority=50 - i) for i, x in enumerate(pairs)),
        Column(name="parameters", align="right", priority=100),
        Column(name="tokens", align="right", priority=103),
        Column(name="state per sequence", align="right", priority=1),
        Column(name="tokens/s", align="right", priority=101),
        Column(name="finished", align="right", priority=102),
    ]
    rows: list[list[CellValue]] = []
    for model in models:
        run = model.runs[0]
        finished = "yes" if run.finished else "interrupted"
        if comparison.seeds > 1:
            finished = f"{len(model.finished_runs)} of {comparison.seeds} seeds"
        means = {count: f"{mean:.3f}" for count, (mean, _, _) in model.by_pairs.items()}
        rows.append(
            [
                model.model,
                model.format(),
                *(means.get(count) for count in pairs),
                run.parameters,
                max(x.tokens for x in model.runs),
                f"{run.state_bytes / 1024:,.1f} KiB{', grows' if run.grows else ''}",
                f"{statistics.fmean(x.tokens_per_second for x in model.runs):,.0f}",
                finished,
            ]
        )
    styles: dict[int, str] = {}
    if task == "text" and comparison.bigram is not None:
        styles[len(rows)] = "dim"
        rows.append(["byte bigram", f"{comparison.bigram:.3f}", *[None] * (len(columns) - 2)])
    return Table(
        columns=columns,
        rows=rows,
        title=_TITLES[task],
        caption=_caption(comparison, task),
        styles=styles,
    )


def options_table(comparison: Comparison, task: str) -> Table | None:
    """Return the layer options in which the models differ, or ``None``; one row per layer."""
    layers = [
        (model.model, layer, options)
        for model in comparison.summaries(task)
        for layer, options in model.runs[0].options.items()
    ]
    names = dict.fromkeys(name for _, _, options in layers for name in options)
    differing = [
        name for name in names if any(x.get(name) != layers[0][2].get(name) for _, _, x in layers)
    ]
    if not differing or len({model for model, _, _ in layers}) == 1:
        return None
    columns = ["model", "layer", *differing]
    return Table(
        title="Layer options in which the models differ",
        columns=[Column(name=x, priority=i if i > 1 else 0) for i, x in enumerate(columns)],
        rows=[
            [model, layer, *(_format_option(options.get(name)) for name in differing)]
            for model, layer, options in layers
        ],
        caption="A dash is none. `--layer-options same` gives all models the same short "
        "convolution, output norm and output gate, no token shift and no value skip.",
    )


def _format_option(value: Any) -> str | None:
    """Return an option as a cell; of gates and ties only the names of the params they set."""
    if isinstance(value, Mapping):
        value = [*value]
    if isinstance(value, list):
        value = ", ".join(x["target"] if isinstance(x, Mapping) else x for x in value)
    return None if value in (None, "", "none") else str(value)


def eval_size_note(comparison: Comparison, task: str) -> str:
    """Return why a value of the table differs from the end of its curve, or ''."""
    quick, full = comparison.eval_sizes.get(task, (0, 0))
    if quick == full:
        return ""
    unit = "bytes of held-out text" if task == "text" else "examples of each number of pairs"
    spread = ", evenly spread" if task == "text" else ""
    example = next(filter(None, map(_curve_end_note, comparison.summaries(task))), "")
    note = (
        f"Values are measured once, after training, on {full:,} {unit}; points of the learning "
        f"curves on {quick:,} of them{spread}, so that a curve may end elsewhere{example}."
    )
    if not all(run.finished for run in comparison.of(task)):
        note += " A model that was interrupted has its curve's last point in the table."
    return note


def _curve_end_note(model: Summary) -> str:
    """Return the end of the curve and the value if they differ as printed, or ''."""
    runs = [run for run in model.finished_runs if run.curve]
    if model.mean is None or min(len(runs), len(model.finished_values)) < len(model.runs):
        return ""
    end, value = f"{statistics.fmean(x.curve[-1][1] for x in runs):.3f}", f"{model.mean:.3f}"
    name = f"{model.model}'s mean" if len(runs) > 1 else model.model
    return "" if end == value else f" ({name} ends at {end} there and at {value} here)"


def comparison_caveats(comparison: Comparison, task: str) -> str:
    """Return caveats of a text table (few tokens per parameter, missing convolutions), or ''."""
    models = comparison.summaries(task)
    if task != "text" or not models:
        return ""
    caveats: list[str] = []
    tokens_per_parameter = max(run.tokens / run.parameters for run in comparison.of(task))
    if 0 < tokens_per_parameter < COMPUTE_OPTIMAL_TOKENS_PER_PARAMETER:
        caveats.append(
            f"With {tokens_per_parameter:.2g} training tokens per parameter the table shows how "
            "fast models begin to learn, not which is best at scale."
        )
    without = [x.model for x in models if not _has_conv(x.runs[0].options.values())]
    if 0 < len(without) < len(models):
        verb = "has" if len(without) == 1 else "have"
        caveats.append(
            f"{', '.join(without)} {verb} no short convolution, which helps small models to begin."
        )
    return " ".join(caveats)


def _has_conv(layers: Iterable[Mapping[str, Any]]) -> bool:
    """Whether a layer of a model has a short convolution; true if its options are not stored."""
    conv_sizes = [options["conv_size"] for options in layers]
    return not conv_sizes or any(conv_sizes)


def _caption(comparison: Comparison, task: str) -> str:
    size, parts = comparison.sizes[task], list[str]()
    if task == "text" and comparison.bigram is not None:
        parts.append(
            "A smoothed byte bigram fitted to the same training text reaches "
            f"{comparison.bigram:.3f} bits per byte."
        )
    if task in RECALL_TASKS:
        recall = RECALL_TASKS[task]
        heads = f", in each of {size.heads} heads" if size.heads > 1 else ""
        parts.append(
            f"Keys and values have {size.head_dim or size.width // size.heads} channels{heads}. "
            f"Trained on {', '.join(map(str, recall.train_pairs))} pairs; larger numbers are only "
            f"evaluated. Guessing among the values is right {recall.chance:.1%} of the time. Every "
            "model has a short convolution, as in the benchmark."
        )
    parts += [
        f"{size.depth} layer{'s' if size.depth > 1 else ''} of width {size.width}, "
        f"{size.schedule.steps} steps of {size.schedule.batch} × {size.length} tokens, peak "
        f"learning rate {size.schedule.lr:g}, {_seeds(comparison)}. The feed-forward width is set "
        "so that parameters are equal. State is the memory that decoding keeps per sequence after "
        f"{size.length} tokens.",
        eval_size_note(comparison, task),
        comparison_caveats(comparison, task),
    ]
    if comparison.processes > 1:
        parts.append(f"Speeds are those of one of {comparison.processes} parallel processes.")
    if task == "text" and comparison.bigram is not None:
        source, sha256 = comparison.text["source"], comparison.text["sha256"][:16]
        parts.append(f"Text: {source}, sha256 {sha256}.")
    return " ".join(filter(None, parts))


def _seeds(comparison: Comparison) -> str:
    first, last = comparison.seed, comparison.seed + comparison.seeds - 1
    if first == last:
        return f"seed {first}"
    if last == first + 1:
        return f"seeds {first} and {last} (the mean, and both values)"
    return f"seeds {first} to {last} (the mean ± the standard deviation of {comparison.seeds})"


def _series(name: str, points: Mapping[int, tuple[float, float, float]], *, band: bool) -> Series:
    """Return a curve through means, with a band from minimum to maximum."""
    means, lows, highs = zip(*points.values(), strict=True)
    low, high = (lows, highs) if band else (None, None)
    return Series(name=name, x=[*points], y=means, low=low, high=high)


def _figures(comparison: Comparison, task: str) -> Iterable[tuple[str, Figure]]:
    models = comparison.summaries(task)
    if any(run.curve for run in comparison.of(task)):
        yield f"{task}-curves", _learning_curves(comparison, task)
    models = [model for model in models if model.by_pairs]
    if task not in RECALL_TASKS or not models:
        return
    by_pairs = line_figure(
        [
            _series(x.model, dict(sorted(x.by_pairs.items())), band=comparison.seeds > 1)
            for x in models
        ],
        x="key–value pairs to remember",
        y="recall accuracy",
        title="Recall by number of pairs",
        log_x=True,
        y_range=(0.0, 1.05),
    )
    yield (
        f"{task}-pairs",
        Figure(
            files=by_pairs,
            alt="Recall accuracy against the number of key-value pairs",
            caption="Accuracy after training, by the number of pairs in the context.",
        ),
    )
    if task != "capacity":
        return
    pairs, length = max(models[0].by_pairs), comparison.sizes[task].length
    by_state = line_figure(
        [
            Series(name=x.model, x=[x.runs[0].state_bytes / 1024], y=[x.by_pairs[pairs][0]])
            for x in models
        ],
        x=f"KiB of state per sequence after {length} tokens",
        y=f"accuracy at {pairs} pairs",
        title="What is kept, and what is recalled of it",
        log_x=True,
        y_range=(0.0, 1.05),
    )
    yield (
        "capacity-state",
        Figure(
            files=by_state,
            alt=f"Recall accuracy at {pairs} pairs against the bytes of a model's state",
            caption=f"Accuracy at {pairs} pairs against the bytes of state per sequence.",
        ),
    )


def _learning_curves(comparison: Comparison, task: str) -> Figure:
    measure = "held-out bits per byte" if task == "text" else "recall accuracy"
    if task in RECALL_TASKS:
        baselines = {"guessing": RECALL_TASKS[task].chance}
    else:
        baselines = {} if comparison.bigram is None else {"byte bigram": comparison.bigram}
    series: list[Series] = []
    for model in comparison.summaries(task):
        curves = [run.curve for run in model.finished_runs or model.runs if run.curve]
        points: dict[int, tuple[float, float, float]] = {}
        for (tokens, first), *others in zip(*curves, strict=False):
            values = [first, *(value for _, value in others)]
            points[tokens] = statistics.fmean(values), min(values), max(values)
        if points:
            series.append(_series(model.model, points, band=len(curves) > 1))
    files = line_figure(
        series,
        x="training tokens",
        y=measure,
        title="Learning curves" if task == "text" else "Recall learned over training",
        baselines=baselines,
        y_range=None if task == "text" else (0.0, 1.05),
    )
    caption = f"{measure.capitalize()} against training tokens."
    quick, full = comparison.eval_sizes.get(task, (0, 0))
    if quick != full:
        unit = "bytes" if task == "text" else "examples of each number of pairs"
        caption += f" Each point is measured on {quick:,} of the {full:,} {unit} of the table."
    names = ", ".join(x.name for x in series)
    alt = f"{measure} against training tokens for {names}"
    return Figure(files=files, alt=alt, caption=caption)


def summarize(comparison: Comparison) -> str:
    """Return a sentence per task: the best model, its margin, and whether seeds differ by more."""
    sentences = [_sentence(comparison, task) for task in comparison.sizes]
    return " ".join(filter(None, sentences)) or "No model was trained to its end."


def _sentence(comparison: Comparison, task: str) -> str:
    summaries, seeds = comparison.summaries(task), comparison.seeds
    models = [
        x
        for x in summaries
        if len(x.finished_runs) == len(x.finished_values) == seeds and math.isfinite(_mean(x))
    ]
    if not models:
        return ""
    best, *others = sorted(models, key=_mean, reverse=task in RECALL_TASKS)
    measure = "accuracy" if task in RECALL_TASKS else "held-out bits per byte"
    verb = "is best with" if others else "reaches"
    text = f"On {task}, {best.model} {verb} {best.format()} {measure}"
    if others:
        margin = abs(_mean(best) - _mean(others[0]))
        spread = max(max(x.finished_values) - min(x.finished_values) for x in (best, others[0]))
        difference = "less" if margin > spread else "as much or more"
        note = f"the seeds differ by {difference}" if seeds > 1 else "one seed each"
        text += f", {margin:.3f} ahead of {others[0].model} ({note})"
    if task == "text" and comparison.bigram is not None:
        worse = sum(_mean(x) >= comparison.bigram for x in models)
        text += f"; no better than a byte bigram: {worse} of {len(models)} models"
    names = [x.model for x in summaries if x not in models]
    failures = [name for failed_task, name, _ in comparison.failures if failed_task == task]
    names += [name.partition(", seed ")[0] for name in failures]
    if unfinished := dict.fromkeys(names):
        text += f"; not finished: {', '.join(unfinished)}"
    return f"{text}."


def _mean(model: Summary) -> float:
    return math.nan if model.mean is None else model.mean


def save_report(comparison: Comparison, folder: Path, command: str) -> dict[str, Path]:
    """Write the files of `Comparison.save`."""
    with folder_lock(folder), defer_signals():
        try:
            return _write_files(comparison, folder, command)
        except OSError as error:
            files = {"results.json": _json(comparison), "results.csv": _csv(comparison)}
            raise ValueError(save_to_temp_on_error(files, target=folder, error=error)) from error


def _write_files(comparison: Comparison, folder: Path, command: str) -> dict[str, Path]:
    sections: list[Table | Figure | Note] = []
    paths: dict[str, Path] = {}
    if comparison.interrupted:
        text = "This comparison was stopped early; it contains the results up to then."
        sections.append(Note(title="Interrupted", text=text))
    for task in comparison.sizes:
        if not comparison.of(task):
            continue
        sections.append(table(comparison, task))
        if (options := options_table(comparison, task)) is not None:
            sections.append(options)
        for name, figure in _figures(comparison, task):
            sections.append(figure)
            paths[name], _ = figure.files.save(folder / name)
    sections += [
        Note(title=f"{model} could not be trained on {task}", text=reason)
        for task, model, reason in comparison.failures
    ]
    report = Report(
        kind="comparison",
        title="Sequence layers compared",
        command=command,
        summary=summarize(comparison),
        facts=comparison.environment.facts(),
        sections=sections,
    )
    if (earlier := backup_existing(folder / "results.json", _json(comparison))) is not None:
        paths["earlier"] = earlier
    paths["json"] = write_atomic(folder / "results.json", _json(comparison))
    paths["csv"] = write_atomic(folder / "results.csv", _csv(comparison))
    paths["report"] = report.save(folder / "report.html")
    return paths


def _json(comparison: Comparison) -> str:
    return json.dumps(comparison.to_dict(), indent=2, allow_nan=False) + "\n"


def _csv(comparison: Comparison) -> str:
    runs = comparison.runs
    pairs = sorted({count for run in runs for count in run.by_pairs})
    columns = ["task", "model", "value", "parameters", "state_bytes", "grows", "tokens"]
    columns += ["tokens_per_second", "seconds", "finished"]
    if any(run.seed is not None for run in runs):
        columns.insert(2, "seed")
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([*columns, *(f"accuracy_{count}_pairs" for count in pairs)])
    for run in runs:
        accuracies = [run.by_pairs.get(count, "") for count in pairs]
        writer.writerow([*(getattr(run, name) for name in columns), *accuracies])
    return out.getvalue()
