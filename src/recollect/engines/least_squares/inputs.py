"""Inputs of recursive least squares: tokens, the ridge, and statistics of the past."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from recollect.engines.common.problem import Problem
from recollect.engines.common.ridge import initial_ridge, weighted_associations

__all__ = ["RidgeProblem", "RidgeState", "ridge_problem"]


@dataclass(frozen=True)
class RidgeState:
    """State of the recursion between two tokens."""

    M: Tensor  # Wᵀ [B, H, F, V]
    D: Tensor  # Gram matrix of the data [B, H, F, F]
    kappa: Tensor  # remaining fraction of the ridge, κ = ρ/λ, [B, H]
    inverse: Tensor  # P = (D + κλ)⁻¹; gradients flow through D and κ instead

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the tensors in field order."""
        return self.M, self.D, self.kappa, self.inverse

    def map(self, fn: Callable[[Tensor], Tensor]) -> RidgeState:
        """Apply a function to every tensor."""
        return RidgeState(*map(fn, self.tensors()))


@dataclass(frozen=True)
class RidgeProblem:
    """Recursive least squares over S tokens; masked tokens have zeros."""

    q: Tensor  # [B, S, H, G, F]
    k: Tensor  # [B, S, H, F], times the root of the weights
    v: Tensor  # [B, S, H, V], times the root of the weights
    log_decay: Tensor  # [B, S, H]
    ridge: Tensor  # λ [B, H, F]
    origin: Tensor  # W₀ᵀ [B, H, F, V]
    state: RidgeState  # state before the first token

    def tensors(self) -> tuple[Tensor, ...]:
        """Return the tensors in field order, those of the state last."""
        tokens = (self.q, self.k, self.v, self.log_decay)
        return *tokens, self.ridge, self.origin, *self.state.tensors()

    @classmethod
    def rebuild(cls, tensors: tuple[Tensor, ...]) -> RidgeProblem:
        """Invert `tensors`."""
        return cls(*tensors[:6], state=RidgeState(*tensors[6:]))

    def wants_gradient(self) -> bool:
        """Whether an outer gradient may be requested."""
        return torch.is_grad_enabled() and any(x.requires_grad for x in self.tensors())

    def to(self, dtype: torch.dtype) -> RidgeProblem:
        """Convert every tensor to a dtype."""
        return self.rebuild(tuple([x.to(dtype) for x in self.tensors()]))

    def tokens(self, fn: Callable[[Tensor], Tensor]) -> RidgeProblem:
        """Apply a function to every per-token tensor."""
        q, k, v, log_decay = map(fn, (self.q, self.k, self.v, self.log_decay))
        return replace(self, q=q, k=k, v=v, log_decay=log_decay)

    def with_resets(self, resets: Tensor) -> RidgeProblem:  # [B, T, H]
        """Zero the log decay of resets, and reset the state before a first-token reset."""
        state, first = self.state, resets[:, 0, :, None, None]
        start = RidgeState(
            M=torch.where(first, self.origin, state.M),
            D=torch.where(first, 0.0, state.D),
            kappa=torch.where(resets[:, 0], 1.0, state.kappa),
            inverse=torch.where(first, torch.diag_embed(1 / self.ridge), state.inverse),
        )
        return replace(self, log_decay=torch.where(resets, 0.0, self.log_decay), state=start)


def ridge_problem(problem: Problem) -> RidgeProblem:
    """Scale associations by the root of their weights, and read the statistics of the state."""
    recipe, state = problem.recipe, problem.state
    position = problem.positions()
    k, v, weight = weighted_associations(problem, position)
    q = problem.phi(problem.q, "query", position)
    log_decay, token_mask = problem.rates["log_decay"], problem.token_mask
    if recipe.context.has_weights or recipe.bias.affine != (1.0, 1.0):
        # Avoid the infinite slope of the root at 0; the added constant is negligible.
        root = (weight + 1e-20).sqrt().unsqueeze(-1)
        k, v = k * root, v * root
    if token_mask is not None:
        mask = token_mask[..., None, None]
        k, v = torch.where(mask, k, 0.0), torch.where(mask, v, 0.0)
        q = torch.where(mask.unsqueeze(-1), q, 0.0)
        log_decay = torch.where(token_mask[..., None], log_decay, 0.0)
    ridge = initial_ridge(problem.rates, k.shape[-1])
    is_new, slots = (state.position == 0)[:, None, None, None], state.algorithm_state
    return RidgeProblem(
        q=q,
        k=k,
        v=v,
        log_decay=log_decay,
        ridge=ridge,
        origin=torch.where(is_new, state.weights[0], slots["origin"][0]).mT,
        state=RidgeState(
            M=state.weights[0].mT,
            D=slots["gram"][0],
            kappa=torch.where(is_new[..., 0, 0], 1.0, slots["kept"][0]),
            inverse=torch.where(is_new, torch.diag_embed(1 / ridge), slots["inverse"][0]),
        ),
    )
