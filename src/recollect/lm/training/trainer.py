"""The Trainer of a plan.

It adds to `transformers.Trainer` rows in segments, the order of rows, groups of parameters, checks
before every step, atomic checkpoints, sharded models, and an evaluation weighted by tokens. See
docs/design/training.md.
"""

from __future__ import annotations

import math
import os
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

import torch
from accelerate.data_loader import prepare_data_loader
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, Sampler, SequentialSampler
from transformers import PrinterCallback, Trainer, TrainingArguments

from recollect.lm.data.rows import IGNORE_INDEX, PackedDataset, PackedRow, collate, pad_documents
from recollect.lm.distributed.async_save import AsyncSave
from recollect.lm.distributed.checkpoints import (
    SHARDS_DIR,
    gather_weights,
    load_optimizer,
    load_weights,
    save_shards,
    write_layout,
)
from recollect.lm.distributed.fsdp import reshard
from recollect.lm.distributed.head_sharding import model_shard_specs
from recollect.lm.distributed.parallel_dims import ParallelDims
from recollect.lm.distributed.parallelize import Sharding
from recollect.lm.distributed.processes import process_timeout
from recollect.lm.memory_estimate.flops import decoder_flops, measure_peak_flops, model_flops
from recollect.lm.model.cache import RecollectCache, cache_of
from recollect.lm.model.checkpoint import CheckpointError
from recollect.lm.model.config import RecollectConfig
from recollect.lm.model.manifest import write_manifest
from recollect.lm.model.model import RecollectForCausalLM
from recollect.lm.mup.rules import lr_scales, split_groups_by_lr
from recollect.lm.publishing.card import carry_over
from recollect.lm.training.arguments import tensorboard_callback
from recollect.lm.training.atomic_checkpoints import (
    STAGING_DIR,
    check_moments,
    commit_checkpoint,
    commit_folder,
    remove_staging,
    restoring,
    translate_sharded_write_errors,
    translate_write_errors,
)
from recollect.lm.training.divergence import DivergenceGuard
from recollect.lm.training.plan import TrainPlan
from recollect.lm.training.progress import SilentObserver, ThroughputCallback, TrainObserver
from recollect.lm.training.segments import (
    Segment,
    as_leaves,
    check_segments,
    count_targets,
    float_tensors,
    split_into_segments,
)
from recollect.lm.training.setup import TextData
from recollect.lm.training.weight_decay import decay_parameter_names
from recollect.report.ranks import mark_collective

__all__ = ["LOSS_WINDOW", "RecollectTrainer"]

LOSS_WINDOW = 10
"""Number of steps whose mean is the loss of a run."""


