"""Events, summary and result of a training run, and the callback that measures throughput."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from transformers import PreTrainedModel, TrainerCallback

from recollect.lm.distributed.parallel_dims import ParallelDims
from recollect.lm.model.config import RecollectConfig
from recollect.lm.model.model import RecollectForCausalLM
from recollect.lm.training.plan import TrainPlan

__all__ = [
    "Progress",
    "SilentObserver",
    "ThroughputCallback",
    "TrainObserver",
    "Trained",
    "summarize_run",
]


_PARAMETER_GROUPS = (
    ("embed_tokens.", "embedding"),
    (".layer.", "memory layers"),
    (".self_attn.", "attention"),
    (".mlp.", "MLPs"),
    ("lm_head.", "head"),
    ("", "norms"),
)


def summarize_run(
    plan: TrainPlan,
    model: RecollectForCausalLM,
    *,
    device: torch.device,
    layout: ParallelDims,
    first_step: int,  # number of the first step, from 1
) -> dict[str, str]:
    """Return the lines of the summary that is printed before the first step, by name."""
    counts = dict.fromkeys((group for _, group in _PARAMETER_GROUPS), 0)
    for name, weight in model.named_parameters():
        if weight.requires_grad:
            counts[next(g for part, g in _PARAMETER_GROUPS if part in name)] += weight.numel()
    layers = [f"{count} × {name}" for name, count in Counter(_layer_names(model)).items()]
    groups = [f"{name} {count:,}" for name, count in counts.items() if count]
    rows, tokens = plan.optimizer.batch * plan.optimizer.accumulate, plan.tokens_per_step
    step = f"{rows:,} × {plan.data.context:,} = {tokens:,} tokens"
    if plan.data.segments > 1:
        step += f", each row in {plan.data.segments:,} segments"
    run = f"{plan.steps:,} steps, {plan.steps * tokens:,} tokens"
    if first_step > 1:
        run += f", from step {first_step:,} on"
    devices = str(device) if layout.world_size == 1 else f"{device.type}, {layout}"
    dtype = "float32, matrix products in bfloat16" if plan.run.bf16 else "float32"
    out, save_every = Path(plan.run.out), plan.run.save_every
    checkpoints = "a checkpoint when interrupted"
    if save_every:
        checkpoints = f"a checkpoint every {save_every:,} steps (the last {plan.run.keep} stay)"
    return {
        "model": f"layers: {', '.join(layers)}; width {model.config.hidden_size:,}",
        "parameters": f"{sum(counts.values()):,}: {', '.join(groups)}",
        "step": step,
        "run": run,
        "device": f"{devices}, {dtype}",
        "out": f"{out}: {checkpoints}, and at the end {out / 'model'}",
    }


def _layer_names(model: PreTrainedModel) -> list[str]:
    """Return the names of a model's layers; those of another decoder are memory or attention."""
    config: Any = model.config
    if isinstance(config, RecollectConfig):
        return list(config.layer_names)
    swaps = [swap for swap in getattr(config, "swaps", ()) if swap.get("part") != "mlp"]
    replaced = {index for swap in swaps for index in swap["layers"]}
    depth = config.get_text_config(decoder=True).num_hidden_layers
    return ["memory" if index in replaced else "attention" for index in range(depth)]


@dataclass(frozen=True, kw_only=True)
class Progress:
    """State of a run after a step.

    Attributes:
        step: Number of steps taken.
        steps: Number of steps of the whole run.
        loss: Last logged loss in nats per token. At the end of the run, the mean of its last steps.
        loss_step: Step of that log line.
        tokens_per_second: Throughput since the last log line, without saving and evaluation.
        ceiling_share: Model FLOP/s as a fraction of the FLOP/s of one large matrix product.
        heldout: Last held-out loss in bits per byte.
        heldout_loss: Last held-out loss in nats per token.

    Examples:
        >>> progress = rc.lm.Progress(step=50, steps=100, loss=2.31, loss_step=50)
        >>> progress.step / progress.steps
        0.5
    """

    step: int
    steps: int
    loss: float | None = None
    loss_step: int = 0
    tokens_per_second: float = 0.0
    ceiling_share: float = 0.0
    heldout: float | None = None
    heldout_loss: float | None = None


