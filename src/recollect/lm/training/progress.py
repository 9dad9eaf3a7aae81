"""What a run is, where it stands, what it ends with, and the callback that measures it."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from transformers import TrainerCallback

from recollect.lm.model.config import RecollectConfig
from recollect.lm.model.model import RecollectForCausalLM
from recollect.lm.sharding.layout import Layout
from recollect.lm.training.plan import TrainPlan

__all__ = ["LAST", "Header", "Keeper", "Progress", "Trained", "Watch", "header_of"]

ALONE = Layout()
LAST = 10
"""Steps whose mean is the loss of a run."""


@dataclass(frozen=True, kw_only=True)
class Header:
    """What a run is about to do.

    Attributes:
        recipes: how many layers each has. width: of the backbone.
        parameters: trained numbers by part: embedding, memory layers, MLPs, norms, and the head
            unless it reads the embedding.
        context: tokens of a row. segments: pieces that it is read in.
        rows: of an optimizer step, over all processes.
        first, steps: the step that comes first, from 1, and the last one.
        device: of this process, and how several share the run.
        dtype: of weights, and of matrix products.
        out: folder of the run. save_every, keep: of its checkpoints.

    Examples:
        >>> from pathlib import Path
        >>> header = rc.lm.Header(
        ...     recipes={"gla": 2}, width=64, parameters={"embedding": 8192}, context=128,
        ...     segments=1, rows=8, first=1, steps=100, device="cpu", dtype="float32",
        ...     out=Path("runs/gla"), save_every=50, keep=2,
        ... )
        >>> header.tokens, header.lines()[0]
        (102400, ('model', 'layers: 2 × gla; width 64'))
    """

    recipes: Mapping[str, int]
    width: int
    parameters: Mapping[str, int]
    context: int
    segments: int
    rows: int
    first: int
    steps: int
    device: str
    dtype: str
    out: Path
    save_every: int
    keep: int

    @property
    def tokens_per_step(self) -> int:
        """Tokens of an optimizer step, over all processes."""
        return self.rows * self.context

    @property
    def tokens(self) -> int:
        """Tokens of the whole run."""
        return self.steps * self.tokens_per_step

    def lines(self) -> list[tuple[str, str]]:
        """The same in words: (what, how), one a line."""
        layers = ", ".join(f"{count} × {name}" for name, count in self.recipes.items())
        parts = ", ".join(f"{name} {count:,}" for name, count in self.parameters.items())
        left = "" if self.first == 1 else f", from step {self.first:,} on"
        read = f", each row in {self.segments:,} segments" if self.segments > 1 else ""
        checkpoints = "a checkpoint when interrupted"
        if self.save_every:
            checkpoints = (
                f"a checkpoint every {self.save_every:,} steps (the last {self.keep} stay)"
            )
        return [
            ("model", f"layers: {layers}; width {self.width:,}"),
            ("parameters", f"{sum(self.parameters.values()):,}: {parts}"),
            ("step", f"{self.rows:,} × {self.context:,} = {self.tokens_per_step:,} tokens{read}"),
            ("run", f"{self.steps:,} steps, {self.tokens:,} tokens{left}"),
            ("device", f"{self.device}, {self.dtype}"),
            ("out", f"{self.out}: {checkpoints}, and at the end {self.out / 'model'}"),
        ]


_PARTS = (
    ("embed_tokens.", "embedding"),
    (".layer.", "memory layers"),
    (".mlp.", "MLPs"),
    ("lm_head.", "head"),
    ("", "norms"),
)


def header_of(
    plan: TrainPlan,
    model: RecollectForCausalLM,
    *,
    device: torch.device,
    first: int,
    layout: Layout = ALONE,
) -> Header:
    """What a run of a plan is about to do with a model.

    Args:
        plan: of the run.
        model: that is trained.
        device: of this process.
        first: step that comes first, from 1.
        layout: of the processes that share the run.
    """
    config = cast(RecollectConfig, model.config)
    parts = dict.fromkeys((part for _, part in _PARTS), 0)
    for name, weight in model.named_parameters():
        if weight.requires_grad:
            parts[next(part for mark, part in _PARTS if mark in name)] += weight.numel()
    return Header(
        recipes=Counter(config.pattern),
        width=config.hidden_size,
        parameters={part: count for part, count in parts.items() if count},
        context=plan.data.context,
        segments=plan.data.segments,
        rows=plan.optimizer.batch * plan.optimizer.accumulate,
        first=first,
        steps=plan.steps,
        device=str(device) if layout.processes == 1 else f"{device.type}, {layout}",
        dtype="float32, matrix products in bfloat16" if plan.run.bf16 else "float32",
        out=Path(plan.run.out),
        save_every=plan.run.save_every,
        keep=plan.run.keep,
    )


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Where a run stands.

    Attributes:
        step, steps: taken, and of the whole run.
        loss: of the last log line, nats per token; at the end, of the last steps.
        loss_step: the step after which that was said.
        tokens_per_second: since the last log line; of the whole run's steps before the first.
        ceiling_share: the model's operations per second against one large matrix product's.
        heldout: bits per byte of the last measurement.
        heldout_loss: the same in nats per token, to stand beside ``loss``.

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


Watch = Callable[[Progress], None]


@dataclass(frozen=True, kw_only=True)
class Trained:
    """A finished run.

    Attributes:
        model: trained. folder: where it is saved, with its tokenizer.
        steps, tokens, seconds: taken in this call.
        loss: mean of the last `LAST` steps of this call (of all, if it took fewer), nats per token;
            ``None`` if it took none.
        heldout: bits per byte of the held-out rows, ``None`` without any.
        heldout_loss: the same in nats per token, as ``loss``.
        skipped: lines left out, and the first few of them.
        notes: what a reader should know, such as what of the model was compiled.
        history: lines of the log, of the whole run where it was resumed: ``step`` and, of steps,
            ``loss``, ``tokens_per_second`` and more, of measurements ``eval_bits_per_byte``.

    Examples:
        >>> from pathlib import Path
        >>> _ = Path("text.txt").write_text("a memory is a map from keys to values. " * 20)
        >>> plan = rc.lm.TrainPlan.from_dict(
        ...     {
        ...         "model": {"recipe": "gla", "width": 8, "depth": 1, "heads": 1},
        ...         "data": {"train": "text.txt", "context": 8},
        ...         "optimizer": {"steps": 1, "batch": 1},
        ...         "run": {"out": "runs/gla", "save_every": 0},
        ...     }
        ... )
        >>> trained = rc.lm.train(plan)
        >>> trained.steps, trained.tokens, trained.folder.as_posix()
        (1, 8, 'runs/gla/model')
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


