"""`recollect reproduce`: figures and tables of the papers."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from recollect.cli.console import (
    INTERRUPTED,
    check_device,
    check_words,
    check_writable,
    console_of_page,
    said,
)
from recollect.cli.progress import ReproduceDisplay
from recollect.report.terminal import Column, TerminalTable

if TYPE_CHECKING:
    from recollect.experiments.framework.experiment import Experiment, Planned
    from recollect.experiments.framework.run import Run

__all__ = ["reproduce"]

SCALES = ("smoke", "small", "paper")


def reproduce(
    name: Annotated[str, typer.Argument(help="An experiment; see --list.")] = "",
    scale: Annotated[
        str, typer.Option(help="smoke (seconds), small (minutes), or paper: prints its plan.")
    ] = "small",
    seeds: Annotated[int | None, typer.Option(help="How many; the scale's own if omitted.")] = None,
    jobs: Annotated[int, typer.Option(help="Processes, one thread each.")] = 1,
    list_all: Annotated[bool, typer.Option("--list", help="Name the experiments.")] = False,
    every: Annotated[bool, typer.Option("--all", help="All experiments.")] = False,
    out: Annotated[Path, typer.Option(help="Folder of the runs.")] = Path("runs"),
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    launch: Annotated[bool, typer.Option("--launch", help="Run the paper's scale.")] = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="Measure anew.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Draw a figure or table of the papers from this library, and judge its claims."""
    if not list_all and every == bool(name):
        raise ValueError("name one experiment, or give --all; --list names them")
    check_words("--scale", [scale], SCALES)
    check_device(device)
    from recollect.experiments.framework.price import plan
    from recollect.experiments.gallery import save_gallery
    from recollect.experiments.registry import EXPERIMENTS, PLANNED
    from recollect.experiments.reproduce import chosen
    from recollect.experiments.reproduce import reproduce as run_one

    console = console_of_page(stderr=as_json)
    rows = list(EXPERIMENTS.values())
    if list_all:
        if as_json:
            known = [{"name": row.name, "title": row.title, "source": row.source} for row in rows]
            known += [{"name": row.name, "planned": True, "source": row.source} for row in PLANNED]
            typer.echo(json.dumps(known, indent=2, ensure_ascii=False))
        else:
            _list(console, rows, PLANNED)
        return
    wanted = rows if every else [chosen(name)]
    if scale == "paper" and not launch:
        plans = [
            plan(row, "paper", seeds=seeds, jobs=jobs, device=device, out=str(out))
            for row in wanted
        ]
        if as_json:
            typer.echo(json.dumps([priced.to_dict() for priced in plans], indent=2))
        else:
            typer.echo("\n\n".join(map(str, plans)))
        return
    check_writable(out)
    runs = []
    with ReproduceDisplay(console) as display:
        for row in wanted:
            run = run_one(
                row,
                scale=scale,  # type: ignore[arg-type]
                seeds=seeds,
                jobs=jobs,
                out=out,
                device=device,
                fresh=fresh,
                viewer=display,
            )
            runs.append(run)
            if not as_json:
                _show(console, run)
                console.print(f"report: {run.folder / 'report.html'}", soft_wrap=True)
            if not run.complete:
                break
    gallery = save_gallery(out)
    console.print(f"gallery: {gallery}", soft_wrap=True)
    if as_json:
        typer.echo(json.dumps([run.to_dict() for run in runs], indent=2, allow_nan=False))
    if not all(run.complete for run in runs):
        command = shlex.join(["recollect", *sys.argv[1:]])
        said(f"interrupted: what was measured is kept, and the same command goes on: {command}")
        raise typer.Exit(INTERRUPTED)


def _show(console: Console, run: Run) -> None:
    """Each claim beside what was measured."""
    table = TerminalTable(
        title=f"{run.experiment.name} ({run.experiment.source}), {run.results.scale} scale",
        columns=(
            Column(name="the paper says", least=24),
            Column(name="verdict"),
            Column(name="measured", least=24),
        ),
        rows=[(claim.text, verdict.status, verdict.because) for claim, verdict in run.verdicts],
    )
    table.print(console)
    for claim, _ in run.verdicts:
        if claim.changed:
            note = f"the rule of “{claim.name}” was changed after a run: {claim.changed}"
            console.print(note, soft_wrap=True, highlight=False)


def _list(console: Console, experiments: Sequence[Experiment], planned: Sequence[Planned]) -> None:
    """Every experiment, and those that cannot be run yet."""
    rows = [
        (row.name, row.title, row.source, "\n".join(claim.name for claim in row.claims))
        for row in experiments
    ]
    rows += [(x.name, x.title, x.source, f"planned, needs {x.needs}") for x in planned]
    table = TerminalTable(
        columns=(
            Column(name="name"),
            Column(name="what", least=24),
            Column(name="source", least=14, rank=1),
            Column(name="claims", least=20, rank=2),
        ),
        rows=rows,
        styles=dict.fromkeys(range(len(experiments), len(rows)), "dim"),
    )
    table.print(console)
