"""Training of a comparison's models: their schedule, their history, and the loop's inputs.

Examples are drawn beforehand from a generator, so every model of a comparison sees the same tokens
in the same order. What is measured on the way is kept in a history, so an interrupted run keeps it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor, nn

from recollect.experiments.framework.fitting import (
    TrainingStep,
    asked_loss,
    rate_at,
    training_steps,
)
from recollect.fields import Validated, integer, number
from recollect.lm.training.divergence import (
    INNER_STEPS_HINT,
    NUMERICAL_ERRORS,
    Diverged,
    find_origin,
)
from recollect.lm.training.weight_decay import parameter_groups
from recollect.report.devices import resolve_device

__all__ = ["History", "Schedule", "measured", "train"]

T = TypeVar("T")

LOGGED = 10
"""Steps of which a logged loss is the mean."""


@dataclass(frozen=True, kw_only=True)
class Schedule(Validated):
    """How a model is trained: AdamW, linear warm-up, cosine to zero.

    Attributes:
        steps: optimizer steps.
        batch: examples per step.
        lr: peak learning rate.
        warmup: share of the steps spent warming up.
        weight_decay: AdamW's, on the weights that `recollect.lm.parameter_groups` names.
        clip: largest gradient norm.
        evaluations: how many points the learning curve has.

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

    def rate(self, step: int) -> float:
        """The learning rate at a step, counted from 0."""
        return self.lr * rate_at(step, self.steps, self.warmup, from_zero=True)

    @property
    def checkpoints(self) -> list[int]:
        """Steps after which the curve gets a point; the last is the end."""
        parts = min(self.evaluations, self.steps)
        return sorted({round(self.steps * (i + 1) / parts) for i in range(parts)})


@dataclass(kw_only=True)
class History:
    """What was measured, also when training stopped early.

    Attributes:
        curve: (tokens seen, measured value).
        losses: (step, training loss in nats per token).
        seconds: spent in optimizer steps, evaluation excluded.
        tokens: seen in training.
        finished: whether all steps were taken.
    """

    curve: list[tuple[int, float]] = field(default_factory=list)
    losses: list[tuple[int, float]] = field(default_factory=list)
    seconds: float = 0.0
    tokens: int = 0
    finished: bool = False

    @property
    def tokens_per_second(self) -> float:
        """Training throughput, 0 before the first step."""
        return self.tokens / self.seconds if self.seconds else 0.0


Watch = Callable[[int, float | None, History], None]


def train(
    model: nn.Module,
    examples: tuple[Tensor, Tensor],
    schedule: Schedule,
    *,
    evaluate: Callable[[nn.Module], float],
    seed: int,
    history: History,
    watch: Watch | None = None,
    device: torch.device | None = None,
) -> None:
    """Train a model in place, filling ``history`` as it goes.

    Args:
        model: called as ``model(input_ids=...)``, answers ``.logits``.
        examples: inputs and labels aligned with them, enough for all steps.
        schedule: how many steps, and at which rate.
        evaluate: measures the model; called at the schedule's checkpoints in evaluation mode.
        seed: of the order of examples.
        history: filled while training runs, so that an interrupt loses nothing.
        watch: called after every step with the step, the latest logged loss and the history.
        device: where; by default as `resolve_device` chooses.

    Raises:
        Diverged: a loss or a gradient that is not finite.
    """
    model.to(device or resolve_device(None, argument_name="device"))
    inputs, labels = examples
    order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(seed))
    some = order[: schedule.steps * schedule.batch].split(schedule.batch)

    def batch(number: int) -> tuple[Tensor, Tensor]:
        at = some[number - 1]
        return inputs[at], labels[at]

    steps = training_steps(
        model,
        map(batch, range(1, len(some) + 1)),
        # Fused, as the numbers in results/ were made: rounding differs otherwise.
        torch.optim.AdamW(parameter_groups(model, weight_decay=schedule.weight_decay), fused=True),
        schedule.rate,
        clip=schedule.clip,
        predict=lambda x: model(input_ids=x).logits,
    )
    recent: list[float] = []
    began = time.perf_counter()
    for step in _finite(steps, model, batch, schedule):
        history.seconds += time.perf_counter() - began
        history.tokens += schedule.batch * inputs[0].numel()
        recent.append(step.loss)
        if len(recent) == LOGGED:
            history.losses.append((step.number, sum(recent) / LOGGED))
            recent.clear()
        if step.number in schedule.checkpoints:
            model.eval()
            with torch.no_grad():
                history.curve.append((history.tokens, measured(model, evaluate, step.number)))
        if watch is not None:
            watch(step.number, history.losses[-1][1] if history.losses else None, history)
        began = time.perf_counter()
    history.finished = True


def measured(model: nn.Module, evaluate: Callable[[nn.Module], T], step: int) -> T:
    """What ``evaluate`` finds, without a gradient.

    Args:
        model: in evaluation mode.
        evaluate: measures it.
        step: how many it has taken.

    Raises:
        Diverged: a layer gives what is not finite; examples may be longer than those of training.
    """
    try:
        return evaluate(model)
    except NUMERICAL_ERRORS as error:

        def again() -> list[Tensor]:
            evaluate(model)
            return []

        if (origin := find_origin(model, again)) is None:
            raise
        raise Diverged(
            step=step, lr=None, origin=f"when it is measured, {origin}", advice=INNER_STEPS_HINT
        ) from error


def _finite(
    steps: Iterator[TrainingStep],
    model: nn.Module,
    batch: Callable[[int], tuple[Tensor, Tensor]],
    schedule: Schedule,
) -> Iterator[TrainingStep]:
    """The steps, up to one whose loss or gradient is not finite.

    Raises:
        Diverged: there is such a step.
    """

    def diverged(number: int, *, sure: bool) -> Diverged | None:
        inputs, labels = (x.to(next(model.parameters()).device) for x in batch(number))
        origin = find_origin(model, lambda: [asked_loss(model(input_ids=inputs).logits, labels)])
        if origin is None and not sure:
            return None
        return Diverged(
            step=number,
            lr=schedule.rate(number - 1),
            origin=origin,
            advice="take a lower lr",
        )

    number = 0
    while True:
        number += 1
        try:
            step = next(steps, None)
        except NUMERICAL_ERRORS as error:
            if (found := diverged(number, sure=False)) is None:
                raise
            raise found from error
        if step is None:
            return
        if not step.finite and (found := diverged(number, sure=True)) is not None:
            raise found
        yield step
