"""A call and its state cut into rows and heads, which are independent of each other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from recollect.parallel.functions import filled, parts_of
from recollect.recall.bound import bind
from recollect.recall.call import Call
from recollect.state.state import State, join_states

__all__ = ["Piece", "cut", "cut_state", "join", "pieces_for"]


@dataclass(frozen=True)
class Piece:
    """Some rows and some heads of a call.

    Attributes:
        rows, heads: of memories; ``None`` for all heads.
    """

    rows: slice
    heads: slice | None


def pieces_for(call: Call, count: int) -> list[list[Piece]]:
    """At most ``count`` pieces of a dense call: rows first, then heads; row by row.

    Args:
        call: without packed documents.
        count: m.
    """
    B, H = call.k.shape[0], call.bound.sized.H
    down = max(n for n in range(1, min(B, count) + 1))
    across = max(n for n in range(1, H + 1) if n * down <= count or n == 1)
    heads = [None] if across == 1 else _spans(H, across)
    return [[Piece(rows, one) for one in heads] for rows in _spans(B, down)]


def _spans(size: int, parts: int) -> list[slice]:
    ends = [size * i // parts for i in range(parts + 1)]
    return [slice(a, b) for a, b in pairwise(ends)]


def cut(call: Call, piece: Piece) -> Call:
    """The call of a piece, without its state."""
    at, rows = call.bound.sized, piece.rows

    def pick(x: Tensor) -> Tensor:
        return x[rows] if piece.heads is None else x[rows, :, piece.heads]

    made = replace(
        call,
        q=call.q[rows],
        k=pick(call.k),
        v=pick(call.v),
        gates={name: pick(x) for name, x in call.gates.items()},
        init=None,
        state=None,
        lengths=None if call.lengths is None else call.lengths[rows],
        places=None if call.places is None else call.places[rows],
    )
    if piece.heads is None:
        return made
    heads = piece.heads
    group = call.q.shape[2] // at.H
    count = heads.stop - heads.start
    return replace(
        made,
        bound=bind(
            at.recipe,
            H=count,
            K=at.K,
            V=at.V,
            method=call.bound.method,
            precision=call.bound.precision,
        ),
        q=made.q[:, :, heads.start * group : heads.stop * group],
        params={name: x[heads] for name, x in call.params.items()},
    )


def cut_state(state: State, piece: Piece) -> State:
    """The state of a piece."""
    rows, heads = piece.rows, piece.heads
    state = replace(state, cache={}).map(lambda x: x[rows])
    if heads is None:
        return state
    count = heads.stop - heads.start
    return _headwise([state], lambda x, dim: x[0].narrow(dim, heads.start, count), count)


def join(states: Sequence[Sequence[State]]) -> State:
    """The state of a call from those of its pieces."""
    H = sum(state.sizes[0] for state in states[0])
    rows = [_headwise(each, torch.cat, H) if len(each) > 1 else each[0] for each in states]
    return rows[0] if len(rows) == 1 else join_states(rows)


def _headwise(states: Sequence[State], f: Callable[[list[Tensor], int], Tensor], H: int) -> State:
    """``f`` of tensors of several states and the axis of their heads; others are the first's."""
    first = states[0]
    columns = zip(*(parts_of(replace(state, cache={})) for state in states), strict=True)
    axes = _axes(first)
    made = [f(list(x), axes[id(x[0])]) if id(x[0]) in axes else x[0] for x in columns]
    return replace(filled(replace(first, cache={}), made), sizes=(H, *first.sizes[1:]))


def _axes(state: State) -> dict[int, int]:
    """The axis of the heads by the identity of each tensor that has one."""
    slots = [x for slot in state.slots.values() for x in slot]
    scales = [x for x in (state.ones, state.log_scale) if x is not None]
    first = [*state.weights, *slots, *scales]  # [B, H, ...]
    second: list[Tensor] = []  # [B, n, H, ...]
    for kept in (state.buffer, state.dual):
        if kept is not None:
            second += [x for x in parts_of(kept) if x is not kept.mask]
    return {**{id(x): 1 for x in first}, **{id(x): 2 for x in second}}
