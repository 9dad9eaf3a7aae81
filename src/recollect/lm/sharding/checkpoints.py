"""Checkpoints of a model whose weights are shared: every process writes what it holds.

``torch.distributed.checkpoint`` writes them as safetensors, which hold numbers and run nothing, and
reads them into any other layout. What it cannot know is the order of weights that are divided by
heads (`Cut.order`): it is that of the layout that wrote them, which stands beside them.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.distributed.tensor import DTensor, Replicate

from recollect.lm.model.checkpoint import CheckpointError, check_json
from recollect.lm.sharding.heads import Cut

__all__ = [
    "SHARDS",
    "load_optimizer",
    "load_weights",
    "save_shards",
    "unwrapped",
    "whole_weights",
    "write_layout",
]

SHARDS = "shards"
"""Folder of a checkpoint that holds what each process had."""

LAYOUT = "layout.json"
"""Beside the shards: of how many tensor-parallel ranks they are."""

WEIGHT, MOMENT = "model.", "optimizer."


def save_shards(
    folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, group: dist.ProcessGroup
) -> Future[Any]:
    """Copy weights and the optimizer's moments, and write the copies while others go on.

    All processes call this. On the CPU the copies are as large as what a process holds; from a
    device they have to come there anyway.

    Args:
        folder: of the checkpoint.
        model: whose weights are shared.
        optimizer: of these weights.
        group: of all processes, over gloo, in which nobody else talks meanwhile.

    Returns:
        What is done once all processes have written their shards, and fails at all of them if one
        has failed (`unwrapped`).
    """
    state = {WEIGHT + name: weight.detach() for name, weight in model.named_parameters()}
    for name, weight in model.named_parameters():
        for key, value in optimizer.state.get(weight, {}).items():
            state[f"{MOMENT}{name}.{key}"] = value.reshape(1) if value.dim() == 0 else value
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"torch\..*")
        writer = HuggingFaceStorageWriter(str(folder / SHARDS), save_distributed=True)
        return cast("Future[Any]", async_save(state, storage_writer=writer, process_group=group))


def write_layout(folder: Path, tensor: int) -> None:
    """Write beside shards how they are divided.

    Args:
        folder: of the checkpoint. tensor: ranks that layers are divided among.
    """
    (folder / LAYOUT).write_text(json.dumps({"tensor": tensor}) + "\n", encoding="utf-8")


@contextmanager
def unwrapped() -> Iterator[None]:
    """Inside, what DCP gathered of failures is raised as the first of them.

    Raises:
        OSError: or RuntimeError, of the process that could not write.
    """
    try:
        yield
    except CheckpointException as error:
        reason = next(iter(error.failures.values()))[0]
        raise (reason if isinstance(reason, Exception) else RuntimeError(str(reason))) from error


def load_weights(
    checkpoint: Path, model: nn.Module, cuts: Mapping[str, Cut], *, tensor: int
) -> None:
    """Read a checkpoint's weights into a model, whatever layout wrote them.

    Args:
        checkpoint: its folder, with shards or with whole weights.
        model: whole or shared among processes, all of which call this.
        cuts: weights that are divided by heads, by name.
        tensor: ranks that this model's layers are divided among.

    Raises:
        CheckpointError: a weight that is missing.
    """
    shards = (checkpoint / SHARDS).is_dir()
    head, wrote = (WEIGHT, _tensor(checkpoint)) if shards else ("", 1)
    names = dict(model.named_parameters())
    _read(checkpoint / SHARDS if shards else checkpoint, {head + n: w for n, w in names.items()})
    for name, weight in names.items():
        if name in cuts and wrote != tensor:
            _reorder(weight, cuts[name], wrote, tensor)


def load_optimizer(
    checkpoint: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    cuts: Mapping[str, Cut],
    *,
    tensor: int,
) -> None:
    """Read the optimizer's moments into one that has taken no step, whatever layout wrote them.

    Args:
        checkpoint, model, cuts, tensor: as in `load_weights`.
        optimizer: of the model's weights.
    """
    if (checkpoint / SHARDS).is_dir():
        wrote, found = _tensor(checkpoint), _moments(checkpoint / SHARDS)
        names = dict(model.named_parameters())
        state: dict[str, Tensor] = {}
        for key in found:
            weight = names[key.removeprefix(MOMENT).rpartition(".")[0]]
            alone = key.endswith(".step")
            state[key] = torch.zeros(1, device=weight.device) if alone else _zeros(weight)
        _read(checkpoint / SHARDS, state)
        for key, value in state.items():
            name, _, moment = key.removeprefix(MOMENT).rpartition(".")
            if name in cuts and value.dim() and moment != "step" and wrote != tensor:
                _reorder(value, cuts[name], wrote, tensor)
            value = value.reshape(()) if moment == "step" else value
            optimizer.state[names[name]][moment] = value
        return
    for name, moments in _of_one(checkpoint, optimizer, model).items():
        weight = dict(model.named_parameters())[name]
        for moment, value in moments.items():
            if value.dim():
                value = _ordered(value, cuts.get(name), 1, tensor)
                value = _like(value, weight)
            optimizer.state[weight][moment] = value.to(weight.device).clone()


def whole_weights(
    model: nn.Module, cuts: Mapping[str, Cut], *, tensor: int, first: bool
) -> dict[str, Tensor]:
    """All weights of a model, whole and in order, on the CPU of the first process.

    They are gathered one after the other; all processes call this.

    Args:
        model, cuts, tensor: as in `load_weights`.
        first: whether this process keeps them.
    """
    kept: dict[str, Tensor] = {}
    for name, weight in model.named_parameters():
        value = weight.detach()
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        if first:
            kept[name] = _ordered(whole, cuts.get(name), tensor, 1).cpu()
    return kept


def _tensor(checkpoint: Path) -> int:
    wrote = check_json(checkpoint / LAYOUT).get("tensor")
    if not isinstance(wrote, int) or wrote < 1:
        raise CheckpointError(f"{checkpoint / LAYOUT} does not say how its weights are divided")
    return wrote


def _read(folder: Path, state: dict[str, Tensor]) -> None:
    """Read tensors by name into those that are there."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"torch\..*")
        try:
            load(
                {name: x.detach() for name, x in state.items()},
                storage_reader=HuggingFaceStorageReader(str(folder)),
            )
        except CheckpointException as error:
            reason = next(iter(error.failures.values()))[0]
            raise CheckpointError(f"{folder} cannot be read: {reason}") from error


