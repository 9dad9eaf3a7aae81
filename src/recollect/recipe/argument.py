"""Functions of a recipe take a name or a preset in its place, and say so given anything else."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, cast

from recollect.choices.member import RecipeError
from recollect.recipe.recipe import Recipe
from recollect.wording import shown

__all__ = [
    "Stated",
    "StatesRecipe",
    "TakesRecipe",
    "named_system",
    "recipe_of",
    "takes_recipe",
]

P = ParamSpec("P")
R = TypeVar("R", covariant=True)


class StatesRecipe(Protocol):
    """What has a recipe: a preset, a layer."""

    @property
    def recipe(self) -> Recipe:
        """The one it states."""
        ...


Stated = Recipe | str | StatesRecipe
"""A recipe, its name, or what has one."""


class TakesRecipe(Protocol[P, R]):
    """A function of a recipe as `takes_recipe` makes it."""

    __name__: str

    def __call__(self, recipe: Stated, /, *args: P.args, **keywords: P.kwargs) -> R:
        """What the function gives of that recipe."""
        ...


def named_system(given: object) -> object:
    """The system that a name stands for; anything but a name as it is.

    Raises:
        RecipeError: a name that nothing has.
    """
    # Recipes do not depend on the zoo: it is imported when a name is looked up.
    return importlib.import_module("recollect.zoo").get(given) if isinstance(given, str) else given


def takes_recipe(function: Callable[Concatenate[Recipe, P], R]) -> TakesRecipe[P, R]:
    """A function whose first argument is a recipe, by name too.

    Raises:
        RecipeError: when called with anything else, or a name that nothing has.
    """
    name = getattr(function, "__name__", "this")

    @functools.wraps(function)
    def stated(*args: Any, **keywords: Any) -> R:
        if args:
            return function(recipe_of(args[0], name), *args[1:], **keywords)
        if "recipe" in keywords:
            keywords["recipe"] = recipe_of(keywords["recipe"], name)
        return function(*args, **keywords)

    return cast("TakesRecipe[P, R]", stated)


def recipe_of(given: object, name: str) -> Recipe:
    """The recipe that a caller means: one, its name, or what has one.

    Args:
        given: in its place.
        name: of the function that takes it, for the message.

    Raises:
        RecipeError: anything else, or a name that nothing has.
    """
    if isinstance(given, Recipe):
        return given
    inside = getattr(named_system(given), "recipe", None)
    if isinstance(inside, Recipe):
        return inside
    if hasattr(given, "leaves"):  # a composition, which stands above recipes
        raise RecipeError(
            f"{name} takes one rc.Recipe, and this is a composition of several: its layer is "
            "rc.blocks.build(composition, d_model=..., heads=...)"
        )
    raise RecipeError(
        f"{name} takes an rc.Recipe, or the name of an architecture such as 'gated_delta_net', "
        f"not {shown(given)}"
    )
