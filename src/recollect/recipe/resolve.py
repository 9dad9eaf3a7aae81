"""Recipes from arguments that may also be a preset, its name, or a layer."""

from __future__ import annotations

import importlib
from typing import Protocol

from recollect.messages import RecipeError, short_repr
from recollect.recipe.recipe import Recipe

__all__ = ["HasRecipe", "RecipeLike", "as_recipe", "resolve_name"]


class HasRecipe(Protocol):
    """A preset or a layer."""

    @property
    def recipe(self) -> Recipe:
        """Its recipe."""
        ...


RecipeLike = Recipe | str | HasRecipe
"""A recipe, the name of a preset, a preset or a layer."""


def resolve_name(value: object) -> object:
    """Return the preset or hybrid of a name; other values are returned unchanged."""
    # Recipes do not depend on the zoo: it is imported when a name is looked up.
    return importlib.import_module("recollect.zoo").get(value) if isinstance(value, str) else value


def as_recipe(value: object, function: str) -> Recipe:
    """Return the recipe of an argument (a recipe, preset, name or layer) of a public function."""
    if isinstance(value, Recipe):
        return value
    recipe = getattr(resolve_name(value), "recipe", None)
    if isinstance(recipe, Recipe):
        return recipe
    if hasattr(value, "leaves"):  # a composition
        raise RecipeError(
            f"{function} takes one rc.Recipe, and this is a composition of several: its layer is "
            "rc.blocks.build(composition, d_model=..., num_heads=...)"
        )
    raise RecipeError(
        f"{function} takes an rc.Recipe, or the name of an architecture such as "
        f"'gated_delta_net', not {short_repr(value)}"
    )
