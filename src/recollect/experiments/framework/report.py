"""The report of a run: results as JSON and CSV, the figure and an HTML page."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from recollect.experiments.framework.experiment import Experiment
from recollect.experiments.framework.published import published
from recollect.experiments.framework.records import NotMeasured, Results
from recollect.experiments.framework.run import Run
from recollect.report.figures import RenderedFigure
from recollect.report.files import write_atomic
from recollect.report.page import Figure, Note, Report
from recollect.report.tables import Table

__all__ = ["save_run", "summary_table", "verdict_line"]


def verdict_line(run: Run) -> str:
    """Return all verdicts in one line."""
    return "; ".join(f"{claim.name}: {verdict.status}" for claim, verdict in run.verdicts)


def save_run(run: Run) -> dict[str, Path]:
    """Write the run's files into its folder, each atomically.

    Returns:
        Paths by kind: ``"json"``, ``"csv"``, ``"png"``, ``"svg"`` and ``"report"``.
    """
    folder, experiment, results = run.folder, run.experiment, run.results
    paths: dict[str, Path] = {}
    data = json.dumps(run.to_dict(), indent=1, allow_nan=False, ensure_ascii=False)
    paths["json"] = write_atomic(folder / "results.json", data + "\n")
    paths["csv"] = write_atomic(folder / "results.csv", _csv(results))
    figure: RenderedFigure | None = None
    try:
        figure = experiment.figure(results)
    except NotMeasured:
        if run.complete:
            raise
    if figure is not None:
        paths["png"], paths["svg"] = figure.save(folder / "figure")
    paths["report"] = _page(run, figure).save(folder / "report.html")
    return paths


def _page(run: Run, figure: RenderedFigure | None) -> Report:
    experiment, results = run.experiment, run.results
    sections: list[Table | Figure | Note] = []
    if not run.complete:
        sections.append(
            Note(
                title="Interrupted",
                text="This run was stopped early. It has the records so far, and the same command "
                "measures the others.",
            )
        )
    sections.append(_verdicts(run))
    if figure is not None:
        sections.append(
            Figure(
                files=figure,
                alt=f"{experiment.title}: {verdict_line(run)}",
                caption=f"{experiment.title}. Lines are means over seeds and bands run from the "
                "smallest to the largest."
                if experiment.is_stochastic
                else experiment.title,
            )
        )
    sections.append(Note(title="Protocol", text=experiment.protocol))
    if experiment.notes:
        sections.append(Note(title="Other configurations", text=experiment.notes))
    sections.append(summary_table(results))
    sections += paper_tables(experiment)
    sections.append(
        Note(title="Configuration", text=json.dumps(dict(results.config), indent=2), code=True)
    )
    record = results.records[-1]
    facts = {
        "scale": results.scale,
        "seeds": ", ".join(map(str, sorted({r.seed for r in results.records}))),
        "time": f"{results.seconds:,.0f} s, summed over the cells"
        + (f", of which {run.jobs} were measured at a time" if run.jobs > 1 else ""),
        "device": record.device,
        "measured at commit": ", ".join(dict.fromkeys(r.commit for r in results.records)),
        "measured on": record.date,
        "verdict rules": _rules_note(experiment, results),
        "software": run.environment.facts()["software"],
    }
    return Report(
        kind="reproduction",
        title=f"{experiment.name}: {experiment.title}",
        command=run.command,
        summary=f"{experiment.source}. {verdict_line(run)}.",
        facts=facts,
        sections=sections,
    )


def _rules_note(experiment: Experiment, results: Results) -> str:
    """Compare the rules with those at the time of the measurement."""
    now = experiment.rules_digest
    then = {record.rules for record in results.records}
    if then == {now}:
        return "unchanged since the measurement"
    if any(digest.partition("-")[0] != now.partition("-")[0] for digest in then):
        return "measured before the present form of their digest, which cannot be compared"
    return "changed since a part of the measurement: measure again with --overwrite"


def _verdicts(run: Run) -> Table:
    rows: list[list[str]] = [
        [claim.name, verdict.status, verdict.evidence] for claim, verdict in run.verdicts
    ]
    words = "\n".join(
        f"{claim.name}: the paper says: {claim.text} Rule: {claim.rule.text}"
        + (
            f" This rule was changed after a run: {claim.rule_history}"
            if claim.rule_history
            else ""
        )
        for claim, _ in run.verdicts
    )
    return Table(title="Claims", columns=["claim", "verdict", "measured"], rows=rows, caption=words)


def paper_tables(experiment: Experiment) -> list[Table]:
    """Return the published tables of an experiment."""
    tables = []
    for name in experiment.tables:
        table = published(name)
        grouped = any(row.group for row in table.rows)
        tables.append(
            Table(
                title=f"Published: {table.table}",
                columns=["model", *(["group"] if grouped else []), *table.columns],
                rows=[
                    [row.model, *([row.group] if grouped else [])]
                    + [row.values[column] for column in table.columns]
                    for row in table.rows
                ],
                caption=" ".join(filter(None, (f"{table.source}; {table.units}.", table.note))),
            )
        )
    return tables


def summary_table(results: Results) -> Table:
    """Return numbers by cell: mean and range over seeds."""
    measures = _scalar_names(results)
    axes = list(dict.fromkeys(name for cell in results.cells() for name in cell))
    rows: list[list[str | int | float | None]] = []
    for cell in results.cells():
        runs = Results(records=tuple(r for r in results.records if r.cell == cell))
        row: list[str | int | float | None] = [cell.get(name) for name in axes]
        for measure in measures:
            try:
                row.append(_format_range(runs.values(measure)))
            except NotMeasured:
                row.append(None)
        rows.append(row)
    seeds = len({record.seed for record in results.records})
    return Table(
        title="Measured",
        columns=[*axes, *measures],
        rows=rows,
        caption=f"Mean over {seeds} seeds, and smallest … largest." if seeds > 1 else "",
    )


def _format_range(values: Sequence[float]) -> str:
    finite = [x for x in values if math.isfinite(x)]
    if not finite:
        return "diverged"
    mean, low, high = sum(finite) / len(finite), min(finite), max(finite)
    diverged = f", {len(values) - len(finite)} diverged" if len(finite) < len(values) else ""
    return (f"{mean:.4g}" if low == high else f"{mean:.4g} ({low:.4g} … {high:.4g})") + diverged


def _scalar_names(results: Results) -> list[str]:
    """Return the names of measured numbers, without curves."""
    items = (item for record in results for item in record.values.items())
    return list(dict.fromkeys(name for name, value in items if not isinstance(value, Sequence)))


def _csv(results: Results) -> str:
    """Return one line per cell and seed; curves are in the JSON file."""
    axes = list(dict.fromkeys(name for cell in results.cells() for name in cell))
    measures = _scalar_names(results)
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([*axes, "seed", *measures, "seconds"])
    for record in results.records:
        row: list[Any] = [record.cell.get(name, "") for name in axes]
        values = [record.values.get(name, "") for name in measures]
        writer.writerow([*row, record.seed, *values, record.seconds])
    return out.getvalue()
