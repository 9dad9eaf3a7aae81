"""`recollect compare`: recipes trained side by side."""

from __future__ import annotations

from enum import StrEnum
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
    JsonOption,
    OutOption,
    check_models,
    check_writable,
    comma_list,
    load_model_spec,
)
from recollect.cli.progress import CompareDisplay
from recollect.messages import renamed_arguments
from recollect.report.lock import folder_lock
from recollect.report.tables import Column, Table

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
    text: Annotated[
        list[str] | None,
        typer.Option(
            help="Files (.txt, .jsonl, .parquet), folders or patterns with the text of the task "
            "text; repeatable. [default: the documentation of Python]"
        ),
    ] = None,
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
    device: Annotated[
        str | None,
        typer.Option(help="Device: cpu, cuda, cuda:1 or mps. [default: a GPU if there is one]"),
    ] = None,
    engine: Annotated[str, typer.Option(help="Engine of all layers.")] = "auto",
    layer_options: Annotated[
        Literal["preset", "same"],
        typer.Option(
            help="Layer options: each model's own, or the default short convolution, output norm "
            "and output gate for all."
        ),
    ] = "preset",
    key_dim: Annotated[
        int | None, typer.Option(help="Key channels. [default: width/heads]")
    ] = None,
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
    from recollect.experiments.comparison.tasks import check_text_is_read, read_corpus
    from recollect.lm.data.streaming import stream_text

    specs = [load_model_spec(name) for name in names]
    if text and dataset is not None:
        raise ValueError("--text and --dataset exclude each other: give one text")
    if column is not None and not text and dataset is None:
        raise ValueError("--column names a field of --text or --dataset: give one of them")
    with renamed_arguments({"corpus": "--dataset", "text": "--text", "tasks": "--task"}):
        check_text_is_read(tasks, text=text or None, corpus=dataset)
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
        "watcher": display,
    }
    with folder_lock(folder), display:
        if table_folder is not None:
            assert parameters is not None
            added = experiments.add_rows(
                specs,
                table_folder,
                sizes=sizes["text"],
                parameters=parameters,
                command=command_line(),
                **shared,
            )
            if added is None:
                print_line(console, "every row stands; delete NAME.json to train it anew")
            if as_json:
                print_json(None if added is None else added.to_dict())
            _report_outcome(console, table_folder / "README.md", added)
            return
        result = experiments.compare(
            specs, tasks, sizes=sizes, seeds=seeds, parameters=parameters, **shared
        )
        try:
            paths = experiments.save_comparison(result, out, command=command_line())
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
    for sentence in result.failed():
        print_line(console, sentence)
    if result.interrupted:
        finished = sum(run.finished for run in result.runs)
        exit_interrupted(f"interrupted: {finished} models were trained to the end; all is saved")
    if result.failures:
        raise typer.Exit(1)


def _show(console: rich.console.Console, result: Comparison) -> None:
    """Print the tables of the report and the sentences at its beginning."""
    from recollect.experiments.comparison.found import found
    from recollect.experiments.comparison.report import measured_on, options_table, reach, table

    for task in result.sizes:
        if not result.of(task):
            continue
        page = table(result, task)
        last = len(page.columns) - 1
        columns = [
            Column(
                name=name.removesuffix(" per sequence"),
                align="right" if index > 0 else "left",
                priority=_column_priority(name, last - index),
            )
            for index, name in enumerate(page.column_names)
        ]
        has_bigram = task == "text" and result.bigram is not None
        _print_table(console, page, columns, {len(page.rows) - 1: "dim"} if has_bigram else {})
        options = options_table(result, task)
        if options is not None:
            columns = [
                Column(name=name, priority=index if index > 1 else 0)
                for index, name in enumerate(options.column_names)
            ]
            _print_table(console, options, columns, {})
        for note in (measured_on(result, task), reach(result, task)):
            if note:
                console.print(note, highlight=False, style="dim")
        console.print()
    console.print(found(result), highlight=False)
    console.print()


def _print_table(
    console: rich.console.Console, page: Table, columns: list[Column], styles: dict[int, str]
) -> None:
    """Print a table of the report on the terminal."""
    rows = [["–" if cell is None else str(cell) for cell in row] for row in page.rows]
    table = Table(columns=columns, rows=rows, title=page.title, styles=styles)
    table.print(console, also_in="the report")


_PRIORITIES = {
    "model": 0,
    "bits per byte": 0,
    "accuracy": 0,
    "parameters": 100,
    "tokens/s": 101,
    "finished": 102,
    "tokens": 103,
}
"""Ranks of columns; of those above 0, the largest is left out first."""


def _column_priority(name: str, columns_after: int) -> int:
    """Return the rank of a column; the largest numbers of pairs tell models apart best."""
    return _PRIORITIES.get(name, 2 + columns_after if name.endswith(" pairs") else 1)
