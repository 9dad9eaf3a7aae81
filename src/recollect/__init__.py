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
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from recollect import blocks, experiments, fields, lm, parallel, tasks, testing, theory, zoo
    from recollect.benchmarks.recipe import bench
    from recollect.blocks.cost import cost
    from recollect.choices import algorithm, bias, context, features, memory, retention
    from recollect.choices.member import member
    from recollect.costs import Cost
    from recollect.decoder import StaticDecoder
    from recollect.engines.least_squares.conjugate_gradient import (
        ConvergenceWarning,
        SolverReport,
        record_solver,
    )
    from recollect.engines.select import select_engine
    from recollect.experiments import compare, reproduce
    from recollect.explanation.diagnose import Diagnosis, Fault, diagnose
    from recollect.explanation.explain import Explanation, explain
    from recollect.explanation.trace import Trace, trace
    from recollect.fields import Gate, Param, quantity
    from recollect.functional.read import read
    from recollect.functional.recall import initial_state, recall
    from recollect.layer import LayerState, MemoryLayer
    from recollect.layer.options import GateOptions, LayerOptions, Tie
    from recollect.messages import RecipeError
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
    "SolverReport",
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
    "fields",
    "initial_params",
    "initial_state",
    "lm",
    "load_recipe",
    "member",
    "memory",
    "parallel",
    "quantity",
    "read",
    "recall",
    "record_solver",
    "reproduce",
    "retention",
    "select_engine",
    "tasks",
    "testing",
    "theory",
    "trace",
    "zoo",
]

_CHOICES = ("algorithm", "bias", "context", "features", "memory", "retention")
_PACKAGES = (
    "blocks",
    "experiments",
    "fields",
    "lm",
    "parallel",
    "tasks",
    "testing",
    "theory",
    "zoo",
)

_SOURCES = {
    "ConvergenceWarning": "engines.least_squares.conjugate_gradient",
    "Cost": "costs",
    "Diagnosis": "explanation.diagnose",
    "Explanation": "explanation.explain",
    "Fault": "explanation.diagnose",
    "Gate": "fields",
    "GateOptions": "layer.options",
    "LayerOptions": "layer.options",
    "LayerState": "layer",
    "MemoryLayer": "layer",
    "Param": "fields",
    "Recipe": "recipe.recipe",
    "RecipeError": "messages",
    "SolverReport": "engines.least_squares.conjugate_gradient",
    "State": "state.state",
    "StaticDecoder": "decoder",
    "Tie": "layer.options",
    "Trace": "explanation.trace",
    "bench": "benchmarks.recipe",
    "compare": "experiments",
    "cost": "blocks.cost",
    "diagnose": "explanation.diagnose",
    "explain": "explanation.explain",
    "initial_params": "recipe.initial_params",
    "initial_state": "functional.recall",
    "load_recipe": "recipe.files",
    "member": "choices.member",
    "quantity": "fields",
    "read": "functional.read",
    "recall": "functional.recall",
    "record_solver": "engines.least_squares.conjugate_gradient",
    "reproduce": "experiments",
    "select_engine": "engines.select",
    "trace": "explanation.trace",
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
            message, module = f"module 'recollect' has no attribute {name!r}", sys.modules[__name__]
            raise AttributeError(message, name=name, obj=module)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted(__all__)
