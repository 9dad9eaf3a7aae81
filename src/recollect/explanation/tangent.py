"""Curvature of the steps of an inner batch: the top eigenvalue of rates times the tangent kernel.

Gradients of a batch are taken at the same weights, so its steps change each other's errors. Let
∇ℓ_i be the gradient of all maps, g_i = ∂ℓ_i/∂prediction, and η_i the rate in units of the error of
association i. To first order the errors change by

    diag(η) K,     K_ij = ⟨∇ℓ_i, ∇ℓ_j⟩ / (|g_i| |g_j|),

and repeated writes diverge if its largest eigenvalue exceeds 2.
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

__all__ = ["supports_recipe", "top_eigenvalue"]


def supports_recipe(recipe: Recipe) -> bool:
    """Whether the formula applies: a chain of maps with a linear recursion."""
    algorithm, memory = recipe.algorithm, recipe.memory
    return (
        isinstance(memory, Stack)
        and recipe.features.finite
        and recipe.retention.is_plain
        and algorithm.recursion is not None
        and not algorithm.needs_split_error
        and not algorithm.per_value
        and not algorithm.rate_depends_on_key
        and recipe.associations_per_token == 1
        and recipe.context.horizon is not None
        and recipe.bias.probe is None
        and not algorithm.erasure
    )


def top_eigenvalue(
    recipe: Recipe,
    W: list[Tensor],
    points: Points,
    params: Mapping[str, Tensor],
    rates: Mapping[str, Tensor],
) -> Tensor:
    """Return the largest eigenvalue of diag(η) K ``[B, H]``; ``rates`` are those of the recipe."""
    memory = recipe.memory
    assert isinstance(memory, Stack)
    flat = [w.flatten(0, 1) for w in W]
    slopes = factors(memory, flat, points, params, recipe.bias, outer=False)
    B, H, R = slopes.error.shape[:3]
    size = slopes.error.norm(dim=-1)  # [B, H, R]
    K = torch.stack([_gram(x, R) for x in slopes.factors]).sum(0).unflatten(0, (B, H))
    inverse = torch.where(size == 0, 0.0, 1 / torch.where(size == 0, 1.0, size))
    K = K * inverse.unsqueeze(-1) * inverse.unsqueeze(-2)
    rate = rates["lr"] if "lr" in rates else torch.ones_like(size)
    if measures_overlap(recipe.algorithm):
        rate = rate * overlap_discount(points.raw, effective_batch_size(recipe.algorithm))
    if recipe.algorithm.uses_normalized_steps and recipe.bias.target is not None:
        normalizer = Normalizer.of(recipe, recipe.bias.target)
        rate = rate * normalizer.shares(slopes, points, flat, params, {}).unflatten(0, (B, H))
    # In units of the error, whose length is |g| for L2 only.
    target = 1.0 if recipe.bias.target is None else recipe.bias.target
    length = (slopes.prediction - target * points.v).norm(dim=-1)
    rate = rate * torch.where(length == 0, 0.0, size / torch.where(length == 0, 1.0, length))
    if "window" in rates:
        rate = rate * rates["window"].sum(-1)
    else:
        rate = rate * (recipe.context.horizon or 1)
    if "momentum" in rates:
        rate = rate / (1 - rates["momentum"])
    if "outer_lr" in rates:
        rate = rate * rates["outer_lr"]
    if recipe.algorithm.reduction == "mean":
        rate = rate / R
    root = rate.clamp_min(0).sqrt()
    scaled = root.unsqueeze(-1) * K * root.unsqueeze(-2)
    # The solver would refuse the batch if one memory has diverged.
    finite = scaled.isfinite().flatten(-2).all(-1)
    top = torch.linalg.eigvalsh(torch.where(finite[..., None, None], scaled, 0.0))[..., -1]
    return torch.where(finite, top, torch.inf)


def _gram(factors: Factors, R: int) -> Tensor:
    """Return ⟨∂ℓ_i/∂W, ∂ℓ_j/∂W⟩ of one map ``[P, R, R]``, summed over all of its applications."""
    products = (factors.h @ factors.h.mT) * (factors.delta @ factors.delta.mT)
    times = products.shape[-1] // R
    return products.unflatten(-1, (times, R)).unflatten(-3, (times, R)).sum((-4, -2))
