"""Progress of every command: live on a terminal, elsewhere a line now and then."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from types import TracebackType
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

from recollect.report.terminal import Column, TerminalTable

if TYPE_CHECKING:
    from recollect.experiments.comparison.results import ModelRun
    from recollect.experiments.comparison.training import History
    from recollect.experiments.framework.experiment import Experiment
    from recollect.experiments.framework.records import Record
    from recollect.lm.training.train import Header
    from recollect.lm.training.train import Progress as TrainProgress

__all__ = ["BenchDisplay", "CompareDisplay", "Display", "ReproduceDisplay", "TrainDisplay"]


ROOM_FOR_A_BAR = 72
"""Columns of a terminal, below which the numbers alone are shown."""


def _columns(console: Console) -> tuple[ProgressColumn, ...]:
    """What is done, a bar where there is room, how much, and how long it will take."""
    return (
        TextColumn("{task.description}", markup=False, table_column=RichColumn(overflow="fold")),
        *((BarColumn(),) if console.width >= ROOM_FOR_A_BAR else ()),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )


class Display:
    """Bars that live on a terminal, and lines where there is none.

    Args:
        console: where.
        columns: of the bars; rich's own by default.
        transient: whether nothing is left of them at the end.
        view: what is shown in place of the bars alone.
    """

    def __init__(
        self,
        console: Console,
        *columns: ProgressColumn,
        transient: bool = True,
        view: Callable[[], RenderableType] | None = None,
    ) -> None:
        self.console = console
        self.bars = Progress(*columns, console=console)
        self.live = Live(
            console=console,
            refresh_per_second=10,
            transient=transient,
            get_renderable=view or self.bars.get_renderable,
        )

    def __enter__(self) -> Self:
        if self.console.is_terminal:
            self.live.start(refresh=True)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.live.stop()

    def line(self, text: str) -> None:
        """Say something where nobody sees the bars."""
        if not self.console.is_terminal:
            with suppress(OSError):  # nobody listens, and the work goes on
                self.console.print(text, markup=False, highlight=False, soft_wrap=True)


class BenchDisplay(Display):
    """A bar over the rounds of a benchmark."""

    def __init__(self, console: Console, suite: str, rounds: int) -> None:
        super().__init__(console, *_columns(console))
        self.task = self.bars.add_task(f"timing {suite}", total=rounds)

    def count(self, done: int, total: int) -> None:
        """So many rounds are done, of so many."""
        self.bars.update(self.task, completed=done, total=total)


class TrainDisplay(Display):
    """A bar over the steps of a run."""

    def __init__(self, console: Console, steps: int) -> None:
        self.facts = ""
        super().__init__(console, *_columns(console), transient=False, view=self._view)
        self.steps, self.every = steps, max(1, steps // 20)
        self.printed = -1
        self.task = self.bars.add_task("training", total=steps)

    def _view(self) -> Group:
        """The bar, and below it what is known, on as many lines as it takes."""
        return Group(self.bars, Text(self.facts, overflow="fold"))

    def head(self, header: Header, page: Console) -> None:
        """What the run is about to do, on a page that may be another than the bar's."""
        self.live.transient = True  # nothing is left of a bar that has not moved
        self.live.stop()  # it would take what is printed beside it for its own
        self.live.transient = False
        with suppress(OSError):  # nobody listens, and the work goes on
            for name, words in header.lines():
                page.print(f"{name:<12}{words}", markup=False, highlight=False, soft_wrap=True)
        if self.console.is_terminal:
            self.live.start(refresh=True)

    def show(self, progress: TrainProgress) -> None:
        """One step's news."""
        loss = "" if progress.loss is None else f"loss {progress.loss:.3f}  "
        nats = progress.heldout_loss
        heldout = "" if nats is None else f"held-out {nats:.3f}  "
        unit = f"{loss}{heldout}".rstrip() + " nats/token  " if loss or heldout else ""
        facts = (
            f"{unit}{progress.tokens_per_second:,.0f} tokens/s  "
            f"{progress.ceiling_share:.0%} of the matmul ceiling"
        )
        self.facts = facts
        self.bars.update(self.task, completed=progress.step)
        # A loss is said once, beside the step that it was measured after.
        if progress.loss is None or progress.loss_step != progress.step:
            return
        first, ends = self.printed < 0, progress.step == self.steps
        if progress.step > self.printed and (
            first or ends or progress.step // self.every > self.printed // self.every
        ):
            self.printed = progress.step
            self.line(f"step {progress.step:,}/{self.steps:,}  {facts}")


