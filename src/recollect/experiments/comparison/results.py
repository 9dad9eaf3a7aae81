"""Inputs and results of `compare`: sizes, runs, what they say of each model, and progress."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Protocol

from recollect.experiments.comparison.training import History, Schedule
from recollect.experiments.framework.records import plain
from recollect.fields import Validated, int_check, integer, validate
from recollect.messages import argument_name
from recollect.report.environment import Environment

__all__ = ["DEFAULTS", "ModelRun", "Nobody", "Outcomes", "Sizes", "Summary", "Watcher"]


@dataclass(frozen=True, kw_only=True)
class Sizes(Validated):
    """How big a task's models and runs are.

    Attributes:
        width, depth, heads: of the model; its feed-forward width is set so that all models of a
            comparison have equal parameters.
        length: tokens per example.
        schedule: steps, batch, learning rate.
        key_dim: K of every memory whose preset does not say; width / heads if ``None``.
        head_dim: K and V of every memory, whatever its preset says; width / heads if ``None``.

    Examples:
        >>> sizes = rc.experiments.Sizes(
        ...     width=64, depth=2, heads=4, length=128,
        ...     schedule=rc.experiments.Schedule(steps=100, batch=8),
        ... )
        >>> sizes.width, sizes.schedule.steps
        (64, 100)
    """

    width: int = integer(at_least=1)
    depth: int = integer(at_least=1)
    heads: int = integer(at_least=1)
    length: int = integer(at_least=1)
    schedule: Schedule
    key_dim: int | None = integer(None, at_least=1, optional=True)
    head_dim: int | None = integer(None, at_least=1, optional=True)

    def replace(
        self,
        *,
        steps: int | None = None,
        lr: float | None = None,
        width: int | None = None,
        depth: int | None = None,
        heads: int | None = None,
        length: int | None = None,
        batch: int | None = None,
        tokens: int | None = None,
        key_dim: int | None = None,
    ) -> Sizes:
        """These sizes with what is given replaced; ``tokens`` sets the steps, rounded up.

        Args:
            steps: of the optimizer.
            lr: peak learning rate.
            width: channels per token of the model.
            depth: layers.
            heads: query heads per layer.
            length: tokens per example.
            batch: examples per step.
            tokens: to train on, in place of ``steps``.
            key_dim: K, size of queries and keys.

        Raises:
            ValueError: a size below 1, or both steps and tokens.
        """
        given = {"steps": steps, "lr": lr, "batch": batch}
        schedule = replace(self.schedule, **{name: x for name, x in given.items() if x is not None})
        sizes = {
            "width": width,
            "depth": depth,
            "heads": heads,
            "length": length,
            "key_dim": key_dim,
        }
        changed = replace(
            self, schedule=schedule, **{name: x for name, x in sizes.items() if x is not None}
        )
        if tokens is None:
            return changed
        if steps is not None:
            raise ValueError(
                f"{argument_name('steps')} and {argument_name('tokens')} exclude each other: one "
                "follows from the other"
            )
        validate(argument_name("tokens"), int_check(1), tokens)
        steps = -(-tokens // (schedule.batch * changed.length))
        return replace(changed, schedule=replace(schedule, steps=steps))


DEFAULTS: dict[str, Sizes] = {
    "text": Sizes(
        width=128, depth=2, heads=4, length=256, schedule=Schedule(steps=140, batch=8, lr=4e-3)
    ),
    # One layer, one head: its convolution pairs keys with values, and a memory of 64 x 64 holds
    # every pair. With two layers most models are still at the start after as many tokens.
    "mqar": Sizes(
        width=64, depth=1, heads=1, length=48, schedule=Schedule(steps=600, batch=16, lr=7e-3)
    ),
    # The same with keys and values of 32 channels: 32 pairs and more do not fit a 32 x 32 matrix.
    "capacity": Sizes(
        width=64,
        depth=1,
        heads=1,
        head_dim=32,
        length=48,
        schedule=Schedule(steps=1200, batch=16, lr=7e-3),
    ),
}


@dataclass(frozen=True, kw_only=True)
class ModelRun:
    """One model on one task.

    Attributes:
        parameters: trained numbers.
        state_bytes: what decoding must keep per sequence after ``length`` tokens.
        grows: whether that grows with the sequence.
        value: bits per held-out byte (text), or accuracy over all pair counts (recall); of a run
            that was interrupted the curve's last.
        by_pairs: accuracy by number of pairs (recall).
        curve: (training tokens, value), measured on less than ``value`` is (`Comparison.measured`).
        seconds: of training alone; cpu_seconds: processor time of training and measuring, over all
            threads.
        finished: False when the run was interrupted; the numbers are those so far.
        seed: of this run, where the comparison has several; otherwise ``None``.
        options: `LayerOptions.to_dict` of the trained layers, by layer; empty in files of older
            versions.

    Examples:
        >>> run = rc.experiments.ModelRun(
        ...     task="mqar", model="gla", parameters=9000, state_bytes=4096, grows=False, value=0.93
        ... )
        >>> run.finished, run.grows
        (True, False)
    """

    task: str
    model: str
    parameters: int
    state_bytes: int
    grows: bool
    value: float | None
    by_pairs: dict[int, float] = field(default_factory=dict)
    curve: tuple[tuple[int, float], ...] = ()
    tokens: int = 0
    tokens_per_second: float = 0.0
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    finished: bool = True
    seed: int | None = None
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """The model, and the seed where there are several."""
        return self.model if self.seed is None else f"{self.model}, seed {self.seed}"

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        data = plain(asdict(self))
        if self.seed is None:
            del data["seed"]
        if not self.options:
            del data["options"]
        return data


@dataclass(frozen=True, kw_only=True)
class Summary:
    """What the runs of one model on one task say together, one run per seed.

    Attributes:
        task, model: whose runs they are.
        runs: one at least.
    """

    task: str
    model: str
    runs: tuple[ModelRun, ...]

    @property
    def finished(self) -> tuple[ModelRun, ...]:
        """The runs that came to their end."""
        return tuple(run for run in self.runs if run.finished)

    @property
    def values(self) -> list[float]:
        """Of the runs that came to their end; of all, where none did."""
        return [run.value for run in self.finished or self.runs if run.value is not None]

    @property
    def value(self) -> float | None:
        """Their mean, ``None`` without any."""
        return statistics.fmean(self.values) if self.values else None

    @property
    def sd(self) -> float | None:
        """Their standard deviation (n − 1), ``None`` of fewer than three."""
        return statistics.stdev(self.values) if len(self.values) > 2 else None

    def mean(self, name: str) -> float:
        """Of an attribute of the runs, over all of them.

        Args:
            name: of a number of `ModelRun`.
        """
        return statistics.fmean(getattr(run, name) for run in self.runs)

    @property
    def by_pairs(self) -> dict[int, tuple[float, float, float]]:
        """Mean, least and greatest accuracy by number of pairs."""
        every: dict[int, list[float]] = {}
        for run in self.finished or self.runs:
            for count, accuracy in run.by_pairs.items():
                every.setdefault(count, []).append(accuracy)
        return {
            count: (statistics.fmean(each), min(each), max(each)) for count, each in every.items()
        }

    def told(self) -> str | None:
        """The mean with its spread: ± the standard deviation, or both ends of two."""
        if self.value is None:
            return None
        if self.sd is not None:
            return f"{self.value:.3f} ± {self.sd:.3f}"
        if len(self.values) == 2:
            return f"{self.value:.3f} ({min(self.values):.3f}–{max(self.values):.3f})"
        return f"{self.value:.3f}"

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "task": self.task,
            "model": self.model,
            "seeds": [run.seed for run in self.finished],
            "value": self.value,
            "sd": self.sd,
            "min": min(self.values, default=None),
            "max": max(self.values, default=None),
            "by_pairs": {str(count): mean for count, (mean, _, _) in self.by_pairs.items()},
        }


@dataclass(frozen=True, kw_only=True, repr=False)
class Outcomes:
    """What a comparison measured, whole or interrupted.

    Attributes:
        runs: by task and seed, in the order of the models.
        sizes: of each task.
        seed: the first.
        environment: that they were trained in.
        bigram: bits per byte of a smoothed byte bigram on the same held-out text.
        text: source and digest of the text.
        chance: accuracy of guessing among the values (mqar).
        interrupted: whether somebody stopped it.
        processes: that trained side by side; speeds are those of one beside the others.
        failures: (task, model, reason) of models that could not be trained.
        measured: by task, on how much a point of a curve and a value of the table are measured:
            bytes of held-out text, or examples of each number of pairs.
        seeds: how many, from ``seed`` on; each model is trained once with each.
    """

    runs: tuple[ModelRun, ...]
    sizes: Mapping[str, Sizes]
    seed: int
    environment: Environment
    bigram: float | None = None
    text: Mapping[str, str] = field(default_factory=dict)
    chance: float | None = None
    interrupted: bool = False
    processes: int = 1
    failures: tuple[tuple[str, str, str], ...] = ()
    measured: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    seeds: int = 1

    def of(self, task: str) -> list[ModelRun]:
        """The runs of one task."""
        return [run for run in self.runs if run.task == task]

    def summaries(self, task: str) -> list[Summary]:
        """What the runs of each model on one task say together.

        Args:
            task: name of the task.
        """
        by_model: dict[str, list[ModelRun]] = {}
        for run in self.of(task):
            by_model.setdefault(run.model, []).append(run)
        return [
            Summary(task=task, model=model, runs=tuple(runs)) for model, runs in by_model.items()
        ]

    def to_dict(self) -> dict[str, object]:
        """JSON-ready; with several seeds, with the ``summary`` of each model on each task."""
        data = plain(asdict(self))
        if self.seeds == 1:
            del data["seeds"]
        else:
            every = [one for task in self.sizes for one in self.summaries(task)]
            data["summary"] = [one.to_dict() for one in every]
        return {
            **data,
            "runs": [run.to_dict() for run in self.runs],
            "environment": self.environment.to_dict(),
            "schema": 1,
        }


class Watcher(Protocol):
    """Whoever shows progress; with several processes, several runs are on their way at once.

    Examples:
        >>> class Spoken(rc.experiments.Watcher):  # rc.compare(..., watcher=Spoken()) tells it
        ...     def begin(self, task, model, parameters, steps):
        ...         print(f"{model} on {task}: {parameters:,} parameters, {steps} steps")
        >>> Spoken().begin("mqar", "gla", 10_000, 600)
        gla on mqar: 10,000 parameters, 600 steps
    """

    def begin(self, task: str, model: str, parameters: int, steps: int) -> None:
        """A model starts.

        Args:
            task: name of the task.
            model: name of the model.
            parameters: trained numbers.
            steps: that it will take.
        """

    def step(self, task: str, model: str, step: int, loss: float | None, history: History) -> None:
        """A step was taken; of another process not every step is told.

        Args:
            task: name of the task.
            model: name of the model.
            step: number of the step, from 1.
            loss: in nats, ``None`` where it was not read.
            history: what was measured so far.
        """

    def end(self, run: ModelRun) -> None:
        """A model is done, or was stopped."""

    def fail(self, task: str, model: str, reason: str) -> None:
        """A model could not be trained, begun or not.

        Args:
            task: name of the task.
            model: name of the model.
            reason: in a sentence.
        """


class Nobody(Watcher):
    """Watches nothing."""
