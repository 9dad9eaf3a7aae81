"""`recollect compare`: recipes trained side by side."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import rich.console
import typer

from recollect.cli.console import (
    INTERRUPTED,
    check_models,
    check_words,
    check_writable,
    console_of_page,
    said,
    stated,
)
from recollect.cli.progress import CompareDisplay
from recollect.messages import renamed_arguments
from recollect.report.ownership import owned_folder
from recollect.report.terminal import Column, TerminalTable

if TYPE_CHECKING:
    from recollect.experiments.comparison.comparison import Comparison
    from recollect.report.html import Table

__all__ = ["compare"]

SIZES = (
    *("width", "depth", "heads", "key-dim", "parameters", "layer-options"),
    *("steps", "tokens", "batch", "length", "lr", "jobs", "seed", "seeds", "device"),
)
"""Options with which a model or its training may be refused."""


TASKS = ("text", "mqar", "capacity")


@renamed_arguments({name.replace("-", "_"): f"--{name}" for name in SIZES})
def compare(
    models: Annotated[
        str, typer.Option(help="Zoo names or recipe files (.json, .toml), separated by commas.")
    ],
    task: Annotated[
        list[str], typer.Option(help="text, mqar, capacity; give it again for more.")
    ] = ["text"],  # noqa: B006
    text: Annotated[
        list[str] | None,
        typer.Option(
            help="Texts of your own, for the task text: files (.txt, .jsonl, .parquet), folders, "
            "patterns; give it again for more."
        ),
    ] = None,
    dataset: Annotated[
        str | None,
        typer.Option(help="A hub dataset, in place of --text."),
    ] = None,
    column: Annotated[
        str | None,
        typer.Option(help="Field that holds the text of a JSON line or a row; default: text."),
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Optimizer steps per model.")] = None,
    lr: Annotated[float | None, typer.Option(help="Peak learning rate.")] = None,
    width: Annotated[int | None, typer.Option(help="Width of the models.")] = None,
    depth: Annotated[int | None, typer.Option(help="Layers of the models.")] = None,
    heads: Annotated[int | None, typer.Option(help="Heads of every layer.")] = None,
    length: Annotated[int | None, typer.Option(help="Tokens of an example.")] = None,
    batch: Annotated[int | None, typer.Option(help="Examples of a step.")] = None,
    tokens: Annotated[
        int | None, typer.Option(help="Training tokens per model, in place of --steps.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of weights, examples and their order.")] = 0,
    seeds: Annotated[
        int, typer.Option(help="How many, from --seed on: their mean and spread is reported.")
    ] = 1,
    jobs: Annotated[int, typer.Option(help="Processes, one thread each if several.")] = 1,
    device: Annotated[
        str | None, typer.Option(help="cpu, cuda, cuda:1, mps; a GPU if there is one by default.")
    ] = None,
    engine: Annotated[str, typer.Option(help="Engine, or auto.")] = "auto",
    layer_options: Annotated[
        str,
        typer.Option(
            help="preset: each model keeps its own; same: all have the default short convolution, "
            "output norm and output gate."
        ),
    ] = "preset",
    key_dim: Annotated[
        int | None, typer.Option(help="Channels of every memory's keys; width / heads if omitted.")
    ] = None,
    parameters: Annotated[
        int | None, typer.Option(help="Of every model; default: the largest one's.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder of the report.")] = Path("runs/compare"),
    rows: Annotated[
        Path | None,
        typer.Option(
            help="Folder of a table that grows: one file per model, and those that are there are "
            "not trained again. In place of the report; needs --parameters and the task text."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the results as JSON.")] = False,
) -> None:
    """Train models at equal parameters and tokens, and report."""
    names = [name.strip() for name in models.split(",") if name.strip()]
    check_models(names)
    check_words("--task", task, TASKS)
    check_words("--layer-options", [layer_options], ("preset", "same"))
    import recollect.experiments as experiments
    from recollect.experiments.comparison.results import DEFAULTS
    from recollect.experiments.comparison.tasks import check_text_is_read, read_corpus
    from recollect.lm.data.streaming import stream_text

    chosen = [stated(name) for name in names]
    if text and dataset is not None:
        raise ValueError("--text and --dataset exclude each other: give one text")
    if column is not None and not text and dataset is None:
        raise ValueError("--column names a field of --text or --dataset: give one of them")
    with renamed_arguments({"corpus": "--dataset", "text": "--text", "tasks": "--task"}):
        check_text_is_read(task, text=text or None, corpus=dataset)
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
        for name in task
        if name in DEFAULTS
    }
    if rows is not None and (parameters is None or list(task) != ["text"]):
        raise ValueError(
            "--rows needs --parameters, so that rows can be laid side by side, and --task text"
        )
    if rows is not None and seeds != 1:
        raise ValueError("--seeds and --rows exclude each other: a row is of one seed")
    place = out if rows is None else rows
    check_writable(place)
    if text:
        with renamed_arguments({"text": "--text", "column": "--column"}):
            corpus = read_corpus(text, column=column or "text")
    console = console_of_page(stderr=as_json)
    display = CompareDisplay(console, models=len(chosen) * max(1, seeds), tasks=len(set(task)))
    command = shlex.join(["recollect", *sys.argv[1:]])
    with owned_folder(place), display:
        if rows is not None:
            assert parameters is not None
            made = experiments.add_rows(
                chosen,
                rows,
                sizes=sizes["text"],
                parameters=parameters,
                corpus=corpus,
                seed=seed,
                engine=engine,
                layer_options=layer_options,
                jobs=jobs,
                device=device,
                watcher=display,
                command=command,
            )
            if made is None:
                console.print("every row stands; delete NAME.json to train it anew")
            _ended(console, rows / "README.md", made, as_json=as_json)
            return
        result = experiments.compare(
            chosen,
            task,
            corpus=corpus,
            sizes=sizes,
            seed=seed,
            seeds=seeds,
            engine=engine,
            layer_options=layer_options,
            parameters=parameters,
            jobs=jobs,
            device=device,
            watcher=display,
        )
        try:
            paths = experiments.save_comparison(result, out, command=command)
        except ValueError:
            if not as_json:
                _show(console, result)
            raise
    if as_json:
        typer.echo(json.dumps(result.to_dict(), indent=2, allow_nan=False))
    else:
        _show(console, result)
    if "earlier" in paths and not as_json:
        console.print(f"the results that stood there: {paths['earlier']}", soft_wrap=True)
    _ended(console, paths["report"], result)


def _ended(
    console: rich.console.Console,
    report: Path,
    result: Comparison | None,
    *,
    as_json: bool = False,
) -> None:
    """Say where the report is and what failed, and leave with the code that says so."""
    if as_json:
        data = None if result is None else result.to_dict()
        typer.echo(json.dumps(data, indent=2, allow_nan=False))
    if report.exists():
        console.print(f"report: {report}", soft_wrap=True)
    if result is None:
        return
    for sentence in result.failed():
        console.print(sentence, soft_wrap=True)
    if result.interrupted:
        done = sum(run.finished for run in result.runs)
        said(f"interrupted: {done} of the models are trained to the end, and what there is is kept")
        raise typer.Exit(INTERRUPTED)
    if result.failures:
        raise typer.Exit(1)


def _show(console: rich.console.Console, result: Comparison) -> None:
    """The tables of the report, on the terminal, and the sentences that it begins with."""
    from recollect.experiments.comparison.found import found
    from recollect.experiments.comparison.report import measured_on, options_table, reach, table

    for task in result.sizes:
        if not result.of(task):
            continue
        page = table(result, task)
        columns = [
            Column(
                name=name.removesuffix(" per sequence"),
                right=bool(i),
                rank=_rank(name, len(page.columns) - 1 - i),
            )
            for i, name in enumerate(page.columns)
        ]
        rows = _texts(page)
        styles: dict[int, str] = {}
        if task == "text" and result.bigram is not None:
            styles[len(rows) - 1] = "dim"
        TerminalTable(columns=columns, rows=rows, title=page.title, styles=styles).print(
            console, elsewhere="the report"
        )
        _show_options(console, options_table(result, task))
        for note in (measured_on(result, task), reach(result, task)):
            if note:
                console.print(note, highlight=False, style="dim")
        console.print()
    console.print(found(result), highlight=False)
    console.print()


def _show_options(console: rich.console.Console, page: Table | None) -> None:
    """Print the layer options in which the models differ, if they do."""
    if page is None:
        return
    columns = [
        Column(name=name, rank=index if index > 1 else 0) for index, name in enumerate(page.columns)
    ]
    TerminalTable(columns=columns, rows=_texts(page), title=page.title).print(
        console, elsewhere="the report"
    )


def _texts(page: Table) -> list[list[str]]:
    """Return the cells of a table as the terminal shows them."""
    return [["–" if cell is None else str(cell) for cell in row] for row in page.rows]


_LAST = ("parameters", "tokens/s", "finished", "tokens")
"""What a terminal without room does without, in this order."""


def _rank(name: str, after: int) -> int:
    """When a column of a comparison is left out: what was measured stays longest.

    Args:
        name: its heading.
        after: how many columns follow it; the most pairs stand last, and tell models apart best.
    """
    if name in ("model", "bits per byte", "accuracy"):
        return 0
    if name in _LAST:
        return 100 + _LAST.index(name)
    return 2 + after if name.endswith(" pairs") else 1
