"""Compression of kernel memories: a state with one pair per given key and its read."""

from __future__ import annotations

import dataclasses

from torch import Tensor

from recollect.choices.member import RecipeError
from recollect.functional.read import read
from recollect.recipe.recipe import Recipe
from recollect.state.kernel_rows import KernelRows
from recollect.state.state import State
from recollect.typing import Params

__all__ = ["rewrite"]


def rewrite(recipe: Recipe, state: State, keys: Tensor, *, params: Params | None = None) -> State:
    """Return a state that stores only the pairs (k_i, y_i), y_i the read of k_i (AM 10.3).

    Reads at k_i do not change if κ(k_i, k_j) is 1 for i = j and 0 otherwise, for example with the
    rounding kernel and nearly orthogonal keys, or with a sharp softmax of a normalised read. A
    rewrite every n tokens limits the cache to O(n) rows.

    Args:
        recipe: recipe of a matrix memory over the features of a kernel.
        state: state of the recipe.
        keys: keys k_i ``[B, n, H, K]``.
        params: params, as for `recollect.recall`.

    Raises:
        RecipeError: a memory without a row of values per key.
    """
    if state.kernel_rows is None or not recipe.memory.linear:
        raise RecipeError(
            f"rewrite needs one row of values per key, which {recipe.memory.title} over "
            f"{recipe.features.title} does not have: use memory.Matrix with a kernel such as "
            "features.Round()"
        )
    values = read(recipe, keys, state=state, params=params).to(state.kernel_rows.k.dtype)
    ones = values.new_ones(values.shape[:3])
    kernel_rows = KernelRows(
        k=keys.to(values.dtype), rows=(values,), mass=ones, mask=ones[..., 0].bool(), slots={}
    )
    return dataclasses.replace(state, kernel_rows=kernel_rows)
