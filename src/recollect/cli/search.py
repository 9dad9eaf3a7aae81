"""`recollect search`: recipes near a start, trained and compared."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from recollect.cli.console import (
    command_line,
    exit_interrupted,
    make_console,
    print_json,
    print_line,
)
from recollect.cli.options import (
    AnyDeviceOption,
    JsonOption,
    KeyDimOption,
    OutOption,
    TextsOption,
    check_models,
    check_writable,
    comma_list,
    load_model_spec,
)
from recollect.cli.progress import SearchDisplay
from recollect.messages import renamed_arguments

if TYPE_CHECKING:
    from recollect.experiments.recipe_search.result import Search

__all__ = ["parse_duration", "search"]

_OPTIONS = (
    *("width", "depth", "heads", "key-dim", "max-state", "max-time", "rungs", "trials"),
    *("steps", "batch", "length", "lr", "seed", "device"),
)
"""Options whose names stand in messages about models and their training."""

_UNITS = {"s": 1, "m": 60, "h": 3600}


def parse_duration(text: str) -> float:
    """Return the seconds of a duration such as ``90s``, ``60m`` or ``1.5h``."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smh])", text.strip())
    if match is None or float(match[1]) == 0:
        raise ValueError(f"--budget must be a time such as 90s, 60m or 1.5h, not {text!r}")
    return float(match[1]) * _UNITS[match[2]]


@renamed_arguments({name.replace("-", "_"): f"--{name}" for name in _OPTIONS})
def search(
    task: Annotated[
        str, typer.Option(help="Tasks, separated by commas: text, mqar or capacity.")
    ] = "mqar",
    start: Annotated[
        str,
        typer.Option(help="Name of the zoo or recipe file (.json, .toml) near which to search."),
    ] = "linear_attention",
    budget: Annotated[
        str | None,
        typer.Option(help="Time of all trainings, such as 90s, 60m or 1.5h. [default: 60m]"),
    ] = None,
    trials: Annotated[
        int | None, typer.Option(help="Number of drawn recipes, in place of --budget.")
    ] = None,
    baseline: Annotated[
        str, typer.Option(help="Models to measure for comparison, separated by commas, as --start.")
    ] = "",
    rungs: Annotated[
        int, typer.Option(help="Number of lengths of training, each three times the one before.")
    ] = 3,
    max_state: Annotated[
        float, typer.Option(help="Largest state of a drawn recipe, as a multiple of the start's.")
    ] = 4.0,
    max_time: Annotated[
        float,
        typer.Option(help="Largest estimated time of a recipe, as a multiple of the start's."),
    ] = 10.0,
    text: TextsOption = None,
    steps: Annotated[
        int | None, typer.Option(help="Optimizer steps of the longest training.")
    ] = None,
    lr: Annotated[float | None, typer.Option(help="Peak learning rate.")] = None,
    width: Annotated[int | None, typer.Option(help="Width of the models.")] = None,
    depth: Annotated[int | None, typer.Option(help="Number of layers.")] = None,
    heads: Annotated[int | None, typer.Option(help="Number of heads per layer.")] = None,
    length: Annotated[int | None, typer.Option(help="Tokens per example.")] = None,
    batch: Annotated[int | None, typer.Option(help="Examples per step.")] = None,
    key_dim: KeyDimOption = None,
    seed: Annotated[int, typer.Option(help="Seed of draws, weights, examples and order.")] = 0,
    device: AnyDeviceOption = None,
    engine: Annotated[str, typer.Option(help="Engine of all layers.")] = "auto",
    out: OutOption = Path("runs/search"),
    as_json: JsonOption = False,
) -> None:
    """Search recipes near a start, by training them at equal parameters and tokens.

    A drawn recipe has one or two other choices than the start. The same command continues a search
    that was stopped.
    """
    tasks, baselines = comma_list(task), comma_list(baseline)
    if budget is not None and trials is not None:
        raise ValueError("--budget and --trials exclude each other: give one")
    seconds = None if trials is not None else parse_duration(budget or "60m")
    check_models([start, *baselines])
    import recollect.experiments as experiments
    from recollect.experiments.comparison.results import DEFAULTS
    from recollect.experiments.comparison.tasks import TASKS

    if not tasks or not set(tasks) <= set(TASKS):
        raise ValueError(f"--task takes {', '.join(TASKS)}, separated by commas, not {task!r}")
    sizes = {
        name: DEFAULTS[name].replace(
            steps=steps,
            lr=lr,
            width=width,
            depth=depth,
            heads=heads,
            length=length,
            batch=batch,
            key_dim=key_dim,
        )
        for name in tasks
    }
    start_spec, baseline_specs = load_model_spec(start), [load_model_spec(x) for x in baselines]
    check_writable(out)
    console = make_console(stderr=as_json)
    with (
        SearchDisplay(console) as display,
        renamed_arguments({"text": "--text", "tasks": "--task"}),
    ):
        result = experiments.search(
            start_spec,
            tasks,
            trials=trials,
            seconds=seconds,
            folder=out,
            baselines=baseline_specs,
            sizes=sizes,
            rungs=rungs,
            max_state=max_state,
            max_time=max_time,
            text=text or None,
            seed=seed,
            engine=engine,
            device=device,
            progress=display,
        )
    paths = result.save(out, command=command_line())
    if as_json:
        print_json(result.to_dict())
    else:
        _show(result)
    if "best" in paths:
        print_line(console, f"best recipe: {paths['best']}")
    print_line(console, f"report: {paths['report']}")
    if result.interrupted:
        count = len(result.trials)
        exit_interrupted(f"interrupted: {count} trials are saved; the same command continues")
    if not result.has_best:
        raise typer.Exit(1)


def _show(result: Search) -> None:
    from recollect.experiments.recipe_search import report

    console = make_console()
    if result.complete:
        report.table(result).print(console, also_in="the report")
        console.print()
    console.print(report.summarize(result), highlight=False, markup=False)
