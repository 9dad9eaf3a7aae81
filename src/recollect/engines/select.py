"""Selection of the engine that runs a recipe, with the reasons."""

from __future__ import annotations

from recollect.engines.base import Engine, Selection
from recollect.engines.deep.engine import DeepEngine
from recollect.engines.kernel.engine import KernelEngine
from recollect.engines.least_squares.engine import LeastSquaresEngine
from recollect.engines.linear.engine import LinearEngine
from recollect.engines.reference.engine import ReferenceEngine
from recollect.messages import RecipeError
from recollect.recipe.resolve import RecipeLike, as_recipe

__all__ = ["ENGINES", "select_engine"]

ENGINES: tuple[Engine, ...] = (
    LinearEngine(),
    LeastSquaresEngine(),
    KernelEngine(),
    DeepEngine(),
    ReferenceEngine(),
)
"""Engines in order: the first that supports a recipe runs it."""


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
    recipe, names = as_recipe(recipe, "select_engine"), [one.name for one in ENGINES]
    if engine not in ("auto", "torch", "fla", *names):
        raise ValueError(
            f"engine={engine!r} is unknown: use 'auto', 'torch', 'fla' or one of {', '.join(names)}"
        )
    rejected: dict[str, list[str]] = {}
    for one in ENGINES:
        reasons = one.unsupported_reasons(recipe)
        if reasons:
            rejected[one.name] = reasons
        elif engine == one.name or engine not in names:
            return Selection(engine=one, description=one.describe(recipe), rejected=rejected)
    supported = ", ".join(name for name in names if name not in rejected)
    raise RecipeError(
        f"engine={engine!r} cannot run this recipe: {rejected[engine][0]}; these can: {supported}"
    )
