"""Initial associations of a nonparametric memory, which count as earlier tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from recollect.messages import RecipeError
from recollect.recipe.bound import BoundRecipe
from recollect.typing import Init

__all__ = ["initial_associations"]


def initial_associations(
    bound: BoundRecipe, init: Init, *, B: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Return the keys, values and gates of the initial associations, ``[B, m, H, ...]``.

    ``init`` has keys ``[H, m, K]``, values ``[H, m, V]``, then the per-association gates of the
    recipe in order, ``[H, m, ...]``. Step gates get their initial values, decays 1.
    """
    recipe, H, K, V = bound.recipe, bound.H, bound.K, bound.V
    tensors = (init,) if isinstance(init, Tensor) else tuple(init)
    gates = [gate for gate in recipe.gates() if gate.per_association]
    names = ["keys", "values", *(gate.name for gate in gates)]
    if len(tensors) != len(names):
        raise RecipeError(
            f"initial_memory of {recipe.memory.title} is a tuple of {', '.join(names)}, and has "
            f"{len(tensors)} tensor(s)"
        )
    sizes = recipe.axes(K, V)
    axes = [(K,), (V,), *(tuple(sizes[a] for a in gate.axes) for gate in gates)]
    m = tensors[0].shape[1] if tensors[0].dim() > 1 else 0
    for name, x, shape in zip(names, tensors, axes, strict=True):
        if tuple(x.shape) != (H, m, *shape):
            raise RecipeError(
                f"initial_memory of {recipe.memory.title}: {name} must have shape "
                f"{[H, m, *shape]}, not {list(x.shape)}"
            )
    by_token = [x.transpose(0, 1).expand(B, *x.transpose(0, 1).shape) for x in tensors]
    rates = dict(zip(names[2:], by_token[2:], strict=True))
    initial = {**recipe.constants(), **{gate.name: gate.init for gate in recipe.gates()}}
    learned_quantities = recipe.learned_quantities
    for param in recipe.params():
        if param.name in learned_quantities:
            log = param.is_log
            start = param.init if isinstance(param.init, int | float) else 1.0
            initial[f"log_{param.name}" if log else param.name] = 0.0 if log else float(start)
    shapes = {gate.name: tuple(sizes[a] for a in gate.axes) for gate in recipe.gates()}
    for name, value in initial.items():
        if name not in rates:
            value = 0.0 if name in recipe.log_decays else value
            shape = (B, m, H, *shapes.get(name, ()))
            rates[name] = torch.full(shape, value, dtype=dtype, device=tensors[0].device)
    return by_token[0], by_token[1], {name: x.to(dtype) for name, x in rates.items()}
