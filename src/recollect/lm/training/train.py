"""`train`: a language model from a plan, on `transformers.Trainer` and Accelerate.

The Trainer does what it does well: the loop, AdamW and its schedule, clipping, bf16, gradient
accumulation, many devices, logs, and going on from a checkpoint. Ours are only the rows, the
weights that decay, checkpoints that are whole, and a measurement weighted by tokens.
"""

from __future__ import annotations

import logging
import math
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from torch.utils.data import Sampler, SequentialSampler
from transformers import PrinterCallback, TrainerCallback
from transformers import TrainingArguments as Arguments
from transformers.utils import logging as transformers_logging

from recollect.lm.data.rows import IGNORE, Row, Rows, collate
from recollect.lm.data.sources import BadLines
from recollect.lm.model.checkpoint import check_folder
from recollect.lm.model.config import RecollectConfig
from recollect.lm.model.model import RecollectForCausalLM
from recollect.lm.training.atomic_checkpoints import AtomicTrainer
from recollect.lm.training.flops import measured_ceiling, model_flops
from recollect.lm.training.plan import TrainPlan
from recollect.lm.training.prepare import (
    build_model,
    compile_blocks,
    enough_memory,
    rows_of,
    tokenizer_of,
)
from recollect.lm.training.resume import begin, same_model
from recollect.lm.training.weight_decay import decayed_names

