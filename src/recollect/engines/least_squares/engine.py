"""Engine ``least_squares``: the exact minimum over all of the past, at every token.

A ridge that decays with the data, or is refreshed at the borders of spans, has a recursion in
chunks (`recursion_backward`), in the state's dtype where that holds the digits that
decays leave and in float64 elsewhere (`common.resolution`). A constant ridge, and
approximations of the inverse, go through products with the Gram matrices of all prefixes at once
(`recollect.engines.least_squares.conjugate_gradient`).
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from recollect.choices.algorithm.closed_form import smallest_ridge
from recollect.engines.common.problem import Problem
from recollect.engines.common.resolution import RESET, Unresolved, check, looks, loss, refuse
from recollect.engines.common.ridge import association, ridge_of
from recollect.engines.least_squares.conjugate_gradient import approximate, how
from recollect.engines.least_squares.recursion_backward import recursion
from recollect.engines.least_squares.recursion_forward import Spans
from recollect.engines.reference.least_squares import condensed
from recollect.state.state import State

if TYPE_CHECKING:
    from recollect.recipe.recipe import Recipe

__all__ = ["Cut", "cut", "describes", "refuses", "run"]

CHUNK, LEAST = 64, 8
"""Tokens per chunk when nobody asks, measured; and under the strongest decays in float32."""

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


def _starts_anew(problem: Problem) -> bool:
    """Whether a decay of 0 is among several tokens."""
    logs = problem.rates["log_decay"]
    return problem.recipe.context.forgets and logs.shape[1] > 1 and bool((logs < RESET).any())


def run(problem: Problem) -> tuple[Tensor, State]:
    """Outputs ``[B, T, H, G, V]`` and the final state."""
    B, T, H, G, _ = problem.q.shape
    if T == 0 or B == 0:
        return problem.v.new_zeros(B, T, H, G, problem.v.shape[-1]), problem.after()
    if not _recurs(problem.recipe):
        y, weights, slots = approximate(problem)
    elif _starts_anew(problem):
        # Within a chunk there is no place for it; the definition says it token by token.
        return condensed(problem)
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cut:
    """Where tokens stand once spans begin at multiples of one length.

    Attributes:
        chunk: C. per_span: chunks of a span, 0 without spans. slots: tokens in all, with gaps.
        place: ``[B, T]`` slot of each token, or ``None`` where they stand as they are.
        ends: ``[spans, B]``, which rows reach the end of a span.
    """

    chunk: int
    per_span: int
    slots: int
    place: Tensor | None
    ends: Tensor | None


def cut(problem: Problem, every: int, dtype: torch.dtype) -> Cut:
    """Cut a call into chunks, and rows that stand at different places of their span into step."""
    T = problem.k.shape[1]
    wanted = _gentle(problem, dtype)
    if every == 0:
        chunk = min(wanted, T)
        return Cut(chunk=chunk, per_span=0, slots=-(-T // chunk) * chunk, place=None, ends=None)
    per_span = -(-every // wanted)
    chunk = -(-every // per_span)
    length = per_span * chunk
    phase = problem.state.position % every  # [B]
    steps = torch.arange(T, device=phase.device)
    index = phase[:, None] + steps
    place = index // every * length + index % every
    moves = length != every or bool((phase != 0).any())
    furthest = int(place[:, -1].max()) + 1 if moves else T
    spans = -(-furthest // length)
    slots = -(-furthest // chunk) * chunk
    last = problem.end - (problem.state.position - phase)  # tokens from the first span's start
    border = torch.arange(1, spans + 1, device=phase.device) * every
    ends = last[None, :] >= border[:, None]
    return Cut(
        chunk=chunk,
        per_span=per_span,
        slots=slots,
        place=place if moves else None,
        ends=ends,
    )


def _gentle(problem: Problem, dtype: torch.dtype) -> int:
    """Tokens of a chunk: as many as decay by no more than the dtype can take apart again.

    Inside a chunk, what is left of a decayed past is told from noise by subtraction. Looking at the
    decays costs one synchronisation on a GPU.
    """
    wanted = problem.chunk_size or CHUNK
    if not problem.recipe.context.forgets:
        return wanted
    logs = problem.rates["log_decay"].detach()
    bound, least = (12.0, 1) if dtype == torch.float64 else (4.0, LEAST)
    total = _total(logs)
    while wanted > least and _strongest(total, wanted) > bound:
        wanted //= 2
    return wanted


def _total(logs: Tensor) -> Tensor:
    """Sums of log decays before each token and after the last, ``[B, T + 1, H]``."""
    return torch.nn.functional.pad(logs.double().clamp_min(-1000.0).cumsum(1), (0, 0, 1, 0))


def _strongest(total: Tensor, tokens: int) -> float:
    """The most that so many tokens in a row decay by."""
    step = min(tokens, total.shape[1] - 1)
    return float((total[:, :-step] - total[:, step:]).max())


def _aligned(x: Tensor, at: Cut) -> Tensor:
    """``[B, T, ...] -> [B, slots, ...]``, zeros in between."""
    if at.place is None:
        missing = at.slots - x.shape[1]
        if missing == 0:
            return x
        return torch.cat([x, x.new_zeros(x.shape[0], missing, *x.shape[2:])], dim=1)
    index = at.place.view(*at.place.shape, *(1,) * (x.dim() - 2)).expand_as(x)
    return x.new_zeros(x.shape[0], at.slots, *x.shape[2:]).scatter(1, index, x)


def _taken(y: Tensor, at: Cut, tokens: int) -> Tensor:
    """The way back."""
    if at.place is None:
        return y[:, :tokens]
    index = at.place.view(*at.place.shape, *(1,) * (y.dim() - 2))
    return y.gather(1, index.expand(-1, -1, *y.shape[2:]))


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
    forgets = recipe.context.forgets
    if forgets and k.shape[1] == 1 and (not looks(k) or bool((logs < RESET).any())):
        # In numbers alone, because a GPU that decodes should not wait.
        anew = (logs[:, 0] < RESET)[..., None, None]
        M, D = torch.where(anew, origin, M), torch.where(anew, 0.0, D)
        kept = torch.where(anew[..., 0, 0], 1.0, kept)
        inverse = torch.where(anew, torch.diag_embed(1 / ridge), inverse)
        logs = torch.where(anew[:, None, :, 0, 0], 0.0, logs)
    given = (q, k, v, logs, ridge, M, D, kept, origin)
    wide, narrow = torch.float64, k.dtype
    step = k.shape[1] == 1 and not (torch.is_grad_enabled() and any(x.requires_grad for x in given))
    # What a chunk loses of its own, single tokens do not.
    ways = [(narrow, problem), (wide, problem), (wide, dataclasses.replace(problem, chunk_size=1))]
    if narrow == wide or (forgets and (step or _strong(problem))):
        ways = ways[1:]
    for dtype, asked in ways:
        try:
            P, *numbers = (x.to(dtype) for x in (inverse, *given))
            if step:
                y, M, D, rho, P = _step(problem, every, P, *numbers)
            else:
                y, M, D, rho, P = _chunks(asked, every, P.detach(), *numbers)
        except Unresolved as lost:
            if not all(bool(x.isfinite().all()) for x in (k, logs, ridge, D)):
                y = problem.v.new_full((*q.shape[:-1], v.shape[-1]), torch.nan)
                return y, state.weights[0], slots  # what went in as no number is refused for that
            if asked is ways[-1][1] or step:
                raise refuse(
                    lost.worst,
                    row=lost.row,
                    token=lost.slot,
                    head=lost.head,
                    title=recipe.algorithm.title,
                ) from None
        else:
            break
    else:
        raise AssertionError("the last way returns or raises")
    held = recipe.algorithm.wide(recipe)
    found = {"gram": D, "origin": origin.mT, "kept": rho, "inverse": P}
    found = {name: x.to(wide if name in held else narrow) for name, x in found.items()}
    return y, M.mT.to(narrow), found


def _strong(problem: Problem) -> bool:
    """Whether decays are too strong for float32 where the outcome cannot be looked at.

    F tokens that decay by e^−4 together have a spread (`common.resolution`) of about 30.
    """
    logs = problem.rates["log_decay"].detach()
    features = problem.recipe.features.dim(problem.k.shape[-1])
    return not looks(logs) and _strongest(_total(logs), features) > 4.0


def _chunks(
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
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Outputs and `recursion_backward`'s state after all tokens."""
    if problem.recipe.context.forgets and looks(P):
        # What a call before has left may need more digits than its own tokens.
        G = D + torch.diag_embed(kept.unsqueeze(-1) * ridge)
        check(loss(G, P, torch.zeros_like(kept)))
    at = cut(problem, every, k.dtype)
    spans = Spans(
        chunk=at.chunk,
        every=at.per_span,
        ends=at.ends,
        forgets=problem.recipe.context.forgets,
        continues=problem.continues,
    )
    q, k, v, logs = (_aligned(x, at) for x in (q, k, v, logs))
    try:
        y, *after = recursion(q, k, v, logs, ridge, M, D, kept, origin, inverse=P, spans=spans)
    except Unresolved as lost:
        slots = torch.arange(problem.k.shape[1]) if at.place is None else at.place[lost.row]
        lost.slot = int((slots < lost.slot).sum().clamp_max(len(slots) - 1))
        raise
    M, D, kept, P = after
    return _taken(y, at, problem.k.shape[1]), M, D, kept, P


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
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """One token by the Sherman–Morrison formula, and the border's rule where a span ends.

    In O(F (F + V)), beside an inverse at a border. Written apart from the chunks' recursion,
    because decoding is bound by the number of operations.
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
    if D.device.type != "cpu" or bool(fixed.any()):
        G = D + torch.diag_embed(target.unsqueeze(-1) * ridge)
        fresh = torch.cholesky_inverse(torch.linalg.cholesky_ex(G)[0])
        raised = torch.where(least > kept, least, 0.0) * ridge.mean(-1)
        by = torch.where(fixed, target - kept, 0.0).unsqueeze(-1) * ridge
        W = W - ((W - origin) * by.unsqueeze(-2)) @ fresh
        P = torch.where(fixed[..., None, None], fresh, P)
        kept = torch.where(fixed, target, kept)
        if forgets and looks(P):
            check(loss(G, P, raised))
    return y, W.mT, D, kept, P
