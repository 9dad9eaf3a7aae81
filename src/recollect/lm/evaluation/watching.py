"""Who is told of an evaluation as it goes on."""

from __future__ import annotations

from typing import Protocol

from recollect.lm.evaluation.results import TaskResult

__all__ = ["EvaluationWatcher", "Nobody"]


class EvaluationWatcher(Protocol):
    """Who is told of an evaluation as it goes on.

    Examples:
        >>> class Spoken(rc.lm.EvaluationWatcher):  # rc.lm.evaluate(..., watcher=Spoken()) tells it
        ...     def begin(self, task, index, count):
        ...         print(f"{task}, {index} of {count}")
        ...
        ...     def end(self, result, *, before):
        ...         print(result.task, result.metrics)
        >>> Spoken().begin("piqa", 1, 2)
        piqa, 1 of 2
    """

    def begin(self, task: str, index: int, count: int) -> None:
        """A task is about to be measured.

        Args:
            task: its name.
            index: its place among them, from 1 on.
            count: how many tasks there are, without those that were measured before.
        """
        ...

    def end(self, result: TaskResult, *, before: bool) -> None:
        """A task was measured.

        Args:
            result: of it.
            before: whether an earlier run measured it.
        """
        ...

    def fail(self, task: str, reason: str) -> None:
        """A task cannot be run, or raised an error; the other tasks go on.

        Args:
            task: its name.
            reason: a sentence.
        """
        ...


class Nobody:
    """Is told, and says nothing."""

    def begin(self, task: str, index: int, count: int) -> None: ...

    def end(self, result: TaskResult, *, before: bool) -> None: ...

    def fail(self, task: str, reason: str) -> None: ...
