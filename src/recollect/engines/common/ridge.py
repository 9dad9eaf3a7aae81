"""Ridge regression on all past tokens: statistics, ridges and dense solves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from recollect.choices.algorithm.base import Inverse
from recollect.engines.common.linalg import inverse_power
from recollect.engines.common.problem import Problem

__all__ = ["RidgeStatistics", "apply_approximate_inverse", "initial_ridge", "weighted_associations"]


@dataclass(frozen=True, kw_only=True)
class RidgeStatistics:
    """Sufficient statistics of the past.

    Attributes:
        gram: D ``[B, H, F, F]``.
        residual: E ``[B, H, V, F]``.
        ridge_share: Ratio ρ_t / λ, ``[B, H]``.
        origin: W_0 ``[B, H, V, F]``.
        ridge: λ ``[B, H, F]``.
    """

    gram: Tensor
    residual: Tensor
    ridge_share: Tensor
    origin: Tensor
    ridge: Tensor

    @property
    def rho(self) -> Tensor:
        """ρ_t per channel, ``[B, H, F]``."""
        return self.ridge_share[..., None] * self.ridge

    @property
    def system(self) -> Tensor:
        """D + ρ I."""
        return self.gram + torch.diag_embed(self.rho)

    def solved(self) -> Tensor:
        """Return W ``[B, H, V, F]``."""
        return self.origin + torch.linalg.solve(self.system, self.residual.mT).mT


def weighted_associations(
    problem: Problem, position: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return φ(k), v and w ``[B, T, H, ·]`` of the associations in ½ w ‖W φ(k) − v‖².

    An error a·prediction − b·value gives this objective with weight a·w and value (b/a)·v.

    Args:
        problem: The call.
        position: Its ``positions()``, if already computed.
    """
    affine = problem.recipe.bias.affine
    assert affine is not None and affine[0] > 0  # required by the algorithm
    a, b = affine
    position = problem.positions() if position is None else position
    phi = problem.phi(problem.k.unsqueeze(3), "key", position).squeeze(3)
    weight = problem.rates["weight"]
    v = problem.v.to(phi.dtype)
    return phi, v if a == b else v * (b / a), weight if a == 1 else weight * a


def initial_ridge(rates: Mapping[str, Tensor], features: int) -> Tensor:
    """Return λ ``[B, H, F]``, which does not depend on the token."""
    ridge = rates["ridge"][:, 0]
    return ridge if ridge.dim() == 3 else ridge.unsqueeze(-1).expand(-1, -1, features)


def apply_approximate_inverse(inverse: Inverse, now: RidgeStatistics, q: Tensor) -> Tensor:
    """Return B_t q ``[B, H, G, F]`` of the approximate rules from the Gram matrix."""
    kind, power = inverse.kind, inverse.power
    if kind == "identity":
        return q
    if kind == "diagonal":
        return q / (now.gram.diagonal(dim1=-2, dim2=-1) + now.ridge).pow(power).unsqueeze(-2)
    system = now.gram + torch.diag_embed(now.ridge)
    if kind == "spectral":
        return q @ inverse_power(system, power)
    z, r, p = torch.zeros_like(q), q, q
    size = r.square().sum(-1, keepdim=True)
    for _ in range(inverse.steps):
        product = p @ system
        curve = (p * product).sum(-1, keepdim=True)
        positive = curve > 0
        alpha = torch.where(positive, size / torch.where(positive, curve, 1.0), 0.0)
        z, r = z + alpha * p, r - alpha * product
        next_size = r.square().sum(-1, keepdim=True)
        p = r + torch.where(size > 0, next_size / torch.where(size > 0, size, 1.0), 0.0) * p
        size = next_size
    return z
