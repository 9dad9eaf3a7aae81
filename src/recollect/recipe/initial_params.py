"""Initial values of params: one value, values along an axis, or random draws.

A feature map made of random directions states their law in ``Param.draw`` and holds no tensor. A
layer draws them when it is built, keeps them with its weights (so a checkpoint has them) and, where
the param says ``learned=False``, does not train them. Whoever calls `recollect.recall` without a
layer asks for them here, with a generator of their own::

    params = rc.initial_params(recipe, H=8, K=64, V=64, generator=torch.Generator().manual_seed(0))
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from recollect.recipe.rules import check_size

if TYPE_CHECKING:
    from recollect.choices.fields import Param
    from recollect.recipe.recipe import Recipe

__all__ = ["initial_params", "start"]


def initial_params(
    recipe: Recipe,
    *,
    H: int,
    K: int,
    V: int,
    generator: torch.Generator | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
) -> dict[str, Tensor]:
    """Every param a recipe asks for, at its start: ``[H, ...]`` by name, as `recall` takes them.

    Args:
        recipe: whose params.
        H: memories.
        K: key channels.
        V: value channels.
        generator: of the drawn ones; torch's global one when omitted.
        dtype: of the result.
        device: of the result; the CPU when omitted.

    Raises:
        RecipeError: sizes that the recipe cannot have.

    Examples:
        >>> recipe = rc.Recipe(algorithm=rc.algorithm.GradientDescent(lr="static"))
        >>> params = rc.initial_params(recipe, H=2, K=4, V=4)
        >>> {name: tuple(x.shape) for name, x in params.items()}
        {'lr': (2,)}
    """
    check_size("H", H)
    sizes = {} if recipe.nonparametric else recipe.axes(K, V)
    params: dict[str, Tensor] = {}
    for param in recipe.params():
        shape = (H, *(sizes[axis] for axis in param.axes))
        fan = sizes[param.fan] if param.fan else None
        drawn = start(param, shape, generator=generator, fan=fan)
        params[param.name] = drawn.to(dtype=dtype, device=device)
    return params


def start(
    param: Param,
    shape: tuple[int, ...],
    *,
    generator: torch.Generator | None = None,
    fan: int | None = None,
) -> Tensor:
    """A param of that shape at its start, in float64 on the CPU.

    ``draw`` is ``"normal"``: entries N(0, 1); ``"fan_in"``: N(0, 1/in), in = ``fan``, the size of
    the axis that `Param.fan` names, or that of the last axis;
    ``"orthogonal"``: rows N(0, I) that are orthogonal within each block of K rows (Performer,
    section 2.4: a Haar basis, each row given the length of a Gaussian vector of its own);
    ``"eye"``: the identity of the last two axes, repeated downwards when they differ.
    """

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, dtype=torch.float64)

    if param.draw is None:
        # A member's tuple runs along the last axis.
        return torch.tensor(param.init, dtype=torch.float64).expand(shape).clone()
    if param.draw == "normal":
        return normal(*shape)
    if param.draw == "fan_in":
        return normal(*shape) * (shape[-1] if fan is None else fan) ** -0.5
    rows, columns = shape[-2:]
    if param.draw == "eye":
        blocks = math.ceil(rows / columns)
        eye = torch.eye(columns, dtype=torch.float64).repeat(blocks, 1)[:rows]
        return eye.expand(shape).clone()
    lead, blocks = shape[:-2], math.ceil(rows / columns)
    basis, triangle = torch.linalg.qr(normal(*lead, blocks, columns, columns))
    # Signs of the diagonal make the basis uniform (Mezzadri 2007, section 5).
    basis = basis * triangle.diagonal(dim1=-2, dim2=-1).sign().unsqueeze(-2)
    lengths = normal(*lead, blocks, columns, columns).norm(dim=-1, keepdim=True)
    return (basis * lengths).flatten(-3, -2)[..., :rows, :]
