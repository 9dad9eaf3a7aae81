"""`train`: a language model from a plan, on `transformers.Trainer` and Accelerate.

The Trainer does what it does well: the loop, AdamW and its schedule, clipping, bf16, gradient
accumulation, many devices, logs, and going on from a checkpoint. Ours are only the rows, the
weights that decay, checkpoints that are whole, and a measurement weighted by tokens.
"""

from __future__ import annotations

import contextlib
import math
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.data import Sampler, SequentialSampler
from transformers import PrinterCallback

from recollect.lm.data.rows import IGNORE_INDEX, PackedDataset, PackedRow, collate
from recollect.lm.data.sources import BadLinePolicy
from recollect.lm.model.checkpoint import check_folder
from recollect.lm.model.config import RecollectConfig
from recollect.lm.planning.flops import measured_ceiling, model_flops
from recollect.lm.sharding.data import reshard
from recollect.lm.sharding.layout import Layout
from recollect.lm.sharding.processes import agree, alive, join, together
from recollect.lm.sharding.trainer import ShardedTrainer, check_fits, spread
from recollect.lm.training.arguments import device_of, quiet, share, trainer_arguments
from recollect.lm.training.atomic_checkpoints import last_checkpoint
from recollect.lm.training.divergence import Guard
from recollect.lm.training.interrupts import finish_step
from recollect.lm.training.plan import TrainPlan, load_plan
from recollect.lm.training.prepare import (
    build_model,
    check_memory,
    compile_blocks,
    enough_memory,
    measured_on_trained,
    model_config,
    rows_of,
    tokenizer_of,
)
from recollect.lm.training.progress import (
    LAST,
    Header,
    Keeper,
    Progress,
    Trained,
    Watch,
    header_of,
)
from recollect.lm.training.resume import (
    OTHERWISE,
    LongerSchedule,
    begin,
    check_writable,
    given,
    note_begun,
    nothing_to_resume,
    same_model,
)
from recollect.lm.training.segments import SegmentedTrainer, check_segments
from recollect.lm.training.weight_decay import decayed_names, rates_of, split_by_rate
from recollect.plugins import import_modules
from recollect.report.ownership import owned_folder

__all__ = ["Header", "Progress", "Trained", "Watch", "train"]


