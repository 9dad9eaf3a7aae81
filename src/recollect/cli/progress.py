"""Progress of the commands: live bars on a terminal, and lines in a pipe or a file."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Column as RichColumn
from rich.text import Text

from recollect.cli.console import print_line
from recollect.report.tables import Column, Table

if TYPE_CHECKING:
    from recollect.experiments.comparison.results import History, ModelRun
    from recollect.experiments.framework.experiment import Experiment
    from recollect.experiments.framework.records import Record
    from recollect.lm.training.progress import Progress as TrainProgress

__all__ = [
    "CompareDisplay",
    "CountDisplay",
    "Display",
    "ReproduceDisplay",
    "SearchDisplay",
    "TrainDisplay",
]


MIN_BAR_WIDTH = 72
"""Smallest width of a terminal, in columns, with a bar next to the numbers."""


def _columns(console: Console) -> tuple[ProgressColumn, ...]:
    return (
        TextColumn("{task.description}", markup=False, table_column=RichColumn(overflow="fold")),
        *((BarColumn(),) if console.width >= MIN_BAR_WIDTH else ()),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )


class Display:
    """Live bars on a terminal; in a pipe or a file, lines."""

    def __init__(
        self,
        console: Console,
        *,
        transient: bool = True,  # whether the bars are removed at the end
        render: Callable[[], RenderableType] | None = None,  # by default the bars
    ) -> None:
        self.console = console
        self.bars = Progress(*_columns(console), console=console)
        self.live_display = Live(
            console=console,
            refresh_per_second=10,
            transient=transient,
            get_renderable=render or self.bars.get_renderable,
        )

    def __enter__(self) -> Self:
        if self.console.is_terminal:
            self.live_display.start(refresh=True)
        return self

    def __exit__(self, *error: object) -> None:
        self.live_display.stop()

    def print_if_not_live(self, text: str) -> None:
        """Print a line if there are no live bars."""
        if not self.console.is_terminal:
            print_line(self.console, text)


class CountDisplay(Display):
    """A bar over rounds or items."""

    def __init__(self, console: Console, description: str, total: int | None = None) -> None:
        super().__init__(console)
        self.task = self.bars.add_task(description, total=total)

    def update(self, completed: int, total: int) -> None:
        """Set the number of finished rounds or items."""
        self.bars.update(self.task, completed=completed, total=total)


class TrainDisplay(Display):
    """A bar over the steps of a run; a `TrainObserver`."""

    def __init__(
        self, console: Console, steps: int, *, summary_console: Console | None = None
    ) -> None:
        self.status = ""
        super().__init__(console, transient=False, render=self._render)
        self.summary_console = summary_console or console
        self.summary: Mapping[str, str] = {}
        self.steps, self.print_every = steps, max(1, steps // 20)
        self.last_printed = -1
        self.task = self.bars.add_task("training", total=steps)

    def _render(self) -> Group:
        return Group(self.bars, Text(self.status, overflow="fold"))

    def on_start(self, summary: Mapping[str, str]) -> None:
        """Print the summary of the run before its first step."""
        self.summary, self.last_printed = summary, -1
        self.live_display.transient = True  # removes the bar, which has not moved yet
        self.live_display.stop()  # the live display would overwrite the summary
        self.live_display.transient = False
        for name, text in summary.items():
            print_line(self.summary_console, f"{name:<12}{text}")
        if self.console.is_terminal:
            self.live_display.start(refresh=True)

    def on_message(self, message: str) -> None:
        print_line(self.console, message)

    def on_progress(self, progress: TrainProgress) -> None:
        losses = {"loss": progress.loss, "held-out": progress.heldout_loss}
        words = [f"{name} {loss:.3f}  " for name, loss in losses.items() if loss is not None]
        unit = "".join(words).rstrip() + " nats/token  " if words else ""
        self.status = (
            f"{unit}{progress.tokens_per_second:,.0f} tokens/s  "
            f"{progress.ceiling_share:.0%} of the matmul ceiling"
        )
        self.bars.update(self.task, completed=progress.step)
        # Each loss is printed once, with the step after which it was measured.
        if progress.loss is None or progress.loss_step != progress.step:
            return
        is_edge = self.last_printed < 0 or progress.step == self.steps
        is_due = progress.step // self.print_every > self.last_printed // self.print_every
        if progress.step > self.last_printed and (is_edge or is_due):
            self.last_printed = progress.step
            self.print_if_not_live(f"step {progress.step:,}/{self.steps:,}  {self.status}")


class ReproduceDisplay(Display):
    """A bar over the cells and seeds of each experiment; a `ProgressReporter`.

    In a pipe, each line has an estimate of the remaining time.
    """

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self.completed, self.total, self.measured = 0, 0, 0
        self.started = time.monotonic()
        self.task = self.bars.add_task("starting", total=None)

    def begin(self, experiment: Experiment, done: int, total: int) -> None:
        self.completed, self.total, self.measured = done, total, 0
        self.started = time.monotonic()
        self.bars.reset(self.task, total=total, completed=done, description=experiment.name)
        earlier = f", {done} of them measured earlier" if done else ""
        self.print_if_not_live(f"{experiment.name}: {total} cells and seeds{earlier}")

    def on_record(self, record: Record) -> None:
        self.completed += 1
        self.measured += 1
        self.bars.advance(self.task)
        cell = ", ".join(f"{name} {value}" for name, value in record.cell.items())
        numbers = ", ".join(
            f"{name} {value:.4g}"
            for name, value in record.values.items()
            if not isinstance(value, Sequence)
        )
        self.print_if_not_live(
            f"  [{self.completed}/{self.total}] {cell}, seed {record.seed}: {numbers} "
            f"({record.seconds:.1f} s){self._remaining()}"
        )

    def _remaining(self) -> str:
        """Return an estimate of the remaining time from the mean of the cells so far."""
        if self.completed == self.total:
            return ""
        elapsed = time.monotonic() - self.started
        remaining = elapsed / self.measured * (self.total - self.completed)
        return f"; {_duration(elapsed)} so far, about {_duration(remaining)} left"


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


_COMPARE_COLUMNS = (
    Column(name="task", priority=3),
    Column(name="model"),
    Column(name="parameters", align="right", priority=5),
    Column(name="tokens", align="right", priority=2),
    Column(name="loss", align="right", priority=1),
    Column(name="measured", align="right"),
    Column(name="tokens/s", align="right", priority=4),
)


class CompareDisplay(Display):
    """A table of models, with a bar per running model; a `ProgressReporter`."""

    def __init__(self, console: Console, *, models: int, tasks: int) -> None:
        self.total, self.started = models * tasks, 0
        self.finished: list[tuple[str, ...]] = []
        self.running: dict[tuple[str, str], tuple[TaskID, tuple[str, ...]]] = {}
        super().__init__(console, render=self._render)

    def on_start(self, task: str, model: str, parameters: int, steps: int) -> None:
        """Add the bar and the row of a model."""
        self.started += 1
        label = f"[{self.started}/{self.total}] {task}: {model}"
        row = task, model, f"{parameters:,}", "0", "", "", "0"
        self.running[task, model] = self.bars.add_task(label, total=steps), row
        self.print_if_not_live(f"{label}, {parameters:,} parameters, {steps} steps")

    def on_step(
        self, task: str, model: str, step: int, loss: float | None, history: History
    ) -> None:
        if (task, model) not in self.running:  # steps of a process may arrive after its end
            return
        bar, row = self.running[task, model]
        self.bars.update(bar, completed=step)
        numbers = (
            f"{history.tokens:,}",
            "" if loss is None else f"{loss:.3f}",
            f"{history.curve[-1][1]:.3f}" if history.curve else "",
            f"{history.tokens_per_second:,.0f}",
        )
        self.running[task, model] = bar, (*row[:3], *numbers)

    def on_end(self, run: ModelRun) -> None:
        """Move a model to the finished ones."""
        value = "–" if run.value is None else f"{run.value:.3f}"
        tokens, speed = f"{run.tokens:,}", f"{run.tokens_per_second:,.0f}"
        row = (run.task, run.label, f"{run.parameters:,}", tokens, "", value, speed)
        self.finished.append(row)
        self._remove(run.task, run.label)
        self.print_if_not_live(
            f"    {run.task}: {run.label} {value} after {tokens} tokens, {speed} tokens/s"
        )

    def on_failure(self, task: str, model: str, message: str) -> None:
        """Remove a model; the command prints the reason at its end."""
        self._remove(task, model)
        self.print_if_not_live(f"    {task}: {model} failed")

    def _remove(self, task: str, model: str) -> None:
        if (task, model) in self.running:
            self.bars.remove_task(self.running.pop((task, model))[0])

    def _render(self) -> Group:
        rows = [*self.finished, *(row for _, row in self.running.values())]
        table = Table(
            columns=_COMPARE_COLUMNS,
            rows=rows,
            styles=dict.fromkeys(range(len(self.finished), len(rows)), "bold"),
        )
        return Group(table.to_rich(self.console.width), self.bars)


class SearchDisplay(Display):
    """A bar over the steps of the current training; a `ProgressReporter`."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self.bar = self.bars.add_task("starting", total=None)
        self.started = 0

    def on_start(self, task: str, model: str, parameters: int, steps: int) -> None:
        self.started += 1
        label = f"training {self.started}, {task}: {model}"
        self.bars.reset(self.bar, total=steps, description=label)

    def on_step(
        self, task: str, model: str, step: int, loss: float | None, history: History
    ) -> None:
        self.bars.update(self.bar, completed=step)

    def on_end(self, run: ModelRun) -> None:
        value = "–" if run.value is None else f"{run.value:.3f}"
        self.print_if_not_live(f"{run.task}: {run.label} {value} after {run.tokens:,} tokens")

    def on_failure(self, task: str, model: str, message: str) -> None:
        print_line(self.console, f"{task}: {model} failed: {message}")
