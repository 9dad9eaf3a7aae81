"""Results of theory for a recipe, which `explain` prints under "theory"."""

from __future__ import annotations

import math
from collections.abc import Iterator

from recollect.messages import RecipeError
from recollect.recipe.recipe import Recipe
from recollect.recipe.resolve import RecipeLike, as_recipe
from recollect.theory.capacity import capacity_bound
from recollect.theory.snr import inverse_snr, min_key_dim, recipe_kernel

__all__ = ["findings"]

_LEVEL = 0.01  # noise over signal


def findings(recipe: RecipeLike, K: int, V: int) -> tuple[str, ...]:
    """Statements about a recipe with keys of size K and values of size V, with their sources.

    Args:
        recipe: Any recipe; the result is empty if no statement applies.
        K, V: Sizes of keys and values.

    Examples:
        >>> print(rc.theory.findings(rc.Recipe(), 8, 8)[0])
        can hold 8 pairs exactly: 8 features (ATLAS 3.1)
    """
    recipe = as_recipe(recipe, "findings")
    try:
        return tuple(_findings(recipe, K, V))
    except RecipeError:  # sizes that the recipe cannot have
        return ()


def _findings(recipe: Recipe, K: int, V: int) -> Iterator[str]:
    if recipe.memory.read.transposed:  # the statements are about values that are read at keys
        return
    if not recipe.nonparametric and not recipe.memory.is_elementwise:
        bound = capacity_bound(recipe, K, V)
        if math.isfinite(bound.pairs):
            prefix = "" if bound.exact else "at most "
            yield f"can hold {prefix}{int(bound.pairs)} pairs exactly: {bound.reason} (ATLAS 3.1)"
    kernel = recipe_kernel(recipe, K)
    if kernel is not None:
        name, temperature = kernel
        noise = inverse_snr(name, num_distractors=1, size=K, temperature=temperature)
        line = f"‖noise‖²/‖signal‖² = {noise:.2g} for every other pair"
        is_usual = temperature is None or abs(temperature - math.sqrt(K)) < 1e-9
        if name != "solu" and is_usual:
            size = math.ceil(min_key_dim(name, num_distractors=4096, level=_LEVEL))
            line += f"; 1 % among 4,096 takes K = {size}"
        yield f"{line} (AM 10)"
    if _grows(recipe):
        yield "nothing is forgotten or erased: the output grows with T (TTR 13)"
    if _solves(recipe):
        yield "‖y‖ ≤ ‖q‖ Σ‖v_i‖‖k_i‖ / (λ_min(KᵀK) + λ), whatever T (TTR 13)"
    if _limit_lines(recipe):
        yield "with one head the memory tends to W_v W_k⁻¹ and forgets the context (AM 47)"
    if _exchanges(recipe):
        yield "follows any exchange of states under unit keys with |k_i·k_j| < 1/8 (AM theorem 1)"


def _affine(recipe: Recipe) -> bool:
    """One matrix, an affine error, one association per step, and plain descent."""
    return (
        not recipe.nonparametric
        and recipe.memory.linear
        and not recipe.memory.is_elementwise
        and recipe.memory.read.plain
        and recipe.bias.is_affine
        and recipe.bias.probe is None
        and recipe.context.horizon == 1
        and recipe.retention.decay is None
        and recipe.retention.is_plain
        and not recipe.algorithm.slots
        and recipe.algorithm.batch_size == 1
        and recipe.associations_per_token == 1
    )


def _grows(recipe: Recipe) -> bool:
    return _affine(recipe) and not recipe.step_sees_prediction


def _solves(recipe: Recipe) -> bool:
    has_inverse = recipe.algorithm.inverse is not None
    return has_inverse and not recipe.context.has_decay and recipe.features.lift("k") == "k"


def _limit_lines(recipe: Recipe) -> bool:
    plain = recipe.features.finite and recipe.features.lift("k") == "k"
    return plain and _affine(recipe) and not _grows(recipe)


def _exchanges(recipe: Recipe) -> bool:
    """Whether the recipe is a delta rule whose similarity is an integer."""
    features = recipe.features
    rounds = not features.finite and features.decimals == 0
    full = recipe.constants().get("lr") == 1.0
    return rounds and full and _affine(recipe) and not _grows(recipe)
