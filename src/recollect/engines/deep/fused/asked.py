"""Engine ``fused``: the deep engine with the fused walk, for those who ask for it by name."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from recollect.engines.deep import engine
from recollect.engines.deep.fused.fitting import SIZES, build_of, misfit
from recollect.engines.deep.layout import DeepPlan

if TYPE_CHECKING:
    from recollect.recipe.bound import BoundRecipe
    from recollect.recipe.recipe import Recipe

__all__ = ["fused_describes", "fused_plan", "fused_refuses"]


def fused_plan(bound: BoundRecipe) -> DeepPlan:
    """The deep engine's plan, with the fused walk where the sizes are its own."""
    engine_plan = engine.plan(bound)
    assert engine_plan.chain is not None  # fused_refuses
    build = build_of(
        bound.recipe, engine_plan.chain, engine_plan.maps, momentum=bool(engine_plan.rule.slot)
    )
    return replace(engine_plan, fused=build)


def fused_refuses(recipe: Recipe) -> list[str]:
    """Why the fused walk is not for a recipe; empty where it is, at some sizes."""
    found = engine.refuses(recipe)
    if not found:
        reason = misfit(recipe, engine.chain_of(recipe))
        found = [] if reason is None else [f"the fused walk is not for it: {reason}"]
    return found


def fused_describes(recipe: Recipe) -> str:
    """How and where the fused walk runs a recipe, in a few words."""
    many = recipe.algorithm.batch_size
    sizes = " or ".join(map(str, SIZES))
    return (
        f"CUDA kernels for batches of {many} tokens and {sizes} channels, products in bfloat16, "
        "decoded tokens in float32; elsewhere as deep"
    )
