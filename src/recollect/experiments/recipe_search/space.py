"""Recipes near a start: one or two of the six choices replaced by registered members."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any

from recollect.blocks.mixers import RecipeMixer
from recollect.choices.member import Member
from recollect.layer.options import LayerOptions
from recollect.layer.ties import tie_gates
from recollect.messages import RecipeError
from recollect.recipe.recipe import CHOICES, Recipe
from recollect.recipe.toml_text import read_toml, write_toml
from recollect.testing.draws import FACTORY, Pool

__all__ = ["Candidate", "changes", "draw_neighbour", "is_toml"]

MAX_DRAWS = 2000
"""Number of draws after which the recipes near a start are considered exhausted."""

_SOURCES = ("q", "k", "v", "angle")


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A recipe of a search.

    Examples:
        >>> from recollect.experiments.recipe_search.space import Candidate
        >>> mixer = rc.blocks.as_mixer("gla")
        >>> Candidate(name="gla", mixer=mixer, relative_time=0.9).is_baseline
        False
    """

    name: str  # unique name: that of a preset or file, or recipe- and a number
    mixer: RecipeMixer  # recipe and options of its layers
    relative_time: float  # estimated time of a forward pass, as in `recollect.cost`
    draws: int = 0  # number of draws up to this recipe; 0 for the start and for baselines
    is_baseline: bool = False  # whether the recipe is measured only for comparison


def changes(recipe: Recipe, start: Recipe) -> dict[str, Member]:
    """Return the members of a recipe that differ from those of the start, by choice."""
    return {
        name: getattr(recipe, name)
        for name in CHOICES
        if getattr(recipe, name) != getattr(start, name)
    }


def is_toml(recipe: Recipe) -> bool:
    """Whether TOML can express a recipe: it has no null for a field whose default is a value."""
    return Recipe.from_dict(read_toml(write_toml(recipe.to_dict()))) == recipe


def draw_neighbour(
    start: RecipeMixer,
    *,
    seed: int,
    draws: int,
    known: Collection[Recipe],
    accept: Callable[[RecipeMixer], bool],
) -> tuple[int, RecipeMixer] | None:
    """Draw valid recipes with one or two changed choices until one is accepted.

    A new member has its default fields in half of the draws, and random ones in the others. Each
    draw depends on the seed, its number (from ``draws``) and the registered members alone. Recipes
    with a canonical form in ``known`` are not drawn again. The result is the number of draws and
    the recipe with its options, or ``None`` if no recipe was found.
    """
    pool = Pool(all_registered=True)
    for number in range(draws + 1, draws + 1 + MAX_DRAWS):
        try:
            recipe = _change(random.Random(f"{seed} {number}"), start.recipe, pool)
            is_near = 1 <= len(changes(recipe, start.recipe)) <= 2
            if not is_near or recipe.canonical() in known or FACTORY in recipe.to_json():
                continue
            if not is_toml(recipe):
                continue
            mixer = RecipeMixer(recipe=recipe, options=_fitting_options(start.options, recipe))
            if accept(mixer):
                return number, mixer
        except RecipeError:
            continue
    return None


def _change(rng: random.Random, start: Recipe, pool: Pool) -> Recipe:
    """Return the start with one or two new members, and what the first one needs."""
    choices: dict[str, Any] = dict(zip(CHOICES, start.members(), strict=True))
    names = rng.sample(CHOICES, rng.choice((1, 2)))
    for name in names:
        cls = rng.choice(pool.members(name))
        fields = dataclasses.fields(cls)  # type: ignore[arg-type]
        is_complete = all(field.default is not dataclasses.MISSING for field in fields)
        is_default = is_complete and rng.random() < 0.5
        choices[name] = cls() if is_default else pool.member(rng, cls)
    if len(names) == 1:
        choices = pool.repair_by_hints(rng, choices, fixed=names[0])
    return Recipe(**choices)


def _fitting_options(options: LayerOptions, recipe: Recipe) -> LayerOptions:
    """Return the options without gates and ties of quantities that the recipe does not declare."""
    declared = {x.name for x in (*recipe.gates(), *recipe.params())}
    known = {*declared, *_SOURCES}
    ties = tuple(tie for tie in options.ties if {tie.target, tie.source} <= known)
    declared |= {gate.name for gate in tie_gates(replace(options, ties=ties))}
    gates = {name: gate for name, gate in dict(options.gate_options).items() if name in declared}
    return replace(options, gate_options=gates, ties=ties)
