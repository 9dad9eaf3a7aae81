"""ParallelDims, device and `TrainingArguments` of a plan."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from transformers import TrainingArguments
from transformers.integrations.integration_utils import (
    TensorBoardCallback,
    is_tensorboard_available,
)
from transformers.utils import logging as transformers_logging

from recollect.lm.distributed.parallel_dims import ParallelDims, parse_parallel
from recollect.lm.training.plan import TrainPlan
from recollect.messages import argument_name
from recollect.report import devices

__all__ = [
    "MIN_TORCH_FOR_2D",
    "check_layout",
    "make_layout",
    "resolve_device",
    "suppress_library_logs",
    "tensorboard_callback",
    "trainer_arguments",
]

MIN_TORCH_FOR_2D = (2, 13)
"""Oldest torch whose gathered weights of data × tensor were right. Those of 2.9 are wrong."""


def make_layout(plan: TrainPlan, processes: int) -> ParallelDims:
    """Return the layout of a plan on a number of processes, after its checks."""
    layout = parse_parallel(plan.run.parallel, processes)
    layout.local_batch_size(plan.optimizer.batch)
    check_layout(plan, layout)
    return layout


def check_layout(plan: TrainPlan, layout: ParallelDims) -> None:
    """Raise `ValueError` if a plan cannot run on a layout."""
    torch_version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    if layout.world_size > layout.tp > 1 and torch_version < MIN_TORCH_FOR_2D:
        raise ValueError(
            f"[run] parallel: torch {torch.__version__} gathers weights wrongly that tensor = "
            f"{layout.tp} divides and other processes share: take torch "
            f"{'.'.join(map(str, MIN_TORCH_FOR_2D))} or newer, or tensor alone"
        )
    data, context_size = plan.data, layout.cp
    shortest_segment = (
        data.context - (-(-data.context // data.segment_length) - 1) * data.segment_length
    )
    if context_size > shortest_segment:
        tokens = f"the {data.context} tokens of a row"
        if data.segments > 1:
            tokens = (
                f"the {shortest_segment} tokens of the shortest of {data.segments} segments of a "
                "row"
            )
        raise ValueError(
            f"[run] parallel: context = {context_size} divides {tokens} among as many processes, "
            "and each needs one token at least: take a smaller context there, or longer rows"
        )
    if data.segments == 1 or layout.world_size == 1:
        return
    if data.segment_gradient == "kept":
        raise ValueError(
            '[data] segment_gradient = "kept" runs back into states, which processes that share a '
            'run do not see: take "cut", or one process'
        )
    if data.packing == "documents" and layout.is_sharded:
        raise ValueError(
            f"[data] segments = {data.segments} begins documents with a layer's own initial "
            'memory, of which each process holds a part: take packing = "stream", or '
            'parallel = "ddp"'
        )


def resolve_device(plan: TrainPlan, processes: int) -> torch.device | None:
    """Return the device of a plan; ``None`` if several processes choose one each."""
    label = argument_name("[run] device")
    if processes == 1:
        return devices.resolve_device(plan.run.device, argument_name=label)
    if plan.run.device is not None:
        raise ValueError(
            f"{label} {plan.run.device!r} is one device, and each of these {processes} processes "
            "takes its own: leave it out"
        )
    return None


def trainer_arguments(
    plan: TrainPlan,
    device: torch.device | None = None,  # device of the only process
    *,
    batch_size: int | None = None,  # batch size of this process; by default that of the plan
) -> TrainingArguments:
    """Return the Trainer's arguments."""
    optimizer, run = plan.optimizer, plan.run
    batch_size = batch_size or optimizer.batch
    is_cpu = not torch.accelerator.is_available() if device is None else device.type == "cpu"
    arguments = TrainingArguments(
        output_dir=run.out,
        max_steps=plan.steps,
        per_device_train_batch_size=batch_size,
        per_device_eval_batch_size=batch_size,
        gradient_accumulation_steps=optimizer.accumulate,
        learning_rate=plan.lr,
        lr_scheduler_type="cosine_with_min_lr" if optimizer.floor else "cosine",
        lr_scheduler_kwargs={"min_lr_rate": optimizer.floor} if optimizer.floor else None,
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
        use_cpu=is_cpu,  # otherwise bf16 is refused
        report_to=[],
        disable_tqdm=True,
        log_level="error",
        log_level_replica="error",
        seed=run.seed,
        data_seed=run.seed,
        dataloader_pin_memory=torch.cuda.is_available(),
        remove_unused_columns=False,
        # A tied gate, or the last state of a layer, may have no gradient.
        ddp_find_unused_parameters=True,
        # A packed batch is one row and cannot be split, so each process collates its own.
        accelerator_config={"dispatch_batches": False, "split_batches": False},
    )
    if device is not None:
        _pin_device(arguments, device)
    return arguments


def _pin_device(arguments: TrainingArguments, device: torch.device) -> None:
    """Let the Trainer use one device.

    It would use the first of its type, and split batches over all of that type.
    """
    assert arguments.distributed_state is not None
    arguments.distributed_state.device = device
    arguments.__dict__["_setup_devices"] = device  # the cached value of `arguments.device`
    arguments._n_gpu = int(device.type != "cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)


def tensorboard_callback(folder: Path) -> TensorBoardCallback:
    """Return a callback that writes TensorBoard logs to ``folder``."""
    if not is_tensorboard_available():
        raise ValueError(
            "[run] tensorboard = true needs tensorboard, which is not installed: "
            "pip install tensorboard"
        )
    callback = TensorBoardCallback()
    if callback.logging_dir is None:  # unless TENSORBOARD_LOGGING_DIR is set
        callback.logging_dir = str(folder)
    return callback


@contextmanager
def suppress_library_logs() -> Iterator[None]:
    """Context manager that hides progress bars and warnings of transformers and accelerate."""
    names = ("transformers", "accelerate", "torch.distributed.tensor")
    levels = {name: logging.getLogger(name).level for name in names}
    has_bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    for name in names:
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        yield
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
        if has_bars:
            transformers_logging.enable_progress_bar()
