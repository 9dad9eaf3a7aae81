"""Report of an evaluation: metrics with their standard errors, and the values of the papers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from os import PathLike
from pathlib import Path

from recollect.experiments.framework.paper_values import PaperComparison
from recollect.lm.evaluation.results import Evaluation
from recollect.report.environment import Environment
from recollect.report.page import Note, Report
from recollect.report.tables import CellValue, Table

__all__ = ["save_evaluation_page"]


def save_evaluation_page(
    result: Evaluation,
    papers: Sequence[PaperComparison],
    folder: str | PathLike[str],
    *,
    command: str = "",
) -> Path:
    """Write ``report.html`` into a folder."""
    names = Environment.__dataclass_fields__
    environment = Environment(**{name: result.environment[name] for name in names})
    others = {name: str(value) for name, value in result.environment.items() if name not in names}
    sections: list[Table | Note] = [_metrics_table(result, papers)]
    if result.notes:
        sections.append(Note(title="Notes", text="\n".join(result.notes)))
    for task, reason in result.failures.items():
        sections.append(Note(title=f"{task} was not measured", text=reason))
    sections.append(_settings_table(result))
    report = Report(
        kind="evaluation",
        title=f"Evaluation of {result.model}",
        command=command,
        summary=_summary(result, papers),
        facts=environment.facts() | others,
        sections=sections,
    )
    return report.save(Path(folder) / "report.html")


def _metrics_table(result: Evaluation, papers: Sequence[PaperComparison]) -> Table:
    rows: list[list[CellValue]] = []
    for task in (*result.tasks, *result.groups):
        for metric in task.metrics:
            values = [str(x) for x in papers if (x.task, x.metric) == (task.task, metric)]
            better = "less" if metric in task.lower_is_better else "more"
            row = [task.task, metric, task.format(metric), better, task.documents]
            rows.append([*row, "; ".join(values)] if papers else row)
    columns = ["task", "metric", "measured", "better", "documents"]
    return Table(
        title="Measured",
        columns=[*columns, "the papers report"] if papers else columns,
        rows=rows,
        caption="± is the standard error over the documents.",
    )


def _settings_table(result: Evaluation) -> Table:
    names = list(dict.fromkeys(name for task in result.tasks for name in task.settings))
    rows = []
    for task in result.tasks:
        settings = [_format_setting(task.settings.get(name)) for name in names]
        rows.append([task.task, task.version, *settings, task.batch, round(task.seconds, 1)])
    columns = ["task", "version", *names, "batch", "seconds"]
    return Table(title="Settings", columns=columns, rows=rows)


def _format_setting(value: object) -> CellValue:
    """Return a setting as a cell. A digest is cut, since the results file contains all of it."""
    if isinstance(value, str) and re.fullmatch(r"[0-9a-f]{64}", value):
        return f"{value[:12]}…"
    return value if value is None or isinstance(value, int | float) else str(value)


def _summary(result: Evaluation, papers: Sequence[PaperComparison]) -> str:
    """Return a sentence about the documents, and one about the values of the papers."""
    documents = sum(task.documents for task in result.tasks)
    empty = [task.task for task in result.tasks if not task.finite]
    details = f" ({', '.join(empty)} gave no finite number)" if empty else ""
    if result.failures:
        details += f", and {', '.join(result.failures)} failed"
    tasks = f"{len(result.tasks)} task{'' if len(result.tasks) == 1 else 's'}"
    summary = f"{result.model} was evaluated on {documents:,} documents of {tasks}{details}."
    if not papers:
        return f"{summary} None of the stored papers reports these tasks."
    is_better: dict[tuple[str, str], bool] = {}
    for paper in papers:
        sign = -1 if paper.metric in result[paper.task].lower_is_better else 1
        is_better[paper.task, paper.metric] = any(
            sign * paper.value > sign * value for _, value in paper.rows
        )
    count = sum(is_better.values())
    return (
        f"{summary} {count} of {len(is_better)} numbers that papers report too "
        f"{'is' if count == 1 else 'are'} better than at least one model of the papers."
    )
