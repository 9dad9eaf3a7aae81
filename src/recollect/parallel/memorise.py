"""A rank's part of one `recollect.recall`: which way it goes, and what it exchanges on the way."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from recollect.engines.common.problem import Problem, state_dtype
from recollect.parallel.affine import Run, affine_run, joined_weights
from recollect.parallel.gathered import behind
from recollect.parallel.pieces import cut, cut_state, join, pieces_for
from recollect.parallel.segment import Segment
from recollect.parallel.ways import Way
from recollect.recall.call import Call
from recollect.recall.recall import memorise
from recollect.state.state import State, initial_state, join_states

__all__ = ["memorise_segment", "own_saved"]


@dataclass(frozen=True, kw_only=True)
class _First:
    """This rank's first piece and what surrounds it.

    Attributes:
        call: dense, of the tokens up to the first border.
        given: before the first token of all, one row per row of ``call``.
        rest: after the last piece, where there is more than one.
    """

    call: Call
    given: State
    rest: State | None


def memorise_segment(
    call: Call, segment: Segment, way: Way, *, pieces: int
) -> tuple[Tensor, State]:
    """Outputs of a rank's tokens, and the state after each of its pieces (rows, without documents).

    Args:
        call: of this rank's tokens: dense rows, or one row with the borders of its pieces. Its
            state is that before the first token of all; with borders, that before each piece (of
            the first: before the first token of all).
        segment: this rank's.
        way: how the memory goes from rank to rank.
        pieces: m, how many pieces a hand-over is cut into.
    """
    runs = {"affine": _affine, "gather": _gather, "hand_over": _hand_over}
    state = call.state
    if state is None:
        rows = call.k.shape[0] if call.cu_seqlens is None else call.cu_seqlens.shape[0] - 1
        state = initial_state(
            call.bound.sized,
            B=rows,
            dtype=state_dtype(call.q, call.k, call.v),
            device=call.k.device,
            init=call.init,
        )
        call = replace(call, init=None, state=state)
    borders = call.cu_seqlens
    if borders is None:
        y, after = runs[way.name](_First(call=call, given=state, rest=None), segment, way, pieces)
        return y, after
    N, size = borders.shape[0] - 1, int(borders[1])
    rows = torch.arange(N, device=call.k.device)
    first = replace(_sliced(call, slice(0, size)), cu_seqlens=None)
    first = replace(first, state=None)
    given = state.select(rows[:1])
    if N == 1:
        return runs[way.name](_First(call=first, given=given, rest=None), segment, way, pieces)
    rest = replace(
        _sliced(call, slice(size, None)),
        cu_seqlens=borders[1:] - borders[1],
        state=state.select(rows[1:]),
    )
    said, states = _run(rest)
    last = states.select(rows[N - 2 : N - 1])
    y, after = runs[way.name](_First(call=first, given=given, rest=last), segment, way, pieces)
    return torch.cat([y, said], dim=1), _stacked(after, states)


def _stacked(first: State, rest: State) -> State:
    return join_states([replace(first, cache={}), replace(rest, cache={})])


def _sliced(call: Call, tokens: slice) -> Call:
    return replace(
        call,
        q=call.q[:, tokens],
        k=call.k[:, tokens],
        v=call.v[:, tokens],
        gates={name: x[:, tokens] for name, x in call.gates.items()},
    )


def _run(call: Call) -> tuple[Tensor, State]:
    with own_saved(call.bound.inner_gradients):
        y, after = memorise(replace(call, output_state=True))
    assert after is not None
    return y, after


def own_saved(inner_gradients: bool) -> AbstractContextManager[None]:
    """Where a run may take gradients on its way, what it saves is kept as it is.

    A checkpoint around the layer would recompute all of it then and there, exchanges and all, at
    this rank alone.

    Args:
        inner_gradients: whether it may.
    """
    if inner_gradients and torch.is_grad_enabled():
        return saved_tensors_hooks(_same, _same)
    return nullcontext()


def _same(x: Tensor) -> Tensor:
    return x


# -- the ways -------------------------------------------------------------------------------------


def _hand_over(first: _First, segment: Segment, way: Way, pieces: int) -> tuple[Tensor, State]:
    """Piece by piece: take, run, hand on."""
    exchange, link = segment.exchange, segment.exchange.link
    call = first.call
    plan = pieces_for(call, pieces)
    if first.rest is not None and not link.last:
        for several in plan:
            for piece in several:
                exchange.hand(cut_state(first.rest, piece))
    said: list[Tensor] = []
    states: list[list[State]] = []
    for several in plan:
        row: list[Tensor] = []
        states.append([])
        for piece in several:
            before = exchange.take() if link.rank else cut_state(first.given, piece)
            y, after = _run(replace(cut(call, piece), state=before))
            if first.rest is None and not link.last:
                exchange.hand(after)
            row.append(y)
            states[-1].append(after)
        said.append(torch.cat(row, dim=2) if len(row) > 1 else row[0])
    return torch.cat(said) if len(said) > 1 else said[0], join(states)


def _placed(first: _First, segment: Segment) -> State:
    """The state before this rank's first token, but for weights and associations, which are 0."""
    given = first.given
    position = segment.position(given.position)
    seen = segment.seen
    if seen is not None:
        seen = None if given.seen is None else seen + given.seen
    blank = replace(
        given,
        weights=tuple(torch.zeros_like(w) for w in given.weights),
        slots={n: tuple(torch.zeros_like(w) for w in slot) for n, slot in given.slots.items()},
        ones=None if given.ones is None else torch.zeros_like(given.ones),
        buffer=None,
        position=position,
        cache={},
    )
    return blank.stating(seen)


def _through(call: Call, run: Run, state: State) -> tuple[Tensor, State]:
    """A call by another run of its engine."""
    engine = replace(call.bound.engine, run=run, token=None)
    return _run(
        replace(call, bound=replace(call.bound, engine=engine, offer=None), state=state, sure=False)
    )


def _gather(first: _First, segment: Segment, way: Way, pieces: int) -> tuple[Tensor, State]:
    """With the associations of earlier ranks as a state."""
    run, given = first.call.bound.engine.run, first.given.buffer
    rest = None if first.rest is None else first.rest.buffer

    def across(problem: Problem) -> tuple[Tensor, State]:
        return run(behind(problem, segment, given, rest))

    return _through(first.call, across, _placed(first, segment))


def _affine(first: _First, segment: Segment, way: Way, pieces: int) -> tuple[Tensor, State]:
    """From zero and from the identity, then what the gather found is added."""
    assert way.transition is not None
    rest = first.rest
    run = affine_run(
        first.call.bound.engine.run,
        way.transition,
        segment,
        joined_weights(first.given),
        None if rest is None else joined_weights(rest),
    )

    def across(problem: Problem) -> tuple[Tensor, State]:
        buffer = None if rest is None else rest.buffer
        return run(behind(problem, segment, first.given.buffer, buffer))

    return _through(first.call, across, _placed(first, segment))
