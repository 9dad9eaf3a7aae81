"""One rank's part of a `recollect.recall`, and the exchanges of each strategy."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from recollect.engines.common.problem import Problem
from recollect.functional.recall import memorise, with_initial_state
from recollect.parallel.affine import Run, affine_run, joined_weights
from recollect.parallel.pieces import join_pieces, pieces_for, slice_call, slice_state
from recollect.parallel.segment import Segment
from recollect.parallel.strategies import Strategy
from recollect.state.buffer import Buffer
from recollect.state.state import State, join_states

__all__ = ["keep_saved_tensors", "memorise_segment"]


@dataclass(frozen=True, kw_only=True)
class _FirstPiece:
    """First piece of this rank and the states around it."""

    call: Problem  # dense call of the tokens up to the first boundary
    initial: State  # state before the first token of the sequence, with the batch size of call
    last_piece: State | None = None  # state after the last piece; None if there is one piece


def memorise_segment(
    call: Problem, segment: Segment, strategy: Strategy, *, pieces: int
) -> tuple[Tensor, State]:
    """Return the outputs of a rank's tokens, and the state after each piece, or after each row.

    Args:
        call: call of this rank's tokens: dense rows, or one row with the boundaries of its pieces.
            Its state is that before the first token of the sequence. With boundaries, it has one
            row per piece.
        segment: segment of this rank.
        strategy: strategy of the recipe.
        pieces: number m of microbatches of the sequential strategy.
    """
    run = {"affine": _affine, "gather": _gather, "sequential": _sequential}[strategy.name]
    boundaries = call.cu_seqlens
    N = call.k.shape[0] if boundaries is None else boundaries.shape[0] - 1
    if call.state is None:
        call = with_initial_state(call, rows=N)
    state = call.state
    if boundaries is None:
        return run(_FirstPiece(call=call, initial=state), segment, strategy, pieces)
    size, rows = int(boundaries[1]), torch.arange(N, device=call.k.device)
    first_call = _sliced(call, slice(0, size), state=None, cu_seqlens=None)
    first = _FirstPiece(call=first_call, initial=state.select(rows[:1]))
    if N == 1:
        return run(first, segment, strategy, pieces)
    later, state = boundaries[1:] - boundaries[1], state.select(rows[1:])
    outputs, states = _run(_sliced(call, slice(size, None), state=state, cu_seqlens=later))
    first = replace(first, last_piece=states.select(rows[N - 2 : N - 1]))
    y, final = run(first, segment, strategy, pieces)
    return torch.cat([y, outputs], dim=1), join_states([final, states])


def _sliced(call: Problem, tokens: slice, **changed: Any) -> Problem:
    return replace(
        call,
        **changed,
        q=call.q[:, tokens],
        k=call.k[:, tokens],
        v=call.v[:, tokens],
        gates={name: x[:, tokens] for name, x in call.gates.items()},
    )


def _run(call: Problem) -> tuple[Tensor, State]:
    with keep_saved_tensors(call.bound.uses_inner_autograd):
        y, final = memorise(replace(call, output_final_state=True))
    assert final is not None
    return y, final


def keep_saved_tensors(inner_gradients: bool) -> AbstractContextManager[None]:
    """Store saved tensors without hooks of a checkpoint if a run may take inner gradients.

    A checkpoint around the layer would otherwise recompute the layer and its exchanges during an
    inner gradient, on this rank only.
    """
    if inner_gradients and torch.is_grad_enabled():
        return saved_tensors_hooks(_identity, _identity)
    return nullcontext()


def _identity(x: Tensor) -> Tensor:
    return x


# -- strategies ----------------------------------------------------------------------------------


def _sequential(
    first: _FirstPiece, segment: Segment, strategy: Strategy, pieces: int
) -> tuple[Tensor, State]:
    """Receive, run and send, piece by piece."""
    exchange, link = segment.exchange, segment.exchange.link
    call = first.call
    plan = pieces_for(call, pieces)
    if first.last_piece is not None and not link.last:
        for row_pieces in plan:
            for piece in row_pieces:
                exchange.send_state(slice_state(first.last_piece, piece))
    outputs: list[Tensor] = []
    states: list[list[State]] = []
    for row_pieces in plan:
        row: list[Tensor] = []
        states.append([])
        for piece in row_pieces:
            earlier = exchange.recv_state() if link.rank else slice_state(first.initial, piece)
            y, final = _run(replace(slice_call(call, piece), state=earlier))
            if first.last_piece is None and not link.last:
                exchange.send_state(final)
            row.append(y)
            states[-1].append(final)
        outputs.append(torch.cat(row, dim=2) if len(row) > 1 else row[0])
    return torch.cat(outputs) if len(outputs) > 1 else outputs[0], join_pieces(states)


def _initial_segment_state(first: _FirstPiece, segment: Segment) -> State:
    """Return the state before this rank's first token, with zero weights and no associations."""
    initial = first.initial
    position = segment.position(initial.position)
    host_position = segment.host_position
    if host_position is not None:
        host_position = (
            None if initial.host_position is None else host_position + initial.host_position
        )
    blank = replace(
        initial,
        weights=tuple(torch.zeros_like(w) for w in initial.weights),
        algorithm_state={
            n: tuple(torch.zeros_like(w) for w in slot)
            for n, slot in initial.algorithm_state.items()
        },
        normalizer=None if initial.normalizer is None else torch.zeros_like(initial.normalizer),
        buffer=None,
        position=position,
        cache={},
    )
    return blank.with_position(host_position)


