"""Bind recipes to engines, and find the bound recipes of live layers by name."""

from __future__ import annotations

import copyreg
import hashlib
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from recollect.choices.algorithm.normalized_steps import measures_overlap
from recollect.choices.matmul_precision import check_precision_name
from recollect.engines import select as engines
from recollect.engines.base import Engine
from recollect.engines.fla import offer
from recollect.recipe.bound import BoundRecipe, bound_recipe
from recollect.recipe.recipe import Recipe

__all__ = ["bind", "bound_of", "named"]

MAX_CACHED = 512
"""Number of bound recipes that are cached for `recollect.recall`."""

_Key = tuple[Recipe, int, int, int, str, str | None]
_cache: dict[_Key, tuple[tuple[Engine, ...], BoundRecipe]] = {}
_by_name: weakref.WeakValueDictionary[str, BoundRecipe] = weakref.WeakValueDictionary()


def bind(
    recipe: Recipe,
    *,
    H: int,
    K: int,
    V: int,
    engine: str = "auto",
    precision: str | None = None,
) -> BoundRecipe:
    """Bind a recipe to sizes and to the engine that runs it, with the arguments of `recall`."""
    if torch.compiler.is_compiling():
        return _bind(recipe, H, K, V, engine, precision)
    key = (recipe, H, K, V, engine, precision)
    try:
        engines_then, bound = _cache.get(key, (None, None))
    except TypeError:  # a user's member that is unhashable
        return _bind(recipe, H, K, V, engine, precision)
    if bound is None or engines_then is not engines.ENGINES:
        bound = _bind(recipe, H, K, V, engine, precision)
        if len(_cache) >= MAX_CACHED:
            _cache.clear()
        _cache[key] = (engines.ENGINES, bound)
    return bound


def _bind(
    recipe: Recipe, H: int, K: int, V: int, requested: str, precision: str | None
) -> BoundRecipe:
    check_precision_name(precision)
    engine = engines.select_engine(recipe, requested).engine
    bound = bound_recipe(recipe, H=H, K=K, V=V, engine=engine, requested_engine=requested)
    bound = replace(bound, plan=engine.make_plan(bound))
    operators = offer(bound, requested)
    return replace(
        bound,
        decode_token=engine.decode_token if engine.has_token_path(bound) else None,
        precision=precision,
        matmul_precision=engine.matmul_precision(recipe, precision),
        fla_operator=operators if operators.operators else None,
        measures_overlap=measures_overlap(recipe.algorithm),
        uses_inner_autograd=engine.uses_inner_autograd(recipe),
    )


def named(bound: BoundRecipe) -> BoundRecipe:
    """Register a layer's bound recipe under a name, by which compiled operations find it.

    Compiled graphs are cached on disk with the names in them, and another process finds them for
    its own recipe, so the name is a hash of the recipe. A different recipe with the same text (a
    class that was redefined in a notebook) gets a numbered name. The registry holds weak
    references: an entry lives as long as a layer that uses it.
    """
    members = bound.recipe.members()
    kinds = [f"{type(member).__module__}.{type(member).__qualname__}" for member in members]
    sizes = (bound.H, bound.K, bound.V, bound.requested_engine, bound.precision)
    text = repr((bound.recipe, kinds, *sizes))
    digest = hashlib.blake2b(text.encode(), digest_size=12).hexdigest()
    name, number = digest, 0
    while (other := _by_name.get(name)) is not None:
        if _equivalent(other, bound):
            return other
        number += 1
        name = f"{digest}-{number}"
    bound = replace(bound, name=name)
    _by_name[name] = bound
    return bound


def _equivalent(one: BoundRecipe, other: BoundRecipe) -> bool:
    """Whether both have one engine, and members of the same classes."""
    pairs = zip(one.recipe.members(), other.recipe.members(), strict=False)
    return (
        all(type(a) is type(b) for a, b in pairs)
        and one.engine is other.engine
        and one.precision == other.precision
        and one.recipe == other.recipe
    )


def bound_of(name: str) -> BoundRecipe:
    """Return a live layer's bound recipe by `BoundRecipe.name`."""
    return _by_name[name]


def _rebind(
    recipe: Recipe,
    H: int,
    K: int,
    V: int,
    engine: str,
    register: bool,
    precision: str | None = None,
) -> BoundRecipe:
    bound = bind(recipe, H=H, K=K, V=V, engine=engine, precision=precision)
    return named(bound) if register else bound


def _reduce(bound: BoundRecipe) -> tuple[Callable[..., BoundRecipe], tuple[Any, ...]]:
    sizes = (bound.H, bound.K, bound.V, bound.requested_engine)
    return _rebind, (bound.recipe, *sizes, bound.name is not None, bound.precision)


# Engines and their plans hold functions, so a copy or a pickle binds the recipe again.
copyreg.pickle(BoundRecipe, _reduce)
