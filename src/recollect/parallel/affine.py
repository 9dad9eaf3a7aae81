"""Memories with affine writes: all ranks run in parallel, and one gather joins their results.

With z = [A, S] the weights and their momentum, concatenated, a segment maps z → z M + B for every
row of the memory. Every rank runs its segment from zero, which gives B and the outputs y⁰_t. The
state z₀ before the segment adds z₀ u_t to an output, with u_t the outputs of a memory that starts
from the rows of the identity. `docs/design/parallel.md` has the derivation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from recollect.engines.common.coefficients import cumulative_log_decay
from recollect.engines.common.problem import Problem, factored_log_decay
from recollect.engines.linear.inputs import LinearProblem, linear_problem
from recollect.parallel.segment import Segment
from recollect.state.state import State

__all__ = ["Run", "affine_run", "joined_weights"]

Run = Callable[[Problem], tuple[Tensor, State]]


def joined_weights(state: State) -> Tensor:
    """Return z = [A, S]: weights, with the normaliser as the last row, and their momentum."""
    (A,) = state.weights
    if state.normalizer is not None:
        A = torch.cat([A, state.normalizer], dim=-2)
    return torch.cat([A, *(x for slot in state.algorithm_state.values() for x in slot)], dim=-1)


def affine_run(
    run: Run, transition: str, segment: Segment, initial: Tensor, last_piece: Tensor | None
) -> Run:
    """Return a run function for a segment whose problem has a state of zeros.

    ``run`` is that of the engine, ``initial`` is z before the sequence, and ``last_piece`` is z
    after a later piece of this segment, which the next rank continues.
    """
    run_segment = {"keys": _by_keys, "decays": _by_decays, "entries": _by_entries}[transition]
    return lambda problem: run_segment(problem, run, segment, initial, last_piece)


def _segment_start(segment: Segment, initial: Tensor) -> Tensor:
    """Return z before this rank's first piece, without contributions of earlier ranks."""
    return initial if segment.includes_start else torch.zeros_like(initial)


# -- a matrix over key features -------------------------------------------------------------------


def _by_keys(
    problem: Problem, run: Run, segment: Segment, initial: Tensor, last_piece: Tensor | None
) -> tuple[Tensor, State]:
    """Run z → z M + B; M and u_t come from rows of the identity, appended to the memory's rows."""
    state = problem.state
    V, n = problem.v.shape[-1], 1 + len(state.algorithm_state)
    F = state.weights[0].shape[-1]
    rows = n * F
    identity = torch.eye(rows, dtype=initial.dtype, device=initial.device)
    parts = list(identity.expand(*initial.shape[:2], rows, rows).split(F, -1))
    extended = [
        torch.cat([old, new], dim=-2) for old, new in zip(_matrices(state), parts, strict=True)
    ]
    blank = problem.v.new_zeros(*problem.v.shape[:-1], rows)
    rates = dict(problem.rates)
    if problem.bound.per_value:  # a rate per value channel acts on writes, and these rows have none
        rates["lr"] = torch.cat([rates["lr"], blank.to(rates["lr"].dtype)], dim=-1)
    y, final = run(
        replace(
            problem,
            v=torch.cat([problem.v, blank], dim=-1),
            rates=rates,
            state=_with_matrices(replace(state, cache={}), extended),
        )
    )
    final_tensor = torch.cat(_matrices(final), dim=-1)  # [B, H, V + nF, nF]
    outgoing = final_tensor
    if last_piece is not None:
        outgoing = torch.cat([last_piece, torch.zeros_like(final_tensor[:, :, V:])], dim=-2)
    messages = segment.exchange.gather(outgoing)
    z = _segment_start(segment, initial)
    for message in messages[segment.first_source_rank : segment.rank]:
        z = z @ message[:, :, V:] + message[:, :, :V]
    contribution = torch.einsum("bhvf,bthgf->bthgv", z, y[..., V:].to(z.dtype))
    y = y[..., :V] + contribution.to(y.dtype)
    z = z @ final_tensor[:, :, V:] + final_tensor[:, :, :V]
    return y, _state_after(problem, z, n)


def _matrices(state: State) -> list[Tensor]:
    return [*state.weights, *(x for slot in state.algorithm_state.values() for x in slot)]


def _with_matrices(state: State, tensors: list[Tensor]) -> State:
    slots = {name: (x,) for name, x in zip(state.algorithm_state, tensors[1:], strict=True)}
    return replace(state, weights=(tensors[0],), algorithm_state=slots)


