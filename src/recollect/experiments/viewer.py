"""Progress of a reproduction in the terminal, and its results."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Self

import rich.box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from recollect.experiments.framework.experiment import Experiment, Planned
from recollect.experiments.framework.records import Record
from recollect.experiments.framework.run import Run

__all__ = ["Bar", "listing", "show_run"]


class Bar:
    """A bar over the cells and seeds of each experiment; a line per cell where nobody looks."""

    def __init__(self, console: Console) -> None:
        self.console, self.done, self.total = console, 0, 0
        self.progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=console,
            transient=True,
        )
        self.task = self.progress.add_task("starting", total=None)

    def __enter__(self) -> Self:
        if self.console.is_terminal:
            self.progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.console.is_terminal:
            self.progress.stop()

    def begin(self, experiment: Experiment, done: int, total: int) -> None:
        """An experiment starts, or goes on."""
        self.done, self.total = done, total
        self.progress.reset(
            self.task, total=total, completed=done, description=f"{experiment.name}"
        )
        if not self.console.is_terminal:
            earlier = f", {done} of them measured earlier" if done else ""
            self.console.print(f"{experiment.name}: {total} cells and seeds{earlier}")

    def cell(self, record: Record) -> None:
        """One was measured."""
        self.done += 1
        self.progress.advance(self.task)
        if not self.console.is_terminal:
            where = ", ".join(f"{name} {value}" for name, value in record.cell.items())
            numbers = [
                f"{name} {value:.4g}"
                for name, value in record.values.items()
                if not isinstance(value, Sequence)
            ]
            self.console.print(
                f"  [{self.done}/{self.total}] {where}, seed {record.seed}: {', '.join(numbers)} "
                f"({record.seconds:.1f} s)",
                markup=False,
                highlight=False,
                soft_wrap=True,
            )


def show_run(console: Console, run: Run) -> None:
    """Each claim beside what was measured."""
    table = Table(
        title=f"{run.experiment.name} ({run.experiment.source}), {run.results.scale} scale",
        title_justify="left",
        box=rich.box.SIMPLE_HEAD,
        pad_edge=False,
    )
    for name in ("the paper says", "verdict", "measured"):
        table.add_column(name)
    for claim, verdict in run.verdicts:
        table.add_row(claim.text, verdict.status, verdict.because)
    console.print(table)


def listing(
    console: Console, experiments: Sequence[Experiment], planned: Sequence[Planned]
) -> None:
    """Every experiment, and those that cannot be run yet."""
    table = Table(box=rich.box.SIMPLE_HEAD, pad_edge=False)
    for name in ("name", "what", "source", "claims"):
        table.add_column(name, no_wrap=name == "name")
    for row in experiments:
        claims = "\n".join(claim.name for claim in row.claims)
        table.add_row(row.name, row.title, row.source, claims)
    for later in planned:
        table.add_row(
            later.name, later.title, later.source, f"planned, needs {later.needs}", style="dim"
        )
    console.print(table)
