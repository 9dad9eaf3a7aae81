"""Sharded data parallelism: each rank has a shard of every block's weights."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from recollect.lm.model.model import RecollectForCausalLM

__all__ = ["apply_fsdp", "reshard"]


def apply_fsdp(model: RecollectForCausalLM, mesh: DeviceMesh, *, bf16: bool = False) -> None:
    """Shard a model block by block with `fully_shard` (FSDP2), in place.

    The weights of a block are gathered when it runs and freed afterwards. With ``bf16`` they are
    gathered in bfloat16, and the blocks compute in it; shards and sums of gradients stay float32.
    """
    policy = MixedPrecisionPolicy()
    if bf16:
        # A cast of inputs would lose the dtypes of states, which are passed from call to call.
        policy = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False
        )
    for block in model.model.blocks:
        block.register_forward_hook(_ensure_all_grads)
        fully_shard(block, mesh=mesh, mp_policy=policy)
    if model.lm_head.weight is not model.model.embed_tokens.weight:
        fully_shard(model.model.embed_tokens, mesh=mesh, mp_policy=policy)
    # The loss uses the head's weights a chunk of tokens at a time, outside a call of the head. They
    # belong to the model itself and stay gathered, because their gradients come first.
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)


class _AddZeroGrads(torch.autograd.Function):
    """Identity that adds zeros to the gradient of every weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *weights: Tensor) -> Tensor:
        ctx.weights = weights
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        return gradients[0], *(torch.zeros_like(weight) for weight in ctx.weights)


def _ensure_all_grads(
    block: nn.Module, args: Any, output: tuple[Tensor, Any]
) -> tuple[Tensor, Any]:
    """Forward hook that gives all weights of a block a gradient, whatever the rows.

    A memory that writes every 64 tokens gives its gates no gradient for shorter documents. Ranks
    reduce the gradients that they have, so ranks with different sets would wait in vain.
    """
    y, state = output
    weights = [weight for weight in block.parameters() if weight.requires_grad]
    if y.requires_grad and torch.is_grad_enabled():
        y = cast(Tensor, _AddZeroGrads.apply(y, *weights))
    return y, state


def reshard(model: nn.Module) -> None:
    """Free the weights that a forward pass gathered, if no backward pass follows."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
