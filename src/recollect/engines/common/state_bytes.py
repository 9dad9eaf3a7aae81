"""Bytes of the state after T tokens by part."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from recollect.engines.common.kernel_rows_flops import row_bytes
from recollect.engines.common.sizes import Sizes

if TYPE_CHECKING:
    from recollect.recipe.recipe import Recipe

__all__ = ["state_bytes"]


def state_bytes(
    recipe: Recipe, s: Sizes, dtype_bytes: int, state_size: int, *, factored: bool
) -> tuple[dict[str, int], int]:
    """Return the bytes by part and the bytes of one more token."""
    rows, heads = s.B, s.B * s.H
    normalized = recipe.memory.read.normalize != "none" and not recipe.uses_kernel_rows
    ones = s.F if normalized else 0
    parts = {"memory": heads * s.weights * state_size}
    # A normalised memory has a memory of ones as one more row.
    float64_slots = recipe.algorithm.float64_slots(recipe)
    slots = sum(
        (math.prod(recipe.algorithm.slot_shape(name, shape)) + ones)
        * (8 if name in float64_slots else state_size)
        for name in recipe.algorithm.slots
        for shape in s.shapes
    )
    parts["algorithm"] = heads * slots
    scale = 1 if recipe.memory.read.normalize == "floor" else 0
    parts["normaliser"] = heads * (ones + scale) * state_size
    bytes_per_token = _slot(recipe, s, dtype_bytes, state_size, normalized) * rows
    span = recipe.buffer_size
    name = "associations" if recipe.nonparametric or span is None else "open tokens"
    parts[name] = bytes_per_token * (s.T if span is None else span)
    parts["position"] = 8 * rows
    if recipe.uses_kernel_rows:
        row = row_bytes(recipe, s, state_size) * rows
        closed = s.T - s.T % recipe.algorithm.batch_size
        parts["rows"] = row * closed * s.n  # without rows of the open inner batch
        return {name: size for name, size in parts.items() if size}, row * s.n
    if factored:
        # One more entry identifies the recipe.
        parts["factor"] = heads * (s.T * (s.T + s.V) + 1) * state_size
        bytes_per_token += heads * (2 * s.T + 1 + s.V) * state_size
    return {
        name: size for name, size in parts.items() if size
    }, bytes_per_token if span is None else 0


def _slot(recipe: Recipe, s: Sizes, dtype_bytes: int, state_size: int, normalized: bool) -> int:
    """Return the bytes of one association per batch element: k, v, its rates and the mask."""
    numbers = dict.fromkeys(recipe.constants(), 1)
    named = recipe.learned_quantities
    for declared in (*recipe.params(), *recipe.gates()):
        is_gate = declared in recipe.gates() and declared.name != recipe.memory.slope_gate
        if declared.name in named or is_gate:
            numbers[declared.name] = s.numel(declared.axes)
    if "log_lr" in numbers:
        numbers["lr"] = numbers["log_lr"]
    rates = sum(numbers.values())
    return s.H * ((s.K + s.V + normalized) * dtype_bytes + rates * state_size) + 1
