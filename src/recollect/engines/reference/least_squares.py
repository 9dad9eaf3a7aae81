"""Reference for least squares from sufficient statistics: one dense solve per token.

Equations per head, with ridge ρ and its centre W_0::

    D_t = γ_t D_(t−1) + w_t k_t k_tᵀ,   E_t = γ_t E_(t−1) + w_t (v_t − W_0 k_t) k_tᵀ
    W_t = W_0 + E_t (D_t + ρ_t I)⁻¹

The algorithm defines ρ_t, which may depend on D_t, and replaces the inverse for approximate rules.
A ridge that decays with the past is solved in float64. An error is raised if float64 lacks the
precision (`recollect.engines.common.precision_checks`). A decay of 0 resets the statistics:
D = E = 0, ρ = λ.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from recollect.choices.algorithm.base import Inverse
from recollect.choices.algorithm.closed_form import relative_size, smallest_ridge
from recollect.engines.common.precision_checks import (
    RESET_LOG_DECAY,
    estimate_relative_error,
    first_unresolved,
    unresolved_error,
)
from recollect.engines.common.problem import Problem
from recollect.engines.common.ridge import (
    RidgeStatistics,
    apply_approximate_inverse,
    initial_ridge,
    ridges,
    weighted_associations,
)
from recollect.state.state import State

__all__ = ["least_squares", "read_least_squares"]


def _start(state: State, ridge: Tensor, inverse: Inverse) -> RidgeStatistics:
    """Return the statistics of a state; an empty batch element has only its initial memory."""
    A, slots = state.weights[0], {name: x[0] for name, x in state.algorithm_state.items()}
    is_empty = state.position == 0
    origin = torch.where(is_empty[:, None, None, None], A, slots["origin"])
    gram = slots.get("gram", ridge)
    gram = gram if gram.dim() == 4 else torch.diag_embed(gram)
    share = torch.ones_like(ridge[..., 0])
    start = RidgeStatistics(
        gram=gram,
        residual=A - origin,
        ridge_share=_relative(gram) if inverse.ridge == "relative" else share,
        origin=origin,
        ridge=ridge,
    )
    if "kept" not in slots:
        return start
    # The state stores W, not E.
    start = replace(start, ridge_share=torch.where(is_empty[:, None], 1.0, slots["kept"]))
    return replace(start, residual=start.residual @ start.system)


def _relative(gram: Tensor) -> Tensor:
    """Return ρ_t/λ ``[B, H]`` of a relative ridge."""
    return relative_size(gram.square().sum((-2, -1)))


def least_squares(problem: Problem) -> tuple[Tensor, State]:
    """Return the outputs ``[B, T, H, G, V]`` and the final state."""
    B, T, H, G, _ = problem.q.shape
    V = problem.v.shape[-1]
    if T == 0:
        return problem.v.new_zeros(B, 0, H, G, V), problem.final_state()
    inverse = problem.recipe.algorithm.inverse
    assert inverse is not None  # the recipe has fixed-size statistics
    schedule, refresh_every = inverse.ridge, inverse.refresh_every
    is_float64 = bool(problem.recipe.algorithm.float64_slots(problem.recipe))
    k, v, weight = weighted_associations(problem)
    q = problem.phi(problem.q, "query", problem.positions())
    ridge, logs = initial_ridge(problem.rates, k.shape[-1]), problem.rates["log_decay"]
    state = problem.state
    if is_float64:
        k, v, weight, q, ridge, logs = (x.double() for x in (k, v, weight, q, ridge, logs))
        state = state.map(lambda x: x.double() if x.is_floating_point() else x)
    statistics = _start(state, ridge, inverse)
    # Only algorithms without a recursion have ridges that differ between tokens.
    per_token = ridges(problem.rates, k.shape[-1]).to(ridge.dtype)
    is_reset = logs < RESET_LOG_DECAY if is_float64 else torch.zeros_like(logs, dtype=torch.bool)
    decay = torch.where(is_reset, 0.0, logs.exp())
    token_mask = problem.token_mask
    if token_mask is None:
        token_mask = torch.ones(B, T, dtype=torch.bool, device=k.device)
    outputs: list[Tensor] = []
    for t in range(T):
        rows = token_mask[:, t]
        key, value = k[:, t], v[:, t]
        alpha, w = (x[:, t, :, None, None] for x in (decay, weight))
        share = statistics.ridge_share
        if inverse.is_recursive:
            share = share * decay[:, t]
        share = torch.where(is_reset[:, t], 1.0, share)
        error = value - (statistics.origin @ key.unsqueeze(-1)).squeeze(-1)
        gram = alpha * statistics.gram + w * key.unsqueeze(-1) * key.unsqueeze(-2)
        floor = torch.zeros_like(share)
        if schedule == "relative":
            share = _relative(gram)
        if inverse.is_recursive:
            min_share = smallest_ridge(gram).squeeze(-1) / statistics.ridge.mean(-1)
            floor = torch.where(min_share > share, min_share, 0.0)
            share = torch.maximum(share, min_share)
        updated = replace(
            statistics,
            gram=gram,
            residual=alpha * statistics.residual + w * error.unsqueeze(-1) * key.unsqueeze(-2),
            ridge_share=share,
            ridge=per_token[:, t],
        )
        statistics = _select_rows(rows, updated, statistics)
        if is_float64:
            _check_resolved(problem, statistics, floor, t)
        y = _read(problem, statistics, q[:, t])
        outputs.append(torch.where(rows[:, None, None, None], y, 0.0))
        if schedule == "refreshed":
            is_boundary = rows & ((problem.state.position + t + 1) % refresh_every == 0)
            statistics = replace(
                statistics,
                ridge_share=torch.where(is_boundary[:, None], 1.0, statistics.ridge_share),
            )
    y = torch.stack(outputs, dim=1).to(problem.v.dtype)
    return y, _state(problem, statistics)


def _check_resolved(problem: Problem, statistics: RidgeStatistics, floor: Tensor, t: int) -> None:
    """Raise an error if token t leaves too little precision."""
    if torch.compiler.is_compiling():
        return
    system = statistics.system.detach()
    relative_error = estimate_relative_error(
        system, torch.linalg.inv_ex(system)[0], floor * statistics.ridge.mean(-1)
    )
    failure = first_unresolved(relative_error.unsqueeze(0))
    if failure is not None:
        raise unresolved_error(problem, failure, token=t)


def _select_rows(rows: Tensor, new: RidgeStatistics, old: RidgeStatistics) -> RidgeStatistics:
    """Return the new statistics for the selected ``rows [B]`` and the old for the others."""
    mask = rows[:, None, None, None]
    return replace(
        new,
        gram=torch.where(mask, new.gram, old.gram),
        residual=torch.where(mask, new.residual, old.residual),
        ridge_share=torch.where(rows[:, None], new.ridge_share, old.ridge_share),
    )


def _read(problem: Problem, statistics: RidgeStatistics, q: Tensor) -> Tensor:
    """Return the outputs ``[B, H, G, V]`` at lifted queries ``[B, H, G, F]``."""
    inverse = problem.recipe.algorithm.inverse
    assert inverse is not None
    if inverse.kind == "exact":
        return q @ statistics.solved().mT
    return (
        q @ statistics.origin.mT
        + apply_approximate_inverse(inverse, statistics, q) @ statistics.residual.mT
    )


def _state(problem: Problem, statistics: RidgeStatistics) -> State:
    algorithm = problem.recipe.algorithm
    has_tokens = (problem.end > 0)[:, None, None, None]

    def keep_if_empty(name: str, x: Tensor) -> tuple[Tensor]:
        rows, old = (
            has_tokens.view(-1, *(1,) * (x.dim() - 1)),
            problem.state.algorithm_state[name][0],
        )
        return (torch.where(rows, x.to(old.dtype), old),)

    slots = {"origin": keep_if_empty("origin", statistics.origin)}
    if "gram" in algorithm.slots:
        vector = problem.state.algorithm_state["gram"][0].dim() == 3
        gram = statistics.gram.diagonal(dim1=-2, dim2=-1) if vector else statistics.gram
        slots["gram"] = keep_if_empty("gram", gram)
    if "kept" in algorithm.slots:
        slots["kept"] = keep_if_empty("kept", statistics.ridge_share)
        slots["inverse"] = keep_if_empty("inverse", torch.linalg.inv(statistics.system))
        weights = statistics.solved()
    else:
        weights = statistics.origin + statistics.residual
    old = problem.state.weights[0]
    return problem.final_state(
        weights=(torch.where(has_tokens, weights.to(old.dtype), old),), algorithm_state=slots
    )


def read_least_squares(problem: Problem, q: Tensor, rates: Mapping[str, Tensor]) -> Tensor:
    """Return the outputs at lifted queries ``[B, T, H, G, F]`` from ``problem.state``."""
    algorithm, state = problem.recipe.algorithm, problem.state
    A = state.weights[0].unsqueeze(1)
    if "kept" in algorithm.slots or q.shape[1] == 0:
        return q @ A.mT
    assert algorithm.inverse is not None  # the recipe has fixed-size statistics
    per_query = ridges(rates, q.shape[-1])
    statistics = _start(state, per_query[:, 0], algorithm.inverse)
    if algorithm.inverse.kind == "exact" and not algorithm.query_gates:
        return q @ statistics.solved().unsqueeze(1).mT
    outputs = [
        _read(problem, replace(statistics, ridge=per_query[:, t]), q[:, t])
        for t in range(q.shape[1])
    ]
    return torch.stack(outputs, dim=1)
