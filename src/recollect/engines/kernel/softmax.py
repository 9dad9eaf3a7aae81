"""The platform's softmax attention, and one token of it where that is all a recipe is.

What lies between a caller and an engine (constants, names, sizes, weights of a context that has
none) takes as long as attention to a few hundred tokens.
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
"""Kernels for one query. cuDNN plans its kernel anew for each number of keys: 36 ms a token on an
H200, where the flash kernel takes 0.08 ms (``results/gpu``)."""


def is_mean(recipe: Recipe) -> bool:
    """Whether values are averaged: the error sees what is predicted."""
    return recipe.bias.is_affine and recipe.bias.sees_prediction


def sdpa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    mask: Tensor | None = None,
    is_causal: bool = False,
) -> Tensor:
    """The platform's attention of ``[B, heads, T, ·]``, differentiated once.

    Args:
        q, k, v: heads of q may be a multiple of theirs.
        scale: of the logits.
        mask: added to them.
        is_causal: whether later keys are hidden.
    """
    bias: Sequence[Tensor] = ()
    if torch.is_grad_enabled():
        given = (q, k, v) if mask is None or not mask.requires_grad else (q, k, v, mask)
        q, k, v, *bias = mark_once_differentiable(
            "softmax attention by the platform (engine kernel)", *given
        )
    # A branch, because sizes of a compiled call may be symbols, which the platform does not take.
    grouped = {"enable_gqa": True} if q.shape[1] != k.shape[1] else {}
    one_query = q.device.type == "cuda" and q.shape[2] == 1 and mask is None
    kernels = _enabled_without_cudnn() if one_query else []
    with sdpa_kernel(kernels) if kernels else nullcontext():
        return functional.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=bias[0] if bias else mask,
            is_causal=is_causal,
            scale=scale,
            **grouped,
        )


def _enabled_without_cudnn() -> list[SDPBackend]:
    """Return the enabled kernels for one query; none if the caller has enabled only cuDNN's."""
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
    """Scale of the logits where softmax attention to all of the past is all there is of a recipe.

    Then one token needs no more than its key and value beside the others (`token`).
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
    q: Tensor, k: Tensor, v: Tensor, state: State, *, scale: float, written: str
) -> tuple[Tensor, State] | None:
    """One token of plain softmax attention; ``None`` where a row has empty slots.

    Args:
        q, k, v: ``[B, 1, H·G, K]``, ``[B, 1, H, K]``, ``[B, 1, H, V]``.
        state: before the token.
        scale: of the logits.
        written: what a state of this recipe is known by.
    """
    old = state.buffer
    if old is None or not (q.dtype == k.dtype == v.dtype == old.k.dtype == old.v.dtype):
        return None
    # A buffer of as many slots as rows have seen tokens has no empty one.
    if state.host_position != old.k.shape[1] and not (can_read_values(k) and bool(old.mask.all())):
        return None
    keys, stored = torch.cat([old.k, k], dim=1), torch.cat([old.v, v], dim=1)
    y = sdpa(q.transpose(1, 2), keys.transpose(1, 2), stored.transpose(1, 2), scale=scale)
    there = torch.cat([old.mask, old.mask.new_ones(k.shape[0], 1)], dim=1)
    buffer = Buffer(k=keys, v=stored, rates={}, mask=there)
    return y.transpose(1, 2), state.replace(buffer=buffer, recipe_id=written)
