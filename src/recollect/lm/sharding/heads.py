"""Which axis of a layer's weights runs over its heads, and a layer that holds a part of them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from recollect.blocks.as_context import MemoryAsContextLayer
from recollect.blocks.layers import MixerLayer
from recollect.blocks.residual_memory import ResidualMemoryLayer, SecondMemory
from recollect.layer.block import SwiGLU
from recollect.layer.gates import GateProjection
from recollect.layer.memory_layer import MemoryLayer
from recollect.layer.recipe_module import InitialKernelRows, InitialMemory, RecipeModule
from recollect.messages import RecipeError

__all__ = ["Cut", "check_divisible", "cuts", "keep_part", "model_cuts"]


@dataclass(frozen=True, kw_only=True)
class Cut:
    """How a weight is divided among ranks.

    A fused weight is several beside each other, each of which is divided: a rank holds its part of
    the first, then its part of the second, and so on. Of all ranks one after the other that is
    another order of rows than the whole weight's, which `order` gives.

    Attributes:
        axis: that is divided.
        widths: of the weights that lie beside each other along it.
    """

    axis: int
    widths: tuple[int, ...]

    def part(self, weight: Tensor, index: int, parts: int) -> Tensor:
        """What one rank of several holds of a whole weight."""
        pieces = weight.split(self.widths, self.axis)
        return torch.cat([piece.chunk(parts, self.axis)[index] for piece in pieces], self.axis)

    def order(self, parts: int) -> Tensor:
        """Where the entries that ranks hold, one rank after the other, stand in the whole weight.

        ``whole.index_select(axis, order)`` is what the ranks hold; for one rank it is the whole.
        """
        places = torch.arange(sum(self.widths)).split(self.widths)
        return torch.cat([p.chunk(parts)[i] for i in range(parts) for p in places])


def cuts(module: nn.Module) -> dict[str, Cut]:
    """The weights of a layer or an MLP that are divided, by name; all others are whole everywhere.

    Args:
        module: a `MemoryLayer`, the second memory of one, or the MLP of a block, whole.
    """
    if isinstance(module, SwiGLU):
        width = module.width
        return {
            "gate_up.weight": Cut(axis=0, widths=(width, width)),
            "down.weight": Cut(axis=1, widths=(width,)),
        }
    assert isinstance(module, RecipeModule)
    found: dict[str, Cut] = {}
    per_head: list[Tensor | None] = [*module.ties.parameters()]
    if isinstance(module, MemoryLayer):
        fused = tuple(size for size in module.qkv_sizes if size)
        width = module.num_heads * module.value_dim
        found = {
            "qkv.weight": Cut(axis=0, widths=fused),
            "qkv.bias": Cut(axis=0, widths=fused),
            "conv.weight": Cut(axis=1, widths=fused),
            "output_gate.weight": Cut(axis=0, widths=(width,)),
            "out.weight": Cut(axis=1, widths=(width,)),
        }
        per_head.append(module.skip)
        if module.phase is not None:
            per_head += module.phase.parameters()
    if module.memory is not None:
        per_head += module.memory.parameters()
    for number in (*module.gates.values(), *module.params.values()):
        assert isinstance(number, GateProjection)
        per_head += [number.weight, number.bias]  # the first map of a low rank serves all heads
    known = {id(weight) for weight in per_head if weight is not None}
    for name, weight in module.named_parameters():
        if id(weight) in known:
            found[name] = Cut(axis=0, widths=(weight.shape[0],))
    there = {name for name, _ in module.named_parameters()}
    return {name: cut for name, cut in found.items() if name in there}


def model_cuts(model: nn.Module) -> dict[str, Cut]:
    """The same of all layers and MLPs of a language model, or of a layer's parts, by whole name.

    Args:
        model: whole.
    """
    return {
        f"{prefix}.{name}" if prefix else name: cut
        for prefix, module in model.named_modules()
        if isinstance(module, SwiGLU | MemoryLayer | SecondMemory)
        for name, cut in cuts(module).items()
    }


def check_divisible(module: nn.Module, parts: int, *, where: str = "") -> None:
    """That a layer or an MLP can be divided into so many parts.

    Args:
        module: a block's sequence layer, or its MLP.
        parts: how many.
        where: the layer in words, for the message.

    Raises:
        RecipeError: heads, memories or channels that the parts do not divide, or a layer that
            does not consist of heads, or begins anew from an initial memory within.
    """
    if isinstance(module, MixerLayer):
        if isinstance(module, MemoryAsContextLayer) and any(
            isinstance(own, InitialMemory | InitialKernelRows)
            for own in module.parts["attention"].modules()
        ):
            raise RecipeError(
                f"[run] parallel: tensor = {parts} divides initial memories by heads, and the "
                f"attention of {where} begins anew from its own with every segment: take an "
                "attention without a learned initial memory, or leave tensor out"
            )
        for name, part in module.parts.items():
            if not isinstance(part, SecondMemory):  # it has the heads of the first
                check_divisible(part, parts, where=f"{where}, {name}")
        return
    sizes = {"mlp": module.width} if isinstance(module, SwiGLU) else {}
    if isinstance(module, MemoryLayer):
        sizes = {"num_kv_heads": module.num_kv_heads, "num_heads": module.num_heads}
        if module.num_kv_heads == module.num_heads:
            del sizes["num_kv_heads"]
    elif not sizes:
        raise RecipeError(
            f"[run] parallel: tensor = {parts} divides layers by heads, and {where} is a "
            f"{type(module).__name__}, which has none: leave tensor out, and give data all "
            "processes"
        )
    for name, size in sizes.items():
        if size % parts:
            raise RecipeError(
                f"[run] parallel: tensor = {parts} does not divide [model] {name} = {size} of "
                f"{where}: take a tensor that divides it, or another {name}"
            )


def keep_part(module: nn.Module, index: int, parts: int) -> None:
    """Make a layer compute with one part of its heads; its weights are cut by whoever asks.

    Sizes per head stay. What an MLP computes follows from its weights. Of a composition every part
    does.

    Args:
        module: as in `cuts`.
        index: of the part, from 0.
        parts: equal ones.
    """
    if isinstance(module, ResidualMemoryLayer):
        keep_part(module.first, index, parts)
        keep_part(module.second, index, parts)
    if not isinstance(module, MemoryLayer | SecondMemory):
        return
    module.num_kv_heads //= parts
    if isinstance(module, MemoryLayer):
        module.num_heads //= parts
        module.qkv_sizes = [size // parts for size in module.qkv_sizes]
        module.qk_heads = [count // parts for count in module.qk_heads]
        if module.conv_state_shape is not None:
            module.conv_state_shape = (
                module.conv_state_shape[0],
                module.conv_state_shape[1] // parts,
            )
    for number in (*module.gates.values(), *module.params.values()):
        assert isinstance(number, GateProjection)
        number.shard_heads(index, parts)
    module.engine = module.engine  # bound to the number of memories
