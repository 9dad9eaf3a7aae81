"""Arguments and calls of recipes without a layer."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from recollect.functional.read import read
from recollect.functional.recall import recall
from recollect.messages import RecipeError
from recollect.recipe.initial_params import initial_params
from recollect.recipe.recipe import Recipe
from recollect.typing import Gates, Params

__all__ = ["apply_features", "constant_gates", "write_and_read"]


def constant_gates(
    recipe: Recipe,
    *,
    B: int,
    T: int,
    K: int,
    V: int,
    H: int = 1,
    values: Mapping[str, float] | None = None,
    dtype: torch.dtype = torch.float64,
) -> dict[str, Tensor]:
    """Return constant gates: ``values[name]``, or the initial value of a layer."""
    values = dict(values or {})
    sizes = {} if recipe.nonparametric else recipe.axes(K, V)
    gates: dict[str, Tensor] = {}
    for gate in recipe.gates():
        shape = [B, T, H, *(sizes[axis] for axis in gate.axes)]
        value = values.pop(gate.name, gate.init)
        gates[gate.name] = torch.full(shape, value, dtype=dtype)
    if values:
        raise RecipeError(
            f"gate {sorted(values)[0]!r} is unknown to this recipe, which has "
            f"{', '.join(sorted(gates)) or 'none'}"
        )
    return gates


def apply_features(recipe: Recipe, x: Tensor, params: Params, side: str) -> Tensor:
    """Return φ(x) of vectors ``[N, K]``, ``[N, F]``."""
    if not recipe.features.finite:
        raise RecipeError(f"{recipe.features.title} has infinitely many features; use its kernel")
    position = torch.zeros(1, 1, dtype=torch.long)
    return recipe.features.phi(x[None, None, None], params, side, position)[0, 0, 0]


def write_and_read(
    recipe: Recipe,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    gates: Mapping[str, float] | Gates | None = None,
    params: Params | None = None,
    engine: str = "auto",
) -> Tensor:
    """Return the outputs for queries ``[B, M, K]`` after pairs ``[B, T, K]``, ``[B, T, V]``.

    Gates are numbers for every token, or the tensors of `recall`.
    """
    if recipe.associations_per_token > 1:
        raise RecipeError(
            f"{recipe.algorithm.title}(updates_per_token={recipe.associations_per_token}) needs "
            "several associations per token, and this measurement has one: use "
            "updates_per_token=1"
        )
    B, T, K = k.shape
    V = v.shape[-1]
    numbers = {name: x for name, x in (gates or {}).items() if not isinstance(x, Tensor)}
    tensors = {name: x for name, x in (gates or {}).items() if isinstance(x, Tensor)}
    if numbers or not tensors:
        filled = constant_gates(recipe, B=B, T=T, K=K, V=V, values=numbers, dtype=k.dtype)
        tensors = filled | tensors
    if params is None:
        params = initial_params(recipe, H=1, K=K, V=V, dtype=k.dtype)
    _, state = recall(
        recipe,
        k[:, :, None],
        k[:, :, None],
        v[:, :, None],
        tensors,
        params=params,
        engine=engine,  # type: ignore[arg-type]
    )
    read_gates = {
        name: x[:, :1].expand(B, q.shape[1], *x.shape[2:])
        for name, x in tensors.items()
        if name in {"radius", "tau"}
    }
    return read(recipe, q[:, :, None], gates=read_gates, state=state, params=params)[:, :, 0]
