"""Sizes and operation counts for the cost functions of the engines."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from recollect.choices.memory.base import Stack

if TYPE_CHECKING:
    from recollect.recipe.recipe import Recipe

__all__ = ["FlopCount", "Sizes", "weight_read_flops"]


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """All sizes of a call; ``shapes`` are the shapes of the memory's weights."""

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
        """Return the number of entries of a gate or param per head."""
        return math.prod(self.axes[axis] for axis in axes)

    @property
    def weights(self) -> int:
        """Number of entries of the memory per head."""
        return sum(map(math.prod, self.shapes))


@dataclass(frozen=True, kw_only=True)
class FlopCount:
    """Operation counts of one call."""

    forward: dict[str, int]  # FLOPs of one sequence by part
    decode: int  # FLOPs of one more token of one sequence
    steps: int  # number of sequential steps of a forward pass on a CPU
    step_seconds: float  # overhead per step on a CPU in addition to FLOPs and memory traffic
    states: int = 0  # number of memories written to and read from main memory
    notes: tuple[str, ...] = ()  # assumptions of these counts as sentences


def weight_read_flops(recipe: Recipe, s: Sizes, queries: int) -> int:
    """Return the FLOPs of read-only queries: 2 G times the number of weights per query.

    The weights include learned weights next to the memory. The count excludes the replay of an open
    inner batch, which happens once per call. ``queries`` are per batch element and query head.
    """
    if recipe.memory.is_elementwise:
        return 0
    memory = recipe.memory
    ones = s.F if memory.read.normalize != "none" else 0
    weights = (1 + (isinstance(memory, Stack) and memory.has_base_matmuls)) * s.weights
    return 2 * s.G * (weights + ones) * s.H * queries
