"""What ranks that hold one sequence send each other, with the reverse way in the backward pass.

Every rank calls the same exchanges in the same order. In the backward pass the order is reversed,
and no exchange may be left out because a rank had no use for what it received: so the exchanges of
one call form a chain (each takes a number that the one before returned), and `Exchange.tie` hangs
its end on the outputs.

Messages from rank r to r + 1 are sent without waiting for the receiver.
"""

from __future__ import annotations

import functools
import io
import pickle
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from recollect.choices.gradients import Backward, at_full_precision
from recollect.choices.member import RecipeError
from recollect.state.state import State

__all__ = ["Exchange", "Group", "Link", "filled", "link_of", "once_here", "parts_of"]

Group = dist.ProcessGroup | DeviceMesh | None
"""A group of processes, a mesh of one dimension, or ``None`` for all processes."""


class Mapped(Protocol):
    """A state: data that applies a function to each of its tensors, always in one order."""

    def map(self, f: Any) -> Any: ...


S = TypeVar("S", bound=Mapped)


@dataclass(eq=False)
class Link:
    """The ranks that share a sequence: rank r holds the r-th segment.

    Attributes:
        group: of processes.
        rank: of this process in the group.
        ranks: R.
        sent: messages under way, with what they hold.
    """

    group: dist.ProcessGroup
    rank: int
    ranks: int
    sent: deque[tuple[Any, Tensor]] = field(default_factory=deque[tuple[Any, Tensor]])

    @property
    def last(self) -> bool:
        """Whether this rank holds the end of the sequence."""
        return self.rank == self.ranks - 1

    def post(self, x: Tensor, to: int) -> None:
        """Send, and do not wait."""
        while self.sent and self.sent[0][0].is_completed():
            self.sent.popleft()
        self.sent.append((dist.isend(x, group=self.group, group_dst=to), x))

    def fetch(self, x: Tensor, of: int) -> Tensor:
        """Receive into ``x``."""
        dist.recv(x, group=self.group, group_src=of)
        return x

    def flush(self) -> None:
        """Wait until all that was sent has been received."""
        while self.sent:
            self.sent.popleft()[0].wait()


_links: dict[dist.ProcessGroup, Link] = {}


def link_of(group: Group) -> Link:
    """The ranks of a group.

    Args:
        group: of processes, or a mesh of one dimension; ``None`` is all processes.

    Raises:
        ValueError: no process group, a mesh of several dimensions, or a group without this process.
    """
    if not (dist.is_available() and dist.is_initialized()):
        raise ValueError(
            "there are no ranks to share a sequence: start the processes with torchrun and call "
            "torch.distributed.init_process_group first"
        )
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(
                f"a sequence is shared along one dimension of a mesh, and this one has {group.ndim}"
                f": give one of them, e.g. mesh[{(group.mesh_dim_names or ('context',))[0]!r}]"
            )
        group = group.get_group()
    group = dist.group.WORLD if group is None else group
    rank = dist.get_rank(group)
    if rank < 0 or group is None:
        raise ValueError("this process is not in the group that shares the sequence")
    if group not in _links:
        _links[group] = Link(group, rank, dist.get_world_size(group))
    return _links[group]


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


def _header(state: Mapped) -> bytes:
    """A state without numbers."""
    return pickle.dumps(state.map(lambda x: torch.empty_like(x, device="meta")))


def _read(header: Tensor) -> Any:
    return pickle.load(io.BytesIO(header.cpu().numpy().tobytes()))


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

    @at_full_precision
    @functools.wraps(backward)
    def wrapped(ctx: Any, *grads: Tensor) -> Any:
        if torch.is_grad_enabled():
            raise RecipeError(
                "gradients of a sequence along several ranks cannot be differentiated again: leave "
                "out create_graph=True, or keep the sequence on one rank"
            )
        return backward(ctx, *grads)

    return wrapped


class _Begin(torch.autograd.Function):
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


