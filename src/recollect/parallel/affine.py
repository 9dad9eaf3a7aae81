"""Memories whose write is affine in the weights: all ranks at once, one gather, then each reads.

With z = [A, S] the weights and their momentum beside each other, a segment does z → z M + B, row by
row of the memory. Every rank runs its segment from zero, which gives B and the outputs y⁰_t. What
the state z₀ before the segment adds to an output is z₀ u_t, where u_t is what rows of the identity
would read: `docs/design/parallel.md` has the derivation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from recollect.engines.common.coefficients import cumulated
from recollect.engines.common.problem import Problem, scaled
from recollect.engines.linear.inputs import LinearProblem, linear_problem
from recollect.parallel.segment import Segment
from recollect.state.state import State

__all__ = ["Run", "affine_run", "joined_weights"]

Run = Callable[[Problem], tuple[Tensor, State]]


def joined_weights(state: State) -> Tensor:
    """z = [A, S]: weights, a memory of ones as their last row, and their momentum beside them."""
    (A,) = state.weights
    if state.ones is not None:
        A = torch.cat([A, state.ones], dim=-2)
    return torch.cat([A, *(x for slot in state.slots.values() for x in slot)], dim=-1)


def affine_run(
    run: Run, transition: str, segment: Segment, given: Tensor, rest: Tensor | None
) -> Run:
    """An engine's run for a segment whose problems come with a state of zeros.

    Args:
        run: the engine's.
        transition: `Way.transition`.
        segment: this rank's.
        given: z before the first token of all.
        rest: z after a later piece of this segment, which then goes on to the next rank.
    """
    ways = {"keys": _by_keys, "decays": _by_decays, "entries": _by_entries}

    def across(problem: Problem) -> tuple[Tensor, State]:
        return ways[transition](problem, run, segment, given, rest)

    return across


def _reached(segment: Segment, given: Tensor, rest: Tensor | None) -> Tensor:
    """z where this rank's first piece begins, if no earlier rank has anything to say of it."""
    return given if segment.from_start else torch.zeros_like(given)


# -- a matrix over key features -------------------------------------------------------------------


def _by_keys(
    problem: Problem, run: Run, segment: Segment, given: Tensor, rest: Tensor | None
) -> tuple[Tensor, State]:
    """z → z M + B; M and u_t are what rows of the identity become and read beside the values."""
    state = problem.state
    V, n = problem.v.shape[-1], 1 + len(state.slots)
    F = state.weights[0].shape[-1]
    rows = n * F
    identity = torch.eye(rows, dtype=given.dtype, device=given.device)
    parts = list(identity.expand(*given.shape[:2], rows, rows).split(F, -1))
    wide = [
        torch.cat([old, more], dim=-2) for old, more in zip(_matrices(state), parts, strict=True)
    ]
    blank = problem.v.new_zeros(*problem.v.shape[:-1], rows)
    y, after = run(
        replace(
            problem,
            v=torch.cat([problem.v, blank], dim=-1),
            state=_with(replace(state, cache={}), wide),
        )
    )
    after_all = torch.cat(_matrices(after), dim=-1)  # [B, H, V + nF, nF]
    onward = after_all
    if rest is not None:
        onward = torch.cat([rest, torch.zeros_like(after_all[:, :, V:])], dim=-2)
    every = segment.exchange.gather(onward)
    z = _reached(segment, given, rest)
    for said in every[segment.reach : segment.rank]:
        z = z @ said[:, :, V:] + said[:, :, :V]
    said = torch.einsum("bhvf,bthgf->bthgv", z, y[..., V:].to(z.dtype))
    y = y[..., :V] + said.to(y.dtype)
    z = z @ after_all[:, :, V:] + after_all[:, :, :V]
    return y, _moved(problem, z, n)


def _matrices(state: State) -> list[Tensor]:
    return [*state.weights, *(x for slot in state.slots.values() for x in slot)]


def _with(state: State, tensors: list[Tensor]) -> State:
    slots = {name: (x,) for name, x in zip(state.slots, tensors[1:], strict=True)}
    return replace(state, weights=(tensors[0],), slots=slots)


