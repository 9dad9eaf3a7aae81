"""`recollect train`: a language model from a plan file."""

from __future__ import annotations

import contextlib
import json
import math
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from recollect.cli.console import INTERRUPTED, check_exists, console_of_page, said
from recollect.cli.progress import TrainDisplay
from recollect.messages import renamed_arguments
from recollect.report.ranks import is_first, world_size

if TYPE_CHECKING:
    from recollect.lm.training.plan import TrainPlan
    from recollect.lm.training.progress import Header, Trained

__all__ = ["train"]


def train(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="A TOML file; see the manual.")],
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the last checkpoint of the run.")
    ] = False,
    out: Annotated[str | None, typer.Option(help="Folder, in place of [run] out.")] = None,
    steps: Annotated[int | None, typer.Option(help="Steps, in place of [optimizer].")] = None,
    device: Annotated[
        str | None, typer.Option(help="cpu, cuda, cuda:1, mps, in place of [run] device.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Train a language model as a file says; a run that was stopped goes on with --resume.

    Under torchrun or accelerate launch the processes share the run, and the first one speaks.
    """
    if world_size() == 1:  # several processes refuse a plan together
        check_exists(config)
    from recollect.lm.sharding.processes import join, together
    from recollect.lm.training.interrupts import Interrupted
    from recollect.lm.training.train import train as run

    join()
    words = {} if device is None else {"[run] device": "--device"}
    with together():
        plan = _plan(config, out=out, steps=steps, device=device, words=words)
    console, page = console_of_page(stderr=True), console_of_page(stderr=as_json)
    console.quiet = page.quiet = not is_first()

    told: list[str] = []
    headers: list[Header] = []

    def begins(header: Header) -> None:
        headers.append(header)
        display.head(header, page)

    def say(sentence: str) -> None:
        told.append(sentence)
        with contextlib.suppress(OSError):  # nobody listens, and the run goes on
            console.print(sentence, soft_wrap=True, markup=False, highlight=False)

    try:
        with TrainDisplay(console, plan.steps) as display, renamed_arguments(words):
            result = run(
                plan,
                resume=resume,
                watch=display.show,
                say=say,
                begins=begins,
            )
    except Interrupted as error:
        say(str(error))
        raise typer.Exit(INTERRUPTED) from None
    except KeyboardInterrupt:
        if not is_first():
            raise typer.Exit(INTERRUPTED) from None
        say("interrupted; --resume goes on from the last checkpoint, if there is one")
        raise typer.Exit(INTERRUPTED) from None
    if not is_first():
        return
    report = _report(result, plan, headers)
    facts = {
        "model": str(result.folder),
        "steps": result.steps,
        "tokens": result.tokens,
        "seconds": result.seconds,
        "loss": result.loss if math.isfinite(result.loss or 0.0) else None,
        "heldout_loss": result.heldout_loss,
        "heldout_bits_per_byte": result.heldout,
        "skipped_lines": result.skipped,
        "notes": list(result.notes),
    }
    if as_json:
        typer.echo(json.dumps(facts, indent=2))
        return
    for note in result.notes:
        if note not in told:
            say(note)
    lost = f"; {result.skipped:,} lines were left out" if result.skipped else ""
    typer.echo(f"{result.steps:,} steps, {result.tokens:,} tokens in {result.seconds:,.0f} s{lost}")
    losses = {"": result.loss, "held-out ": result.heldout_loss}
    if told := [f"{of}loss {x:.3f}" for of, x in losses.items() if x is not None]:
        typer.echo(f"nats per token: {', '.join(told)}")
    if result.heldout is not None:
        typer.echo(f"bits per byte: held-out {result.heldout:.3f}")
    typer.echo(f"model: {result.folder}")
    if report is not None:
        typer.echo(f"report: {report}")


def _report(result: Trained, plan: TrainPlan, headers: list[Header]) -> Path | None:
    """The run's page; the model stands, so a full disk is said and is no failure."""
    from recollect.experiments.training_page import save_run_page

    command = shlex.join(["recollect", *sys.argv[1:]])
    header = headers[-1] if headers else None
    try:
        return save_run_page(result, plan, header=header, command=command)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        said(f"the report could not be written ({where}{error.strerror}); the model is saved")
        return None


def _plan(
    config: Path,
    *,
    out: str | None,
    steps: int | None,
    device: str | None,
    words: dict[str, str],
) -> TrainPlan:
    """The file's plan, with what the options say in its place."""
    from recollect.lm.training.plan import load_plan

    plan = load_plan(config)
    if out is not None:
        plan = replace(plan, run=replace(plan.run, out=out))
    if steps is not None:
        with renamed_arguments({"[optimizer] steps": "--steps"}):
            plan = replace(plan, optimizer=replace(plan.optimizer, steps=steps, tokens=None))
    if device is not None:
        with renamed_arguments(words):
            plan = replace(plan, run=replace(plan.run, device=device))
    return plan
