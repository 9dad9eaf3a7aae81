"""Engine ``least_squares``: the exact minimum over all of the past, at every token.

A ridge that decays with the data, or is refreshed at the borders of spans, has a recursion in
chunks (`recursion_backward`), in the state's dtype where that holds the digits that
decays leave and in float64 elsewhere (`common.resolution`). A constant ridge, and
approximations of the inverse, go through products with the Gram matrices of all prefixes at once
(`recollect.engines.least_squares.conjugate_gradient`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from recollect.choices.algorithm.closed_form import smallest_ridge
from recollect.engines.common.problem import Problem
from recollect.engines.common.resolution import RESET, Unresolved, looks, loss, refuse, unresolved
from recollect.engines.common.ridge import association, ridge_of
from recollect.engines.least_squares.conjugate_gradient import approximate, how
from recollect.engines.least_squares.cutting import (
    CHUNK,
    Cut,
    aligned,
    cut,
    gentle,
    halves,
    read_facts,
    taken,
)
from recollect.engines.least_squares.recursion_backward import recursion
from recollect.engines.least_squares.recursion_forward import Spans
from recollect.state.state import State

if TYPE_CHECKING:
    from recollect.recipe.recipe import Recipe

__all__ = ["describes", "refuses", "run"]

HOPELESS, DOUBTFUL = 8.0, 4.0
"""What F tokens decay by together above which float32 is not tried, and where nobody may look.

