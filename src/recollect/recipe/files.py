"""Recipes in JSON or TOML files, read as data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from os import PathLike
from pathlib import Path
from typing import Any

from recollect.messages import RecipeError
from recollect.recipe.recipe import Recipe
from recollect.recipe.toml_text import MAX_BYTES, read_toml
from recollect.report.files import read_regular
from recollect.serialization import read_json

__all__ = ["load_recipe", "read_data"]


def load_recipe(path: str | PathLike[str]) -> Recipe:
    r"""Return the recipe in a JSON or TOML file with the data of `Recipe.to_dict`.

    Missing choices and fields have their defaults. No code in the file is run.

    Raises:
        RecipeError: the file does not exist, is neither JSON nor TOML, or is not a recipe.

    Examples:
        >>> from pathlib import Path
        >>> _ = Path("mine.toml").write_text('[bias]\nmember = "Huber"\n')
        >>> rc.load_recipe("mine.toml").bias.brief
        'Huber()'
    """
    if not isinstance(path, str | PathLike):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise RecipeError(f"load_recipe takes the path of a file, not {type(path).__name__}")
    path, data = Path(path), read_data(path)
    if isinstance(data, dict) and {"recipe", "options"} <= set(data):
        raise RecipeError(
            f"{path} contains a recipe and the options of a layer, and only a recipe is expected: "
            "write the value of 'recipe' to a separate file"
        )
    try:
        return Recipe.from_dict(data)
    except RecipeError as error:
        raise RecipeError(f"{path}: {error}") from None


def read_data(path: str | PathLike[str]) -> Any:
    """Return the content of a JSON or TOML file of at most 1 MiB.

    Raises:
        RecipeError: no regular file, a larger one, neither JSON nor TOML, or bad syntax.
    """
    path = Path(path)
    readers: Mapping[str, Callable[[str], Any]] = {".json": read_json, ".toml": read_toml}
    suffix = path.suffix.lower()
    if suffix not in readers:
        raise RecipeError(f"{path} is neither .json nor .toml: a recipe is written in one of them")
    try:
        text = read_regular(path, limit=MAX_BYTES)
    except FileNotFoundError:
        raise RecipeError(f"there is no file {path}") from None
    except UnicodeDecodeError:
        raise RecipeError(f"{path} cannot be read: it is not UTF-8 text") from None
    except (OSError, ValueError) as error:  # a name that no file can have
        reason = getattr(error, "strerror", None) or error
        raise RecipeError(f"{path} cannot be read: {reason}") from None
    try:
        return readers[suffix](text)
    except ValueError as error:
        raise RecipeError(f"{path} is not {suffix[1:].upper()}: {error}") from None