def _moments(folder: Path) -> Iterator[str]:
    metadata = HuggingFaceStorageReader(str(folder)).read_metadata()
    return (name for name in metadata.state_dict_metadata if name.startswith(MOMENT))


def _of_one(
    checkpoint: Path, optimizer: torch.optim.Optimizer, model: nn.Module
) -> dict[str, dict[str, Tensor]]:
    """The moments that one process wrote, by the name of their weight."""
    saved: Any = torch.load(checkpoint / "optimizer.pt", map_location="cpu", weights_only=True)
    names = {id(weight): name for name, weight in model.named_parameters()}
    ours = [names[id(w)] for group in optimizer.param_groups for w in group["params"]]
    theirs = [index for group in saved["param_groups"] for index in group["params"]]
    pairs = zip(ours, theirs, strict=True)
    return {name: saved["state"][index] for name, index in pairs if index in saved["state"]}


def _zeros(weight: Tensor) -> Tensor:
    return torch.zeros_like(weight.detach(), memory_format=torch.preserve_format)


def _like(whole: Tensor, weight: Tensor) -> Tensor:
    """A whole tensor laid out as a weight is."""
    made = _zeros(weight)
    _fill(made, whole)
    return made


def _fill(x: Tensor, whole: Tensor) -> None:
    """Write a whole tensor, the same on all processes, into one that may be shared."""
    value = x.detach()
    if isinstance(value, DTensor):
        mesh = value.device_mesh
        every = [Replicate()] * mesh.ndim
        value.copy_(DTensor.from_local(whole.to(value.device), mesh, every, run_check=False))
    else:
        value.copy_(whole)


def _ordered(whole: Tensor, cut: Cut | None, before: int, after: int) -> Tensor:
    """A whole weight in the order of so many ranks, from that of so many others."""
    if cut is None or before == after or len(cut.widths) == 1:
        return whole
    back = torch.empty(sum(cut.widths), dtype=torch.long)
    back[cut.order(before)] = torch.arange(sum(cut.widths))
    return whole.index_select(cut.axis, back[cut.order(after)].to(whole.device))


def _reorder(x: Tensor, cut: Cut, before: int, after: int) -> None:
    if len(cut.widths) == 1:
        return
    value = x.detach()
    whole = value.full_tensor() if isinstance(value, DTensor) else value
    _fill(x, _ordered(whole, cut, before, after))
