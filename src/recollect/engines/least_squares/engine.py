"""What the least-squares engine runs, and by which of its ways: a recursion, or products.

A ridge that decays with the data, or is refreshed at the borders of spans, has a recursion in
chunks (`recursion_backward`), in the state's dtype where that holds the digits that
decays leave and in float64 elsewhere (`common.resolution`). A constant ridge, and
approximations of the inverse, go through products with the Gram matrices of all prefixes at once
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
from recollect.engines.common.problem import Problem
from recollect.engines.common.resolution import (
    RESET,
    Unresolved,
    loss,
    refuse,
    resolved,
    unresolved,
)
from recollect.engines.least_squares.conjugate_gradient import approximate, how
from recollect.engines.least_squares.cutting import (
    CHUNK,
    Cut,
    aligned,
    cut,
    gentle,
    halves,
    read_facts,
    unaligned,
)
from recollect.engines.least_squares.inputs import RidgeProblem, RidgeState, ridge_problem
from recollect.engines.least_squares.recursion_backward import recursion
from recollect.engines.least_squares.recursion_layout import Spans
from recollect.state.state import State

if TYPE_CHECKING:
    from recollect.recipe.recipe import Recipe

__all__ = ["describes", "needs_digits", "refuses", "run"]

HOPELESS = 8.0
"""What F tokens decay by together above which float32 is not tried."""

STALE = 1e3
"""The spread of eigenvalues above which decoding inverts the system at every token."""

Solve = Callable[[Problem], tuple[Tensor, Tensor, dict[str, Tensor]]]

Solved = tuple[Tensor, RidgeState, Tensor]
"""Outputs ``[B, T, H, G, V]``, the state after all tokens, and what is lost ``[n, B, H]``."""


def refuses(recipe: Recipe) -> list[str]:
    """Why this engine cannot run a recipe; empty when it can."""
    reasons: list[str] = []
    if recipe.algorithm.inverse is None:
        reasons.append(f"{recipe.algorithm.title} does not solve for all of the past")
    elif not recipe.features.finite:
        reasons.append(f"{recipe.features.title} has infinitely many features")
    return reasons


def describes(recipe: Recipe) -> str:
    """How this engine runs a recipe, in a few words."""
    if not _recurs(recipe):
        assert recipe.algorithm.inverse is not None
        return how(recipe.algorithm.inverse)
    every = _every(recipe)
    if every == 0:
        return "recursive least squares in chunks"
    return f"recursive least squares in chunks, ridge refreshed every {every} tokens"


def _recurs(recipe: Recipe) -> bool:
    inverse = recipe.algorithm.inverse
    return inverse is not None and inverse.is_recursive


def _every(recipe: Recipe) -> int:
    """Tokens of a span, 0 where there are none."""
    inverse = recipe.algorithm.inverse
    if inverse is None or inverse.ridge != "refreshed" or not recipe.context.has_decay:
        return 0
    return inverse.refresh_every


def needs_digits(recipe: Recipe) -> str | None:
    """Why products stay float32, if they do: where digits are counted, or a solve must converge."""
    if recipe.algorithm.float64_slots(recipe):
        return "some of its statistics are float64, and counted digits decide how they are kept"
    inverse = recipe.algorithm.inverse
    if (
        inverse is None
        or inverse.kind in ("identity", "diagonal", "spectral")
        or inverse.is_recursive
    ):
        return None
    return "conjugate gradients of rounded products end at another solution"


def run(problem: Problem, solve: Solve | None = None) -> tuple[Tensor, State]:
    """Outputs ``[B, T, H, G, V]`` and the final state.

    Args:
        problem: the call.
        solve: outputs, memory and slots of it; this engine's own way if omitted.
    """
    B, T, H, G, _ = problem.q.shape
    if T == 0 or B == 0:
        return problem.v.new_zeros(B, T, H, G, problem.v.shape[-1]), problem.final_state()
    if solve is None:
        solve = _recursive if _recurs(problem.recipe) else approximate
    y, weights, slots = solve(problem)
    seen = (problem.end > 0)[:, None, None, None]

    def rows(new: Tensor, old: Tensor) -> Tensor:
        some = seen if new.dim() == 4 else seen.view(-1, *(1,) * (new.dim() - 1))
        return torch.where(some, new, old)

    state = problem.state
    final_state = problem.final_state(
        weights=(rows(weights, state.weights[0]),),
        algorithm_state={
            name: (rows(x, state.algorithm_state[name][0]),) for name, x in slots.items()
        },
    )
    return y.to(problem.v.dtype), final_state


def _recursive(problem: Problem) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    recipe, state, p = problem.recipe, problem.state, ridge_problem(problem)
    forgets, refresh_every, tokens = recipe.context.has_decay, _every(recipe), p.k.shape[1]
    size, features = problem.chunk_size or CHUNK, p.k.shape[-1]
    looked = forgets and can_read_values(p.k)
    facts, anew = None, None
    if looked and tokens > 1:
        facts = read_facts(problem, p.log_decay, (*halves(size), features), every=refresh_every)
    if forgets:
        starts = p.log_decay < RESET
        if facts.anew if facts else not looked or bool(starts.any()):
            anew, p = starts, p.restarted(starts)
    wide, narrow = torch.float64, p.k.dtype
    step = tokens == 1 and not p.wants_gradient()
    # What a chunk loses of its own, single tokens do not.
    ways = [(narrow, size), (wide, size), (wide, 1)]
    if narrow == wide or (forgets and (facts is None or facts.most[features] > HOPELESS)):
        ways = ways[1:]
    if forgets and not looked:
        # Nobody may look: no chunk loses more than its features' worth of tokens, which is as much
        # as is lost beside it, and what float64 does not resolve is no number.
        ways = [(wide, min(size, features))]
    if step:
        ways = ways[:1]

    def attempt(dtype: torch.dtype, size: int) -> tuple[Cut, Solved, Unresolved | None]:
        numbers = p.to(dtype)
        if step:
            at, solved = Cut(chunk=1, slots=1), _step(problem, refresh_every, numbers)
        else:
            size = size if facts is None else gentle(facts, size, dtype)
            at = cut(problem, size, every=refresh_every, facts=facts)
            solved = _chunks(problem, at, numbers, anew)
        return at, solved, unresolved(solved[-1]) if looked else None

    at, (y, after, _), lost = attempt(*ways[0])
    for way in ways[1:]:
        if lost is None:
            break
        at, (y, after, _), lost = attempt(*way)
    if lost is not None:
        slots = {name: x[0] for name, x in state.algorithm_state.items()}
        if not all(bool(x.isfinite().all()) for x in (p.k, p.log_decay, p.ridge, slots["gram"])):
            y = problem.v.new_full((*p.q.shape[:-1], p.v.shape[-1]), torch.nan)
            return y, state.weights[0], slots  # what went in as no number is refused for that
        real = tokens if problem.lengths is None else int(problem.lengths[lost.row])
        raise refuse(problem, lost, token=at.last(lost.row, lost.index, real))
    in_float64 = recipe.algorithm.float64_slots(recipe)
    slots = {"gram": after.D, "origin": p.origin.mT, "kept": after.kappa, "inverse": after.inverse}
    slots = {name: x.to(wide if name in in_float64 else narrow) for name, x in slots.items()}
    return y, after.M.mT.to(narrow), slots


def _chunks(problem: Problem, at: Cut, p: RidgeProblem, anew: Tensor | None) -> Solved:
    """By the recursion over chunks.

    The first loss is that of the state from before: what a call has left may need more digits than
    the next one's tokens.
    """
    forgets = problem.recipe.context.has_decay
    start = replace(p.state, inverse=p.state.inverse.detach())
    before = None
    if forgets:
        G = start.D + torch.diag_embed(start.kappa.unsqueeze(-1) * p.ridge)
        before = loss(G, start.inverse, torch.zeros_like(start.kappa)).detach()
    spans = Spans(
        chunk=at.chunk,
        ends=at.ends,
        anew=None if anew is None else aligned(anew, at),
        forgets=forgets,
        unresolved=None if before is None or can_read_values(p.k) else ~resolved(before),
        continues=problem.uses_final_state,
    )
    y, after, lost = recursion(replace(p.tokens(lambda x: aligned(x, at)), state=start), spans)
    lost = lost if before is None else torch.cat([before.unsqueeze(0), lost])
    return unaligned(y, at, p.k.shape[1]), after, lost


def _step(problem: Problem, every: int, p: RidgeProblem) -> Solved:
    """One token by the Sherman–Morrison formula, and the border's rule where a span ends.

    Nothing is lost where no system is inverted. In O(F (F + V)), and an inverse at a border.
    Written apart from the chunks' recursion, because decoding is bound by the number of operations.
    """
    forgets, ridge = problem.recipe.context.has_decay, p.ridge
    M, D, kappa, P = p.state.tensors()
    W, key, value = M.mT, p.k[:, 0], p.v[:, 0]  # [B, H, V, F], [B, H, F], [B, H, V]
    gamma = p.log_decay[:, 0].exp()
    across = (P @ key.unsqueeze(-1)).squeeze(-1)  # P k
    excited = (across * key).sum(-1, keepdim=True)  # kᵀP k
    least = 2 * torch.finfo(P.dtype).eps * excited
    gain = across / (torch.maximum(gamma.unsqueeze(-1), least) + excited)
    error = value - (W @ key.unsqueeze(-1)).squeeze(-1)
    W = W + error.unsqueeze(-1) * gain.unsqueeze(-2)
    D = gamma[..., None, None] * D + key.unsqueeze(-1) * key.unsqueeze(-2)
    kappa = gamma * kappa
    P = P - gain.unsqueeze(-1) * across.unsqueeze(-2)
    if forgets:
        P = P / gamma.clamp_min(torch.finfo(P.dtype).tiny)[..., None, None]
    y = p.q @ W.unsqueeze(1).mT
    least = smallest_ridge(D).squeeze(-1) / ridge.mean(-1)
    fixed, target = least > kappa, torch.maximum(kappa, least)
    if every:
        ended = (problem.end % every == 0) & (problem.end > problem.state.position)
        fixed, target = fixed | ended[:, None], torch.where(ended[:, None], 1.0, target)
    if forgets:
        # Rank-one updates of P leave less of a wide spread than D holds.
        size = D.diagonal(dim1=-2, dim2=-1).sum(-1) + target * ridge.sum(-1)
        inverse = P.diagonal(dim1=-2, dim2=-1).sum(-1)
        fixed = fixed | (size * inverse > STALE * P.shape[-1] ** 2)
    lost = kappa.new_zeros(0, *kappa.shape)
    if not can_read_values(D) or bool(fixed.any()):
        G = D + torch.diag_embed(target.unsqueeze(-1) * ridge)
        fresh = torch.cholesky_inverse(torch.linalg.cholesky_ex(G)[0])
        raised = torch.where(least > kappa, least, 0.0) * ridge.mean(-1)
        by = torch.where(fixed, target - kappa, 0.0).unsqueeze(-1) * ridge
        W = W - ((W - p.origin.mT) * by.unsqueeze(-2)) @ fresh
        P = torch.where(fixed[..., None, None], fresh, P)
        kappa = torch.where(fixed, target, kappa)
        if forgets:
            lost = loss(G, P, raised).unsqueeze(0)
    if forgets and not can_read_values(D):
        nan = ~resolved(lost[0])[..., None, None]
        y, W = y.masked_fill(nan.unsqueeze(1), torch.nan), W.masked_fill(nan, torch.nan)
    return y, RidgeState(W.mT, D, kappa, P), lost
