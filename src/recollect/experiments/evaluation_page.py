"""The report of an evaluation: numbers with their errors, and what the papers report beside."""

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
    """Write ``report.html`` into a folder.

    Args:
        result: what was measured.
        papers: the papers' columns beside it, as `beside` finds them.
        folder: it is made where it is missing.
        command: the command line to print on the page.

    Raises:
        OSError: the folder cannot be written.
    """
    names = Environment.__dataclass_fields__
    about = Environment(**{name: result.environment[name] for name in names})
    more = {name: str(value) for name, value in result.environment.items() if name not in names}
    sections: list[Table | Note] = [_measured(result, papers)]
    if result.notes:
        sections.append(Note(title="What a reader must know", text="\n".join(result.notes)))
    for task, reason in result.failures.items():
        sections.append(Note(title=f"{task} was not measured", text=reason))
    sections.append(_how(result))
    report = Report(
        kind="evaluation",
        title=f"Evaluation of {result.model}",
        command=command,
        summary=_found(result, papers),
        facts=about.facts() | more,
        sections=sections,
    )
    return report.save(Path(folder) / "report.html")


def _measured(result: Evaluation, papers: Sequence[PaperComparison]) -> Table:
    rows: list[list[CellValue]] = []
    for one in (*result.tasks, *result.groups):
        for metric in one.metrics:
            here = [x for x in papers if (x.task, x.metric) == (one.task, metric)]
            better = "less" if metric in one.lower_is_better else "more"
            row: list[CellValue] = [one.task, metric, one.format(metric), better, one.documents]
            rows.append([*row, "; ".join(map(str, here))] if papers else row)
    columns = ["task", "metric", "measured", "better", "documents"]
    return Table(
        title="Measured",
        columns=[*columns, "the papers report"] if papers else columns,
        rows=rows,
        caption="± is the standard error over the documents.",
    )


def _how(result: Evaluation) -> Table:
    """Under which settings each task was measured."""
    names = list(dict.fromkeys(name for one in result.tasks for name in one.settings))
    return Table(
        title="How",
        columns=["task", "version", *names, "batch", "seconds"],
        rows=[
            [
                one.task,
                one.version,
                *(_plain(one.settings.get(name)) for name in names),
                one.batch,
                round(one.seconds, 1),
            ]
            for one in result.tasks
        ],
    )


def _plain(value: object) -> CellValue:
    """A setting as a cell; of a digest the beginning, as the results have it whole."""
    if isinstance(value, str) and re.fullmatch(r"[0-9a-f]{64}", value):
        return f"{value[:12]}…"
    return value if value is None or isinstance(value, int | float) else str(value)


def _found(result: Evaluation, papers: Sequence[PaperComparison]) -> str:
    """Two sentences: what was asked, and how it stands to the papers."""
    documents = sum(one.documents for one in result.tasks)
    empty = [one.task for one in result.tasks if not one.finite]
    missing = f" ({', '.join(empty)} gave no finite number)" if empty else ""
    if result.failures:
        missing += f", and {', '.join(result.failures)} failed"
    count = f"{len(result.tasks)} task{'' if len(result.tasks) == 1 else 's'}"
    first = f"{result.model} was asked {documents:,} documents of {count}{missing}."
    if not papers:
        return f"{first} No paper that is kept here reports these tasks."
    below = {
        (one.task, one.metric): any(
            one.value > value if _more(result, one) else one.value < value for _, value in one.rows
        )
        for one in papers
    }
    count = sum(below.values())
    verb = "is" if count == 1 else "are"
    return (
        f"{first} Of {len(below)} numbers that papers report too, {count} {verb} better than one "
        "at least of the papers' rows."
    )


def _more(result: Evaluation, one: PaperComparison) -> bool:
    return one.metric not in result[one.task].lower_is_better
