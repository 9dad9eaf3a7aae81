"""The next-token loss, which computes the logits of a few tokens at a time.

The mean negative log-likelihood of target y_n at hidden state x_n, over a vocabulary of W tokens,

    L = (1/M) Σ_n [ log Σ_w exp(x_n · U_w) − x_n · U_{y_n} ],

needs logits ``[N, W]`` in float32, and as much memory again for their gradient. At a vocabulary of
32,000 both exceed the rest of a small model. `next_token_loss` computes the logits of one chunk of
tokens, adds the chunk's loss and its gradients

    ∂L/∂x_n = (1/M) Σ_w (p_nw − [w = y_n]) U_w,      ∂L/∂U_w = (1/M) Σ_n (p_nw − [w = y_n]) x_n,

and frees them: three products, as without chunks, and N / chunk times fewer logits at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from recollect.choices.runtime import product_dtype, without_autocast

__all__ = ["IGNORE_INDEX", "next_token_loss", "next_token_targets"]

IGNORE_INDEX = -100
"""The target of a position that has no loss."""


def next_token_targets(
    labels: Tensor,  # [B, T], the tokens of the input
    mask: Tensor | None = None,  # [B, T] or wider, 0 at padding
    cu_seqlens: Tensor | None = None,  # [N + 1], of all rows one after the other
) -> Tensor:  # [B, T]
    """Return the next token of every position, and `IGNORE_INDEX` if no token predicts it."""
    if cu_seqlens is not None:
        starts = cu_seqlens[:-1].to(device=labels.device, dtype=torch.long)
        flat = labels.flatten()
        labels = flat.index_fill(0, starts[starts < len(flat)], IGNORE_INDEX).view_as(labels)
    targets = functional.pad(labels[:, 1:], (0, 1), value=IGNORE_INDEX)
    if mask is not None:
        valid = mask[:, mask.shape[1] - labels.shape[1] :].to(labels.device)
        targets = targets.masked_fill(valid == 0, IGNORE_INDEX)
    return targets


def next_token_loss(
    x: Tensor,  # [B, T, D], hidden states
    head: nn.Module,  # from D to the vocabulary size W
    targets: Tensor,  # [B, T], int64
    *,
    num_items: int | Tensor | None = None,  # divisor of the sum; by default the number of targets
    chunk_size: int = 0,  # tokens whose logits are computed at once; 0: all
    logits: Tensor | None = None,  # [B, T, W], if they are computed already
) -> Tensor:
    """Return the mean cross entropy of the targets in nats, in float32 (float64 of float64)."""
    targets = targets.to(x.device).flatten()
    if num_items is None:
        num_items = (targets != IGNORE_INDEX).sum().clamp_min(1)
    elif isinstance(num_items, Tensor):
        num_items = num_items.to(x.device)
    if logits is not None:
        return _cross_entropy(logits.flatten(0, -2), targets) / num_items
    x = x.flatten(0, 1)
    chunk_size = chunk_size or max(1, len(targets))
    if _is_plain_linear(head) and torch.is_grad_enabled() and not torch.compiler.is_compiling():
        total = _ChunkedLoss.apply(x, head.weight, targets, chunk_size, product_dtype(x))
    else:  # an adapter, hooks or shards: each chunk calls the head, and the backward pass again
        total = _checkpointed_loss(head, x, targets, chunk_size)
    return total / num_items  # type: ignore[no-any-return]


def _checkpointed_loss(
    head: Callable[[Tensor], Tensor], x: Tensor, targets: Tensor, chunk_size: int
) -> Tensor:
    """Return the summed loss; the backward pass recomputes the logits of every chunk."""

    def chunk_loss(x: Tensor, targets: Tensor) -> Tensor:
        return _cross_entropy(head(x), targets)

    total = x.new_zeros((), dtype=_accumulate_dtype(x.dtype))
    for chunk in zip(x.split(chunk_size), targets.split(chunk_size), strict=True):
        if torch.is_grad_enabled():
            total = total + checkpoint(chunk_loss, *chunk, use_reentrant=False)
        else:
            total = total + chunk_loss(*chunk)
    return total


def _cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the summed cross entropy, in float32 at least."""
    wide = logits.to(_accumulate_dtype(logits.dtype))
    return functional.cross_entropy(wide, targets, ignore_index=IGNORE_INDEX, reduction="sum")


