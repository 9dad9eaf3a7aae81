"""The numbers of recursive least squares: tokens, the ridge, and statistics of the past."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from recollect.engines.common.problem import Problem
from recollect.engines.common.ridge import association, ridge_of

__all__ = ["RidgeProblem", "RidgeState", "ridge_problem"]


@dataclass(frozen=True)
class RidgeState:
    """Where the recursion stands between two tokens.

    Attributes:
        M: Wᵀ ``[B, H, F, V]``.
        D: the data's Gram matrix ``[B, H, F, F]``.
        kappa: what is left of the ridge, κ = ρ/λ, ``[B, H]``.
        inverse: P = (D + κλ)⁻¹; a gradient goes through D and κ instead.
    """

    M: Tensor
    D: Tensor
    kappa: Tensor
    inverse: Tensor

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """All of them in the order of the fields."""
        return self.M, self.D, self.kappa, self.inverse

    def map(self, function: Callable[[Tensor], Tensor]) -> RidgeState:
        """The same with a function of every tensor."""
        return RidgeState(*map(function, self.tensors()))


@dataclass(frozen=True)
class RidgeProblem:
    """Recursive least squares over S tokens.

    Attributes:
        q: ``[B, S, H, G, F]``. k, v: ``[B, S, H, F]``, ``[B, S, H, V]``, times the root of their
            weights; zero where nothing is written, with log_decay ``[B, S, H]`` zero there.
        ridge: λ ``[B, H, F]``. origin: W₀ᵀ ``[B, H, F, V]``.
        state: before the first token.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor
    ridge: Tensor
    origin: Tensor
    state: RidgeState

    def tensors(self) -> tuple[Tensor, ...]:
        """All of them in the order of the fields, the state's last."""
        tokens = (self.q, self.k, self.v, self.log_decay)
        return *tokens, self.ridge, self.origin, *self.state.tensors()

    @classmethod
    def rebuild(cls, tensors: tuple[Tensor, ...]) -> RidgeProblem:
        """The way back from `tensors`."""
        return cls(*tensors[:6], state=RidgeState(*tensors[6:]))

    def wants_gradient(self) -> bool:
        """Whether anybody can ask for an outer gradient."""
        return torch.is_grad_enabled() and any(x.requires_grad for x in self.tensors())

    def to(self, dtype: torch.dtype) -> RidgeProblem:
        """The same in another dtype."""
        return self.rebuild(tuple([x.to(dtype) for x in self.tensors()]))

    def tokens(self, function: Callable[[Tensor], Tensor]) -> RidgeProblem:
        """The same with a function of what each token brings."""
        q, k, v, log_decay = map(function, (self.q, self.k, self.v, self.log_decay))
        return replace(self, q=q, k=k, v=v, log_decay=log_decay)

    def restarted(self, anew: Tensor) -> RidgeProblem:
        """The same where memories start anew at tokens ``[B, T, H]``: theirs decay by nothing.

        What starts anew with the first token has D = 0, ρ = λ and W = W₀ before it.
        """
        state, first = self.state, anew[:, 0, :, None, None]
        start = RidgeState(
            M=torch.where(first, self.origin, state.M),
            D=torch.where(first, 0.0, state.D),
            kappa=torch.where(anew[:, 0], 1.0, state.kappa),
            inverse=torch.where(first, torch.diag_embed(1 / self.ridge), state.inverse),
        )
        return replace(self, log_decay=torch.where(anew, 0.0, self.log_decay), state=start)


def ridge_problem(problem: Problem) -> RidgeProblem:
    """Associations by the root of their weights, and the statistics that the state holds."""
    recipe, state = problem.recipe, problem.state
    position = problem.positions()
    k, v, weight = association(problem, position)
    q = problem.phi(problem.q, "query", position)
    logs, token_mask = problem.rates["log_decay"], problem.token_mask
    if recipe.context.has_weights or recipe.bias.affine != (1.0, 1.0):
        # The root's slope at 0 is infinite, and nothing so small reaches a sum.
        root = (weight + 1e-20).sqrt().unsqueeze(-1)
        k, v = k * root, v * root
    if token_mask is not None:
        real = token_mask[..., None, None]
        k, v = torch.where(real, k, 0.0), torch.where(real, v, 0.0)
        q = torch.where(real.unsqueeze(-1), q, 0.0)
        logs = torch.where(token_mask[..., None], logs, 0.0)
    ridge = ridge_of(problem.rates, k.shape[-1])
    fresh, slots = (state.position == 0)[:, None, None, None], state.algorithm_state
    return RidgeProblem(
        q=q,
        k=k,
        v=v,
        log_decay=logs,
        ridge=ridge,
        origin=torch.where(fresh, state.weights[0], slots["origin"][0]).mT,
        state=RidgeState(
            M=state.weights[0].mT,
            D=slots["gram"][0],
            kappa=torch.where(fresh[..., 0, 0], 1.0, slots["kept"][0]),
            inverse=torch.where(fresh, torch.diag_embed(1 / ridge), slots["inverse"][0]),
        ),
    )
