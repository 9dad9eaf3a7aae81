"""Exchanges between ranks as autograd functions: each backward pass is the reverse exchange."""

from __future__ import annotations

import functools
import io
import pickle
from collections.abc import Sequence
from typing import Any, Protocol, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from recollect.choices.gradients import Backward, HandWritten
from recollect.choices.member import RecipeError
from recollect.parallel.link import Link, Ranks, header

__all__ = [
    "Begin",
    "Gather",
    "Hand",
    "Mapped",
    "Share",
    "Take",
    "Tie",
    "filled",
    "once_here",
    "parts_of",
]


class Mapped(Protocol):
    """A state: data that applies a function to each of its tensors, always in one order."""

    def map(self, f: Any) -> Any: ...


S = TypeVar("S", bound=Mapped)


# -- states as messages ---------------------------------------------------------------------------


def parts_of(state: Mapped) -> list[Tensor]:
    """Every tensor of a state, in the order in which its `map` meets them."""
    found: list[Tensor] = []

    def see(x: Tensor) -> Tensor:
        found.append(x)
        return x

    state.map(see)
    return found


def filled(shapes: S, tensors: Sequence[Tensor]) -> S:
    """A state with other tensors."""
    given = iter(tensors)
    return cast("S", shapes.map(lambda _: next(given)))


def _read(data: Tensor) -> Any:
    return pickle.load(io.BytesIO(data.cpu().numpy().tobytes()))


def _packed(tensors: Sequence[Tensor]) -> Tensor:
    """The bytes of several tensors in one."""
    flat = [x.detach().contiguous().flatten().view(torch.uint8) for x in tensors]
    return torch.cat(flat) if flat else torch.empty(0, dtype=torch.uint8)


