"""A recipe bound to sizes and to an engine, with all values that do not depend on the call."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from recollect.choices.retention.base import Decay
from recollect.fields import Gate, Param
from recollect.recipe.recipe import Recipe

if TYPE_CHECKING:
    from recollect.engines.base import Engine
    from recollect.engines.common.problem import Problem
    from recollect.engines.fla import Offer
    from recollect.state.state import State

__all__ = ["BoundRecipe", "SizedQuantity", "bound_recipe"]

Shape = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class SizedQuantity:
    """A gate or a param with its shape."""

    declared: Gate | Param  # declaration by the recipe
    shape: Shape  # (H, ...); a gate has [B, T] before it


@dataclass(frozen=True, kw_only=True, eq=False)
class BoundRecipe:
    """A recipe with H memories, keys of size K, values of size V, and the engine that runs it.

    A layer creates one during initialisation. `recollect.recall` looks it up.
    """

    # recipe that the engine runs, with a decay of 1 if a running scale needs a decay
    recipe: Recipe
    H: int  # number of memories
    K: int  # size of keys
    V: int  # size of values
    gates: Mapping[str, SizedQuantity]  # gates by name, in the recipe's order
    params: Mapping[str, SizedQuantity]  # params by name, in the recipe's order
    # a valid value of every number except 0, by engine-side name, for padding and for empty slots
    padding_values: Mapping[str, float]
    constants: Mapping[str, float]  # constants of the recipe, by engine-side name
    # for each param that is a quantity: its name, the engine-side name, and whether engines receive
    # its logarithm
    learned_rates: tuple[tuple[str, str, bool], ...]
    num_features: int  # F, or 0 if there are infinitely many features
    weight_shapes: tuple[Shape, ...]  # shapes of the memory's maps, without batch and head
    # for each slot of the algorithm: its shape for each map, and whether it is always float64
    slot_shapes: Mapping[str, tuple[tuple[Shape, ...], bool]]
    associations_per_token: int  # n
    has_normalizer: bool  # whether the memory has a value channel for a memory of ones
    is_stabilized: bool  # whether the normalizer has a floor, and the memory a running scale
    has_features: bool  # whether features may differ from the keys and queries themselves
    # whether an engine gets a rewritten call, because of a normalizer or of several associations
    # per token
    needs_lowering: bool
    recipe_id: str  # normal form of the caller's recipe, stored in its states
    # hash of the recipe, used to validate engine caches kept in a state; None if a member is
    # unhashable
    fingerprint: int | None
    needs_init: bool  # whether a memory of zeros cannot learn (`Recipe.needs_init`)

    # attributes of the recipe and its members that engines read at every call
    affine: tuple[float, float] | None  # `Recipe.step_affine`
    decay: Decay | None  # `Retention.decay`
    horizon: int | None  # `Context.horizon`
    recursion: str | None  # `Algorithm.recursion`
    rate_depends_on_key: bool  # `Algorithm.rate_depends_on_key`
    per_value: bool  # `Algorithm.per_value`

    engine: Engine
    # `Engine.run`; `recollect.parallel` adds the exchanges between ranks
    run: Callable[[Problem], tuple[Tensor, State]]
    requested_engine: str  # engine that the caller requested, for example "auto"
    plan: Any = None  # result of `Engine.make_plan`
    # `Engine.decode_token`, or None if it does not support the recipe
    decode_token: Callable[..., tuple[Tensor, State] | None] | None = None
    precision: str | None = None  # requested precision of products, or None
    # actual precision of products: "float32" if the engine needs it
    matmul_precision: str | None = None
    fla_operator: Offer | None = None  # operators of flash-linear-attention for the recipe, or None
    measures_overlap: bool = False  # whether rates of inner batches depend on their keys
    uses_inner_autograd: bool = True  # whether the engine may take inner gradients by autograd
    # key in the registry of layers' bound recipes (`recollect.functional.binding.named`)
    name: str | None = None

    @property
    def engine_value_dim(self) -> int:
        """Number of value channels in an engine: V, and one for the memory of ones."""
        return self.V + self.has_normalizer

    @property
    def is_traceable(self) -> bool:
        """Whether a compiler may trace a call that is not a custom operation.

        A graph does not keep PyTorch's setting for products. At an inner gradient the compiler
        breaks its graph, and autograd loses the gradient.
        """
        return self.matmul_precision is None and not self.uses_inner_autograd


def bound_recipe(
    recipe: Recipe, *, H: int, K: int, V: int, engine: Engine, requested_engine: str
) -> BoundRecipe:
    """Bind a recipe to sizes and an engine, without the engine's own derived parts."""
    read, recipe_id = recipe.memory.read, recipe.normal_form
    if read.normalize == "floor" and recipe.retention.decay is None:
        recipe = recipe.replace(retention=Decay(alpha=1.0))  # a running scale acts on a decay
    axes = recipe.axes(K, V)
    gates: dict[str, SizedQuantity] = {}
    for gate in recipe.gates():
        n = (recipe.associations_per_token,) if recipe.per_association(gate) else ()
        shape = (H, *n, *(axes[axis] for axis in gate.axes))
        gates[gate.name] = SizedQuantity(declared=gate, shape=shape)
    params = {
        param.name: SizedQuantity(declared=param, shape=(H, *(axes[axis] for axis in param.axes)))
        for param in recipe.params()
    }
    weights, algorithm = recipe.shapes(K, V), recipe.algorithm
    has_normalizer = read.normalize != "none" and not recipe.uses_kernel_rows
    is_stabilized = read.normalize == "floor"
    return BoundRecipe(
        recipe=recipe,
        H=H,
        K=K,
        V=V,
        gates=gates,
        params=params,
        padding_values={
            **recipe.constants(),
            **{x.name: x.init for x in recipe.params() if isinstance(x.init, float)},
            **{gate.name: gate.init for gate in recipe.gates()},
        },
        constants=recipe.constants(),
        learned_rates=tuple(
            (param.name, f"log_{param.name}" if param.is_log else param.name, param.is_log)
            for param in recipe.params()
            if param.name in recipe.learned_quantities
        ),
        num_features=axes["F"],
        weight_shapes=weights,
        slot_shapes=_slot_shapes(recipe, weights, has_normalizer=has_normalizer),
        associations_per_token=recipe.associations_per_token,
        has_normalizer=has_normalizer,
        is_stabilized=is_stabilized,
        has_features=recipe.features.lifts,
        needs_lowering=recipe.associations_per_token > 1 or has_normalizer or is_stabilized,
        recipe_id=recipe_id,
        fingerprint=_fingerprint(recipe),
        needs_init=recipe.needs_init(),
        affine=recipe.step_affine,
        decay=recipe.retention.decay,
        horizon=recipe.context.horizon,
        recursion=algorithm.recursion,
        rate_depends_on_key=algorithm.rate_depends_on_key,
        per_value=algorithm.per_value,
        engine=engine,
        run=engine.run,
        requested_engine=requested_engine,
    )


def _slot_shapes(
    recipe: Recipe, weights: tuple[Shape, ...], *, has_normalizer: bool
) -> dict[str, tuple[tuple[Shape, ...], bool]]:
    algorithm = recipe.algorithm
    float64_slots = algorithm.float64_slots(recipe)
    slots: dict[str, tuple[tuple[Shape, ...], bool]] = {}
    for name in algorithm.slots:
        shapes = tuple(algorithm.slot_shape(name, shape) for shape in weights)
        if has_normalizer:
            # The memory of ones is one more row of the weights.
            shapes = tuple((*s[:-2], s[-2] + 1, s[-1]) for s in shapes)
        slots[name] = (shapes, name in float64_slots)
    return slots


def _fingerprint(recipe: Recipe) -> int | None:
    """Hash the recipe and its classes by their text, because hash(−1.0) is hash(−2.0)."""
    if torch.compiler.is_compiling():
        return None
    classes: list[type] = []
    parts = list(recipe.members())
    for part in parts:
        parts.extend(part.parts())
        classes.append(type(part))
    try:
        text = repr((recipe, hash(recipe), [(id(cls), cls.__module__) for cls in classes]))
    except TypeError:
        return None
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big")
