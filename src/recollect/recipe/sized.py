"""A recipe at known sizes: what every call asks of the two together, asked once."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from recollect.choices.fields import Gate, Param
from recollect.choices.retention.base import Decay
from recollect.recipe.recipe import Recipe

__all__ = ["SizedNumber", "SizedRecipe", "sized"]

Shape = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class SizedNumber:
    """A gate or a param at known sizes.

    Attributes:
        declared: what the recipe says of it.
        shape: of a gate after ``[B, T]``, of a param all of it: ``(H, ...)``.
    """

    declared: Gate | Param
    shape: Shape


@dataclass(frozen=True, kw_only=True)
class SizedRecipe:
    """A recipe, H memories, keys of size K and values of size V.

    Attributes:
        recipe: as it is run; with a decay of 1 where a running scale needs one to act on.
        gates, params: by name, in the recipe's order.
        fills: a value of every number but 0 that its member can take, by engine-side name, for
            tokens that are padding and slots that hold nothing.
        constants: numbers fixed by the recipe, by engine-side name.
        statics: of each param that is a number of the recurrence: its name, that of the engines,
            and whether they take its logarithm.
        features: F, or 0 where features are infinitely many.
        weights: shapes of the memory's maps, without batch and head.
        slots: of the algorithm's own state by name: its shape beside each map, and whether it is
            float64 whatever the inputs are.
        associations: n, associations per token.
        normalised: whether a memory of ones is kept beside the memory, as one more value channel.
        stabilised: whether the normaliser has a floor, and the memory a running scale.
        lifts: whether features may be anything but keys and queries themselves.
        plain: whether an engine sees a call as it is: one association per token, no normaliser.
        written: the recipe's normal form as it was given, by which its states are known.
        tag: a number that tells recipes apart, for what a state keeps of the engine that made it;
            ``None`` where a member of one's own cannot be told from others.
    """

    recipe: Recipe
    H: int
    K: int
    V: int
    gates: Mapping[str, SizedNumber]
    params: Mapping[str, SizedNumber]
    fills: Mapping[str, float]
    constants: Mapping[str, float]
    statics: tuple[tuple[str, str, bool], ...]
    features: int
    weights: tuple[Shape, ...]
    slots: Mapping[str, tuple[tuple[Shape, ...], bool]]
    associations: int
    normalised: bool
    stabilised: bool
    lifts: bool
    plain: bool
    written: str
    tag: int | None

    @property
    def channels(self) -> int:
        """Value channels that an engine sees: V, and the memory of ones."""
        return self.V + self.normalised


def sized(recipe: Recipe, *, H: int, K: int, V: int) -> SizedRecipe:
    """A recipe at known sizes.

    Args:
        recipe: whose numbers and shapes are meant.
        H: memories.
        K: key channels.
        V: value channels.

    Raises:
        RecipeError: sizes that the memory or the features cannot have.
    """
    read, written = recipe.memory.read, recipe.normal_form
    if read.normalize == "floor" and recipe.retention.decay is None:
        # A running scale decays the memory, so there has to be a decay: of nothing.
        recipe = recipe.but(retention=Decay(rate=1.0))
    axes, statics, logs = recipe.axes(K, V), recipe.statics(), recipe.logs()
    gates: dict[str, SizedNumber] = {}
    for gate in recipe.gates():
        each = (recipe.associations,) if recipe.per_association(gate) else ()
        shape = (H, *each, *(axes[axis] for axis in gate.axes))
        gates[gate.name] = SizedNumber(declared=gate, shape=shape)
    params = {
        param.name: SizedNumber(declared=param, shape=(H, *(axes[axis] for axis in param.axes)))
        for param in recipe.params()
    }
    weights = recipe.shapes(K, V)
    normalised = read.normalize != "none" and not recipe.dual
    stabilised = read.normalize == "floor"
    return SizedRecipe(
        recipe=recipe,
        H=H,
        K=K,
        V=V,
        gates=gates,
        params=params,
        fills={
            **recipe.constants(),
            **{one.name: one.init for one in recipe.params() if isinstance(one.init, float)},
            **{gate.name: gate.init for gate in recipe.gates()},
        },
        constants=recipe.constants(),
        statics=tuple(
            (name, f"log_{name}" if name in logs else name, name in logs)
            for name in params
            if name in statics
        ),
        features=axes["F"],
        weights=weights,
        slots=_slots(recipe, weights, normalised=normalised),
        associations=recipe.associations,
        normalised=normalised,
        stabilised=stabilised,
        lifts=recipe.features.lifts,
        plain=recipe.associations == 1 and not normalised and not stabilised,
        written=written,
        tag=_tag(recipe),
    )


def _slots(
    recipe: Recipe, weights: tuple[Shape, ...], *, normalised: bool
) -> dict[str, tuple[tuple[Shape, ...], bool]]:
    algorithm = recipe.algorithm
    wide = algorithm.wide(recipe)
    made: dict[str, tuple[tuple[Shape, ...], bool]] = {}
    for name in algorithm.slots:
        shapes = tuple(algorithm.slot_shape(name, shape) for shape in weights)
        if normalised:
            # A normalised memory moves with its memory of ones, one more row.
            shapes = tuple((*s[:-2], s[-2] + 1, s[-1]) for s in shapes)
        made[name] = (shapes, name in wide)
    return made


def _tag(recipe: Recipe) -> int | None:
    """Of what a recipe says and of whose classes it is made: −1.0 and −2.0 have the same hash."""
    if torch.compiler.is_compiling():
        return None
    classes: list[type] = []
    parts = list(recipe.members())
    for part in parts:
        parts.extend(part.parts())
        classes.append(type(part))
    try:
        said = repr((recipe, hash(recipe), [(id(one), one.__module__) for one in classes]))
    except TypeError:
        return None
    return int.from_bytes(hashlib.blake2b(said.encode(), digest_size=7).digest(), "big")
