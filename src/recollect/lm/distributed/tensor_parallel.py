"""Tensor parallelism by heads: every rank computes with a part of each layer's heads.

Heads are combined only in the output projection, which sums over them. So a rank with the weights
of its heads computes a part of that sum, and the sum over the ranks is the layer's output. There is
one all-reduce in the forward pass, and one in the backward pass for the gradient of the layer's
input. The MLP is divided by its hidden channels (Shoeybi et al. 2019, section 3). A composition
(`recollect.blocks`) is divided part by part; gates, routers and learned tokens between the parts
are replicated.

Weights are `DTensor`, so optimizers, clipping and checkpoints treat each as one weight. Engines and
their backward passes need plain tensors, so `_UseLocalWeights` replaces each weight with its local
part while a module runs.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

from recollect.blocks.as_context import MemoryAsContextLayer
from recollect.blocks.layers import MixerLayer
from recollect.lm.distributed.head_sharding import (
    check_divisible,
    keep_local_heads,
    model_shard_specs,
)
from recollect.lm.model.model import RecollectForCausalLM

__all__ = ["apply_tensor_parallel", "check_heads"]

REPLICATED, PARTIAL = (Replicate(),), (Partial(),)


def check_heads(model: RecollectForCausalLM, tp_size: int) -> None:
    """Raise RecipeError unless every layer and MLP can be divided over ``tp_size`` ranks."""
    for index, block in enumerate(model.model.blocks):
        for part in (block.layer, block.mlp):
            if part is not None:
                name = f"layer {index} ({model.config.layer_names[index]})"
                check_divisible(part, tp_size, name=name)  # type: ignore[arg-type]


def apply_tensor_parallel(model: RecollectForCausalLM, mesh: DeviceMesh) -> None:
    """Divide layers by heads, MLPs by channels, embedding and head by vocabulary, in place.

    All ranks of the one-dimensional mesh have equal models. Raises RecipeError as `check_heads`.
    """
    check_heads(model, mesh.size())
    is_tied = model.lm_head.weight is model.model.embed_tokens.weight
    styles = {"layer": HeadParallel(), "mlp": HeadParallel()}
    styles |= dict.fromkeys(("memory_norm", "mlp_norm"), ReplicatedParallel())
    plan: dict[str, ParallelStyle] = {f"model.blocks.*.{name}": x for name, x in styles.items()}
    plan |= {"model.norm": ReplicatedParallel()}
    if model.model.embed_tokens.padding_idx is None:
        plan["model.embed_tokens"] = RowwiseParallel(input_layouts=Replicate())
        plan["lm_head"] = ColwiseParallel(output_layouts=Replicate())
    else:  # a sharded embedding of torch has no padding index
        plan |= dict.fromkeys(("model.embed_tokens", "lm_head"), ReplicatedParallel())
    parallelize_module(model, mesh, plan)
    if is_tied:
        model.lm_head.weight = model.model.embed_tokens.weight


class _Place(NamedTuple):
    """Place of a weight in a module."""

    owner: nn.Module
    name: str
    path: str  # from the module


def _places(module: nn.Module) -> list[_Place]:
    return [
        _Place(owner, name, f"{prefix}.{name}" if prefix else name)
        for prefix, owner in module.named_modules()
        for name, weight in owner._parameters.items()
        if weight is not None
    ]


class ReplicatedParallel(ParallelStyle):
    """A module with all weights and equal inputs on all ranks."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        _replicate(module, _places(module), device_mesh)
        return module


