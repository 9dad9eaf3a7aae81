"""Tensor parallelism by heads: every rank computes with a part of each layer's heads.

Heads meet only in the last map of a layer, which adds up what they say. So a rank that holds the
weights of its heads computes a part of that sum, and the sum over the ranks is the layer's output:
one all-reduce forward, and one backward, where gradients of the layer's input are added up. The MLP
is divided by its hidden channels in the same way (Shoeybi et al. 2019, section 3). A composition
(`recollect.blocks`) adds up what each of its parts says, and what stands between the parts (gates,
routers, learned tokens) is computed by all ranks alike.

Weights are `DTensor` on the mesh, so optimizers, clipping and checkpoints know them as one weight.
Layers compute with the local part of each, because engines and their own backward passes take plain
tensors: `_Locally` puts it in the weight's place while a module runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

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
from recollect.blocks.residual_memory import ResidualMemoryLayer
from recollect.lm.model.model import RecollectForCausalLM
from recollect.lm.sharding.heads import check_divisible, keep_part, model_cuts

__all__ = ["check_heads", "divide_by_heads"]

WHOLE, SUM = (Replicate(),), (Partial(),)


def check_heads(model: RecollectForCausalLM, parts: int) -> None:
    """That every layer and MLP of a model can be divided among so many ranks.

    Args:
        model: whole.
        parts: how many ranks.

    Raises:
        RecipeError: naming the layer and the size that does not fit.
    """
    for index, block in enumerate(model.model.blocks):
        for part in (block.layer, block.mlp):
            if part is not None:
                name = f"layer {index} ({model.config.pattern[index]})"
                check_divisible(part, parts, where=name)  # type: ignore[arg-type]


def divide_by_heads(model: RecollectForCausalLM, mesh: DeviceMesh) -> None:
    """Divide a model's layers by heads, its MLPs by channels, embedding and head by words.

    All ranks hold the same whole model before; afterwards each holds its part, and norms whole.

    Args:
        model: whole; it is changed in place.
        mesh: of one dimension, over the ranks that share one model.

    Raises:
        RecipeError: sizes that the ranks do not divide.
    """
    check_heads(model, mesh.size())
    tied = model.lm_head.weight is model.model.embed_tokens.weight
    parts = {"layer": ByHeads(), "mlp": ByHeads(), "memory_norm": Alike(), "mlp_norm": Alike()}
    plan: dict[str, ParallelStyle] = {f"model.blocks.*.{name}": x for name, x in parts.items()}
    plan |= {"model.norm": Alike()}
    if model.model.embed_tokens.padding_idx is None:
        plan["model.embed_tokens"] = RowwiseParallel(input_layouts=Replicate())
        plan["lm_head"] = ColwiseParallel(output_layouts=Replicate())
    else:  # torch's embedding in parts knows no padding
        plan |= {"model.embed_tokens": Alike(), "lm_head": Alike()}
    parallelize_module(model, mesh, plan)
    if tied:
        model.lm_head.weight = model.model.embed_tokens.weight


class Alike(ParallelStyle):
    """A module that all ranks hold whole and run on the same input."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for owner, name, weight in _weights(module):
            _put(owner, name, weight, device_mesh, WHOLE)
        _Locally(module, {}, WHOLE)
        return module


