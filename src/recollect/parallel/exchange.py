"""Exchanges between the ranks of one sequence, in the forward and backward pass.

Every rank runs every exchange of a call in one order, and in the reverse order in the backward
pass. A dummy scalar is threaded through all exchanges of a call, and
`Exchange.attach_to_outputs` attaches it to the outputs. Backward then runs every exchange.

Messages from rank r to r + 1 are sent without waiting for the receiver.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from recollect.parallel.functions import (
    BroadcastState,
    EndChain,
    Gather,
    RecvState,
    SendState,
    StartChain,
)
from recollect.parallel.link import Link
from recollect.state.state import State
from recollect.state.tree import TensorTree

__all__ = ["Exchange"]


class Exchange:
    """Exchanges of one call, in order.

    If one of the ``inputs`` of the call requires a gradient, all ranks exchange. ``shared`` tensors
    are equal on all ranks, and get a gradient on each.
    """

    def __init__(self, link: Link, *inputs: Tensor, shared: Sequence[Tensor] = ()) -> None:
        self.link = link
        start = torch.zeros((), device=inputs[0].device, requires_grad=torch.is_grad_enabled())
        chain = StartChain.apply(len(shared), start, *inputs, *shared)
        self.order_token = cast("Tensor", chain)

    def gather(self, x: Tensor) -> Tensor:
        """Gather ``x``, of one shape on all ranks, as ``[R, ...]``."""
        gathered, self.order_token = cast("Any", Gather.apply(self.link, self.order_token, x))
        return gathered

    def send_state(self, state: TensorTree) -> None:
        """Send a state to the next rank."""
        state = _without_cache(state)
        self.order_token = cast(
            "Tensor", SendState.apply(self.link, state, self.order_token, *state.flatten()[1])
        )

    def recv_state(self) -> Any:
        """Receive a state from the previous rank."""
        shapes: list[Any] = []
        self.order_token, *tensors = cast(
            "Any", RecvState.apply(self.link, shapes, self.order_token)
        )
        return shapes[0].with_tensors(tensors)

    def broadcast_state(self, state: TensorTree | None, of: int) -> Any:
        """Broadcast the state of rank ``of``."""
        state = None if state is None or self.link.rank != of else _without_cache(state)
        shapes: list[Any] = [] if state is None else [state]
        tensors = [] if state is None else state.flatten()[1]
        self.order_token, *shared = cast(
            "Any", BroadcastState.apply(self.link, of, shapes, self.order_token, *tensors)
        )
        return shapes[0].with_tensors(shared)

    def attach_to_outputs(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Return the outputs of the call with the chain of exchanges attached."""
        if not torch.is_grad_enabled():
            self.link.flush()
            return tensors
        return cast("tuple[Tensor, ...]", EndChain.apply(self.order_token, *tensors))


def _without_cache(state: TensorTree) -> TensorTree:
    return replace(state, cache={}) if isinstance(state, State) else state
