"""What of a recipe decides whether an operator of flash-linear-attention computes it, and which.

Said in terms of the recipe's choices and never of a system's name: a recipe that somebody writes
tomorrow is found by the same answers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from recollect.engines import kernel, least_squares, linear
from recollect.engines.kernel import attention
from recollect.engines.kernel.softmax import is_mean

if TYPE_CHECKING:
    from recollect.recipe.bound import BoundRecipe
    from recollect.recipe.recipe import Recipe

__all__ = ["Structure", "structure"]


@dataclass(frozen=True, kw_only=True)
class Structure:
    """The shape of a recurrence, or of what takes its place.

    Attributes:
        memory: ``"matrix"``; ``"vector"``, every channel with a recurrence of its own; ``"ridge"``,
            the exact minimum under a constant ridge; ``"mean"``, softmax attention.
        erases: what the error takes away: ``"nothing"``, what the ``"key"`` reads, or what a
            ``"probe"`` reads, in a direction of its own.
        decay: ``"none"``, or one per ``"head"``, ``"key"`` channel or ``"value"`` channel.
        before: whether the error sees a memory that has decayed; True where nothing decays.
        reads_before: whether a token reads the memory that it has not written to.
        bonus: whether the current token is read apart, by one weight per head and key channel.
        writes_values: whether the write is v φ(k)ᵀ, without a rate.
        associations: per token.
        packs: whether documents in one row need no more than their borders.
    """

    memory: str
    erases: str = "nothing"
    decay: str = "none"
    before: bool = True
    reads_before: bool = False
    bonus: bool = False
    writes_values: bool = False
    associations: int = 1
    packs: bool = False


def structure(bound: BoundRecipe) -> Structure | str:
    """The structure of a recipe, or why no operator can have it.

    Args:
        bound: the recipe.
    """
    recipe = bound.recipe
    if not linear.refuses(recipe):
        return next(_unlike(recipe), None) or _linear(bound)
    if not least_squares.refuses(recipe):
        return _ridge(bound)
    if not (kernel.refuses(recipe) or attention.refuses(recipe)):
        return _mean(recipe)
    if recipe.uses_kernel_rows or recipe.nonparametric or not recipe.features.finite:
        return (
            "of memories that keep associations it has an operator for softmax attention under one "
            "decay alone"
        )
    return f"its operators are recurrences of a matrix, and {linear.refuses(recipe)[0]}"


def _unlike(recipe: Recipe) -> Iterator[str]:
    """What the linear engine runs and no operator does."""
    memory, decay, algorithm = recipe.memory, recipe.retention.decay, recipe.algorithm
    if algorithm.recursion != "none":
        yield f"it has no operator for the momentum of {algorithm.title}"
    if recipe.context.horizon != 1:
        yield f"it has no operator for {recipe.context.title}, which writes a token more than once"
    if memory.is_elementwise:
        if recipe.bias.sees_prediction:
            yield (
                "what a vector memory keeps of itself under an error that sees the prediction may "
                "be negative, and its operators take logarithms"
            )
        return
    if linear.per_value_systems(recipe):
        yield "it has no operator for value channels that follow equations of their own"
    if decay is not None and decay.per not in ("head", "key"):
        yield f"it has no operator for a decay per {decay.per.replace('_', ' and ')} of a matrix"


def _linear(bound: BoundRecipe) -> Structure:
    recipe = bound.recipe
    memory, decay, algorithm = recipe.memory, recipe.retention.decay, recipe.algorithm
    affine, read = recipe.bias.affine, recipe.memory.read
    assert affine is not None  # linear.refuses
    unweighed = bound.constants.get("lr") == 1.0 and not algorithm.rate_depends_on_key
    erases = "nothing"
    if recipe.bias.sees_prediction:
        erases = "key" if recipe.bias.probe is None else "probe"
    forms = {"head": "head", "key": "key", "value": "value"}
    return Structure(
        memory="vector" if memory.is_elementwise else "matrix",
        erases=erases,
        decay="none" if decay is None else "value" if memory.is_elementwise else forms[decay.per],
        before=decay is None or decay.when == "before",
        reads_before=read.when == "before",
        bonus=read.bonus != 0.0,
        writes_values=unweighed
        and affine == (0.0, 1.0)
        and "window" not in recipe.context.quantity_axes,
        associations=bound.associations_per_token,
        # A running scale and the read of the token before do not end where documents do.
        packs=not (memory.is_elementwise or bound.is_stabilized or read.when == "before"),
    )


def _ridge(bound: BoundRecipe) -> Structure | str:
    inverse = bound.recipe.algorithm.inverse
    if inverse is None or inverse.is_recursive or inverse.kind != "exact":
        return "of least squares it has an operator for a constant ridge and an exact inverse alone"
    if "ridge" in bound.gates:
        return "its operator takes one ridge for all tokens"
    if bound.engine_value_dim != bound.num_features:
        return "its operator takes values as wide as the features"
    decay = "head" if bound.recipe.context.has_decay else "none"
    return Structure(memory="ridge", erases="key", decay=decay)


def _mean(recipe: Recipe) -> Structure | str:
    context, name = recipe.context, "its attention with a decay"
    exponent = None if context.kernel is None else context.kernel.exponent(1)
    if not is_mean(recipe) or exponent is None or exponent[1] != 0:
        return f"{name} takes a softmax of ⟨q, k⟩ alone"
    if recipe.buffer_size is not None or len(context.restrictions) != 1:
        return f"{name} takes all of the past under one decay"
    (part,) = context.restrictions
    if not part.geometric or not part.has_decay or part.has_weights or part.horizon is not None:
        return f"{name} takes no weights but a decay per head"
    return Structure(memory="mean", decay="head")
