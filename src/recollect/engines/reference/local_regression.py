"""The reference of memories that keep associations: explicit weights, and a dense solve per query.

Literal and slow: every query gathers the weights γ_i of all it sees, and solves for itself.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from recollect.choices.context.weights import ContextWeights
from recollect.engines.common.associations import gather_visible, values
from recollect.engines.common.linalg import least
from recollect.engines.common.problem import Problem, state_dtype
from recollect.engines.common.resolution import digits, ridged
from recollect.state.state import State

__all__ = ["attend", "local", "regress", "regression"]


def local(problem: Problem) -> tuple[Tensor, State]:
    """Outputs ``[B, T, H, G, V]`` and the state, which is the associations."""
    return attend(problem), problem.final_state()


def attend(problem: Problem, query_rates: Mapping[str, Tensor] | None = None) -> Tensor:
    """The polynomial fitted around every query (a constant, a plain sum), read there.

    Args:
        query_rates: numbers of queries that only read.
    """
    recipe, dtype = problem.recipe, digits(problem)
    visible, v = (
        gather_visible(problem, dtype, query_rates),
        values(problem, dtype).transpose(1, 2),
    )  # [B, H, n, V]
    per_part = (part.over(visible) for part in recipe.context.restrictions)
    parts = [part for part in per_part if part is not None]
    horizon, kernel, bias = recipe.context.horizon, recipe.context.kernel, recipe.bias
    assert kernel is not None and bias.is_affine
    B, T, H, G, _ = problem.q.shape
    n = visible.k.shape[1]
    keys = visible.k.transpose(1, 2)
    outputs: list[Tensor] = []
    for t in range(T):
        stop = min(visible.first_slot + t + 1, n)
        start = 0 if horizon is None else max(stop - horizon, 0)
        one, past = slice(t, t + 1), slice(start, stop)
        q, k = visible.q[:, t], keys[:, :, past]  # [B, H, G, K], [B, H, m, K]
        real = visible.valid[:, None, None, past]
        shift = _log_total(parts, one, past)
        if bias.sees_prediction and kernel.positive:
            # A factor common to all weights changes nothing.
            log = kernel.log_kappa(q, k) + shift
            log = torch.where(real, log, -torch.inf)
            peak = log.detach().amax(-1, keepdim=True) if stop > start else 0.0
            finite = torch.nan_to_num(torch.as_tensor(peak), neginf=0.0)
            gamma = (log - finite).exp()
        else:
            gamma = kernel.kappa(q, k) * torch.as_tensor(shift, dtype=dtype).exp()
            for part in parts:
                if part.value is not None:
                    gamma = gamma * part.value(one, past)[..., 0, :]
            gamma = torch.where(real, gamma, 0.0)
        here = v[:, :, past]
        if not bias.sees_prediction:
            outputs.append(gamma @ here)
            continue
        size = gamma.sum(-1, keepdim=True)
        p = gamma / torch.where(size == 0, 1.0, size)
        memory = recipe.memory
        if memory.degree:
            basis = memory.basis(k.unsqueeze(2) - q.unsqueeze(3))  # [B, H, G, m, D]
            p = p * _coefficients(basis, p, recipe.ridge)
        outputs.append(p @ here)
    y = torch.stack(outputs, dim=1) if T else v.new_zeros(B, 0, H, G, v.shape[-1])
    if query_rates is None and problem.token_mask is not None:
        y = torch.where(problem.token_mask[..., None, None, None], y, 0.0)
    return (recipe.bias.optimum * y).to(problem.v.dtype)


def _log_total(parts: list[ContextWeights], query: slice, past: slice) -> Tensor | float:
    """log of the product of the positive weights, ``[B, H, 1 or G, m]``."""
    total: Tensor | float = 0.0
    for part in parts:
        if part.log is not None:
            total = total + part.log(query, past)[..., 0, :]
    return total


def _coefficients(X: Tensor, p: Tensor, ridge: float) -> Tensor:
    """X z ``[..., m]`` with (Xᵀ P X + R) z = e₀ (TTR 52); R is λ on all but the constant.

    With λ = 0 and fewer associations than coefficients: the slopes of least length.
    """
    # The constant, which no ridge meets, is eliminated first: the system would hold its 1 beside
    # the squares of the largest monomials, and lose it where a query is long. What is left is
    # positive definite, and without a ridge has the limit of λ → 0 as its least solution.
    mean = (p.unsqueeze(-1) * X).sum(-2)[..., 1:]  # [..., D − 1]
    centred = X[..., 1:] - mean.unsqueeze(-2)
    covariance = centred.transpose(-1, -2) @ (p.unsqueeze(-1) * centred)
    if ridge > 0:
        slopes = ridged(covariance, ridge, mean.unsqueeze(-1))
    else:
        slopes = least(covariance) @ mean.unsqueeze(-1)
    return 1 - (centred @ slopes).squeeze(-1)


def regression(problem: Problem) -> tuple[Tensor, State]:
    """`regress`, and the state, which is the associations."""
    return regress(problem), problem.final_state()


def regress(problem: Problem, query_rates: Mapping[str, Tensor] | None = None) -> Tensor:
    """Least squares over a kernel's features, solved anew for every prefix (TTR 43).

    y_t = κ(q_t, K) S (S κ(K, K) S + λ)⁻¹ S V with S² = diag(γ_i^(t)).
    """
    recipe, dtype = problem.recipe, state_dtype(problem.q, problem.k, problem.v)
    visible, v = gather_visible(problem, dtype, query_rates), values(problem, dtype).transpose(1, 2)
    weights, keys = recipe.context.over(visible), visible.k.transpose(1, 2)
    B, T, H, G, _ = problem.q.shape
    n = visible.k.shape[1]
    outputs: list[Tensor] = []
    for t in range(T):
        past = slice(0, min(visible.first_slot + t + 1, n))
        k, real = keys[:, :, past], visible.valid[:, None, past].to(dtype)
        S = real.expand(-1, H, -1)
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
