"""Progress of a comparison in the terminal: a bar for every run, a live table of what is known."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from rich.console import Console, Group
from rich.live import Live
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from recollect.experiments.comparison.results import ModelRun
from recollect.experiments.comparison.training import History

__all__ = ["Monitor"]


class Monitor:
    """Shows a comparison while it runs; a `recollect.experiments.Watcher`.

    On a terminal the table is live; elsewhere lines are printed as models start and end.
    """

    def __init__(self, console: Console, *, models: int, tasks: int) -> None:
        self.console = console
        self.total = models * tasks
        self.done: list[ModelRun] = []
        self.started = 0
        self.running: dict[tuple[str, str], _Running] = {}
        self.began = time.perf_counter()
        self.progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=console,
        )
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
        self.started += 1
        label = f"[{self.started}/{self.total}] {task}: {model}"
        bar = self.progress.add_task(label, total=steps)
        self.running[task, model] = _Running(bar=bar, parameters=parameters)
        if not self.console.is_terminal:
            self.console.print(f"{label}, {parameters:,} parameters, {steps} steps")

    def step(self, task: str, model: str, step: int, loss: float | None, history: History) -> None:
        """A step was taken."""
        current = self.running.get((task, model))
        if current is None:  # told late: it has ended
            return
        current.history, current.loss = history, loss
        self.progress.update(current.bar, completed=step)

    def end(self, run: ModelRun) -> None:
        """A model is done."""
        self.done.append(run)
        self._drop(run.task, run.model)
        if not self.console.is_terminal:
            value = "–" if run.value is None else f"{run.value:.3f}"
            self.console.print(
                f"    {run.task}: {run.model} {value} after {run.tokens:,} tokens, "
                f"{run.tokens_per_second:,.0f} tokens/s"
            )

    def fail(self, task: str, model: str, reason: str) -> None:
        """A model could not be trained; the reason is told at the end."""
        self._drop(task, model)
        if not self.console.is_terminal:
            self.console.print(f"    {task}: {model} failed")

    def _drop(self, task: str, model: str) -> None:
        current = self.running.pop((task, model), None)
        if current is not None:
            self.progress.remove_task(current.bar)

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
        for (task, model), current in self.running.items():
            history = current.history
            measured = f"{history.curve[-1][1]:.3f}" if history.curve else ""
            loss = "" if current.loss is None else f"{current.loss:.3f}"
            table.add_row(
                *(task, model, f"{current.parameters:,}", f"{history.tokens:,}", loss, measured),
                f"{history.tokens_per_second:,.0f}",
                style="bold",
            )
        return Group(table, self.progress)


@dataclass(kw_only=True)
class _Running:
    """A model on its way."""

    bar: TaskID
    parameters: int
    history: History = field(default_factory=History)
    loss: float | None = None
