"""A recipe bound to sizes and to an engine: all that calls have in common, derived once."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from typing import Any

import torch

from recollect.choices.algorithm.share import by_keys
from recollect.choices.products import check_precision_name
from recollect.engines import select as engines
from recollect.engines.fla import Offer, offer
from recollect.engines.select import Engine
from recollect.recipe.recipe import Recipe
from recollect.recipe.sized import SizedRecipe, sized

__all__ = ["Bound", "bind", "bound_of", "named"]

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
        precision: of products, as asked for, or ``None``.
        products: the precision that they take: ``"float32"`` where the engine needs its digits.
        offer: what flash-linear-attention has for it; ``None`` for nothing that the method takes.
        by_keys: whether keys of inner batches measure rates (`share.by_keys`).
        inner_gradients: whether the engine may take gradients of its own while it runs.
        name: by which `bound_of` finds it, of those that layers keep (`named`).
    """

    sized: SizedRecipe
    method: str
    engine: Engine
    plan: Any
    precision: str | None = None
    products: str | None = None
    offer: Offer | None = None
    by_keys: bool = False
    inner_gradients: bool = True
    name: str | None = None

    @property
    def followed(self) -> bool:
        """Whether a compiler may follow a call, where nobody hands it over as one operation.

        Not where products have a precision of their own: each would be followed into ours. Nor
        where the engine takes inner gradients by autograd: the compiler would break at one, before
        which the memory's program is one graph already; between two of that graph's outputs
        autograd sees no way, and takes the gradient for zero.
        """
        return self.products is None and not self.inner_gradients

    def __reduce__(self) -> tuple[object, ...]:
        # Saved and copied as what it was made of: functions and plans of engines are no data.
        at = self.sized
        kept = self.name is not None
        return _again, (at.recipe, at.H, at.K, at.V, self.method, kept, self.precision)


_Key = tuple[Recipe, int, int, int, str, str | None]
_kept: dict[_Key, tuple[tuple[Engine, ...], Bound]] = {}
_named: dict[str, Bound] = {}


def bind(
    recipe: Recipe,
    *,
    H: int,
    K: int,
    V: int,
    method: str = "auto",
    precision: str | None = None,
) -> Bound:
    """Bind a recipe to sizes and to the engine that runs it.

    Args:
        recipe: the regression problem.
        H: memories.
        K: key channels.
        V: value channels.
        method: ``"auto"``, ``"torch"``, ``"fla"``, ``"reference"``, or an engine's name.
        precision: of products of float32 numbers; ``None`` is what PyTorch is set to.

    Raises:
        RecipeError: sizes that the recipe cannot have, or a method that cannot run it.
        ValueError: an unknown method or precision.
    """
    if torch.compiler.is_compiling():
        return _bind(recipe, H, K, V, method, precision)
    key = (recipe, H, K, V, method, precision)
    try:
        among, bound = _kept.get(key, (None, None))
    except TypeError:  # a member of one's own that cannot be hashed
        return _bind(recipe, H, K, V, method, precision)
    if bound is None or among is not engines.ENGINES:
        bound = _bind(recipe, H, K, V, method, precision)
        if len(_kept) >= KEPT:
            _kept.clear()
        _kept[key] = (engines.ENGINES, bound)
    return bound


def _bind(recipe: Recipe, H: int, K: int, V: int, method: str, precision: str | None) -> Bound:
    check_precision_name(precision)
    at = sized(recipe, H=H, K=K, V=V)
    engine = engines.select(recipe, method).engine
    make = engine.plan
    if method == "torch" and engine.torch_plan is not None:
        make = engine.torch_plan
    plan = None if make is None else make(at)
    products = engine.products(recipe, precision)
    found = offer(at, method)
    return Bound(
        sized=at,
        method=method,
        engine=engine,
        plan=plan,
        precision=precision,
        products=products,
        offer=found if found.operators else None,
        by_keys=by_keys(recipe.algorithm),
        inner_gradients=engine.inner_gradients(recipe),
    )


def named(bound: Bound) -> Bound:
    """The same with a name that says what is bound: what compiled operations take in its place.

    Compiled graphs are kept on disk with the names in them, and another process finds them there
    for its own recipe, so a name is made of what the recipe says. Where two that say the same are
    not one (a class that was written anew in a notebook), the later name has a number more.

    Args:
        bound: to be kept by a layer.
    """
    at = bound.sized
    kinds = [
        f"{type(member).__module__}.{type(member).__qualname__}" for member in at.recipe.members()
    ]
    said = repr((at.recipe, kinds, at.H, at.K, at.V, bound.method, bound.precision))
    digest = hashlib.blake2b(said.encode(), digest_size=12).hexdigest()
    name, more = digest, 0
    while name in _named and not _same(_named[name], bound):
        more += 1
        name = f"{digest}-{more}"
    if name not in _named:
        _named[name] = replace(bound, name=name)
    return _named[name]


def _same(one: Bound, other: Bound) -> bool:
    """Whether calls of one are calls of the other: one engine, and members of the same classes."""
    pairs = zip(one.sized.recipe.members(), other.sized.recipe.members(), strict=False)
    classes = all(type(a) is type(b) for a, b in pairs)
    alike = one.engine is other.engine and one.precision == other.precision
    return classes and alike and one.sized.recipe == other.sized.recipe


def bound_of(name: str) -> Bound:
    """What is bound under a name.

    Args:
        name: `Bound.name`.
    """
    return _named[name]


def _again(
    recipe: Recipe,
    H: int,
    K: int,
    V: int,
    method: str,
    kept: bool,
    precision: str | None = None,
) -> Bound:
    bound = bind(recipe, H=H, K=K, V=V, method=method, precision=precision)
    return named(bound) if kept else bound
