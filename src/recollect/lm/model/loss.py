"""The loss of next tokens, with the output layer taken a few tokens at a time.

The mean negative log-likelihood of target y_n at hidden state x_n, over a vocabulary of W tokens,

    L = (1/M) Σ_n [ log Σ_w exp(x_n · U_w) − x_n · U_{y_n} ],

needs logits ``[N, W]`` in float32, and as much again for their gradient: at a vocabulary of 32,000
more than the rest of a small model. `next_token_loss` makes them for a chunk of tokens, takes from
them the loss and its gradients

    ∂L/∂x_n = (1/M) Σ_w (p_nw − [w = y_n]) U_w,      ∂L/∂U_w = (1/M) Σ_n (p_nw − [w = y_n]) x_n,

and forgets them: three products, as without chunks, and N / chunk times fewer logits at once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from recollect.choices.runtime import autocast_enabled, without_autocast

__all__ = ["IGNORE", "next_token_loss", "shifted"]

IGNORE = -100
"""The target that asks nothing."""


def shifted(labels: Tensor, mask: Tensor | None = None, borders: Tensor | None = None) -> Tensor:
    """Target of every column: the next token, `IGNORE` where nothing predicts it.

    Args:
        labels: ``[B, T]``, the input's own tokens.
        mask: ``[B, T]`` or wider, 0 at padding.
        borders: ``[N + 1]`` of packed documents, in all rows one after the other.

    Returns:
        ``[B, T]``; the last column asks nothing.
    """
    if borders is not None:
        starts = borders[:-1].to(device=labels.device, dtype=torch.long)
        flat = labels.flatten()
        labels = flat.index_fill(0, starts[starts < len(flat)], IGNORE).view_as(labels)
    targets = functional.pad(labels[:, 1:], (0, 1), value=IGNORE)
    if mask is not None:
        real = mask[:, mask.shape[1] - labels.shape[1] :].to(labels.device)
        targets = targets.masked_fill(real == 0, IGNORE)
    return targets


def next_token_loss(
    x: Tensor,
    head: nn.Module,
    targets: Tensor,
    *,
    items: int | Tensor | None = None,
    chunk: int = 0,
    logits: Tensor | None = None,
) -> Tensor:
    """Mean cross entropy in nats of the targets, in float32 (float64 of float64).

    A head other than a plain linear map (one with an adapter, hooks or shards) is called for every
    chunk, and once more in the backward pass.

    Args:
        x: hidden states ``[B, T, D]``.
        head: from D to the vocabulary's W.
        targets: ``[B, T]``, int64; `IGNORE` asks nothing.
        items: what the sum is divided by; the targets that ask, when omitted.
        chunk: tokens whose logits are held at once; 0 is all.
        logits: ``[B, T, W]``, where they are there already.

    Raises:
        IndexError: a target outside of the vocabulary.
    """
    targets = targets.to(x.device).flatten()
    if items is None:
        items = (targets != IGNORE).sum().clamp_min(1)
    elif isinstance(items, Tensor):
        items = items.to(x.device)
    if logits is not None:
        return _cross_entropy(logits.flatten(0, -2), targets) / items
    x = x.flatten(0, 1)
    chunk = chunk or max(1, len(targets))
    if _plain(head) and not torch.compiler.is_compiling():
        return _in_chunks(x, head.weight, targets, chunk) / items  # type: ignore[arg-type]
    total = x.new_zeros((), dtype=_wide(x.dtype))
    for part, asked in zip(x.split(chunk), targets.split(chunk), strict=True):
        if torch.is_grad_enabled():
            total = total + checkpoint(_head_loss, head, part, asked, use_reentrant=False)
        else:
            total = total + _head_loss(head, part, asked)
    return total / items


def _head_loss(head: nn.Module, x: Tensor, targets: Tensor) -> Tensor:
    return _cross_entropy(head(x), targets)


def _cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """The sum, in float32 at least."""
    wide = logits.to(_wide(logits.dtype))
    return functional.cross_entropy(wide, targets, ignore_index=IGNORE, reduction="sum")


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _plain(head: nn.Module) -> bool:
    """Whether a head is x ↦ U x and nothing else happens where it is called."""
    return (
        type(head) is nn.Linear
        and head.bias is None
        and type(head.weight) is nn.Parameter
        and not nn.utils.parametrize.is_parametrized(head)
        and not (head._forward_hooks or head._forward_pre_hooks or "forward" in vars(head))
        and not (head._backward_hooks or head._backward_pre_hooks)
    )


def _in_chunks(x: Tensor, weight: Tensor, targets: Tensor, chunk: int) -> Tensor:
    """The summed loss of a linear head."""
    kind = x.device.type
    if autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        dtype = x.dtype if x.dtype == torch.float64 else dtype
    else:
        dtype = x.dtype
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        return _Chunked.apply(x, weight, targets, chunk, dtype)  # type: ignore[no-any-return]
    return _sum(x, weight, targets, chunk, dtype, (False, False))[0]


def _sum(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    chunk: int,
    dtype: torch.dtype,
    wanted: tuple[bool, bool],
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The summed loss, and those of its gradients that are wanted.

    Args:
        x: ``[N, D]``. weight: U ``[W, D]``. targets: ``[N]``.
        chunk: tokens at once. dtype: of the products.
        wanted: whether ∂/∂x, and whether ∂/∂U.
    """
    wide = _wide(dtype)
    total = x.new_zeros((), dtype=wide)
    to_x = torch.empty_like(x) if wanted[0] else None
    to_weight = torch.zeros_like(weight, dtype=_wide(weight.dtype)) if wanted[1] else None
    with without_autocast(x.device.type):
        U = weight.to(dtype)
        for begin in range(0, len(x), chunk):
            part, asked = x[begin : begin + chunk].to(dtype), targets[begin : begin + chunk]
            log_p = (part @ U.T).to(wide).log_softmax(-1)  # [C, W]
            total += functional.nll_loss(log_p, asked, ignore_index=IGNORE, reduction="sum")
            if to_x is None and to_weight is None:
                continue
            real = (asked != IGNORE)[:, None]
            error = log_p.exp_().scatter_add_(
                1, asked.clamp_min(0)[:, None], -real.to(wide)
            )  # p − [w = y]
            error = error.masked_fill_(~real, 0).to(dtype)
            if to_x is not None:
                to_x[begin : begin + chunk] = error @ U
            if to_weight is not None and dtype == to_weight.dtype:
                to_weight.addmm_(error.T, part)
            elif to_weight is not None:
                to_weight += error.T @ part
    return total, to_x, None if to_weight is None else to_weight.to(weight.dtype)


