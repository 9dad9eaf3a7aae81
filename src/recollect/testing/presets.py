"""The contract of a preset: its recipe in every engine and mode, and its layer."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch
from torch import nn

from recollect.messages import RecipeError
from recollect.recipe.recipe import Recipe
from recollect.testing.compare import describe_failure, require
from recollect.testing.engines import check_agrees, scale_if_divergent, supported_engines
from recollect.testing.inputs import is_ill_posed, small_inputs
from recollect.testing.modes import (
    check_autocast,
    check_copies,
    check_create_graph,
    check_inference,
    check_layer,
    check_layer_gradients,
    check_subset,
)
from recollect.testing.recipes import ENGINE_TOLERANCE, check_recipe

__all__ = ["Buildable", "check_preset"]


@runtime_checkable
class Buildable(Protocol):
    """A preset: a name, a recipe, and layers, as `recollect.zoo.Preset` has."""

    @property
    def name(self) -> str:
        """Name of the preset."""
        ...

    @property
    def recipe(self) -> Recipe:
        """Recipe of its layers."""
        ...

    def build(self, d_model: int, num_heads: int) -> nn.Module:
        """Return a layer with new weights."""
        ...


def check_preset(preset: Buildable) -> None:
    """Check a preset like those of the zoo.

    The recipe passes all checks of recipes, agrees with the reference in every engine that accepts
    it, and gives equal results under create_graph, in inference mode, under autocast, and after
    copying. The layer gives equal outputs token by token, after copying and pickling, and an equal
    gradient under create_graph. Only a test with the formula of the paper can check that the preset
    is the system of the paper.

    Args:
        preset: a name, a recipe, and ``build(d_model, num_heads)``.

    Raises:
        AssertionError: a check fails; one sentence that names the preset.
        RecipeError: it is no preset.

    Example:
        >>> import recollect as rc
        >>> rc.testing.check_preset(rc.zoo.get("delta_net"))
    """
    if not (isinstance(preset, Buildable) and isinstance(preset.recipe, Recipe)):
        raise RecipeError(f"check_preset takes a preset with a recipe, not {preset!r}")
    with describe_failure(f"preset {preset.name}"):
        _check_recipe(preset.recipe)
        tokens = torch.randn(1, 6, 32, generator=torch.Generator().manual_seed(1))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            layer = preset.build(d_model=32, num_heads=2)
        require(isinstance(layer, nn.Module), "build gives something other than a layer")
        check_layer(layer, tokens)
        check_layer_gradients(layer.double(), tokens.double())


def _check_recipe(recipe: Recipe) -> None:
    check_recipe(recipe)
    if is_ill_posed(recipe):
        return
    x = scale_if_divergent(recipe, small_inputs(recipe, 1))
    for engine, reason in supported_engines(recipe):
        if reason is None:
            check_agrees(recipe, x, engine, ENGINE_TOLERANCE, chunk_size=4)
    short = scale_if_divergent(recipe, small_inputs(recipe, 2, longest=5))
    for engine in ("auto", "reference"):
        check_create_graph(recipe, short, engine)
        check_inference(recipe, short, engine)
    check_autocast(recipe, short)
    check_copies(recipe, short)
    check_subset(recipe, short, 0)
