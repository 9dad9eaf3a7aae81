"""Ranks that share a sequence, and messages between neighbours."""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol
from weakref import ReferenceType, WeakKeyDictionary, ref

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

__all__ = ["Group", "Link", "Ranks", "pickle_meta", "rank_group"]

Group = dist.ProcessGroup | DeviceMesh | None
"""A group of processes, a mesh of one dimension, or ``None`` for all processes."""


class Ranks(Protocol):
    """Interface of `Link`, which the planner also implements without processes."""

    @property
    def rank(self) -> int:
        """Rank of this process."""
        ...

    @property
    def ranks(self) -> int:
        """Number of ranks R."""
        ...

    @property
    def last(self) -> bool:
        """Whether this rank has the end of the sequence."""
        ...

    def numbers(self, values: Sequence[int], device: torch.device) -> list[list[int]]:
        """Gather integers, one list per rank."""
        ...

    def gather(self, x: Tensor) -> Tensor:
        """Gather ``x`` as ``[R, ...]``."""
        ...

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """Sum ``x [R, ...]`` over ranks, and return this rank's entry."""
        ...

    def send_meta(self, state: Any, to: int, device: torch.device) -> None:
        """Send the types and shapes of a state, before its tensors."""
        ...

    def isend(self, x: Tensor, to: int) -> None:
        """Send without waiting."""
        ...

    def recv(self, x: Tensor, of: int) -> Tensor:
        """Receive into ``x``."""
        ...

    def flush(self) -> None:
        """Wait until all messages have been received."""
        ...


@dataclass(eq=False)
class Link:
    """Ranks that share a sequence. Rank r has the r-th segment.

    Attributes:
        group_reference: weak reference to the process group, which may be destroyed.
        rank: rank of this process in the group.
        ranks: number of ranks R.
        pending: messages in transit, with their tensors.
    """

    group_reference: ReferenceType[dist.ProcessGroup]
    rank: int
    ranks: int
    pending: deque[tuple[Any, Tensor]] = field(default_factory=deque[tuple[Any, Tensor]])

    @property
    def group(self) -> dist.ProcessGroup:
        """Processes of the ranks."""
        group = self.group_reference()
        assert group is not None, "the process group was destroyed"
        return group

    @property
    def last(self) -> bool:
        """Whether this rank has the end of the sequence."""
        return self.rank == self.ranks - 1

    def numbers(self, values: Sequence[int], device: torch.device) -> list[list[int]]:
        """Gather integers, one list per rank."""
        return self.gather(torch.tensor(values, device=device)).tolist()

    def gather(self, x: Tensor) -> Tensor:
        """Gather ``x`` as ``[R, ...]``."""
        x = x.contiguous()
        pieces = [torch.empty_like(x) for _ in range(self.ranks)]
        dist.all_gather(pieces, x, group=self.group)
        return torch.stack(pieces)

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """Sum ``x [R, ...]`` over ranks, and return this rank's entry."""
        values = torch.empty_like(x[0], memory_format=torch.contiguous_format)
        dist.reduce_scatter(values, list(x.contiguous().unbind(0)), group=self.group)
        return values

    def send_meta(self, state: Any, to: int, device: torch.device) -> None:
        """Send the types and shapes of a state, before its tensors."""
        head = torch.frombuffer(bytearray(pickle_meta(state)), dtype=torch.uint8).to(device)
        self.isend(torch.tensor([head.numel()], device=device), to)
        self.isend(head, to)

    def isend(self, x: Tensor, to: int) -> None:
        """Send without waiting."""
        while self.pending and self.pending[0][0].is_completed():
            self.pending.popleft()
        self.pending.append((dist.isend(x, group=self.group, group_dst=to), x))

    def recv(self, x: Tensor, of: int) -> Tensor:
        """Receive into ``x``."""
        dist.recv(x, group=self.group, group_src=of)
        return x

    def flush(self) -> None:
        """Wait until all messages have been received."""
        while self.pending:
            self.pending.popleft()[0].wait()


def pickle_meta(state: Any) -> bytes:
    """Return a pickled state of meta tensors."""
    return pickle.dumps(state.map(lambda x: torch.empty_like(x, device="meta")))


_links: WeakKeyDictionary[dist.ProcessGroup, Link] = WeakKeyDictionary()


def rank_group(group: Group) -> Link:
    """Return the ranks of a group.

    Args:
        group: process group, or mesh of one dimension; ``None`` is all processes.

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
                f"the mesh must have one dimension, not {group.ndim}: select one, e.g. "
                f"mesh[{(group.mesh_dim_names or ('context',))[0]!r}]"
            )
        group = group.get_group()
    group = dist.group.WORLD if group is None else group
    rank = dist.get_rank(group)
    if rank < 0 or group is None:
        raise ValueError("this process is not in the group that shares the sequence")
    if group not in _links:
        _links[group] = Link(ref(group), rank, dist.get_world_size(group))
    return _links[group]
