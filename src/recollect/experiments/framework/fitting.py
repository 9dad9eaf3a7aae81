"""One training loop for all task models: a grid of learning rates, early stop, lengths that grow.

A task model maps a batch of inputs to logits ``[B, T, classes]``. `training_steps` is the loop;
`fit` takes its batches from a generator of their own, so that every model of a grid sees the same
ones, and `recollect.experiments.comparison.training` from examples drawn beforehand.
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
    "Budget",
    "Fit",
    "TrainingStep",
    "accuracy",
    "asked_loss",
    "fit",
    "heldout_generator",
    "rate_at",
    "training_steps",
]

LOST = 20
"""So many steps in a row without a finite gradient, and training has diverged."""

Draw = Callable[[torch.Generator, int], tuple[Tensor, Tensor]]
"""Draws a batch (inputs, labels) at a level of the curriculum."""


@dataclass(frozen=True, kw_only=True)
class Budget(Validated):
    """How a task model is trained: AdamW with warm-up.

    Attributes:
        steps: of the optimizer, for each learning rate.
        lrs: peak learning rates to try, in this order.
        weight_decay: AdamW's. clip: largest gradient norm.
        warmup: share of the steps spent warming up. decay: after it, ``"cosine"`` or ``"linear"``
            to zero, or ``"none"``.
        evaluations: how often the model is measured.
        solved: a measured value that ends training, and the search for a learning rate.
        promoted: accuracy on the last batches that lengthens the task, where it has several levels.
    """

    steps: int = integer(at_least=1)
    lrs: tuple[float, ...]
    weight_decay: float = number(0.01, at_least=0)
    clip: float = 1.0
    warmup: float = number(0.05, at_least=0, at_most=1)
    decay: str = option("cosine", "linear", "none")
    evaluations: int = integer(10, at_least=1)
    solved: float = 0.999
    promoted: float = 0.99

    def validate(self) -> None:
        if not self.lrs:
            raise ValueError("Budget: lrs must have at least one learning rate")

    @classmethod
    def from_config(cls, config: Mapping[str, Any], **values: Any) -> Budget:
        """Read the fields that a configuration contains, by name.

        Args:
            config: configuration of an experiment.
            **values: fields that replace those of the configuration.
        """
        known = {f.name: config[f.name] for f in fields(cls) if f.name in config} | values
        return cls(**{**known, "lrs": tuple(known["lrs"])})

    def rate(self, step: int) -> float:
        """The learning rate at a step, in units of the peak."""
        return rate_at(step, self.steps, self.warmup, self.decay)


def rate_at(
    step: int, steps: int, warmup: float, decay: str = "cosine", *, from_zero: bool = False
) -> float:
    """The learning rate at a step, in units of the peak.

    Args:
        step: from 0.
        steps: of the whole run.
        warmup: share of the steps spent warming up, one at least.
        decay: after it, ``"cosine"`` or ``"linear"`` to zero, or ``"none"``.
        from_zero: whether the first step has the rate 0; otherwise the last of the warm-up has the
            peak.
    """
    warm = max(1, round(warmup * steps))
    if step < warm:
        return (step if from_zero else step + 1) / warm
    share = (step - warm) / max(1, steps - warm)
    if decay == "cosine":
        return 0.5 * (1 + math.cos(math.pi * share))
    return 1 - share if decay == "linear" else 1.0


@dataclass(frozen=True, kw_only=True)
class TrainingStep:
    """A step of the loop.

    Attributes:
        number: of the step, from 1.
        loss: mean cross entropy of its batch in nats, before the step.
        logits, labels: of its batch.
        finite: whether loss and gradient were.
    """

    number: int
    loss: float
    logits: Tensor
    labels: Tensor
    finite: bool


def training_steps(
    model: nn.Module,
    batches: Iterable[tuple[Tensor, Tensor]],
    optimizer: torch.optim.Optimizer,
    rate: Callable[[int], float],
    *,
    clip: float,
    predict: Callable[[Tensor], Tensor] | None = None,
) -> Iterator[TrainingStep]:
    """Train a model, and give every step as it is taken.

    A step without a finite loss and gradient leaves the weights as they are. Where tokens are
    routed to memories, what is minimised holds the routers' load-balancing loss too, as in a
    language model's own training; the loss that is told does not.

    Args:
        model: trained in place, on the device where it is.
        batches: (inputs, labels) of each step, drawn when it begins; labels
            `recollect.tasks.IGNORE` ask nothing.
        optimizer: of the model's parameters.
        rate: the learning rate of a step, counted from 0.
        clip: largest gradient norm.
        predict: logits ``[B, T, classes]`` of inputs; the model itself if omitted.
    """
    device = next(model.parameters()).device
    for step, (inputs, labels) in enumerate(batches):
        for group in optimizer.param_groups:
            group["lr"] = rate(step)
        model.train()
        with record_routing(model) as routings:
            logits, labels = (predict or model)(inputs.to(device)), labels.to(device)
        loss = asked_loss(logits, labels)
        optimizer.zero_grad()
        (loss + _balance(model, routings)).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), clip)
        value = float(loss.detach())
        finite = math.isfinite(value) and math.isfinite(float(norm))
        if finite:
            optimizer.step()
        yield TrainingStep(
            number=step + 1, loss=value, logits=logits.detach(), labels=labels, finite=finite
        )


def _balance(model: nn.Module, routings: Sequence[Routing]) -> Tensor | float:
    """The routers' mean balance loss, times what a language model's configuration says."""
    share = getattr(getattr(model, "config", None), "router_aux_loss_coef", 0.0)
    if not routings or not share:
        return 0.0
    return share * torch.stack([routing.balance_loss for routing in routings]).mean()


def asked_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean cross entropy of logits ``[B, T, classes]`` in nats, over the labels that ask."""
    return functional.cross_entropy(
        logits.flatten(0, 1).float(), labels.flatten(), ignore_index=IGNORE
    )