class _Chunked(torch.autograd.Function):
    """`_sum`, whose gradients are there once the loss is."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, targets: Tensor, chunk: int, dtype: torch.dtype
    ) -> Tensor:
        wanted = ctx.needs_input_grad[:2]
        total, *ctx.gradients = _sum(x, weight, targets, chunk, dtype, wanted)
        ctx.save_for_backward(x, weight, targets)
        ctx.chunk, ctx.dtype = chunk, dtype
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, weight, targets = ctx.saved_tensors
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None or torch.is_grad_enabled():  # again, or to be differentiated
            return *_again(x, weight, targets, ctx, grad), None, None, None
        scaled = (g if g is None else g.mul_(grad.to(g.dtype)) for g in gradients)
        return *scaled, None, None, None


def _again(x: Tensor, weight: Tensor, targets: Tensor, ctx: Any, grad: Tensor) -> list[Any]:
    """The gradients by autograd, chunk by chunk, which may be asked for theirs."""
    wanted = ctx.needs_input_grad[:2]
    create = torch.is_grad_enabled()
    with torch.enable_grad(), without_autocast(x.device.type):
        total = grad.new_zeros(())
        for part, asked in zip(x.split(ctx.chunk), targets.split(ctx.chunk), strict=True):
            total = total + checkpoint(
                _product_loss, part, weight, asked, ctx.dtype, use_reentrant=False
            )
        inputs = [t for t, needed in zip((x, weight), wanted, strict=True) if needed]
        found = iter(torch.autograd.grad(total, inputs, grad, create_graph=create))
    return [next(found) if needed else None for needed in wanted]


def _product_loss(x: Tensor, weight: Tensor, targets: Tensor, dtype: torch.dtype) -> Tensor:
    return _cross_entropy(x.to(dtype) @ weight.to(dtype).T, targets)
