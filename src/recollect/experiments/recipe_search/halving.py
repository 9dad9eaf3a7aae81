"""Successive halving: which recipe is trained next, for how long, and which one is best."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from recollect.experiments.comparison.results import ModelRun
from recollect.experiments.comparison.tasks import RECALL_TASKS

__all__ = ["FACTOR", "Trial", "is_better", "next_promotion", "rank", "rung_steps"]

FACTOR = 3
"""Inverse of the part of a rung that is trained longer, and ratio of the steps of two rungs."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """Training of one recipe on every task, for the steps of one rung.

    Examples:
        >>> from recollect.experiments.recipe_search.halving import Trial
        >>> trial = Trial(candidate="gla", rung=0, failure="a gradient is not finite")
        >>> Trial.from_dict(trial.to_dict()) == trial
        True
    """

    candidate: str  # name of the recipe
    rung: int  # 0 for the shortest training; the last rung has all steps
    runs: tuple[ModelRun, ...] = ()  # one run per task; fewer if one failed
    failure: str = ""  # reason why the recipe could not be trained, or ""
    seconds: float = 0.0  # wall time with preparation and evaluation

    def run(self, task: str) -> ModelRun | None:
        """Return the run of a task, or ``None`` if the trial failed."""
        return None if self.failure else next(run for run in self.runs if run.task == task)

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-ready data."""
        return {
            "candidate": self.candidate,
            "rung": self.rung,
            "seconds": self.seconds,
            "failure": self.failure,
            "runs": [run.to_dict() for run in self.runs],
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Trial:
        """Return the trial that `to_dict` wrote."""
        return cls(**{**data, "runs": tuple(map(ModelRun.from_dict, data["runs"]))})


def rung_steps(steps: int, rung: int, num_rungs: int) -> int:
    """Return the number of optimizer steps of a rung; the last one has all ``steps``."""
    return max(1, -(-steps // FACTOR ** (num_rungs - 1 - rung)))


def is_better(task: str, value: float, other: float) -> bool:
    """Whether a value of a task is better than another: a higher accuracy, or fewer bits."""
    return value > other if task in RECALL_TASKS else value < other


def rank(trials: Sequence[Trial], tasks: Sequence[str]) -> list[Trial]:
    """Return trials of one rung from the best to the worst, without failed ones.

    Trials are ordered by the mean of their ranks in the tasks, then by bytes of state, then by the
    order of training.
    """
    trained = [trial for trial in trials if not trial.failure]
    values = {task: [_loss(trial, task) for trial in trained] for task in tasks}

    def key(index: int) -> tuple[float, int, int]:
        better = (sum(x < values[task][index] for x in values[task]) for task in tasks)
        size = sum(run.state_bytes for run in trained[index].runs)
        return sum(better), size, index

    return [trained[index] for index in sorted(range(len(trained)), key=key)]


def _loss(trial: Trial, task: str) -> float:
    run = trial.run(task)
    value = None if run is None else run.value
    if value is None or math.isnan(value):
        return math.inf
    return -value if task in RECALL_TASKS else value


def next_promotion(
    trials: Sequence[Trial], tasks: Sequence[str], num_rungs: int
) -> tuple[str, int] | None:
    """Return the recipe to train longer and its rung, or ``None`` if none of them is due.

    A recipe is due if it is among the best `FACTOR`-th of the trials of its rung. Decisions depend
    on the finished trials alone, so that a search that is continued takes the same ones (ASHA, Li
    et al. 2020, with one worker).
    """
    for rung in reversed(range(num_rungs - 1)):
        longer = {trial.candidate for trial in trials if trial.rung == rung + 1}
        ranked = rank([trial for trial in trials if trial.rung == rung], tasks)
        finished = sum(trial.rung == rung for trial in trials)
        for trial in ranked[: finished // FACTOR]:
            if trial.candidate not in longer:
                return trial.candidate, rung + 1
    return None
