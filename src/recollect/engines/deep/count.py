"""FLOPs of the engine: products only, a multiply–add is 2.

With b tokens in an inner batch, R = b + c − 1 associations, W the memory's entries, W₁ those of the
maps that read the features, D = Σ (in + out), G queries per token:

=============  ============================================================================
keys           2 R W forward, 2 R (W − W₁) back to every map's output
write          2 R W (twice with momentum): A and S at the batch's end; 8 W where chains with
               momentum move both through one matrix of two rows
read           2 b G W (twice with momentum), and 2 b G R D for the batch's own associations
coefficients   2 b³ for decay times momentum, 2 b² R for a window
=============  ============================================================================

Where the weights of every token are built, a write is 2 c W per token and a read 2 G W. Under
windows with channels, associations are b c pairs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from recollect.choices.memory.maps import LinearMap
from recollect.engines.deep.engine import chain_of, rule_of, way

if TYPE_CHECKING:
    from recollect.recipe.recipe import Recipe

__all__ = ["batch_flops", "orthogonal"]


def orthogonal(recipe: Recipe, maps: Sequence[LinearMap]) -> int:
    """Newton–Schulz once on every map: per step 4 s²l + 2 s³ for sides s ≤ l."""
    steps, total = recipe.algorithm.newton_steps, 0
    for one in maps:
        small, large = sorted((one.out, one.inp))
        total += steps * (4 * small * small * large + 2 * small**3)
    return total


def batch_flops(
    recipe: Recipe, maps: Sequence[LinearMap], b: int, G: int, *, ends: bool = True
) -> dict[str, int]:
    """One inner batch of b tokens of one head by part; ``ends``: with the step to the next."""
    splits = recipe.at_border and recipe.retention.settles_first
    if splits and way(recipe) == "table" and b > 1:
        first = _segment(recipe, maps, 1, G, ends=True)
        first["read"] = 2 * G * sum(m.out * m.inp for m in maps)
        rest = _segment(recipe, maps, b - 1, G, ends=ends)
        return {name: first[name] + rest[name] for name in rest}
    return _segment(recipe, maps, b, G, ends=ends)


def _segment(
    recipe: Recipe, maps: Sequence[LinearMap], b: int, G: int, *, ends: bool
) -> dict[str, int]:
    how, rule, c = way(recipe), rule_of(recipe), recipe.context.horizon or 1
    W = sum(m.out * m.inp for m in maps)
    later = sum(m.out * m.inp for m in maps if not m.first)
    D = sum(m.out + m.inp for m in maps)
    moving = rule.slot != ""
    keys = 2 * (b + c - 1) * (W + later) * (1 + rule.splits)
    R = (b * c if rule.pairs else b + c - 1) * (1 + rule.splits)
    if how == "tokens":
        write = 2 * b * c * W * (1 + rule.splits)
        parts = {"keys": keys, "write": write, "read": 2 * b * G * W, "coefficients": 0}
        return {**parts, "Newton–Schulz": b * orthogonal(recipe, maps)}
    small = 2 * b**3 * (moving and recipe.retention.decay is not None)
    if c > 1 and not rule.pairs:
        small += 2 * b * b * R * (moving or recipe.retention.decay is not None)
    settled = recipe.retention.linked and not recipe.at_border
    if how == "border" or settled:
        read = 2 * b * G * W
    else:
        read = 2 * b * G * (W * (1 + moving) + R * D)
    write = 2 * R * W * (1 if how == "border" else 1 + moving) * (ends or settled)
    if ends and moving and chain_of(recipe) is not None:
        write += 8 * W
    step = orthogonal(recipe, maps) if how == "border" and ends else 0
    return {
        "keys": keys,
        "write": write,
        "read": read,
        "coefficients": small,
        "Newton–Schulz": step,
    }
