"""Engine ``kernel``: memories that store associations, in one of several forms.

Each form returns the reasons why it cannot run a recipe, and the first form without reasons runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from recollect.engines.common.problem import Problem
from recollect.engines.kernel import attention, local_regression, softmax
from recollect.engines.kernel import deep as kernel_deep
from recollect.engines.kernel import delta_rule as kernel_delta
from recollect.engines.kernel import regression as kernel_regression
from recollect.state.state import State

if TYPE_CHECKING:
    from recollect.recipe.bound import BoundRecipe
    from recollect.recipe.recipe import Recipe

__all__ = [
    "FORMS",
    "Form",
    "KernelPlan",
    "describes",
    "follows",
    "inner_gradients",
    "needs_digits",
    "plan",
    "read",
    "refuses",
    "run",
    "token",
]


@dataclass(frozen=True, kw_only=True)
class Form:
    """Method for memories that store associations.

    Attributes:
        refuses: function that returns the reasons why a recipe is unsupported.
        describes: function that returns a short description of the method.
        run: function that returns outputs and the state after the last token.
        read: function that returns outputs of read-only queries with their gates, or ``None`` for
            the reference engine.
        needs_digits: reason why products stay float32, or ``None``.
        inner_gradients: whether inner gradients are computed by autograd.
    """

    refuses: Callable[[Recipe], list[str]]
    describes: Callable[[Recipe], str]
    run: Callable[[Problem], tuple[Tensor, State]]
    read: Callable[[Problem, Mapping[str, Tensor]], Tensor] | None = None
    needs_digits: str | None = None
    inner_gradients: bool = False


def _keeping(attend: Callable[[Problem], Tensor]) -> Callable[[Problem], tuple[Tensor, State]]:
    """Return `run` of a form whose state consists of the associations."""

    def run(problem: Problem) -> tuple[Tensor, State]:
        return attend(problem), problem.final_state()

    return run


FORMS: tuple[Form, ...] = (
    Form(
        refuses=attention.refuses,
        describes=attention.describes,
        run=attention.run,
        read=attention.attend,
    ),
    Form(
        refuses=local_regression.refuses,
        describes=local_regression.describes,
        run=_keeping(local_regression.attend),
        read=local_regression.attend,
        needs_digits="the system of a fit is made of differences, which lose digits",
    ),
    Form(
        refuses=kernel_regression.refuses,
        describes=kernel_regression.describes,
        run=kernel_regression.run,
        read=kernel_regression.read,
    ),
    Form(
        refuses=kernel_delta.refuses,
        describes=kernel_delta.describes,
        run=kernel_delta.run,
    ),
    Form(
        refuses=kernel_deep.refuses,
        describes=kernel_deep.describes,
        run=kernel_deep.run,
        inner_gradients=True,
    ),
)


def needs_digits(recipe: Recipe) -> str | None:
    """Return the reason why products of a recipe stay float32, or ``None``."""
    return next((form.needs_digits for form in FORMS if not form.refuses(recipe)), None)


def inner_gradients(recipe: Recipe) -> bool:
    """Return whether a recipe's form computes inner gradients by autograd."""
    return form_of(recipe).inner_gradients


def refuses(recipe: Recipe) -> list[str]:
    """Return the reasons why no form can run a recipe; empty if one can."""
    refusals: list[str] = []
    for form in FORMS:
        reasons = form.refuses(recipe)
        if not reasons:
            return []
        refusals += reasons
    if recipe.uses_kernel_rows:
        return (kernel_delta if recipe.memory.linear else kernel_deep).refuses(recipe)
    if not recipe.nonparametric and recipe.features.finite:
        return [f"{recipe.memory.title} keeps weights, not associations"]
    return refusals


def form_of(recipe: Recipe) -> Form:
    """Return the form that runs a supported recipe."""
    return next(form for form in FORMS if not form.refuses(recipe))


def describes(recipe: Recipe) -> str:
    """Return a short description of the method for a recipe."""
    return form_of(recipe).describes(recipe)


@dataclass(frozen=True)
class KernelPlan:
    """Precomputed plan of a recipe and its sizes.

    Attributes:
        form: form that runs the recipe.
        scale: scale of the logits for plain softmax attention to the full past, else ``None``.
    """

    form: Form
    scale: float | None


def plan(bound: BoundRecipe) -> KernelPlan:
    """Return the plan of a recipe."""
    return KernelPlan(form_of(bound.recipe), softmax.plain_scale(bound))


def follows(bound: BoundRecipe, tokens: int) -> bool:
    """Return whether a compiler can trace calls of a recipe, as for plain attention.

    Args:
        bound: bound recipe.
        tokens: number of tokens of a call.
    """
    del tokens
    return form_of(bound.recipe).run is attention.run


def run(problem: Problem) -> tuple[Tensor, State]:
    """Return outputs ``[B, T, H, G, V]`` and the state after the last token."""
    plan: KernelPlan = problem.bound.plan
    return plan.form.run(problem)


def token(
    bound: BoundRecipe,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: Mapping[str, Tensor],
    state: State,
) -> tuple[Tensor, State] | None:
    """Run one token of plain softmax attention, or return ``None`` for other recipes.

    Args:
        bound: bound recipe.
        q: query ``[B, 1, H·G, K]``.
        k: key ``[B, 1, H, K]``.
        v: value ``[B, 1, H, V]``.
        gates: unused, since plain softmax attention has no gates.
        state: state before the token.
    """
    plan: KernelPlan = bound.plan
    if plan.scale is None:
        return None
    return softmax.token(q, k, v, state, scale=plan.scale, recipe_id=bound.recipe_id)


def read(problem: Problem, query_rates: Mapping[str, Tensor]) -> Tensor | None:
    """Return outputs of read-only queries, or ``None`` for the reference engine."""
    plan: KernelPlan = problem.bound.plan
    return None if plan.form.read is None else plan.form.read(problem, query_rates)
