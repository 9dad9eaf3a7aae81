"""Random small arguments of `recall` for any recipe, inside the ranges that members declare."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from recollect.choices.member import Member
from recollect.fields import Gate, Param
from recollect.messages import RecipeError
from recollect.recipe.initial_params import initial_value
from recollect.recipe.recipe import Recipe

__all__ = [
    "Inputs",
    "draw_gate",
    "draw_param",
    "draw_params",
    "inputs",
    "is_ill_posed",
    "scaled_down",
    "sizes",
    "small_inputs",
]


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """Arguments of one call of `recall`."""

    q: Tensor  # queries [B, T, H·G, K]
    k: Tensor  # keys [B, T, H, (n,) K]
    v: Tensor  # values [B, T, H, (n,) V]
    gates: dict[str, Tensor]  # gates by name, as in `recall`
    params: dict[str, Tensor]  # params by name, as in `recall`
    init: tuple[Tensor, ...] | None  # initial memory; None if the recipe stores associations

    @property
    def T(self) -> int:
        """Number of tokens."""
        return self.q.shape[1]

    def tensors(self) -> dict[str, Tensor]:
        """Return all tensors by name, such as ``"gate lr"``."""
        return {
            "q": self.q,
            "k": self.k,
            "v": self.v,
            **{f"gate {name}": x for name, x in self.gates.items()},
            **{f"param {name}": x for name, x in self.params.items()},
            **{f"init {i}": x for i, x in enumerate(self.init or ())},
        }

    def map_tensors(self, f: Any) -> Inputs:
        """Apply ``f`` to every tensor."""
        return Inputs(
            q=f(self.q),
            k=f(self.k),
            v=f(self.v),
            gates={name: f(x) for name, x in self.gates.items()},
            params={name: f(x) for name, x in self.params.items()},
            init=None if self.init is None else tuple(f(x) for x in self.init),
        )

    def replace_tensors(self, tensors: dict[str, Tensor]) -> Inputs:
        """Replace tensors by their names in `tensors`."""
        values = iter({**self.tensors(), **tensors}.values())
        return self.map_tensors(lambda _: next(values))

    def map_token_tensors(self, f: Any) -> Inputs:
        """Apply ``f`` to the tensors with an axis of tokens."""
        gates = {name: f(x) for name, x in self.gates.items()}
        return dataclasses.replace(self, q=f(self.q), k=f(self.k), v=f(self.v), gates=gates)

    def slice_tokens(self, start: int, stop: int) -> Inputs:
        """Return the tokens from ``start`` to ``stop``."""
        return self.map_token_tensors(lambda x: x[:, start:stop])

    def select_row(self, row: int) -> Inputs:
        """Return one element of the batch."""
        return self.map_token_tensors(lambda x: x[row : row + 1])

    def with_grad(self) -> Inputs:
        """Return copies of all tensors that require gradients."""
        return self.map_tensors(lambda x: x.detach().clone().requires_grad_())


def is_ill_posed(recipe: Recipe) -> bool:
    """Whether slopes are fitted without a ridge, possibly to too few associations."""
    is_fitted = recipe.memory.slope_gate is None
    return bool(recipe.memory.degree) and is_fitted and recipe.algorithm.ridge == 0


def sizes(recipe: Recipe, rng: random.Random) -> tuple[int, int]:
    """Return small K and V that the recipe's memory accepts."""
    K, V = rng.randint(3, 5), rng.randint(3, 5)
    options = [(K, V), (K, K)]
    if recipe.features.finite:
        options.append((K, recipe.features.dim(K)))
    for K, V in options:
        try:
            recipe.shapes(K, V)
        except RecipeError:
            continue
        return K, V
    raise AssertionError(f"no small sizes fit {recipe}")


def draw_gate(gate: Gate, shape: Sequence[int], g: torch.Generator) -> Tensor:
    """Return random values of a gate, inside its range."""
    u = torch.rand(*shape, generator=g, dtype=torch.float64)
    low, high = gate.range.low, gate.range.high
    if low is not None and high is not None:
        return low + (0.05 + 0.9 * u) * (high - low)
    if high is not None:
        return high - u
    if low is not None:
        return low + 0.02 + 0.4 * u
    return gate.init + torch.randn(*shape, generator=g, dtype=torch.float64) * 0.3