class ByHeads(ParallelStyle):
    """A layer of which each rank runs its part of the heads, or an MLP of its channels.

    What comes in is the same on all ranks, and so is what goes out: the sum over them. Of a
    composition that is so of every part.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        # Both memories of a boosted layer see one set of heads, and one last map adds them up.
        if isinstance(module, MixerLayer) and not isinstance(module, ResidualMemoryLayer):
            return self._composed(module, device_mesh)
        index, parts = device_mesh.get_local_rank(), device_mesh.size()
        divided = model_cuts(module)
        names = {(id(owner), name): full for full, owner, name in _named(module)}
        for owner, name, weight in _weights(module):
            cut = divided.get(names[id(owner), name])
            if cut is None:
                _put(owner, name, weight, device_mesh, WHOLE)
                continue
            own = cut.part(weight.detach(), index, parts).contiguous()
            _put(owner, name, own, device_mesh, (Shard(cut.axis),), weight.requires_grad)
        keep_part(module, index, parts)
        # A weight that all heads read gets a part of its gradient from each rank.
        shares = {place: None for place, full in names.items() if full in divided}
        _Locally(module, shares, SUM)
        _added_up(module, device_mesh)
        return module

    def _composed(self, module: MixerLayer, mesh: DeviceMesh) -> nn.Module:
        within = {id(owner) for part in module.parts.values() for owner in part.modules()}
        own = [place for place in _weights(module) if id(place[0]) not in within]
        for owner, name, weight in own:
            _put(owner, name, weight, mesh, WHOLE)
        _Locally(module, {}, WHOLE, of=[(owner, name) for owner, name, _ in own])
        memory = module.memory if isinstance(module, MemoryAsContextLayer) else None
        divided = {} if memory is None else model_cuts(memory)
        for part in module.parts.values():
            self._apply(part, mesh)
        if (
            isinstance(module, MemoryAsContextLayer) and memory is not None
        ):  # it is asked by itself, too
            named = _named(memory)
            shares = {(id(owner), name): None for full, owner, name in named if full in divided}
            places = [(owner, name) for _, owner, name in named]
            _Locally(module.retrieval, shares, SUM, of=places)
            _added_up(module.retrieval, mesh)
        return module


def _added_up(module: nn.Module, mesh: DeviceMesh) -> None:
    """Let what a module says, and the gradient of what it reads, be the sum over the ranks."""

    def enter(_: nn.Module, args: tuple[Any, ...], kwargs: Any) -> tuple[Any, Any]:
        x, *others = args
        return (_summed_backward(x, mesh), *others), kwargs

    def leave(_: nn.Module, args: Any, output: Any) -> Any:
        if isinstance(output, Tensor):
            return _summed(output, mesh)
        y, *others = output
        return (_summed(y, mesh), *others)

    module.register_forward_pre_hook(enter, with_kwargs=True)
    module.register_forward_hook(leave)


class _Locally:
    """While a module runs, the local part of each of its weights stands in the weight's place.

    Args:
        module: whose run they are.
        own: placement of the gradient of some weights, by owner and name: ``None`` is the weight's.
        others: of the gradients of all others.
        of: the weights, `DTensor`, by owner and name; without it all of the module.
    """

    def __init__(
        self,
        module: nn.Module,
        own: Mapping[tuple[int, str], tuple[Placement, ...] | None],
        others: tuple[Placement, ...],
        of: Sequence[tuple[nn.Module, str]] | None = None,
    ) -> None:
        weights = [place[:2] for place in _weights(module)] if of is None else of
        self.places = [
            (owner, name, own.get((id(owner), name), others))
            for owner, name in weights
            if owner._parameters[name] is not None
        ]
        self.kept: list[list[nn.Parameter | None]] = []
        module.register_forward_pre_hook(self._enter)
        # Whatever ends the module: a refusal, or a checkpoint that has computed enough.
        module.register_forward_hook(self._leave, always_call=True)

    def _enter(self, module: nn.Module, args: Any) -> None:
        self.kept.append([owner._parameters[name] for owner, name, _ in self.places])
        for owner, name, placements in self.places:
            weight = owner._parameters[name]
            if isinstance(weight, DTensor):
                if placements == SUM:  # the gradient is added up where it goes back
                    weight = weight.redistribute(placements=WHOLE)
                owner._parameters[name] = weight.to_local(grad_placements=placements)  # type: ignore[assignment]

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        for (owner, name, _), weight in zip(self.places, self.kept.pop(), strict=True):
            owner._parameters[name] = weight


def _named(module: nn.Module) -> list[tuple[str, nn.Module, str]]:
    """Every weight's whole name, the module that owns it, and its name there."""
    return [
        (f"{prefix}.{name}" if prefix else name, owner, name)
        for prefix, owner in module.named_modules()
        for name, weight in owner._parameters.items()
        if weight is not None
    ]


def _weights(module: nn.Module) -> list[tuple[nn.Module, str, nn.Parameter]]:
    found = [(owner, name, owner._parameters[name]) for _, owner, name in _named(module)]
    return [(owner, name, weight) for owner, name, weight in found if weight is not None]


def _put(
    owner: nn.Module,
    name: str,
    own: Tensor,
    mesh: DeviceMesh,
    placements: tuple[Placement, ...],
    trained: bool | None = None,
) -> None:
    """Make a rank's part of a weight the weight."""
    trained = own.requires_grad if trained is None else trained
    own = own.detach().to(mesh.device_type)
    whole = DTensor.from_local(own, mesh, placements, run_check=False)
    owner.register_parameter(name, nn.Parameter(whole, requires_grad=trained))


def _summed_backward(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """x, whose gradient is the sum of those of all ranks."""
    if not torch.is_grad_enabled():
        return x
    return DTensor.from_local(x, mesh, WHOLE, run_check=False).to_local(grad_placements=SUM)


def _summed(y: Tensor, mesh: DeviceMesh) -> Tensor:
    """The sum of what all ranks have."""
    return (
        DTensor.from_local(y, mesh, SUM, run_check=False).redistribute(placements=WHOLE).to_local()
    )
