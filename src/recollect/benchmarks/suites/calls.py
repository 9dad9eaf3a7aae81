"""The calls that suites time: their sizes, their inputs, and cases over the public functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from recollect.benchmarks.results import Case
from recollect.blocks.cost import cost
from recollect.choices.algorithm.closed_form import Preconditioned
from recollect.choices.memory.maps import MLP
from recollect.engines.common.problem import Problem
from recollect.engines.kernel import local_regression
from recollect.engines.least_squares.conjugate_gradient import record_solver
from recollect.functional.binding import bind
from recollect.functional.recall import recall
from recollect.recipe.initial_params import initial_params
from recollect.recipe.recipe import Recipe
from recollect.state.state import initial_state
from recollect.zoo.preset import get

__all__ = [
    "NO_NORM",
    "Shape",
    "gates_of",
    "init_of",
    "local_case",
    "params_of",
    "recall_case",
    "recipe_of",
    "sdpa_case",
    "stepper",
    "tensors",
]

_HALF_LIFE = 0.1  # decays between 0 and this per token, as logs


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of one measured call; float32 unless ``dtype`` says otherwise."""

    B: int = 1
    T: int = 4096
    H: int = 8
    K: int = 64
    V: int = 64
    dtype: torch.dtype = torch.float32
    device: str = "cpu"


