"""How steep the steps of an inner batch are: the top eigenvalue of rates times the tangent kernel.

Gradients of a batch are taken at the same weights, so its steps act on each other's errors. With
∇ℓ_i of all maps, g_i = ∂ℓ_i/∂prediction and η_i the rate in units of association i's error,

    K_ij = ⟨∇ℓ_i, ∇ℓ_j⟩ / (|g_i| |g_j|),     diag(η) K

moves the errors, to first order, and repeated writes diverge where its largest eigenvalue passes 2.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from recollect.choices.algorithm.normalized_steps import (
    effective_batch_size,
    measures_overlap,
    overlap_discount,
)
from recollect.choices.memory.base import Stack
from recollect.engines.deep.gradient_factors import Factors, Points, factors
from recollect.engines.deep.share import Normalizer
from recollect.recipe.recipe import Recipe

__all__ = ["measured", "top_eigenvalue"]


def measured(recipe: Recipe) -> bool:
    """Whether a recipe's steps add up as the module has it: plain maps and linear recursions."""
    algorithm = recipe.algorithm
    plain = isinstance(recipe.memory, Stack) and recipe.features.finite
    plain = plain and recipe.retention.is_plain
    plain = plain and algorithm.recursion is not None and not algorithm.needs_split_error
    plain = (
        plain
        and not (algorithm.per_value or algorithm.rate_depends_on_key)
        and recipe.associations_per_token == 1
    )
    return plain and recipe.context.horizon is not None and recipe.bias.probe is None


def top_eigenvalue(
    recipe: Recipe,
    W: list[Tensor],
    points: Points,
    params: Mapping[str, Tensor],
    numbers: Mapping[str, Tensor],
) -> Tensor:
    """The largest eigenvalue of diag(η) K ``[B, H]``.

    Args:
        recipe: one that is `measured`.
        W: weights ``[B, H, out, in]`` at the batch's start.
        points: the batch's associations, ``[B, H, R, ·]``.
        params: of the memory.
        numbers: ``"lr"``, ``"momentum"`` and ``"window"``, those there are, ``[B, H, R, ...]``.
    """
    memory = recipe.memory
    assert isinstance(memory, Stack)
    flat = [w.flatten(0, 1) for w in W]
    slopes = factors(memory, flat, points, params, recipe.bias, outer=False)
    B, H, R = slopes.error.shape[:3]
    size = slopes.error.norm(dim=-1)  # [B, H, R]
    K = torch.stack([_gram(one, R) for one in slopes.factors]).sum(0).unflatten(0, (B, H))
    inverse = torch.where(size == 0, 0.0, 1 / torch.where(size == 0, 1.0, size))
    K = K * inverse.unsqueeze(-1) * inverse.unsqueeze(-2)
    rate = numbers["lr"] if "lr" in numbers else torch.ones_like(size)
    if measures_overlap(recipe.algorithm):
        rate = rate * overlap_discount(points.raw, effective_batch_size(recipe.algorithm))
    if recipe.algorithm.uses_normalized_steps and recipe.bias.target is not None:
        normalizer = Normalizer.of(recipe, recipe.bias.target)
        rate = rate * normalizer.shares(slopes, points, flat, params, {}).unflatten(0, (B, H))
    # In units of the error: |g| is its length for L2 alone.
    target = 1.0 if recipe.bias.target is None else recipe.bias.target
    length = (slopes.prediction - target * points.v).norm(dim=-1)
    rate = rate * torch.where(length == 0, 0.0, size / torch.where(length == 0, 1.0, length))
    if "window" in numbers:
        rate = rate * numbers["window"].sum(-1)
    else:
        rate = rate * (recipe.context.horizon or 1)
    if "momentum" in numbers:
        rate = rate / (1 - numbers["momentum"])
    if recipe.algorithm.reduction == "mean":
        rate = rate / R
    root = rate.clamp_min(0).sqrt()
    scaled = root.unsqueeze(-1) * K * root.unsqueeze(-2)
    # Of a memory that has diverged there is none: the solver would refuse the whole batch.
    finite = scaled.isfinite().flatten(-2).all(-1)
    top = torch.linalg.eigvalsh(torch.where(finite[..., None, None], scaled, 0.0))[..., -1]
    return torch.where(finite, top, torch.inf)


def _gram(one: Factors, R: int) -> Tensor:
    """⟨∂ℓ_i/∂W, ∂ℓ_j/∂W⟩ of one map ``[P, R, R]``, over all of its applications."""
    both = (one.h @ one.h.mT) * (one.delta @ one.delta.mT)
    times = both.shape[-1] // R
    return both.unflatten(-1, (times, R)).unflatten(-3, (times, R)).sum((-4, -2))
