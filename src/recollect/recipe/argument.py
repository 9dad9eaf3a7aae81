"""Functions of a recipe take a name or a preset in its place, and say so given anything else."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, cast

from recollect.choices.member import RecipeError
from recollect.recipe.recipe import Recipe
from recollect.wording import shown

__all__ = ["Stated", "StatesRecipe", "TakesRecipe", "names_stand_for", "takes_recipe"]

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


_lookup: Callable[[str], Recipe] | None = None


def names_stand_for(lookup: Callable[[str], Recipe]) -> None:
    """Say what names mean: recipes know no zoo, and whoever has one hands it in.

    Args:
        lookup: the recipe of a name; raises a `RecipeError` where there is none.
    """
    global _lookup
    _lookup = lookup


def takes_recipe(function: Callable[Concatenate[Recipe, P], R]) -> TakesRecipe[P, R]:
    """A function whose first argument is a recipe, by name too.

    Raises:
        RecipeError: when called with anything else, or a name that nothing has.
    """
    name = getattr(function, "__name__", "this")

    @functools.wraps(function)
    def stated(*args: Any, **keywords: Any) -> R:
        if args:
            return function(_recipe(args[0], name), *args[1:], **keywords)
        if "recipe" in keywords:
            keywords["recipe"] = _recipe(keywords["recipe"], name)
        return function(*args, **keywords)

    return cast("TakesRecipe[P, R]", stated)


def _recipe(given: object, name: str) -> Recipe:
    if isinstance(given, Recipe):
        return given
    if isinstance(given, str) and _lookup is not None:
        return _lookup(given)
    inside = getattr(given, "recipe", None)
    if isinstance(inside, Recipe):
        return inside
    raise RecipeError(
        f"{name} takes an rc.Recipe, or the name of an architecture such as 'gated_delta_net', "
        f"not {shown(given)}"
    )
