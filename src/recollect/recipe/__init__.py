"""The recipe: six choices that state the regression problem a sequence layer solves."""

from recollect.recipe.recipe import SCHEMA, Recipe

__all__ = ["SCHEMA", "Recipe"]
