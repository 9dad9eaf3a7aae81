"""The tensors of a layer's state, or of a language model's cache: one by one, and put back.

And states that grow with the text, in a fixed number of slots (`Slots`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from recollect.state.state import State

__all__ = ["Slots", "counted", "mapped", "put", "seen_of", "tensors_of", "write"]


def _states(state: Any) -> Sequence[Any]:
    return state.states if hasattr(state, "states") else (state,)


def seen_of(state: Any) -> int | None:
    """Tokens that every row of every layer has seen, where the host knows it."""
    seen = {one.seen for one in _states(state)}
    return seen.pop() if len(seen) == 1 else None


def mapped(state: Any, f: Callable[[Tensor], Tensor]) -> Any:
    """Apply ``f`` to every tensor of a layer's state, or of all layers' in a cache."""
    return state.map((lambda one: one.map(f)) if hasattr(state, "states") else f)


def counted(state: Any, columns: int) -> Any:
    """A copy whose numbers of the host are those of its tensors, not those of the recorded step.

    Args:
        state: of a layer, or a language model's cache.
        columns: that the cache has seen.
    """
    if hasattr(state, "states"):
        return type(state)([counted(one, columns) for one in state.states], columns)
    return type(state).from_dict(state.map(Tensor.clone).to_dict())


def put(state: Any, tensors: Sequence[Tensor]) -> Any:
    """The state with other tensors in their places, in the order of `tensors_of`."""
    found = iter(tensors)
    return mapped(state, lambda _: next(found))


def tensors_of(state: Any) -> list[Tensor]:
    """Its tensors one by one."""
    found: list[Tensor] = []

    def note(x: Tensor) -> Tensor:
        found.append(x)
        return x

    mapped(state, note)
    return found


def write(first: Any, after: Any) -> None:
    """Put the numbers of one state into the tensors of another."""
    there, new = tensors_of(first), tensors_of(after)
    owned = {_place_of(x) for x in there}
    # What is only a view of a tensor that will be written to is read before any is.
    fresh = [
        x.clone() if x is not old and _place_of(x) in owned else x
        for old, x in zip(there, new, strict=True)
    ]
    for old, x in zip(there, fresh, strict=True):
        if x is not old:
            old.copy_(x)


def _place_of(x: Tensor) -> int:
    """A name of the memory that a tensor is in, which views share."""
    return x.untyped_storage()._cdata  # pyright: ignore[reportPrivateUsage]


# -- states that grow -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Slots:
    """Associations of a state that grows with the text, aligned right in a fixed number of slots.

    A state says by its masks which slots hold nothing, so one with empty slots in front is the same
    state; a token adds a slot behind, and one that is empty in front makes room for it.

    Attributes:
        size: how many. grows: of every memory in the order of `_memories`, whether it keeps ever
            more associations, and whether it keeps ever more rows by key.
    """

    size: int
    grows: tuple[tuple[bool, bool], ...]

    @classmethod
    def of(cls, before: Any, after: Any, size: int) -> Slots:
        """What a token has made larger.

        Args:
            before, after: states around one token. size: slots.
        """
        pairs = zip(_memories(before), _memories(after), strict=True)
        return cls(
            size, tuple((_more(a.buffer, b.buffer), _more(a.dual, b.dual)) for a, b in pairs)
        )

    def used(self, state: Any) -> int:
        """The most slots that a memory of a state without empty ones takes.

        Args:
            state: as a module leaves it.
        """
        pairs = zip(_memories(state), self.grows, strict=True)
        return max((_held(one, grown) for one, grown in pairs), default=0)

    def fixed(self, state: Any, size: int | None = None) -> Any:
        """The state in so many slots: empty ones are put in front, or taken away there.

        Args:
            state: of which no more slots are in use. size: `size` when omitted.
        """
        slots, grows = self.size if size is None else size, iter(self.grows)

        def fit(x: Tensor) -> Tensor:
            missing = slots - x.shape[1]
            if missing <= 0:
                return x[:, -missing:]
            return torch.cat([x.new_zeros(x.shape[0], missing, *x.shape[2:]), x], dim=1)

        def one(memory: State) -> State:
            buffers, rows = next(grows)
            if not (buffers or rows):
                return memory
            buffer, dual = memory.buffer, memory.dual
            return replace(
                memory,
                buffer=buffer.map(fit) if buffers and buffer is not None else buffer,
                dual=dual.map(fit) if rows and dual is not None else dual,
                cache={},
                known=None,  # rows that have seen as many tokens have no empty slots
            )

        if hasattr(state, "states"):
            return state.map(lambda layer: layer.memories(one))
        return state.memories(one)


def _memories(state: Any) -> list[State]:
    found: list[State] = []

    def note(memory: State) -> State:
        found.append(memory)
        return memory

    for one in _states(state):
        one.memories(note)
    return found


def _more(before: Any, after: Any) -> bool:
    return after is not None and (before is None or after.k.shape[1] > before.k.shape[1])


def _held(memory: State, grown: tuple[bool, bool]) -> int:
    parts = zip((memory.buffer, memory.dual), grown, strict=True)
    return max((part.k.shape[1] for part, yes in parts if yes and part is not None), default=0)