class ReproduceDisplay(Display):
    """A bar over the cells and seeds of each experiment; its `Viewer`."""

    def __init__(self, console: Console) -> None:
        super().__init__(console, *_columns(console))
        self.done, self.total = 0, 0
        self.task = self.bars.add_task("starting", total=None)

    def begin(self, experiment: Experiment, done: int, total: int) -> None:
        """An experiment starts, or goes on."""
        self.done, self.total = done, total
        self.bars.reset(self.task, total=total, completed=done, description=experiment.name)
        earlier = f", {done} of them measured earlier" if done else ""
        self.line(f"{experiment.name}: {total} cells and seeds{earlier}")

    def cell(self, record: Record) -> None:
        """One was measured."""
        self.done += 1
        self.bars.advance(self.task)
        where = ", ".join(f"{name} {value}" for name, value in record.cell.items())
        numbers = ", ".join(
            f"{name} {value:.4g}"
            for name, value in record.values.items()
            if not isinstance(value, Sequence)
        )
        self.line(
            f"  [{self.done}/{self.total}] {where}, seed {record.seed}: {numbers} "
            f"({record.seconds:.1f} s)"
        )


class CompareDisplay(Display):
    """A table of the models that are done and under way, with bars; a `Watcher`."""

    def __init__(self, console: Console, *, models: int, tasks: int) -> None:
        self.total, self.started = models * tasks, 0
        self.done: list[tuple[str, ...]] = []
        self.running: dict[tuple[str, str], tuple[TaskID, tuple[str, ...]]] = {}
        super().__init__(console, *_columns(console), view=self._view)

    def begin(self, task: str, model: str, parameters: int, steps: int) -> None:
        """A model starts."""
        self.started += 1
        label = f"[{self.started}/{self.total}] {task}: {model}"
        row = task, model, f"{parameters:,}", "0", "", "", "0"
        self.running[task, model] = self.bars.add_task(label, total=steps), row
        self.line(f"{label}, {parameters:,} parameters, {steps} steps")

    def step(self, task: str, model: str, step: int, loss: float | None, history: History) -> None:
        """A step was taken."""
        if (task, model) not in self.running:  # told late: it has ended
            return
        bar, row = self.running[task, model]
        self.bars.update(bar, completed=step)
        loss_now = "" if loss is None else f"{loss:.3f}"
        measured = f"{history.curve[-1][1]:.3f}" if history.curve else ""
        speed = f"{history.tokens_per_second:,.0f}"
        self.running[task, model] = (
            bar,
            (*row[:3], f"{history.tokens:,}", loss_now, measured, speed),
        )

    def end(self, run: ModelRun) -> None:
        """A model is done."""
        value = "–" if run.value is None else f"{run.value:.3f}"
        speed = f"{run.tokens_per_second:,.0f}"
        row = run.task, run.label, f"{run.parameters:,}", f"{run.tokens:,}", "", value, speed
        self.done.append(row)
        self._drop(run.task, run.label)
        self.line(
            f"    {run.task}: {run.label} {value} after {run.tokens:,} tokens, {speed} tokens/s"
        )

    def fail(self, task: str, model: str, reason: str) -> None:
        """A model could not be trained; the reason is told at the end."""
        self._drop(task, model)
        self.line(f"    {task}: {model} failed")

    def _drop(self, task: str, model: str) -> None:
        if (task, model) in self.running:
            self.bars.remove_task(self.running.pop((task, model))[0])

    def _view(self) -> Group:
        rows = [*self.done, *(row for _, row in self.running.values())]
        table = TerminalTable(
            columns=_COMPARE_COLUMNS,
            rows=rows,
            styles=dict.fromkeys(range(len(self.done), len(rows)), "bold"),
        )
        return Group(table.fitted(self.console.width), self.bars)


_COMPARE_COLUMNS = (
    Column(name="task", rank=3),
    Column(name="model"),
    Column(name="parameters", right=True, rank=5),
    Column(name="tokens", right=True, rank=2),
    Column(name="loss", right=True, rank=1),
    Column(name="measured", right=True),
    Column(name="tokens/s", right=True, rank=4),
)
