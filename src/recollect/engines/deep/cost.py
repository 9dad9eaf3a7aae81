"""FLOPs of the deep engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from recollect.choices.algorithm.muon import newton_schulz_flops
from recollect.choices.memory.base import LinearMap, Stack
from recollect.engines.deep.structure import chain_of, execution_mode, rule_of

if TYPE_CHECKING:
    from recollect.recipe.recipe import Recipe


def orthogonal(recipe: Recipe, maps: Sequence[LinearMap]) -> int:
    """Count the operations of one Newton–Schulz call on every map."""
    steps = recipe.algorithm.ns_steps
    return sum(newton_schulz_flops(one.out_features, one.in_features, steps) for one in maps)


def batch_flops(
    recipe: Recipe, maps: Sequence[LinearMap], b: int, G: int, *, ends: bool = True
) -> dict[str, int]:
    """Count one inner batch of b tokens of one head by part, with its boundary if ``ends``."""
    splits = recipe.links_at_batch_end and recipe.retention.links_after_first_token
    if splits and execution_mode(recipe) == "table" and b > 1:
        first = _segment(recipe, maps, 1, G, ends=True)
        memory = recipe.memory
        assert isinstance(memory, Stack)  # unsupported_reasons
        first["read"] = (
            2
            * G
            * (1 + memory.has_base_matmuls)
            * sum(m.out_features * m.in_features for m in maps)
        )
        rest = _segment(recipe, maps, b - 1, G, ends=ends)
        return {name: first[name] + rest[name] for name in rest}
    return _segment(recipe, maps, b, G, ends=ends)


def _segment(
    recipe: Recipe, maps: Sequence[LinearMap], b: int, G: int, *, ends: bool
) -> dict[str, int]:
    memory = recipe.memory
    assert isinstance(memory, Stack)  # unsupported_reasons
    how, rule, c = execution_mode(recipe), rule_of(recipe), recipe.context.horizon or 1
    W = sum(m.out_features * m.in_features for m in maps)
    later = sum(m.out_features * m.in_features for m in maps if not m.reads_features)
    D = sum(m.out_features + m.in_features for m in maps)
    moving = rule.slot != ""
    chain, based = chain_of(recipe) is not None, bool(memory.base_params)
    # Number of products per application: the memory and the learned base weights. A chain adds
    # the base weights to its maps, and updates a third stack if the maps decay towards them.
    fixed = 1 + memory.has_base_matmuls
    pulled = chain and based and recipe.retention.decay is not None
    at_keys = 1 if chain else fixed
    keys = 2 * (b + c - 1) * at_keys * (W + later) * (1 + rule.splits)
    if recipe.algorithm.uses_normalized_steps:
        keys += 2 * (b + c - 1) * W * recipe.retention.step_gain_matmuls
    if recipe.algorithm.uses_line_search:
        # The program, its gradient, the directions at its inputs and their effect on its output,
        # which passes through the base weights once more.
        rows = b * c if how == "tokens" else b + c - 1
        keys += 2 * rows * ((1 + fixed) * W + 2 * fixed * later)
    R = (b * c if rule.pairs else b + c - 1) * (1 + rule.splits)
    if how == "tokens":
        write = 2 * b * c * W * (1 + rule.splits)
        parts = {"keys": keys, "write": write, "read": 2 * b * G * fixed * W, "coefficients": 0}
        return {**parts, "Newton–Schulz": b * orthogonal(recipe, maps)}
    small = 2 * b**3 * (moving and recipe.retention.decay is not None and not rule.sums)
    if c > 1 and not rule.pairs and not rule.sums:
        small += 2 * b * b * R * (moving or recipe.retention.decay is not None)
    settled = recipe.retention.has_link and not recipe.links_at_batch_end
    if how == "border" or settled:
        read = 2 * b * G * fixed * W
    else:
        started = 1 + pulled if chain else fixed
        read = 2 * b * G * (W * (started + moving) + R * D)
    write = 2 * R * W * (1 if how == "border" else 1 + moving + pulled) * (ends or settled)
    if ends and chain and moving + pulled:
        write += 2 * (1 + moving + pulled) ** 2 * W
    step = orthogonal(recipe, maps) if how == "border" and ends else 0
    return {
        "keys": keys,
        "write": write,
        "read": read,
        "coefficients": small,
        "Newton–Schulz": step,
    }