def train(
    plan: TrainPlan | str | PathLike[str],
    *,
    resume: bool = False,
    watch: Watch | None = None,
    say: Callable[[str], None] | None = None,
    begins: Callable[[Header], None] | None = None,
    trainer_class: type[RecollectTrainer] | None = None,
) -> Trained:
    """Train a language model as a plan says, on one process or on all that a launcher started.

    Args:
        plan: what, on what, and how long; or the TOML file that says so, as in `load_plan`.
        resume: go on from the last checkpoint of ``plan.run.out``, as if the run had never stopped:
            weights, optimizer, schedule, random numbers and the place in the data are restored.
            A run that ended before its first checkpoint starts at the beginning, and says so; a
            folder without a run is refused. A plan with more steps extends the run: from there on
            its learning rate is that of the longer schedule.
        watch: told about every step, of several processes in the first.
        say: told what happens, in sentences; in the first process.
        begins: told what the run is about to do, before its first step; in the first process.
        trainer_class: the Trainer, for what only a subclass can change.

    Returns:
        The model, saved to ``out/model`` with its tokenizer, and what was measured. A process that
        shares the weights with others holds its part of the model.

    Raises:
        ValueError: no plan; a device that is not here; sizes that its memory cannot hold; modules,
            texts, tokenizers or recipes that cannot be used; a folder that holds another run, none
            to resume, or one under way; texts that changed since it was begun; a corrupt line,
            unless lines are skipped; a batch too large for the memory; a layout that the processes,
            the batch or the heads do not fit; processes that were given something else each.
        ProcessEnded: another process has ended, and the last checkpoint stands; a `ValueError`.
        Diverged: a loss or a gradient that is not finite, naming the step, the learning rate, the
            layer and the checkpoint that stands; a `ValueError`.
        CheckpointError: a full disk, and the last checkpoint stands; one that was altered.
        Interrupted: an interrupt (or SIGTERM, SIGHUP) while steps are taken, after a checkpoint;
            a `KeyboardInterrupt`, as the second one is, which is raised at once.

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
    out, state = Path(plan.run.out), join()
    first = state.is_main_process  # of many processes it owns the folder, and speaks, for all
    with contextlib.ExitStack() as stack:
        with together():
            import_modules(plan.imports, folder=plan.beside, option="import")
            layout = share(plan, state.num_processes)
            device = device_of(plan, layout.processes)
            if resume and not out.exists():
                raise ValueError(nothing_to_resume(out))  # before the folder is made
            made = False
            with contextlib.suppress(OSError):  # a name that no folder can have is refused below
                made = not out.exists()
            check_writable(out)
            stack.enter_context(_unmade(out, made))
            if first:
                stack.enter_context(owned_folder(out))
        return _trained(
            plan,
            out,
            resume=resume,
            watch=watch if first else None,
            say=say if say is not None and first else (lambda sentence: None),
            begins=begins if begins is not None and first else (lambda header: None),
            device=device,
            layout=layout,
            kind=trainer_class or RecollectTrainer,
        )


@contextlib.contextmanager
def _unmade(out: Path, made: bool) -> Iterator[None]:
    """A folder that a run made does not stay where the run was refused before it wrote there."""
    try:
        yield
    except BaseException:
        if made:
            with contextlib.suppress(OSError):  # it holds something
                out.rmdir()
        raise


def _trained(
    plan: TrainPlan,
    out: Path,
    *,
    resume: bool,
    watch: Watch | None,
    say: Callable[[str], None],
    begins: Callable[[Header], None],
    device: torch.device | None,
    layout: Layout,
    kind: type[RecollectTrainer],
) -> Trained:
    """`train`, in a folder that is this run's own."""
    here, notes = device or join().device or torch.device("cpu"), list[str]()
    bad = BadLinePolicy(skip=plan.data.bad_lines == "skip")
    with together():
        begun = begin(plan, out, resume=resume)
        checkpoint = begun.checkpoint
        if resume and checkpoint is None:
            say(f"{out} holds no checkpoint of this run yet, so it begins at its first step")
        tokenizer = tokenizer_of(plan, out, bad, checkpoint)
        if plan.model.start is None:
            config = model_config(plan.model, tokenizer)
            check_memory(plan, config, device=here, layout=layout)
        stock = rows_of(plan, tokenizer, bad)
        torch.manual_seed(plan.run.seed)
        model = build_model(plan, tokenizer)
        check_fits(model, layout)
    agree(given(begun.record, checkpoint), OTHERWISE)
    lies = spread(model, layout, here.type, bf16=plan.run.bf16)
    if (doubtful := measured_on_trained(plan, begun.record["texts"])) is not None:
        say(doubtful)
        notes.append(doubtful)
    reported = bad.count
    if reported:
        say(f"{reported} lines were left out: {'; '.join(bad.examples)}")
    if plan.run.compile:
        notes.append(compile_blocks(model))
    if plan.run.checkpointing:
        # The newer name; the older one goes with version 6 of transformers.
        enable = getattr(model, "activation_checkpointing_enable", None)
        (enable or model.gradient_checkpointing_enable)()
    with quiet(), warnings.catch_warnings():
        # The Trainer's remarks on its own defaults are no concern of whoever trains.
        warnings.filterwarnings("ignore", module=r"(transformers|accelerate|torch)\..*")
        trainer = kind(
            model=model,
            args=trainer_arguments(plan, out, device, batch=layout.rows(plan.optimizer.batch)),
            train_dataset=stock.train,
            eval_dataset=cast(Any, stock.heldout or None),
            data_collator=partial(
                collate,
                reset_memory=plan.data.packing == "documents",
                flatten=plan.data.segments == 1,
            ),
            processing_class=tokenizer,
            spread=lies,
        )
        trainer.begun_with = begun.record
        trainer.rules_from = plan.optimizer.rules_from
        trainer.segments, trainer.kept = plan.data.segments, plan.data.segment_gradient == "kept"
        check_segments(model, trainer.segments)
        model.config.use_cache = True  # which the Trainer has switched off
        trainer.bytes_per_token = stock.bytes_per_token
        trainer.remove_callback(PrinterCallback)
        here = trainer.args.device
        ceiling = measured_ceiling(here, torch.bfloat16 if plan.run.bf16 else torch.float32)
        flops = model_flops(cast(RecollectConfig, model.config), context=plan.data.context)
        keeper = Keeper(plan, flops, ceiling * layout.processes)
        keeper.watch = watch
        trainer.speed = keeper.speed
        trainer.add_callback(keeper)
        if checkpoint is not None:
            same_model(checkpoint, cast(RecollectConfig, model.config))
            if (checkpoint / "model.safetensors").exists():  # not where many devices share it
                check_folder(checkpoint, model, head="model.")
            where = f"going on from {checkpoint}"
            if _taken(checkpoint) >= plan.steps:
                where = f"the run is finished, and more steps in its plan extend it; {checkpoint}"
            say(
                f"{where}: its {begun.files} files are as they were written, plan and texts those "
                "that the run was begun with"
            )
        if begun.extends is not None:
            trainer.add_callback(LongerSchedule(begun.extends, say))
        first = 1 if checkpoint is None else 1 + _taken(checkpoint)
        begins(header_of(plan, model, device=here, layout=layout, first=first))
        if trainer.args.should_save:
            note_begun(out, begun.record)
        began = time.perf_counter()
        with alive(partial(last_checkpoint, out)), lies.alone_again():
            with enough_memory(plan), finish_step(trainer):
                start = None if checkpoint is None else str(checkpoint)
                trainer.train(resume_from_checkpoint=start)
            seconds = time.perf_counter() - began
            keeper.end(trainer.recent_loss())
            trainer.save_whole(out / "model")
            measured = plan.run.eval_every and plan.steps % plan.run.eval_every == 0
            if stock.heldout and not measured:
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
        heldout_loss=keeper.progress.heldout_loss,
        skipped=bad.count,
        skipped_lines=tuple(bad.examples),
        notes=tuple(notes),
        history=tuple(trainer.state.log_history),
    )


