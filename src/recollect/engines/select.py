"""The selector: one place that decides how a recipe runs, and says why.

Engines answer structural questions of the recipe; the first that refuses for no reason runs. Adding
an engine is adding it to `ENGINES`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from recollect.engines import deep, kernel, least_squares, linear, reference
from recollect.engines.common.problem import Problem
from recollect.engines.common.sizes import Counted, Sizes
from recollect.messages import RecipeError
from recollect.recipe.bound import BoundRecipe
from recollect.recipe.resolve import RecipeLike, as_recipe
from recollect.state.state import State

if TYPE_CHECKING:
    from recollect.recipe.recipe import Recipe

__all__ = ["ENGINES", "Engine", "Selection", "select_engine"]


@dataclass(frozen=True, kw_only=True)
class Engine:
    """A way to run recipes.

    Attributes:
        refuses: reasons why it cannot run a recipe; none means it can.
        describes: how it would run it, in a few words.
        run: outputs and final state of a problem.
        plan: what `run` asks of the recipe and the sizes, derived once for all calls and handed to
            it as `BoundRecipe.plan`.
        torch_plan: the same where operations of torch alone are asked for (``engine="torch"``);
            ``None`` where `plan` takes nothing else.
        token: the same of one token that goes on from a state, straight from what a layer made and
            need not be looked at again (`recollect.engines.linear.decode.token` has the arguments;
            gates and params in one mapping);
            ``None``, or a result of ``None``, leaves it to `run`.
        cost: FLOPs of a call of these sizes, and what they rest on; ``None`` where nobody has
            counted them, so that `recollect.cost` refuses to guess.
        reading: FLOPs of so many queries per row and query head that read in one call and write
            nothing, of a row that has learned ``T`` tokens; ``None`` as for ``cost``.
        read: outputs of queries that only read, given the numbers they ask with; ``None`` (or a
            result of ``None``) leaves it to the reference.
        shows_nan: whether a NaN that goes in always comes out (no comparison swallows it), so that
            of a layer's decoded token only the outputs are checked.
        follows: whether a compiled layer lets the compiler follow calls of a recipe with so many
            tokens (its sizes, the tokens), as it can; ``None`` lets it follow none, and hands each
            over as one operation (`recollect.functional.one_operation`).
        needs_digits: why its products of a recipe stay float32 whatever precision is asked for;
            ``None`` if they take it (`recollect.choices.matmul_precision.PRECISIONS`).
        rounded: whether it goes on from a memory whose tensors were rounded to half precision.
        inner_gradients: whether it may take inner gradients of a recipe by autograd, which
            inference mode forbids and a compiler that follows the engine would lose.
    """

    name: str
    refuses: Callable[[Recipe], list[str]]
    describes: Callable[[Recipe], str]
    run: Callable[[Problem], tuple[Tensor, State]]
    cost: Callable[[Recipe, Sizes], Counted] | None = None
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
        """The precision that products of a recipe take where one is asked for.

        Args:
            recipe: that it runs.
            precision: as asked for.
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
        needs_digits=lambda recipe: "the reference is what others are compared with",
        cost=reference.flops,
        reading=reference.reading,
    ),
)


@dataclass(frozen=True, kw_only=True)
class Selection:
    """The engine that runs a recipe, and why the faster ones do not.

    Attributes:
        refused: reasons by engine name, for the engines tried before.
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
        recipe: to be run.
        engine: ``"auto"``, ``"reference"``, or an engine's name. ``"torch"`` is ``"auto"`` without
            Triton kernels, and ``"fla"`` the engine whose products flash-linear-attention takes.

    Raises:
        ValueError: an unknown engine.
        RecipeError: no recipe, or an engine requested by name that cannot run this recipe.

    Examples:
        >>> rc.select_engine(rc.zoo.get("titans").recipe).engine.name
        'deep'
        >>> rc.select_engine(rc.Recipe(), "reference").engine.name
        'reference'
    """
    recipe = as_recipe(recipe, "select_engine")
    names = [one.name for one in ENGINES]
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
            able = [e.name for e in ENGINES if not e.refuses(recipe)]
            raise RecipeError(
                f"engine={engine!r} cannot run this recipe: {reasons[0]}; these can: "
                f"{', '.join(able)}"
            )
        if not reasons and engine in ("auto", candidate.name):
            return Selection(engine=candidate, how=candidate.describes(recipe), refused=refused)
        if reasons:
            refused[candidate.name] = reasons
    raise AssertionError("the reference runs every recipe")