def tensors(shape: Shape, *, grad: bool, n: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """The same q, k (unit norm) and v for every case with n associations per token."""
    # Each device draws its own: of a GPU's sizes a CPU would draw longer than the GPU computes.
    generator = torch.Generator(shape.device).manual_seed(0)

    def draw(size: int, several: int) -> Tensor:
        lead = (shape.B, shape.T, shape.H, *([several] if several > 1 else []))
        x = torch.randn(*lead, size, generator=generator, device=shape.device)
        return x.to(dtype=shape.dtype)

    q, k = (functional.normalize(draw(shape.K, m), dim=-1) for m in (1, n))
    return tuple(x.requires_grad_(grad) for x in (q, k, draw(shape.V, n)))  # type: ignore[return-value]


def gates_of(recipe: Recipe, shape: Shape, *, grad: bool) -> dict[str, Tensor]:
    """Gates as a layer makes them at the start of training: steps in (0, 1), decays near 1."""
    generator = torch.Generator(shape.device).manual_seed(1)
    sizes, n = recipe.axes(shape.K, shape.V), recipe.associations_per_token
    found: dict[str, Tensor] = {}
    for gate in recipe.gates():
        several = recipe.per_association(gate)
        axes = [*([n] if several else []), *(sizes[axis] for axis in gate.axes)]
        u = torch.rand(shape.B, shape.T, shape.H, *axes, generator=generator, device=shape.device)
        if gate.role == "decay":
            x = -_HALF_LIFE * u
        elif gate.range.low is None:  # a key of its own, or an exponential input gate
            x = functional.normalize(u - 0.5, dim=-1) if axes else u - 0.5
        else:
            x = 0.1 + 0.8 * u
        found[gate.name] = x.requires_grad_(grad)
    return found


def params_of(recipe: Recipe, shape: Shape) -> dict[str, Tensor]:
    """Learned tensors as they start."""
    return initial_params(
        recipe,
        H=shape.H,
        K=shape.K,
        V=shape.V,
        generator=torch.Generator().manual_seed(2),
        device=shape.device,
    )


def init_of(recipe: Recipe, shape: Shape, *, grad: bool) -> list[Tensor] | None:
    """A deep memory's first weights, which a layer learns; ``None`` of those that begin at zero.

    A memory that keeps rows starts without any.
    """
    if not recipe.needs_init():
        return None
    widths = (shape.K, *recipe.row_widths(shape.V)) if recipe.uses_kernel_rows else ()
    empty = [
        torch.zeros(shape.H, 0, size, device=shape.device, requires_grad=grad) for size in widths
    ]
    generator = torch.Generator(shape.device).manual_seed(3)
    return empty + [
        (torch.randn(shape.H, *one, generator=generator, device=shape.device) * one[-1] ** -0.5)
        .detach()
        .requires_grad_(grad)
        for one in recipe.shapes(shape.K, shape.V)
    ]


NO_NORM = "titans without its norm"
"""The plain perceptron under Titans' rule: a chain of two maps without a norm."""


def recipe_of(name: str | Recipe) -> Recipe:
    """A preset's recipe, or that of `NO_NORM`; a recipe is returned as it is.

    Args:
        name: name of a preset, or a recipe.
    """
    if isinstance(name, Recipe):
        return name
    if name != NO_NORM:
        return get(name).recipe
    titans = get("titans").recipe
    assert isinstance(titans.memory, MLP)
    return titans.replace(memory=replace(titans.memory, norm=None))


def recall_case(
    name: str | Recipe,
    label: str,
    shape: Shape,
    *,
    backward: bool = False,
    engine: str = "auto",
    precision: str | None = None,
) -> Case:
    """A recipe through `recollect.recall`, forward or forward and backward.

    Args:
        name: of the preset, `NO_NORM`, or a recipe. label: of the case. shape: of the call.
        backward: whether gradients of all inputs are taken.
        engine, precision: as in `recollect.recall`.
    """
    recipe = recipe_of(name)

    def make() -> Callable[[], object]:
        q, k, v = tensors(shape, grad=backward, n=recipe.associations_per_token)
        gates, params = gates_of(recipe, shape, grad=backward), params_of(recipe, shape)
        init = init_of(recipe, shape, grad=backward)

        def forward() -> Tensor:
            y, _ = recall(
                recipe,
                q,
                k,
                v,
                gates,
                initial_memory=init,
                params=params,
                output_final_state=False,
                engine=engine,
                precision=precision,
            )
            return y

        leaves = [q, k, v, *gates.values(), *(init or ())]
        return stepper(forward, leaves) if backward else forward

    price = cost(recipe, B=shape.B, H=shape.H, T=shape.T, K=shape.K, V=shape.V)
    inverse = recipe.algorithm.inverse
    iterates = inverse is not None and inverse.kind == "exact" and not inverse.is_recursive
    if price.engine == "least_squares" and iterates:
        flops = _solved_flops(recipe, shape, make, backward=backward)
    else:
        flops = price.training if backward else price.total
    moved = None if backward else float(price.min_bytes_moved)
    return Case(name=label, make=make, flops=float(flops), bytes=moved)


def _solved_flops(
    recipe: Recipe, shape: Shape, make: Callable[[], Callable[[], object]], *, backward: bool
) -> int:
    """FLOPs of a call whose solver stops by itself, from the steps that it takes on these inputs.

    The backward pass solves once more, and differentiates one product with the systems: as much
    work as three.
    """
    call = make()
    # On a GPU too, the backward pass must report to this thread.
    with record_solver() as reports, torch.autograd.set_multithreading_enabled(False):
        call()
    steps = sum(report.iterations for report in reports) + 3 * backward
    stepped = recipe.replace(algorithm=Preconditioned(steps=steps))
    price = cost(stepped, B=shape.B, H=shape.H, T=shape.T, K=shape.K, V=shape.V)
    return price.total + 2 * backward * price.forward_flops["read"]


def sdpa_case(label: str, shape: Shape, *, backward: bool = False) -> Case:
    """Causal `scaled_dot_product_attention` on contiguous ``[B, H, T, D]``, its best layout."""

    def make() -> Callable[[], object]:
        q, k, v = (
            x.detach().transpose(1, 2).contiguous().requires_grad_(backward)
            for x in tensors(shape, grad=False)
        )

        def forward() -> Tensor:
            return functional.scaled_dot_product_attention(q, k, v, is_causal=True)

        return stepper(forward, [q, k, v]) if backward else forward

    # Two products over the lower triangle; the backward pass has five.
    products = 2 * shape.B * shape.H * shape.T * shape.T * (shape.K + shape.V) / 2
    moved = shape.B * shape.H * shape.T * (2 * shape.K + 2 * shape.V) * shape.dtype.itemsize
    return Case(
        name=label,
        make=make,
        flops=products * (3.5 if backward else 1),
        bytes=None if backward else float(moved),
    )


def stepper(forward: Callable[[], Tensor], leaves: Sequence[Tensor]) -> Callable[[], object]:
    """A call that goes forward, and back to the leaves with ones.

    Args:
        forward: gives the outputs. leaves: whose gradients are taken.
    """

    def step() -> object:
        y = forward()
        return torch.autograd.grad(y, leaves, torch.ones_like(y), allow_unused=True)

    return step


def local_case(label: str, shape: Shape, *, solver: str) -> Case:
    """Local linear attention by one of its solvers."""
    recipe = get("local_linear_attention").recipe

    def make() -> Callable[[], object]:
        q, k, v = tensors(shape, grad=False)
        length = shape.K**0.5
        at = bind(recipe, H=shape.H, K=shape.K, V=shape.V)
        device = torch.device(shape.device)
        state = initial_state(at, B=shape.B, dtype=shape.dtype, device=device)
        problem = Problem(
            bound=at,
            q=(length * q).unsqueeze(3),
            k=length * k,
            v=v,
            rates={},
            params={},
            state=state,
        )
        return lambda: local_regression.attend(problem, solver=solver)

    price = cost(recipe, B=shape.B, H=shape.H, T=shape.T, K=shape.K, V=shape.V)
    return Case(name=label, make=make, flops=float(price.total), bytes=None)
