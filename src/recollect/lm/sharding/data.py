"""Data parallelism that shards: each rank holds its share of every block's weights."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from recollect.lm.model.model import RecollectForCausalLM

__all__ = ["reshard", "shard"]


def shard(model: RecollectForCausalLM, mesh: DeviceMesh, *, bf16: bool = False) -> None:
    """Shard a model block by block with `fully_shard` (FSDP2), in place.

    A rank keeps 1/n of every weight, gradient and moment. A block's weights are gathered when it
    runs and dropped afterwards; those of the embedding, the last norm and the head go together.

    Args:
        model: the same on all ranks.
        mesh: of one dimension, over the ranks that read different tokens.
        bf16: weights are gathered, and blocks computed, in bfloat16; what a rank keeps, and sums of
            gradients, stay float32.
    """
    policy = MixedPrecisionPolicy()
    if bf16:
        # States are handed from call to call in their own types, which a cast of inputs would lose.
        policy = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False
        )
    for block in model.model.blocks:
        block.register_forward_hook(_use_all)
        fully_shard(block, mesh=mesh, mp_policy=policy)
    if model.lm_head.weight is not model.model.embed_tokens.weight:
        fully_shard(model.model.embed_tokens, mesh=mesh, mp_policy=policy)
    # The loss takes the head's weights a chunk of tokens at a time, out of calls of the head: they
    # belong to the model itself, and stay gathered, as their gradients come first.
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)


class _Used(torch.autograd.Function):
    """x, from which every weight gets a gradient of 0 beside its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *weights: Tensor) -> Tensor:
        ctx.weights = weights
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        return gradients[0], *(torch.zeros_like(weight) for weight in ctx.weights)


def _use_all(block: nn.Module, args: Any, output: tuple[Tensor, Any]) -> tuple[Tensor, Any]:
    """Let all weights of a block have a gradient, on whatever rows.

    A memory that writes every 64 tokens has none for its gates where documents are shorter. Ranks
    reduce together what each has a gradient for, and would wait for each other in vain.
    """
    y, state = output
    weights = [weight for weight in block.parameters() if weight.requires_grad]
    if y.requires_grad and torch.is_grad_enabled():
        y = cast(Tensor, _Used.apply(y, *weights))
    return y, state


def reshard(model: nn.Module) -> None:
    """Drop weights that a forward pass gathered for a backward pass that does not come.

    Args:
        model: sharded, or not.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
