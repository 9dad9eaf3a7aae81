"""Progress of a comparison in the terminal: a bar for the run, a live table of what is known."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from recollect.experiments.compare import ModelRun
from recollect.experiments.training import History

__all__ = ["Monitor"]


class Monitor:
    """Shows a comparison while it runs; a `recollect.experiments.compare.Watcher`.

    On a terminal the table is live; elsewhere one line is printed per model.
    """

    def __init__(self, console: Console, *, models: int, tasks: int) -> None:
        self.console = console
        self.total = models * tasks
        self.done: list[ModelRun] = []
        self.current: tuple[str, str, int] | None = None
        self.history: History | None = None
        self.loss: float | None = None
        self.began = time.perf_counter()
        self.progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=console,
        )
        self.bar = self.progress.add_task("starting", total=None)
        self.live = Live(
            console=console, refresh_per_second=4, transient=True, get_renderable=self._view
        )

    def __enter__(self) -> Self:
        if self.console.is_terminal:
            self.live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.console.is_terminal:
            self.live.stop()

    def begin(self, task: str, model: str, parameters: int, steps: int) -> None:
        """A model starts."""
        self.current, self.history, self.loss = (task, model, parameters), None, None
        number = len(self.done) + 1
        label = f"[{number}/{self.total}] {task}: {model}"
        self.progress.reset(self.bar, total=steps, description=label)
        if not self.console.is_terminal:
            self.console.print(f"{label}, {parameters:,} parameters, {steps} steps")

    def step(self, step: int, loss: float | None, history: History) -> None:
        """A step was taken."""
        self.history, self.loss = history, loss
        self.progress.update(self.bar, completed=step)

    def end(self, run: ModelRun) -> None:
        """A model is done."""
        self.done.append(run)
        self.current = None
        if not self.console.is_terminal:
            value = "–" if run.value is None else f"{run.value:.3f}"
            self.console.print(
                f"    {value} after {run.tokens:,} tokens, {run.tokens_per_second:,.0f} tokens/s"
            )

    def _view(self) -> Group:
        table = Table(box=None, pad_edge=False)
        for name in ("task", "model", "parameters", "tokens", "loss", "measured", "tokens/s"):
            table.add_column(name, justify="left" if name in ("task", "model") else "right")
        for run in self.done:
            value = "–" if run.value is None else f"{run.value:.3f}"
            speed = f"{run.tokens_per_second:,.0f}"
            table.add_row(
                run.task, run.model, f"{run.parameters:,}", f"{run.tokens:,}", "", value, speed
            )
        if self.current is not None:
            task, model, parameters = self.current
            history = self.history or History()
            measured = f"{history.curve[-1][1]:.3f}" if history.curve else ""
            loss = "" if self.loss is None else f"{self.loss:.3f}"
            table.add_row(
                *(task, model, f"{parameters:,}", f"{history.tokens:,}", loss, measured),
                f"{history.tokens_per_second:,.0f}",
                style="bold",
            )
        return Group(table, self.progress)
