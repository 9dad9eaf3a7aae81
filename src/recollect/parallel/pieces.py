"""Split a call and its state into rows and heads, which are independent of each other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from recollect.engines.common.problem import Problem
from recollect.functional.binding import bind
from recollect.state.state import State, join_states

__all__ = ["Piece", "join_pieces", "pieces_for", "slice_call", "slice_state"]


@dataclass(frozen=True)
class Piece:
    """Some rows and some heads of a call."""

    rows: slice  # batch elements
    heads: slice | None  # memories; None for all


def pieces_for(call: Problem, count: int) -> list[list[Piece]]:
    """Split a dense call into at most ``count`` pieces, by rows first and then by heads."""
    B, H = call.k.shape[0], call.bound.H
    num_row_pieces = max(1, min(B, count))
    num_head_pieces = max(1, min(H, count // num_row_pieces))
    heads = [None] if num_head_pieces == 1 else _split_ranges(H, num_head_pieces)
    return [[Piece(rows, one) for one in heads] for rows in _split_ranges(B, num_row_pieces)]


def _split_ranges(size: int, parts: int) -> list[slice]:
    ends = [size * i // parts for i in range(parts + 1)]
    return [slice(a, b) for a, b in pairwise(ends)]


def slice_call(call: Problem, piece: Piece) -> Problem:
    """Return the call of a piece, without its state."""
    bound, rows = call.bound, piece.rows

    def pick(x: Tensor) -> Tensor:
        return x[rows] if piece.heads is None else x[rows, :, piece.heads]

    sliced = replace(
        call,
        q=call.q[rows],
        k=pick(call.k),
        v=pick(call.v),
        gates={name: pick(x) for name, x in call.gates.items()},
        initial_memory=None,
        state=None,
        lengths=None if call.lengths is None else call.lengths[rows],
        source_index=None if call.source_index is None else call.source_index[rows],
    )
    if piece.heads is None:
        return sliced
    heads = piece.heads
    group = call.q.shape[2] // bound.H
    count = heads.stop - heads.start
    return replace(
        sliced,
        bound=bind(
            bound.recipe,
            H=count,
            K=bound.K,
            V=bound.V,
            engine=bound.requested_engine,
            precision=bound.precision,
        ),
        q=sliced.q[:, :, heads.start * group : heads.stop * group],
        params={name: x[heads] for name, x in call.params.items()},
    )


def slice_state(state: State, piece: Piece) -> State:
    """Return the state of a piece."""
    rows, heads = piece.rows, piece.heads
    state = replace(state, cache={}).map(lambda x: x[rows])
    if heads is None:
        return state
    count = heads.stop - heads.start
    return _map_head_axis([state], lambda x, dim: x[0].narrow(dim, heads.start, count), count)


def join_pieces(states: Sequence[Sequence[State]]) -> State:
    """Return the state of a call from the states of its pieces."""
    H = sum(state.sizes[0] for state in states[0])
    rows = [_map_head_axis(row, torch.cat, H) if len(row) > 1 else row[0] for row in states]
    return rows[0] if len(rows) == 1 else join_states(rows)


def _map_head_axis(
    states: Sequence[State], f: Callable[[list[Tensor], int], Tensor], H: int
) -> State:
    """Apply ``f`` to corresponding tensors with heads, and to the axis of the heads."""
    first = states[0]
    columns = zip(*(replace(state, cache={}).tensors() for state in states), strict=True)
    axes = _axes(first)
    sliced = [f(list(x), axes[id(x[0])]) if id(x[0]) in axes else x[0] for x in columns]
    return replace(replace(first, cache={}).with_tensors(sliced), sizes=(H, *first.sizes[1:]))


def _axes(state: State) -> dict[int, int]:
    """Return the axis of the heads by the `id` of each tensor with heads."""
    slots = [x for slot in state.algorithm_state.values() for x in slot]
    scales = [x for x in (state.normalizer, state.log_scale) if x is not None]
    by_head = [*state.weights, *slots, *scales]  # [B, H, ...]
    by_association: list[Tensor] = []  # [B, n, H, ...]
    for stored in (state.buffer, state.kernel_rows):
        if stored is not None:
            by_association += [x for x in stored.flatten()[1] if x is not stored.mask]
    return {**{id(x): 1 for x in by_head}, **{id(x): 2 for x in by_association}}
