"""The tensors of a layer's state, or of a language model's cache: one by one, and put back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

__all__ = ["counted", "mapped", "put", "seen_of", "tensors_of", "write"]


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