e^−4 leaves a spread (`common.resolution`) of about 30.
"""

STALE = 1e3
"""The spread of eigenvalues above which decoding inverts the system at every token."""


def refuses(recipe: Recipe) -> list[str]:
    """Why this engine cannot run a recipe; empty when it can."""
    reasons: list[str] = []
    if not recipe.algorithm.condenses:
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
    return inverse is not None and inverse.recurs


def _every(recipe: Recipe) -> int:
    """Tokens of a span, 0 where there are none."""
    inverse = recipe.algorithm.inverse
    if inverse is None or inverse.ridge != "refreshed" or not recipe.context.forgets:
        return 0
    return inverse.every


def run(problem: Problem) -> tuple[Tensor, State]:
    """Outputs ``[B, T, H, G, V]`` and the final state."""
    B, T, H, G, _ = problem.q.shape
    if T == 0 or B == 0:
        return problem.v.new_zeros(B, T, H, G, problem.v.shape[-1]), problem.after()
    if not _recurs(problem.recipe):
        y, weights, slots = approximate(problem)
    else:
        y, weights, slots = _recursive(problem)
    seen = (problem.end > 0)[:, None, None, None]

    def rows(new: Tensor, old: Tensor) -> Tensor:
        return torch.where(seen.view(-1, *(1,) * (new.dim() - 1)), new, old)

    state = problem.state
    after = problem.after(
        weights=(rows(weights, state.weights[0]),),
        slots={name: (rows(x, state.slots[name][0]),) for name, x in slots.items()},
    )
    return y.to(problem.v.dtype), after


def _recursive(problem: Problem) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    recipe, state = problem.recipe, problem.state
    k, v, weight = association(problem)
    q = problem.phi(problem.q, "query", problem.positions())
    logs = problem.rates["log_decay"]
    if recipe.context.weighs or recipe.bias.affine != (1.0, 1.0):
        # The root's slope at 0 is infinite, and nothing so small reaches a sum.
        root = (weight + 1e-20).sqrt().unsqueeze(-1)
        k, v = k * root, v * root
    if problem.live is not None:
        live = problem.live[..., None, None]
        k, v = torch.where(live, k, 0.0), torch.where(live, v, 0.0)
        q = torch.where(live.unsqueeze(-1), q, 0.0)
        logs = torch.where(problem.live[..., None], logs, 0.0)
    every = _every(recipe)
    ridge = ridge_of(problem.rates, k.shape[-1])
    fresh = (state.position == 0)[:, None, None, None]
    slots = {name: x[0] for name, x in state.slots.items()}
    origin = torch.where(fresh, state.weights[0], slots["origin"]).mT
    kept = torch.where(fresh[..., 0, 0], 1.0, slots["kept"])
    inverse = torch.where(fresh, torch.diag_embed(1 / ridge), slots["inverse"])
    M, D = state.weights[0].mT, slots["gram"]
    forgets, tokens = recipe.context.forgets, k.shape[1]
    asked, features = problem.chunk_size or CHUNK, k.shape[-1]
    facts, anew = None, None
    if forgets and tokens > 1:
        facts = read_facts(problem, logs, (*halves(asked), features), every=every)
    if forgets and (facts.anew if facts else not looks(k) or bool((logs < RESET).any())):
        # One token's in numbers alone, because a GPU that decodes should not wait.
        anew = logs < RESET
        logs = torch.where(anew, 0.0, logs)
        first = anew[:, 0, :, None, None]
        M, D = torch.where(first, origin, M), torch.where(first, 0.0, D)
        kept = torch.where(anew[:, 0], 1.0, kept)
        inverse = torch.where(first, torch.diag_embed(1 / ridge), inverse)
    given = (q, k, v, logs, ridge, M, D, kept, origin)
    wide, narrow = torch.float64, k.dtype
    step = tokens == 1 and not (torch.is_grad_enabled() and any(x.requires_grad for x in given))
    compiling = torch.compiler.is_compiling()
    looked = forgets and (looks(k) or (tokens > 1 and not compiling))
    # What a chunk loses of its own, single tokens do not.
    ways = [(narrow, asked), (wide, asked), (wide, 1)]
    bound = DOUBTFUL if compiling else HOPELESS
    if narrow == wide or (forgets and (facts is None or facts.most[features] > bound)):
        ways = ways[1:]
    if step:
        ways = ways[:1]

    def attempt(dtype: torch.dtype, size: int) -> tuple[Cut, tuple[Tensor, ...], Unresolved | None]:
        P, *numbers = (x.to(dtype) for x in (inverse, *given))
        if step:
            at, (*found, losses) = Cut(chunk=1, slots=1), _step(problem, every, P, *numbers)
        else:
            size = size if facts is None else gentle(facts, size, dtype)
            in_step = facts is not None and facts.in_step
            at = cut(problem, size, every=every, in_step=in_step, anew=anew)
            *found, losses = _chunks(problem, at, P.detach(), *numbers)
        return at, tuple(found), unresolved(losses) if looked else None

    at, (y, M, D, rho, P), lost = attempt(*ways[0])
    for way in ways[1:]:
        if lost is None:
            break
        at, (y, M, D, rho, P), lost = attempt(*way)
    if lost is not None:
        if not all(bool(x.isfinite().all()) for x in (k, logs, ridge, slots["gram"])):
            y = problem.v.new_full((*q.shape[:-1], v.shape[-1]), torch.nan)
            return y, state.weights[0], slots  # what went in as no number is refused for that
        real = tokens if problem.lengths is None else int(problem.lengths[lost.row])
        raise refuse(problem, lost, token=at.last(lost.row, lost.index, real))
    held = recipe.algorithm.wide(recipe)
    found = {"gram": D, "origin": origin.mT, "kept": rho, "inverse": P}
    found = {name: x.to(wide if name in held else narrow) for name, x in found.items()}
    return y, M.mT.to(narrow), found


def _chunks(
    problem: Problem,
    at: Cut,
    P: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    logs: Tensor,
    ridge: Tensor,
    M: Tensor,
    D: Tensor,
    kept: Tensor,
    origin: Tensor,
) -> tuple[Tensor, ...]:
    """Outputs, `recursion_backward`'s state after all tokens, and what is lost ``[1 + n, B, H]``.

    The first loss is that of the state from before: what a call has left may need more digits than
    the next one's tokens.
    """
    tokens, forgets = k.shape[1], problem.recipe.context.forgets
    spans = Spans(
        chunk=at.chunk, ends=at.ends, anew=at.anew, forgets=forgets, continues=problem.continues
    )
    q, k, v, logs = (aligned(x, at) for x in (q, k, v, logs))
    y, *after, lost = recursion(q, k, v, logs, ridge, M, D, kept, origin, inverse=P, spans=spans)
    if forgets:
        G = D + torch.diag_embed(kept.unsqueeze(-1) * ridge)
        lost = torch.cat([loss(G, P, torch.zeros_like(kept)).detach().unsqueeze(0), lost])
    return taken(y, at, tokens), *after, lost


def _step(
    problem: Problem,
    every: int,
    P: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    logs: Tensor,
    ridge: Tensor,
    M: Tensor,
    D: Tensor,
    kept: Tensor,
    origin: Tensor,
) -> tuple[Tensor, ...]:
    """One token by the Sherman–Morrison formula, and the border's rule where a span ends.

    Returns what `_chunks` does; nothing is lost where no system is inverted. In O(F (F + V)), and
    an inverse at a border. Written apart from the chunks' recursion, because decoding is bound by
    the number of operations.
    """
    forgets, W, origin = problem.recipe.context.forgets, M.mT, origin.mT
    key, value = k[:, 0], v[:, 0]  # [B, H, F], [B, H, V]
    gamma = logs[:, 0].exp()
    across = (P @ key.unsqueeze(-1)).squeeze(-1)  # P k
    excited = (across * key).sum(-1, keepdim=True)  # kᵀP k
    least = 2 * torch.finfo(P.dtype).eps * excited
    gain = across / (torch.maximum(gamma.unsqueeze(-1), least) + excited)
    error = value - (W @ key.unsqueeze(-1)).squeeze(-1)
    W = W + error.unsqueeze(-1) * gain.unsqueeze(-2)
    D = gamma[..., None, None] * D + key.unsqueeze(-1) * key.unsqueeze(-2)
    kept = gamma * kept
    P = P - gain.unsqueeze(-1) * across.unsqueeze(-2)
    if forgets:
        P = P / gamma.clamp_min(torch.finfo(P.dtype).tiny)[..., None, None]
    y = q @ W.unsqueeze(1).mT
    least = smallest_ridge(D).squeeze(-1) / ridge.mean(-1)
    fixed, target = least > kept, torch.maximum(kept, least)
    if every:
        ended = (problem.end % every == 0) & (problem.end > problem.state.position)
        fixed, target = fixed | ended[:, None], torch.where(ended[:, None], 1.0, target)
    if forgets:
        # Rank-one updates of P leave less of a wide spread than D holds.
        size = D.diagonal(dim1=-2, dim2=-1).sum(-1) + target * ridge.sum(-1)
        inverse = P.diagonal(dim1=-2, dim2=-1).sum(-1)
        fixed = fixed | (size * inverse > STALE * P.shape[-1] ** 2)
    lost = kept.new_zeros(0, *kept.shape)
    if D.device.type != "cpu" or bool(fixed.any()):
        G = D + torch.diag_embed(target.unsqueeze(-1) * ridge)
        fresh = torch.cholesky_inverse(torch.linalg.cholesky_ex(G)[0])
        raised = torch.where(least > kept, least, 0.0) * ridge.mean(-1)
        by = torch.where(fixed, target - kept, 0.0).unsqueeze(-1) * ridge
        W = W - ((W - origin) * by.unsqueeze(-2)) @ fresh
        P = torch.where(fixed[..., None, None], fresh, P)
        kept = torch.where(fixed, target, kept)
        if forgets:
            lost = loss(G, P, raised).unsqueeze(0)
    return y, W.mT, D, kept, P, lost