class RecollectTrainer(Trainer):
    """Trains a model as a plan describes. Methods may be overridden in subclasses.

    Args:
        plan: Plan of the run.
        model: The model, or a decoder whose layers were replaced; already divided if several
            processes share it.
        args: Arguments of `trainer_arguments`.
        data: Rows for training and evaluation.
        tokenizer: Tokenizer that is saved with the model.
        sharding: How the model is divided; by default it is not.
        run_record: Plan and fingerprints of the texts, saved in every checkpoint.
        observer: Receives the progress.
    """

    def __init__(
        self,
        plan: TrainPlan,
        model: RecollectForCausalLM,
        args: TrainingArguments,
        *,
        data: TextData | None = None,
        tokenizer: Any = None,
        sharding: Sharding | None = None,
        run_record: Mapping[str, Any] = MappingProxyType({}),
        observer: TrainObserver | None = None,
    ) -> None:
        check_segments(model, plan.data.segments)
        self.plan, self.run_record = plan, run_record
        self._is_own_model = isinstance(model.config, RecollectConfig)
        self.bytes_per_token = 1.0 if data is None else data.bytes_per_token
        self.sharding = sharding or Sharding(
            layout=ParallelDims(), index=0, cuts=model_shard_specs(model)
        )
        self.async_save = AsyncSave(process_timeout())
        self._is_staging = False  # whether a checkpoint is being written
        self._stop_requested = self._stop_agreed = False
        self._recent_losses: deque[Tensor] = deque(maxlen=LOSS_WINDOW)
        self._last_step = -1
        self._segment_loss: Tensor | None = None
        self._segment_cache: RecollectCache | None = None
        self._state_grads: list[Tensor] = []  # gradients of the segment's final states
        self._scale_probe: Tensor | None = None  # its gradient is the factor of the loss
        super().__init__(
            model=model,
            args=args,
            train_dataset=None if data is None else cast(Any, data.train),
            eval_dataset=None if data is None else cast(Any, data.heldout or None),
            data_collator=partial(
                collate,
                reset_memory=plan.data.packing == "documents",
                flatten=plan.data.segments == 1,
            ),
            processing_class=tokenizer,
        )
        model.config.use_cache = True  # the Trainer has set it to False
        layout = self.sharding.layout
        if layout.is_sharded:
            # Accelerate would wrap the model in DDP, which needs whole weights.
            prepare_model = self.accelerator.prepare_model
            self.accelerator.prepare_model = partial(prepare_model, evaluation_mode=True)
        self.guard = DivergenceGuard(self)
        dtype = torch.bfloat16 if plan.run.bf16 else torch.float32
        self.throughput = ThroughputCallback(
            plan,
            flops_per_token=model_flops(model.config, context=plan.data.context)
            if isinstance(model.config, RecollectConfig)
            else decoder_flops(model),
            peak_flops=measure_peak_flops(self.args.device, dtype) * layout.world_size,
            observer=observer or SilentObserver(),
        )
        self.remove_callback(PrinterCallback)
        self.add_callback(self.throughput)
        if plan.run.tensorboard:
            self.add_callback(tensorboard_callback(Path(str(args.output_dir)) / "logs"))

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train as the Trainer does; no save is pending at the end or after an error."""
        try:
            output = super().train(*args, **kwargs)
            self.async_save.wait()
        finally:
            self.async_save.drain()
        return output

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None
    ) -> Tensor:
        """Run a batch forward and backward, and return its part of the step's loss."""
        if num_items_in_batch is not None:  # a step without targets has a loss of 0
            num_items_in_batch = num_items_in_batch + (num_items_in_batch == 0)
        is_new_step = self.state.global_step != self._last_step
        if is_new_step:
            self._last_step = self.state.global_step
            groups = [] if self.optimizer is None else self._unwrap_optimizer().param_groups
            lr = groups[0]["lr"] if groups else 0.0
            self.guard.start_step(self._last_step + 1, lr)
        with self.guard.track_batch(inputs, num_items_in_batch):
            if not self._is_own_model:
                loss = self._padded_step(model, inputs, num_items_in_batch)
            elif self.plan.data.segments == 1:
                loss = super().training_step(model, inputs, num_items_in_batch)
            else:
                loss = self._segmented_step(model, inputs, num_items_in_batch)
        self._recent_losses.append(loss if is_new_step else self._recent_losses.pop() + loss)
        return loss

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        """Return the gradient norm, which the Trainer computes before every optimizer step."""
        grad_norm = super()._get_grad_norm(model, grad_norm)
        self._check_step(grad_norm)
        return grad_norm

    def _check_step(self, grad_norm: Tensor) -> None:
        """Check a step before the optimizer takes it, with one reduction over the processes."""
        local_norm = grad_norm.to_local() if isinstance(grad_norm, DTensor) else grad_norm
        has_finite_loss = self._recent_losses[-1].isfinite()
        flags = torch.tensor(
            [0.0, self._stop_requested, self.async_save.failed], device=local_norm.device
        )
        flags[0] = ~(has_finite_loss & local_norm.isfinite())
        if self.args.world_size > 1:
            flags = cast(Tensor, self.accelerator.reduce(flags))
        has_diverged, stop, save_failed = (bool(flag) for flag in flags.tolist())
        self._stop_agreed = stop
        if has_diverged:
            error = self.guard.error("a gradient" if bool(has_finite_loss) else "the loss")
            raise mark_collective(error) if self.args.world_size > 1 else error
        if save_failed:  # every process raises the error of the save
            self.async_save.wait()

    def request_stop(self) -> None:
        """Ask all processes to stop after a step."""
        self._stop_requested = True

    @property
    def should_stop(self) -> bool:
        """Whether all processes stop after this step."""
        return self._stop_agreed if self.args.world_size > 1 else self._stop_requested

    def mean_recent_loss(self) -> float | None:
        """Return the mean loss of the last steps over all processes; ``None`` without a step."""
        if not self._recent_losses:
            return None
        mean = torch.stack([*self._recent_losses]).float().mean()
        return float(cast(Tensor, self.accelerator.gather(mean[None])).mean())

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log values, with the throughput next to a loss."""
        if "loss" in logs:
            progress = self.throughput.progress
            logs = {**logs, "tokens_per_second": progress.tokens_per_second}
            logs["ceiling_share"] = progress.ceiling_share
        super().log(logs, *args, **kwargs)

    def _padded_step(self, model: nn.Module, inputs: dict[str, Any], num_items: Any) -> Tensor:
        """Run the documents of a batch in padded parts, and return its loss."""
        batch = cast(dict[str, Tensor], self._prepare_inputs(inputs))
        num_items = count_targets(batch).clamp_min(1) if num_items is None else num_items
        losses: list[Tensor] = []
        parts = pad_documents(batch)
        for part in parts:
            # DDP averages gradients after the last part.
            with nullcontext() if part is parts[-1] else self.accelerator.no_sync(model):
                losses.append(super().training_step(model, part, num_items))
        return torch.stack(losses).sum()

    def _segmented_step(self, model: nn.Module, inputs: dict[str, Any], num_items: Any) -> Tensor:
        """Run the segments of a batch, and return its loss."""
        batch = cast(dict[str, Tensor], self._prepare_inputs(inputs))
        num_items = count_targets(batch).clamp_min(1) if num_items is None else num_items
        segments = split_into_segments(batch, self.plan.data.segments)
        if self.plan.data.segment_gradient == "kept":
            return self._full_gradient_step(model, segments, num_items)
        losses: list[Tensor] = []
        cache = None
        for segment in segments:
            kwargs = segment.forward_kwargs(self._unwrap(model), cache)
            # DDP averages gradients after the last segment. Sharded ones are reduced after each.
            is_last = segment is segments[-1]
            with nullcontext() if is_last else self.accelerator.no_sync(model):
                super().training_step(model, kwargs, num_items)
            loss, cache = self._pop_segment()
            losses.append(loss)
        return torch.stack(losses).sum()

    def _full_gradient_step(
        self, model: nn.Module, segments: Sequence[Segment], num_items: Any
    ) -> Tensor:
        """Run segments from the last to the first, each with the gradients of its final states."""
        model.train()
        caches: list[RecollectCache | None] = [None]
        for segment in segments[:-1]:
            with torch.no_grad(), self.compute_loss_context_manager():
                kwargs = segment.forward_kwargs(self._unwrap(model), caches[-1])
                del kwargs["shift_labels"]
                caches.append(cache_of(model(**kwargs, logits_to_keep=1)))
        losses: list[Tensor] = []
        try:
            for segment in reversed(segments):
                cache = caches.pop()
                leaves = None if cache is None else as_leaves(cache)
                self._scale_probe = torch.zeros((), device=self.args.device, requires_grad=True)
                kwargs = segment.forward_kwargs(self._unwrap(model), leaves)
                super().training_step(model, kwargs, num_items)
                losses.append(self._pop_segment()[0])
                scale = cast(Tensor, self._scale_probe.grad)
                self._state_grads = [
                    torch.zeros_like(x) if x.grad is None else x.grad / scale.to(x.dtype)
                    for x in (() if leaves is None else float_tensors(leaves))
                ]
        finally:
            self._state_grads, self._scale_probe = [], None
        return torch.stack(losses).sum()

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """Return the loss of a batch, or of a segment with its cache."""
        if not self._is_own_model:
            loss, outputs = cast(Any, super().compute_loss(model, inputs, True))
            loss = loss.masked_fill(count_targets(inputs) == 0, 0.0)  # a mean of no targets is NaN
            if num_items_in_batch is not None:
                loss = loss * self.fraction_of_step(inputs, num_items_in_batch)
            return (loss, outputs) if return_outputs else loss
        if "cache" not in inputs:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        loss, outputs = cast(Any, super().compute_loss(model, inputs, True, num_items_in_batch))
        self._segment_loss = loss.detach().clone()
        cache = self._segment_cache = cache_of(outputs)
        if self._scale_probe is not None:
            loss = loss + self._scale_probe
            states = float_tensors(cache)
            for state, grad in zip(states, self._state_grads, strict=bool(self._state_grads)):
                if state.requires_grad:
                    loss = loss + (state * grad).sum().to(loss.dtype)
        return (loss, outputs) if return_outputs else loss

    def fraction_of_step(self, inputs: Mapping[str, Tensor], num_items: Any) -> Tensor:
        """Return the factor of the mean loss of a batch in the loss of all batches of a step."""
        fraction = count_targets(inputs) / num_items
        is_global = self.args.average_tokens_across_devices and self.model_accepts_loss_kwargs
        return fraction * self.accelerator.num_processes if is_global else fraction

    def _pop_segment(self) -> tuple[Tensor, RecollectCache]:
        """Return the loss of the last segment and its detached states."""
        loss, cache = self._segment_loss, self._segment_cache
        assert loss is not None and cache is not None
        self._segment_loss = self._segment_cache = None
        return loss, cache.detach()

    def batch_losses(
        self, batch: dict[str, Tensor], num_items: Any = None, **kwargs: Any
    ) -> Iterator[Tensor]:
        """Compute the losses of the parts of a batch on the device; their sum is its loss."""
        model, num_segments = cast(nn.Module, self.model), self.plan.data.segments
        if not self._is_own_model:
            parts = pad_documents(batch)
            num_items = count_targets(batch).clamp_min(1) if num_items is None else num_items
            for part in parts:
                yield self.compute_loss(model, {**part, **kwargs}) * count_targets(part) / num_items
            return
        if num_segments > 1 and num_items is None:
            num_items = count_targets(batch).clamp_min(1)
        if num_items is not None:  # as an argument of `compute_loss`, it scales by processes too
            kwargs["num_items_in_batch"] = num_items
        if num_segments == 1:
            yield self.compute_loss(model, {**batch, **kwargs})
            return
        cache = None
        for segment in split_into_segments(batch, num_segments):
            inputs = {**kwargs, **segment.forward_kwargs(self._unwrap(model), cache)}
            loss = self.compute_loss(model, inputs)
            cache = self._pop_segment()[1]
            yield loss

    @torch.no_grad()
    def evaluate(
        self,
        eval_dataset: Any = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> dict[str, float]:
        """Return nats per token and bits per byte of rows, by default of the held-out rows."""
        rows = cast(
            Sequence[PackedRow], self.eval_dataset if eval_dataset is None else eval_dataset
        )
        model = cast(RecollectForCausalLM, self.model)
        is_training, started = model.training, time.perf_counter()
        model.eval()
        total, num_tokens = 0.0, 0
        batch_size = self.args.per_device_eval_batch_size
        for first in range(0, len(rows), batch_size):
            batch_rows = cast(Any, rows[first : first + batch_size])
            batch = self._prepare_inputs(self.data_collator(batch_rows))
            with self.guard.track_batch(batch, is_eval=True), self.accelerator.autocast():
                options = {"output_logits": False} if self._is_own_model else {}
                losses = self.batch_losses(batch, use_cache=False, **options)
                loss = torch.stack([*losses]).sum()
            if not bool(loss.isfinite()):
                raise self.guard.error("the held-out loss")
            count = int((batch["labels"][:, 1:] != IGNORE_INDEX).sum())
            total, num_tokens = total + float(loss) * count, num_tokens + count
        model.train(is_training)
        reshard(model)
        nats = total / max(num_tokens, 1)
        metrics = {
            f"{metric_key_prefix}_loss": nats,
            f"{metric_key_prefix}_bits_per_byte": nats / math.log(2) / self.bytes_per_token,
            f"{metric_key_prefix}_seconds": time.perf_counter() - started,
        }
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(
            self.args, self.state, self.control, metrics
        )
        return metrics

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        return decay_parameter_names(model)

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Create the optimizer, with a learning rate per group under muP."""
        is_new, base_width = self.optimizer is None, self.plan.optimizer.mup_base_width
        optimizer = super().create_optimizer(model)
        if is_new and base_width is not None:
            scales = lr_scales(cast(nn.Module, model or self.model), base_width)
            optimizer.param_groups[:] = split_groups_by_lr(optimizer.param_groups, scales)
        return optimizer

    def _get_train_sampler(self, train_dataset: Any = None) -> Sampler[int] | None:
        """Keep the order of the rows, which depends on the seed alone."""
        dataset = self.train_dataset if train_dataset is None else train_dataset
        return SequentialSampler(dataset) if isinstance(dataset, PackedDataset) else None

    def get_train_dataloader(self) -> Any:
        """Return the batches of this process; processes of one data group get equal ones."""
        layout = self.sharding.layout
        if not layout.is_sharded:
            return super().get_train_dataloader()
        loader = DataLoader(
            cast(Any, self.train_dataset),
            batch_size=self._train_batch_size,
            sampler=self._get_train_sampler(),
            collate_fn=self.data_collator,
            pin_memory=self.args.dataloader_pin_memory,
        )
        return prepare_data_loader(
            loader,
            self.args.device,
            num_processes=layout.dp,
            process_index=self.sharding.index,
            put_on_device=True,
            dispatch_batches=False,
        )

    def _get_output_dir(self, trial: Any) -> str:
        """Return the staging folder while a checkpoint is being written."""
        folder = super()._get_output_dir(trial)
        return os.path.join(folder, STAGING_DIR) if self._is_staging else folder

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Write a checkpoint to the staging folder and rename it."""
        self.async_save.wait()
        run, name = Path(self._get_output_dir(trial)), f"checkpoint-{self.state.global_step}"
        if self.args.should_save:
            remove_staging(run)
        self.accelerator.wait_for_everyone()
        commit = partial(
            commit_checkpoint, run, name, self.run_record, keep=self.args.save_total_limit
        )
        self._is_staging, failure = True, None
        try:
            with translate_write_errors(run, name, clean_up=not self.sharding.layout.is_sharded):
                super()._save_checkpoint(model, trial)
        except CheckpointError as error:
            if not self.async_save.in_progress:
                raise
            failure = error  # the other processes have to raise it too
        finally:
            self._is_staging = False
        if self.async_save.in_progress:
            self.async_save.finalize(
                commit,
                partial(remove_staging, run),
                partial(translate_sharded_write_errors, run, name),
                failure,
            )
            return
        self.accelerator.wait_for_everyone()
        if self.args.should_save:
            with translate_write_errors(run, name):
                commit()

    def save_final_model(self, folder: Path) -> None:
        """Save the model and its tokenizer to a folder, atomically."""
        run, staged = folder.parent, folder.parent / STAGING_DIR / folder.name
        if self.args.should_save:
            remove_staging(run)
        self.accelerator.wait_for_everyone()
        with translate_write_errors(run, folder.name):
            self.save_model(str(staged), _internal_call=True)
            self.accelerator.wait_for_everyone()
            if self.args.should_save:
                (staged / "training_args.bin").unlink(missing_ok=True)  # a pickle
                carry_over(folder, staged)
                write_manifest(staged)
                commit_folder(staged, folder)
                remove_staging(run)
        self.accelerator.wait_for_everyone()

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model; a checkpoint of a sharded model gets its shards in the background."""
        if not self.sharding.layout.is_sharded:
            super().save_model(output_dir, _internal_call)
            return
        folder = Path(str(output_dir or self.args.output_dir))
        model, tp_size = cast(RecollectForCausalLM, self.model), self.sharding.layout.tp
        is_first = self.args.should_save
        if not self._is_staging:
            folder.mkdir(parents=True, exist_ok=True)
            weights = gather_weights(model, self.sharding.cuts, tp_size=tp_size, keep=is_first)
            if is_first:
                self._save(str(folder), state_dict=weights)
            return
        self.async_save.start(partial(save_shards, folder, model, self._unwrap_optimizer()))
        folder.mkdir(parents=True, exist_ok=True)  # from here on `finalize` reports failures
        if is_first:
            write_layout(folder, tp_size)
            model.config.save_pretrained(folder)
            cast(Any, self.processing_class).save_pretrained(str(folder))

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if not self.sharding.layout.is_sharded:
            super()._save_optimizer_and_scheduler(output_dir)
        elif self.args.should_save:  # the optimizer's state is in the shards
            scheduler = cast(Any, self.lr_scheduler).state_dict()
            torch.save(scheduler, Path(output_dir) / "scheduler.pt")

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if not self._has_shards(resume_from_checkpoint):
            super()._load_from_checkpoint(resume_from_checkpoint, model)
            return
        sharding, model = self.sharding, cast(nn.Module, self.model)
        load_weights(Path(resume_from_checkpoint), model, sharding.cuts, tp_size=sharding.layout.tp)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        with restoring(checkpoint):
            if checkpoint is None or not self._has_shards(checkpoint):
                super()._load_optimizer_and_scheduler(checkpoint)
                if checkpoint is not None:
                    check_moments(cast(torch.optim.Optimizer, self.optimizer))
                return
            folder, model = Path(checkpoint), cast(nn.Module, self.model)
            optimizer, scheduler = self._unwrap_optimizer(), cast(Any, self.lr_scheduler)
            tp_size = self.sharding.layout.tp
            load_optimizer(folder, model, optimizer, self.sharding.cuts, tp_size=tp_size)
            check_moments(optimizer)
            scheduler.load_state_dict(torch.load(folder / "scheduler.pt", weights_only=True))
            for group, lr in zip(optimizer.param_groups, scheduler.get_last_lr(), strict=True):
                group["lr"] = lr

    def _load_rng_state(self, checkpoint: str | None) -> None:
        with restoring(checkpoint):
            super()._load_rng_state(checkpoint)

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        if not self.sharding.layout.is_sharded:  # shards are on their device
            super()._move_model_to_device(model, device)

    def _unwrap(self, model: nn.Module) -> RecollectForCausalLM:
        return cast(RecollectForCausalLM, self.accelerator.unwrap_model(model))

    def _unwrap_optimizer(self) -> torch.optim.Optimizer:
        return cast(torch.optim.Optimizer, getattr(self.optimizer, "optimizer", self.optimizer))

    def _has_shards(self, checkpoint: str) -> bool:
        """Whether a checkpoint or this model is sharded, which the Trainer cannot read."""
        return self.sharding.layout.is_sharded or (Path(checkpoint) / SHARDS_DIR).is_dir()