def _accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _is_plain_linear(head: nn.Module) -> bool:
    """Whether a call of the head computes x Uᵀ and nothing else."""
    return (
        type(head) is nn.Linear
        and head.bias is None
        and type(head.weight) in (nn.Parameter, FakeTensor)  # the latter in estimates
        and not nn.utils.parametrize.is_parametrized(head)
        and not (head._forward_hooks or head._forward_pre_hooks or "forward" in vars(head))
        and not (head._backward_hooks or head._backward_pre_hooks)
    )


class _ChunkedLoss(torch.autograd.Function):
    """Summed loss of a linear head, which computes its gradients in the forward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,  # [N, D]
        weight: Tensor,  # [W, D]
        targets: Tensor,  # [N]
        chunk_size: int,
        dtype: torch.dtype,  # dtype of the products
    ) -> Tensor:
        ctx.save_for_backward(x, weight, targets)
        ctx.chunk_size, ctx.dtype = chunk_size, dtype
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        grad_x = torch.empty_like(x) if needs_x else None
        wide = _accumulate_dtype(weight.dtype)
        grad_weight = torch.zeros_like(weight, dtype=wide) if needs_weight else None
        total = x.new_zeros((), dtype=_accumulate_dtype(dtype))
        with without_autocast(x.device.type):
            U = weight.to(dtype)
            for start in range(0, len(x), chunk_size):
                target = targets[start : start + chunk_size]
                # Positions without a target may hold values that are not finite.
                ignored = (target == IGNORE_INDEX).unsqueeze(-1)
                part = x[start : start + chunk_size].to(dtype).masked_fill(ignored, 0.0)
                loss, error = _loss_and_error(part @ U.T, target)
                total += loss
                if grad_x is not None:
                    grad_x[start : start + chunk_size] = error @ U
                if grad_weight is not None and dtype == wide:
                    grad_weight.addmm_(error.T, part)
                elif grad_weight is not None:
                    grad_weight += error.T @ part
                del error  # before the next logits
        ctx.grads = grad_x, None if grad_weight is None else grad_weight.to(weight.dtype)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        create_graph, (grads, ctx.grads) = torch.is_grad_enabled(), (ctx.grads, None)
        if grads is not None and not create_graph:
            return *(g if g is None else g.mul_(grad.to(g.dtype)) for g in grads), None, None, None
        # The second backward pass, or one that is differentiated again, recomputes the logits.
        x, weight, targets = ctx.saved_tensors
        needs_grad = ctx.needs_input_grad[:2]
        with torch.enable_grad(), without_autocast(x.device.type):
            total = _checkpointed_loss(
                lambda x: x.to(ctx.dtype) @ weight.to(ctx.dtype).T, x, targets, ctx.chunk_size
            )
            inputs = [t for t, needed in zip((x, weight), needs_grad, strict=True) if needed]
            results = iter(torch.autograd.grad(total, inputs, grad, create_graph=create_graph))
        return *(next(results) if needed else None for needed in needs_grad), None, None, None


def _loss_and_error(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Return the summed loss and its gradient p − [w = y] in the logits ``[C, W]``, in place."""
    valid = (target != IGNORE_INDEX).to(_accumulate_dtype(logits.dtype))[:, None]
    p = logits.to(valid.dtype)
    p -= p.amax(-1, keepdim=True)
    loss = functional.nll_loss(p, target, ignore_index=IGNORE_INDEX, reduction="sum")
    normalizer = p.exp_().sum(-1, keepdim=True)
    loss += (normalizer.log() * valid).sum()
    p.mul_(valid / normalizer).scatter_add_(1, target.clamp_min(0)[:, None], -valid)
    return loss, p.to(logits.dtype)
