"""The contract of a preset: its recipe in every engine and mode, and its layer."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch
from torch import nn

from recollect.engines.select import ENGINES
from recollect.messages import RecipeError
from recollect.recipe.recipe import Recipe
from recollect.testing.compare import require
from recollect.testing.engines import agree, tame
from recollect.testing.inputs import ill_posed, small_inputs
from recollect.testing.modes import (
    check_autocast,
    check_copies,
    check_create_graph,
    check_inference,
    check_layer,
    check_layer_gradients,
    check_subset,
)
from recollect.testing.recipes import ENGINE, check_recipe

__all__ = ["Buildable", "check_preset"]


@runtime_checkable
class Buildable(Protocol):
    """What is asked of a preset: a name, a recipe, and layers, as `recollect.zoo.Preset` has."""

    @property
    def name(self) -> str:
        """What it is called."""
        ...

    @property
    def recipe(self) -> Recipe:
        """What it computes."""
        ...

    def build(self, d_model: int, num_heads: int) -> nn.Module:
        """A layer with fresh weights."""
        ...


def check_preset(preset: Buildable) -> None:
    """Hold a preset to what the zoo's are held to.

    Its recipe keeps every promise of a recipe, agrees with the reference in every engine that
    accepts it, and is the same under create_graph, in inference mode, under autocast and copied;
    its layer gives the same token by token, copied and pickled, and the same gradient under
    create_graph. Whether it is the paper's system, only a test with the paper's formula can say.

    Args:
        preset: a name, a recipe, and ``build(d_model, heads)``.

    Raises:
        AssertionError: what is false, in one sentence that names the preset.
        RecipeError: it is no preset.

    Example:
        >>> import recollect as rc
        >>> rc.testing.check_preset(rc.zoo.get("delta_net"))
    """
    if not (isinstance(preset, Buildable) and isinstance(preset.recipe, Recipe)):
        raise RecipeError(f"check_preset takes a preset with a recipe, not {preset!r}")
    try:
        _check(preset)
    except Exception as problem:
        said = " ".join(str(problem).split())
        if not isinstance(problem, AssertionError):
            said = f"{type(problem).__name__}: {said}"
        raise AssertionError(f"preset {preset.name}: {said}") from problem


def _check(preset: Buildable) -> None:
    recipe = preset.recipe
    check_recipe(recipe)
    if not ill_posed(recipe):
        x = tame(recipe, small_inputs(recipe, 1))
        for engine in ENGINES:
            if engine.name != "reference" and not engine.unsupported_reasons(recipe):
                agree(recipe, x, engine.name, ENGINE, chunk_size=4)
        short = tame(recipe, small_inputs(recipe, 2, longest=5))
        for method in ("auto", "reference"):
            check_create_graph(recipe, short, method)
            check_inference(recipe, short, method)
        check_autocast(recipe, short)
        check_copies(recipe, short)
        check_subset(recipe, short, 0)
    tokens = torch.randn(1, 6, 32, generator=torch.Generator().manual_seed(1))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layer = preset.build(d_model=32, num_heads=2)
    require(isinstance(layer, nn.Module), "build gives something other than a layer")
    check_layer(layer, tokens)
    check_layer_gradients(layer.double(), tokens.double())
