"""Recipes in JSON or TOML files, read as data."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Mapping
from os import PathLike
from pathlib import Path
from typing import Any

from recollect.choices.member import RecipeError
from recollect.recipe.recipe import Recipe

__all__ = ["load_recipe"]


def load_recipe(path: str | PathLike[str]) -> Recipe:
    r"""The recipe in a JSON or TOML file, as `Recipe.to_dict` writes it; nothing in it is run.

    Choices and fields that are left out take their defaults.

    Raises:
        RecipeError: no such file, neither JSON nor TOML, bad syntax, or no recipe.

    Examples:
        >>> from pathlib import Path
        >>> _ = Path("mine.toml").write_text('[bias]\nmember = "Huber"\n')
        >>> rc.load_recipe("mine.toml").bias.brief
        'Huber()'
    """
    path = Path(path)
    readers: Mapping[str, Callable[[str], Any]] = {".json": json.loads, ".toml": tomllib.loads}
    suffix = path.suffix.lower()
    if suffix not in readers:
        raise RecipeError(f"{path} is neither .json nor .toml: a recipe is written in one of them")
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise RecipeError(f"there is no file {path}") from None
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise RecipeError(f"{path} cannot be read: {reason}") from None
    try:
        data = readers[suffix](text)
    except (ValueError, RecursionError) as error:
        raise RecipeError(f"{path} is not {suffix[1:].upper()}: {error}") from None
    try:
        return Recipe.from_dict(data)
    except RecursionError:
        raise RecipeError(f"{path}: members are nested too deep for a recipe") from None
    except RecipeError as error:
        raise RecipeError(f"{path}: {error}") from None