class TrainObserver(Protocol):
    """Receives the events of a run in the first process; subclasses override what they need.

    Examples:
        >>> class PrintLoss(rc.lm.TrainObserver):  # rc.lm.train(..., observer=PrintLoss())
        ...     def on_progress(self, progress):
        ...         print(f"step {progress.step}: {progress.loss}")
        >>> PrintLoss().on_progress(rc.lm.Progress(step=3, steps=9, loss=2.5))
        step 3: 2.5
    """

    def on_start(self, summary: Mapping[str, str]) -> None:
        """Receive the lines of the run's summary, by name, before its first step."""

    def on_progress(self, progress: Progress) -> None:
        """Receive the state after every step, log line and evaluation."""

    def on_message(self, message: str) -> None:
        """Receive a message to the user."""


class SilentObserver(TrainObserver):
    """Ignores all events."""


@dataclass(frozen=True, kw_only=True)
class Trained:
    """Result of a run.

    Attributes:
        model: The trained model.
        folder: Folder of the saved model and its tokenizer.
        steps: Number of steps that this call took.
        tokens: Number of tokens that this call read.
        seconds: Duration of the training loop of this call.
        loss: Mean loss of the last ten steps of this call in nats per token; ``None`` without a
            step.
        heldout: Held-out loss in bits per byte; ``None`` without held-out rows.
        heldout_loss: Held-out loss in nats per token.
        skipped: Number of skipped lines.
        skipped_lines: The first skipped lines.
        notes: Warnings about the run.
        history: Log lines of the whole run, with ``step`` and either ``loss`` and
            ``tokens_per_second`` or ``eval_bits_per_byte``.

    Examples:
        >>> from dataclasses import fields  # of rc.lm.train(plan)
        >>> [field.name for field in fields(rc.lm.Trained)][:3]
        ['model', 'folder', 'steps']
    """

    model: RecollectForCausalLM
    folder: Path
    steps: int
    tokens: int
    seconds: float
    loss: float | None
    heldout: float | None
    heldout_loss: float | None
    skipped: int = 0
    skipped_lines: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    history: tuple[Mapping[str, float], ...] = ()


class ThroughputCallback(TrainerCallback):
    """Measures tokens per second, with the time that steps wait for rows."""

    def __init__(
        self,
        plan: TrainPlan,
        *,
        flops_per_token: float,
        peak_flops: float,  # FLOP/s of one large matrix product on all devices
        observer: TrainObserver,
    ) -> None:
        self.tokens_per_step = plan.tokens_per_step
        self.flops_per_token, self.peak_flops = flops_per_token, peak_flops
        self.observer = observer
        self.progress = Progress(step=0, steps=plan.steps)
        self.steps_taken = 0
        self._clock: float | None = None  # None while no step is being timed
        self._steps_since_log, self._seconds_since_log = 0, 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._clock is None:
            self._clock = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        now = time.perf_counter()
        self._seconds_since_log += now - (now if self._clock is None else self._clock)
        self._clock = now
        self._steps_since_log += 1
        self.steps_taken += 1
        tokens, seconds = self._steps_since_log * self.tokens_per_step, self._seconds_since_log
        throughput = tokens / seconds if seconds else 0.0
        self.update(
            step=state.global_step,
            tokens_per_second=throughput,
            ceiling_share=throughput * self.flops_per_token / self.peak_flops,
        )

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._clock = None

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._clock = None

    def on_log(
        self,
        args: Any,
        state: Any,
        control: Any,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        if logs and "loss" in logs:
            self._steps_since_log, self._seconds_since_log = 0, 0.0
            self.update(loss=float(logs["loss"]), loss_step=state.global_step)
        if logs and "eval_bits_per_byte" in logs:
            self.update(
                heldout=float(logs["eval_bits_per_byte"]), heldout_loss=float(logs["eval_loss"])
            )

    def update(self, **changes: Any) -> None:
        """Replace fields of the progress and pass it to the observer."""
        self.progress = replace(self.progress, **changes)
        self.observer.on_progress(self.progress)
