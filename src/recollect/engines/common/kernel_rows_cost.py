"""FLOPs of memories over a kernel's features, in the conventions of `recollect.cost`.

Per pair of tokens, with M channels in all maps that read the features (V for a matrix):

=================  ===============================================================================
delta rule         2 (J K + V) to measure with J probe keys, 2 G (K + V) to read
inner batches      2 (K + M) (b + c − 1)/b to measure at W°, 2 G (K + M) to read; momentum reads
                   2 G M more, of S
=================  ===============================================================================

Maps behind the first, w weights: 6 w (b + c − 1)/b for the keys (forward, back, and the update),
2 G w to read (4 G w with momentum), and 2 G (in + out) per query and gradient of its inner batch.
The state has a key and rows for every token that was written.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from recollect.engines.common.sizes import Counted, Sizes

if TYPE_CHECKING:
    from recollect.recipe.recipe import Recipe

__all__ = ["kernel_rows_flops", "reading_of_rows", "row_bytes"]


def row_bytes(recipe: Recipe, s: Sizes, state_size: int) -> int:
    """Bytes of one key with its rows and its mass, of all heads, and of its mask."""
    widths = sum(recipe.row_widths(s.V)) * (1 + len(recipe.algorithm.slots))
    return s.H * (s.K + widths + 1) * state_size + 1


def kernel_rows_flops(recipe: Recipe, s: Sizes) -> Counted:
    """Operations of one call, token by token: an engine with fewer steps replaces them."""
    T = s.T * recipe.associations_per_token
    probe, b = recipe.bias.probe, recipe.algorithm.batch_size
    before, upto = T * (T - 1) // 2, T * (T + 1) // 2
    notes = (f"a key and its rows stay for every token: {row_bytes(recipe, s, 4)} B in float32",)
    if recipe.memory.linear and b == 1 and recipe.context.horizon == 1:
        sees = probe is not None or recipe.bias.sees_prediction
        keys = 1 if probe is None else probe.heads
        measure = 2 * (keys * s.K + s.V) * s.H if sees else 0
        read = 2 * s.G * (s.K + s.V) * s.H
        parts = {"system": measure * before, "attention": read * upto}
        token = measure * T + read * (T + 1)
        return Counted(forward=parts, decode=token, steps=T, step_seconds=0.0, notes=notes)
    M, c = sum(recipe.row_widths(s.V)), recipe.context.horizon or 1
    moving = 2 if recipe.algorithm.slots else 1
    w = sum(out * inp for out, inp in recipe.shapes(s.K, s.V))
    again = (b + c - 1) / b
    measure = round(2 * (s.K + M) * again) * s.H
    read = 2 * s.G * (s.K + M * moving) * s.H
    maps = round(6 * w * again) * s.H
    behind = (2 * s.G * w * moving + s.G * (b + 1) * (s.K + 2 * M + s.V)) * s.H
    parts = {
        "keys, attention": measure * before,
        "queries, attention": read * upto,
        "keys, other maps": maps * T,
        "queries, other maps": behind * T,
    }
    token = measure * T + read * (T + 1) + maps + behind
    replay = (measure * T + maps) * (b - 1) // 2
    more = ("decoding replays the open inner batch, half of it on average",) if b > 1 else ()
    return Counted(
        forward=parts,
        decode=token + replay,
        steps=T,
        step_seconds=0.0,
        states=-(-T // b),
        notes=(*notes, *more),
    )


def reading_of_rows(recipe: Recipe, s: Sizes, queries: int) -> int:
    """FLOPs of queries that read the rows of all closed inner batches and write nothing.

    Args:
        recipe: of a memory over a kernel's features.
        s: sizes.
        queries: per row and query head.
    """
    tokens = s.T * recipe.associations_per_token
    rows = tokens - tokens % recipe.algorithm.batch_size
    M = sum(recipe.row_widths(s.V))
    w = sum(out * inp for out, inp in recipe.shapes(s.K, s.V))
    return 2 * s.G * ((s.K + M) * rows + w) * s.H * queries
