"""Engine ``kernel``: memories that keep associations, in one of several forms.

Each form says which recipes it is not for, and how it runs the others; the first that fits runs.
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
    """A way to run memories that keep associations.

    Attributes:
        refuses, describes: as of an engine.
        run: outputs and the state after the last token.
        read: outputs of queries that only read, given the numbers that they ask with; ``None``
            leaves it to the reference.
        needs_digits: why its products stay float32, if they do.
        inner_gradients: whether it takes inner gradients by autograd.
    """

    refuses: Callable[[Recipe], list[str]]
    describes: Callable[[Recipe], str]
    run: Callable[[Problem], tuple[Tensor, State]]
    read: Callable[[Problem, Mapping[str, Tensor]], Tensor] | None = None
    needs_digits: str | None = None
    inner_gradients: bool = False


def _keeping(attend: Callable[[Problem], Tensor]) -> Callable[[Problem], tuple[Tensor, State]]:
    """`run` of a form whose state is the associations themselves."""

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
    """Why products of a recipe stay float32, if they do."""
    return next((form.needs_digits for form in FORMS if not form.refuses(recipe)), None)


def inner_gradients(recipe: Recipe) -> bool:
    """Whether a recipe's form takes inner gradients by autograd."""
    return form_of(recipe).inner_gradients


def refuses(recipe: Recipe) -> list[str]:
    """Why no form runs a recipe: none if one does."""
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
    """The form that runs a recipe which is not refused."""
    return next(form for form in FORMS if not form.refuses(recipe))


def describes(recipe: Recipe) -> str:
    """How the kernel engine runs a recipe."""
    return form_of(recipe).describes(recipe)


@dataclass(frozen=True)
class KernelPlan:
    """What a recipe and its sizes decide before any call.

    Attributes:
        form: that runs it.
        scale: of the logits, where softmax attention to all of the past is all there is of it.
    """

    form: Form
    scale: float | None


def plan(bound: BoundRecipe) -> KernelPlan:
    """What of a recipe decides how it runs."""
    return KernelPlan(form_of(bound.recipe), softmax.plain_scale(bound))


def follows(bound: BoundRecipe, tokens: int) -> bool:
    """Whether a compiler follows calls of a recipe: attention to associations as they are.

    Args:
        bound: the recipe.
        tokens: of a call.
    """
    del tokens
    return form_of(bound.recipe).run is attention.run


def run(problem: Problem) -> tuple[Tensor, State]:
    """Outputs ``[B, T, H, G, V]`` and the state after the last token."""
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
    """`run` of one token that goes on from a state, where it is plain softmax attention.

    Args:
        bound: the recipe.
        q: the query ``[B, 1, H·G, K]``.
        k: the key ``[B, 1, H, K]``.
        v: the value ``[B, 1, H, V]``.
        gates: none.
        state: before the token.
    """
    plan: KernelPlan = bound.plan
    if plan.scale is None:
        return None
    return softmax.token(q, k, v, state, scale=plan.scale, written=bound.recipe_id)


def read(problem: Problem, query_rates: Mapping[str, Tensor]) -> Tensor | None:
    """Outputs of queries that only read; ``None`` where the reference has to."""
    plan: KernelPlan = problem.bound.plan
    return None if plan.form.read is None else plan.form.read(problem, query_rates)
