"""Cases of `recollect.recall`, with arguments as a layer starts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

from recollect.benchmarks.results import Case
from recollect.blocks.cost import cost
from recollect.choices.algorithm.closed_form import Preconditioned
from recollect.engines.least_squares.conjugate_gradient import record_solver
from recollect.functional.recall import recall
from recollect.recipe.initial_params import initial_params
from recollect.recipe.recipe import Recipe
from recollect.recipe.resolve import RecipeLike, as_recipe

__all__ = [
    "Shape",
    "differentiable",
    "forward_backward",
    "initial_arguments",
    "recall_case",
]

_MAX_LOG_DECAY = 0.1


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes, dtype and device of a timed call."""

    B: int = 1
    T: int = 4096
    H: int = 8
    K: int = 64
    V: int = 64
    dtype: torch.dtype = torch.float32
    device: str = "cpu"

    @property
    def sizes(self) -> dict[str, Any]:
        """B, T, H, K and V by name."""
        return {name: getattr(self, name) for name in "BTHKV"}

    def to_dict(self) -> dict[str, str | int]:
        """Return all fields, ready for JSON."""
        return {"dtype": str(self.dtype), **self.sizes, "device": self.device}


def initial_arguments(
    recipe: Recipe, shape: Shape, *, requires_grad: bool = False
) -> dict[str, Any]:
    """Return random tensor arguments of `recollect.recall`, similar to those of a new layer.

    Queries and keys have unit norm. Rates are in (0, 1), divided by the size of an inner batch
    unless the steps are normalized. Decays are near 1. A memory with learned initial weights gets
    random ones. Params require no gradient. All tensors are drawn on the device, because a CPU
    would draw those of a GPU for longer than the GPU computes.
    """
    B, T, H, K, V = shape.sizes.values()
    n, axes = recipe.associations_per_token, recipe.axes(K, V)

    def draw(function: Callable[..., Tensor], seed: int) -> Callable[..., Tensor]:
        return partial(function, generator=_generator(shape.device, seed), device=shape.device)

    normal, per_token = draw(torch.randn, 0), (n,) if n > 1 else ()
    q = normalize(normal(B, T, H, K).to(shape.dtype), dim=-1)
    k = normalize(normal(B, T, H, *per_token, K).to(shape.dtype), dim=-1)
    v = normal(B, T, H, *per_token, V).to(shape.dtype)

    uniform, gates = draw(torch.rand, 1), dict[str, Tensor]()
    for gate in recipe.gates():
        per_association = (n,) if recipe.per_association(gate) else ()
        x = uniform(B, T, H, *per_association, *(axes[axis] for axis in gate.axes))
        if gate.role == "decay":
            x = -_MAX_LOG_DECAY * x
        elif gate.range.low is None:  # an additional key, or an exponential input gate
            x = normalize(x - 0.5, dim=-1) if x.dim() > 3 else x - 0.5
        else:
            x = 0.1 + 0.8 * x
        if gate.name == "lr" and not recipe.algorithm.uses_normalized_steps:
            x = x / recipe.algorithm.batch_size
        gates[gate.name] = x

    params = initial_params(
        recipe,
        H=H,
        K=K,
        V=V,
        generator=torch.Generator().manual_seed(2),
        device=shape.device,
    )
    initial_memory: list[Tensor] | None = None
    if recipe.needs_init():
        widths = (K, *recipe.row_widths(V)) if recipe.uses_kernel_rows else ()
        initial_memory = [torch.zeros(H, 0, width, device=shape.device) for width in widths]
        weight = draw(torch.randn, 3)
        initial_memory += [weight(H, *size) * size[-1] ** -0.5 for size in recipe.shapes(K, V)]
    arguments = {"q": q, "k": k, "v": v, "gates": gates, "initial_memory": initial_memory}
    for x in differentiable(arguments):
        x.requires_grad_(requires_grad)
    return {**arguments, "params": params}


def _generator(device: str, seed: int) -> torch.Generator:
    return torch.Generator(device).manual_seed(seed)


def differentiable(arguments: Mapping[str, Any]) -> list[Tensor]:
    """Return all tensors of `initial_arguments` but the params."""
    q, k, v, gates, memory = (arguments[x] for x in ("q", "k", "v", "gates", "initial_memory"))
    return [q, k, v, *gates.values(), *(memory or ())]


def forward_backward(
    forward: Callable[[], Tensor], inputs: Sequence[Tensor]
) -> Callable[[], object]:
    """Return a function that computes the gradients of the inputs for a gradient of ones."""

    def step() -> object:
        y = forward()
        return torch.autograd.grad(y, inputs, torch.ones_like(y), allow_unused=True)

    return step


def recall_case(
    recipe: RecipeLike,
    shape: Shape,
    *,
    name: str,
    backward: bool = False,
    engine: str = "auto",
    precision: str | None = None,
) -> Case:
    """Return a case of `recollect.recall`; a backward pass computes the gradients of all inputs."""
    recipe = as_recipe(recipe, "recall_case")

    def make() -> Callable[[], object]:
        arguments = initial_arguments(recipe, shape, requires_grad=backward)
        options = {"output_final_state": False, "engine": engine, "precision": precision}

        def forward() -> Tensor:
            return recall(recipe, **arguments, **options)[0]

        return forward_backward(forward, differentiable(arguments)) if backward else forward

    price = cost(recipe, **shape.sizes)
    inverse = recipe.algorithm.inverse
    if (
        price.engine == "least_squares"
        and inverse is not None
        and inverse.kind == "exact"
        and not inverse.is_recursive
    ):
        flops = _solver_flops(recipe, shape, make(), backward=backward)
    else:
        flops = price.training if backward else price.total
    num_bytes = None if backward else float(price.min_bytes_moved)
    return Case(name=name, make=make, flops=float(flops), bytes=num_bytes)


def _solver_flops(
    recipe: Recipe, shape: Shape, call: Callable[[], object], *, backward: bool
) -> int:
    """Return the FLOPs of a call with an iterative solver, which depend on its inputs.

    The backward pass solves once more and differentiates a product with the systems, which costs
    three products.
    """
    # The backward pass runs on this thread, because the reports belong to a thread.
    with record_solver() as reports, torch.autograd.set_multithreading_enabled(False):
        call()
    steps = sum(report.iterations for report in reports) + 3 * backward
    price = cost(recipe.replace(algorithm=Preconditioned(steps=steps)), **shape.sizes)
    return price.total + 2 * backward * price.forward_flops["read"]
