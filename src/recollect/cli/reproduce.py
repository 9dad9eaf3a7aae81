"""`recollect reproduce`: figures and tables of the papers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import rich.box
import rich.console
import rich.progress
import rich.table
import typer

from recollect.cli.console import INTERRUPTED, WIDE, check_device, check_writable

__all__ = ["reproduce"]


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
    from recollect.experiments.framework.price import plan
    from recollect.experiments.gallery import save_gallery
    from recollect.experiments.registry import EXPERIMENTS, PLANNED
    from recollect.experiments.reproduce import chosen
    from recollect.experiments.reproduce import reproduce as run_one
    from recollect.experiments.viewer import Bar, listing, show_run

    console = rich.console.Console(stderr=as_json)
    if not console.is_terminal:
        console = rich.console.Console(stderr=as_json, width=WIDE)
    rows = list(EXPERIMENTS.values())
    if list_all:
        if as_json:
            known = [{"name": row.name, "title": row.title, "source": row.source} for row in rows]
            known += [{"name": row.name, "planned": True, "source": row.source} for row in PLANNED]
            typer.echo(json.dumps(known, indent=2, ensure_ascii=False))
        else:
            listing(console, rows, PLANNED)
        return
    if every == bool(name):
        raise ValueError("name one experiment, or give --all; --list names them")
    wanted = rows if every else [chosen(name)]
    _known_scale(scale)
    check_device(device)
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
    with Bar(console) as bar:
        for row in wanted:
            run = run_one(
                row,
                scale=scale,  # type: ignore[arg-type]
                seeds=seeds,
                jobs=jobs,
                out=out,
                device=device,
                fresh=fresh,
                viewer=bar,
            )
            runs.append(run)
            if not as_json:
                show_run(console, run)
                console.print(f"report: {run.folder / 'report.html'}", soft_wrap=True)
            if not run.complete:
                break
    gallery = save_gallery(out)
    console.print(f"gallery: {gallery}", soft_wrap=True)
    if as_json:
        typer.echo(json.dumps([run.to_dict() for run in runs], indent=2, allow_nan=False))
    if not all(run.complete for run in runs):
        raise typer.Exit(INTERRUPTED)


def _known_scale(scale: str) -> None:
    from recollect.experiments.framework.experiment import SCALES

    if scale not in SCALES:
        raise ValueError(f"--scale must be one of {', '.join(SCALES)}, not {scale!r}")
