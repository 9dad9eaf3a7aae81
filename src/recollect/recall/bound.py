"""A recipe bound to sizes and to an engine: all that calls have in common, derived once."""

from __future__ import annotations

import itertools
import weakref
from dataclasses import dataclass
from typing import Any

import torch

from recollect.engines import select as engines
from recollect.engines.select import Engine
from recollect.recipe.recipe import Recipe
from recollect.recipe.sized import SizedRecipe, sized

__all__ = ["Bound", "bind", "bound_of"]

KEPT = 512
"""Bindings that are kept for `recollect.recall`; beyond it all are made anew."""


@dataclass(frozen=True, kw_only=True)
class Bound:
    """What a call needs of its recipe, sizes and method.

    A layer makes one when it is built; `recollect.recall` looks it up.

    Attributes:
        sized: the recipe, and how many memories of what size.
        method: as asked for, e.g. ``"auto"``.
        engine: the engine that runs it.
        plan: what that engine derived from ``sized`` (`Engine.plan`).
        name: by which `bound_of` finds it as long as somebody keeps it; ``None`` of one that was
            made while a compiler looked on, and is made anew by every call.
    """

    sized: SizedRecipe
    method: str
    engine: Engine
    plan: Any
    name: str | None = None

    def __reduce__(self) -> tuple[object, ...]:
        # Saved and copied as what it was made of: functions and plans of engines are no data.
        at = self.sized
        return _again, (at.recipe, at.H, at.K, at.V, self.method)


_Key = tuple[Recipe, int, int, int, str]
_kept: dict[_Key, tuple[tuple[Engine, ...], Bound]] = {}
_named: weakref.WeakValueDictionary[str, Bound] = weakref.WeakValueDictionary()
_numbers = itertools.count()


def bind(recipe: Recipe, *, H: int, K: int, V: int, method: str = "auto") -> Bound:
    """Bind a recipe to sizes and to the engine that runs it.

    Args:
        recipe: the regression problem.
        H: memories.
        K: key channels.
        V: value channels.
        method: ``"auto"``, ``"reference"``, or an engine's name.

    Raises:
        RecipeError: sizes that the recipe cannot have, or a method that cannot run it.
        ValueError: an unknown method.
    """
    if torch.compiler.is_compiling():
        return _bind(recipe, H, K, V, method)
    key = (recipe, H, K, V, method)
    try:
        among, bound = _kept.get(key, (None, None))
    except TypeError:  # a member of one's own that cannot be hashed
        return _bind(recipe, H, K, V, method)
    if bound is None or among is not engines.ENGINES:
        bound = _bind(recipe, H, K, V, method)
        if len(_kept) >= KEPT:
            _kept.clear()
        _kept[key] = (engines.ENGINES, bound)
    return bound


def _bind(recipe: Recipe, H: int, K: int, V: int, method: str) -> Bound:
    at = sized(recipe, H=H, K=K, V=V)
    engine = engines.select(recipe, method).engine
    plan = None if engine.plan is None else engine.plan(at)
    if torch.compiler.is_compiling():
        return Bound(sized=at, method=method, engine=engine, plan=plan)
    bound = Bound(sized=at, method=method, engine=engine, plan=plan, name=str(next(_numbers)))
    _named[str(bound.name)] = bound
    return bound


def bound_of(name: str) -> Bound:
    """What is bound under a name: compiled operations take no objects, and text.

    Args:
        name: `Bound.name` of one that somebody keeps.
    """
    return _named[name]


def _again(recipe: Recipe, H: int, K: int, V: int, method: str) -> Bound:
    return bind(recipe, H=H, K=K, V=V, method=method)
