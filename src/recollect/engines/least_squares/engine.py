"""Entry points of the least-squares engine: a recursion in chunks, or products with Gram matrices.

A ridge that decays with the data, or is refreshed at span boundaries, has a recursion in chunks
(`recursion_backward`). It runs in the state's dtype when that dtype resolves the decayed past, and
in float64 otherwise (`common.precision_checks`). A constant ridge, and approximations of the
inverse, use products with the Gram matrices of all prefixes at once
(`recollect.engines.least_squares.conjugate_gradient`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from recollect.choices.algorithm.closed_form import smallest_ridge
from recollect.choices.runtime import can_read_values
from recollect.engines.base import Engine
from recollect.engines.common.precision_checks import (
    RESET_LOG_DECAY,
    Unresolved,
    estimate_relative_error,
    first_unresolved,
    is_resolved,
    unresolved_error,
)
from recollect.engines.common.problem import Problem
from recollect.engines.common.sizes import FlopCount, Sizes
from recollect.engines.least_squares.chunking import (
    SlotLayout,
    candidate_chunk_sizes,
    decay_stats,
    default_chunk,
    gather_tokens,
    safe_chunk_size,
    scatter_tokens,
    slot_layout,
)
from recollect.engines.least_squares.conjugate_gradient import approximate, describe_inverse
from recollect.engines.least_squares.inputs import RidgeProblem, RidgeState, ridge_problem
from recollect.engines.least_squares.recursion_backward import recursion
from recollect.engines.least_squares.recursion_layout import Layout
from recollect.engines.linear.cost import chunk_flops
from recollect.state.state import State

if TYPE_CHECKING:
    from recollect.recipe.recipe import Recipe

__all__ = ["LeastSquaresEngine"]

STEP_SECONDS = 1e-5
"""`FlopCount.step_seconds` of a chunk of the recursion, or of one product with the systems."""

MAX_FLOAT32_LOG_DECAY = 8.0
"""Largest total log decay of F tokens at which float32 is tried."""

MAX_EIGENVALUE_SPREAD = 1e3
"""Eigenvalue spread above which decoding inverts the system at every token."""

Solve = Callable[[Problem], tuple[Tensor, Tensor, dict[str, Tensor]]]

Solved = tuple[Tensor, RidgeState, Tensor]
"""Outputs ``[B, T, H, G, V]``, the state after all tokens, and losses ``[n, B, H]``."""


class LeastSquaresEngine(Engine):
    """Exact minimum over all of the past at every token."""

    name = "least_squares"
    propagates_nan = True

    def unsupported_reasons(self, recipe: Recipe) -> list[str]:
        reasons: list[str] = []
        if recipe.algorithm.inverse is None:
            reasons.append(f"{recipe.algorithm.title} does not solve for all of the past")
        elif not recipe.features.finite:
            reasons.append(f"{recipe.features.title} has infinitely many features")
        return reasons

    def describe(self, recipe: Recipe) -> str:
        if not _uses_recursion(recipe):
            assert recipe.algorithm.inverse is not None
            return describe_inverse(recipe.algorithm.inverse)
        interval = _refresh_interval(recipe)
        if interval == 0:
            return "recursive least squares in chunks"
        return f"recursive least squares in chunks, ridge refreshed every {interval} tokens"

    # `solve` returns outputs, weights and state slots; by default one of this engine's.
    def run(self, problem: Problem, solve: Solve | None = None) -> tuple[Tensor, State]:
        B, T, H, G, _ = problem.q.shape
        if T == 0 or B == 0:
            return problem.v.new_zeros(B, T, H, G, problem.v.shape[-1]), problem.final_state()
        if solve is None:
            solve = _recursive if _uses_recursion(problem.recipe) else approximate
        y, weights, slots = solve(problem)
        has_tokens = (problem.end > 0)[:, None, None, None]

        def select_rows(updated: Tensor, previous: Tensor) -> Tensor:
            mask = (
                has_tokens
                if updated.dim() == 4
                else has_tokens.view(-1, *(1,) * (updated.dim() - 1))
            )
            return torch.where(mask, updated, previous)

        state = problem.state
        final_state = problem.final_state(
            weights=(select_rows(weights, state.weights[0]),),
            algorithm_state={
                name: (select_rows(x, state.algorithm_state[name][0]),) for name, x in slots.items()
            },
        )
        return y.to(problem.v.dtype), final_state

    def uses_inner_autograd(self, recipe: Recipe) -> bool:
        return False

    def float32_reason(self, recipe: Recipe) -> str | None:
        if recipe.algorithm.float64_slots(recipe):
            return (
                "some of its statistics are float64, and their dtype depends on the rounding error"
            )
        inverse = recipe.algorithm.inverse
        if (
            inverse is None
            or inverse.kind in ("identity", "diagonal", "spectral")
            or inverse.is_recursive
        ):
            return None
        return "conjugate gradients with rounded products converge to another solution"

    def count_flops(self, recipe: Recipe, sizes: Sizes) -> FlopCount:
        # A factorization counts as F³/3.
        algorithm, F, V, H, T, G = recipe.algorithm, sizes.F, sizes.V, sizes.H, sizes.T, sizes.G
        read, write = 2 * G * F * V, 2 * F * V
        inverse = algorithm.inverse
        assert inverse is not None  # unsupported_reasons
        if inverse.is_recursive:
            C = min(default_chunk(F), T)
            N = -(-T // C) if T else 0
            J = C * G
            chunk = {
                "gram": 2 * C * F * F + 2 * C * C * F,
                "factor": C**3 // 3 + C * C * (F + V),
                "state": 2 * C * F * (F + V) + 2 * C * F * V,
                "read": 2 * J * F * V + 2 * J * C * (F + V),
            }
            if inverse.ridge == "refreshed" and recipe.context.has_decay:
                border = 2 * F**3 + 2 * F * F * V
                chunk["borders"] = border + 2 * C * F * F + 2 * C * C * (F + V)
            step = (4 * F * F + 2 * F * F + 2 * write + read) * H
            return FlopCount(
                forward={name: n * N * H for name, n in chunk.items()},
                decode=step,
                steps=N,
                step_seconds=STEP_SECONDS,
                states=N,
            )
        kind = "" if inverse.kind == "exact" else inverse.kind
        attend = chunk_flops(F, V, 64, 64 * G, has_error=False)
        product = sum(chunk_flops(F, F, 64, 64 * G, has_error=False).values())
        N = -(-T // 64) if T else 0
        parts = {"read": sum(attend.values()) * N * H}
        notes: tuple[str, ...] = ()
        step, steps = 2 * write + read, N
        if kind == "spectral":
            parts["eigenvectors"] = 10 * F**3 * T * H
            step += 10 * F**3
            steps = T  # each Gram matrix depends on the previous one
        elif kind == "conjugate_gradient" or not kind:
            count = inverse.steps if kind else 30
            parts["products"] = product * N * H * count
            step += 2 * F * F * (1 + G * count)
            steps *= 1 + count
            if not kind:
                notes = ("counted as 30 iterations; they stop at the tolerance (rc.record_solver)",)
        return FlopCount(
            forward=parts,
            decode=step * H,
            steps=steps,
            step_seconds=STEP_SECONDS,
            states=N,
            notes=notes,
        )

    def count_read_flops(self, recipe: Recipe, sizes: Sizes, queries: int) -> int:
        inverse, F, V = recipe.algorithm.inverse, sizes.F, sizes.V
        assert inverse is not None  # unsupported_reasons
        per_query, shared = 2 * sizes.G * F * V, 0
        if inverse.kind == "exact" and not inverse.is_recursive:
            solve = 2 * F**3 // 3 + 2 * F * F * V
            if recipe.algorithm.query_gates:
                per_query += solve
            else:
                shared = solve  # one factor for all queries
        elif inverse.kind == "spectral":
            per_query += 10 * F**3
        elif inverse.kind == "conjugate_gradient":
            per_query += 2 * F * F * sizes.G * inverse.steps
        return (per_query * queries + shared) * sizes.H


def _uses_recursion(recipe: Recipe) -> bool:
    inverse = recipe.algorithm.inverse
    return inverse is not None and inverse.is_recursive


def _refresh_interval(recipe: Recipe) -> int:
    """Return the number of tokens in a span, 0 without spans."""
    inverse = recipe.algorithm.inverse
    if inverse is None or inverse.ridge != "refreshed" or not recipe.context.has_decay:
        return 0
    return inverse.refresh_every


def _recursive(problem: Problem) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    recipe, state, p = problem.recipe, problem.state, ridge_problem(problem)
    has_decay, refresh_every = recipe.context.has_decay, _refresh_interval(recipe)
    tokens = p.k.shape[1]
    features = p.k.shape[-1]
    size = problem.chunk_size or default_chunk(features)
    can_inspect = has_decay and can_read_values(p.k)
    stats, resets = None, None
    if can_inspect and tokens > 1:
        stats = decay_stats(
            problem, p.log_decay, (*candidate_chunk_sizes(size), features), interval=refresh_every
        )
    if has_decay:
        is_reset = p.log_decay < RESET_LOG_DECAY
        if stats.has_resets if stats else not can_inspect or bool(is_reset.any()):
            resets, p = is_reset, p.with_resets(is_reset)
    float64, state_dtype = torch.float64, p.k.dtype
    is_single_token = tokens == 1 and not p.wants_gradient()
    # Chunks of one token have no rounding inside the chunk.
    attempts = [(state_dtype, size), (float64, size), (float64, 1)]
    if state_dtype == float64 or (
        has_decay and (stats is None or stats.max_decay[features] > MAX_FLOAT32_LOG_DECAY)
    ):
        attempts = attempts[1:]
    if has_decay and not can_inspect:
        # Values cannot be read. A chunk of at most F tokens loses no more than its end does;
        # results that float64 does not resolve become NaN.
        attempts = [(float64, min(size, features))]
    if is_single_token:
        attempts = attempts[:1]

    def attempt(dtype: torch.dtype, size: int) -> tuple[SlotLayout, Solved, Unresolved | None]:
        inputs = p.to(dtype)
        if is_single_token:
            layout = SlotLayout(chunk=1, slots=1)
            result = _decode_token(problem, refresh_every, inputs)
        else:
            size = size if stats is None else safe_chunk_size(stats, size, dtype)
            layout = slot_layout(problem, size, interval=refresh_every, stats=stats)
            result = _chunks(problem, layout, inputs, resets)
        return layout, result, first_unresolved(result[-1]) if can_inspect else None

    layout, (y, final, _), fault = attempt(*attempts[0])
    for settings in attempts[1:]:
        if fault is None:
            break
        layout, (y, final, _), fault = attempt(*settings)
    if fault is not None:
        slots = {name: x[0] for name, x in state.algorithm_state.items()}
        if not all(bool(x.isfinite().all()) for x in (p.k, p.log_decay, p.ridge, slots["gram"])):
            y = problem.v.new_full((*p.q.shape[:-1], p.v.shape[-1]), torch.nan)
            return y, state.weights[0], slots  # the input check reports non-finite inputs
        num_tokens = tokens if problem.lengths is None else int(problem.lengths[fault.row])
        raise unresolved_error(
            problem, fault, token=layout.last_token(fault.row, fault.index, num_tokens)
        )
    in_float64 = recipe.algorithm.float64_slots(recipe)
    slots = {"gram": final.D, "origin": p.origin.mT, "kept": final.kappa, "inverse": final.inverse}
    slots = {
        name: x.to(float64 if name in in_float64 else state_dtype) for name, x in slots.items()
    }
    return y, final.M.mT.to(state_dtype), slots


def _chunks(problem: Problem, slots: SlotLayout, p: RidgeProblem, resets: Tensor | None) -> Solved:
    """Run the recursion over chunks; the first loss is that of the initial state."""
    has_decay = problem.recipe.context.has_decay
    start = replace(p.state, inverse=p.state.inverse.detach())
    initial_loss = None
    if has_decay:
        G = start.D + torch.diag_embed(start.kappa.unsqueeze(-1) * p.ridge)
        initial_loss = estimate_relative_error(
            G, start.inverse, torch.zeros_like(start.kappa)
        ).detach()
    tokens = replace(p.tokens(lambda x: scatter_tokens(x, slots)), state=start)
    layout = Layout.of(
        tokens.q,
        slots.chunk,
        span_ends=slots.span_ends,
        resets=None if resets is None else scatter_tokens(resets, slots),
        has_decay=has_decay,
        unresolved=None
        if initial_loss is None or can_read_values(p.k)
        else ~is_resolved(initial_loss),
        needs_final_gram=problem.uses_final_state,
    )
    y, final, losses = recursion(tokens, layout)
    losses = losses if initial_loss is None else torch.cat([initial_loss.unsqueeze(0), losses])
    return gather_tokens(y, slots, p.k.shape[1]), final, losses


def _decode_token(problem: Problem, interval: int, p: RidgeProblem) -> Solved:
    """Decode one token by the Sherman–Morrison formula in O(F (F + V)); invert at span ends.

    Separate from the chunk recursion because the number of operations bounds decoding time.
    """
    has_decay, ridge = problem.recipe.context.has_decay, p.ridge
    M, D, kappa, P = p.state.tensors()
    W, key, value = M.mT, p.k[:, 0], p.v[:, 0]  # [B, H, V, F], [B, H, F], [B, H, V]
    gamma = p.log_decay[:, 0].exp()
    Pk = (P @ key.unsqueeze(-1)).squeeze(-1)  # P k
    kPk = (Pk * key).sum(-1, keepdim=True)  # kᵀP k
    floor = 2 * torch.finfo(P.dtype).eps * kPk
    gain = Pk / (torch.maximum(gamma.unsqueeze(-1), floor) + kPk)
    error = value - (W @ key.unsqueeze(-1)).squeeze(-1)
    W = W + error.unsqueeze(-1) * gain.unsqueeze(-2)
    D = gamma[..., None, None] * D + key.unsqueeze(-1) * key.unsqueeze(-2)
    kappa = gamma * kappa
    P = P - gain.unsqueeze(-1) * Pk.unsqueeze(-2)
    if has_decay:
        P = P / gamma.clamp_min(torch.finfo(P.dtype).tiny)[..., None, None]
    y = p.q @ W.unsqueeze(1).mT
    floor = smallest_ridge(D).squeeze(-1) / ridge.mean(-1)
    changed, target = floor > kappa, torch.maximum(kappa, floor)
    if interval:
        at_span_end = (problem.end % interval == 0) & (problem.end > problem.state.position)
        changed = changed | at_span_end[:, None]
        target = torch.where(at_span_end[:, None], 1.0, target)
    if has_decay:
        # Rank-one updates of P lose precision when eigenvalues spread widely.
        gram_trace = D.diagonal(dim1=-2, dim2=-1).sum(-1) + target * ridge.sum(-1)
        inverse_trace = P.diagonal(dim1=-2, dim2=-1).sum(-1)
        changed = changed | (gram_trace * inverse_trace > MAX_EIGENVALUE_SPREAD * P.shape[-1] ** 2)
    losses = kappa.new_zeros(0, *kappa.shape)
    if not can_read_values(D) or bool(changed.any()):
        G = D + torch.diag_embed(target.unsqueeze(-1) * ridge)
        new_inverse = torch.cholesky_inverse(torch.linalg.cholesky_ex(G)[0])
        raised = torch.where(floor > kappa, floor, 0.0) * ridge.mean(-1)
        added = torch.where(changed, target - kappa, 0.0).unsqueeze(-1) * ridge
        W = W - ((W - p.origin.mT) * added.unsqueeze(-2)) @ new_inverse
        P = torch.where(changed[..., None, None], new_inverse, P)
        kappa = torch.where(changed, target, kappa)
        if has_decay:
            losses = estimate_relative_error(G, P, raised).unsqueeze(0)
    if has_decay and not can_read_values(D):
        unresolved_mask = ~is_resolved(losses[0])[..., None, None]
        y = y.masked_fill(unresolved_mask.unsqueeze(1), torch.nan)
        W = W.masked_fill(unresolved_mask, torch.nan)
    return y, RidgeState(W.mT, D, kappa, P), losses
