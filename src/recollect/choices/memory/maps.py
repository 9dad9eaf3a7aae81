"""Memories made of linear maps: matrix, vector, MLP and gated MLP.

A finite memory answers its weights' shapes and a `forward`. Memories made of linear maps extend
`Stack` and state a program over `apply(l, h)`; engines that know linear maps run any such program.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from recollect.choices.devices import constant
from recollect.choices.fields import Param, flag, integer, option, slot
from recollect.choices.member import RecipeError, member
from recollect.choices.memory.base import Apply, LinearMap, Memory, Read, Stack
from recollect.choices.memory.norms import NORM_EPS, layer_norm, sayable
from recollect.wording import shown

if TYPE_CHECKING:
    from recollect.choices.questions import RecipeLike

__all__ = ["MLP", "GatedMLP", "Matrix", "Vector"]


_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "relu": functional.relu,
    "silu": functional.silu,
    "tanh": torch.tanh,
    "identity": lambda x: x,
}


def _factor(W: str) -> str:
    """Weights as a factor: an entrywise product needs parentheses."""
    return f"({W})" if " ⊙ " in W else W


@member
class Vector(Memory):
    """M(x) = w ⊙ x: one weight per channel; needs K = V.

    Examples:
        >>> memory, w = rc.memory.Vector(), torch.tensor([1.0, 0.5, 0.0])
        >>> memory.shapes(3, 3)
        ((3,),)
        >>> x = torch.tensor([[2.0, 2.0, 2.0]])
        >>> memory.forward([w], x, x, {})
        tensor([[2., 1., 0.]])
    """

    linear = True
    channelled = True
    diagonal = True
    read: Read = slot(Read(), "read")

    def shapes(self, F: int, V: int) -> tuple[tuple[int, ...], ...]:
        if F != V:
            raise RecipeError(
                f"memory.Vector multiplies channel by channel and needs as many features as value "
                f"channels, not F = {F} and V = {V}: use memory.Matrix, or equal sizes"
            )
        return ((V,),)

    def forward(
        self, weights: Sequence[Tensor], x: Tensor, raw: Tensor, params: Mapping[str, Tensor]
    ) -> Tensor:
        return weights[0].unsqueeze(-2) * x

    letter = "w"

    def at(self, x: str, *, raw: str = "", W: str = "") -> str:
        return f"{_factor(W or self.letter)} ⊙ {x}"

    def outer(self, error: str, x: str) -> str:
        return f"{error} ⊙ {x}"


@member
class Matrix(Stack):
    """M(x) = W x, W ``[V, F]``: one linear map.

    Examples:
        >>> k, v = torch.tensor([1.0, 0.0]), torch.tensor([3.0, 4.0, 5.0])
        >>> W = torch.outer(v, k)  # one association, written
        >>> rc.memory.Matrix().forward([W], k[None], k[None], {})  # and read
        tensor([[3., 4., 5.]])
    """

    linear = True
    read: Read = slot(Read(), "read")

    @property
    def chain(self) -> str:
        return "identity"

    def maps(self, F: int, V: int) -> tuple[LinearMap, ...]:
        return (LinearMap(name="W", out=V, inp=F, first=True, last=True),)

    def program(self, apply: Apply, x: Tensor, raw: Tensor, params: Mapping[str, Tensor]) -> Tensor:
        return apply(0, x)

    def at(self, x: str, *, raw: str = "", W: str = "") -> str:
        return f"{_factor(W or self.letter)} {x}"

    def outer(self, error: str, x: str) -> str:
        return f"{error} {x}ᵀ"


def _with_one(h: Tensor, bias: bool) -> Tensor:
    if not bias:
        return h
    one = constant(_one, device=h.device, dtype=h.dtype)
    return torch.cat([h, one.expand(*h.shape[:-1], 1)], dim=-1)


def _one() -> Tensor:
    return torch.ones(1)


def _normed(h: Tensor, norm: str | None, params: Mapping[str, Tensor]) -> Tensor:
    """Normalise over the last axis; norm weights are params ``[H, V]``."""
    if norm is None:
        return h
    weight = params["norm_weight"].to(h.dtype)[:, None, :]  # [H, 1, V]
    if norm == "layer":
        return layer_norm(h) * weight + params["norm_bias"].to(h.dtype)[:, None, :]
    return h * (h.square().mean(-1, keepdim=True) + NORM_EPS).rsqrt() * weight


def _in_all_rows(h: Tensor, weight: Tensor) -> Tensor:
    """``weight [H, out, in]`` times h ``[B, H, N, in]``: one product a head, of all rows."""
    rows = h.transpose(0, 1)  # [H, B, N, in]
    y = torch.bmm(rows.flatten(1, 2), weight.to(h.dtype).mT)
    return y.unflatten(1, rows.shape[1:3]).transpose(0, 1)


class _Perceptron(Stack):
    """What MLP and GatedMLP share: x + norm(network(x)), and weights that are no memory.

    ``norm_weight``, ``norm_bias`` and the base are params (learned by the outer loop), not memory.
    """

    norm: str | None
    base: bool

    @property
    def needs_init(self) -> bool:
        return not self.base

    @property
    def bases(self) -> tuple[str, ...]:
        return tuple(f"base_{one.name}" for one in self.maps(1, 1)) if self.base else ()

    def axes(self, K: int, F: int, V: int) -> dict[str, int]:
        if not self.base:
            return {}
        maps = self.maps(F, V)
        sizes = {f"{one.name} out": one.out for one in maps} | {
            f"{one.name} in": one.inp for one in maps
        }
        # Features are about as long as the key that they lift, however many they are.
        return sizes | {f"{one.name} fan": K + one.bias if one.first else one.inp for one in maps}

    def params(self) -> tuple[Param, ...]:
        base = [
            Param(
                name=name,
                owner=self.title,
                axes=(f"{one.name} out", f"{one.name} in"),
                draw="fan_in",
                fan=f"{one.name} fan",
            )
            for name, one in zip(self.bases, self.maps(1, 1) if self.base else (), strict=True)
        ]
        return (*self._norm_params(), *base)

    def requires(self, recipe: RecipeLike) -> Iterator[str]:
        yield from super().requires(recipe)
        if self.base and not recipe.features.finite:
            yield (
                f"{self.title}(base=True) adds learned weights to maps, and there are none for "
                f"the infinitely many features of {recipe.features.title}: leave base out, or use "
                "finite features"
            )

    def _on_base(self, apply: Apply, params: Mapping[str, Tensor]) -> Apply:
        """``apply`` of W̄_l + W_l, W̄ the base."""
        if not self.base:
            return apply
        base = [params[name] for name in self.bases]
        return lambda index, h: apply(index, h) + _in_all_rows(h, base[index])

    def _weights(self, name: str) -> str:
        """Weights as they multiply in an equation."""
        return f"({name.replace('W', 'W̄')} + {name})" if self.base else name

    def _norm_params(self) -> tuple[Param, ...]:
        names = {None: (), "rms": ("norm_weight",), "layer": ("norm_weight", "norm_bias")}
        return tuple(
            Param(
                name=name,
                owner=self.title,
                axes=("V",),
                init=float(name == "norm_weight"),
                beside_key=self.residual and name == "norm_weight",
            )
            for name in names[self.norm]
        )

    def finish(self, z: Tensor, raw: Tensor, params: Mapping[str, Tensor]) -> Tensor:
        return super().finish(_normed(z, self.norm, params), raw, params)

    @property
    def finishes(self) -> bool:
        return self.norm is not None

    @property
    def last_norm(self) -> str | None:
        return "layer" if self.norm == "layer" else None

    @property
    def bounded(self) -> bool:  # type: ignore[override]
        return self.norm is not None

    def reachable(self, value: Tensor, raw: Tensor, params: Mapping[str, Tensor]) -> Tensor:
        """c + w ⊙ û, which the norm can say and which is near to v, as `sayable` states it.

        c = k + b; w and b are the norm's weight and bias, and its ε is not counted.
        """
        if self.norm is None:
            return value
        weight = params["norm_weight"].to(value.dtype)[:, None, :]  # [H, 1, V]
        center = raw if self.residual else torch.zeros_like(value)
        if self.norm == "layer":
            center = center + params["norm_bias"].to(value.dtype)[:, None, :]
        return center + sayable(value - center, weight, centred=self.norm == "layer")

    def within(self, value: str, raw: str) -> str:
        if self.norm is None:
            return value
        center = " + ".join([raw] * self.residual + ["b"] * (self.norm == "layer"))
        x, turn = f"w ⊙ ({value} − c)" if center else f"w ⊙ {value}", "x/(y + λ)"
        if self.norm == "layer":
            x, turn = f"{x} − mean({x})", "(x − μ)/(y + λ), Σ s = 0"
        says = [
            f"{'c + ' if center else ''}w ⊙ s min(1, √V/‖s‖)",
            f"s = {turn}",
            "λ = max(0, ‖x‖/√V − Σ y x²/Σ x²)",
            "y = max(w², mean(w²)/36)",
            f"x = {x}",
            *([f"c = {center}"] if center else []),
        ]
        return ",   ".join(says)

    def _wrap(self, network: str, raw: str) -> str:
        norm = {None: "{}", "layer": "LN({})", "rms": "RMS({})"}[self.norm].format(network)
        return f"{raw} + {norm}" if self.residual else norm

    def notes(self) -> tuple[str, ...]:
        norms = {
            None: (),
            "layer": ("LN: its weight w and bias b are learned, not memory",),
            "rms": ("RMS: its weight w is learned, not memory",),
        }[self.norm]
        biases = ("each map has a bias, which is memory too",) if self.biases else ()
        base = ("W̄: the base is learned, not memory",) if self.base else ()
        return (*norms, *biases, *base)


@member
class MLP(_Perceptron):
    """M(x) = x + norm(W_1 σ(W_2 … x)): a multilayer perceptron (MIRAS 5.3, ATLAS 42).

    Args:
        depth: number of linear maps, up to 1000; 1 has no activation.
        expansion: hidden width as a multiple of V.
        activation: ``"gelu"`` is the erf form, ``"gelu_tanh"`` the other.
        residual: adds the raw key or query; needs K = V.
        norm: ``None``, ``"layer"`` or ``"rms"`` after the last map, before the residual.
        biases: each map gets a weight on a constant input 1: one more column, last.
        base: M(x) = x + norm((W̄_1 + W_1) σ((W̄_2 + W_2) … x)): to every map W̄_l learned weights are
            added that are no memory, the params ``base_W1``, ``base_W2``, …, each ``[H, out, in]``.
            A memory W of zeros then learns, and what decays is forgotten towards the base: with
            A = W̄ + W, A_t = W̄ + α_t (A_(t−1) − W̄) + …. It needs finite features.
        read: ``Read(normalize="sum")`` for a kernel's features.

    Examples:
        >>> memory = rc.memory.MLP(depth=2, expansion=4)
        >>> memory.shapes(8, 8)
        ((32, 8), (8, 32))
        >>> memory.at("k_t")
        'k_t + W1 gelu(W2 k_t)'
        >>> recipe = rc.Recipe(memory=rc.memory.MLP(base=True))
        >>> params = rc.initial_params(recipe, H=2, K=8, V=8)
        >>> {name: tuple(x.shape) for name, x in params.items()}
        {'base_W2': (2, 32, 8), 'base_W1': (2, 8, 32)}
        >>> q, k, v = torch.randn(3, 1, 4, 2, 8)
        >>> gates = {"lr": torch.full((1, 4, 2), 0.1)}
        >>> y, state = rc.recall(recipe, q, k, v, gates, params=params)  # from a memory of zeros
    """

    depth: int = integer(2, at_least=1)
    expansion: int = integer(4, at_least=1, size=True)
    activation: str = option("gelu", *_ACTIVATIONS)
    residual: bool = flag(True)  # type: ignore[assignment]
    norm: str | None = option(None, "layer", "rms", optional=True)
    biases: bool = flag(False)  # type: ignore[assignment]
    base: bool = flag(False)
    read: Read = slot(Read(), "read")

    def validate(self) -> None:
        if self.depth > 1000:
            raise RecipeError(
                f"{self.title}(depth=...) must be from 1 to 1000, not {shown(self.depth)}: each "
                "map takes weights of its own"
            )

    @property
    def chain(self) -> str | None:
        return None if self.biases else self.activation

    def maps(self, F: int, V: int) -> tuple[LinearMap, ...]:
        widths = (F, *(self.expansion * V,) * (self.depth - 1), V)
        return tuple(
            LinearMap(
                name=f"W{self.depth - i}",
                out=widths[i + 1],
                inp=widths[i] + self.biases,
                first=i == 0,
                last=i == self.depth - 1,
                bias=self.biases,
            )
            for i in range(self.depth)
        )

    def program(self, apply: Apply, x: Tensor, raw: Tensor, params: Mapping[str, Tensor]) -> Tensor:
        apply = self._on_base(apply, params)
        h = apply(0, _with_one(x, self.biases))
        for index in range(1, self.depth):
            h = apply(index, _with_one(_ACTIVATIONS[self.activation](h), self.biases))
        return self.finish(h, raw, params)

    def at(self, x: str, *, raw: str = "", W: str = "") -> str:
        network = f"{self._weights(f'W{self.depth}')} {x}"
        for index in range(self.depth - 1, 0, -1):
            network = f"{self._weights(f'W{index}')} {self.activation}({network})"
        return self._wrap(network, raw or x)


@member
class GatedMLP(_Perceptron):
    """M(x) = x + norm(W_1(σ(W_2 x) ⊙ W_3 x)): a gated memory (ATLAS 43).

    Weights in order of application: W_2, W_3, W_1. Arguments as for `MLP`.

    Examples:
        >>> memory = rc.memory.GatedMLP(expansion=2, residual=False)
        >>> memory.shapes(8, 4)
        ((8, 8), (8, 8), (4, 8))
        >>> memory.at("k_t")
        'W1(silu(W2 k_t) ⊙ W3 k_t)'
    """

    expansion: int = integer(4, at_least=1, size=True)
    activation: str = option("silu", *_ACTIVATIONS)
    residual: bool = flag(True)  # type: ignore[assignment]
    norm: str | None = option(None, "layer", "rms", optional=True)
    biases: bool = flag(False)  # type: ignore[assignment]
    base: bool = flag(False)
    read: Read = slot(Read(), "read")

    def maps(self, F: int, V: int) -> tuple[LinearMap, ...]:
        M, one = self.expansion * V, int(self.biases)
        return (
            LinearMap(name="W2", out=M, inp=F + one, first=True, last=False, bias=self.biases),
            LinearMap(name="W3", out=M, inp=F + one, first=True, last=False, bias=self.biases),
            LinearMap(name="W1", out=V, inp=M + one, first=False, last=True, bias=self.biases),
        )

    def program(self, apply: Apply, x: Tensor, raw: Tensor, params: Mapping[str, Tensor]) -> Tensor:
        apply = self._on_base(apply, params)
        x = _with_one(x, self.biases)
        h = _ACTIVATIONS[self.activation](apply(0, x)) * apply(1, x)
        return self.finish(apply(2, _with_one(h, self.biases)), raw, params)

    def at(self, x: str, *, raw: str = "", W: str = "") -> str:
        W1, W2, W3 = (self._weights(name) for name in ("W1", "W2", "W3"))
        return self._wrap(f"{W1}({self.activation}({W2} {x}) ⊙ {W3} {x})", raw or x)


def activation(name: str) -> Callable[[Tensor], Tensor]:
    """The activation of that name, as memories use it."""
    return _ACTIVATIONS[name]
