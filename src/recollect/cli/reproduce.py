"""`recollect reproduce`: figures and tables of the papers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console

from recollect.cli.console import (
    command_line,
    exit_interrupted,
    make_console,
    print_json,
    print_line,
)
from recollect.cli.options import DeviceOption, JsonOption, OutOption, check_device, check_writable
from recollect.cli.progress import ReproduceDisplay
from recollect.report.tables import Column, Table

if TYPE_CHECKING:
    from recollect.experiments.framework.experiment import Experiment
    from recollect.experiments.framework.run import Run

__all__ = ["Scale", "reproduce"]

Scale = Literal["smoke", "small", "paper"]


def reproduce(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="Name of an experiment; --list prints them.")
    ] = "",
    scale: Annotated[
        Scale, typer.Option(help="Scale: smoke takes seconds, small minutes; paper needs --launch.")
    ] = "small",
    seeds: Annotated[
        int | None, typer.Option(help="Number of seeds. [default: the scale's]")
    ] = None,
    jobs: Annotated[int, typer.Option(help="Number of processes, with one thread each.")] = 1,
    list_all: Annotated[bool, typer.Option("--list", help="List the experiments.")] = False,
    run_all: Annotated[bool, typer.Option("--all", help="Run all experiments.")] = False,
    out: OutOption = Path("runs"),
    device: DeviceOption = "cpu",
    launch: Annotated[
        bool, typer.Option("--launch", help="Run the scale paper, which may take days.")
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Measure again what earlier runs saved.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Reproduce a figure or table of the papers, and test its claims."""
    if not list_all and run_all == bool(name):
        raise ValueError("name one experiment, or give --all; --list names them")
    check_device(device)
    from recollect.experiments.framework.run import format_command
    from recollect.experiments.gallery import save_gallery
    from recollect.experiments.registry import EXPERIMENTS
    from recollect.experiments.reproduce import get_experiment
    from recollect.experiments.reproduce import reproduce as run_one

    console = make_console(stderr=as_json)
    experiments = list(EXPERIMENTS.values())
    if list_all:
        if as_json:
            print_json(
                [{"name": x.name, "title": x.title, "source": x.source} for x in experiments]
            )
        else:
            _list(console, experiments)
        return
    if not run_all:
        experiments = [get_experiment(name)]
    if scale == "paper" and not launch:
        sizes = []
        for experiment in experiments:
            config = experiment.config(scale, seeds=seeds)
            command = format_command(
                experiment.name, scale=scale, seeds=seeds, jobs=jobs, device=device, out=str(out)
            )
            cells = len(experiment.cells(config))
            sizes.append((experiment.name, cells, config["seeds"], command))
        if as_json:
            keys = ("experiment", "cells", "seeds", "command")
            print_json([dict(zip(keys, size, strict=True)) for size in sizes])
        else:
            for name, cells, count, command in sizes:
                typer.echo(f"{name}: {cells} cells, {count} seeds each. To run it: {command}")
        return
    check_writable(out)
    runs = []
    with ReproduceDisplay(console) as display:
        for experiment in experiments:
            run = run_one(
                experiment,
                scale=scale,
                seeds=seeds,
                jobs=jobs,
                out=out,
                device=device,
                overwrite=overwrite,
                progress=display,
            )
            runs.append(run)
            if not as_json:
                _show(console, run)
                print_line(console, f"report: {run.folder / 'report.html'}")
            if not run.complete:
                break
    print_line(console, f"gallery: {save_gallery(out)}")
    if as_json:
        print_json([run.to_dict() for run in runs])
    if not all(run.complete for run in runs):
        exit_interrupted(
            "interrupted: all measurements are saved, and the same command continues: "
            f"{command_line()}"
        )


def _show(console: Console, run: Run) -> None:
    """Print each claim of the paper, with its verdict and the measurement."""
    Table(
        title=f"{run.experiment.name} ({run.experiment.source}), {run.results.scale} scale",
        columns=(
            Column(name="the paper says", min_width=24),
            Column(name="verdict"),
            Column(name="measured", min_width=24),
        ),
        rows=[(claim.text, verdict.status, verdict.evidence) for claim, verdict in run.verdicts],
    ).print(console)
    for claim, _ in run.verdicts:
        if claim.rule_history:
            print_line(
                console, f"the rule of “{claim.name}” was changed after a run: {claim.rule_history}"
            )


def _list(console: Console, experiments: Sequence[Experiment]) -> None:
    rows = [
        (row.name, row.title, row.source, "\n".join(claim.name for claim in row.claims))
        for row in experiments
    ]
    Table(
        columns=(
            Column(name="name"),
            Column(name="what", min_width=24),
            Column(name="source", min_width=14, priority=1),
            Column(name="claims", min_width=20, priority=2),
        ),
        rows=rows,
    ).print(console)