def _taken(checkpoint: Path) -> int:
    """The step after which a checkpoint was written."""
    return int(checkpoint.name.rpartition("-")[2])


class RecollectTrainer(SegmentedTrainer, ShardedTrainer):
    """The Trainer with our weight decay, order of rows, and a measurement weighted by tokens."""

    bytes_per_token = 1.0
    rules_from: int | None = None  # base width of the rules for width, if there are any
    speed: Callable[[], dict[str, float]] = staticmethod(dict)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._recent: deque[Tensor] = deque(maxlen=LAST)  # one sum per optimizer step
        self._step = -1
        self.guard = Guard(self)
        self.guard.losses = self.losses
        self.add_callback(self.guard)

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None
    ) -> Tensor:
        """As the Trainer's; what it gives of a step's batches adds up to the step's loss.

        Args:
            model: as the Trainer wrapped it.
            inputs: a batch.
            num_items_in_batch: tokens that the step predicts.

        Raises:
            Diverged: a layer refused numbers that are not finite.
        """
        with self.guard.reading(inputs, num_items_in_batch):
            loss = super().training_step(model, inputs, num_items_in_batch)
        if self.state.global_step != self._step:
            self._step = self.state.global_step
            self._recent.append(torch.zeros_like(loss))
        self._recent[-1] = self._recent[-1] + loss
        self.guard.loss = self._recent[-1]
        return loss

    def recent_loss(self) -> float | None:
        """Mean of the last steps' losses over all processes, ``None`` before the first."""
        if not self._recent:
            return None
        mean = torch.stack([*self._recent]).float().mean()
        every = cast(Tensor, self.accelerator.gather(mean[None]))
        return float(every.mean())

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Every log line of the loss also says how fast it goes."""
        super().log({**logs, **self.speed()} if "loss" in logs else logs, *args, **kwargs)

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """As the Trainer's, with the learning rates that the rules for width ask for.

        Args:
            model: in place of the Trainer's own.
        """
        fresh = self.optimizer is None
        optimizer = super().create_optimizer(model)
        if fresh and self.rules_from is not None:
            rates = rates_of(cast(nn.Module, model or self.model), self.rules_from)
            optimizer.param_groups[:] = split_by_rate(optimizer.param_groups, rates)
        return optimizer

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        return decayed_names(model)

    def _get_train_sampler(self, train_dataset: Any = None) -> Sampler[int] | None:
        dataset = self.train_dataset if train_dataset is None else train_dataset
        return SequentialSampler(dataset) if isinstance(dataset, PackedDataset) else None

    @torch.no_grad()
    def evaluate(self, *_: Any, **__: Any) -> dict[str, float]:
        """Nats per token and bits per byte over all held-out tokens, each counted once.

        Raises:
            Diverged: a loss that is not finite.
        """
        rows: Sequence[PackedRow] = self.eval_dataset  # type: ignore[assignment]
        model = self.model
        assert model is not None
        training = model.training
        model.eval()
        began, total, tokens = time.perf_counter(), 0.0, 0
        size = self.args.per_device_eval_batch_size
        for start in range(0, len(rows), size):
            batch = self._prepare_inputs(self.data_collator(cast(Any, rows[start : start + size])))
            context = self.compute_loss_context_manager(), self.accelerator.autocast()
            with self.guard.reading(batch, measured=True), context[0], context[1]:
                loss = self.measured_loss(batch)
                self.guard.check_loss(loss)
            count = int((batch["labels"][:, 1:] != IGNORE_INDEX).sum())
            total, tokens = total + float(loss) * count, tokens + count
        model.train(training)
        reshard(model)
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
