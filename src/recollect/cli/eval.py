"""`recollect eval`: a saved model on tasks of lm-eval and on local tasks."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from recollect.cli.console import (
    command_line,
    exit_interrupted,
    make_console,
    print_json,
    print_line,
    print_stderr,
)
from recollect.cli.options import (
    DeviceOption,
    JsonOption,
    ModelFolderArgument,
    OutOption,
    check_device,
    check_writable,
    comma_list,
)
from recollect.messages import renamed_arguments
from recollect.report.tables import Column, Table

if TYPE_CHECKING:
    from recollect.experiments.framework.paper_values import PaperComparison
    from recollect.lm.evaluation.results import Evaluation, TaskResult

__all__ = ["eval"]


@renamed_arguments({name: f"--{name}" for name in ("batch", "limit", "context", "text")})
def eval(  # noqa: A001
    model: ModelFolderArgument = "",
    tasks: Annotated[str, typer.Option(help="Tasks, groups, tags or patterns, with commas.")] = "",
    out: OutOption = Path("runs/eval"),
    batch: Annotated[
        str, typer.Option(help="Batch size, or auto: the largest that fits.")
    ] = "auto",
    limit: Annotated[
        int | None, typer.Option(help="Largest number of documents per task. [default: all]")
    ] = None,
    context: Annotated[
        int | None,
        typer.Option(
            help="Length in tokens of the model's input, and of long tasks. [default: the model's]"
        ),
    ] = None,
    text: Annotated[
        Path | None, typer.Option(help="Text file in which local tasks hide their answers.")
    ] = None,
    device: DeviceOption = "cpu",
    list_all: Annotated[bool, typer.Option("--list", help="List the local tasks.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Measure a language model on lm-eval's tasks, and on local tasks that need no network.

    Finished tasks in the folder of the results are not measured again.
    """
    if list_all:
        from recollect.lm.evaluation.local_tasks import local_tasks

        if as_json:
            print_json(local_tasks())
        else:
            typer.echo("\n".join(local_tasks()))
        return
    if not model or not tasks:
        raise ValueError(
            "name a model and --tasks a,b; --list names the tasks that need no network"
        )
    check_device(device)
    check_writable(out)
    from transformers.utils import logging

    from recollect.experiments.evaluation_page import save_evaluation_page
    from recollect.experiments.framework.paper_values import match_paper_values
    from recollect.lm.evaluation.evaluate import evaluate

    logging.disable_progress_bar()
    progress = _Progress(make_console(stderr=True))
    try:
        result = evaluate(
            model,
            comma_list(tasks),
            out=out,
            batch=batch,
            limit=limit,
            context=context,
            text=text,
            device=device,
            watcher=progress,
        )
    except KeyboardInterrupt:
        exit_interrupted(f"interrupted: {progress.summary()}")
    published = match_paper_values(result)
    report = save_evaluation_page(result, published, out, command=command_line())
    if as_json:
        columns = [asdict(column) | {"rows": dict(column.rows)} for column in published]
        print_json(result.to_dict() | {"published": columns})
    else:
        console = make_console()
        _show(console, result, published)
        print_line(console, f"results: {out / 'results.json'}")
        print_line(console, f"report: {report}")
    if result.failures:
        print_stderr(f"not measured: {', '.join(result.failures)}")
        raise typer.Exit(1)


class _Progress:
    """Print the tasks as they are measured; an `EvaluationWatcher`."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._finished, self._total = 0, 0

    def summary(self) -> str:
        """Return the number of finished tasks as a sentence."""
        if not self._total:
            return "no task was begun"
        return (
            f"{self._finished} of {self._total} tasks are measured and saved, and the same command "
            "continues after them"
        )

    def begin(self, task: str, index: int, count: int) -> None:
        self._total = self._total or self._finished + count
        print_line(self._console, f"{task} ({index} of {count})")

    def end(self, result: TaskResult, *, loaded: bool) -> None:
        self._finished += 1
        time = "measured before" if loaded else f"{result.seconds:.1f} s, batch {result.batch}"
        metrics = ", ".join(f"{name} {result.format(name)}" for name in result.metrics)
        print_line(self._console, f"  {metrics or '; '.join(result.notes)} ({time})")

    def fail(self, task: str, reason: str) -> None:
        print_line(self._console, reason)


def _show(console: Console, result: Evaluation, published: tuple[PaperComparison, ...]) -> None:
    """Print the results, next to the numbers of the papers."""
    columns = [
        Column(name="task"),
        Column(name="metric"),
        Column(name="measured", align="right"),
        Column(name="documents", align="right", priority=2),
    ]
    rows = [list(row) for row in result.rows()]
    if published:
        columns.append(Column(name="the papers report", min_width=40, priority=1))
        for row in rows:
            matches = [x for x in published if (x.task, x.metric) == (row[0], row[1])]
            row.append("\n".join(map(str, matches)))
    Table(columns=columns, rows=rows, title=result.model).print(console, also_in="--json")
    for note in result.notes:
        print_line(console, note)
