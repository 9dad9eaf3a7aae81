"""Operations on the tensors of a layer's state or of a language model's cache.

`Slots` gives states that grow with the text a fixed number of slots.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from recollect.state.state import State
from recollect.state.tree import align_right

__all__ = [
    "Slots",
    "copy_into",
    "host_position",
    "map_state",
    "snapshot",
    "tensors_of",
    "with_tensors",
]


def _states(state: Any) -> Sequence[Any]:
    return state.states if hasattr(state, "states") else (state,)


def host_position(state: Any) -> int | None:
    """Return the number of tokens of every layer and batch element, if the host knows it."""
    positions = {one.host_position for one in _states(state)}
    return positions.pop() if len(positions) == 1 else None


def tensors_of(state: Any) -> list[Tensor]:
    """Return all tensors of a layer's state or of a cache."""
    return [x for one in _states(state) for x in one.flatten()[1]]


def with_tensors(state: Any, tensors: Iterable[Tensor]) -> Any:
    """Return a copy with other tensors, in the order of `tensors_of`."""
    remaining = iter(tensors)
    if hasattr(state, "states"):
        return state.map(lambda one: one.with_tensors(remaining))
    return state.with_tensors(remaining)


def map_state(state: Any, f: Callable[[Tensor], Tensor]) -> Any:
    """Apply ``f`` to every tensor."""
    return with_tensors(state, [f(x) for x in tensors_of(state)])


def snapshot(state: Any, num_columns: int) -> Any:
    """Return a copy whose host positions are read from its tensors.

    A cache has read ``num_columns`` columns.
    """
    if hasattr(state, "states"):
        return type(state)([snapshot(one, num_columns) for one in state.states], num_columns)
    return type(state).from_dict(state.map(Tensor.clone).to_dict())


def copy_into(first: Any, new_state: Any) -> None:
    """Copy the values of a new state into the tensors of the first state."""
    old_tensors, new_tensors = tensors_of(first), tensors_of(new_state)
    storages = {_storage_id(x) for x in old_tensors}
    # Views of target tensors are cloned before any target is overwritten.
    sources = [
        x.clone() if x is not old and _storage_id(x) in storages else x
        for old, x in zip(old_tensors, new_tensors, strict=True)
    ]
    for old, x in zip(old_tensors, sources, strict=True):
        if x is not old:
            old.copy_(x)


def _storage_id(x: Tensor) -> int:
    """Return an identifier of the storage of a tensor, which its views share."""
    return x.untyped_storage()._cdata  # pyright: ignore[reportPrivateUsage]


# -- states that grow -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Slots:
    """Associations of a state that grows with the text, aligned right in a fixed number of slots.

    Masks mark empty slots, so empty slots on the left do not change a state. A token adds a slot on
    the right, and one empty slot on the left is dropped.
    """

    size: int  # number of slots
    # for every memory in the order of `_memories`, whether its buffer grows, and whether its kernel
    # rows grow
    grows: tuple[tuple[bool, bool], ...]

    @classmethod
    def of(cls, old_state: Any, new_state: Any, size: int) -> Slots:
        """Return slots for the parts of a state that grew with one token."""
        pairs = zip(_memories(old_state), _memories(new_state), strict=True)
        return cls(
            size,
            tuple(
                (_has_grown(a.buffer, b.buffer), _has_grown(a.kernel_rows, b.kernel_rows))
                for a, b in pairs
            ),
        )

    def used(self, state: Any) -> int:
        """Return the largest number of slots of a memory in a state without empty slots."""
        pairs = zip(_memories(state), self.grows, strict=True)
        return max((_num_slots(one, growing) for one, growing in pairs), default=0)

    def fixed(self, state: Any, size: int | None = None) -> Any:
        """Return the state with ``size`` slots (default: `size`): empty ones are on the left."""
        slots, grows = self.size if size is None else size, iter(self.grows)

        def fit(x: Tensor) -> Tensor:
            return align_right(x, slots)

        def fit_memory(memory: State) -> State:
            buffer_grows, rows_grow = next(grows)
            if not (buffer_grows or rows_grow):
                return memory
            buffer, kernel_rows = memory.buffer, memory.kernel_rows
            if buffer_grows and buffer is not None:
                buffer = buffer.map(fit)
            if rows_grow and kernel_rows is not None:
                kernel_rows = kernel_rows.map(fit)
            return replace(
                memory,
                buffer=buffer,
                kernel_rows=kernel_rows,
                cache={},
                position_on_host=None,  # it would imply that there are no empty slots
            )

        if hasattr(state, "states"):
            return state.map(lambda layer: layer.map_memories(fit_memory))
        return state.map_memories(fit_memory)


def _memories(state: Any) -> list[State]:
    memories: list[State] = []

    def record(memory: State) -> State:
        memories.append(memory)
        return memory

    for layer_state in _states(state):
        layer_state.map_memories(record)
    return memories


def _has_grown(old_state: Any, new_state: Any) -> bool:
    return new_state is not None and (
        old_state is None or new_state.k.shape[1] > old_state.k.shape[1]
    )


def _num_slots(memory: State, growing: tuple[bool, bool]) -> int:
    parts = zip((memory.buffer, memory.kernel_rows), growing, strict=True)
    return max((part.k.shape[1] for part, yes in parts if yes and part is not None), default=0)