@dataclass(kw_only=True)
class Fit:
    """A trained model and how it came about.

    Attributes:
        value: the best measured on the way; NaN when training diverged at every rate before it
            was measured.
        lr: the learning rate that reached it. steps: begun at that rate, lost ones among them;
            spent: at all rates.
        curve: (step, value) of that rate.
        levels: (step, level) of every lengthening.
        lost: steps that were not taken, for their gradient was not finite; `LOST` in a row end
            training.
    """

    model: nn.Module
    value: float
    lr: float
    steps: int
    spent: int = 0
    curve: list[tuple[int, float]] = field(default_factory=list)
    levels: list[tuple[int, int]] = field(default_factory=list)
    lost: int = 0


def heldout_generator(seed: int) -> torch.Generator:
    """Return the generator of the test examples of a seed."""
    return torch.Generator().manual_seed(1_000_003 + seed)


def accuracy(model: nn.Module, inputs: Tensor, labels: Tensor, *, batch: int = 256) -> float:
    """The share of labels that the model's largest logit names; 0 where nothing is asked."""
    right = asked = 0
    device = next(model.parameters()).device
    was = model.training
    model.eval()
    with torch.no_grad():
        for some, wanted in zip(inputs.split(batch), labels.split(batch), strict=True):
            wanted = wanted.to(device)
            here = wanted != IGNORE
            right += int(((model(some.to(device)).argmax(-1) == wanted) & here).sum())
            asked += int(here.sum())
    model.train(was)
    return right / max(1, asked)


def fit(
    make: Callable[[], nn.Module],
    draw: Draw,
    evaluate: Callable[[nn.Module], float],
    budget: Budget,
    *,
    seed: int,
    device: torch.device | str = "cpu",
    levels: Sequence[int] = (0,),
) -> Fit:
    """Train a model at each learning rate until one solves the task; the best one is returned.

    Args:
        make: a new model; its weights follow torch's global generator, which is seeded here.
        draw: batches.
        evaluate: measures a model, higher is better.
        seed: of weights and batches.
        levels: of the curriculum; with several, the next begins when the last batches were
            answered as well as ``budget.promoted`` says.
    """
    best: Fit | None = None
    spent = 0
    for lr in budget.lrs:
        torch.manual_seed(seed)
        found = _at_rate(make().to(device), draw, evaluate, budget, lr, seed, levels)
        spent += found.steps
        if best is None or not found.value <= best.value:
            best = found if best is None or not math.isnan(found.value) else best
        if best.value >= budget.solved and len(levels) == 1:
            break
    assert best is not None
    best.spent = spent
    return best


def _at_rate(
    model: nn.Module,
    draw: Draw,
    evaluate: Callable[[nn.Module], float],
    budget: Budget,
    lr: float,
    seed: int,
    levels: Sequence[int],
) -> Fit:
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=budget.weight_decay)
    every = max(1, budget.steps // budget.evaluations)
    found = Fit(model=model, value=math.nan, lr=lr, steps=0)
    recent, lost = 0.0, 0
    for step in training_steps(
        model,
        (draw(generator, levels[len(found.levels)]) for _ in range(budget.steps)),
        optimizer,
        lambda at: lr * budget.rate(at),
        clip=budget.clip,
    ):
        found.steps = step.number
        # No weight becomes NaN, so that what was learned before can be measured.
        lost = 0 if step.finite else lost + 1
        found.lost += not step.finite
        if lost == LOST:
            break
        level = len(found.levels)
        if level + 1 < len(levels):
            asked = step.labels != IGNORE
            right = float((step.logits.argmax(-1) == step.labels)[asked].float().mean())
            recent = 0.8 * recent + 0.2 * right
            if recent >= budget.promoted:
                recent = 0.0
                found.levels.append((step.number, levels[level + 1]))
        if found.steps % every == 0 or found.steps == budget.steps:
            value = evaluate(model)
            found.curve.append((found.steps, value))
            if not value <= found.value:
                found.value = value
            if value >= budget.solved and len(found.levels) + 1 == len(levels):
                break
    return found
