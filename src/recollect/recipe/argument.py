"""Functions of a recipe say what they take when they are given its name."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from recollect.choices.member import RecipeError
from recollect.recipe.recipe import Recipe

__all__ = ["takes_recipe"]

P = ParamSpec("P")
R = TypeVar("R")


def takes_recipe(function: Callable[P, R]) -> Callable[P, R]:
    """A function whose first argument is a recipe, and which says so given anything else."""

    @functools.wraps(function)
    def checked(*args: P.args, **keywords: P.kwargs) -> R:
        given = args[0] if args else keywords.get("recipe")
        if (args or "recipe" in keywords) and not isinstance(given, Recipe):
            said = repr(given) if isinstance(given, str) else type(given).__name__
            name = given if isinstance(given, str) else "gated_delta_net"
            raise RecipeError(
                f"{function.__name__} takes an rc.Recipe, such as rc.zoo.get({name!r}).recipe, "
                f"not {said}"
            )
        return function(*args, **keywords)

    return checked
