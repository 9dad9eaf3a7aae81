"""Sizes and operation counts from which each engine states its cost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from recollect.choices.memory.base import Stack

if TYPE_CHECKING:
    from recollect.recipe.recipe import Recipe

__all__ = ["Counted", "Sizes", "numel_of", "reading_of_weights"]


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """All sizes of a call; ``shapes`` are those of the memory's weights."""

    K: int
    V: int
    H: int
    T: int
    B: int
    G: int
    F: int
    n: int
    c: int
    shapes: tuple[tuple[int, ...], ...]
    axes: dict[str, int]

    @classmethod
    def of(cls, recipe: Recipe, *, K: int, V: int, H: int, T: int, B: int, G: int) -> Sizes:
        axes = recipe.axes(K, V)
        return cls(
            K=K,
            V=V,
            H=H,
            T=T,
            B=B,
            G=G,
            F=axes["F"],
            n=recipe.associations_per_token,
            c=recipe.context.horizon or 1,
            shapes=recipe.shapes(K, V),
            axes=axes,
        )

    def numel(self, axes: tuple[str, ...]) -> int:
        """Entries of a gate or param of one head."""
        size = 1
        for axis in axes:
            size *= self.axes[axis]
        return size

    @property
    def weights(self) -> int:
        """Entries of the memory of one head."""
        return sum(numel_of(shape) for shape in self.shapes)


def numel_of(shape: tuple[int, ...]) -> int:
    """Entries of a tensor of that shape."""
    size = 1
    for side in shape:
        size *= side
    return size


@dataclass(frozen=True, kw_only=True)
class Counted:
    """The operations that an engine counts for one call.

    Attributes:
        forward: FLOPs of one sequence by part.
        decode: FLOPs of one more token of one sequence.
        steps: dependent steps of a forward pass on a CPU: each needs the result of the step before.
        step_seconds: time that a step takes on a CPU besides its FLOPs and its memory traffic.
        states: memories that are written to and read from main memory.
        notes: sentences on what these numbers rest on.
    """

    forward: dict[str, int]
    decode: int
    steps: int
    step_seconds: float
    states: int = 0
    notes: tuple[str, ...] = ()


def reading_of_weights(recipe: Recipe, s: Sizes, queries: int) -> int:
    """FLOPs of queries that read weights and write nothing: 2 G times the weights, each.

    Learned weights beside the memory's are read too.

    An inner batch that is open is replayed once per call, which is not counted.

    Args:
        recipe: of a finite memory.
        s: sizes.
        queries: per row and query head.
    """
    if recipe.memory.is_elementwise:
        return 0  # elementwise
    memory = recipe.memory
    ones = s.F if memory.read.normalize != "none" else 0
    weights = (1 + (isinstance(memory, Stack) and memory.has_base_matmuls)) * s.weights
    return 2 * s.G * (weights + ones) * s.H * queries
