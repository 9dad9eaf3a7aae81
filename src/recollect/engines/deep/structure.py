"""Structure of a recipe for the deep engine: execution mode, coefficients, and chain of maps."""

from __future__ import annotations

from typing import TYPE_CHECKING

from recollect.choices.memory.base import Stack
from recollect.engines.deep.chain.chain import Chain, is_supported_activation
from recollect.engines.deep.step_coefficients import Rule

if TYPE_CHECKING:
    from recollect.recipe.recipe import Recipe

__all__ = ["chain_of", "execution_mode", "rule_of"]


def execution_mode(recipe: Recipe) -> str:
    """Return ``"table"``, ``"border"`` or ``"tokens"``, the mode of `deep.general` for a recipe."""
    if recipe.algorithm.update_every == "batch":
        return "border"
    linked, b = recipe.retention.has_link, recipe.algorithm.batch_size
    if _separates(recipe) and (not linked or recipe.links_at_batch_end or b == 1):
        return "table"
    return "tokens"


def _separates(recipe: Recipe) -> bool:
    """Return whether A is linear in the gradients, with coefficients or absorbed decays."""
    decay, algorithm = recipe.retention.decay, recipe.algorithm
    channels = decay is not None and decay.per != "head"
    if not recipe.retention.is_additive or algorithm.recursion is None:
        return False
    if decay is not None and decay.per == "entry":
        return False
    return not (channels and algorithm.recursion != "none")


def rule_of(recipe: Recipe) -> Rule:
    """Return the structure of a recipe's coefficients."""
    algorithm, decay = recipe.algorithm, recipe.retention.decay
    how = execution_mode(recipe)
    decays_channels = decay is not None and decay.per != "head" and how == "table"
    channels = algorithm.per_value or decays_channels
    window = (recipe.context.horizon or 1) > 1
    return Rule(
        slot=algorithm.accumulator or ("" if algorithm.recursion in ("none", None) else "steps"),
        splits=algorithm.needs_split_error,
        mean=algorithm.reduction == "mean",
        side="value" if decay is not None and decay.per == "value" else "key",
        pairs=how != "tokens" and channels and window,
        sums=algorithm.sums_batch,
    )


def chain_of(recipe: Recipe) -> Chain | None:
    """Return the memory as a chain with one table of coefficients, or ``None`` if unsupported."""
    memory, rule, retention = recipe.memory, rule_of(recipe), recipe.retention
    decay = retention.decay
    plain = execution_mode(recipe) == "table" and not (
        rule.splits or rule.pairs or retention.has_link
    )
    plain &= decay is None or (decay.per == "head" and decay.when == "after")
    plain &= not recipe.algorithm.per_value
    erasure = recipe.algorithm.erasure
    if not plain or not isinstance(memory, Stack):
        return None
    if memory.chain_activation is None or not is_supported_activation(memory.chain_activation):
        return None
    if erasure and memory.base_params:  # a chain has no outputs of the memory without its base
        return None
    target = recipe.bias.target if recipe.algorithm.uses_normalized_steps else None
    return Chain(
        activation=memory.chain_activation,
        memory=memory,
        bias=recipe.bias,
        target=target,
        params=tuple(one.name for one in memory.params() if one.name not in memory.base_params),
        bases=memory.base_params,
        erasure=erasure,
    )
