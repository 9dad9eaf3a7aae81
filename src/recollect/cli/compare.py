"""`recollect compare`: recipes trained side by side."""

from __future__ import annotations

from enum import StrEnum
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import rich.console
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
from recollect.cli.progress import CompareDisplay
from recollect.messages import renamed_arguments
from recollect.report.lock import folder_lock

if TYPE_CHECKING:
    from recollect.experiments.comparison.comparison import Comparison

__all__ = ["Task", "compare"]

_OPTIONS = (
    *("width", "depth", "heads", "key-dim", "parameters", "layer-options"),
    *("steps", "tokens", "batch", "length", "lr", "jobs", "seed", "seeds", "device"),
)
"""Options whose names stand in messages about models and their training."""

Task = StrEnum("Task", "text mqar capacity")


@renamed_arguments({name.replace("-", "_"): f"--{name}" for name in _OPTIONS})
def compare(
    models: Annotated[
        str,
        typer.Option(help="Names of the zoo or recipe files (.json, .toml), separated by commas."),
    ],
    task: Annotated[
        list[Task], typer.Option(metavar="TASK", help="Task: text, mqar or capacity; repeatable.")
    ] = [Task.text],  # noqa: B006
    text: TextsOption = None,
    dataset: Annotated[
        str | None, typer.Option(help="Dataset on the hub with the text, in place of --text.")
    ] = None,
    column: Annotated[
        str | None, typer.Option(help="Field with the text of a JSON line or row. [default: text]")
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Optimizer steps per model.")] = None,
    lr: Annotated[float | None, typer.Option(help="Peak learning rate.")] = None,
    width: Annotated[int | None, typer.Option(help="Width of the models.")] = None,
    depth: Annotated[int | None, typer.Option(help="Number of layers.")] = None,
    heads: Annotated[int | None, typer.Option(help="Number of heads per layer.")] = None,
    length: Annotated[int | None, typer.Option(help="Tokens per example.")] = None,
    batch: Annotated[int | None, typer.Option(help="Examples per step.")] = None,
    tokens: Annotated[
        int | None, typer.Option(help="Tokens per model, in place of --steps.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of weights, examples and order.")] = 0,
    seeds: Annotated[int, typer.Option(help="Number of seeds, from --seed on.")] = 1,
    jobs: Annotated[int, typer.Option(help="Number of processes, with one thread each.")] = 1,
    device: AnyDeviceOption = None,
    engine: Annotated[str, typer.Option(help="Engine of all layers.")] = "auto",
    layer_options: Annotated[
        Literal["preset", "same"],
        typer.Option(
            help="Layer options: each model's own, or the default short convolution, output norm "
            "and output gate for all."
        ),
    ] = "preset",
    key_dim: KeyDimOption = None,
    parameters: Annotated[
        int | None,
        typer.Option(help="Number of parameters of every model. [default: the largest model's]"),
    ] = None,
    out: OutOption = Path("runs/compare"),
    table_folder: Annotated[
        Path | None,
        typer.Option(
            "--rows",
            help="Folder of a growing table, in place of the report. It has one file per model, "
            "and models with a file are not trained again. Needs --parameters and the task text.",
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Train models at equal parameters and tokens, and write a report.

    Sizes and schedules that you leave out are those of the task.
    """
    names = comma_list(models)
    check_models(names)
    tasks = [*map(str, task)]
    import recollect.experiments as experiments
    from recollect.experiments.comparison.results import DEFAULTS
    from recollect.experiments.comparison.tasks import check_text_used, read_corpus
    from recollect.lm.data.sources import stream_text

    specs = [load_model_spec(name) for name in names]
    if text and dataset is not None:
        raise ValueError("--text and --dataset exclude each other: give one text")
    if column is not None and not text and dataset is None:
        raise ValueError("--column names a field of --text or --dataset: give one of them")
    with renamed_arguments({"corpus": "--dataset", "text": "--text", "tasks": "--task"}):
        check_text_used(tasks, text=text or None, corpus=dataset)
    corpus = None if dataset is None else stream_text(dataset, column=column or "text")
    sizes = {
        name: DEFAULTS[name].replace(
            steps=steps,
            lr=lr,
            width=width,
            depth=depth,
            heads=heads,
            length=length,
            batch=batch,
            tokens=tokens,
            key_dim=key_dim,
        )
        for name in tasks
    }
    if table_folder is not None and (parameters is None or tasks != ["text"]):
        raise ValueError(
            "--rows needs --parameters, so that rows can be laid side by side, and --task text"
        )
    if table_folder is not None and seeds != 1:
        raise ValueError("--seeds and --rows exclude each other: a row is of one seed")
    if table_folder is None:
        import_module("matplotlib")  # which the report needs after training
    folder = out if table_folder is None else table_folder
    check_writable(folder)
    if text:
        with renamed_arguments({"text": "--text", "column": "--column"}):
            corpus = read_corpus(text, column=column or "text")
    console = make_console(stderr=as_json)
    display = CompareDisplay(console, models=len(specs) * max(1, seeds), tasks=len(set(tasks)))
    shared: dict[str, Any] = {
        "corpus": corpus,
        "seed": seed,
        "engine": engine,
        "layer_options": layer_options,
        "jobs": jobs,
        "device": device,
        "progress": display,
    }
    with folder_lock(folder), display:
        if table_folder is not None:
            assert parameters is not None
            added = experiments.extend_table(
                specs,
                table_folder,
                sizes=sizes["text"],
                parameters=parameters,
                command=command_line(),
                **shared,
            )
            if added is None:
                print_line(console, "all rows exist; delete NAME.json to train a model again")
            if as_json:
                print_json(None if added is None else added.to_dict())
            _report_outcome(console, table_folder / "README.md", added)
            return
        result = experiments.compare(
            specs, tasks, sizes=sizes, seeds=seeds, parameters=parameters, **shared
        )
        try:
            paths = result.save(out, command=command_line())
        except ValueError:
            if not as_json:
                _show(console, result)
            raise
    if as_json:
        print_json(result.to_dict())
    else:
        _show(console, result)
    if "earlier" in paths and not as_json:
        print_line(console, f"earlier results: {paths['earlier']}")
    _report_outcome(console, paths["report"], result)


def _report_outcome(console: rich.console.Console, report: Path, result: Comparison | None) -> None:
    """Print the path of the report and the failures, and exit with their code."""
    if report.exists():
        print_line(console, f"report: {report}")
    if result is None:
        return
    for sentence in result.failure_messages():
        print_line(console, sentence)
    if result.interrupted:
        finished = sum(run.finished for run in result.runs)
        exit_interrupted(f"interrupted: {finished} models were trained to the end; all is saved")
    if result.failures:
        raise typer.Exit(1)


def _show(console: rich.console.Console, result: Comparison) -> None:
    """Print the tables and the first sentences of the report."""
    from recollect.experiments.comparison import report

    for task in filter(result.of, result.sizes):
        for table in (report.table(result, task), report.options_table(result, task)):
            if table is not None:
                table.print(console, also_in="the report")
        for note in (report.eval_size_note(result, task), report.comparison_caveats(result, task)):
            if note:
                console.print(note, highlight=False, style="dim")
        console.print()
    console.print(report.summarize(result), highlight=False)
    console.print()
