"""Ranks that share a sequence, and messages between neighbours."""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

__all__ = ["Group", "Link", "meta_of", "rank_group"]

Group = dist.ProcessGroup | DeviceMesh | None
"""A group of processes, a mesh of one dimension, or ``None`` for all processes."""


@dataclass(eq=False)
class Link:
    """Ranks that share a sequence. Rank r has the r-th segment."""

    rank: int  # rank of this process in the group
    ranks: int  # number of ranks R
    # weak reference to the process group, which may be destroyed
    group_reference: Callable[[], dist.ProcessGroup | None]
    # messages in transit, with their tensors
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
        head = torch.frombuffer(bytearray(pickle.dumps(meta_of(state))), dtype=torch.uint8)
        head = head.to(device)
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


def meta_of(state: Any) -> Any:
    """Return a state of meta tensors."""
    return state.map(lambda x: torch.empty_like(x, device="meta"))


_links: WeakKeyDictionary[dist.ProcessGroup, Link] = WeakKeyDictionary()


def rank_group(group: Group) -> Link:
    """Return the ranks of a group. Raise ValueError unless this process is in one."""
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
        _links[group] = Link(rank, dist.get_world_size(group), ref(group))
    return _links[group]
