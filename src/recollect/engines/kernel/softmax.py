"""Softmax attention of the platform, and a short path for one token of plain softmax attention.

The short path skips the preparation of a general call: constants, names, sizes, context weights.
This preparation takes as long as attention to a few hundred tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from recollect.choices.autograd import mark_once_differentiable
from recollect.choices.runtime import can_read_values
from recollect.state.state import Buffer, State

if TYPE_CHECKING:
    from recollect.recipe.bound import BoundRecipe
    from recollect.recipe.recipe import Recipe

__all__ = ["is_mean", "plain_scale", "sdpa", "token"]

_WITHOUT_CUDNN = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""Kernels for one query. cuDNN plans its kernel again for each number of keys, which is slow
(``results/gpu``)."""


def is_mean(recipe: Recipe) -> bool:
    """Return whether values are averaged: the error depends on the prediction."""
    return recipe.bias.is_affine and recipe.bias.sees_prediction


def sdpa(
    q: Tensor,  # its heads may be a multiple of the heads of k and v
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    mask: Tensor | None = None,  # Boolean mask, or bias of the logits
    is_causal: bool = False,
) -> Tensor:
    """Return the platform's attention of ``[B, heads, T, ·]``, differentiable once."""
    bias: Sequence[Tensor] = ()
    if torch.is_grad_enabled():
        inputs = (q, k, v) if mask is None or not mask.requires_grad else (q, k, v, mask)
        q, k, v, *bias = mark_once_differentiable(
            "softmax attention by the platform (engine kernel)", *inputs
        )
    # A branch, because the platform does not accept symbolic sizes of a compiled call.
    grouped = {"enable_gqa": True} if q.shape[1] != k.shape[1] else {}
    one_query = q.device.type == "cuda" and q.shape[2] == 1 and mask is None
    kernels = _enabled_without_cudnn() if one_query else []
    with sdpa_kernel(kernels) if kernels else nullcontext():
        return functional.scaled_dot_product_attention(
            q, k, v, attn_mask=bias[0] if bias else mask, is_causal=is_causal, scale=scale,
            **grouped,
        )  # fmt: skip


def _enabled_without_cudnn() -> list[SDPBackend]:
    """Return the enabled kernels for one query. The list is empty if only cuDNN is enabled."""
    if torch.compiler.is_compiling():  # a compiler does not trace the switches
        return _WITHOUT_CUDNN
    switches = torch.backends.cuda
    enabled = (
        switches.flash_sdp_enabled(),
        switches.mem_efficient_sdp_enabled(),
        switches.math_sdp_enabled(),
    )
    return [kernel for kernel, on in zip(_WITHOUT_CUDNN, enabled, strict=True) if on]


def plain_scale(bound: BoundRecipe) -> float | None:
    """Return the scale of the logits if a recipe is plain softmax attention, else ``None``.

    One token of such a recipe only appends its key and value (`token`).
    """
    recipe, kernel = bound.recipe, bound.recipe.context.kernel
    if recipe.memory.degree != 0 or not is_mean(recipe) or kernel is None or bound.K != bound.V:
        return None
    if recipe.buffer_size is not None or recipe.context.restrictions or recipe.bias.optimum != 1.0:
        return None
    exponent = kernel.exponent(bound.K)
    bare = not bound.needs_lowering and not (bound.gates or bound.params or bound.constants)
    return exponent[0] if bare and exponent is not None and exponent[1] == 0 else None


def token(
    q: Tensor, k: Tensor, v: Tensor, state: State, *, scale: float, recipe_id: str
) -> tuple[Tensor, State] | None:
    """Run one token ``[B, 1, heads, ·]`` of plain softmax attention; ``None`` for empty slots."""
    old = state.buffer
    if old is None or not (q.dtype == k.dtype == v.dtype == old.k.dtype == old.v.dtype):
        return None
    # A buffer with one slot per token has no empty slot.
    if state.host_position != old.k.shape[1] and not (can_read_values(k) and bool(old.mask.all())):
        return None
    keys, stored = torch.cat([old.k, k], dim=1), torch.cat([old.v, v], dim=1)
    y = sdpa(q.transpose(1, 2), keys.transpose(1, 2), stored.transpose(1, 2), scale=scale)
    mask = torch.cat([old.mask, old.mask.new_ones(k.shape[0], 1)], dim=1)
    buffer = Buffer(k=keys, v=stored, rates={}, mask=mask)
    return y.transpose(1, 2), state.replace(buffer=buffer, recipe_id=recipe_id)