def _state_after(problem: Problem, z: Tensor, n: int) -> State:
    state = _with_matrices(problem.state, list(z.chunk(n, -1)))
    return problem.final_state(weights=state.weights, algorithm_state=state.algorithm_state)


# -- decays ---------------------------------------------------------------------------------------


def _by_decays(
    problem: Problem, run: Run, segment: Segment, initial: Tensor, last_piece: Tensor | None
) -> tuple[Tensor, State]:
    """Run A → A ⊙ (r cᵀ) + B, with r and c the products of the decays of rows and columns."""
    y, final = run(problem)
    p = linear_problem(problem)
    rows, columns = _cumulative_log_decays(p, diagonal=problem.recipe.memory.is_elementwise)
    (B,) = final.weights
    last = (rows[:, -1].exp(), columns[:, -1].exp())
    z = _compose_decays(segment, initial, last_piece, B, last)
    if problem.recipe.memory.read.when == "before":
        rows, columns = (
            torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], dim=1) for x in (rows, columns)
        )
    r, c = rows.exp(), columns.exp()  # [B, T, H, V or 1], [B, T, H, F or 1]
    if problem.recipe.memory.is_elementwise:
        contribution = p.q * (z[:, None] * r).unsqueeze(3)
    else:
        contribution = torch.einsum("bhvf,bthgf->bthgv", z, p.q * c.unsqueeze(3))
        contribution = contribution * r.unsqueeze(3)
    y = y + contribution.to(y.dtype)
    return y, problem.final_state(weights=(_decayed(z, last) + B,))


def _cumulative_log_decays(p: LinearProblem, *, diagonal: bool) -> tuple[Tensor, Tensor]:
    """Return the cumulative log decays of rows and of columns up to each token."""
    valid = None if p.token_mask is None else p.token_mask[..., None]
    zero = p.lr.new_zeros(*p.k.shape[:3])[..., :1, None].expand(*p.k.shape[:3], 1)

    def total(x: Tensor | None) -> Tensor:
        if x is None:
            return zero
        x = x if x.dim() == 4 else x.unsqueeze(-1)
        if valid is not None:
            x = torch.where(valid[..., None], x, 0.0)
        return cumulative_log_decay(x, 1).to(x.dtype)

    rows, columns = total(p.log_decay_value), total(p.log_decay)
    return (rows + columns, zero) if diagonal else (rows, columns)


def _decayed(z: Tensor, by: tuple[Tensor, Tensor]) -> Tensor:
    rows, columns = by
    return z * rows if z.dim() == 3 else z * rows.unsqueeze(-1) * columns.unsqueeze(-2)


def _compose_decays(
    segment: Segment, initial: Tensor, last_piece: Tensor | None, B: Tensor, by: tuple[Tensor, ...]
) -> Tensor:
    """Return A before this rank's first piece, from segments that decay and add."""
    outgoing = (B, *by)
    if last_piece is not None:
        outgoing = (last_piece, *(torch.zeros_like(x) for x in by))
    parts = [x.flatten(2) for x in outgoing]
    messages = segment.exchange.gather(torch.cat(parts, dim=-1))
    z = _segment_start(segment, initial)
    sizes = [x.shape[-1] for x in parts]
    for message in messages[segment.first_source_rank : segment.rank]:
        added, *decays = (
            x.view(like.shape) for x, like in zip(message.split(sizes, -1), outgoing, strict=True)
        )
        z = (z * decays[0] if len(decays) == 1 else _decayed(z, (decays[0], decays[1]))) + added
    return z


def _by_entries(
    problem: Problem, run: Run, segment: Segment, initial: Tensor, last_piece: Tensor | None
) -> tuple[Tensor, State]:
    """Run A → A ⊙ E + B; a second run from the gathered state gives the outputs."""
    final = run(replace(problem, q=problem.q[:, :, :, :1]))[1]
    p = linear_problem(problem)
    log_decay = p.log_decay
    assert log_decay is not None
    if p.token_mask is not None:
        valid = p.token_mask.view(*p.token_mask.shape, *(1,) * (log_decay.dim() - 2))
        log_decay = torch.where(valid, log_decay, 0.0)
    total = log_decay.double().clamp_min(-1e30).sum(1).to(log_decay.dtype)
    if p.decay_scale is not None:
        total = factored_log_decay(total.unsqueeze(-1), p.decay_scale)
    (B,) = final.weights
    z = _compose_decays(segment, initial, last_piece, B, (total.exp(),))
    return run(replace(problem, state=replace(problem.state, weights=(z,), cache={})))
