"""Associations that a nonparametric memory starts with, as if they had been seen already."""

from __future__ import annotations

import torch
from torch import Tensor

from recollect.choices.member import RecipeError
from recollect.recipe.sized import SizedRecipe
from recollect.typing import Init

__all__ = ["initial_associations"]


def initial_associations(
    sized: SizedRecipe, init: Init, *, B: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Keys, values and numbers of the associations that a memory starts with, ``[B, m, H, ...]``.

    Args:
        sized: the recipe, and how many memories of what size.
        init: keys ``[H, m, K]``, values ``[H, m, V]``, then the recipe's travelling gates in order,
            ``[H, m, ...]``. Numbers of the step take their initial values, decays 1.
        B: rows.
        dtype: of the numbers.

    Raises:
        RecipeError: another number of tensors, or shapes that do not fit.
    """
    recipe, H, K, V = sized.recipe, sized.H, sized.K, sized.V
    given = (init,) if isinstance(init, Tensor) else tuple(init)
    travelling = [gate for gate in recipe.gates() if gate.travels]
    names = ["keys", "values", *(gate.name for gate in travelling)]
    if len(given) != len(names):
        raise RecipeError(
            f"init of {recipe.memory.title} is a bundle of {', '.join(names)}, and has "
            f"{len(given)} tensor(s)"
        )
    sizes = recipe.axes(K, V)
    axes = [(K,), (V,), *(tuple(sizes[a] for a in gate.axes) for gate in travelling)]
    m = given[0].shape[1] if given[0].dim() > 1 else 0
    for name, x, shape in zip(names, given, axes, strict=True):
        if tuple(x.shape) != (H, m, *shape):
            raise RecipeError(
                f"init of {recipe.memory.title}: {name} must have shape {[H, m, *shape]}, not "
                f"{list(x.shape)}"
            )
    tokens = [x.transpose(0, 1).expand(B, *x.transpose(0, 1).shape) for x in given]
    rates = dict(zip(names[2:], tokens[2:], strict=True))
    numbers = dict(recipe.constants())  # of the steps in which they were never written
    numbers |= {gate.name: gate.init for gate in recipe.gates()}
    statics = recipe.statics()
    for param in recipe.params():
        if param.name in statics:
            log = param.name in recipe.logs()
            start = param.init if isinstance(param.init, int | float) else 1.0
            numbers[f"log_{param.name}" if log else param.name] = 0.0 if log else float(start)
    shapes = {gate.name: tuple(sizes[a] for a in gate.axes) for gate in recipe.gates()}
    for name, value in numbers.items():
        if name not in rates:
            value = 0.0 if name.startswith("log_decay") else value
            shape = (B, m, H, *shapes.get(name, ()))
            rates[name] = torch.full(shape, value, dtype=dtype, device=given[0].device)
    return tokens[0], tokens[1], {name: x.to(dtype) for name, x in rates.items()}
