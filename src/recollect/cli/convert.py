"""`recollect convert`: change the layout of a saved model, or replace attention of a decoder."""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from recollect.cli.console import exit_interrupted, make_console, print_json
from recollect.cli.options import (
    DeviceOption,
    JsonOption,
    check_device,
    check_exists,
    comma_list,
    load_model_spec,
)
from recollect.cli.progress import TrainDisplay
from recollect.messages import short_repr

__all__ = ["convert"]


def convert(
    ctx: typer.Context,
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="Folder of a saved model; with --attention-to also that of a run, or name of a "
            "model on the hub.",
        ),
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder of all results.")],
    to: Annotated[
        str | None,
        typer.Option(metavar="TYPE", help="Published layout to convert a model of recollect to."),
    ] = None,
    attention_to: Annotated[
        str | None, typer.Option(metavar="RECIPE", help="Name of the zoo, or .json or .toml file.")
    ] = None,
    text: Annotated[
        list[str], typer.Option(help="File, folder or pattern of the text; repeatable.")
    ] = [],  # noqa: B006
    heldout: Annotated[
        list[str],
        typer.Option(help="Text to measure on; repeatable. [default: a tenth of the rows]"),
    ] = [],  # noqa: B006
    layers: Annotated[
        str, typer.Option(help="Layers to replace, such as 0,2,-1. [default: all]")
    ] = "",
    keep_attention: Annotated[
        int, typer.Option(min=0, help="Number of them that stay attention, chosen by the loss.")
    ] = 0,
    steps: Annotated[
        str, typer.Option(help="Optimizer steps: matched layers, matched logits, fine-tuning.")
    ] = "100,100,100",
    batch: Annotated[int, typer.Option(min=1, help="Rows of a step.")] = 8,
    context: Annotated[int, typer.Option(min=2, help="Tokens of a row.")] = 512,
    save_every: Annotated[int, typer.Option(min=0, help="Steps between checkpoints.")] = 100,
    seed: Annotated[int, typer.Option(min=0, help="Seed of new weights and rows.")] = 0,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue a conversion that was stopped.")
    ] = False,
    device: DeviceOption = "cpu",
    as_json: JsonOption = False,
) -> None:
    """Change the layout of a saved model, or replace attention of a decoder by a recipe.

    Without --attention-to, a published model becomes a model of recollect, and a model of recollect
    becomes a published one (--to). With it, the decoder is trained on --text until the lost loss is
    recovered.
    """
    if attention_to is None:
        _check_no_training_options(ctx)
        _convert_layout(Path(model), out, to, as_json=as_json)
        return
    if to is not None:
        raise ValueError("--to and --attention-to exclude each other: convert in two steps")
    if not text:
        raise ValueError("--attention-to trains on a text: add --text FILE")
    from recollect.lm.distillation.plan import STAGES

    spec = load_model_spec(attention_to)
    counts = _integers(steps, "--steps")
    if len(counts) != len(STAGES) or min(counts) < 0:
        raise ValueError(
            f"--steps takes three numbers of at least 0, such as 100,100,100, not {steps!r}"
        )
    if Path(model).is_absolute() or model[:1] == ".":
        check_exists(Path(model))
    check_device(device)
    from recollect.lm.distillation.distill import RECORD, distill
    from recollect.lm.distillation.plan import DistillPlan

    data: dict[str, Any] = {"train": text, "context": context}
    plan = DistillPlan(
        teacher=model,
        recipe=spec if isinstance(spec, str) else spec[1:],
        out=str(out),
        data=data | ({"heldout": heldout} if heldout else {}),
        layers=tuple(_integers(layers, "--layers")) or None,
        keep_attention=keep_attention,
        steps=dict(zip(STAGES, counts, strict=True)),
        optimizer={"batch": batch},
        run={"device": device, "save_every": save_every, "seed": seed},
    )
    console, summary_console = make_console(stderr=True), make_console(stderr=as_json)
    display = TrainDisplay(console, max(counts), summary_console=summary_console)
    try:
        with display:
            result = distill(plan, resume=resume, observer=display)
    except KeyboardInterrupt:
        message = "interrupted before the first step was recorded; the same command starts again"
        if (out / RECORD).exists():
            message = "interrupted; --resume continues from the last checkpoint"
        display.on_message(message)
        exit_interrupted()
    if as_json:
        print_json(
            {
                "model": str(result.folder),
                "layers": list(result.layers),
                "damage": {str(index): x for index, x in result.damage.items()},
                "recovered": None if math.isnan(result.recovered) else result.recovered,
                "stages": [asdict(stage) for stage in result.stages],
            }
        )
        return
    typer.echo(str(result))
    typer.echo(f"model: {result.folder}")


def _check_no_training_options(ctx: typer.Context) -> None:
    """Refuse options that a change of the layout does not read."""
    names = [
        option.opts[0]
        for option in ctx.command.params
        if option.name not in ("model", "out", "to", "attention_to", "as_json", "imports")
        and getattr(ctx.get_parameter_source(option.name or ""), "name", "") == "COMMANDLINE"
    ]
    if names:
        raise ValueError(
            f"{', '.join(names)} can be set only to replace attention: add --attention-to RECIPE"
        )


def _convert_layout(model: Path, out: Path, to: str | None, *, as_json: bool) -> None:
    """Convert a saved model between a published layout and ours."""
    from recollect.lm.conversion.convert import convert as convert_layout

    folder = convert_layout(model, out, to=to)
    if as_json:
        print_json({"model": str(folder)})
        return
    typer.echo(f"model: {folder}")


def _integers(text: str, option: str) -> list[int]:
    """Return the integers of a list that is separated by commas."""
    try:
        return [int(item) for item in comma_list(text)]
    except ValueError:
        raise ValueError(f"{option} takes integers such as 0,2, not {short_repr(text)}") from None
