"""The reference for least squares from sufficient statistics: one dense solve per token.

Per head, with ρ the ridge and W_0 its centre::

    D_t = γ_t D_(t−1) + w_t k_t k_tᵀ,   E_t = γ_t E_(t−1) + w_t (v_t − W_0 k_t) k_tᵀ
    W_t = W_0 + E_t (D_t + ρ_t I)⁻¹

What ρ_t is, and what stands in place of the inverse for approximate rules, the algorithm says.
Where the ridge fades with the past, this is done in float64 and refused where that does not hold
the digits (`recollect.engines.common.resolution`), and a decay of 0 starts anew: D = E = 0, ρ = λ.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from recollect.choices.algorithm.closed_form import smallest_ridge
from recollect.engines.common.problem import Problem
from recollect.engines.common.resolution import RESET, loss, refuse, unresolved
from recollect.engines.common.ridge import RidgeStatistics, association, dense, ridge_of
from recollect.state.state import State

__all__ = ["least_squares", "read_least_squares"]


def _start(state: State, ridge: Tensor) -> RidgeStatistics:
    """The statistics of a state. A row that has seen nothing holds its initial memory alone."""
    A, slots = state.weights[0], {name: x[0] for name, x in state.algorithm_state.items()}
    fresh = state.position == 0
    origin = torch.where(fresh[:, None, None, None], A, slots["origin"])
    gram = slots.get("gram", ridge)
    gram = gram if gram.dim() == 4 else torch.diag_embed(gram)
    start = RidgeStatistics(
        gram=gram,
        residual=A - origin,
        ridge_share=torch.ones_like(ridge[..., 0]),
        origin=origin,
        ridge=ridge,
    )
    if "kept" not in slots:
        return start
    # W is held in place of E.
    start = replace(start, ridge_share=torch.where(fresh[:, None], 1.0, slots["kept"]))
    return replace(start, residual=start.residual @ start.system)


def least_squares(problem: Problem) -> tuple[Tensor, State]:
    """Outputs ``[B, T, H, G, V]`` and the final state."""
    B, T, H, G, _ = problem.q.shape
    V = problem.v.shape[-1]
    if T == 0:
        return problem.v.new_zeros(B, 0, H, G, V), problem.final_state()
    inverse = problem.recipe.algorithm.inverse
    assert inverse is not None  # the recipe has fixed-size statistics
    form, refresh_every = inverse.ridge, inverse.refresh_every
    wide = bool(problem.recipe.algorithm.float64_slots(problem.recipe))
    k, v, weight = association(problem)
    q = problem.phi(problem.q, "query", problem.positions())
    ridge, logs = ridge_of(problem.rates, k.shape[-1]), problem.rates["log_decay"]
    state = problem.state
    if wide:
        k, v, weight, q, ridge, logs = (x.double() for x in (k, v, weight, q, ridge, logs))
        state = state.map(lambda x: x.double() if x.is_floating_point() else x)
    now = _start(state, ridge)
    anew = logs < RESET if wide else torch.zeros_like(logs, dtype=torch.bool)
    decay = torch.where(anew, 0.0, logs.exp())
    token_mask = problem.token_mask
    if token_mask is None:
        token_mask = torch.ones(B, T, dtype=torch.bool, device=k.device)
    outputs: list[Tensor] = []
    for t in range(T):
        rows = token_mask[:, t]
        key, value = k[:, t], v[:, t]
        alpha, w = (x[:, t, :, None, None] for x in (decay, weight))
        share = now.ridge_share if form == "constant" else now.ridge_share * decay[:, t]
        share = torch.where(anew[:, t], 1.0, share)
        error = value - (now.origin @ key.unsqueeze(-1)).squeeze(-1)
        gram = alpha * now.gram + w * key.unsqueeze(-1) * key.unsqueeze(-2)
        floor = torch.zeros_like(share)
        if form != "constant":
            least = smallest_ridge(gram).squeeze(-1) / now.ridge.mean(-1)
            floor = torch.where(least > share, least, 0.0)
            share = torch.maximum(share, least)
        then = replace(
            now,
            gram=gram,
            residual=alpha * now.residual + w * error.unsqueeze(-1) * key.unsqueeze(-2),
            ridge_share=share,
        )
        now = _chosen(rows, then, now)
        if wide:
            _resolved(problem, now, floor, t)
        y = _read(problem, now, q[:, t])
        outputs.append(torch.where(rows[:, None, None, None], y, 0.0))
        if form == "refreshed":
            border = rows & ((problem.state.position + t + 1) % refresh_every == 0)
            now = replace(now, ridge_share=torch.where(border[:, None], 1.0, now.ridge_share))
    y = torch.stack(outputs, dim=1).to(problem.v.dtype)
    return y, _state(problem, now)


def _resolved(problem: Problem, now: RidgeStatistics, floor: Tensor, t: int) -> None:
    """Refuse a token that leaves no digits. On a GPU its dense solve waits anyway."""
    if torch.compiler.is_compiling():
        return
    system = now.system.detach()
    lost = loss(system, torch.linalg.inv_ex(system)[0], floor * now.ridge.mean(-1))
    excess = unresolved(lost.unsqueeze(0))
    if excess is not None:
        raise refuse(problem, excess, token=t)


def _chosen(rows: Tensor, new: RidgeStatistics, old: RidgeStatistics) -> RidgeStatistics:
    """Rows ``[B]`` of the new statistics, others of the old."""
    wide = rows[:, None, None, None]
    return replace(
        new,
        gram=torch.where(wide, new.gram, old.gram),
        residual=torch.where(wide, new.residual, old.residual),
        ridge_share=torch.where(rows[:, None], new.ridge_share, old.ridge_share),
    )


def _read(problem: Problem, now: RidgeStatistics, q: Tensor) -> Tensor:
    """``[B, H, G, V]`` from lifted queries ``[B, H, G, F]``."""
    inverse = problem.recipe.algorithm.inverse
    assert inverse is not None
    if inverse.kind == "exact":
        return q @ now.solved().mT
    return q @ now.origin.mT + dense(inverse, now, q) @ now.residual.mT


def _state(problem: Problem, now: RidgeStatistics) -> State:
    algorithm = problem.recipe.algorithm
    seen = (problem.end > 0)[:, None, None, None]

    def where_seen(name: str, x: Tensor) -> tuple[Tensor]:
        rows, old = seen.view(-1, *(1,) * (x.dim() - 1)), problem.state.algorithm_state[name][0]
        return (torch.where(rows, x.to(old.dtype), old),)

    slots = {"origin": where_seen("origin", now.origin)}
    if "gram" in algorithm.slots:
        vector = problem.state.algorithm_state["gram"][0].dim() == 3
        gram = now.gram.diagonal(dim1=-2, dim2=-1) if vector else now.gram
        slots["gram"] = where_seen("gram", gram)
    if "kept" in algorithm.slots:
        slots["kept"] = where_seen("kept", now.ridge_share)
        slots["inverse"] = where_seen("inverse", torch.linalg.inv(now.system))
        weights = now.solved()
    else:
        weights = now.origin + now.residual
    old = problem.state.weights[0]
    return problem.final_state(
        weights=(torch.where(seen, weights.to(old.dtype), old),), algorithm_state=slots
    )


def read_least_squares(problem: Problem, q: Tensor, rates: Mapping[str, Tensor]) -> Tensor:
    """Outputs of lifted queries ``[B, T, H, G, F]`` from ``problem.state``, without writing."""
    algorithm, state = problem.recipe.algorithm, problem.state
    A = state.weights[0].unsqueeze(1)
    if "kept" in algorithm.slots or q.shape[1] == 0:
        return q @ A.mT
    now = _start(state, ridge_of(rates, q.shape[-1]))
    if algorithm.inverse is not None and algorithm.inverse.kind == "exact":
        return q @ now.solved().unsqueeze(1).mT
    return torch.stack([_read(problem, now, q[:, t]) for t in range(q.shape[1])], dim=1)
