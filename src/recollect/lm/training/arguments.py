"""What transformers' Trainer is told of a plan, and how its own log lines are held down."""

from __future__ import annotations

import importlib.util
import logging
import os
from pathlib import Path

import torch
from transformers import TrainingArguments as Arguments
from transformers.utils import logging as transformers_logging

from recollect.lm.sharding.layout import Layout, layout_of
from recollect.lm.training.plan import TrainPlan
from recollect.messages import argument_name
from recollect.report.devices import find_device

__all__ = ["check_layout", "device_of", "quiet", "share", "trainer_arguments"]

GATHERS = (2, 13)
"""The oldest torch with which weights of data × tensor were seen to be those of one process.

With 2.9 they are not, and between the two nobody has looked.
"""


def _torch() -> tuple[int, int]:
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


def share(plan: TrainPlan, processes: int) -> Layout:
    """How processes share a plan's run.

    Args:
        plan: of the run.
        processes: that a launcher started.

    Raises:
        ValueError: a mesh, a batch or a way of running that they do not fit.
    """
    layout = layout_of(plan.run.parallel, processes)
    layout.rows(plan.optimizer.batch)
    check_layout(plan, layout)
    return layout


def check_layout(plan: TrainPlan, layout: Layout) -> None:
    """That a run can be shared as a layout says.

    Args:
        plan: of the run. layout: of its processes.

    Raises:
        ValueError: rows, or segments of them, that are shorter than the processes they lie along;
            what rows in segments cannot do where several processes share a run; compiled MLPs
            that are divided; weights that an old torch gathers wrongly.
    """
    if layout.tensor > 1 and layout.processes > layout.tensor and _torch() < GATHERS:
        raise ValueError(
            f"[run] parallel: torch {torch.__version__} gathers weights wrongly that tensor = "
            f"{layout.tensor} divides and other processes share: take torch "
            f"{'.'.join(map(str, GATHERS))} or newer, or tensor alone"
        )
    if plan.run.compile and layout.tensor > 1:
        raise ValueError(
            f"[run] compile = true compiles MLPs, which tensor = {layout.tensor} divides: leave "
            "out one of them"
        )
    data, along = plan.data, layout.context
    shortest = data.context - (-(-data.context // data.piece) - 1) * data.piece
    if along > shortest:
        said = f"the {data.context} tokens of a row"
        if data.segments > 1:
            said = f"the {shortest} tokens of the shortest of {data.segments} segments of a row"
        raise ValueError(
            f"[run] parallel: context = {along} divides {said} among as many processes, and each "
            "needs one token at least: take a smaller context there, or longer rows"
        )
    if data.segments == 1 or layout.processes == 1:
        return
    if data.segment_gradient == "kept":
        raise ValueError(
            '[data] segment_gradient = "kept" runs back into states, which processes that share a '
            'run do not see: take "cut", or one process'
        )
    if data.packing == "documents" and layout.divides:
        raise ValueError(
            f"[data] segments = {data.segments} begins documents with a layer's own initial "
            'memory, of which each process holds a part: take packing = "stream", or '
            'parallel = "ddp"'
        )


def device_of(plan: TrainPlan, processes: int) -> torch.device | None:
    """Where a plan runs; ``None`` of several processes, each of which takes its own.

    Args:
        plan: of the run.
        processes: that share it.

    Raises:
        ValueError: it is not here, or several processes would share it.
    """
    label = argument_name("[run] device")
    if processes == 1:
        return find_device(plan.run.device, said=label)
    if plan.run.device is not None:
        raise ValueError(
            f"{label} {plan.run.device!r} is one device, and each of these {processes} processes "
            "takes its own: leave it out"
        )
    return None


def trainer_arguments(
    plan: TrainPlan, out: Path, device: torch.device | None = None, *, batch: int | None = None
) -> Arguments:
    """The Trainer's arguments.

    Args:
        plan: of the run.
        out: its folder.
        device: of the one process that there is; of several, each takes its own.
        batch: rows that this process reads at once; the plan's, of one process.

    Raises:
        ValueError: tensorboard is asked for and not installed.
    """
    optimizer, run = plan.optimizer, plan.run
    batch = batch or optimizer.batch
    floor = {"min_lr_rate": optimizer.floor} if optimizer.floor else {}
    arguments = Arguments(
        output_dir=str(out),
        max_steps=plan.steps,
        per_device_train_batch_size=batch,
        per_device_eval_batch_size=batch,
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
        use_cpu=_is_cpu(device),  # or it refuses bf16
        report_to=_reports(plan, out),
        disable_tqdm=True,
        log_level="error",
        log_level_replica="error",
        seed=run.seed,
        data_seed=run.seed,
        dataloader_pin_memory=torch.cuda.is_available(),
        remove_unused_columns=False,
        # A batch may be one packed row, which nobody can divide: each process makes its own.
        # A gate that a tie replaces, or a last state that nobody reads, has no gradient.
        ddp_find_unused_parameters=True,
        accelerator_config={"dispatch_batches": False, "split_batches": False},
    )
    if device is not None:
        _place(arguments, device)
    return arguments


def _is_cpu(device: torch.device | None) -> bool:
    return not torch.accelerator.is_available() if device is None else device.type == "cpu"


def _place(arguments: Arguments, device: torch.device) -> None:
    """Let the Trainer use one device and no other, which its arguments cannot say.

    They name the first of its kind and divide batches among all of them, and a packed row is none
    that can be divided.
    """
    assert arguments.distributed_state is not None
    arguments.distributed_state.device = device
    arguments.__dict__["_setup_devices"] = device  # what `device` gives
    arguments._n_gpu = int(device.type != "cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)


def _reports(plan: TrainPlan, out: Path) -> list[str]:
    if not plan.run.tensorboard:
        return []
    if not any(importlib.util.find_spec(name) for name in ("tensorboard", "tensorboardX")):
        raise ValueError(
            "[run] tensorboard = true needs tensorboard, which is not installed: "
            "pip install tensorboard"
        )
    os.environ.setdefault("TENSORBOARD_LOGGING_DIR", str(out / "logs"))
    return ["tensorboard"]


class quiet:
    """The libraries' own log lines, held down to warnings of weight."""

    names = ("transformers", "accelerate", "torch.distributed.tensor")

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
