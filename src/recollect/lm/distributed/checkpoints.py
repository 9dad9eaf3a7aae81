"""Checkpoints of a model with sharded weights: every process writes its shards.

`torch.distributed.checkpoint` writes them as safetensors, which hold tensors and run no code, and
reads them into any other layout. The rows of weights that are divided by heads have the order of
the layout that wrote them (`ShardSpec.permutation`), which is stored next to the shards.
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

from recollect.lm.distributed.head_sharding import ShardSpec
from recollect.lm.model.checkpoint import CheckpointError, check_json

__all__ = [
    "SHARDS_DIR",
    "gather_weights",
    "load_optimizer",
    "load_weights",
    "reraise_first_failure",
    "save_shards",
    "write_layout",
]

SHARDS_DIR = "shards"
"""Folder of a checkpoint with the tensors of each process."""

LAYOUT_FILE = "layout.json"
"""File next to the shards with the number of tensor-parallel ranks that wrote them."""

MODEL_PREFIX, OPTIMIZER_PREFIX = "model.", "optimizer."


def save_shards(
    folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, group: dist.ProcessGroup
) -> Future[Any]:
    """Copy weights and moments to the CPU, and write the copies in a thread.

    All processes call this, with a gloo group of their own. If one fails to write, the result fails
    on all (`reraise_first_failure`).
    """
    state = {MODEL_PREFIX + name: weight.detach() for name, weight in model.named_parameters()}
    for name, weight in model.named_parameters():
        for key, value in optimizer.state.get(weight, {}).items():
            state[f"{OPTIMIZER_PREFIX}{name}.{key}"] = value if value.dim() else value.reshape(1)
    with _ignored_warnings():
        writer = HuggingFaceStorageWriter(str(folder / SHARDS_DIR), save_distributed=True)
        return cast("Future[Any]", async_save(state, storage_writer=writer, process_group=group))


def write_layout(folder: Path, tp_size: int) -> None:
    """Write next to the shards how many tensor-parallel ranks divide the weights."""
    (folder / LAYOUT_FILE).write_text(json.dumps({"tensor": tp_size}) + "\n", encoding="utf-8")


@contextmanager
def reraise_first_failure() -> Iterator[None]:
    """Context manager that raises the first failure of a collective save or load."""
    try:
        yield
    except CheckpointException as error:
        reason = next(iter(error.failures.values()))[0]
        raise (reason if isinstance(reason, Exception) else RuntimeError(str(reason))) from error


def load_weights(
    checkpoint: Path, model: nn.Module, specs: Mapping[str, ShardSpec], *, tp_size: int
) -> None:
    """Read the weights of a checkpoint with any layout into a model. All processes call this.

    Raise CheckpointError if one is missing. ``specs`` has the model's weights that are divided by
    heads, before they were divided over its ``tp_size`` tensor-parallel ranks.
    """
    is_sharded = (checkpoint / SHARDS_DIR).is_dir()
    prefix, saved_tp_size = (MODEL_PREFIX, _read_tp_size(checkpoint)) if is_sharded else ("", 1)
    weights = dict(model.named_parameters())
    folder = checkpoint / SHARDS_DIR if is_sharded else checkpoint
    _read(folder, {prefix + name: weight for name, weight in weights.items()})
    for name, weight in weights.items():
        _permute_heads_(weight, specs.get(name), saved_tp_size, tp_size)


def load_optimizer(
    checkpoint: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    specs: Mapping[str, ShardSpec],
    *,
    tp_size: int,
) -> None:
    """Read the moments of a checkpoint into an optimizer that has taken no step."""
    weights = dict(model.named_parameters())
    if (checkpoint / SHARDS_DIR).is_dir():
        folder, saved_tp_size = checkpoint / SHARDS_DIR, _read_tp_size(checkpoint)
        metadata = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
        places = {
            key: tuple(key.removeprefix(OPTIMIZER_PREFIX).rsplit(".", 1))
            for key in metadata
            if key.startswith(OPTIMIZER_PREFIX)
        }
        for name, moment in places.values():
            x = weights[name].detach()
            zeros = torch.zeros(1, device=x.device) if moment == "step" else torch.zeros_like(x)
            optimizer.state[weights[name]][moment] = zeros
        _read(folder, {k: optimizer.state[weights[name]][m] for k, (name, m) in places.items()})
        for name, moment in places.values():
            state = optimizer.state[weights[name]]
            if moment == "step":
                state[moment] = state[moment].reshape(())
            else:
                _permute_heads_(state[moment], specs.get(name), saved_tp_size, tp_size)
        return
    for name, moments in _unsharded_moments(checkpoint, optimizer, model).items():
        for moment, value in moments.items():
            if moment == "step":
                x = value.to(weights[name].device).clone()
            else:
                x = torch.zeros_like(weights[name].detach())
                _copy_full(x, _permute_heads(value, specs.get(name), 1, tp_size))
            optimizer.state[weights[name]][moment] = x


def gather_weights(
    model: nn.Module, specs: Mapping[str, ShardSpec], *, tp_size: int, keep: bool
) -> dict[str, Tensor]:
    """Gather all weights on the CPU of the processes with ``keep``. All processes call this."""
    weights: dict[str, Tensor] = {}
    for name, weight in model.named_parameters():
        full = _full(weight)
        if keep:
            weights[name] = _permute_heads(full, specs.get(name), tp_size, 1).cpu()
    return weights


def _read_tp_size(checkpoint: Path) -> int:
    tp_size = check_json(checkpoint / LAYOUT_FILE).get("tensor")
    if not isinstance(tp_size, int) or tp_size < 1:
        raise CheckpointError(f"{checkpoint / LAYOUT_FILE} has no number of tensor-parallel ranks")
    return tp_size


def _read(folder: Path, state: Mapping[str, Tensor]) -> None:
    """Read tensors by name, in place."""
    tensors = {name: x.detach() for name, x in state.items()}
    with _ignored_warnings():
        try:
            load(tensors, storage_reader=HuggingFaceStorageReader(str(folder)))
        except CheckpointException as error:
            reason = next(iter(error.failures.values()))[0]
            raise CheckpointError(f"{folder} cannot be read: {reason}") from error


@contextmanager
def _ignored_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"torch\..*")
        yield


def _unsharded_moments(
    checkpoint: Path, optimizer: torch.optim.Optimizer, model: nn.Module
) -> dict[str, dict[str, Tensor]]:
    """Return the moments that a single process wrote, by the name of their weight."""
    saved: Any = torch.load(checkpoint / "optimizer.pt", map_location="cpu", weights_only=True)
    names = {id(weight): name for name, weight in model.named_parameters()}
    current = [names[id(w)] for group in optimizer.param_groups for w in group["params"]]
    indices = [index for group in saved["param_groups"] for index in group["params"]]
    pairs = zip(current, indices, strict=True)
    return {name: saved["state"][index] for name, index in pairs if index in saved["state"]}


def _full(x: Tensor) -> Tensor:
    x = x.detach()
    return x.full_tensor() if isinstance(x, DTensor) else x


def _copy_full(x: Tensor, full: Tensor) -> None:
    """Copy a full tensor, which is equal on all processes, into one that may be sharded."""
    x, full = x.detach(), full.to(x.device)
    if isinstance(x, DTensor):
        replicated = [Replicate()] * x.device_mesh.ndim
        full = DTensor.from_local(full, x.device_mesh, replicated, run_check=False)
    x.copy_(full)


def _permute_heads(full: Tensor, spec: ShardSpec | None, saved: int, current: int) -> Tensor:
    """Change the order of a full weight from ``saved`` to ``current`` tensor-parallel ranks."""
    if spec is None or saved == current or len(spec.section_sizes) == 1:
        return full
    order = spec.permutation(saved).argsort()[spec.permutation(current)]
    return full.index_select(spec.axis, order.to(full.device))


def _permute_heads_(x: Tensor, spec: ShardSpec | None, saved: int, current: int) -> None:
    """Permute in place a tensor that may be sharded."""
    if spec is not None and saved != current and len(spec.section_sizes) > 1:
        _copy_full(x, _permute_heads(_full(x), spec, saved, current))
