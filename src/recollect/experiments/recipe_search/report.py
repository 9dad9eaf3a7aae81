"""The report of a search: a table, Pareto fronts, and the best recipe as TOML."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import TYPE_CHECKING

from recollect.experiments.comparison.tasks import RECALL_TASKS
from recollect.experiments.recipe_search.halving import rung_steps
from recollect.report.figures import Panel, RenderedFigure, Series, panel_figure
from recollect.report.files import save_to_temp_on_error, write_atomic
from recollect.report.lock import folder_lock
from recollect.report.page import Figure, Note, Report
from recollect.report.signals import defer_signals
from recollect.report.tables import CellValue, Column, Table

if TYPE_CHECKING:
    from recollect.experiments.recipe_search.result import Search

__all__ = ["RESULTS_NAME", "figure", "save_report", "summarize", "table", "to_json"]

RESULTS_NAME = "results.json"
"""File of a search in its folder, from which it is continued."""

_COSTS = {
    "state": "state, KiB per sequence",
    "time": "estimated time / Gated DeltaNet",
}


def measure_name(task: str) -> str:
    """Return the measure of a task."""
    return "accuracy" if task in RECALL_TASKS else "held-out bits per byte"


def table(search: Search, rows: int | None = 20) -> Table:
    """Return one row for each recipe that was trained with all steps, the best first.

    Args:
        search: the search.
        rows: largest number of rows; all if ``None``. Start and baselines are always shown.
    """
    tasks = search.tasks
    fronts = {task: {name for _, _, name in search.front(task)} for task in tasks}
    columns = [
        Column(name="recipe"),
        *(Column(name=f"{task}: {measure_name(task)}", align="right") for task in tasks),
        Column(name="state, KiB", align="right"),
        Column(name="time", align="right", priority=1),
        Column(name="tokens/s", align="right", priority=3),
        Column(name="on the front of", priority=2),
        Column(name="changes of the start"),
    ]
    body: list[list[CellValue]] = []
    for place, trial in enumerate(search.complete):
        candidate = search.candidate(trial.candidate)
        if rows is not None and place >= rows and candidate.draws:
            continue
        runs = {task: trial.run(task) for task in tasks}
        present = [run for run in runs.values() if run is not None]
        values = [None if run is None or run.value is None else run.value for run in runs.values()]
        note = "baseline" if candidate.is_baseline else search.changes(candidate) or "the start"
        body.append(
            [
                candidate.name,
                *(None if value is None else f"{value:.3f}" for value in values),
                f"{max(run.state_bytes for run in present) / 1024:,.1f}"
                + (", grows" if any(run.grows for run in present) else ""),
                f"{candidate.relative_time:.2f}",
                f"{min(run.tokens_per_second for run in present):,.0f}",
                ", ".join(task for task in tasks if candidate.name in fronts[task]),
                note,
            ]
        )
    return Table(
        columns=columns,
        rows=body,
        title=f"Recipes near {search.start.name}",
        caption=_caption(search),
    )


def _caption(search: Search) -> str:
    num_rungs = search.num_rungs
    counts = [sum(trial.rung == rung for trial in search.trials) for rung in range(num_rungs)]
    num_drawn = sum(candidate.draws > 0 for candidate in search.candidates)
    failed = sum(bool(trial.failure) for trial in search.trials)
    minutes = sum(trial.seconds for trial in search.trials) / 60
    sentences = [f"{num_drawn} recipes were drawn; {failed} trainings failed."]
    for task, size in search.settings["sizes"].items():
        schedule = size["schedule"]
        trained = ", ".join(
            f"{count} for {rung_steps(schedule['steps'], rung, num_rungs):,} steps"
            for rung, count in enumerate(counts)
        )
        keys = size["key_dim"] or size["head_dim"] or size["width"] // size["heads"]
        sentences.append(
            f"On {task} these trainings ran, start and baselines included: {trained}, of "
            f"{schedule['batch']} × {size['length']} tokens. Models have {size['depth']} layers of "
            f"width {size['width']}, keys of {keys} channels, and about equal numbers of "
            f"parameters (seed {search.settings['seed']})."
        )
    sentences.append(
        f"All trainings took {minutes:.1f} minutes. State is that of a decoder after a sequence. "
        "Time is estimated by `rc.cost`, as a multiple of Gated DeltaNet's. A recipe is on a front "
        "if no other has at most its state and at least its value."
    )
    return " ".join(sentences)


def figure(search: Search) -> RenderedFigure:
    """Return the values of all completely trained recipes by state and time, with the fronts."""
    panels: list[Panel] = []
    for task in search.tasks:
        for cost, label in _COSTS.items():
            unit = 1024 if cost == "state" else 1
            front = search.front(task, cost)
            series = [_series("Pareto front", front, unit, style=0)]
            fixed = [x for x in search.candidates if not x.draws]
            for style, candidate in enumerate(fixed, 2):
                points = [x for x in search.points(task, cost) if x[2] == candidate.name]
                if points:
                    series.append(
                        _series(candidate.name, points, unit, style=style, points_only=True)
                    )
            names = {x.name for x in fixed}
            others = [x for x in search.points(task, cost) if x[2] not in names]
            if others:
                series.append(_series("drawn recipes", others, unit, style=1, points_only=True))
            panels.append(
                Panel(
                    y=f"{task}: {measure_name(task)}",
                    series=series,
                    x=label,
                    log_x=cost == "state",
                )
            )
    title = f"Recipes near {search.start.name}"
    return panel_figure(panels, x="", title=title, height=2.9)


def _series(
    name: str,
    points: list[tuple[float, float, str]],
    unit: int,
    *,
    style: int,
    points_only: bool = False,
) -> Series:
    return Series(
        name=name,
        x=[round(cost / unit, 3 if unit == 1 else 1) for cost, _, _ in points],
        y=[value for _, value, _ in points],
        style=style,
        points_only=points_only,
    )


def summarize(search: Search) -> str:
    """Return a sentence for each task on the best recipe and the other given models."""
    if not search.has_best:
        return "Neither the start nor a drawn recipe was trained with all steps."
    best = search.best
    trials = {trial.candidate: trial for trial in search.complete}
    sentences = [f"The best recipe is {best.name} ({search.changes(best) or 'the start'})."]
    for task in search.tasks:
        values = {}
        for candidate in (best, *(x for x in search.candidates if not x.draws)):
            run = trials[candidate.name].run(task) if candidate.name in trials else None
            if run is not None and run.value is not None:
                size = f"{run.state_bytes / 1024:,.1f} KiB"
                values[candidate.name] = f"{candidate.name} {run.value:.3f} ({size})"
        sentences.append(
            f"{measure_name(task).capitalize()} on {task}: {', '.join(values.values())}."
        )
    return " ".join(sentences)


def save_report(search: Search, folder: Path, command: str) -> dict[str, Path]:
    """Write the files of `Search.save`."""
    with folder_lock(folder), defer_signals():
        try:
            return _write_files(search, folder, command)
        except OSError as error:
            files = {RESULTS_NAME: to_json(search)}
            raise ValueError(save_to_temp_on_error(files, target=folder, error=error)) from error


def _write_files(search: Search, folder: Path, command: str) -> dict[str, Path]:
    paths = {"json": write_atomic(folder / RESULTS_NAME, to_json(search))}
    paths["csv"] = write_atomic(folder / "results.csv", _csv(search))
    sections: list[Table | Figure | Note] = []
    if search.interrupted:
        text = "This search was stopped early. The same command continues it."
        sections.append(Note(title="Interrupted", text=text))
    if search.complete:
        drawing = figure(search)
        paths["front"], _ = drawing.save(folder / "front")
        sections += [
            table(search),
            Figure(
                files=drawing,
                alt=f"values by state and time of {len(search.complete)} recipes",
                caption="Recipes with all steps, and those that no other one dominates.",
            ),
        ]
    if search.has_best:
        text = search.best_toml()
        paths["best"] = write_atomic(folder / "best.toml", text)
        sections.append(Note(title=f"{search.best.name}, as TOML", text=text, code=True))
    report = Report(
        kind="search",
        title="Recipes searched",
        command=command,
        summary=summarize(search),
        facts=search.environment.facts(),
        sections=sections,
    )
    paths["report"] = report.save(folder / "report.html")
    return paths


def to_json(search: Search) -> str:
    """Return the content of ``results.json``."""
    return json.dumps(search.to_dict(), indent=1, allow_nan=False) + "\n"


def _csv(search: Search) -> str:
    """Return one line per trial and task."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    columns = ["task", "recipe", "rung", "value", "parameters", "state_bytes", "grows", "tokens"]
    columns += ["tokens_per_second", "relative_time", "changes", "failure"]
    writer.writerow(columns)
    for trial in search.trials:
        candidate = search.candidate(trial.candidate)
        tail = [candidate.relative_time, search.changes(candidate), trial.failure]
        for run in trial.runs:
            numbers = [getattr(run, name) for name in columns[3:9]]
            writer.writerow([run.task, run.model, trial.rung, *numbers, *tail])
        if trial.failure:
            empty = [""] * 6
            writer.writerow(["", trial.candidate, trial.rung, *empty, *tail])
    return out.getvalue()
