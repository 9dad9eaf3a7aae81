"""Inputs and results of `compare`: sizes and schedules, runs, comparisons and progress."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Protocol

from recollect.experiments.framework.fitting import rate_at
from recollect.fields import Validated, int_check, integer, number, validate
from recollect.messages import argument_name
from recollect.serialization import plain

__all__ = [
    "DEFAULTS",
    "History",
    "ModelRun",
    "NoProgress",
    "ProgressReporter",
    "Schedule",
    "Sizes",
    "Summary",
]


@dataclass(frozen=True, kw_only=True)
class Schedule(Validated):
    """Training with AdamW: linear warm-up, then cosine to zero.

    Attributes:
        steps: Optimizer steps.
        batch: Examples per step.
        lr: Peak learning rate.
        warmup: Fraction of the steps in the warm-up.
        weight_decay: Weight decay of the parameters in `recollect.lm.parameter_groups`.
        clip: Largest gradient norm.
        evaluations: Number of points of the learning curve.

    Examples:
        >>> schedule = rc.experiments.Schedule(steps=100, batch=8, lr=1e-3)
        >>> schedule.warmup, schedule.clip
        (0.1, 1.0)
    """

    steps: int = integer(at_least=1)
    batch: int = integer(at_least=1)
    lr: float = number(3e-3, above=0)
    warmup: float = number(0.1, at_least=0, at_most=1)
    weight_decay: float = number(0.1, at_least=0)
    clip: float = 1.0
    evaluations: int = integer(5, at_least=1)

    def lr_at(self, step: int) -> float:
        """Return the learning rate at a step, counted from 0."""
        return self.lr * rate_at(step, self.steps, self.warmup, from_zero=True)

    @property
    def checkpoints(self) -> list[int]:
        """Steps after which the model is evaluated, up to the last step."""
        parts = min(self.evaluations, self.steps)
        return sorted({round(self.steps * (i + 1) / parts) for i in range(parts)})


@dataclass(kw_only=True)
class History:
    """Measurements of a run, filled during training so that an interrupt loses none."""

    # pairs of training tokens and value
    curve: list[tuple[int, float]] = field(default_factory=list)
    # pairs of step and training loss in nats per token
    losses: list[tuple[int, float]] = field(default_factory=list)
    seconds: float = 0.0  # time of the optimizer steps, without evaluation
    tokens: int = 0  # number of training tokens
    finished: bool = False  # whether all steps were taken

    @property
    def tokens_per_second(self) -> float:
        """Training throughput, 0 before the first step."""
        return self.tokens / self.seconds if self.seconds else 0.0


@dataclass(frozen=True, kw_only=True)
class Sizes(Validated):
    """Sizes of a task's models and examples, and their training.

    Attributes:
        width, depth, heads: Channels per token, number of layers, query heads per layer.
        length: Tokens per example.
        schedule: Steps, examples per step and learning rate.
        key_dim: K of every memory whose preset has no ``key_dim``; width / heads if ``None``.
        head_dim: K and V of every memory, also of presets with their own; width / heads if
            ``None``.

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
        """Return sizes in which the arguments other than ``None`` are replaced.

        Args:
            steps, lr, batch: As in `Schedule`.
            width, depth, heads, length, key_dim: As in `Sizes`.
            tokens: Training tokens, in place of ``steps``; rounded up to full steps.

        Raises:
            ValueError: a size below 1, or both steps and tokens.
        """
        schedule = _not_none(steps=steps, lr=lr, batch=batch)
        sizes = _not_none(width=width, depth=depth, heads=heads, length=length, key_dim=key_dim)
        changed = replace(self, schedule=replace(self.schedule, **schedule), **sizes)
        if tokens is None:
            return changed
        if steps is not None:
            raise ValueError(
                f"{argument_name('steps')} and {argument_name('tokens')} exclude each other: one "
                "follows from the other"
            )
        validate(argument_name("tokens"), int_check(1), tokens)
        steps = -(-tokens // (changed.schedule.batch * changed.length))
        return replace(changed, schedule=replace(changed.schedule, steps=steps))


def _not_none(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


DEFAULTS: dict[str, Sizes] = {
    "text": Sizes(
        width=128, depth=2, heads=4, length=256, schedule=Schedule(steps=140, batch=8, lr=4e-3)
    ),
    # One layer with one head: its convolution pairs keys with values, and a memory of 64 x 64
    # holds every pair. With two layers most models learn nothing within as many tokens.
    "mqar": Sizes(
        width=64, depth=1, heads=1, length=48, schedule=Schedule(steps=600, batch=16, lr=7e-3)
    ),
    # Keys and values of 32 channels: 32 pairs and more do not fit a 32 x 32 matrix.
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
    """Training and evaluation of one model on one task with one seed.

    Attributes:
        task, model: Names of the task and the model.
        parameters: Number of trained parameters.
        state_bytes, grows: Bytes of state per sequence after ``length`` tokens, and whether the
            state grows with the sequence.
        value: Bits per held-out byte (text), or accuracy over all numbers of pairs (recall). The
            last point of ``curve`` if the run was interrupted.
        by_pairs: Accuracy by number of pairs (recall).
        curve: Pairs of training tokens and value, measured on fewer examples than ``value``; see
            `Comparison.eval_sizes`.
        tokens, tokens_per_second: Number of training tokens, and throughput.
        seconds: Wall time of training, without evaluation.
        cpu_seconds: Processor time of training and evaluation, over all threads.
        finished: False if the run was interrupted.
        seed: ``None`` if the comparison has one seed.
        options: `LayerOptions.to_dict` of the trained layers, by layer; empty in older files.

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
        """Name of the model, with the seed if the comparison has several."""
        return self.model if self.seed is None else f"{self.model}, seed {self.seed}"

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-ready data, without an empty ``seed`` and ``options``."""
        data = plain(asdict(self))
        return {
            name: value
            for name, value in data.items()
            if name not in ("seed", "options") or value not in (None, {})
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ModelRun:
        """Return the run that `to_dict` wrote, perhaps in an older version."""
        curve = tuple((tokens, value) for tokens, value in data["curve"])
        by_pairs = {int(count): value for count, value in data["by_pairs"].items()}
        return cls(**{**data, "curve": curve, "by_pairs": by_pairs})


@dataclass(frozen=True, kw_only=True)
class Summary:
    """The runs of one model on one task, one per seed."""

    task: str  # name of the task
    model: str  # name of the model
    runs: tuple[ModelRun, ...]  # at least one run

    @property
    def finished_runs(self) -> tuple[ModelRun, ...]:
        """Runs that were not interrupted."""
        return tuple(run for run in self.runs if run.finished)

    @property
    def finished_values(self) -> list[float]:
        """Values of the finished runs, or of all runs if none finished."""
        return [run.value for run in self.finished_runs or self.runs if run.value is not None]

    @property
    def mean(self) -> float | None:
        """Mean of `finished_values`, ``None`` if there are none."""
        return statistics.fmean(self.finished_values) if self.finished_values else None

    @property
    def sd(self) -> float | None:
        """Standard deviation (n − 1) of at least 3 finite `finished_values`, or ``None``."""
        values = self.finished_values
        is_defined = len(values) > 2 and all(map(math.isfinite, values))
        return statistics.stdev(values) if is_defined else None

    @property
    def by_pairs(self) -> dict[int, tuple[float, float, float]]:
        """Mean, minimum and maximum of the accuracy by number of pairs."""
        values: dict[int, list[float]] = {}
        for run in self.finished_runs or self.runs:
            for count, accuracy in run.by_pairs.items():
                values.setdefault(count, []).append(accuracy)
        return {count: (statistics.fmean(x), min(x), max(x)) for count, x in values.items()}

    def format(self) -> str | None:
        """Return the mean with the standard deviation, or with both values if there are two."""
        if self.mean is None:
            return None
        if self.sd is not None:
            return f"{self.mean:.3f} ± {self.sd:.3f}"
        if len(self.finished_values) == 2:
            low, high = sorted(self.finished_values)
            return f"{self.mean:.3f} ({low:.3f}–{high:.3f})"
        return f"{self.mean:.3f}"

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-ready data."""
        return {
            "task": self.task,
            "model": self.model,
            "seeds": [run.seed for run in self.finished_runs],
            "value": self.mean,
            "sd": self.sd,
            "min": min(self.finished_values, default=None),
            "max": max(self.finished_values, default=None),
            "by_pairs": {str(count): mean for count, (mean, _, _) in self.by_pairs.items()},
        }


class ProgressReporter(Protocol):
    """Receives the progress of `compare`; with several processes, of several runs at once.

    Examples:
        >>> class PrintStart(rc.experiments.ProgressReporter):  # rc.compare(..., progress=...)
        ...     def on_start(self, task, model, parameters, steps):
        ...         print(f"{model} on {task}: {parameters:,} parameters, {steps} steps")
        >>> PrintStart().on_start("mqar", "gla", 10_000, 600)
        gla on mqar: 10,000 parameters, 600 steps
    """

    def on_start(self, task: str, model: str, parameters: int, steps: int) -> None:
        """Receive the start of a run.

        Args:
            task, model: Name of the task, and label of the run.
            parameters, steps: Numbers of trained parameters and of training steps.
        """

    def on_step(
        self, task: str, model: str, step: int, loss: float | None, history: History
    ) -> None:
        """Receive a training step. Other processes send at most ten per second.

        Args:
            task, model: Name of the task, and label of the run.
            step: Number of the step, from 1.
            loss: Latest mean training loss in nats, ``None`` at the beginning.
            history: Measurements up to now.
        """

    def on_end(self, run: ModelRun) -> None:
        """Receive a run that is finished or interrupted."""

    def on_failure(self, task: str, model: str, message: str) -> None:
        """Receive the failure of a run, also of one that did not start.

        Args:
            task, model: Name of the task, and label of the run.
            message: Reason, as a sentence.
        """


class NoProgress(ProgressReporter):
    """Ignores all progress events."""
