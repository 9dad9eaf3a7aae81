"""Initial values of params: a constant, values along an axis, or random values.

The distribution of random directions of a feature map is declared in ``Param.draw``. A layer draws
them during initialisation and stores them with its weights, so that checkpoints contain them. It
does not train params with ``learned=False``. To call `recollect.recall` without a layer, draw them
with a generator::

    params = rc.initial_params(recipe, H=8, K=64, V=64, generator=torch.Generator().manual_seed(0))
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from recollect.recipe.compatibility import check_size
from recollect.recipe.resolve import RecipeLike, as_recipe

if TYPE_CHECKING:
    from recollect.fields import Param

__all__ = ["initial_params", "initial_value"]


def initial_params(
    recipe: RecipeLike,
    *,
    H: int,
    K: int,
    V: int,
    generator: torch.Generator | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
) -> dict[str, Tensor]:
    """Return initial values of all params of a recipe, ``[H, ...]`` by name, for `recall`.

    Args:
        recipe: a recipe, a preset, or its name.
        H: number of memories.
        K: key channels.
        V: value channels.
        generator: generator of random params; torch's global generator if omitted.
        dtype: dtype of the result.
        device: device of the result; the CPU if omitted.

    Raises:
        RecipeError: the recipe does not support the sizes.

    Examples:
        >>> recipe = rc.Recipe(algorithm=rc.algorithm.GradientDescent(lr="learned"))
        >>> params = rc.initial_params(recipe, H=2, K=4, V=4)
        >>> {name: tuple(x.shape) for name, x in params.items()}
        {'lr': (2,)}
    """
    recipe = as_recipe(recipe, "rc.initial_params")
    check_size("H", H)
    sizes = {} if recipe.nonparametric else recipe.axes(K, V)
    params: dict[str, Tensor] = {}
    for param in recipe.params():
        shape = (H, *(sizes[axis] for axis in param.axes))
        fan = sizes[param.fan] if param.fan else None
        value = initial_value(param, shape, generator=generator, fan=fan)
        params[param.name] = value.to(dtype=dtype, device=device)
    return params


def initial_value(
    param: Param,
    shape: tuple[int, ...],
    *,
    generator: torch.Generator | None = None,
    fan: int | None = None,
) -> Tensor:
    """Return the initial value of a param of a shape, in float64 on the CPU.

    ``Param.draw`` is one of:

    * ``"normal"``: entries N(0, 1);
    * ``"fan_in"``: entries N(0, 1/in), with in = ``fan``, the size of the axis `Param.fan`, or the
      size of the last axis;
    * ``"orthogonal"``: rows N(0, I) that are orthogonal within each block of K rows: a Haar basis
      with rows of the length of independent Gaussian vectors (Performer, section 2.4);
    * ``"eye"``: the identity of the last two axes, repeated along the rows if they differ.
    """

    def randn(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, dtype=torch.float64)

    if param.draw is None:
        # A tuple has the values along the last axis.
        return torch.tensor(param.init, dtype=torch.float64).expand(shape).clone()
    if param.draw == "normal":
        return randn(*shape)
    if param.draw == "fan_in":
        return randn(*shape) * (shape[-1] if fan is None else fan) ** -0.5
    rows, columns = shape[-2:]
    if param.draw == "eye":
        blocks = math.ceil(rows / columns)
        eye = torch.eye(columns, dtype=torch.float64).repeat(blocks, 1)[:rows]
        return eye.expand(shape).clone()
    lead, blocks = shape[:-2], math.ceil(rows / columns)
    orthogonal, triangle = torch.linalg.qr(randn(*lead, blocks, columns, columns))
    # Multiplied by the signs of the diagonal, Q is uniform (Mezzadri 2007, section 5).
    orthogonal = orthogonal * triangle.diagonal(dim1=-2, dim2=-1).sign().unsqueeze(-2)
    row_norms = randn(*lead, blocks, columns, columns).norm(dim=-1, keepdim=True)
    return (orthogonal * row_norms).flatten(-3, -2)[..., :rows, :]
