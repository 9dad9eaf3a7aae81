"""`recollect train`: a language model from the file of a run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from recollect.cli.console import (
    command_line,
    exit_interrupted,
    make_console,
    print_json,
    print_stderr,
)
from recollect.cli.options import ConfigArgument, JsonOption, check_exists
from recollect.cli.progress import TrainDisplay
from recollect.messages import renamed_arguments
from recollect.report.ranks import is_main_process, world_size

if TYPE_CHECKING:
    from recollect.lm.training.plan import TrainPlan
    from recollect.lm.training.progress import Trained

__all__ = ["train"]


def train(
    config: ConfigArgument,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue from the last checkpoint.")
    ] = False,
    out: Annotated[
        str | None, typer.Option(help="Folder of the run, in place of [run] out.")
    ] = None,
    steps: Annotated[
        int | None, typer.Option(help="Optimizer steps, in place of [optimizer] steps.")
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="Device, such as cuda:1, in place of [run] device.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Train a language model as a file describes; --resume continues a run that was stopped.

    Under torchrun or accelerate launch, the processes share the run and the first one prints.
    """
    if world_size() == 1:  # several processes refuse a plan together
        check_exists(config)
    from recollect.lm.distributed.processes import fail_together, init_distributed
    from recollect.lm.training.interrupts import TrainingInterrupted
    from recollect.lm.training.train import train as run

    init_distributed()
    option_names = {} if device is None else {"[run] device": "--device"}
    with fail_together():
        plan = _override(config, out=out, steps=steps, device=device)
    console, summary_console = make_console(stderr=True), make_console(stderr=as_json)
    display = TrainDisplay(console, plan.steps, summary_console=summary_console)
    try:
        with display, renamed_arguments(option_names):
            result = run(plan, resume=resume, observer=display)
    except TrainingInterrupted as error:
        display.on_message(str(error))
        exit_interrupted()
    except KeyboardInterrupt:
        if is_main_process():
            display.on_message(
                "interrupted; --resume continues from the last checkpoint, if there is one"
            )
        exit_interrupted()
    if not is_main_process():
        return
    report = _save_report(result, plan, display.summary)
    if as_json:
        print_json(_to_dict(result))
        return
    skipped = f"; {result.skipped:,} lines were left out" if result.skipped else ""
    typer.echo(
        f"{result.steps:,} steps, {result.tokens:,} tokens in {result.seconds:,.0f} s{skipped}"
    )
    losses = {"loss": result.loss, "held-out loss": result.heldout_loss}
    if parts := [f"{name} {loss:.3f}" for name, loss in losses.items() if loss is not None]:
        typer.echo(f"nats per token: {', '.join(parts)}")
    if result.heldout is not None:
        typer.echo(f"bits per byte: held-out {result.heldout:.3f}")
    typer.echo(f"model: {result.folder}")
    if report is not None:
        typer.echo(f"report: {report}")


def _to_dict(result: Trained) -> dict[str, Any]:
    return {
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


def _save_report(result: Trained, plan: TrainPlan, summary: Mapping[str, str]) -> Path | None:
    """Save the report of a run; a full disk is a message only, because the model is saved."""
    from recollect.experiments.training_page import save_run_page

    try:
        return save_run_page(result, plan, summary=summary, command=command_line())
    except OSError as error:
        path = f"{error.filename}: " if error.filename else ""
        print_stderr(
            f"the report could not be written ({path}{error.strerror}); the model is saved"
        )
        return None


def _override(config: Path, *, out: str | None, steps: int | None, device: str | None) -> TrainPlan:
    """Return the plan of a file, with the options in place of its keys."""
    from recollect.lm.training.plan import load_plan

    plan = load_plan(config)
    if out is not None:
        plan = replace(plan, run=replace(plan.run, out=out))
    if steps is not None:
        with renamed_arguments({"[optimizer] steps": "--steps"}):
            plan = replace(plan, optimizer=replace(plan.optimizer, steps=steps, tokens=None))
    if device is not None:
        with renamed_arguments({"[run] device": "--device"}):
            plan = replace(plan, run=replace(plan.run, device=device))
    return plan