class Keeper(TrainerCallback):
    """Times steps, with the rows that they wait for, and tells whoever watches."""

    def __init__(self, plan: TrainPlan, flops: float, ceiling: float) -> None:
        self.tokens_per_step = plan.tokens_per_step
        self.flops, self.ceiling = flops, ceiling
        self.progress = Progress(step=0, steps=plan.steps)
        self.watch: Watch | None = None
        self.taken = 0
        self._clock: float | None = None
        self._since, self._seconds = 0, 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._clock is None:
            self._clock = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        now = time.perf_counter()
        self.taken += 1
        self._since += 1
        self._seconds += now - (now if self._clock is None else self._clock)
        self._clock = now
        speed = self._since * self.tokens_per_step / self._seconds if self._seconds else 0.0
        self._tell(
            step=state.global_step,
            tokens_per_second=speed,
            ceiling_share=speed * self.flops / self.ceiling,
        )

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._clock = None  # what came since is no training

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
            self._since, self._seconds = 0, 0.0
            self._tell(loss=float(logs["loss"]), loss_step=state.global_step)
        if logs and "eval_bits_per_byte" in logs:
            self._tell(
                heldout=float(logs["eval_bits_per_byte"]), heldout_loss=float(logs["eval_loss"])
            )

    def end(self, loss: float | None) -> None:
        """The run is over; its last steps had this loss."""
        if loss is not None:
            self._tell(loss=loss, loss_step=self.progress.step)

    def speed(self) -> dict[str, float]:
        """What a log line says beside the loss."""
        news = self.progress
        return {"tokens_per_second": news.tokens_per_second, "ceiling_share": news.ceiling_share}

    def _tell(self, **changes: Any) -> None:
        self.progress = replace(self.progress, **changes)
        if self.watch is not None:
            self.watch(self.progress)
