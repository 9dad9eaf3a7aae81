"""`train`: train a language model from a plan, on `transformers.Trainer` and Accelerate.

The Trainer has the loop, AdamW and its schedule, clipping, bf16, gradient accumulation, several
devices, logs and resuming. This package adds the order of rows, weight decay and learning rates by
parameter, rows in segments, models that processes share, atomic checkpoints, checks before a run
is resumed, stops after a step, the search for the source of a divergence, and an evaluation
weighted by tokens.
"""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from os import PathLike
from pathlib import Path

import torch

from recollect.lm.data.sources import BadLinePolicy
from recollect.lm.distributed.parallelize import check_divisible, parallelize
from recollect.lm.distributed.processes import (
    check_agreement,
    detect_lost_peers,
    fail_together,
    init_distributed,
)
from recollect.lm.model.checkpoint import check_weights
from recollect.lm.model.config import RecollectConfig
from recollect.lm.training.arguments import (
    make_layout,
    resolve_device,
    suppress_library_logs,
    trainer_arguments,
)
from recollect.lm.training.atomic_checkpoints import last_checkpoint
from recollect.lm.training.interrupts import stop_after_step
from recollect.lm.training.plan import TrainPlan, load_plan
from recollect.lm.training.progress import SilentObserver, Trained, TrainObserver, summarize_run
from recollect.lm.training.resume import (
    MISMATCH_ADVICE,
    ExtendSchedule,
    RunStart,
    check_same_recipes,
    check_writable,
    facts_to_compare,
    no_run_message,
    resolve_start,
    write_run_record,
)
from recollect.lm.training.setup import (
    build_model,
    build_tokenizer,
    check_memory,
    explain_out_of_memory,
    heldout_overlap_warning,
    load_text_data,
    model_config,
)
from recollect.lm.training.trainer import RecollectTrainer
from recollect.plugins import import_modules
from recollect.report.files import remove_new_folders
from recollect.report.lock import folder_lock

__all__ = ["run_folder", "train"]