def _run_with_engine(call: Problem, run: Run, state: State) -> tuple[Tensor, State]:
    """Run a call with another `BoundRecipe.run`."""
    bound = replace(call.bound, run=run, decode_token=None, fla_operator=None)
    return _run(replace(call, bound=bound, state=state, trusted=False))


def _gather(
    first: _FirstPiece, segment: Segment, strategy: Strategy, pieces: int
) -> tuple[Tensor, State]:
    """Run with the associations of earlier ranks as a state."""
    run, initial = first.call.bound.run, first.initial.buffer
    last_piece = None if first.last_piece is None else first.last_piece.buffer

    def run_segment(problem: Problem) -> tuple[Tensor, State]:
        return run(with_earlier_associations(problem, segment, initial, last_piece))

    return _run_with_engine(first.call, run_segment, _initial_segment_state(first, segment))


def _affine(
    first: _FirstPiece, segment: Segment, strategy: Strategy, pieces: int
) -> tuple[Tensor, State]:
    """Run from zero and from the identity, then add the gathered contributions."""
    assert strategy.transition is not None
    last_piece = first.last_piece
    run = affine_run(
        first.call.bound.run,
        strategy.transition,
        segment,
        joined_weights(first.initial),
        None if last_piece is None else joined_weights(last_piece),
    )

    def run_segment(problem: Problem) -> tuple[Tensor, State]:
        buffer = None if last_piece is None else last_piece.buffer
        return run(with_earlier_associations(problem, segment, first.initial.buffer, buffer))

    return _run_with_engine(first.call, run_segment, _initial_segment_state(first, segment))


# -- gathered associations -------------------------------------------------------------------------


def with_earlier_associations(
    problem: Problem, segment: Segment, initial: Buffer | None, last_piece: Buffer | None
) -> Problem:
    """Return the problem of this rank's tokens with the associations of earlier ranks as its state.

    ``initial`` are those before the sequence. ``last_piece`` are those of a later piece of this
    segment, which the next rank continues.
    """
    span = problem.recipe.buffer_size
    if span == 0:
        return problem
    bound = problem.bound
    token_invariant = bound.constants.keys() | {name for _, name, _ in bound.learned_rates}
    slope = problem.recipe.memory.slope_gate
    stored = {name: x for name, x in problem.rates.items() if name != slope}
    rates = {name: x for name, x in stored.items() if name not in token_invariant}
    tokens = _by_name(problem.k, problem.v, rates)
    tensors, mask = _gathered(tokens, initial, last_piece, segment, span)
    history = problem.recipe.num_past_associations
    if span is not None and history is not None:
        mask = mask & (torch.arange(span, 0, -1, device=mask.device) <= history)
    rates_by_token: dict[str, Tensor] = {}
    for name, x in stored.items():
        if name in rates:
            rates_by_token[name] = tensors[f"rate {name}"]
        else:
            expanded = x[:, :1].expand(-1, mask.shape[1], *x.shape[2:])
            rates_by_token[name] = torch.where(_broadcast_mask(mask, expanded), expanded, 0.0)
    buffer = Buffer(k=tensors["k"], v=tensors["v"], rates=rates_by_token, mask=mask)
    if not mask.shape[1]:
        return problem
    return replace(problem, state=replace(problem.state, buffer=buffer))


def _by_name(k: Tensor, v: Tensor, rates: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {"k": k, "v": v, **{f"rate {name}": x for name, x in rates.items()}}


def _gathered(
    tokens: Mapping[str, Tensor],
    initial: Buffer | None,
    last_piece: Buffer | None,
    segment: Segment,
    n: int | None,
) -> tuple[dict[str, Tensor], Tensor]:
    """Return tensors ``[B, n, H, ...]`` of earlier ranks by name, and the mask of valid tokens.

    Tensors of one dtype share an exchange.
    """
    tensors: dict[str, Tensor] = {}
    mask = torch.empty(0)
    for dtype in dict.fromkeys(x.dtype for x in tokens.values()):
        group = {name: x for name, x in tokens.items() if x.dtype == dtype}

        def from_buffer(
            buffer: Buffer, names: Iterable[str] = group, dtype: torch.dtype = dtype
        ) -> Tensor:
            stored = _by_name(buffer.k, buffer.v, buffer.rates)
            return _concat_channels([stored[name] for name in names]).to(dtype)

        earlier = None if initial is None else (from_buffer(initial), initial.mask)
        last_tokens = None if last_piece is None else from_buffer(last_piece)
        gathered, mask = segment.preceding_tokens(
            _concat_channels(list(group.values())), n, earlier, last_tokens
        )
        sizes = [math.prod(x.shape[3:]) for x in group.values()]
        for (name, x), piece in zip(group.items(), gathered.split(sizes, -1), strict=True):
            tensors[name] = piece.reshape(*piece.shape[:3], *x.shape[3:])
    return tensors, mask


def _concat_channels(tensors: Sequence[Tensor]) -> Tensor:
    """Concatenate tensors ``[B, T, H, ...]`` as channels ``[B, T, H, n]``."""
    return torch.cat([x.flatten(3) if x.dim() > 3 else x[..., None] for x in tensors], -1)


def _broadcast_mask(mask: Tensor, x: Tensor) -> Tensor:
    return mask.view(*mask.shape, *(1,) * (x.dim() - 2))
