"""Engine ``kernel``: memories that store associations, by the first method that fits a recipe."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from torch import Tensor

from recollect.engines.base import Engine
from recollect.engines.common.kernel_rows_flops import kernel_rows_flops, row_read_flops
from recollect.engines.common.problem import Problem
from recollect.engines.common.sizes import FlopCount, Sizes
from recollect.engines.kernel import softmax
from recollect.engines.kernel.attention import Attention
from recollect.engines.kernel.cost import STEP_SECONDS, gram_flops, local_flops
from recollect.engines.kernel.delta_rule import BLOCK, KernelDeltaRule
from recollect.engines.kernel.inner_batches import DeepKernelMemory
from recollect.engines.kernel.local_regression import LocalRegression
from recollect.engines.kernel.regression import KernelRegression
from recollect.state.state import State

if TYPE_CHECKING:
    from recollect.recipe.bound import BoundRecipe
    from recollect.recipe.recipe import Recipe

__all__ = ["KernelEngine"]

ATTENTION, DELTA_RULE, DEEP = Attention(), KernelDeltaRule(), DeepKernelMemory()
METHODS = (ATTENTION, LocalRegression(), KernelRegression(), DELTA_RULE, DEEP)


def method_of(recipe: Recipe) -> Engine:
    """Return the method that runs a supported recipe."""
    return next(method for method in METHODS if not method.unsupported_reasons(recipe))


@dataclass(frozen=True)
class KernelPlan:
    """Method of a recipe, and the scale of its logits if it is plain softmax attention."""

    method: Engine
    scale: float | None


class KernelEngine(Engine):
    """Memories that store associations."""

    name = "kernel"
    propagates_nan = True

    def unsupported_reasons(self, recipe: Recipe) -> list[str]:
        reasons: list[str] = []
        for method in METHODS:
            unsupported = method.unsupported_reasons(recipe)
            if not unsupported:
                return []
            reasons += unsupported
        if recipe.uses_kernel_rows:
            return (DELTA_RULE if recipe.memory.linear else DEEP).unsupported_reasons(recipe)
        if not recipe.nonparametric and recipe.features.finite:
            return [f"{recipe.memory.title} keeps weights, not associations"]
        return reasons

    def describe(self, recipe: Recipe) -> str:
        return method_of(recipe).describe(recipe)

    def make_plan(self, bound: BoundRecipe) -> KernelPlan:
        return KernelPlan(method_of(bound.recipe), softmax.plain_scale(bound))

    def run(self, problem: Problem) -> tuple[Tensor, State]:
        plan: KernelPlan = problem.bound.plan
        return plan.method.run(problem)

    def has_token_path(self, bound: BoundRecipe) -> bool:
        plan: KernelPlan = bound.plan
        return plan.scale is not None

    def decode_token(
        self,
        bound: BoundRecipe,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        gates: Mapping[str, Tensor],
        state: State,
    ) -> tuple[Tensor, State] | None:
        return softmax.token(q, k, v, state, scale=bound.plan.scale, recipe_id=bound.recipe_id)

    def read_state(self, problem: Problem, query_rates: Mapping[str, Tensor]) -> Tensor | None:
        plan: KernelPlan = problem.bound.plan
        return plan.method.read_state(problem, query_rates)

    def is_traceable(self, bound: BoundRecipe, tokens: int) -> bool:
        plan: KernelPlan = bound.plan
        return plan.method is ATTENTION

    def uses_inner_autograd(self, recipe: Recipe) -> bool:
        return method_of(recipe) is DEEP

    def float32_reason(self, recipe: Recipe) -> str | None:
        return method_of(recipe).float32_reason(recipe)

    def count_flops(self, recipe: Recipe, sizes: Sizes) -> FlopCount:
        if not recipe.uses_kernel_rows:
            count = gram_flops if recipe.solves_from_gram else local_flops
            return count(recipe, sizes)
        tokens = recipe.algorithm.batch_size if method_of(recipe) is DEEP else BLOCK
        steps = -(-sizes.T * sizes.n // tokens)
        return replace(kernel_rows_flops(recipe, sizes), steps=steps, step_seconds=STEP_SECONDS)

    def count_read_flops(self, recipe: Recipe, sizes: Sizes, queries: int) -> int:
        K, V, T = sizes.K, sizes.V, sizes.T
        if recipe.uses_kernel_rows:
            return row_read_flops(recipe, sizes, queries)
        if recipe.solves_from_gram:  # the factor is cached
            return T * (T + 2 * (K + V)) * sizes.G * sizes.H * queries
        num_kept = recipe.context.num_kept
        num_visible = T if num_kept is None else min(num_kept, T)
        if not num_visible:
            return 0
        # A decoded token reads one association more than the state stores: its own.
        return local_flops(recipe, replace(sizes, T=num_visible - 1)).decode * queries
