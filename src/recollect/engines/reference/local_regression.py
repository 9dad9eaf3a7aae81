"""Reference for memories that store associations: explicit weights, a dense solve per query.

Every query computes the weights γ_i of all visible associations and solves a separate system.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from recollect.choices.context.weights import ContextWeights
from recollect.engines.common.associations import gather_visible, visible_values
from recollect.engines.common.linalg import symmetric_pinv
from recollect.engines.common.precision_checks import solve_dtype, solve_with_ridge
from recollect.engines.common.problem import Problem, state_dtype
from recollect.state.state import State

__all__ = ["attend", "local", "regress", "regression"]


def local(problem: Problem) -> tuple[Tensor, State]:
    """Return the outputs ``[B, T, H, G, V]`` and the state of stored associations."""
    return attend(problem), problem.final_state()


def attend(problem: Problem, query_rates: Mapping[str, Tensor] | None = None) -> Tensor:
    """Return the value of the local polynomial (or of the plain sum) at every query."""
    recipe, dtype = problem.recipe, solve_dtype(problem)
    visible, v = (
        gather_visible(problem, dtype, query_rates),
        visible_values(problem, dtype).transpose(1, 2),
    )  # [B, H, n, V]
    per_part = (part.over(visible) for part in recipe.context.restrictions)
    parts = [part for part in per_part if part is not None]
    horizon, kernel, bias = recipe.context.horizon, recipe.context.kernel, recipe.bias
    assert kernel is not None and bias.is_affine
    B, T, H, G, _ = problem.q.shape
    n = visible.k.shape[1]
    keys, num_moved = visible.k.transpose(1, 2), 0
    transition = next((part.transition for part in parts if part.transition is not None), None)
    reweigh = next((part.reweigh for part in parts if part.reweigh is not None), None)
    hides_current = recipe.context.hides_current and visible.first_slot < n
    outputs: list[Tensor] = []
    for t in range(T):
        stop = min(visible.first_slot + t + 1, n)
        if transition is not None:
            for slot in range(num_moved, stop):
                keys = torch.cat([transition.move(keys[:, :, :slot], slot), keys[:, :, slot:]], 2)
            num_moved = stop
        stop = stop - hides_current
        start = 0 if horizon is None else max(stop + hides_current - horizon, 0)
        query, past = slice(t, t + 1), slice(start, stop)
        q, k = visible.q[:, t], keys[:, :, past]  # [B, H, G, K], [B, H, m, K]
        is_token = visible.valid[:, None, None, past]
        shift = _log_total(parts, query, past)
        if kernel.positive and (bias.sees_prediction or reweigh is not None):
            log = kernel.log_kappa(q, k) + shift
            log = torch.where(is_token, log, -torch.inf)
            log = log if reweigh is None else reweigh(log)
            if not bias.sees_prediction:
                outputs.append(log.exp() @ v[:, :, past])
                continue
            # A common factor of all weights cancels.
            peak = log.detach().amax(-1, keepdim=True) if stop > start else 0.0
            finite = torch.nan_to_num(torch.as_tensor(peak), neginf=0.0)
            gamma = (log - finite).exp()
        else:
            gamma = kernel.kappa(q, k) * torch.as_tensor(shift, dtype=dtype).exp()
            for part in parts:
                if part.value is not None:
                    gamma = gamma * part.value(query, past)[..., 0, :]
            gamma = torch.where(is_token, gamma, 0.0)
        past_values = v[:, :, past]
        if not bias.sees_prediction:
            outputs.append(gamma @ past_values)
            continue
        size = gamma.sum(-1, keepdim=True)
        p = gamma / torch.where(size == 0, 1.0, size)
        memory = recipe.memory
        if memory.slope_gate is not None:
            mean = p.unsqueeze(-2) @ k.unsqueeze(2)  # [B, H, G, 1, K]
            x = visible.query_rates[memory.slope_gate][:, t, :, None, :, None].to(dtype)
            p = p * (1 - ((k.unsqueeze(2) - mean) @ x).squeeze(-1))
        elif memory.degree:
            basis = memory.basis(k.unsqueeze(2) - q.unsqueeze(3))  # [B, H, G, m, D]
            p = p * _coefficients(basis, p, recipe.ridge)
        outputs.append(p @ past_values)
    y = torch.stack(outputs, dim=1) if T else v.new_zeros(B, 0, H, G, v.shape[-1])
    if query_rates is None and problem.token_mask is not None:
        y = torch.where(problem.token_mask[..., None, None, None], y, 0.0)
    return (recipe.bias.optimum * y).to(problem.v.dtype)


def _log_total(parts: list[ContextWeights], query: slice, past: slice) -> Tensor | float:
    """Return the log of the product of the positive weights, ``[B, H, 1 or G, m]``."""
    total: Tensor | float = 0.0
    for part in parts:
        if part.log is not None:
            total = total + part.log(query, past)[..., 0, :]
    return total


def _coefficients(X: Tensor, p: Tensor, ridge: float) -> Tensor:
    """Return X z ``[..., m]`` with (Xᵀ P X + R) z = e₀ (TTR 52); R is λ except at the constant.

    For λ = 0 and fewer associations than coefficients, the slopes have minimum norm.
    """
    # The constant has no ridge and is eliminated first. In the full system its entry of 1 would
    # round away next to the squares of large monomials. The remaining system is positive definite.
    # Without a ridge, its minimum-norm solution is the limit λ → 0.
    mean = (p.unsqueeze(-1) * X).sum(-2)[..., 1:]  # [..., D − 1]
    centred = X[..., 1:] - mean.unsqueeze(-2)
    covariance = centred.transpose(-1, -2) @ (p.unsqueeze(-1) * centred)
    if ridge > 0:
        slopes = solve_with_ridge(covariance, ridge, mean.unsqueeze(-1))
    else:
        slopes = symmetric_pinv(covariance) @ mean.unsqueeze(-1)
    return 1 - (centred @ slopes).squeeze(-1)


def regression(problem: Problem) -> tuple[Tensor, State]:
    """Return the outputs of `regress` and the state of stored associations."""
    return regress(problem), problem.final_state()


def regress(problem: Problem, query_rates: Mapping[str, Tensor] | None = None) -> Tensor:
    """Return least-squares reads over a kernel's features with one solve per prefix (TTR 43).

    y_t = κ(q_t, K) S (S κ(K, K) S + λ)⁻¹ S V with S² = diag(γ_i^(t)).
    """
    recipe, dtype = problem.recipe, state_dtype(problem.q, problem.k, problem.v)
    visible, v = (
        gather_visible(problem, dtype, query_rates),
        visible_values(problem, dtype).transpose(1, 2),
    )
    weights, keys = recipe.context.over(visible), visible.k.transpose(1, 2)
    B, T, H, G, _ = problem.q.shape
    n = visible.k.shape[1]
    outputs: list[Tensor] = []
    for t in range(T):
        past = slice(0, min(visible.first_slot + t + 1, n))
        k, is_token = keys[:, :, past], visible.valid[:, None, past].to(dtype)
        S = is_token.expand(-1, H, -1)
        if weights is not None and weights.log is not None:
            S = S * (0.5 * weights.log(slice(t, t + 1), past)[:, :, 0, 0]).exp()
        A = S.unsqueeze(-1) * recipe.features.kappa(k, k) * S.unsqueeze(-2)
        A = A + recipe.ridge * torch.eye(A.shape[-1], dtype=dtype, device=A.device)
        rows = S.unsqueeze(-1) * torch.linalg.solve(A, S.unsqueeze(-1) * v[:, :, past])
        outputs.append(recipe.features.kappa(visible.q[:, t], k) @ rows)
    y = torch.stack(outputs, dim=1) if T else v.new_zeros(B, 0, H, G, v.shape[-1])
    if query_rates is None and problem.token_mask is not None:
        y = torch.where(problem.token_mask[..., None, None, None], y, 0.0)
    return (recipe.bias.optimum * y).to(problem.v.dtype)
