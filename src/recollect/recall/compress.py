"""Compression of kernel memories: a state that keeps one pair per given key and its read."""

from __future__ import annotations

import dataclasses

from torch import Tensor

from recollect.choices.member import RecipeError
from recollect.recall.reading import read
from recollect.recipe.recipe import Recipe
from recollect.state.kernel_rows import KernelRows
from recollect.state.state import State
from recollect.typing import Params

__all__ = ["rewrite"]


def rewrite(recipe: Recipe, state: State, keys: Tensor, *, params: Params | None = None) -> State:
    """The state that holds the pairs (k_i, y_i) alone, y_i what ``state`` answers to k_i (AM 10.3).

    Exact, in the sense that reading at k_i is unchanged, where κ(k_i, k_j) is 1 at i = j and 0
    elsewhere (the rounding kernel with nearly orthogonal keys), or under a normalised read whose
    softmax is that sharp. Every n tokens it keeps the cache at O(n) rows, whatever was exchanged.

    Args:
        recipe: of a matrix over a kernel's features.
        state: its state.
        keys: ``[B, n, H, K]``.
        params: as for `recollect.recall`.

    Raises:
        RecipeError: a memory that keeps no row of values per key.
    """
    if state.dual is None or not recipe.memory.linear:
        raise RecipeError(
            f"rewrite keeps one row of values per key, which {recipe.memory.title} under "
            f"{recipe.features.title} does not: use memory.Matrix with a kernel such as "
            "features.Round()"
        )
    values = read(recipe, keys, state=state, params=params).to(state.dual.k.dtype)
    ones = values.new_ones(values.shape[:3])
    dual = KernelRows(
        k=keys.to(values.dtype), rows=(values,), mass=ones, mask=ones[..., 0].bool(), slots={}
    )
    return dataclasses.replace(state, dual=dual)
