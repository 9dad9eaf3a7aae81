"""FLOPs of memories over a kernel's features, in the conventions of `recollect.cost`.

Per pair of tokens, with M channels in all maps that read the features (V for a matrix):

=================  ===============================================================================
delta rule         2 (J K + V) to predict with J probe keys, 2 G (K + V) to read
inner batches      2 (K + M) (b + c − 1)/b to predict at W°, 2 G (K + M) to read; momentum reads
                   2 G M more, of S
=================  ===============================================================================

Other maps with w weights cost 6 w (b + c − 1)/b for the keys (forward, backward and update), 2 G w
to read (4 G w with momentum), and 2 G (in + out) per query and gradient of its inner batch. The
state has a key and rows for every written token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from recollect.engines.common.sizes import FlopCount, Sizes

if TYPE_CHECKING:
    from recollect.recipe.recipe import Recipe

__all__ = ["kernel_rows_flops", "row_bytes", "row_read_flops"]


def row_bytes(recipe: Recipe, s: Sizes, state_size: int) -> int:
    """Return the bytes of one key with its rows, mass and mask over all heads."""
    widths = sum(recipe.row_widths(s.V)) * (1 + len(recipe.algorithm.slots))
    return s.H * (s.K + widths + 1) * state_size + 1


def kernel_rows_flops(recipe: Recipe, s: Sizes) -> FlopCount:
    """Return the operations of one call, with one sequential step per token."""
    T = s.T * recipe.associations_per_token
    probe, b = recipe.bias.probe, recipe.algorithm.batch_size
    num_earlier_pairs, num_pairs = T * (T - 1) // 2, T * (T + 1) // 2
    notes = (
        f"a key and its rows are stored for every token: {row_bytes(recipe, s, 4)} B in float32",
    )
    if recipe.memory.linear and b == 1 and recipe.context.horizon == 1:
        needs_prediction = probe is not None or recipe.bias.sees_prediction
        keys = 1 if probe is None else probe.heads
        measure = 2 * (keys * s.K + s.V) * s.H if needs_prediction else 0
        read = 2 * s.G * (s.K + s.V) * s.H
        parts = {"system": measure * num_earlier_pairs, "attention": read * num_pairs}
        token = measure * T + read * (T + 1)
        return FlopCount(forward=parts, decode=token, steps=T, step_seconds=0.0, notes=notes)
    M, c = sum(recipe.row_widths(s.V)), recipe.context.horizon or 1
    num_slots = 2 if recipe.algorithm.slots else 1
    w = sum(out * inp for out, inp in recipe.shapes(s.K, s.V))
    replay_factor = (b + c - 1) / b
    measure = round(2 * (s.K + M) * replay_factor) * s.H
    read = 2 * s.G * (s.K + M * num_slots) * s.H
    maps = round(6 * w * replay_factor) * s.H
    other_map_reads = (2 * s.G * w * num_slots + s.G * (b + 1) * (s.K + 2 * M + s.V)) * s.H
    parts = {
        "keys, attention": measure * num_earlier_pairs,
        "queries, attention": read * num_pairs,
        "keys, other maps": maps * T,
        "queries, other maps": other_map_reads * T,
    }
    token = measure * T + read * (T + 1) + maps + other_map_reads
    replay = (measure * T + maps) * (b - 1) // 2
    replay_note = ("decoding replays the open inner batch, half of it on average",) if b > 1 else ()
    return FlopCount(
        forward=parts,
        decode=token + replay,
        steps=T,
        step_seconds=0.0,
        states=-(-T // b),
        notes=(*notes, *replay_note),
    )


def row_read_flops(recipe: Recipe, s: Sizes, queries: int) -> int:
    """Return the FLOPs of read-only queries (per query head) of the rows of closed batches."""
    tokens = s.T * recipe.associations_per_token
    rows = tokens - tokens % recipe.algorithm.batch_size
    M = sum(recipe.row_widths(s.V))
    w = sum(out * inp for out, inp in recipe.shapes(s.K, s.V))
    return 2 * s.G * ((s.K + M) * rows + w) * s.H * queries
