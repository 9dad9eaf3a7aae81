"""Engine ``kernel``: softmax attention as a local-constant memory, through the platform's SDPA.

The state is a KV cache: the raw associations that later queries may still see.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from recollect.choices.features import Exponential
from recollect.engines.problem import Problem
from recollect.engines.state import State

if TYPE_CHECKING:
    from recollect.recipe import Recipe

__all__ = ["attend", "describes", "refuses", "run"]


def refuses(recipe: Recipe) -> list[str]:
    """Why SDPA cannot run a recipe."""
    if recipe.memory.degree != 0:
        return [f"{recipe.memory.title} keeps weights, not associations"]
    if not isinstance(recipe.context.kernel, Exponential):
        return ["the similarity is not features.Exponential"]
    if recipe.bias.affine is None or recipe.bias.affine[0] == 0:
        return [f"{recipe.bias.title} does not normalise over the past"]
    return []


def describes(recipe: Recipe) -> str:
    """How the kernel engine runs a recipe."""
    return "scaled dot-product attention, KV cache"


def run(problem: Problem) -> tuple[Tensor, State]:
    """Outputs ``[B, T, H, G, V]`` and the cache after the last token."""
    y = attend(problem)
    state = problem.after()
    return y, state


def attend(problem: Problem) -> Tensor:
    """Causal attention of the queries over the cache and the new associations."""
    k, v, buffer = problem.k, problem.v, problem.state.buffer
    horizon, kernel = problem.recipe.context.horizon, problem.recipe.context.kernel
    assert isinstance(kernel, Exponential)
    B, T, H, G, K = problem.q.shape
    if T == 0 or B == 0:
        return v.new_zeros(B, T, H, G, v.shape[-1])
    held = 0
    if buffer is not None:
        held = buffer.k.shape[1]
        k = torch.cat([buffer.k.to(k.dtype), k], dim=1)
        v = torch.cat([buffer.v.to(v.dtype), v], dim=1)
    mask = None
    if held or problem.lengths is not None or (horizon is not None and horizon < T):
        mask = _mask(problem, held, horizon)
    y = functional.scaled_dot_product_attention(
        problem.q.flatten(2, 3).transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=mask,
        is_causal=mask is None,
        scale=1 / kernel.tau(K),
        enable_gqa=G > 1,
    )
    y = y.transpose(1, 2).unflatten(2, (H, G))
    if problem.live is not None:
        y = torch.where(problem.live[..., None, None, None], y, 0.0)
    return y


def _mask(problem: Problem, held: int, horizon: int | None) -> Tensor | None:
    """``[B, 1, T, held + T]``: which associations each query sees.

    Old ones stand right-aligned and new ones left-aligned, so distance in the joined run is
    distance in tokens. A padded query sees itself, so that no softmax is empty.
    """
    T, device = problem.k.shape[1], problem.k.device
    query = torch.arange(T, device=device)[:, None] + held
    key = torch.arange(held + T, device=device)[None, :]
    seen = key <= query
    if horizon is not None:
        seen &= key > query - horizon
    if problem.state.buffer is None and problem.live is None:
        return seen
    real = torch.ones(problem.k.shape[0], T, dtype=torch.bool, device=device)
    if problem.live is not None:
        real = problem.live
    if problem.state.buffer is not None:
        real = torch.cat([problem.state.buffer.mask, real], dim=1)
    return ((seen & real[:, None]) | (key == query))[:, None]