def train(
    plan: TrainPlan | str | PathLike[str],
    *,
    resume: bool = False,
    observer: TrainObserver | None = None,
    trainer_class: Callable[..., RecollectTrainer] = RecollectTrainer,
) -> Trained:
    """Train a language model from a plan, on one process or on all that a launcher started.

    Args:
        plan: The plan, or its TOML file as in `load_plan`.
        resume: Whether to continue from the last checkpoint of ``plan.run.out``. Weights,
            optimizer, schedule, random numbers and the position in the data are restored. A run
            that ended before its first checkpoint restarts, and a folder without a run is refused.
            A plan with more steps extends the run by the longer schedule's learning rate.
        observer: Receives the summary, the progress and messages of the run, in the first process.
        trainer_class: Subclass of the Trainer that overrides parts of a step, or a function that
            returns one for its arguments.

    Returns:
        The model, saved to ``out/model`` with its tokenizer, and measurements. A process that
        shares the weights with others has its part of the model.

    Raises:
        ValueError: The plan is invalid, its device is missing or has too little memory, its
            modules, texts, tokenizers or recipes cannot be used, its folder belongs to another run
            or has none to resume, its texts changed since the run started, or the processes do not
            fit the plan or have different ones.
        ProcessEnded: Another process has ended; a `ValueError`. The last checkpoint is complete.
        Diverged: A loss or gradient is not finite; a `ValueError`.
        CheckpointError: The disk is full, or a checkpoint was altered.
        TrainingInterrupted: An interrupt, SIGTERM or SIGHUP stopped the run after a step and a
            checkpoint; a `KeyboardInterrupt`. A second signal raises at once.

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
    if isinstance(plan, str | PathLike):
        plan = load_plan(plan)
    if not isinstance(plan, TrainPlan):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(f"train takes a TrainPlan or a TOML file, not {type(plan).__name__}")
    out, notes = Path(plan.run.out), list[str]()
    bad_lines = BadLinePolicy(skip=plan.data.bad_lines == "skip")
    with contextlib.ExitStack() as stack:
        # 1. Join the other processes and choose a layout.
        state = init_distributed()
        if observer is None or not state.is_main_process:
            observer = SilentObserver()
        with fail_together():
            import_modules(plan.imports, folder=plan.import_dir, option="import")
            layout = make_layout(plan, state.num_processes)
            device = resolve_device(plan, layout.world_size)

            # 2. Lock the folder of the run.
            if resume and not out.exists():
                raise ValueError(no_run_message(out))
            stack.enter_context(run_folder(out, lock=state.is_main_process))

        # 3. Find the checkpoint, and compare its plan and texts with the current ones.
        with fail_together():
            start = resolve_start(plan, out, resume=resume)
            if resume and start.checkpoint is None:
                observer.on_message(
                    f"{out} contains no checkpoint of this run yet, so it starts at its first step"
                )

            # 4. Build the tokenizer, the data and the model.
            memory_device = device or state.device or torch.device("cpu")
            tokenizer = build_tokenizer(plan, out, bad_lines, start.checkpoint)
            if plan.model.start is None:
                config = model_config(plan.model, tokenizer)
                check_memory(plan, config, device=memory_device, layout=layout)
            data = load_text_data(plan, tokenizer, bad_lines)
            torch.manual_seed(plan.run.seed)
            model = build_model(plan, tokenizer)
            check_divisible(model, layout)
        check_agreement(facts_to_compare(start.record, start.checkpoint), MISMATCH_ADVICE)
        if (overlap := heldout_overlap_warning(plan, start.record["texts"])) is not None:
            notes.append(overlap)
            observer.on_message(overlap)
        num_reported = bad_lines.count
        _report_bad_lines(bad_lines, observer)

        # 5. Divide the model among the processes.
        sharding = parallelize(model, layout, memory_device.type, bf16=plan.run.bf16)
        if plan.run.checkpointing:
            # transformers 6 will remove the second name.
            enable = getattr(model, "activation_checkpointing_enable", None)
            (enable or model.gradient_checkpointing_enable)()

        # 6. Build the trainer.
        stack.enter_context(suppress_library_logs())
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", module=r"(transformers|accelerate|torch)\..*")
        trainer = trainer_class(
            plan,
            model,
            trainer_arguments(
                plan, device, batch_size=layout.local_batch_size(plan.optimizer.batch)
            ),
            data=data,
            tokenizer=tokenizer,
            sharding=sharding,
            run_record=start.record,
            observer=observer,
        )
        if start.checkpoint is not None:
            _check_checkpoint(start, trainer, observer)
        if start.previous_steps is not None:
            trainer.add_callback(ExtendSchedule(start.previous_steps, observer.on_message))
        first_step = 1 if start.checkpoint is None else 1 + _checkpoint_step(start.checkpoint)
        device = trainer.args.device
        summary = summarize_run(plan, model, device=device, layout=layout, first_step=first_step)
        observer.on_start(summary)
        if trainer.args.should_save:
            write_run_record(out, start.record)

        # 7. Train.
        stack.enter_context(detect_lost_peers(partial(last_checkpoint, out)))
        if sharding.context_parallel is not None:
            stack.enter_context(sharding.context_parallel)  # detaches the model at its end
        started = time.perf_counter()
        with explain_out_of_memory(plan), stop_after_step(trainer):
            trainer.train(resume_from_checkpoint=start.checkpoint and str(start.checkpoint))
        seconds = time.perf_counter() - started

        # 8. Save the model, evaluate, and return the result.
        throughput = trainer.throughput
        if (loss := trainer.mean_recent_loss()) is not None:
            throughput.update(loss=loss, loss_step=throughput.progress.step)
        trainer.save_final_model(out / "model")
        is_evaluated = plan.run.eval_every and plan.steps % plan.run.eval_every == 0
        if data.heldout and not is_evaluated:
            trainer.evaluate()
    if bad_lines.count > num_reported:  # streamed rows are read during training
        _report_bad_lines(bad_lines, observer)
    return Trained(
        model=model,
        folder=out / "model",
        steps=throughput.steps_taken,
        tokens=throughput.steps_taken * plan.tokens_per_step,
        seconds=seconds,
        loss=throughput.progress.loss,
        heldout=throughput.progress.heldout,
        heldout_loss=throughput.progress.heldout_loss,
        skipped=bad_lines.count,
        skipped_lines=tuple(bad_lines.examples),
        notes=tuple(notes),
        history=tuple(trainer.state.log_history),
    )


@contextlib.contextmanager
def run_folder(out: Path, *, lock: bool) -> Iterator[None]:
    """Create and lock the folder of a run; remove it after an error if it is new and empty."""
    with remove_new_folders(out):
        check_writable(out)
        with folder_lock(out) if lock else contextlib.nullcontext():
            yield


def _check_checkpoint(start: RunStart, trainer: RecollectTrainer, observer: TrainObserver) -> None:
    """Check that the model fits the checkpoint, and report the checks that it passed."""
    checkpoint, model = start.checkpoint, trainer.model
    assert checkpoint is not None and model is not None
    if isinstance(model.config, RecollectConfig):
        check_same_recipes(checkpoint, model.config)
    if (weights := checkpoint / "model.safetensors").exists():  # otherwise it has shards
        check_weights(weights, model)
    prefix = f"resuming from {checkpoint}"
    if _checkpoint_step(checkpoint) >= trainer.plan.steps:
        prefix = f"the run is finished, and more steps in its plan extend it; {checkpoint}"
    observer.on_message(
        f"{prefix}: its {start.files} files are unchanged, and plan and texts are those of the "
        "start of the run"
    )


def _checkpoint_step(checkpoint: Path) -> int:
    return int(checkpoint.name.rpartition("-")[2])


def _report_bad_lines(bad_lines: BadLinePolicy, observer: TrainObserver) -> None:
    if bad_lines.count:
        examples = "; ".join(bad_lines.examples)
        observer.on_message(f"{bad_lines.count} lines were left out: {examples}")
