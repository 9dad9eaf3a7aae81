"""Progress on the terminal."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Self

import rich.box
import rich.console
import rich.progress
import rich.table

if TYPE_CHECKING:
    from recollect.lm.training.train import Progress


class Bar:
    """A bar on a terminal; elsewhere a line now and then."""

    def __init__(self, console: rich.console.Console, steps: int) -> None:
        self.console, self.steps = console, steps
        self.every = max(1, steps // 20)
        self.printed = -1
        self.bar = rich.progress.Progress(
            rich.progress.TextColumn("training"),
            rich.progress.BarColumn(),
            rich.progress.MofNCompleteColumn(),
            rich.progress.TextColumn("{task.fields[facts]}"),
            rich.progress.TimeRemainingColumn(),
            console=console,
        )
        self.task = self.bar.add_task("training", total=steps, facts="")

    def __enter__(self) -> Self:
        if self.console.is_terminal:
            self.bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.console.is_terminal:
            self.bar.stop()

    def show(self, progress: Progress) -> None:
        """One step's news."""
        loss = "" if progress.loss is None else f"loss {progress.loss:.3f}  "
        heldout = "" if progress.heldout is None else f"held-out {progress.heldout:.3f} bits/byte  "
        facts = (
            f"{loss}{heldout}{progress.tokens_per_second:,.0f} tokens/s  "
            f"{progress.ceiling_share:.0%} of the matmul ceiling"
        )
        self.bar.update(self.task, completed=progress.step, facts=facts)
        last = progress.step == self.steps
        if self.console.is_terminal or progress.loss is None or progress.step == self.printed:
            return
        if progress.step % self.every == 0 or last or self.printed < 0:
            self.printed = progress.step
            self.console.print(f"step {progress.step:,}/{self.steps:,}  {facts}", highlight=False)