__all__ = ["Progress", "Trained", "Watch", "train"]


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Where a run stands.

    Attributes:
        step, steps: taken, and of the whole run.
        loss: of the last log line, nats per token.
        tokens_per_second: since the last log line; of the whole run's steps before the first.
        ceiling_share: the model's operations per second against one large matrix product's.
        heldout: bits per byte of the last measurement.
    """

    step: int
    steps: int
    loss: float | None = None
    tokens_per_second: float = 0.0
    ceiling_share: float = 0.0
    heldout: float | None = None


Watch = Callable[[Progress], None]


@dataclass(frozen=True, kw_only=True)
class Trained:
    """A finished run.

    Attributes:
        model: trained. folder: where it is saved, with its tokenizer.
        steps, tokens, seconds: taken in this call.
        loss: of the last log line, nats per token.
        heldout: bits per byte of the held-out rows, ``None`` without any.
        skipped: lines left out, and the first few of them.
        notes: what a reader should know, such as what of the model was compiled.
    """

    model: RecollectForCausalLM
    folder: Path
    steps: int
    tokens: int
    seconds: float
    loss: float | None
    heldout: float | None
    skipped: int = 0
    skipped_lines: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def train(
    plan: TrainPlan,
    *,
    resume: bool = False,
    watch: Watch | None = None,
    say: Callable[[str], None] | None = None,
    trainer_class: type[RecollectTrainer] | None = None,
) -> Trained:
    """Train a language model as a plan says.

    Args:
        plan: what, on what, and how long.
        resume: go on from the last checkpoint of ``plan.run.out``, as if the run had never stopped:
            weights, optimizer, schedule, random numbers and the place in the data are restored.
            Without a checkpoint it starts at the beginning.
        watch: told about every step.
        say: told what happens, in sentences.
        trainer_class: the Trainer, for what only a subclass can change.

    Returns:
        The model, saved to ``out/model`` with its tokenizer, and what was measured.

    Raises:
        ValueError: texts, tokenizers or recipes that cannot be used; a folder that holds another
            run; texts that changed since it was begun; a corrupt line, unless lines are skipped; a
            batch too large for the memory.
        CheckpointError: a full disk, and the last checkpoint stands; one that was altered.

    Examples:
        >>> from pathlib import Path
        >>> _ = Path("text.txt").write_text("a memory is a map from keys to values. " * 20)
        >>> plan = rc.lm.TrainPlan.from_dict(
        ...     {
        ...         "model": {"recipe": "gated_delta_net", "width": 16, "depth": 1, "heads": 2},
        ...         "data": {"train": "text.txt", "context": 16},
        ...         "optimizer": {"steps": 2, "batch": 2},
        ...         "run": {"out": "runs/example", "save_every": 0},
        ...     }
        ... )
        >>> trained = rc.lm.train(plan)
        >>> trained.steps, trained.folder.as_posix()
        (2, 'runs/example/model')
    """
    say = say or (lambda sentence: None)
    out = Path(plan.run.out)
    checkpoint = begin(plan, out, resume=resume)
    bad = BadLines(skip=plan.data.bad_lines == "skip")
    tokenizer = tokenizer_of(plan, out, bad, resume=checkpoint is not None)
    stock = rows_of(plan, tokenizer, bad)
    torch.manual_seed(plan.run.seed)
    model = build_model(plan, tokenizer)
    notes: list[str] = []
    reported = bad.count
    if reported:
        say(f"{reported} lines were left out: {'; '.join(bad.examples)}")
    if plan.run.compile:
        notes.append(compile_blocks(model))
    if plan.run.checkpointing:
        # The newer name; the older one goes with version 6 of transformers.
        enable = getattr(model, "activation_checkpointing_enable", None)
        (enable or model.gradient_checkpointing_enable)()
    kind = trainer_class or RecollectTrainer
    with _quiet(), warnings.catch_warnings():
        # The Trainer's remarks on its own defaults are no concern of whoever trains.
        warnings.filterwarnings("ignore", module=r"(transformers|accelerate|torch)\..*")
        trainer = kind(
            model=model,
            args=_arguments(plan, out),
            train_dataset=stock.train,
            eval_dataset=cast(Any, stock.heldout or None),
            data_collator=partial(collate, reset=plan.data.packing == "documents"),
            processing_class=tokenizer,
        )
        trainer.bytes_per_token = stock.bytes_per_token
        trainer.remove_callback(PrinterCallback)
        device = trainer.args.device
        ceiling = measured_ceiling(device, torch.bfloat16 if plan.run.bf16 else torch.float32)
        flops = model_flops(cast(RecollectConfig, model.config), context=plan.data.context)
        keeper = _Keeper(plan, trainer.args.world_size, flops, ceiling * trainer.args.world_size)
        keeper.watch = watch
        trainer.speed = keeper.speed
        trainer.add_callback(keeper)
        if checkpoint is not None:
            same_model(checkpoint, cast(RecollectConfig, model.config))
            if (checkpoint / "model.safetensors").exists():  # not where many devices share it
                check_folder(checkpoint, model, head="model.")
            say(f"going on from {checkpoint}")
        began = time.perf_counter()
        with enough_memory(plan):
            trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
        seconds = time.perf_counter() - began
        trainer.save_whole(out / "model")
        if stock.heldout and not (plan.run.eval_every and plan.steps % plan.run.eval_every == 0):
            trainer.evaluate()
    if bad.count > reported:  # rows that stream are read while training
        say(f"{bad.count} lines were left out: {'; '.join(bad.examples)}")
    return Trained(
        model=model,
        folder=out / "model",
        steps=keeper.taken,
        tokens=keeper.taken * keeper.tokens_per_step,
        seconds=seconds,
        loss=keeper.progress.loss,
        heldout=keeper.progress.heldout,
        skipped=bad.count,
        skipped_lines=tuple(bad.examples),
        notes=tuple(notes),
    )


class RecollectTrainer(AtomicTrainer):
    """The Trainer with our weight decay, order of rows, and a measurement weighted by tokens."""

    bytes_per_token = 1.0
    speed: Callable[[], dict[str, float]] = staticmethod(dict)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Every log line of the loss also says how fast it goes."""
        super().log({**logs, **self.speed()} if "loss" in logs else logs, *args, **kwargs)

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        return decayed_names(model)

    def _get_train_sampler(self, train_dataset: Any = None) -> Sampler[int] | None:
        dataset = self.train_dataset if train_dataset is None else train_dataset
        return SequentialSampler(dataset) if isinstance(dataset, Rows) else None

    @torch.no_grad()
    def evaluate(self, *_: Any, **__: Any) -> dict[str, float]:
        """Nats per token and bits per byte over all held-out tokens, each counted once."""
        rows: Sequence[Row] = self.eval_dataset  # type: ignore[assignment]
        model = self.model
        assert model is not None
        training = model.training
        model.eval()
        began, total, tokens = time.perf_counter(), 0.0, 0
        size = self.args.per_device_eval_batch_size
        for start in range(0, len(rows), size):
            batch = self._prepare_inputs(self.data_collator(cast(Any, rows[start : start + size])))
            with self.compute_loss_context_manager(), self.accelerator.autocast():
                loss = model(**batch, use_cache=False).loss
            count = int((batch["labels"][:, 1:] != IGNORE).sum())
            total, tokens = total + float(loss) * count, tokens + count
        model.train(training)
        nats = total / max(tokens, 1)
        metrics = {
            "eval_loss": nats,
            "eval_bits_per_byte": nats / math.log(2) / self.bytes_per_token,
            "eval_seconds": time.perf_counter() - began,
        }
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(
            self.args, self.state, self.control, metrics
        )
        return metrics