class _Tie(torch.autograd.Function):
    """Tensors as they are, and the last number of a chain with them."""

    @staticmethod
    def forward(ctx: Any, token: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.token = token
        return tuple(x.view_as(x) for x in tensors)

    @staticmethod
    @once_here
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return torch.zeros_like(ctx.token), *grads


class _Gather(torch.autograd.Function):
    """Everybody's tensor ``[R, ...]``; gradients are summed at the rank whose tensor it was."""

    @staticmethod
    def forward(ctx: Any, link: Link, token: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        ctx.link = link
        x = x.contiguous()
        pieces = [torch.empty_like(x) for _ in range(link.ranks)]
        dist.all_gather(pieces, x, group=link.group)
        return torch.stack(pieces), token.clone()

    @staticmethod
    @once_here
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        grad, token = grads
        own = torch.empty_like(grad[0], memory_format=torch.contiguous_format)
        pieces = list(grad.contiguous().unbind(0))
        dist.reduce_scatter(own, pieces, group=ctx.link.group)
        return None, token, own


class _Hand(torch.autograd.Function):
    """Send a state to the next rank; in the backward pass, receive its gradient from there."""

    @staticmethod
    def forward(ctx: Any, link: Link, header: bytes, token: Tensor, *tensors: Tensor) -> Tensor:
        ctx.link, ctx.device = link, token.device
        ctx.like = _meta(tensors)
        head = torch.frombuffer(bytearray(header), dtype=torch.uint8).to(token.device)
        to = link.rank + 1
        link.post(torch.tensor([head.numel()], device=token.device), to)
        link.post(head, to)
        link.post(_packed(tensors).to(token.device), to)
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


class _Take(torch.autograd.Function):
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


class _Share(torch.autograd.Function):
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
            head = torch.frombuffer(bytearray(_header(shapes[0])), dtype=torch.uint8).to(device)
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


class Exchange:
    """The exchanges of one call, one after the other.

    Args:
        link: the ranks.
        inputs: tensors of the call; whoever asks for gradients of one makes all ranks exchange.
        shared: tensors that are the same on all ranks, and get a gradient on each.
    """

    def __init__(self, link: Link, *inputs: Tensor, shared: Sequence[Tensor] = ()) -> None:
        self.link = link
        start = torch.zeros((), device=inputs[0].device, requires_grad=torch.is_grad_enabled())
        chain = _Begin.apply(len(shared), start, *inputs, *shared)
        self.token = cast("Tensor", chain)

    def gather(self, x: Tensor) -> Tensor:
        """Everybody's ``x [R, ...]``, which has one shape on all ranks."""
        gathered, self.token = cast("Any", _Gather.apply(self.link, self.token, x))
        return gathered

    def numbers(self, *values: int) -> list[list[int]]:
        """Everybody's whole numbers, rank by rank."""
        own = torch.tensor(values, device=self.token.device)
        pieces = [torch.empty_like(own) for _ in range(self.link.ranks)]
        dist.all_gather(pieces, own, group=self.link.group)
        return torch.stack(pieces).tolist()

    def counts(self, x: Tensor) -> Tensor:
        """Everybody's whole numbers ``x``, ``[R, ...]``."""
        pieces = [torch.empty_like(x) for _ in range(self.link.ranks)]
        dist.all_gather(pieces, x.contiguous(), group=self.link.group)
        return torch.stack(pieces)

    def hand(self, state: Mapped) -> None:
        """Send a state to the next rank."""
        state = _bare(state)
        self.token = cast(
            "Tensor", _Hand.apply(self.link, _header(state), self.token, *parts_of(state))
        )

    def take(self) -> Any:
        """Receive a state from the rank before."""
        shapes: list[Any] = []
        self.token, *tensors = cast("Any", _Take.apply(self.link, shapes, self.token))
        return filled(shapes[0], tensors)

    def share(self, state: Mapped | None, of: int) -> Any:
        """The state of rank ``of``, at all ranks."""
        state = None if state is None or self.link.rank != of else _bare(state)
        shapes: list[Any] = [] if state is None else [state]
        tensors = [] if state is None else parts_of(state)
        self.token, *shared = cast("Any", _Share.apply(self.link, of, shapes, self.token, *tensors))
        return filled(shapes[0], shared)

    def tie(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """The call's outputs, whose gradients set the exchanges of the backward pass going."""
        if not torch.is_grad_enabled():
            self.link.flush()
            return tensors
        return cast("tuple[Tensor, ...]", _Tie.apply(self.token, *tensors))


def _bare(state: Mapped) -> Mapped:
    """Without what the next engine can do without."""
    return replace(state, cache={}) if isinstance(state, State) else state
