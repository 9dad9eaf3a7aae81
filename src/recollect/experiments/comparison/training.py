"""One training loop for every task model: `transformers.Trainer`, with its noise turned off.

Examples are drawn beforehand from a generator, so every model of a comparison sees the same tokens
in the same order. What is measured on the way is kept by a callback, so an interrupted run keeps
it.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset
from transformers import Trainer, TrainerCallback, TrainingArguments

from recollect.lm.training.weight_decay import decayed_names
from recollect.tasks.mqar import IGNORE

__all__ = ["Examples", "History", "Schedule", "token_loss", "train"]


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """How a model is trained: AdamW, linear warm-up, cosine to zero.

    Attributes:
        steps: optimizer steps.
        batch: examples per step.
        lr: peak learning rate.
        warmup: share of the steps spent warming up.
        weight_decay: AdamW's, on the weights that `recollect.lm.parameter_groups` names.
        clip: largest gradient norm.
        evaluations: how many points the learning curve has.
    """

    steps: int
    batch: int
    lr: float = 3e-3
    warmup: float = 0.1
    weight_decay: float = 0.1
    clip: float = 1.0
    evaluations: int = 5

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "evaluations"):
            if getattr(self, name) < 1:
                raise ValueError(f"Schedule: {name} must be at least 1, not {getattr(self, name)}")
        if not (math.isfinite(self.lr) and self.lr > 0):
            raise ValueError(f"Schedule: lr must be a finite number above 0, not {self.lr}")

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


class Examples(Dataset[dict[str, Tensor]]):
    """(inputs, labels) pairs held in memory; labels are aligned with inputs, not shifted."""

    def __init__(self, batches: Iterable[tuple[Tensor, Tensor]]) -> None:
        inputs, labels = zip(*batches, strict=True)
        self.inputs, self.labels = list(torch.cat(inputs)), list(torch.cat(labels))

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.inputs[index], "labels": self.labels[index]}


def token_loss(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    """Mean cross entropy in nats over labels that ask something."""
    return functional.cross_entropy(
        outputs.logits.flatten(0, 1).float(), labels.flatten(), ignore_index=IGNORE
    )


Watch = Callable[[int, float | None, History], None]


class _Keeper(TrainerCallback):
    """Times steps, evaluates at checkpoints, and tells whoever watches."""

    def __init__(
        self,
        history: History,
        schedule: Schedule,
        tokens_per_step: int,
        evaluate: Callable[[nn.Module], float],
        watch: Watch | None,
    ) -> None:
        self.history, self.schedule = history, schedule
        self.tokens_per_step, self.evaluate, self.watch = tokens_per_step, evaluate, watch
        self.began = 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.began = time.perf_counter()

    def on_step_end(
        self, args: Any, state: Any, control: Any, model: nn.Module | None = None, **kwargs: Any
    ) -> None:
        history, step = self.history, state.global_step
        history.seconds += time.perf_counter() - self.began
        history.tokens += self.tokens_per_step
        if step in self.schedule.checkpoints and model is not None:
            history.curve.append((history.tokens, self.evaluate(model)))
        if self.watch is not None:
            loss = history.losses[-1][1] if history.losses else None
            self.watch(step, loss, history)

    def on_log(
        self,
        args: Any,
        state: Any,
        control: Any,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        if logs and "loss" in logs:
            self.history.losses.append((state.global_step, float(logs["loss"])))


class _Trainer(Trainer):
    """The Trainer, with weight decay where `recollect.lm.parameter_groups` has it."""

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        return decayed_names(model)


def train(
    model: nn.Module,
    examples: Examples,
    schedule: Schedule,
    *,
    evaluate: Callable[[nn.Module], float],
    seed: int,
    history: History,
    watch: Watch | None = None,
) -> None:
    """Train a model in place, filling ``history`` as it goes.

    Args:
        model: called as ``model(input_ids=...)``, answers ``.logits``.
        evaluate: measures the model; called at the schedule's checkpoints in evaluation mode.
        seed: of the order of examples.
        history: filled while training runs, so that an interrupt loses nothing.
        watch: called after every step with the step, the latest logged loss and the history.
    """

    def measure(module: nn.Module) -> float:
        module.eval()
        with torch.no_grad():
            value = evaluate(module)
        module.train()
        return value

    length = examples.inputs[0].numel()
    with tempfile.TemporaryDirectory() as scratch:
        arguments = TrainingArguments(
            output_dir=scratch,
            max_steps=schedule.steps,
            per_device_train_batch_size=schedule.batch,
            learning_rate=schedule.lr,
            lr_scheduler_type="cosine",
            warmup_steps=max(1, round(schedule.warmup * schedule.steps)),
            weight_decay=schedule.weight_decay,
            max_grad_norm=schedule.clip,
            logging_steps=10,
            save_strategy="no",
            eval_strategy="no",
            report_to=[],
            disable_tqdm=True,
            seed=seed,
            data_seed=seed,
            dataloader_pin_memory=False,
        )
        keeper = _Keeper(history, schedule, schedule.batch * length, measure, watch)
        trainer = _Trainer(
            model=model,
            args=arguments,
            train_dataset=examples,
            callbacks=[keeper],
            compute_loss_func=token_loss,
        )
        _silence(trainer)
        trainer.train()
    history.finished = True


def _silence(trainer: Trainer) -> None:
    """Drop the callback that prints every log line; progress is shown by whoever watches."""
    from transformers import PrinterCallback

    trainer.remove_callback(PrinterCallback)
