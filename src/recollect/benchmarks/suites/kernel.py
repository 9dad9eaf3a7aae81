"""Memories over a kernel's features against softmax attention, and DeltaFormer against its loop."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from recollect.benchmarks.results import Case
from recollect.blocks.cost import cost
from recollect.functional.recall import recall
from recollect.recipe.recipe import Recipe
from recollect.zoo.preset import get

__all__ = ["NAMES", "case", "loop_case"]

NAMES = ("delta_former", "deep_transformer", "swdt", "dot")

Sizes = tuple[int, int, int, int, int]
"""B, T, H, K, V."""


def _arguments(recipe: Recipe, sizes: Sizes) -> dict[str, object]:
    """What `recall` takes, as a layer makes it at the start of training; keys of length √K."""
    B, T, H, K, V = sizes
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    def key(x: Tensor) -> Tensor:
        return functional.normalize(x, dim=-1) * K**0.5

    axes = recipe.axes(K, V)
    gates: dict[str, Tensor] = {}
    for gate in recipe.gates():
        shape = (B, T, H, *(axes[axis] for axis in gate.axes))
        if gate.axes[-1:] == ("K",):
            gates[gate.name] = key(draw(*shape))
            continue
        u = torch.rand(*shape, generator=generator)
        slow = recipe.algorithm.batch_size if gate.name == "lr" else 1
        gates[gate.name] = -0.1 * u if gate.name == "log_decay" else (0.1 + 0.8 * u) / slow
    params = {
        param.name: torch.full((H, *(axes[axis] for axis in param.axes)), 0.95)
        for param in recipe.params()
    }
    starts = recipe.init_shapes(K, V, pairs=16) if recipe.needs_init() else ()
    init = tuple(draw(H, *shape) * shape[-1] ** -0.5 for shape in starts) or None
    return {
        "q": key(draw(B, T, H, K)),
        "k": key(draw(B, T, H, K)),
        "v": draw(B, T, H, V),
        "gates": gates,
        "params": params,
        "initial_memory": init,
    }


def case(name: str, sizes: Sizes) -> Case:
    """One preset through `recollect.recall`, forward."""
    recipe = get(name).recipe

    def make() -> Callable[[], object]:
        given = _arguments(recipe, sizes)

        def forward() -> Tensor:
            with torch.no_grad():
                return recall(recipe, output_final_state=False, **given)[0]  # type: ignore[arg-type]

        return forward

    B, T, H, K, V = sizes
    price = cost(recipe, B=B, T=T, H=H, K=K, V=V)
    return Case(name=name, make=make, flops=float(price.total), bytes=float(price.min_bytes_moved))


def loop_case(label: str, sizes: Sizes) -> Case:
    """DeltaFormer one token at a time: two softmaxes over the past and two sums (AM 94–95)."""
    recipe = get("delta_former").recipe
    _, T, _, K, _ = sizes

    def make() -> Callable[[], object]:
        given = _arguments(recipe, sizes)
        gates = given["gates"]
        assert isinstance(gates, dict)
        q, k, v, w = (
            x.transpose(1, 2)
            for x in (given["q"], given["k"], given["v"], gates["probe"])
            if isinstance(x, Tensor)
        )
        alpha, beta = (gates[name].transpose(1, 2).unsqueeze(-1) for name in ("lr", "erase"))

        def forward() -> Tensor:
            u, y = torch.zeros_like(v), torch.zeros_like(v)
            for t in range(T):
                u[:, :, t] = alpha[:, :, t] * v[:, :, t]
                if t:
                    held = (k[:, :, :t] @ w[:, :, t, :, None]).squeeze(-1) / K**0.5
                    erased = (held.softmax(-1).unsqueeze(-1) * u[:, :, :t]).sum(-2)
                    u[:, :, t] -= beta[:, :, t] * erased
                seen = (k[:, :, : t + 1] @ q[:, :, t, :, None]).squeeze(-1) / K**0.5
                y[:, :, t] = (seen.softmax(-1).unsqueeze(-1) * u[:, :, : t + 1]).sum(-2)
            return y

        return forward

    B, T, H, K, V = sizes
    return Case(name=label, make=make, flops=float(cost(recipe, B=B, T=T, H=H, K=K, V=V).total))
