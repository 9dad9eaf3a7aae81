"""Selection of the engine that runs a recipe, with the reasons.

The first engine of `ENGINES` that supports the recipe's structure runs it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from recollect.engines import deep, kernel, least_squares, linear, reference
from recollect.engines.common.problem import Problem
from recollect.engines.common.sizes import FlopCount, Sizes
from recollect.messages import RecipeError
from recollect.recipe.bound import BoundRecipe
from recollect.recipe.resolve import RecipeLike, as_recipe
from recollect.state.state import State

if TYPE_CHECKING:
    from recollect.recipe.recipe import Recipe

__all__ = ["ENGINES", "Engine", "Selection", "select_engine"]


@dataclass(frozen=True, kw_only=True)
class Engine:
    """Implementation of a set of recipes.

    Attributes:
        name: Name of the engine.
        refuses: Reasons why it cannot run a recipe. An empty list means that it can.
        describes: One-line description of the method for a recipe.
        run: Function that returns outputs and final state of a problem.
        cost: FLOPs of a call and their assumptions. ``None`` without counts, for which
            `recollect.cost` raises an error.
        reading: FLOPs of read-only queries, by number per batch element and query head, after
            ``T`` tokens. ``None`` without counts.
        read: Outputs of read-only queries, given their gates. The reference runs if it is or
            returns ``None``.
        shows_nan: Whether a NaN input always gives a NaN output, so that only the outputs of a
            decoded token are checked.
        rounded: Whether it accepts a state whose tensors were rounded to half precision.
        inner_gradients: Whether it may compute inner gradients of a recipe by autograd, which
            inference mode forbids and torch.compile would drop.
        plan: Values that `run` needs, precomputed once per recipe and sizes and passed to it as
            `BoundRecipe.plan`.
        torch_plan: Plan with torch operations only (``engine="torch"``), or ``None`` if `plan`
            uses nothing else.
        token: Fast path of one token from a state, with a layer's validated inputs
            (`recollect.engines.linear.decode.token` defines the arguments, with gates and params in
            one mapping). `run` runs if it is or returns ``None``.
        follows: Whether torch.compile may trace a call with this number of tokens. With ``None``,
            each call is one opaque operation (`recollect.functional.one_operation`).
        needs_digits: Reason why products stay float32 for any requested precision, or ``None`` if
            they use it (`recollect.choices.matmul_precision.PRECISIONS`).
    """

    name: str
    refuses: Callable[[Recipe], list[str]]
    describes: Callable[[Recipe], str]
    run: Callable[[Problem], tuple[Tensor, State]]
    cost: Callable[[Recipe, Sizes], FlopCount] | None = None
    reading: Callable[[Recipe, Sizes, int], int] | None = None
    read: Callable[[Problem, Mapping[str, Tensor]], Tensor | None] | None = None
    shows_nan: bool = False
    rounded: bool = False
    inner_gradients: Callable[[Recipe], bool] = lambda recipe: True
    plan: Callable[[BoundRecipe], Any] | None = None
    torch_plan: Callable[[BoundRecipe], Any] | None = None
    token: Callable[..., tuple[Tensor, State] | None] | None = None
    follows: Callable[[BoundRecipe, int], bool] | None = None
    needs_digits: Callable[[Recipe], str | None] = lambda recipe: None

    def products(self, recipe: Recipe, precision: str | None) -> str | None:
        """Return the precision of the products of a recipe.

        Args:
            recipe: Recipe that the engine runs.
            precision: Requested precision, or ``None``.
        """
        if precision is None or self.needs_digits(recipe) is None:
            return precision
        return "float32"


ENGINES: tuple[Engine, ...] = (
    Engine(
        name="linear",
        refuses=linear.refuses,
        describes=linear.describes,
        run=linear.run,
        plan=linear.plan,
        token=linear.token,
        follows=linear.follows,
        cost=linear.flops,
        reading=linear.reading,
        shows_nan=True,
        rounded=True,
        inner_gradients=lambda recipe: False,
    ),
    Engine(
        name="least_squares",
        refuses=least_squares.refuses,
        describes=least_squares.describes,
        run=least_squares.run,
        needs_digits=least_squares.needs_digits,
        cost=least_squares.flops,
        reading=least_squares.reading,
        shows_nan=True,
        inner_gradients=lambda recipe: False,
    ),
    Engine(
        name="kernel",
        refuses=kernel.refuses,
        describes=kernel.describes,
        run=kernel.run,
        needs_digits=kernel.needs_digits,
        plan=kernel.plan,
        token=kernel.token,
        follows=kernel.follows,
        cost=kernel.flops,
        reading=kernel.reading,
        read=kernel.read,
        shows_nan=True,
        inner_gradients=kernel.inner_gradients,
    ),
    Engine(
        name="deep",
        refuses=deep.refuses,
        describes=deep.describes,
        run=deep.run,
        plan=deep.plan,
        torch_plan=deep.torch_plan,
        cost=deep.flops,
        reading=deep.reading,
    ),
    Engine(
        name="reference",
        refuses=lambda recipe: [],
        describes=lambda recipe: "token by token, inner gradient by autograd",
        run=reference.run,
        needs_digits=lambda recipe: "all other engines are compared with the reference",
        cost=reference.flops,
        reading=reference.reading,
    ),
)


@dataclass(frozen=True, kw_only=True)
class Selection:
    """Engine that runs a recipe, and the reasons against the engines before it.

    Attributes:
        engine: The engine.
        how: One-line description of its method.
        refused: Reasons by engine name.
    """

    engine: Engine
    how: str
    refused: dict[str, list[str]]

    def __str__(self) -> str:
        lines = [f"{self.engine.name} ({self.how})"]
        lines += [f"not {name}: {reasons[0]}" for name, reasons in self.refused.items()]
        return "\n".join(lines)


def select_engine(recipe: RecipeLike, engine: str = "auto") -> Selection:
    """Choose an engine for a recipe.

    Args:
        recipe: Recipe to run.
        engine: ``"auto"``, ``"reference"``, or the name of an engine. ``"torch"`` is ``"auto"``
            without Triton kernels. ``"fla"`` is ``"auto"`` with the operators of
            flash-linear-attention.

    Raises:
        ValueError: the engine is unknown.
        RecipeError: ``recipe`` is no recipe, or the requested engine cannot run it.

    Examples:
        >>> rc.select_engine(rc.zoo.get("titans").recipe).engine.name
        'deep'
        >>> rc.select_engine(rc.Recipe(), "reference").engine.name
        'reference'
    """
    recipe = as_recipe(recipe, "select_engine")
    names = [candidate.name for candidate in ENGINES]
    if engine in ("torch", "fla"):
        engine = "auto"
    if engine not in ("auto", *names):
        raise ValueError(
            f"engine={engine!r} is unknown: use 'auto', 'torch', 'fla' or one of {', '.join(names)}"
        )
    refused: dict[str, list[str]] = {}
    for candidate in ENGINES:
        reasons = candidate.refuses(recipe)
        if engine == candidate.name and reasons:
            supported = [e.name for e in ENGINES if not e.refuses(recipe)]
            raise RecipeError(
                f"engine={engine!r} cannot run this recipe: {reasons[0]}; these can: "
                f"{', '.join(supported)}"
            )
        if not reasons and engine in ("auto", candidate.name):
            return Selection(engine=candidate, how=candidate.describes(recipe), refused=refused)
        if reasons:
            refused[candidate.name] = reasons
    raise AssertionError("the reference runs every recipe")
