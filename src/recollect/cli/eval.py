"""`recollect eval`: a saved model on tasks of lm-eval and on local ones."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from recollect.cli.console import (
    INTERRUPTED,
    check_device,
    check_writable,
    console_of_page,
    said,
)
from recollect.messages import renamed_arguments
from recollect.report.terminal import Column, TerminalTable

if TYPE_CHECKING:
    from recollect.experiments.framework.beside import Beside
    from recollect.lm.evaluation.results import Evaluation, TaskResult

__all__ = ["eval"]


@renamed_arguments({name: f"--{name}" for name in ("batch", "limit", "context", "text")})
def eval(  # noqa: A001
    model: Annotated[
        str, typer.Argument(help="Folder of a saved model or its run, or a hub name.")
    ] = "",
    tasks: Annotated[
        str, typer.Option(help="Tasks, groups, tags or patterns, separated by commas.")
    ] = "",
    out: Annotated[
        Path, typer.Option(help="Folder of the results; finished tasks in it are kept.")
    ] = Path("runs/eval"),
    batch: Annotated[str, typer.Option(help="Texts at once, or auto: what memory holds.")] = "auto",
    limit: Annotated[int | None, typer.Option(help="Documents of a task at most.")] = None,
    context: Annotated[
        int | None, typer.Option(help="Tokens that the model sees at once, and of long tasks.")
    ] = None,
    text: Annotated[
        Path | None, typer.Option(help="A text in which local tasks hide what is to be found.")
    ] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    list_all: Annotated[bool, typer.Option("--list", help="Name the local tasks.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the results as JSON.")] = False,
) -> None:
    """Measure a language model on lm-eval's tasks, and on local ones that need no network."""
    if list_all:
        from recollect.lm.evaluation.local_tasks import local_tasks

        typer.echo(json.dumps(local_tasks(), indent=2) if as_json else "\n".join(local_tasks()))
        return
    if not model or not tasks:
        raise ValueError(
            "name a model and --tasks a,b; --list names the tasks that need no network"
        )
    check_device(device)
    check_writable(out)
    from transformers.utils import logging

    from recollect.experiments.evaluation_page import save_evaluation_page
    from recollect.experiments.framework.beside import beside
    from recollect.lm.evaluation.evaluate import evaluate

    logging.disable_progress_bar()
    page, progress = console_of_page(), _Progress(console_of_page(stderr=True))
    try:
        result = evaluate(
            model,
            tasks.split(","),
            out=out,
            batch=batch,
            limit=limit,
            context=context,
            text=text,
            device=device,
            watcher=progress,
        )
    except KeyboardInterrupt:
        said(f"interrupted: {progress.kept()}")
        raise typer.Exit(INTERRUPTED) from None
    papers = beside(result)
    command = shlex.join(["recollect", *sys.argv[1:]])
    report = save_evaluation_page(result, papers, out, command=command)
    if as_json:
        data = result.to_dict() | {"published": [_row(one) for one in papers]}
        typer.echo(json.dumps(data, indent=2, ensure_ascii=False, allow_nan=False))
    else:
        _show(page, result, papers)
        page.print(f"results: {out / 'results.json'}", soft_wrap=True)
        page.print(f"report: {report}", soft_wrap=True)
    if result.failures:
        said(f"not measured: {', '.join(result.failures)}")
        raise typer.Exit(1)


class _Progress:
    """A line for every task."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self.done, self.count = 0, 0

    def kept(self) -> str:
        """What an end leaves behind."""
        if not self.count:
            return "no task was begun"
        return (
            f"{self.done} of {self.count} tasks are measured and kept, and the same command goes "
            "on after them"
        )

    def begin(self, task: str, index: int, count: int) -> None:
        self.count = self.count or self.done + count
        self._console.print(f"{task} ({index} of {count})", soft_wrap=True, highlight=False)

    def end(self, result: TaskResult, *, before: bool) -> None:
        self.done += 1
        how = "measured before" if before else f"{result.seconds:.1f} s, batch {result.batch}"
        numbers = ", ".join(f"{name} {result.told(name)}" for name in result.metrics)
        numbers = numbers or "; ".join(result.notes)
        self._console.print(f"  {numbers} ({how})", soft_wrap=True, highlight=False)

    def fail(self, task: str, reason: str) -> None:
        self._console.print(reason, soft_wrap=True, highlight=False)


def _row(one: Beside) -> dict[str, Any]:
    """A column of a paper as data."""
    names = ("task", "metric", "measured", "table", "column", "group", "note")
    return {name: getattr(one, name) for name in names} | {"rows": dict(one.rows)}


def _show(console: Console, result: Evaluation, papers: tuple[Beside, ...]) -> None:
    """The table, with what the papers report."""
    columns = [
        Column(name="task"),
        Column(name="metric"),
        Column(name="measured", right=True),
        Column(name="documents", right=True, rank=2),
    ]
    rows = [list(row) for row in result.rows()]
    if papers:
        columns.append(Column(name="the papers report", least=40, rank=1))
        for row in rows:
            here = [one for one in papers if (one.task, one.metric) == (row[0], row[1])]
            row.append("\n".join(map(str, here)))
    TerminalTable(columns=columns, rows=rows, title=result.model).print(console, elsewhere="--json")
    for note in result.notes:
        console.print(note, soft_wrap=True, highlight=False)
