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
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from recollect.wording import suggests

if TYPE_CHECKING:
    from recollect import blocks, experiments, lm, parallel, tasks, testing, theory, zoo
    from recollect.benchmarks.recipe import bench
    from recollect.blocks.cost import cost
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
    from recollect.experiments import compare, reproduce
    from recollect.explain.diagnose import Diagnosis, Fault, diagnose
    from recollect.explain.explain import Explanation, explain
    from recollect.explain.trace import Trace, trace
    from recollect.layer import LayerState, MemoryLayer
    from recollect.layer.options import GateOptions, LayerOptions, Tie
    from recollect.recall.reading import read
    from recollect.recall.recall import recall
    from recollect.recipe.files import load_recipe
    from recollect.recipe.initial_params import initial_params
    from recollect.recipe.recipe import Recipe
    from recollect.state.state import State

__version__ = "0.3.0.dev0"

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
    "Trace",
    "algorithm",
    "bench",
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
    "trace",
    "watch_solves",
    "zoo",
]

_CHOICES = ("algorithm", "bias", "context", "features", "memory", "retention")
_PACKAGES = ("blocks", "experiments", "lm", "parallel", "tasks", "testing", "theory", "zoo")

_SOURCES = {
    "ConvergenceWarning": "engines.least_squares.conjugate_gradient",
    "Cost": "cost",
    "Diagnosis": "explain.diagnose",
    "Explanation": "explain.explain",
    "Fault": "explain.diagnose",
    "Gate": "choices.fields",
    "GateOptions": "layer.options",
    "LayerOptions": "layer.options",
    "LayerState": "layer",
    "MemoryLayer": "layer",
    "Param": "choices.fields",
    "Recipe": "recipe.recipe",
    "RecipeError": "choices.member",
    "Solves": "engines.least_squares.conjugate_gradient",
    "State": "state.state",
    "StaticDecoder": "decoder",
    "Tie": "layer.options",
    "Trace": "explain.trace",
    "bench": "benchmarks.recipe",
    "compare": "experiments",
    "cost": "blocks.cost",
    "diagnose": "explain.diagnose",
    "explain": "explain.explain",
    "flag": "choices.fields",
    "initial_params": "recipe.initial_params",
    "integer": "choices.fields",
    "load_recipe": "recipe.files",
    "member": "choices.member",
    "number": "choices.fields",
    "option": "choices.fields",
    "quantity": "choices.fields",
    "read": "recall.reading",
    "recall": "recall.recall",
    "reproduce": "experiments",
    "select": "engines.select",
    "slot": "choices.fields",
    "trace": "explain.trace",
    "watch_solves": "engines.least_squares.conjugate_gradient",
}
"""Module of each public name.

Names are imported on first use: commands that do not need torch start without it.
"""

if not TYPE_CHECKING:  # for type checkers, a module with this function has every name

    def __getattr__(name: str) -> Any:
        if name in _CHOICES:
            value = importlib.import_module(f"recollect.choices.{name}")
        elif name in _PACKAGES:
            value = importlib.import_module(f"recollect.{name}")
        elif name in _SOURCES:
            value = getattr(importlib.import_module(f"recollect.{_SOURCES[name]}"), name)
        else:
            return suggests("recollect", __all__)(name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted(__all__)


class _Package(ModuleType):
    """A package in which the name of a public function never becomes the module of that name.

    Importing the modules `recall`, `cost` and `explain` would otherwise replace the functions.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _SOURCES and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