class _Keeper(TrainerCallback):
    """Times steps, with the rows that they wait for, and tells whoever watches."""

    def __init__(self, plan: TrainPlan, processes: int, flops: float, ceiling: float) -> None:
        self.tokens_per_step = plan.tokens_per_step * processes
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
            self._tell(loss=float(logs["loss"]))
        if logs and "eval_bits_per_byte" in logs:
            self._tell(heldout=float(logs["eval_bits_per_byte"]))

    def speed(self) -> dict[str, float]:
        """What a log line says beside the loss."""
        news = self.progress
        return {"tokens_per_second": news.tokens_per_second, "ceiling_share": news.ceiling_share}

    def _tell(self, **changes: Any) -> None:
        self.progress = replace(self.progress, **changes)
        if self.watch is not None:
            self.watch(self.progress)


def _arguments(plan: TrainPlan, out: Path) -> Arguments:
    optimizer, run = plan.optimizer, plan.run
    floor = {"min_lr_rate": optimizer.floor} if optimizer.floor else {}
    return Arguments(
        output_dir=str(out),
        max_steps=plan.steps,
        per_device_train_batch_size=optimizer.batch,
        per_device_eval_batch_size=optimizer.batch,
        gradient_accumulation_steps=optimizer.accumulate,
        learning_rate=plan.lr,
        lr_scheduler_type="cosine_with_min_lr" if floor else "cosine",
        lr_scheduler_kwargs=floor or None,
        warmup_steps=max(1, round(optimizer.warmup * plan.steps)) if optimizer.warmup else 0,
        weight_decay=optimizer.weight_decay,
        adam_beta1=optimizer.betas[0],
        adam_beta2=optimizer.betas[1],
        max_grad_norm=optimizer.clip,
        logging_steps=run.log_every,
        logging_first_step=True,
        logging_nan_inf_filter=False,
        save_strategy="steps" if run.save_every else "no",
        save_steps=run.save_every or plan.steps,
        save_total_limit=run.keep,
        eval_strategy="steps" if run.eval_every else "no",
        eval_steps=run.eval_every or None,
        bf16=run.bf16,
        use_cpu=not torch.accelerator.is_available(),  # or it refuses bf16
        report_to=_reports(plan, out),
        disable_tqdm=True,
        seed=run.seed,
        data_seed=run.seed,
        dataloader_pin_memory=torch.cuda.is_available(),
        remove_unused_columns=False,
        # A batch may be one packed row, which nobody can divide: each process makes its own.
        accelerator_config={"dispatch_batches": False, "split_batches": False},
    )


def _reports(plan: TrainPlan, out: Path) -> list[str]:
    if not plan.run.tensorboard:
        return []
    import importlib.util
    import os

    if not any(importlib.util.find_spec(name) for name in ("tensorboard", "tensorboardX")):
        raise ValueError(
            "[run] tensorboard = true needs tensorboard, which is not installed: "
            "pip install tensorboard"
        )
    os.environ.setdefault("TENSORBOARD_LOGGING_DIR", str(out / "logs"))
    return ["tensorboard"]


class _quiet:
    """The libraries' own log lines, held down to warnings of weight."""

    names = ("transformers", "accelerate")

    def __enter__(self) -> None:
        self.bars = transformers_logging.is_progress_bar_enabled()
        transformers_logging.disable_progress_bar()
        self.before = {name: logging.getLogger(name).level for name in self.names}
        for name in self.names:
            logging.getLogger(name).setLevel(logging.ERROR)

    def __exit__(self, *_: object) -> None:
        for name, level in self.before.items():
            logging.getLogger(name).setLevel(level)
        if self.bars:
            transformers_logging.enable_progress_bar()
