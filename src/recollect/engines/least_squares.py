"""Engine ``least_squares``: the exact minimum over all of the past, at every token.

A ridge that decays with the data, or is refreshed at the borders of spans, has a recursion in
chunks (`recollect.engines.recursion`). A constant ridge, and approximations of the inverse, go
through products with the Gram matrices of all prefixes at once (`recollect.engines.conjugate`).
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from recollect.choices.algorithm import smallest_ridge
from recollect.engines.condensed import association, ridge_of
from recollect.engines.conjugate import approximate, how
from recollect.engines.problem import Problem
from recollect.engines.recursion import Spans, recursion
from recollect.engines.state import State

if TYPE_CHECKING:
    from recollect.recipe import Recipe

__all__ = ["Cut", "cut", "describes", "refuses", "run"]

CHUNK, LEAST = 64, 8
"""Tokens per chunk when nobody asks, measured; and under the strongest decays."""


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


def cut(problem: Problem, every: int) -> Cut:
    """Cut a call into chunks, and rows that stand at different places of their span into step."""
    T = problem.k.shape[1]
    wanted = _gentle(problem)
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


def _gentle(problem: Problem) -> int:
    """Tokens of a chunk: as many as decay by no more than the dtype can take apart again.

    Inside a chunk, what is left of a decayed past is told from noise by subtraction. Looking at the
    decays costs one synchronisation on a GPU.
    """
    wanted = problem.chunk_size or CHUNK
    if not problem.recipe.context.forgets:
        return wanted
    logs = problem.rates["log_decay"].detach()
    bound = 12.0 if logs.dtype == torch.float64 else 4.0
    total = torch.nn.functional.pad(logs.double().clamp_min(-1000.0).cumsum(1), (0, 0, 1, 0))
    while wanted > LEAST:
        step = min(wanted, logs.shape[1])
        if float((total[:, :-step] - total[:, step:]).max()) <= bound:
            break
        wanted //= 2
    return wanted


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
    at = cut(problem, every)
    ridge = ridge_of(problem.rates, k.shape[-1])
    fresh = (state.position == 0)[:, None, None, None]
    slots = {name: x[0] for name, x in state.slots.items()}
    origin = torch.where(fresh, state.weights[0], slots["origin"]).mT
    kept = torch.where(fresh[..., 0, 0], 1.0, slots["kept"])
    inverse = torch.where(fresh, torch.diag_embed(1 / ridge), slots["inverse"])
    given = (q, k, v, logs, ridge, state.weights[0], slots["gram"], kept, origin)
    if k.shape[1] == 1 and not (torch.is_grad_enabled() and any(x.requires_grad for x in given)):
        return _step(problem, every, inverse, *given)
    spans = Spans(
        chunk=at.chunk,
        every=at.per_span,
        ends=at.ends,
        forgets=recipe.context.forgets,
        continues=problem.continues,
    )
    q, k, v, logs = (_aligned(x, at) for x in (q, k, v, logs))
    y, M, D, kept, inverse = recursion(
        q,
        k,
        v,
        logs,
        ridge,
        state.weights[0].mT,
        slots["gram"],
        kept,
        origin,
        inverse=inverse.detach(),
        spans=spans,
    )
    found = {"gram": D, "origin": origin.mT, "kept": kept, "inverse": inverse}
    return _taken(y, at, problem.k.shape[1]), M.mT, found


def _step(
    problem: Problem,
    every: int,
    P: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    logs: Tensor,
    ridge: Tensor,
    W: Tensor,
    D: Tensor,
    kept: Tensor,
    origin: Tensor,
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """One token by the Sherman–Morrison formula, and the border's rule where a span ends.

    In O(F (F + V)), beside an inverse at a border. Written apart from the chunks' recursion,
    because decoding is bound by the number of operations.
    """
    key, value, origin = k[:, 0], v[:, 0], origin.mT  # [B, H, F], [B, H, V]
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
    if problem.recipe.context.forgets:
        P = P / gamma.clamp_min(torch.finfo(P.dtype).tiny)[..., None, None]
    y = q @ W.unsqueeze(1).mT
    least = smallest_ridge(D).squeeze(-1) / ridge.mean(-1)
    fixed, target = least > kept, torch.maximum(kept, least)
    if every:
        ended = (problem.end % every == 0) & (problem.end > problem.state.position)
        fixed, target = fixed | ended[:, None], torch.where(ended[:, None], 1.0, target)
    if D.device.type != "cpu" or bool(fixed.any()):
        fresh = torch.cholesky_inverse(
            torch.linalg.cholesky_ex(D + torch.diag_embed(target.unsqueeze(-1) * ridge))[0]
        )
        by = torch.where(fixed, target - kept, 0.0).unsqueeze(-1) * ridge
        W = W - ((W - origin) * by.unsqueeze(-2)) @ fresh
        P = torch.where(fixed[..., None, None], fresh, P)
        kept = torch.where(fixed, target, kept)
    return y, W, {"gram": D, "origin": origin, "kept": kept, "inverse": P}
