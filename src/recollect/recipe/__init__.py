"""The recipe: six choices that state the regression problem a sequence layer solves.

A recipe is immutable, hashable data. It owns no tensor, validates itself when it is made, and
writes itself to JSON and back without running anybody's code.
"""

from recollect.choices.member import RecipeError
from recollect.recipe.recipe import SCHEMA, Recipe

__all__ = ["SCHEMA", "Recipe", "RecipeError"]