def _unpacked(data: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    sizes = [x.numel() * x.element_size() for x in like]
    # Pieces are copied: bytes at any offset are not aligned for wider numbers.
    pieces = zip(data.split(sizes), like, strict=True)
    return [piece.clone().view(x.dtype).view(x.shape) for piece, x in pieces]


def _count(like: Sequence[Tensor]) -> int:
    return sum(x.numel() * x.element_size() for x in like)


def _moving(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Those whose gradients travel: all that are real numbers, so that both ends agree."""
    return [x for x in tensors if x.is_floating_point()]


def _meta(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [torch.empty_like(x, device="meta") for x in tensors]


def _flush_at_the_end(link: Link) -> None:
    """Once this backward pass is over, wait until what it sent has been received."""
    engine = torch.autograd.Variable._execution_engine  # type: ignore[attr-defined]
    engine.queue_callback(link.flush)


def once_here(backward: Backward) -> Backward:
    """A backward pass that talks to other ranks, and refuses to be differentiated again.

    Args:
        backward: of a ``torch.autograd.Function``, below ``@staticmethod``.
    """

    @functools.wraps(backward)
    def wrapped(ctx: Any, *grads: Tensor) -> Any:
        if torch.is_grad_enabled():
            raise RecipeError(
                "gradients of a sequence along several ranks cannot be differentiated again: leave "
                "out create_graph=True, or keep the sequence on one rank"
            )
        return backward(ctx, *grads)

    return wrapped


class Begin(HandWritten):
    """The first number of a chain; it makes gradients of ``inputs`` pass through all of it.

    The last ``shared`` of them receive zeros, so that a rank that had no use for a parameter has a
    gradient of it like the others.
    """

    @staticmethod
    def forward(ctx: Any, shared: int, start: Tensor, *inputs: Tensor) -> Tensor:
        ctx.none = len(inputs) - shared
        ctx.shared = [torch.empty_like(x, device="meta") for x in inputs[ctx.none :]]
        ctx.device = start.device
        return start.clone()

    @staticmethod
    @once_here
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        zeros = (torch.zeros_like(x, device=ctx.device) for x in ctx.shared)
        return None, None, *(None,) * ctx.none, *zeros


class Tie(HandWritten):
    """Tensors as they are, and the last number of a chain with them."""

    @staticmethod
    def forward(ctx: Any, token: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.token = token
        return tuple(x.view_as(x) for x in tensors)

    @staticmethod
    @once_here
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return torch.zeros_like(ctx.token), *grads


class Gather(HandWritten):
    """Everybody's tensor ``[R, ...]``; gradients are summed at the rank whose tensor it was."""

    @staticmethod
    def forward(ctx: Any, link: Ranks, token: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        ctx.link = link
        return link.gather(x), token.clone()

    @staticmethod
    @once_here
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        grad, token = grads
        return None, token, ctx.link.reduce_scatter(grad)


class Hand(HandWritten):
    """Send a state to the next rank; in the backward pass, receive its gradient from there."""

    @staticmethod
    def forward(ctx: Any, link: Ranks, shapes: Mapped, token: Tensor, *tensors: Tensor) -> Tensor:
        ctx.link, ctx.device = link, token.device
        ctx.like = _meta(tensors)
        link.tell(shapes, link.rank + 1, token.device)
        link.post(_packed(tensors).to(token.device), link.rank + 1)
        return token.clone()

    @staticmethod
    @once_here
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        link, like = ctx.link, ctx.like
        moving = _moving(like)
        data = torch.empty(_count(moving), dtype=torch.uint8, device=ctx.device)
        if data.numel():
            link.fetch(data, link.rank + 1)
        received = iter(_unpacked(data, moving))
        back = [next(received) if x.is_floating_point() else None for x in like]
        return None, None, grads[0], *back


class Take(HandWritten):
    """Receive a state from the rank before; in the backward pass, send its gradient there."""

    @staticmethod
    def forward(ctx: Any, link: Link, shapes: list[Any], token: Tensor) -> tuple[Tensor, ...]:
        ctx.link, of = link, link.rank - 1
        size = link.fetch(torch.zeros(1, dtype=torch.long, device=token.device), of)
        head = torch.empty(int(size), dtype=torch.uint8, device=token.device)
        shapes.append(_read(link.fetch(head, of)))
        like = parts_of(shapes[0])
        data = torch.empty(_count(like), dtype=torch.uint8, device=token.device)
        tensors = _unpacked(link.fetch(data, of), like)
        ctx.mark_non_differentiable(*(x for x in tensors if not x.is_floating_point()))
        ctx.floating = [x.is_floating_point() for x in tensors]
        return token.clone(), *tensors

    @staticmethod
    @once_here
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        link = ctx.link
        moving = [g for g, real in zip(grads[1:], ctx.floating, strict=True) if real]
        if _count(moving):
            link.post(_packed(moving).to(grads[0].device), link.rank - 1)
            _flush_at_the_end(link)
        return None, None, grads[0]


class Share(HandWritten):
    """One rank's state at all ranks; gradients are summed there."""

    @staticmethod
    def forward(
        ctx: Any, link: Link, of: int, shapes: list[Any], token: Tensor, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.link, ctx.of, ctx.count = link, of, len(tensors)
        device, own = token.device, link.rank == of
        size = torch.zeros(1, dtype=torch.long, device=device)
        head = torch.empty(0, dtype=torch.uint8, device=device)
        if own:
            head = torch.frombuffer(bytearray(header(shapes[0])), dtype=torch.uint8).to(device)
            size.fill_(head.numel())
        dist.broadcast(size, group=link.group, group_src=of)
        head = head if own else torch.empty(int(size), dtype=torch.uint8, device=device)
        dist.broadcast(head, group=link.group, group_src=of)
        if not own:
            shapes.append(_read(head))
        like = parts_of(shapes[0])
        if own:
            data = _packed(tensors).to(device)
        else:
            data = torch.empty(_count(like), dtype=torch.uint8, device=device)
        dist.broadcast(data, group=link.group, group_src=of)
        received = _unpacked(data, like)
        ctx.mark_non_differentiable(*(x for x in received if not x.is_floating_point()))
        ctx.floating = [x.is_floating_point() for x in received]
        return token.clone(), *received

    @staticmethod
    @once_here
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        link, back = ctx.link, []
        for grad, real in zip(grads[1:], ctx.floating, strict=True):
            total = None
            if real:
                total = grad.contiguous().clone()
                dist.reduce(total, group=link.group, group_dst=ctx.of)
            back.append(total)
        return None, None, None, grads[0], *(back if link.rank == ctx.of else ())
