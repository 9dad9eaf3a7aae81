"""Erasure of every linear map at its own input: delta gradient descent."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from recollect.choices.equation_terms import Term
from recollect.choices.memory.base import Stack

if TYPE_CHECKING:
    from recollect.choices.algorithm.base import Algorithm
    from recollect.recipe.recipe import Recipe

__all__ = ["erasure_conflicts", "erasure_note", "erasure_penalty"]


def erasure_penalty(recipe: Recipe, x: str, i: str) -> Term:
    """Return the penalty with the gradient c W h hᵀ of every linear map.

    ``x`` is the text of the features of the key, and ``i`` the index of the association.
    """
    memory, c = recipe.memory, recipe.algorithm.erasure
    output = memory.prediction_text(x) if memory.linear else f"{memory.weight_symbol} h_{i}"
    return Term((f"½‖{output}‖²",), c)


def erasure_note(recipe: Recipe, i: str) -> tuple[str, ...]:
    """Return the meaning of h in the equations of a memory that is not one matrix."""
    if not recipe.algorithm.erasure or recipe.memory.linear:
        return ()
    return (f"h_{i}: input of each linear map of W at the key; ‖W h_{i}‖² counts it as constant",)


def erasure_conflicts(algorithm: Algorithm, recipe: Recipe) -> Iterator[str]:
    """Yield conflicts of `Algorithm.erasure`."""
    title, memory = f"{algorithm.title}(erasure={algorithm.erasure:g})", recipe.memory
    if not isinstance(memory, Stack):
        yield (
            f"{title} erases the outputs of linear maps, and {memory.title} has none: use "
            "memory.Matrix() or memory.MLP()"
        )
        return
    if not recipe.features.finite:
        yield (
            f"{title} needs the weights of every map, and {recipe.features.title} has infinitely "
            "many features: use features.Identity()"
        )
    if recipe.bias.probe is not None:
        yield f"{title} erases at the key, and {recipe.bias.probe.title} has an erasure: use one"
    if memory.read.normalize != "none":
        yield (
            f"memory.{memory.read.brief} divides by a memory of ones, which {title} erases: use "
            "memory.Read()"
        )
    if recipe.context.horizon is None:
        yield (
            f"{title} erases with every association, and {recipe.context.title} takes all of them "
            "at every token: use context.Online()"
        )
    if algorithm.uses_normalized_steps or algorithm.uses_line_search:
        yield (
            f"{title} changes the prediction by its erasure too, which the scale of normalised "
            "steps does not count: use normalized_steps=False"
        )
    if algorithm.rate_depends_on_key or algorithm.inverse is not None or algorithm.solves:
        yield (
            f"{title} solves for the loss of the associations alone: use "
            "algorithm.GradientDescent() or Momentum()"
        )
