"""Ridge regression on all past tokens: statistics, ridges and dense solves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from recollect.choices.algorithm.base import Inverse
from recollect.engines.common.conjugate_gradient import conjugate_gradient
from recollect.engines.common.linalg import inverse_power
from recollect.engines.common.problem import Problem

__all__ = [
    "RidgeStatistics",
    "apply_approximate_inverse",
    "initial_ridge",
    "ridges",
    "weighted_associations",
]


@dataclass(frozen=True, kw_only=True)
class RidgeStatistics:
    """Sufficient statistics of the past."""

    gram: Tensor  # D [B, H, F, F]
    residual: Tensor  # E [B, H, V, F]
    ridge_share: Tensor  # ρ_t / λ [B, H]
    origin: Tensor  # W_0 [B, H, V, F]
    ridge: Tensor  # λ [B, H, F]

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
    """
    affine = problem.recipe.bias.affine
    assert affine is not None and affine[0] > 0  # required by the algorithm
    a, b = affine
    position = problem.positions() if position is None else position
    phi = problem.phi(problem.k.unsqueeze(3), "key", position).squeeze(3)
    weight = problem.rates["weight"]
    v = problem.v.to(phi.dtype)
    return phi, v if a == b else v * (b / a), weight if a == 1 else weight * a


def ridges(rates: Mapping[str, Tensor], features: int) -> Tensor:
    """Return λ ``[B, T, H, F]``."""
    ridge = rates["ridge"]
    return ridge if ridge.dim() == 4 else ridge.unsqueeze(-1).expand(-1, -1, -1, features)


def initial_ridge(rates: Mapping[str, Tensor], features: int) -> Tensor:
    """Return λ ``[B, H, F]`` of the first token; only a gate depends on the token."""
    return ridges(rates, features)[:, 0]


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
    return conjugate_gradient(lambda p: p @ system, q, steps=inverse.steps)[0]
