"""Structure of a recipe, from which an operator of flash-linear-attention is selected.

The structure depends only on the recipe's choices, never on the name of a preset.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from recollect.engines.kernel.attention import Attention
from recollect.engines.kernel.softmax import is_mean
from recollect.engines.least_squares.engine import LeastSquaresEngine
from recollect.engines.linear.decode import per_value_systems
from recollect.engines.linear.engine import LinearEngine

if TYPE_CHECKING:
    from recollect.recipe.bound import BoundRecipe
    from recollect.recipe.recipe import Recipe

__all__ = ["Structure", "structure"]


@dataclass(frozen=True, kw_only=True)
class Structure:
    """Structure of a recurrence, of least squares, or of attention."""

    # "matrix", "vector" (one recurrence per channel), "ridge" (the exact minimum under a constant
    # ridge) or "mean" (softmax attention)
    memory: str
    # read that the error subtracts: "nothing", the read of the "key", or the read of a "probe" in a
    # separate direction
    erases: str = "nothing"
    decay: str = "none"  # "none", or one decay per "head", "key" channel or "value" channel
    decays_first: bool = True  # whether the error is taken after the decay; True without a decay
    reads_before: bool = False  # whether a token reads the memory before its own write
    # whether a separate weight per head and key channel reads the current token
    bonus: bool = False
    has_unit_rate: bool = False  # whether the write is v φ(k)ᵀ without a rate
    associations: int = 1  # number of associations per token
    # whether documents in one sequence need only their boundaries
    supports_cu_seqlens: bool = False


def structure(bound: BoundRecipe) -> Structure | str:
    """Return the structure of a recipe, or the reason why no operator can run it."""
    recipe = bound.recipe
    reasons = LinearEngine().unsupported_reasons(recipe)
    if not reasons:
        return next(_unsupported_features(recipe), None) or _linear(bound)
    if not LeastSquaresEngine().unsupported_reasons(recipe):
        return _ridge(bound)
    if not Attention().unsupported_reasons(recipe):
        return _mean(recipe)
    if recipe.uses_kernel_rows or recipe.nonparametric or not recipe.features.finite:
        return (
            "for memories that store associations its only operator is softmax attention with one "
            "decay"
        )
    return f"its operators are recurrences of a matrix, and {reasons[0]}"


def _unsupported_features(recipe: Recipe) -> Iterator[str]:
    """Yield the features that the linear engine supports and the operators do not."""
    memory, decay, algorithm = recipe.memory, recipe.retention.decay, recipe.algorithm
    if memory.read.transposed:
        yield "it has no operator for a transposed read"
    if algorithm.recursion != "none":
        yield f"it has no operator for the momentum of {algorithm.title}"
    if recipe.context.horizon != 1:
        yield f"it has no operator for {recipe.context.title}, which writes a token more than once"
    if memory.is_elementwise:
        if recipe.step_sees_prediction:
            yield (
                "the transition of a vector memory may be negative if the error sees the "
                "prediction, and its operators take logarithms"
            )
        return
    if per_value_systems(recipe):
        yield "it has no operator for value channels with separate equations"
    if decay is not None and decay.per not in ("head", "key"):
        yield f"it has no operator for a decay per {decay.per.replace('_', ' and ')} of a matrix"


def _linear(bound: BoundRecipe) -> Structure:
    recipe = bound.recipe
    memory, decay, algorithm = recipe.memory, recipe.retention.decay, recipe.algorithm
    affine, read = recipe.step_affine, recipe.memory.read
    assert affine is not None  # LinearEngine.unsupported_reasons
    is_unweighted = bound.constants.get("lr") == 1.0 and not algorithm.rate_depends_on_key
    erases = "nothing"
    if recipe.step_sees_prediction:
        erases = "key" if recipe.bias.probe is None else "probe"
    decay_axis = "none"
    if decay is not None:
        decay_axis = "value" if memory.is_elementwise else decay.per
    return Structure(
        memory="vector" if memory.is_elementwise else "matrix",
        erases=erases,
        decay=decay_axis,
        decays_first=decay is None or decay.when == "before",
        reads_before=read.when == "before",
        bonus=read.bonus != 0.0,
        has_unit_rate=is_unweighted
        and affine == (0.0, 1.0)
        and "window" not in recipe.context.quantity_axes,
        associations=bound.associations_per_token,
        # A running scale and a read before the write ignore document boundaries.
        supports_cu_seqlens=not (
            memory.is_elementwise or bound.is_stabilized or read.when == "before"
        ),
    )


def _ridge(bound: BoundRecipe) -> Structure | str:
    inverse = bound.recipe.algorithm.inverse
    if inverse is None or inverse.ridge != "constant" or inverse.kind != "exact":
        return "its only operator for least squares has a constant ridge and an exact inverse"
    if "ridge" in bound.gates:
        return "its operator needs one ridge for all tokens"
    if bound.engine_value_dim != bound.num_features:
        return "its operator needs as many value channels as features"
    decay = "head" if bound.recipe.context.has_decay else "none"
    return Structure(memory="ridge", erases="key", decay=decay)


def _mean(recipe: Recipe) -> Structure | str:
    context, name = recipe.context, "its attention with a decay"
    exponent = None if context.kernel is None else context.kernel.exponent(1)
    if not is_mean(recipe) or exponent is None or exponent[1] != 0:
        return f"{name} only supports a softmax of ⟨q, k⟩"
    if recipe.buffer_size is not None or len(context.restrictions) != 1:
        return f"{name} needs all past tokens under one decay"
    (part,) = context.restrictions
    if not part.geometric or not part.has_decay or part.has_weights or part.horizon is not None:
        return f"{name} supports no weights except a decay per head"
    return Structure(memory="mean", decay="head")
