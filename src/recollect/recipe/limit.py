"""The stability limit of steps that are measured by the errors that they correct.

A normalised step (`Algorithm.normalizes`) of rate 1 corrects one association entirely, or as far as
a norm lets it be said, to first order and whatever the size of keys, values and weights. What is
written n times before anything is read again moves by n η times its error, and beyond twice its
error repetition diverges. With b tokens taken at the same weights (1 where steps are averaged over
them), a momentum θ_t that adds up to 1/(1 − θ_t) of every step, and a window's weights γ, the share
s_t of that limit is the rate

    η_t = s_t · 2 (1 − θ_t) / (b Σ_m γ_t[m]).

A step whose length was searched (`Algorithm.searches`) counts its window and momentum itself, and
at the border of a batch all of its tokens: there η_t = 2 s_t, and s_t = 1/2 leaves least of the
errors. The same numbers then mean the same at every width, head, inner batch, window and momentum.

Steps of one batch add up as far as its keys are alike, and b supposes that all of them are equal.
Where the algorithm measures that (``limit="keys"``), the memory takes η_t r_t, r_t what earlier
keys of the batch have left of token t's direction, and n = min(b, 8) stands for b.
"""

from __future__ import annotations

from dataclasses import dataclass

from recollect.choices.algorithm.share import together
from recollect.recipe.recipe import Recipe

__all__ = ["StepLimit", "step_limit"]


@dataclass(frozen=True, kw_only=True)
class StepLimit:
    """The rate beyond which one repeated association diverges, of a recipe of measured steps.

    A layer works it out for its tokens (`recollect.layer.gates.limit_of_rate`).

    Attributes:
        batch: steps that add up before anything is read again.
        window: associations of one step, where they weigh 1.
        gated: whether the token weighs them, by its gate ``"window"``.
        momentum: whether the token, or a param, has θ. theta: a constant one, or 0.
    """

    batch: int
    window: int
    gated: bool
    momentum: bool
    theta: float

    def __str__(self) -> str:
        over = [str(n) for n in (self.batch, self.window) if n > 1]
        over += ["Σ_m γ_t[m]"] * self.gated
        kept = " (1 − θ_t)" if self.momentum or self.theta else ""
        below = f" / ({' · '.join(over)})" if len(over) > 1 else "".join(f" / {x}" for x in over)
        return f"2{kept}{below}"


def step_limit(recipe: Recipe) -> StepLimit | None:
    """The limit of a recipe's rate; ``None`` where its steps are not measured by their errors.

    Args:
        recipe: whose rate it is.
    """
    algorithm = recipe.algorithm
    if not (algorithm.normalizes or algorithm.searches):
        return None
    apart = algorithm.reduce == "mean" or algorithm.every == "batch"
    gated = not algorithm.searches and "window" in {gate.name for gate in recipe.gates()}
    accumulates = "momentum" in algorithm.numbers and not algorithm.searches
    constant = recipe.constants().get("momentum") if accumulates else None
    return StepLimit(
        batch=1 if apart else together(algorithm),
        window=1 if gated or algorithm.searches else recipe.context.horizon or 1,
        gated=gated,
        momentum=accumulates and constant is None,
        theta=constant or 0.0,
    )
