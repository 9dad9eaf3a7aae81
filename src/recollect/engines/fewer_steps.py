"""Smallest change of a recipe that reduces the number of sequential steps."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from recollect.engines.common.sizes import FlopCount, Sizes
from recollect.engines.select import select_engine
from recollect.messages import RecipeError

if TYPE_CHECKING:
    from recollect.recipe.recipe import Recipe

__all__ = ["fewer_steps"]

CHANGES = (
    ("algorithm", "batch_size", 16),
    ("retention", "when", "after"),
    ("retention", "link_every", "batch"),
    ("retention", "per", "head"),
    ("algorithm", "update_every", "batch"),
)
"""Choice, field and value of the candidate changes, which are also tried in combination."""


def fewer_steps(recipe: Recipe, sizes: Sizes) -> tuple[Recipe, tuple[str, ...], FlopCount] | None:
    """Return the recipe with the fewest steps among those with the fewest changes.

    The result is the changed recipe, its changes as Python text, and the counts of its engine, or
    ``None`` if no candidate needs fewer steps than one per token.
    """
    open_changes = [
        change
        for change in CHANGES
        if getattr(getattr(recipe, change[0]), change[1], change[2]) != change[2]
    ]
    for count in range(1, len(open_changes) + 1):
        candidates = [
            (changed, texts, counted)
            for changes in itertools.combinations(open_changes, count)
            for changed, texts, counted in _counted(recipe, changes, sizes)
            if counted.steps < sizes.T
        ]
        if candidates:
            return min(candidates, key=lambda one: one[2].steps)
    return None


def _counted(
    recipe: Recipe, changes: tuple[tuple[str, str, object], ...], sizes: Sizes
) -> Iterator[tuple[Recipe, tuple[str, ...], FlopCount]]:
    """Yield the changed recipe with its counts, if it exists."""
    members = {choice: getattr(recipe, choice) for choice, _, _ in changes}
    try:
        for choice, name, value in changes:
            members[choice] = replace(members[choice], **{name: value})
        changed = recipe.replace(**members)
        engine = select_engine(changed).engine
    except (RecipeError, TypeError, ValueError):  # a derived field or an invalid value
        return
    counted = engine.count_flops(changed, sizes)
    if counted is not None:
        yield changed, tuple(f"{c}.{n}={v!r}" for c, n, v in changes), counted