class HeadParallel(ParallelStyle):
    """A layer of which each rank runs a part of the heads, or an MLP, of the channels.

    Inputs and outputs are equal on all ranks.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if isinstance(module, MixerLayer) and not module.shares_heads:
            return self._apply_to_parts(module, device_mesh)
        rank, size = device_mesh.get_local_rank(), device_mesh.size()
        specs, places = model_shard_specs(module), _places(module)
        for place in places:
            weight, spec = place.owner.get_parameter(place.name), specs.get(place.path)
            if spec is None:
                _set_parameter(place, weight, device_mesh, REPLICATED)
            else:
                shard = spec.local_shard(weight.detach(), rank, size).contiguous()
                shard.requires_grad_(weight.requires_grad)
                _set_parameter(place, shard, device_mesh, (Shard(spec.axis),))
        keep_local_heads(module, rank, size)
        _UseLocalWeights(module, _with_grad_placements(places, specs))
        _add_all_reduce_hooks(module, device_mesh)
        return module

    def _apply_to_parts(self, module: MixerLayer, mesh: DeviceMesh) -> nn.Module:
        inner = {id(owner) for part in module.parts.values() for owner in part.modules()}
        _replicate(module, [x for x in _places(module) if id(x.owner) not in inner], mesh)
        for part in module.parts.values():
            self._apply(part, mesh)
        if isinstance(module, MemoryAsContextLayer):  # it also reads its memory without a write
            memory = module.memory
            grads = _with_grad_placements(_places(memory), model_shard_specs(memory))
            _UseLocalWeights(module.retrieval, grads)
            _add_all_reduce_hooks(module.retrieval, mesh)
        return module


def _with_grad_placements(
    places: Iterable[_Place], divided: Iterable[str]
) -> list[tuple[_Place, tuple[Placement, ...] | None]]:
    """Return where gradients are: each rank has a part of the gradient of an undivided weight."""
    divided = set(divided)
    return [(place, None if place.path in divided else PARTIAL) for place in places]


def _replicate(module: nn.Module, places: list[_Place], mesh: DeviceMesh) -> None:
    for place in places:
        _set_parameter(place, place.owner.get_parameter(place.name), mesh, REPLICATED)
    _UseLocalWeights(module, [(place, REPLICATED) for place in places])


def _set_parameter(
    place: _Place, local: Tensor, mesh: DeviceMesh, placements: tuple[Placement, ...]
) -> None:
    """Replace a weight with the `DTensor` of the ranks' local parts."""
    x = local.detach().to(mesh.device_type)
    x = DTensor.from_local(x, mesh, placements, run_check=False)
    place.owner.register_parameter(place.name, nn.Parameter(x, requires_grad=local.requires_grad))


class _UseLocalWeights:
    """Replace weights with their local parts while a module runs."""

    def __init__(
        self,
        module: nn.Module,
        # weights, and the placements of their gradients if these differ from the weights'
        weights: list[tuple[_Place, tuple[Placement, ...] | None]],
    ) -> None:
        self.weights = weights
        self.saved: list[list[nn.Parameter | None]] = []
        module.register_forward_pre_hook(self._enter)
        # The hook also runs after an error, or when a checkpoint has recomputed enough.
        module.register_forward_hook(self._leave, always_call=True)

    def _enter(self, module: nn.Module, args: Any) -> None:
        self.saved.append([place.owner._parameters[place.name] for place, _ in self.weights])
        for place, placements in self.weights:
            weight = place.owner._parameters[place.name]
            if isinstance(weight, DTensor):
                if placements == PARTIAL:  # the backward pass of this call sums the gradient
                    weight = weight.redistribute(placements=REPLICATED)
                local = weight.to_local(grad_placements=placements)
                place.owner._parameters[place.name] = local  # type: ignore[assignment]

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        for (place, _), weight in zip(self.weights, self.saved.pop(), strict=True):
            place.owner._parameters[place.name] = weight


def _add_all_reduce_hooks(module: nn.Module, mesh: DeviceMesh) -> None:
    """All-reduce the module's output in forward and its input gradient in backward."""

    def enter(_: nn.Module, args: tuple[Any, ...], kwargs: Any) -> tuple[Any, Any]:
        x, *others = args
        if torch.is_grad_enabled():
            x = DTensor.from_local(x, mesh, REPLICATED, run_check=False)
            x = x.to_local(grad_placements=PARTIAL)
        return (x, *others), kwargs

    def leave(_: nn.Module, args: Any, output: Any) -> Any:
        y, *others = (output,) if isinstance(output, Tensor) else output
        y = DTensor.from_local(y, mesh, PARTIAL, run_check=False)
        y = y.redistribute(placements=REPLICATED).to_local()
        return y if isinstance(output, Tensor) else (y, *others)

    module.register_forward_pre_hook(enter, with_kwargs=True)
    module.register_forward_hook(leave)
