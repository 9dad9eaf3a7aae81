"""Training loop of task models: a grid of learning rates, early stopping and training in stages.

A task model maps a batch of inputs to logits ``[B, T, classes]``. `training_steps` is the loop.
`fit` draws its batches from a seeded generator, so that all models of a grid have the same batches.
`recollect.experiments.comparison.training` passes examples that were drawn in advance.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from recollect.blocks.routed import Routing, record_routing
from recollect.fields import Validated, integer, number, option
from recollect.tasks.mqar import IGNORE

__all__ = [
    "Batch",
    "Budget",
    "FitResult",
    "Stage",
    "TrainingStep",
    "accuracy",
    "fit",
    "heldout_generator",
    "rate_at",
    "training_steps",
]

MAX_SKIPPED_STEPS = 20
"""Number of consecutive steps without a finite gradient after which training has diverged."""

Batch = tuple[Tensor, Tensor]
"""Inputs and labels. Labels equal to `recollect.tasks.IGNORE` do not count."""

BatchFunction = Callable[[torch.Generator], Batch]


@dataclass(frozen=True, kw_only=True)
class Budget(Validated):
    """Training configuration of a task model: AdamW with warm-up and decay."""

    steps: int = integer(at_least=1)  # number of optimizer steps for each learning rate
    lrs: tuple[float, ...]  # peak learning rates, in the order in which they are tried
    weight_decay: float = number(0.01, at_least=0)  # weight decay of AdamW
    clip: float = 1.0  # maximum norm of the gradient
    warmup: float = number(0.05, at_least=0, at_most=1)  # fraction of the steps for the warm-up
    # schedule after the warm-up: "cosine" or "linear" to zero, or "none"
    decay: str = option("cosine", "linear", "none")
    # Fraction of the steps after which the decay begins. The learning rate is constant between
    # warm-up and decay.
    decay_start: float = number(0.0, at_least=0, at_most=1)
    evaluations: int = integer(10, at_least=1)  # number of evaluations during training
    # value of an evaluation that ends the training and the search of a learning rate
    solved: float = 0.999
    promoted: float = 0.99  # training accuracy that starts the next `Stage`

    def validate(self) -> None:
        if not self.lrs:
            raise ValueError("Budget: lrs must have at least one learning rate")

    @classmethod
    def from_config(cls, config: Mapping[str, Any], **values: Any) -> Budget:
        """Read the fields that a configuration contains, by name."""
        known = {f.name: config[f.name] for f in fields(cls) if f.name in config} | values
        return cls(**{**known, "lrs": tuple(known["lrs"])})

    def rate(self, step: int) -> float:
        """Return the learning rate of a step as a multiple of the peak."""
        return rate_at(step, self.steps, self.warmup, self.decay, decay_start=self.decay_start)


def rate_at(
    step: int,
    steps: int,
    warmup: float,
    decay: str = "cosine",
    *,
    decay_start: float = 0.0,
    from_zero: bool = False,
) -> float:
    """Return the learning rate of a step, counted from 0, as a multiple of the peak.

    The warm-up has at least one step. Its last step has the peak rate, or, if ``from_zero``, its
    first step has the rate 0.
    """
    warm = max(1, round(warmup * steps))
    if step < warm:
        return (step if from_zero else step + 1) / warm
    start = max(warm, round(decay_start * steps))
    progress = max(0, step - start) / max(1, steps - start)
    if decay == "cosine":
        return 0.5 * (1 + math.cos(math.pi * progress))
    return 1 - progress if decay == "linear" else 1.0


@dataclass(frozen=True, kw_only=True)
class TrainingStep:
    """One step of the training loop."""

    number: int  # counted from 1
    loss: float  # mean cross entropy of the batch in nats, before the update
    logits: Tensor
    labels: Tensor
    finite: bool  # whether the loss and the gradient are finite


def training_steps(
    model: nn.Module,
    batches: Iterable[Batch],
    optimizer: torch.optim.Optimizer,
    rate: Callable[[int], float],
    *,
    clip: float,
    predict: Callable[[Tensor], Tensor] | None = None,
) -> Iterator[TrainingStep]:
    """Train a model in place and yield every step.

    A step without a finite loss and gradient leaves the weights unchanged. If the model routes
    tokens to memories, the objective includes the load-balancing loss of the routers. The loss of a
    `TrainingStep` excludes it. ``rate`` returns the learning rate of a step, counted from 0, and
    ``predict`` the logits ``[B, T, classes]`` of inputs (by default, the model does).
    """
    device = next(model.parameters()).device
    for step, (inputs, labels) in enumerate(batches):
        for group in optimizer.param_groups:
            group["lr"] = rate(step)
        model.train()
        with record_routing(model) as routings:
            logits, labels = (predict or model)(inputs.to(device)), labels.to(device)
        loss = functional.cross_entropy(
            logits.flatten(0, 1).float(), labels.flatten(), ignore_index=IGNORE
        )
        optimizer.zero_grad()
        (loss + _router_balance_loss(model, routings)).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), clip)
        value = float(loss.detach())
        finite = math.isfinite(value) and math.isfinite(float(norm))
        if finite:
            optimizer.step()
        yield TrainingStep(
            number=step + 1, loss=value, logits=logits.detach(), labels=labels, finite=finite
        )


def _router_balance_loss(model: nn.Module, routings: Sequence[Routing]) -> Tensor | float:
    """Return the mean balance loss of the routers times ``config.router_aux_loss_coef``."""
    coefficient = getattr(getattr(model, "config", None), "router_aux_loss_coef", 0.0)
    if not routings or not coefficient:
        return 0.0
    return coefficient * torch.stack([routing.balance_loss for routing in routings]).mean()


def heldout_generator(seed: int) -> torch.Generator:
    """Return the generator of the test examples of a seed."""
    return torch.Generator().manual_seed(1_000_003 + seed)


def accuracy(model: nn.Module, inputs: Tensor, labels: Tensor, *, batch: int = 256) -> float:
    """Return the fraction of labels with the largest logit; 0 if no label counts."""
    correct = total = 0
    device = next(model.parameters()).device
    was_training = model.training
    model.eval()
    with torch.no_grad():
        for x, y in zip(inputs.split(batch), labels.to(device).split(batch), strict=True):
            has_label = y != IGNORE
            correct += int(((model(x.to(device)).argmax(-1) == y) & has_label).sum())
            total += int(has_label.sum())
    model.train(was_training)
    return correct / max(1, total)


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One stage of a training, for example one length of the texts."""

    draw: BatchFunction  # function that draws a batch from a generator
    # Number of steps after which the next stage begins. If None, the next stage begins when the
    # running accuracy on the training batches reaches Budget.promoted.
    steps: int | None = None


