"""What ranks that hold one sequence send each other, with the reverse way in the backward pass.

Every rank calls the same exchanges in the same order. In the backward pass the order is reversed,
and no exchange may be left out because a rank had no use for what it received: so the exchanges of
one call form a chain (each takes a number that the one before returned), and `Exchange.tie` hangs
its end on the outputs.

Messages from rank r to r + 1 are sent without waiting for the receiver.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from recollect.parallel.functions import (
    Begin,
    Gather,
    Hand,
    Mapped,
    Share,
    Take,
    Tie,
    filled,
    parts_of,
)
from recollect.parallel.link import Ranks
from recollect.state.state import State

__all__ = ["Exchange"]


class Exchange:
    """The exchanges of one call, one after the other.

    Args:
        link: the ranks.
        inputs: tensors of the call; whoever asks for gradients of one makes all ranks exchange.
        shared: tensors that are the same on all ranks, and get a gradient on each.
    """

    def __init__(self, link: Ranks, *inputs: Tensor, shared: Sequence[Tensor] = ()) -> None:
        self.link = link
        start = torch.zeros((), device=inputs[0].device, requires_grad=torch.is_grad_enabled())
        chain = Begin.apply(len(shared), start, *inputs, *shared)
        self.token = cast("Tensor", chain)

    def gather(self, x: Tensor) -> Tensor:
        """Everybody's ``x [R, ...]``, which has one shape on all ranks."""
        gathered, self.token = cast("Any", Gather.apply(self.link, self.token, x))
        return gathered

    def numbers(self, *values: int) -> list[list[int]]:
        """Everybody's whole numbers, rank by rank."""
        return self.link.numbers(values, self.token.device)

    def counts(self, x: Tensor) -> Tensor:
        """Everybody's whole numbers ``x``, ``[R, ...]``."""
        return self.link.gather(x)

    def hand(self, state: Mapped) -> None:
        """Send a state to the next rank."""
        state = _bare(state)
        self.token = cast("Tensor", Hand.apply(self.link, state, self.token, *parts_of(state)))

    def take(self) -> Any:
        """Receive a state from the rank before."""
        shapes: list[Any] = []
        self.token, *tensors = cast("Any", Take.apply(self.link, shapes, self.token))
        return filled(shapes[0], tensors)

    def share(self, state: Mapped | None, of: int) -> Any:
        """The state of rank ``of``, at all ranks."""
        state = None if state is None or self.link.rank != of else _bare(state)
        shapes: list[Any] = [] if state is None else [state]
        tensors = [] if state is None else parts_of(state)
        self.token, *shared = cast("Any", Share.apply(self.link, of, shapes, self.token, *tensors))
        return filled(shapes[0], shared)

    def tie(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """The call's outputs, whose gradients set the exchanges of the backward pass going."""
        if not torch.is_grad_enabled():
            self.link.flush()
            return tensors
        return cast("tuple[Tensor, ...]", Tie.apply(self.token, *tensors))


def _bare(state: Mapped) -> Mapped:
    """Without what the next engine can do without."""
    return replace(state, cache={}) if isinstance(state, State) else state
