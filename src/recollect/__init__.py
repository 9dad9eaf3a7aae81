"""recollect: sequence layers as associative memory.

State a layer by six choices, and get the exact layer, a fast parallel form, constant-state
decoding, a language model, and the experiments to judge it::

    import recollect as rc

    recipe = rc.Recipe(bias=rc.bias.L2(), retention=rc.retention.Decay(when="before"))
    print(rc.explain(recipe))

Examples in docstrings take ``rc`` and ``torch`` as imported; all of them run as tests.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from recollect.blocks.cost import cost
from recollect.blocks.mixers import names_mean
from recollect.choices import algorithm, bias, context, features, memory, retention
from recollect.choices.fields import (
    Gate,
    Param,
    flag,
    integer,
    number,
    option,
    quantity,
    slot,
)
from recollect.choices.member import RecipeError, member
from recollect.cost import Cost
from recollect.decoder import StaticDecoder
from recollect.engines.least_squares.conjugate_gradient import (
    ConvergenceWarning,
    Solves,
    watch_solves,
)
from recollect.engines.select import select
from recollect.explain.diagnose import Diagnosis, Fault, diagnose
from recollect.explain.explain import Explanation, explain
from recollect.layer import LayerState, MemoryLayer
from recollect.layer.options import GateOptions, LayerOptions, Tie
from recollect.recall.reading import read
from recollect.recall.recall import recall
from recollect.recipe.argument import names_stand_for
from recollect.recipe.files import load_recipe
from recollect.recipe.initial_params import initial_params
from recollect.recipe.recipe import Recipe
from recollect.report.notebook import equations_by
from recollect.state.state import State
from recollect.wording import suggests

if TYPE_CHECKING:
    from recollect import blocks, experiments, lm, parallel, tasks, testing, theory, zoo
    from recollect.experiments import compare, reproduce
    from recollect.zoo.preset import Preset

__version__ = "0.2.0"

__all__ = [
    "ConvergenceWarning",
    "Cost",
    "Diagnosis",
    "Explanation",
    "Fault",
    "Gate",
    "GateOptions",
    "LayerOptions",
    "LayerState",
    "MemoryLayer",
    "Param",
    "Recipe",
    "RecipeError",
    "Solves",
    "State",
    "StaticDecoder",
    "Tie",
    "algorithm",
    "bias",
    "blocks",
    "compare",
    "context",
    "cost",
    "diagnose",
    "experiments",
    "explain",
    "features",
    "flag",
    "initial_params",
    "integer",
    "lm",
    "load_recipe",
    "member",
    "memory",
    "number",
    "option",
    "parallel",
    "quantity",
    "read",
    "recall",
    "reproduce",
    "retention",
    "select",
    "slot",
    "tasks",
    "testing",
    "theory",
    "watch_solves",
    "zoo",
]

# Loaded on first use: they need optional dependencies, or cost time that a recipe does not.
_MODULES = ("blocks", "experiments", "lm", "parallel", "tasks", "testing", "theory", "zoo")
_EXPERIMENTS = ("compare", "reproduce")


def _of_the_zoo(name: str) -> Preset:
    """What a name means where a recipe is taken."""
    from recollect.zoo.preset import get

    return get(name)


names_stand_for(_of_the_zoo)


def _equations(recipe: Any) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """What a notebook shows of a recipe beside its six choices."""
    try:
        return explain(recipe).equations
    except RecipeError:
        return ()


equations_by(_equations)


def _mixer_of_the_zoo(name: str) -> Any:
    """What a name means where a mixer is taken."""
    from recollect.zoo.preset import find

    return find(name)


names_mean(_mixer_of_the_zoo)


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"recollect.{name}")
    if name in _EXPERIMENTS:
        return getattr(importlib.import_module("recollect.experiments"), name)
    return suggests("recollect", __all__)(name)


def __dir__() -> list[str]:
    return sorted(__all__)
