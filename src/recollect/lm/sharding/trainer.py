"""A Trainer whose model is shared among processes.

The Trainer and Accelerate share a model in ways of their own, which ask for a configuration of
their own and, on a CPU, fall back to replicas unasked. So the model is divided before the Trainer
sees it (`spread`), and the Trainer is told what follows: that nothing is left to wrap, which rows
are this process's, and how its checkpoints are written. See docs/design/training.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from accelerate.data_loader import prepare_data_loader
from torch import nn
from torch.utils.data import DataLoader

from recollect.lm.model.model import RecollectForCausalLM
from recollect.lm.sharding.background import Background
from recollect.lm.sharding.checkpoints import (
    SHARDS,
    load_optimizer,
    load_weights,
    save_shards,
    whole_weights,
    write_layout,
)
from recollect.lm.sharding.data import shard
from recollect.lm.sharding.heads import Cut, model_cuts
from recollect.lm.sharding.layout import Layout
from recollect.lm.sharding.processes import patience
from recollect.lm.sharding.tensor import check_heads, divide_by_heads
from recollect.lm.training.atomic_checkpoints import AtomicTrainer, check_moments, restoring
from recollect.parallel.context_parallel import ContextParallel, context
from recollect.parallel.models import check_model

__all__ = ["ShardedTrainer", "Spread", "check_fits", "spread"]


@dataclass(frozen=True, kw_only=True)
class Spread:
    """How a model lies on its processes.

    Attributes:
        layout: the grid.
        index: which of the groups that read different rows this process belongs to.
        cuts: weights that tensor parallelism divides, by name.
        along: the processes that read segments of the same rows, ``None`` where each reads whole
            ones. The model is called with whole rows all the same.
    """

    layout: Layout
    index: int
    cuts: Mapping[str, Cut]
    along: ContextParallel | None = None

    def alone_again(self) -> AbstractContextManager[Any]:
        """Afterwards the model reads what it is given by itself."""
        return nullcontext() if self.along is None else self.along


def check_fits(model: RecollectForCausalLM, layout: Layout) -> None:
    """That a model can be divided as a layout says; nobody is waited for.

    Args:
        model: whole. layout: the grid.

    Raises:
        ValueError: heads or channels that the tensor-parallel ranks do not divide; a model whose
            rows cannot lie along several processes.
    """
    if layout.tensor > 1:
        check_heads(model, layout.tensor)
    if layout.context > 1:
        try:
            check_model(model)
        except ValueError as error:
            raise ValueError(f"[run] parallel: context = {layout.context}: {error}") from error


def spread(
    model: RecollectForCausalLM, layout: Layout, device_type: str, *, bf16: bool = False
) -> Spread:
    """Divide a model among processes as a layout says, in place.

    Args:
        model: the same whole model on all of them.
        layout: the grid; without shards and parts nothing is done here.
        device_type: ``"cpu"`` or ``"cuda"``.
        bf16: as in `shard`.

    Raises:
        RecipeError: heads or channels that the tensor-parallel ranks do not divide.
    """
    cuts = model_cuts(model)
    if not layout.divides:
        return Spread(layout=layout, index=0, cuts=cuts)
    weights, tokens, along = layout.weights(device_type), layout.mesh(device_type), None
    if layout.tensor > 1:
        divide_by_heads(model, weights["tensor"])
    if layout.readers > 1:
        shard(model, weights["readers"], bf16=bf16)
    if layout.context > 1:
        along = context(model, tokens["context"], gradient_reduction="mean", shard_inputs=True)
    return Spread(layout=layout, index=tokens.get_local_rank("data"), cuts=cuts, along=along)


class ShardedTrainer(AtomicTrainer):
    """A Trainer that leaves the model as `spread` has divided it.

    Attributes:
        spread: how the model lies on its processes.
    """

    spread: Spread

    def __init__(self, *args: Any, spread: Spread | None = None, **kwargs: Any) -> None:
        model = kwargs.get("model")
        if spread is None:
            cuts = {} if model is None else model_cuts(model)
            spread = Spread(layout=Layout(), index=0, cuts=cuts)
        self.spread = spread
        super().__init__(*args, **kwargs)
        if self.spread.layout.divides:
            # Accelerate would put the parts into DDP, which wants them whole.
            own = self.accelerator.prepare_model
            self.accelerator.prepare_model = partial(own, evaluation_mode=True)
            self.background = Background(patience())

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        if not self.spread.layout.divides:  # parts are where they belong
            super()._move_model_to_device(model, device)

    def get_train_dataloader(self) -> Any:
        """The rows of a step in turn to the groups; one group's processes are given the same."""
        if not self.spread.layout.divides:
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
            num_processes=self.spread.layout.data,
            process_index=self.spread.index,
            put_on_device=True,
            dispatch_batches=False,
        )

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """As the Trainer's; of a shared model, a checkpoint is its shards, and all else whole.

        Shards are being written still when this returns (`Background`).

        Args:
            output_dir: the folder.
            _internal_call: whether the Trainer asks.
        """
        if not self.spread.layout.divides:
            super().save_model(output_dir, _internal_call)
            return
        folder = Path(str(output_dir or self.args.output_dir))
        model, spread = cast(RecollectForCausalLM, self.model), self.spread
        tensor, first = spread.layout.tensor, self.args.should_save
        if self.background is None or not self._aside:
            folder.mkdir(parents=True, exist_ok=True)
            weights = whole_weights(model, spread.cuts, tensor=tensor, first=first)
            if first:
                self._save(str(folder), state_dict=weights)
            return
        optimizer = self._plain_optimizer()
        self.background.begin(partial(save_shards, folder, model, optimizer))
        folder.mkdir(parents=True, exist_ok=True)  # what fails from here on, the others hear of
        if first:
            write_layout(folder, tensor)
            model.config.save_pretrained(folder)
            cast(Any, self.processing_class).save_pretrained(str(folder))

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if not self.spread.layout.divides:
            super()._save_optimizer_and_scheduler(output_dir)
        elif self.args.should_save:  # the moments stand among the shards
            scheduler = cast(Any, self.lr_scheduler).state_dict()
            torch.save(scheduler, Path(output_dir) / "scheduler.pt")

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if not self._shared(resume_from_checkpoint):
            super()._load_from_checkpoint(resume_from_checkpoint, model)
            return
        tensor = self.spread.layout.tensor
        own = cast(nn.Module, self.model)
        load_weights(Path(resume_from_checkpoint), own, self.spread.cuts, tensor=tensor)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None or not self._shared(checkpoint):
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        folder, model = Path(checkpoint), cast(nn.Module, self.model)
        optimizer = self._plain_optimizer()
        tensor = self.spread.layout.tensor
        scheduler = cast(Any, self.lr_scheduler)
        with restoring(checkpoint):
            load_optimizer(folder, model, optimizer, self.spread.cuts, tensor=tensor)
            check_moments(optimizer)
            scheduler.load_state_dict(torch.load(folder / "scheduler.pt", weights_only=True))
        for group, rate in zip(optimizer.param_groups, scheduler.get_last_lr(), strict=True):
            group["lr"] = rate  # of the next step, as an optimizer's own state has it

    def _plain_optimizer(self) -> torch.optim.Optimizer:
        """The optimizer, out of what Accelerate puts around it."""
        return cast(torch.optim.Optimizer, getattr(self.optimizer, "optimizer", self.optimizer))

    def _shared(self, checkpoint: str) -> bool:
        """Whether a checkpoint or this model is shared: the Trainer would read it as it is."""
        return self.spread.layout.divides or (Path(checkpoint) / SHARDS).is_dir()
