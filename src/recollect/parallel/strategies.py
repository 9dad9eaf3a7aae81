"""Strategies of context parallelism, and the one that a recipe's structure allows.

* ``"affine"``: the weights after a segment are affine in those before it. All ranks compute the
  transition and the writes of their segment in parallel. One gather follows, and every rank reads.
* ``"gather"``: the state consists of associations. All ranks gather the associations that their
  tokens may read, in parallel.
* ``"sequential"``: rank r waits for the state of rank r − 1, which is exact for every recipe. With
  m microbatches of rows and heads, ranks idle for (R − 1)/(R − 1 + m) of the time.
"""

from __future__ import annotations

from dataclasses import dataclass

from recollect.engines.linear.decode import per_value_systems, scans
from recollect.engines.linear.engine import LinearEngine
from recollect.messages import RecipeError
from recollect.recipe.recipe import Recipe
from recollect.recipe.resolve import RecipeLike, as_recipe

__all__ = ["STRATEGIES", "Strategy", "strategy_for"]

STRATEGIES = ("affine", "gather", "sequential")
"""Strategies of context parallelism.

``"affine"``: each rank's segment is one affine map of the weights, and the maps are composed.
``"gather"``: keys and values are gathered, as for attention. ``"sequential"``: each rank sends its
state to the next one.

Examples:
    >>> rc.parallel.strategy_for(rc.Recipe()).name in rc.parallel.STRATEGIES
    True
"""


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """Strategy of context parallelism for a recipe.

    Attributes:
        name: one of `STRATEGIES`.
        transition: factor of the weights over a segment, for ``"affine"``: ``"decays"``, a decay
            per row and column; ``"entries"``, a decay per entry; ``"keys"``, one matrix over key
            features for all rows of the memory.
        reason: short reason for the strategy.

    Examples:
        >>> strategy = rc.parallel.strategy_for(rc.zoo.get("gla").recipe)
        >>> strategy.name, strategy.transition
        ('affine', 'decays')
    """

    name: str
    transition: str | None = None
    reason: str

    def __str__(self) -> str:
        order = {
            "affine": "all at once",
            "gather": "all at once",
            "sequential": "one after the other",
        }
        return f"{self.name}, {order[self.name]}: {self.reason}"


def strategy_for(recipe: RecipeLike, strategy: str = "auto") -> Strategy:
    """Return the strategy that a recipe's structure allows, or the requested one.

    Args:
        recipe: the regression problem.
        strategy: ``"auto"``, or one of `STRATEGIES`.

    Raises:
        RecipeError: a strategy that this recipe does not allow.
        ValueError: an unknown strategy.

    Examples:
        >>> rc.parallel.strategy_for(rc.zoo.get("gated_delta_net").recipe).name
        'affine'
        >>> rc.parallel.strategy_for(rc.zoo.get("softmax_attention").recipe).name
        'gather'
        >>> rc.parallel.strategy_for(rc.zoo.get("titans").recipe).name
        'sequential'
    """
    recipe = as_recipe(recipe, "rc.parallel.strategy_for")
    if strategy not in ("auto", *STRATEGIES):
        raise ValueError(
            f"strategy must be auto, {', '.join(STRATEGIES[:-1])} or {STRATEGIES[-1]}, "
            f"not {strategy!r}"
        )
    reasons: dict[str, str] = {}
    for name, result in (
        ("gather", _gather_strategy(recipe)),
        ("affine", _affine_strategy(recipe)),
    ):
        if isinstance(result, Strategy):
            if strategy in ("auto", name):
                return result
        else:
            reasons[name] = result
    if strategy in reasons:
        raise RecipeError(
            f"strategy={strategy!r} cannot run this recipe: {reasons[strategy]}; use "
            "strategy='auto' or 'sequential'"
        )
    return Strategy(name="sequential", reason=reasons.get("affine", "requested"))


def _gather_strategy(recipe: Recipe) -> Strategy | str:
    if not recipe.nonparametric or recipe.uses_kernel_rows or recipe.solves_from_gram:
        return "its state contains more than associations"
    if (
        recipe.algorithm.slots
        or recipe.algorithm.batch_size > 1
        or recipe.associations_per_token > 1
    ):
        return "its state contains more than associations"
    if recipe.context.num_sinks:
        return f"the first {recipe.context.num_sinks} associations are kept for the full sequence"
    span = recipe.buffer_size
    stored = "all associations" if span is None else f"the last {span} associations"
    return Strategy(name="gather", reason=f"its state is {stored}")


def _affine_strategy(recipe: Recipe) -> Strategy | str:
    reasons = LinearEngine().unsupported_reasons(recipe)
    if reasons:
        return reasons[0]
    if recipe.memory.read.transposed:
        return "it reads the transposed weights"
    if recipe.memory.read.normalize == "floor":
        return "its normaliser keeps a running scale"
    if recipe.spaced_window:
        return "several associations per token in a window"
    decay = recipe.retention.decay
    writes_only = not recipe.step_sees_prediction and recipe.bias.probe is None
    ignores_prediction = writes_only and recipe.algorithm.recursion == "none"
    normalised = recipe.memory.read.normalize != "none"
    if recipe.memory.is_elementwise and (not ignores_prediction or normalised or not scans(recipe)):
        return "each channel has its own equation"
    per_value = decay is not None and decay.per in ("value", "key_value", "entry")
    if normalised and per_value:
        return "its normaliser and its values decay differently"
    if ignores_prediction and decay is not None and decay.per == "entry":
        return Strategy(name="affine", transition="entries", reason="each entry only decays")
    if ignores_prediction:
        return Strategy(name="affine", transition="decays", reason="the weights only decay")
    if per_value or per_value_systems(recipe):
        return "each value channel has its own equation"
    return Strategy(name="affine", transition="keys", reason="each row of the weights moves alike")
