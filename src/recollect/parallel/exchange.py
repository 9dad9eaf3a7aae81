"""Exchanges between the ranks of one sequence, as autograd functions.

Every rank runs every exchange of a call in one order, and in the reverse order in the backward
pass. A dummy scalar is threaded through all exchanges of a call, and
`Exchange.attach_to_outputs` attaches it to the outputs. Backward then runs every exchange.

Messages from rank r to r + 1 are sent without waiting for the receiver.
"""

from __future__ import annotations

import functools
import pickle
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from recollect.choices.autograd import Backward, CustomFunction
from recollect.messages import RecipeError
from recollect.parallel.link import Link, meta_of
from recollect.state.state import State
from recollect.state.tree import TensorTree

__all__ = ["Exchange", "no_double_backward"]


# -- states as messages ---------------------------------------------------------------------------


def _packed(tensors: Sequence[Tensor]) -> Tensor:
    """Return the bytes of several tensors as one tensor."""
    flat = [x.detach().contiguous().flatten().view(torch.uint8) for x in tensors]
    return torch.cat(flat) if flat else torch.empty(0, dtype=torch.uint8)


def _unpacked(data: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    sizes = [x.numel() * x.element_size() for x in like]
    # Clones are aligned for their dtype; slices of bytes may not be.
    pieces = zip(data.split(sizes), like, strict=True)
    return [piece.clone().view(x.dtype).view(x.shape) for piece, x in pieces]


def _count(like: Sequence[Tensor]) -> int:
    return sum(x.numel() * x.element_size() for x in like)


def _floating(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the tensors with gradients to exchange: all floating-point ones, on both ranks."""
    return [x for x in tensors if x.is_floating_point()]


def _flush_at_the_end(link: Link) -> None:
    """Wait at the end of this backward pass until all its messages have been received."""
    engine = torch.autograd.Variable._execution_engine  # type: ignore[attr-defined]
    engine.queue_callback(link.flush)


def no_double_backward(backward: Backward) -> Backward:
    """Raise if a backward pass with exchanges is differentiated again; below ``@staticmethod``."""

    @functools.wraps(backward)
    def wrapped(ctx: Any, *grads: Tensor) -> Any:
        if torch.is_grad_enabled():
            raise RecipeError(
                "gradients of a sequence over several ranks cannot be differentiated again: leave "
                "out create_graph=True, or keep the sequence on one rank"
            )
        return backward(ctx, *grads)

    return wrapped


class StartChain(CustomFunction):
    """Return the first scalar of a chain of exchanges, which depends on ``inputs``.

    The last ``shared`` inputs receive zero gradients, so a parameter that a rank did not use has a
    gradient on all ranks.
    """

    @staticmethod
    def forward(ctx: Any, shared: int, start: Tensor, *inputs: Tensor) -> Tensor:
        ctx.none = len(inputs) - shared
        ctx.shared = [torch.empty_like(x, device="meta") for x in inputs[ctx.none :]]
        ctx.device = start.device
        return start.clone()

    @staticmethod
    @no_double_backward
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        zeros = (torch.zeros_like(x, device=ctx.device) for x in ctx.shared)
        return None, None, *(None,) * ctx.none, *zeros


class EndChain(CustomFunction):
    """Return tensors unchanged, with the last scalar of a chain attached."""

    @staticmethod
    def forward(ctx: Any, token: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.token = token
        return tuple(x.view_as(x) for x in tensors)

    @staticmethod
    @no_double_backward
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return torch.zeros_like(ctx.token), *grads


class Gather(CustomFunction):
    """Gather a tensor of every rank as ``[R, ...]``; gradients are summed at the source rank."""

    @staticmethod
    def forward(ctx: Any, link: Link, token: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        ctx.link = link
        return link.gather(x), token.clone()

    @staticmethod
    @no_double_backward
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        grad, token = grads
        return None, token, ctx.link.reduce_scatter(grad)


class SendState(CustomFunction):
    """Send a state to the next rank; the backward pass receives its gradient."""

    @staticmethod
    def forward(
        ctx: Any, link: Link, shapes: TensorTree, token: Tensor, *tensors: Tensor
    ) -> Tensor:
        ctx.link, ctx.device = link, token.device
        ctx.like = [torch.empty_like(x, device="meta") for x in tensors]
        link.send_meta(shapes, link.rank + 1, token.device)
        link.isend(_packed(tensors).to(token.device), link.rank + 1)
        return token.clone()

    @staticmethod
    @no_double_backward
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        link, like = ctx.link, ctx.like
        floating = _floating(like)
        data = torch.empty(_count(floating), dtype=torch.uint8, device=ctx.device)
        if data.numel():
            link.recv(data, link.rank + 1)
        received = iter(_unpacked(data, floating))
        grad_tensors = [next(received) if x.is_floating_point() else None for x in like]
        return None, None, grads[0], *grad_tensors


class RecvState(CustomFunction):
    """Receive a state from the previous rank; the backward pass sends its gradient."""

    @staticmethod
    def forward(ctx: Any, link: Link, shapes: list[Any], token: Tensor) -> tuple[Tensor, ...]:
        ctx.link, of = link, link.rank - 1
        size = link.recv(torch.zeros(1, dtype=torch.long, device=token.device), of)
        head = torch.empty(int(size), dtype=torch.uint8, device=token.device)
        shapes.append(pickle.loads(link.recv(head, of).cpu().numpy().tobytes()))
        like = shapes[0].flatten()[1]
        data = torch.empty(_count(like), dtype=torch.uint8, device=token.device)
        tensors = _unpacked(link.recv(data, of), like)
        ctx.mark_non_differentiable(*(x for x in tensors if not x.is_floating_point()))
        ctx.floating = [x.is_floating_point() for x in tensors]
        return token.clone(), *tensors

    @staticmethod
    @no_double_backward
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        link = ctx.link
        floating = [g for g, is_float in zip(grads[1:], ctx.floating, strict=True) if is_float]
        if _count(floating):
            link.isend(_packed(floating).to(grads[0].device), link.rank - 1)
            _flush_at_the_end(link)
        return None, None, grads[0]


class BroadcastState(CustomFunction):
    """Broadcast the state of one rank; gradients are summed at this rank."""

    @staticmethod
    def forward(
        ctx: Any, link: Link, of: int, shapes: list[Any], token: Tensor, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.link, ctx.of, ctx.count = link, of, len(tensors)
        device, is_source = token.device, link.rank == of
        messages = [meta_of(shapes[0]) if is_source else None]
        dist.broadcast_object_list(messages, group=link.group, device=device, group_src=of)
        if not is_source:
            shapes.append(messages[0])
        like = shapes[0].flatten()[1]
        if is_source:
            data = _packed(tensors).to(device)
        else:
            data = torch.empty(_count(like), dtype=torch.uint8, device=device)
        dist.broadcast(data, group=link.group, group_src=of)
        received = _unpacked(data, like)
        ctx.mark_non_differentiable(*(x for x in received if not x.is_floating_point()))
        ctx.floating = [x.is_floating_point() for x in received]
        return token.clone(), *received

    @staticmethod
    @no_double_backward
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        link, totals = ctx.link, []
        for grad, is_float in zip(grads[1:], ctx.floating, strict=True):
            total = None
            if is_float:
                total = grad.contiguous().clone()
                dist.reduce(total, group=link.group, group_dst=ctx.of)
            totals.append(total)
        return None, None, None, grads[0], *(totals if link.rank == ctx.of else ())


# -- a call ----------------------------------------------------------------------------------------


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
