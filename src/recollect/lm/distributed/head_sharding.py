"""Axes of a layer's weights that run over its heads, and layers that hold a part of the heads."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from recollect.blocks.as_context import MemoryAsContextLayer
from recollect.blocks.layers import MixerLayer
from recollect.blocks.levels_layer import LevelsLayer
from recollect.blocks.self_modifying_layer import SelfModifyingMemoryLayer
from recollect.blocks.slot_layer import RunningSoftmax, SlotRouter
from recollect.blocks.two_memories import SecondMemory
from recollect.layer.block import SwiGLU
from recollect.layer.gates import GateProjection
from recollect.layer.head_factors import GroupedRMSNorm
from recollect.layer.memory_layer import MemoryLayer
from recollect.layer.recipe_module import InitialKernelRows, InitialMemory, RecipeModule
from recollect.messages import RecipeError

__all__ = ["ShardSpec", "check_divisible", "keep_local_heads", "model_shard_specs", "shard_specs"]


@dataclass(frozen=True, kw_only=True)
class ShardSpec:
    """Division of a weight over tensor-parallel ranks.

    A fused weight (q, k, v) is split section by section, so concatenating the ranks' shards
    permutes its rows; `permutation` maps them back.
    """

    axis: int  # axis that is divided
    section_sizes: tuple[int, ...]  # sizes of the fused weights along the axis

    def local_shard(self, weight: Tensor, rank: int, tp_size: int) -> Tensor:
        """Return the part of an undivided weight that belongs to a rank."""
        sections = weight.split(self.section_sizes, self.axis)
        return torch.cat(
            [section.chunk(tp_size, self.axis)[rank] for section in sections], self.axis
        )

    def permutation(self, tp_size: int) -> Tensor:
        """Return the indices in the undivided weight of the ranks' entries, one rank after another.

        ``weight.index_select(axis, permutation)`` is the concatenation of the shards.
        """
        sections = torch.arange(sum(self.section_sizes)).split(self.section_sizes)
        return torch.cat([x.chunk(tp_size)[rank] for rank in range(tp_size) for x in sections])


def shard_specs(module: nn.Module) -> dict[str, ShardSpec]:
    """Return the divided weights of an undivided layer, second memory, router or MLP, by name."""
    if isinstance(module, SwiGLU):
        width = module.width
        return {
            "gate_up.weight": ShardSpec(axis=0, section_sizes=(width, width)),
            "down.weight": ShardSpec(axis=1, section_sizes=(width,)),
        }
    if isinstance(module, SlotRouter | RunningSoftmax):
        return {"scores.weight": ShardSpec(axis=0, section_sizes=(module.scores.out_features,))}
    assert isinstance(module, RecipeModule)
    specs: dict[str, ShardSpec] = {}
    per_head: list[Tensor | None] = [*module.ties.parameters()]
    if isinstance(module, MemoryLayer):
        fused = tuple(size for size in module.qkv_sizes if size)
        width = module.num_heads * module.value_dim
        specs = {
            "qkv.weight": ShardSpec(axis=0, section_sizes=fused),
            "qkv.bias": ShardSpec(axis=0, section_sizes=fused),
            "conv.weight": ShardSpec(axis=1, section_sizes=fused),
            "conv.bias": ShardSpec(axis=0, section_sizes=fused),
            "output_gate.weight": ShardSpec(axis=0, section_sizes=(width,)),
            "output_gate.bias": ShardSpec(axis=0, section_sizes=(width,)),
            "out.weight": ShardSpec(axis=1, section_sizes=(width,)),
        }
        heads = tuple(module.qk_heads)
        for name in ("qk_affine.weight", "qk_affine.bias"):
            specs[name] = ShardSpec(axis=0, section_sizes=heads)
        per_head.append(module.skip)
        if module.mimo is not None:
            per_head += module.mimo.parameters()
        if isinstance(module.norm, GroupedRMSNorm):
            per_head.append(module.norm.weight)
        if module.phase is not None:
            per_head += module.phase.parameters()
    if module.memory is not None:
        per_head += module.memory.parameters()
    for projection in (*module.gates.values(), *module.params.values()):
        assert isinstance(projection, GateProjection)
        per_head += [projection.weight, projection.bias]  # a low rank's first map serves all heads
    ids = {id(weight) for weight in per_head if weight is not None}
    weights = dict(module.named_parameters())
    for name, weight in weights.items():
        if id(weight) in ids:
            specs[name] = ShardSpec(axis=0, section_sizes=(weight.shape[0],))
    return {name: spec for name, spec in specs.items() if name in weights}


def model_shard_specs(model: nn.Module) -> dict[str, ShardSpec]:
    """Return the divided weights of an undivided model, by full name."""
    return {
        f"{prefix}.{name}" if prefix else name: spec
        for prefix, module in model.named_modules()
        if isinstance(module, SwiGLU | MemoryLayer | SecondMemory | SlotRouter | RunningSoftmax)
        for name, spec in shard_specs(module).items()
    }


def check_divisible(module: nn.Module, tp_size: int, *, name: str = "") -> None:
    """Raise RecipeError unless a layer or an MLP can be divided over ``tp_size`` ranks."""
    if isinstance(module, LevelsLayer | SelfModifyingMemoryLayer):
        heads = (
            "reads its memory at several levels"
            if isinstance(module, LevelsLayer)
            else "has gates from the outputs of all heads"
        )
        raise RecipeError(
            f"[run] parallel: tensor = {tp_size} divides layers by heads, and {name} {heads}: "
            "leave tensor out, and give data all processes"
        )
    if isinstance(module, MixerLayer):
        if isinstance(module, MemoryAsContextLayer) and any(
            isinstance(part, InitialMemory | InitialKernelRows)
            for part in module.parts["attention"].modules()
        ):
            raise RecipeError(
                f"[run] parallel: tensor = {tp_size} divides initial memories by heads, and the "
                f"attention of {name} is reset to its own at every segment: take an "
                "attention without a learned initial memory, or leave tensor out"
            )
        for part_name, part in module.parts.items():
            if not isinstance(part, SecondMemory):  # it has the heads of the first
                check_divisible(part, tp_size, name=f"{name}, {part_name}")
        return
    if isinstance(module, MemoryLayer) and any(
        options.depth_floor for options in dict(module.options.gate_options).values()
    ):
        raise RecipeError(
            f"[run] parallel: tensor = {tp_size} divides layers by heads, and the layers share the "
            f"lower ends of the decays of {name}: leave tensor out, and give data all processes"
        )
    sizes = {"mlp": module.width} if isinstance(module, SwiGLU) else {}
    if isinstance(module, MemoryLayer):
        sizes = {"num_kv_heads": module.num_kv_heads, "num_heads": module.num_heads}
        if module.num_kv_heads == module.num_heads:
            del sizes["num_kv_heads"]
        for option in ("key_group_size", "norm_group_size"):
            if (group_size := getattr(module.options, option)) is not None:
                sizes[f"num_heads / {option}"] = module.num_heads // group_size
    elif not sizes:
        raise RecipeError(
            f"[run] parallel: tensor = {tp_size} divides layers by heads, and {name} is a "
            f"{type(module).__name__}, which has none: leave tensor out, and give data all "
            "processes"
        )
    for key, size in sizes.items():
        if size % tp_size:
            raise RecipeError(
                f"[run] parallel: tensor = {tp_size} does not divide [model] {key} = {size} of "
                f"{name}: take a tensor that divides it, or another {key}"
            )


def keep_local_heads(module: nn.Module, rank: int, tp_size: int) -> None:
    """Make a layer or composition compute with one rank's heads. The caller divides its weights.

    Sizes per head do not change. The channels of an MLP follow from its weights.
    """
    if isinstance(module, MixerLayer):
        for part in (*module.parts.values(), *module.children()):
            keep_local_heads(part, rank, tp_size)
    if isinstance(module, SlotRouter | RunningSoftmax):
        module.heads //= tp_size
    if not isinstance(module, MemoryLayer | SecondMemory):
        return
    module.num_kv_heads //= tp_size
    if isinstance(module, MemoryLayer):
        module.num_heads //= tp_size
        module.qkv_sizes = [size // tp_size for size in module.qkv_sizes]
        module.qk_heads = [count // tp_size for count in module.qk_heads]
        if module.conv_state_shape is not None:
            width, channels = module.conv_state_shape
            module.conv_state_shape = (width, channels // tp_size)
    for projection in (*module.gates.values(), *module.params.values()):
        assert isinstance(projection, GateProjection)
        projection.shard_heads(rank, tp_size)
    module.engine = module.engine  # bound to the number of memories
