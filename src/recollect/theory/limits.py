"""Limit of a memory after infinitely many tokens: AM section 2.2.2, equations 45 to 49.

Keys and values are projections of one input, k = W_k x and v = W_v x, with Σ = E[x xᵀ]. The delta
rule's best memory is

    S* = (W_v Σ W_kᵀ)(W_k Σ W_kᵀ)⁻¹        AM 46

With one head W_k is invertible and S* = W_v W_k⁻¹ (AM 47), which does not depend on the context.
With heads smaller than x, S* depends on Σ, predictions have an error, and with a constant step S_t
fluctuates around S*. (AM 48, with pseudo-inverses in place of 46, is not S*.)
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from recollect.functional.recall import recall
from recollect.messages import RecipeError
from recollect.recipe.resolve import RecipeLike, as_recipe
from recollect.typing import Gates

__all__ = ["best_memory", "normalized_update_norms", "relative_distance"]


def best_memory(w_k: Tensor, w_v: Tensor, second_moment: Tensor) -> Tensor:
    """Return S* of AM 46, ``[..., V, K]``.

    Args:
        w_k: Projection to keys ``[..., K, D]``.
        w_v: Projection to values ``[..., V, D]``.
        second_moment: Σ ``[D, D]``.

    Raises:
        torch.linalg.LinAlgError: Keys do not span K dimensions.

    Examples:
        >>> w_k, M = torch.randn(4, 6), torch.randn(3, 4)
        >>> torch.allclose(rc.theory.best_memory(w_k, M @ w_k, torch.eye(6)), M, atol=1e-4)
        True
    """
    cross = w_v @ second_moment @ w_k.mT
    gram = w_k @ second_moment @ w_k.mT
    return torch.linalg.solve(gram, cross.mT).mT


def relative_distance(
    recipe: RecipeLike,
    x: Tensor,
    w_k: Tensor,
    w_v: Tensor,
    *,
    at: Sequence[int],
    gates: Gates | None = None,
    second_moment: Tensor | None = None,
) -> Tensor:
    """Return ‖S_t − S*‖_F/‖S*‖_F after t tokens.

    Args:
        recipe: Recipe with a matrix memory.
        x: Inputs ``[T, D]``.
        w_k: Projections to keys ``[H, K, D]``.
        w_v: Projections to values ``[H, V, D]``.
        at: Numbers of tokens t, increasing, up to T.
        gates: Gates of `recall`, ``[1, T, H, ...]``.
        second_moment: Σ; the second moment of ``x`` if omitted.

    Returns:
        ``[len(at), H]``.

    Raises:
        RecipeError: The memory is not one matrix.

    Examples:
        >>> recipe = rc.zoo.get("delta_net").recipe
        >>> x = torch.randn(64, 6, dtype=torch.float64)
        >>> w_k, w_v = torch.randn(2, 1, 4, 6, dtype=torch.float64) / 6
        >>> gates = {"lr": torch.full((1, 64, 1), 0.1, dtype=torch.float64)}
        >>> rc.theory.relative_distance(recipe, x, w_k, w_v, at=[8, 64], gates=gates).shape
        torch.Size([2, 1])
    """
    recipe = as_recipe(recipe, "relative_distance")
    k, v = (torch.einsum("hkd,td->thk", w, x)[None] for w in (w_k, w_v))
    sigma = x.mT @ x / len(x) if second_moment is None else second_moment
    best = best_memory(w_k, w_v, sigma)
    state, start, distances = None, 0, []
    for end in at:
        part = slice(start, end)
        part_gates = {name: g[:, part] for name, g in (gates or {}).items()}
        _, state = recall(recipe, k[:, part], k[:, part], v[:, part], part_gates, state=state)
        assert state is not None
        if len(state.weights) != 1 or state.weights[0][0].shape != best.shape:
            raise RecipeError(f"{recipe.memory.title} is no single matrix to compare with S*")
        distance = (state.weights[0][0] - best).flatten(1).norm(dim=-1)
        distances.append(distance / best.flatten(1).norm(dim=-1))
        start = end
    return torch.stack(distances)


def normalized_update_norms(k: Tensor, v: Tensor, *, temperature: float) -> Tensor:
    """Return ‖S_t − S_{t−1}‖ of softmax attention, S_t = (1/t) Σ_i v_i φ(k_i)ᵀ (AM 49, table 2).

    φ has infinitely many features, so the norms are computed from κ = exp(k·k'/τ):
    t²‖S_t − S_{t−1}‖² = ‖v_t‖²κ_tt − 2⟨v_t, S_{t−1}φ_t⟩ + ‖S_{t−1}‖². They vanish like 1/t.

    Args:
        k: Keys ``[T, K]``.
        v: Values ``[T, V]``.
        temperature: τ > 0.

    Returns:
        ``[T]``, with S_0 = 0.

    Cost: O(T² (K + V)).

    Examples:
        >>> k, v = torch.randn(2, 32, 4)
        >>> norms = rc.theory.normalized_update_norms(k, v, temperature=2.0)
        >>> norms.shape, bool(norms[-1] < norms[0])
        (torch.Size([32]), True)
    """
    kappa = (k @ k.mT / temperature).exp()
    values = v @ v.mT
    both = kappa * values  # ⟨v_i φ_iᵀ, v_j φ_jᵀ⟩
    t = torch.arange(1, len(k) + 1, dtype=k.dtype)
    count = torch.clamp(t - 1, min=1)
    cross = both.tril(-1).sum(-1) / count  # ⟨v_t φ_tᵀ, S_{t−1}⟩
    inner = both.cumsum(0).cumsum(1).diagonal()  # Σ_{i,j ≤ t}
    previous = torch.cat([inner.new_zeros(1), inner[:-1]]) / count.square()
    return (both.diagonal() - 2 * cross + previous).clamp_min(0).sqrt() / t
