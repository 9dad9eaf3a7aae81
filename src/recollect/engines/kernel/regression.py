"""Least squares over a kernel's features at every token, from one Cholesky factor (TTR 43).

Let s_i = √w_i. The leading blocks of the factor L Lᵀ = S κ(K, K) S + λ I of all tokens are the
factors of all prefixes. With Z = L⁻¹ S V,

    y_t = Σ_(i≤t) (L⁻¹ S κ(K, q_t))_i Z_i,

because the first t rows of a triangular solve depend on the first t rows only. The total cost is
O(T³), whereas a solve per prefix costs O(T⁴). Queries are processed in pieces, each with the rows
up to its last query. The backward pass recomputes each piece, and the factor of T² numbers per head
is saved.

A decay would change the weight of the ridge from token to token, and no factor would serve two
prefixes. Such recipes run in the reference engine. The factor and Z are in the cache of the state,
so a decoded token adds one row, O(T² + T V). Without a cache they are computed again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from recollect.choices.context.weights import VisibleAssociations
from recollect.choices.features.base import Kernel
from recollect.choices.runtime import can_read_values
from recollect.engines.base import Engine
from recollect.engines.common.associations import gather_visible, visible_values
from recollect.engines.common.problem import Problem, state_dtype
from recollect.engines.kernel.pieces import cut, piecewise, strict_visibility_mask
from recollect.state.state import State

if TYPE_CHECKING:
    from recollect.recipe.recipe import Recipe

__all__ = ["KernelRegression"]

FACTOR, SOLVED = "factor", "solved"


class KernelRegression(Engine):
    """Least squares over a kernel's features, from one Cholesky factor."""

    name = "kernel_regression"

    def unsupported_reasons(self, recipe: Recipe) -> list[str]:
        if not recipe.solves_from_gram:
            return [
                f"{recipe.memory.title} with {recipe.algorithm.title} is not a kernel regression"
            ]
        if not recipe.context.time_invariant:
            return [f"{recipe.context.brief} changes the weights of the past from token to token"]
        return []

    def describe(self, recipe: Recipe) -> str:
        return "one Cholesky factor for every prefix, KV cache"

    def run(self, problem: Problem) -> tuple[Tensor, State]:
        visible, v, factor, solved = _solve(problem, None)
        y = _outputs(problem, visible, factor, solved)
        # Storage moves the padding of associations, but not of the factor's rows.
        can_cache = problem.lengths is None and problem.bound.fingerprint is not None
        # The key of the entry identifies the recipe, and its tensor is a placeholder.
        owner = {_owner(problem): factor[:, :, :1, :1]}
        cache = {FACTOR: factor, SOLVED: solved, **owner} if can_cache else {}
        final_state = problem.final_state(cache=cache)
        return y.to(v.dtype).to(problem.v.dtype), final_state

    def read_state(self, problem: Problem, query_rates: Mapping[str, Tensor]) -> Tensor:
        visible, _, factor, solved = _solve(problem, query_rates)
        return _outputs(problem, visible, factor, solved).to(problem.v.dtype)


def _solve(
    problem: Problem, query_rates: Mapping[str, Tensor] | None
) -> tuple[VisibleAssociations, Tensor, Tensor, Tensor]:
    """Return the visible associations, their values, L ``[B, H, n, n]`` and Z ``[B, H, n, V]``."""
    recipe, dtype = problem.recipe, state_dtype(problem.q, problem.k, problem.v)
    visible, v = gather_visible(problem, dtype, query_rates), visible_values(problem, dtype)
    kernel = recipe.features
    assert isinstance(kernel, Kernel)
    scale = _scales(recipe, visible)  # [B, H, n]
    k, right = visible.k.transpose(1, 2), scale.unsqueeze(-1) * v.transpose(1, 2)
    cache, n = problem.state.cache, k.shape[2]
    solved_before = cache[FACTOR].shape[2] if _owner(problem) in cache else 0
    if solved_before == 0 or solved_before != n - problem.k.shape[1]:
        factor = _factor(_gram(recipe, kernel, k, k, scale, scale), recipe)
        return visible, v, factor, torch.linalg.solve_triangular(factor, right, upper=False)
    old, done = cache[FACTOR].to(dtype), cache[SOLVED].to(dtype)
    if solved_before == n:
        return visible, v, old, done
    # [[L, 0], [X, C]] with X Lᵀ = A₂₁ and C Cᵀ = A₂₂ − X Xᵀ.
    a, b = slice(0, solved_before), slice(solved_before, n)
    across = _gram(recipe, kernel, k[:, :, a], k[:, :, b], scale[:, :, a], scale[:, :, b], ridge=0)
    X = torch.linalg.solve_triangular(old, across, upper=False).mT
    gram = _gram(recipe, kernel, k[:, :, b], k[:, :, b], scale[:, :, b], scale[:, :, b])
    corner = _factor(gram - X @ X.mT, recipe)
    fresh = torch.linalg.solve_triangular(corner, right[:, :, b] - X @ done, upper=False)
    above = torch.cat([old, torch.zeros_like(X.mT)], dim=-1)
    factor = torch.cat([above, torch.cat([X, corner], dim=-1)], dim=-2)
    return visible, v, factor, torch.cat([done, fresh], dim=-2)


