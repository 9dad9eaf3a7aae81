"""The ranks that share a sequence, and messages between neighbours."""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

__all__ = ["Group", "Link", "Ranks", "header", "link_of"]

Group = dist.ProcessGroup | DeviceMesh | None
"""A group of processes, a mesh of one dimension, or ``None`` for all processes."""


class Ranks(Protocol):
    """How a layer's segment talks to the others: over a `Link`, or on paper."""

    @property
    def rank(self) -> int:
        """Of this process."""
        ...

    @property
    def ranks(self) -> int:
        """R."""
        ...

    @property
    def last(self) -> bool:
        """Whether this rank holds the end of the sequence."""
        ...

    def numbers(self, own: Sequence[int], device: torch.device) -> list[list[int]]:
        """Everybody's whole numbers, rank by rank."""
        ...

    def gather(self, x: Tensor) -> Tensor:
        """Everybody's ``x``, ``[R, ...]``."""
        ...

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """The sum over all ranks of this rank's entry of their ``x [R, ...]``."""
        ...

    def tell(self, state: Any, to: int, device: torch.device) -> None:
        """Say what a state is like whose numbers follow."""
        ...

    def post(self, x: Tensor, to: int) -> None:
        """Send, and do not wait."""
        ...

    def fetch(self, x: Tensor, of: int) -> Tensor:
        """Receive into ``x``."""
        ...

    def flush(self) -> None:
        """Wait until all that was sent has been received."""
        ...


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

    def numbers(self, own: Sequence[int], device: torch.device) -> list[list[int]]:
        """Everybody's whole numbers, rank by rank."""
        return self.gather(torch.tensor(own, device=device)).tolist()

    def gather(self, x: Tensor) -> Tensor:
        """Everybody's ``x``, ``[R, ...]``."""
        x = x.contiguous()
        pieces = [torch.empty_like(x) for _ in range(self.ranks)]
        dist.all_gather(pieces, x, group=self.group)
        return torch.stack(pieces)

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """The sum over all ranks of this rank's entry of their ``x [R, ...]``."""
        own = torch.empty_like(x[0], memory_format=torch.contiguous_format)
        dist.reduce_scatter(own, list(x.contiguous().unbind(0)), group=self.group)
        return own

    def tell(self, state: Any, to: int, device: torch.device) -> None:
        """Say what a state is like whose numbers follow."""
        head = torch.frombuffer(bytearray(header(state)), dtype=torch.uint8).to(device)
        self.post(torch.tensor([head.numel()], device=device), to)
        self.post(head, to)

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


def header(state: Any) -> bytes:
    """A state without numbers."""
    return pickle.dumps(state.map(lambda x: torch.empty_like(x, device="meta")))


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