def draw_param(param: Param, shape: Sequence[int], g: torch.Generator) -> Tensor:
    """Return random values of a param, inside its range."""
    u = torch.rand(*shape, generator=g, dtype=torch.float64)
    low, high = param.range.low, param.range.high
    if low is not None and high is not None:
        return low + (0.3 + 0.65 * u) * (high - low)
    if low is not None:
        return low + 0.02 + 0.4 * u
    jitter = torch.randn(*shape, generator=g, dtype=torch.float64) * 0.2
    return initial_value(param, tuple(shape), generator=g) + jitter


def draw_params(
    member: Member | Recipe, axes: Mapping[str, int], g: torch.Generator, H: int = 1
) -> dict[str, Tensor]:
    """Return random values ``[H, ...]`` of all params by name, for sizes by axis."""
    params = member.params()
    return {p.name: draw_param(p, (H, *(axes[axis] for axis in p.axes)), g) for p in params}


def inputs(
    recipe: Recipe,
    *,
    B: int = 2,
    T: int = 7,
    H: int = 2,
    G: int = 1,
    K: int = 4,
    V: int = 4,
    seed: int = 0,
    zero: bool = False,
    dtype: torch.dtype = torch.float64,
) -> Inputs:
    """Return random arguments for a recipe: unit keys, gates and params inside their ranges.

    Args:
        recipe: the recipe.
        B, T, H, G: batch size, and numbers of tokens, memories, and query heads per memory.
        K, V: sizes of keys and values, which the recipe must accept.
        seed: seed of all random numbers.
        zero: whether the initial memory is zero instead of random.
        dtype: dtype of all tensors.
    """
    g = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    n = recipe.associations_per_token
    lead = (B, T, H, n) if n > 1 else (B, T, H)
    unit = nn.functional.normalize
    q, k = unit(normal(B, T, H * G, K), dim=-1), unit(normal(*lead, K), dim=-1)
    v = 0.5 * normal(*lead, V)
    axes = recipe.axes(K, V)
    gates: dict[str, Tensor] = {}
    for gate in recipe.gates():
        associations = (n,) if recipe.per_association(gate) else ()
        shape = (B, T, H, *associations, *(axes[axis] for axis in gate.axes))
        value = draw_gate(gate, shape, g)
        # A gate over K is a key. Erasures diverge unless it has unit length.
        gates[gate.name] = unit(value, dim=-1) if gate.axes == ("K",) else value
    params = draw_params(recipe, axes, g, H)
    init = None
    if not recipe.nonparametric:
        size = 0.0 if zero else 0.4
        pairs = 0 if zero and not recipe.needs_init() else 3
        init = tuple(size * normal(H, *shape) for shape in recipe.init_shapes(K, V, pairs=pairs))
    arguments = Inputs(q=q, k=k, v=v, gates=gates, params=params, init=init)
    return arguments.map_tensors(lambda x: x.to(dtype))


def small_inputs(recipe: Recipe, index: int, *, longest: int = 9) -> Inputs:
    """Return random arguments of random small sizes.

    Args:
        recipe: the recipe.
        index: index of the draw.
        longest: maximum number of tokens.
    """
    rng = random.Random(7 * index + 1)
    K, V = sizes(recipe, rng)
    return inputs(
        recipe,
        B=rng.randint(1, 2),
        T=rng.randrange(3, longest + 1, 2),
        H=rng.randint(1, 2),
        G=rng.choice((1, 1, 2)),
        K=K,
        V=V,
        seed=index,
        zero=index % 4 == 0 and not recipe.needs_init(),
    )


def scaled_down(recipe: Recipe, x: Inputs, factor: float = 0.05) -> Inputs:
    """Multiply values, memories and positive gates by a factor."""
    scaled = {gate.name for gate in recipe.gates() if gate.range.low == 0 and not gate.range.high}
    gates = {name: factor * a if name in scaled else a for name, a in x.gates.items()}
    init = None if x.init is None else tuple(factor * a for a in x.init)
    return dataclasses.replace(x, v=factor * x.v, gates=gates, init=init)