def _moved(problem: Problem, z: Tensor, n: int) -> State:
    state = _with(problem.state, list(z.chunk(n, -1)))
    return problem.after(weights=state.weights, slots=state.slots)


# -- decays ---------------------------------------------------------------------------------------


def _by_decays(
    problem: Problem, run: Run, segment: Segment, given: Tensor, rest: Tensor | None
) -> tuple[Tensor, State]:
    """A → A ⊙ (r cᵀ) + B, with r and c the products of the decays of rows and columns."""
    y, after = run(problem)
    p = linear_problem(problem)
    rows, columns = _totals(p, diagonal=problem.recipe.memory.diagonal)
    (B,) = after.weights
    last = (rows[:, -1].exp(), columns[:, -1].exp())
    z = _composed(segment, given, rest, B, last)
    if problem.recipe.memory.read.when == "before":
        rows, columns = (
            torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], dim=1) for x in (rows, columns)
        )
    r, c = rows.exp(), columns.exp()  # [B, T, H, V or 1], [B, T, H, F or 1]
    if problem.recipe.memory.diagonal:
        said = p.q * (z[:, None] * r).unsqueeze(3)
    else:
        said = torch.einsum("bhvf,bthgf->bthgv", z, p.q * c.unsqueeze(3)) * r.unsqueeze(3)
    y = y + said.to(y.dtype)
    return y, problem.after(weights=(_decayed(z, last) + B,))


def _totals(p: LinearProblem, *, diagonal: bool) -> tuple[Tensor, Tensor]:
    """Logarithms of the products of decays up to each token: of rows, and of columns."""
    live = None if p.live is None else p.live[..., None]
    zero = p.lr.new_zeros(*p.k.shape[:3])[..., :1, None].expand(*p.k.shape[:3], 1)

    def total(x: Tensor | None) -> Tensor:
        if x is None:
            return zero
        x = x if x.dim() == 4 else x.unsqueeze(-1)
        if live is not None:
            x = torch.where(live[..., None], x, 0.0)
        return cumulated(x, 1).to(x.dtype)

    rows, columns = total(p.log_decay_value), total(p.log_decay)
    return (rows + columns, zero) if diagonal else (rows, columns)


def _decayed(z: Tensor, by: tuple[Tensor, Tensor]) -> Tensor:
    rows, columns = by
    return z * rows if z.dim() == 3 else z * rows.unsqueeze(-1) * columns.unsqueeze(-2)


def _composed(
    segment: Segment,
    given: Tensor,
    rest: Tensor | None,
    B: Tensor,
    by: tuple[Tensor, ...],
) -> Tensor:
    """A where this rank's first piece begins, of segments that decay and add."""
    onward = (B, *by)
    if rest is not None:
        onward = (rest, *(torch.zeros_like(x) for x in by))
    parts = [x.flatten(2) for x in onward]
    every = segment.exchange.gather(torch.cat(parts, dim=-1))
    z = _reached(segment, given, rest)
    sizes = [x.shape[-1] for x in parts]
    for said in every[segment.reach : segment.rank]:
        written, *decays = (
            x.view(like.shape) for x, like in zip(said.split(sizes, -1), onward, strict=True)
        )
        z = (z * decays[0] if len(decays) == 1 else _decayed(z, (decays[0], decays[1]))) + written
    return z


def _by_entries(
    problem: Problem, run: Run, segment: Segment, given: Tensor, rest: Tensor | None
) -> tuple[Tensor, State]:
    """A → A ⊙ E + B; outputs are those of a second run, from what the gather found."""
    after = run(replace(problem, q=problem.q[:, :, :, :1]))[1]
    p = linear_problem(problem)
    log = p.log_decay
    assert log is not None
    if p.live is not None:
        log = torch.where(p.live.view(*p.live.shape, *(1,) * (log.dim() - 2)), log, 0.0)
    total = log.double().clamp_min(-1e30).sum(1).to(log.dtype)
    if p.decay_scale is not None:
        total = scaled(total.unsqueeze(-1), p.decay_scale)
    (B,) = after.weights
    z = _composed(segment, given, rest, B, (total.exp(),))
    return run(replace(problem, state=replace(problem.state, weights=(z,), cache={})))