@dataclass(kw_only=True)
class FitResult:
    """A trained model and its learning curve."""

    model: nn.Module  # the model after its last step
    lr: float  # peak learning rate
    value: float = math.nan  # the largest value of an evaluation; NaN without an evaluation
    steps: int = 0  # number of steps, including skipped steps
    # step and value of each evaluation
    curve: list[tuple[int, float]] = field(default_factory=list)
    # step after which each stage but the first began
    stage_starts: list[int] = field(default_factory=list)
    # number of steps that were skipped because their gradient was not finite
    skipped_steps: int = 0


def fit(
    make: Callable[[], nn.Module],
    stages: BatchFunction | Sequence[Stage],
    evaluate: Callable[[nn.Module], float] | None,
    budget: Budget,
    *,
    seed: int,
    device: torch.device | str = "cpu",
) -> FitResult:
    """Train a model at each learning rate until one solves the task, and return the best result.

    The weights of a new model follow the global generator of torch, which this function seeds.
    Higher values of ``evaluate`` are better.
    """
    if not isinstance(stages, Sequence):
        stages = [Stage(draw=stages)]
    best: FitResult | None = None
    for lr in budget.lrs:
        torch.manual_seed(seed)
        result = _train_at_lr(make().to(device), stages, evaluate, budget, lr, seed)
        if (
            best is None
            or result.value > best.value
            or (math.isnan(best.value) and not math.isnan(result.value))
        ):
            best = result
        if best.value >= budget.solved and len(stages) == 1:
            break
    assert best is not None
    return best


def _train_at_lr(
    model: nn.Module,
    stages: Sequence[Stage],
    evaluate: Callable[[nn.Module], float] | None,
    budget: Budget,
    lr: float,
    seed: int,
) -> FitResult:
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=budget.weight_decay)
    interval = max(1, budget.steps // budget.evaluations)
    result = FitResult(model=model, lr=lr)
    starts = result.stage_starts
    running_accuracy, num_consecutive = 0.0, 0
    for step in training_steps(
        model,
        (stages[len(starts)].draw(generator) for _ in range(budget.steps)),
        optimizer,
        lambda index: lr * budget.rate(index),
        clip=budget.clip,
    ):
        result.steps = step.number
        num_consecutive = 0 if step.finite else num_consecutive + 1
        result.skipped_steps += not step.finite
        if num_consecutive == MAX_SKIPPED_STEPS:
            break
        if len(starts) + 1 < len(stages):
            stage_steps = stages[len(starts)].steps
            if stage_steps is None:
                has_label = step.labels != IGNORE
                correct = (step.logits.argmax(-1) == step.labels)[has_label]
                running_accuracy = 0.8 * running_accuracy + 0.2 * float(correct.float().mean())
                is_over = running_accuracy >= budget.promoted
            else:
                is_over = step.number - (starts[-1] if starts else 0) == stage_steps
            if is_over:
                running_accuracy = 0.0
                starts.append(step.number)
        if evaluate is not None and (step.number % interval == 0 or step.number == budget.steps):
            value = evaluate(model)
            result.curve.append((step.number, value))
            if not value <= result.value:
                result.value = value
            if value >= budget.solved and len(starts) + 1 == len(stages):
                break
    return result
