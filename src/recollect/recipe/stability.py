"""Stability limit of normalised steps.

A normalised step (`Algorithm.uses_normalized_steps`) of rate 1 removes an association's error to
first order, for any size of keys, values and weights; under a norm, it removes the part of the
error that the norm allows. If the association is written n times before the next read, the total
step is n η times its error, which diverges for n η > 2.

The limit depends on b, θ_t and γ. b tokens are taken at the same weights (1 if steps are averaged
over them). A momentum θ_t adds up to 1/(1 − θ_t) of every step. A window has weights γ. A rate of
s_t times the limit is

    η_t = s_t · 2 (1 − θ_t) / (b Σ_m γ_t[m]).

A line search (`Algorithm.uses_line_search`) includes its window and momentum, and at the end of a
batch all of its tokens. There η_t = 2 s_t, and s_t = 1/2 minimises the errors. Values of s_t
therefore have equal meanings for every width, head, inner batch, window and momentum.

The factor b assumes that all keys of a batch are equal. With ``batch_overlap="measured"``, the rate
is η_t r_t with `overlap_discount` r_t, and n = min(b, 8) replaces b.
"""

from __future__ import annotations

from dataclasses import dataclass

from recollect.choices.algorithm.normalized_steps import effective_batch_size
from recollect.recipe.recipe import Recipe

__all__ = ["StabilityLimit", "step_limit"]


@dataclass(frozen=True, kw_only=True)
class StabilityLimit:
    """Rate beyond which a repeated association diverges.

    `recollect.layer.gates.stability_limit` computes it for the tokens of a layer.
    """

    batch_size: int  # number of steps that add up before the next read
    window: int  # number of associations of one step, if their weights are 1
    gated: bool  # whether their weights are the gate "window"
    momentum: bool  # whether θ is a gate or a param
    constant_momentum: float  # θ if it is a constant, else 0

    def __str__(self) -> str:
        factors = [str(n) for n in (self.batch_size, self.window) if n > 1]
        factors += ["Σ_m γ_t[m]"] * self.gated
        numerator = "2 (1 − θ_t)" if self.momentum or self.constant_momentum else "2"
        denominator = " · ".join(factors)
        return " / ".join(
            filter(None, (numerator, f"({denominator})" if len(factors) > 1 else denominator))
        )


def step_limit(recipe: Recipe) -> StabilityLimit | None:
    """Return the limit of a recipe's rate; ``None`` if its steps are not normalised."""
    algorithm = recipe.algorithm
    if not (algorithm.uses_normalized_steps or algorithm.uses_line_search):
        return None
    searches_batch = algorithm.uses_line_search and algorithm.update_every == "batch"
    is_single = algorithm.reduction == "mean" or searches_batch
    gated = not algorithm.uses_line_search and "window" in {gate.name for gate in recipe.gates()}
    accumulates = "momentum" in algorithm.quantity_axes and not algorithm.uses_line_search
    constant = recipe.constants().get("momentum") if accumulates else None
    return StabilityLimit(
        batch_size=1 if is_single else effective_batch_size(algorithm),
        window=1 if gated or algorithm.uses_line_search else recipe.context.horizon or 1,
        gated=gated,
        momentum=accumulates and constant is None,
        constant_momentum=constant or 0.0,
    )