def _owner(problem: Problem) -> str:
    """Return the cache key that identifies the recipe of a factor."""
    return f"of {problem.bound.fingerprint}"


def _scales(recipe: Recipe, visible: VisibleAssociations) -> Tensor:
    """Return √w ``[B, H, n]``, 0 for empty slots."""
    weights = recipe.context.over(visible)
    real = visible.valid[:, None].to(visible.q.dtype)
    if weights is None or weights.key_part is None:
        return real.expand(-1, visible.k.shape[2], -1)
    return real * (0.5 * weights.key_part.transpose(1, 2)).exp().to(real)


def _gram(
    recipe: Recipe,
    kernel: Kernel,
    k: Tensor,
    other: Tensor,
    scale: Tensor,
    others: Tensor,
    ridge: float | None = None,
) -> Tensor:
    """Return S κ S plus the ridge on the diagonal."""
    gram = scale.unsqueeze(-1) * kernel.kappa(k, other) * others.unsqueeze(-2)
    ridge = recipe.ridge if ridge is None else ridge
    if ridge == 0:
        return gram
    return gram + ridge * torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)


def _factor(A: Tensor, recipe: Recipe) -> Tensor:
    """Return the Cholesky factor."""
    factor, info = torch.linalg.cholesky_ex(A)
    if not can_read_values(A):  # undetermined entries become NaN instead of an error
        return factor.masked_fill((info > 0)[..., None, None], torch.nan)
    if not bool(info.any()):
        return factor
    if bool(A.isfinite().all()):
        raise ValueError(
            f"kernel regression: the Gram matrix with a ridge of {recipe.ridge:g} is not positive "
            f"definite in {A.dtype}: use a larger ridge in algorithm.Analytic, or float64"
        )
    return torch.full_like(A, torch.nan)  # propagate NaN of the inputs


def _outputs(
    problem: Problem, visible: VisibleAssociations, factor: Tensor, solved: Tensor
) -> Tensor:
    recipe, kernel = problem.recipe, problem.recipe.features
    B, T, H, G, _ = problem.q.shape
    n, V = solved.shape[2:]
    if T == 0 or B == 0 or n == 0:
        return solved.new_zeros(B, T, H, G, V)
    k, scale = visible.k.transpose(1, 2), _scales(recipe, visible)

    def piece(queries: slice, keys: slice) -> Tensor:
        q = visible.q[:, queries].permute(0, 2, 1, 3, 4).flatten(2, 3)  # [B, H, C G, K]
        like = scale[:, :, keys, None] * kernel.kappa(k[:, :, keys], q)  # [B, H, m, C G]
        like = torch.linalg.solve_triangular(factor[:, :, keys, keys], like, upper=False)
        # A single solve serves all queries of the piece, each with a mask of its visible rows.
        mask = strict_visibility_mask(visible, queries, keys, None)  # [B, C, m]
        mask = mask.mT[:, None, :, :, None].expand(-1, -1, -1, -1, G).flatten(3, 4)
        return like.masked_fill(~mask, 0.0).mT @ solved[:, :, keys]  # [B, H, C G, V]

    y = piecewise(cut(visible, None), piece, visible.q.device.type, recompute=True)
    y = y.unflatten(2, (T, G)).transpose(1, 2)
    if problem.token_mask is not None and visible.first_slot < n:
        y = torch.where(problem.token_mask[..., None, None, None], y, 0.0)
    return recipe.bias.optimum * y
