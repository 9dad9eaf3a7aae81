"""Memories made of linear maps: matrix, vector, MLP and gated MLP."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from recollect.choices.member import member
from recollect.choices.memory.base import Apply, LinearMap, Memory, Read, Stack
from recollect.choices.memory.norms import NORM_EPS, layer_norm, project_to_norm_range
from recollect.choices.runtime import cached_constant
from recollect.fields import Param, flag, integer, option, slot
from recollect.messages import RecipeError, short_repr

if TYPE_CHECKING:
    from recollect.recipe.recipe import Recipe

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
    """Return weights as a factor, with parentheses around an elementwise product."""
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
    has_channels = True
    is_elementwise = True
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

    weight_symbol = "w"

    def prediction_text(self, x: str, *, raw: str = "", W: str = "") -> str:
        return f"{_factor(W or self.weight_symbol)} ⊙ {x}"

    def gradient_text(self, error: str, x: str) -> str:
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
    def chain_activation(self) -> str:
        return "identity"

    def maps(self, F: int, V: int) -> tuple[LinearMap, ...]:
        return (
            LinearMap(name="W", out_features=V, in_features=F, reads_features=True, is_output=True),
        )

    def compute(self, apply: Apply, x: Tensor, raw: Tensor, params: Mapping[str, Tensor]) -> Tensor:
        return apply(0, x)

    def prediction_text(self, x: str, *, raw: str = "", W: str = "") -> str:
        return f"{_factor(W or self.weight_symbol)} {x}"

    def gradient_text(self, error: str, x: str) -> str:
        return f"{error} {x}ᵀ"


def append_ones(h: Tensor, bias: bool) -> Tensor:
    """Append a constant 1 to every input of a map with a bias."""
    if not bias:
        return h
    ones = cached_constant(torch.ones, 1, device=h.device, dtype=h.dtype)
    return torch.cat([h, ones.expand(*h.shape[:-1], 1)], dim=-1)


def _normalize(h: Tensor, norm: str | None, params: Mapping[str, Tensor]) -> Tensor:
    """Normalise over the last axis; norm weights are params ``[H, V]``."""
    if norm is None:
        return h
    weight = params["norm_weight"].to(h.dtype)[:, None, :]  # [H, 1, V]
    if norm == "layer":
        return layer_norm(h) * weight + params["norm_bias"].to(h.dtype)[:, None, :]
    return h * (h.square().mean(-1, keepdim=True) + NORM_EPS).rsqrt() * weight


def _batched_linear(h: Tensor, weight: Tensor) -> Tensor:
    """Return ``weight [H, out, in]`` times ``h [B, H, N, in]``, with one matmul per head."""
    rows = h.transpose(0, 1)  # [H, B, N, in]
    y = torch.bmm(rows.flatten(1, 2), weight.to(h.dtype).mT)
    return y.unflatten(1, rows.shape[1:3]).transpose(0, 1)


class _Perceptron(Stack):
    """Base of MLP and GatedMLP: x + norm(network(x)).

    ``norm_weight``, ``norm_bias`` and the base are params, learned by the outer loop.
    """

    norm: str | None
    static_weights: bool

    @property
    def needs_init(self) -> bool:
        return not self.static_weights

    @property
    def base_params(self) -> tuple[str, ...]:
        return tuple(f"base_{m.name}" for m in self.maps(1, 1)) if self.static_weights else ()

    def axes(self, K: int, F: int, V: int) -> dict[str, int]:
        if not self.static_weights:
            return {}
        maps = self.maps(F, V)
        sizes = {f"{m.name} out": m.out_features for m in maps} | {
            f"{m.name} in": m.in_features for m in maps
        }
        # Features have about the length of their key, for any number of features.
        return sizes | {
            f"{m.name} fan": K + m.bias if m.reads_features else m.in_features for m in maps
        }

    def params(self) -> tuple[Param, ...]:
        base = [
            Param(
                name=name,
                owner=self.title,
                axes=(f"{m.name} out", f"{m.name} in"),
                draw="fan_in",
                fan=f"{m.name} fan",
            )
            for name, m in zip(
                self.base_params, self.maps(1, 1) if self.static_weights else (), strict=True
            )
        ]
        return (*self._norm_params(), *base)

    def requires(self, recipe: Recipe) -> Iterator[str]:
        yield from super().requires(recipe)
        if self.static_weights and not recipe.features.finite:
            yield (
                f"{self.title}(static_weights=True) adds learned weights to maps, which is "
                f"impossible over the infinitely many features of {recipe.features.title}: leave "
                "static_weights out, or use finite features"
            )

    def _add_base(self, apply: Apply, params: Mapping[str, Tensor]) -> Apply:
        """Return ``apply`` of W̄_l + W_l, with W̄ the base."""
        if not self.static_weights:
            return apply
        base = [params[name] for name in self.base_params]
        return lambda index, h: apply(index, h) + _batched_linear(h, base[index])

    def _weights(self, name: str) -> str:
        """Return the text of weights, including the base."""
        return f"({name.replace('W', 'W̄')} + {name})" if self.static_weights else name

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

    def output_map(self, z: Tensor, raw: Tensor, params: Mapping[str, Tensor]) -> Tensor:
        return super().output_map(_normalize(z, self.norm, params), raw, params)

    @property
    def has_output_map(self) -> bool:
        return self.norm is not None

    @property
    def output_norm(self) -> str | None:
        return "layer" if self.norm == "layer" else None

    @property
    def bounded(self) -> bool:  # type: ignore[override]
        return self.norm is not None

    def nearest_output(self, value: Tensor, raw: Tensor, params: Mapping[str, Tensor]) -> Tensor:
        """Return c + w ⊙ û, the projection of v onto outputs of the norm.

        c = k + b; w and b are the norm's weight and bias, and its ε is ignored. See
        `project_to_norm_range`.
        """
        if self.norm is None:
            return value
        weight = params["norm_weight"].to(value.dtype)[:, None, :]  # [H, 1, V]
        center = raw if self.residual else torch.zeros_like(value)
        if self.norm == "layer":
            center = center + params["norm_bias"].to(value.dtype)[:, None, :]
        return center + project_to_norm_range(value - center, weight, centred=self.norm == "layer")

    def nearest_output_text(self, value: str, raw: str) -> str:
        if self.norm is None:
            return value
        center = " + ".join([raw] * self.residual + ["b"] * (self.norm == "layer"))
        x, s = f"w ⊙ ({value} − c)" if center else f"w ⊙ {value}", "x/(y + λ)"
        if self.norm == "layer":
            x, s = f"{x} − mean({x})", "(x − μ)/(y + λ), Σ s = 0"
        equations = [
            f"{'c + ' if center else ''}w ⊙ s min(1, √V/‖s‖)",
            f"s = {s}",
            "λ = max(0, ‖x‖/√V − Σ y x²/Σ x²)",
            "y = max(w², mean(w²)/36)",
            f"x = {x}",
            *([f"c = {center}"] if center else []),
        ]
        return ",   ".join(equations)

    def _with_norm_and_residual(self, network: str, raw: str) -> str:
        norm = {None: "{}", "layer": "LN({})", "rms": "RMS({})"}[self.norm].format(network)
        return f"{raw} + {norm}" if self.residual else norm

    def notes(self) -> tuple[str, ...]:
        norms = {
            None: (),
            "layer": ("LN: its weight w and bias b are learned, not memory",),
            "rms": ("RMS: its weight w is learned, not memory",),
        }[self.norm]
        biases = ("each map has a bias, which is memory too",) if self.bias else ()
        base = ("W̄: the base is learned, not memory",) if self.static_weights else ()
        return (*norms, *biases, *base)


@member
class MLP(_Perceptron):
    """M(x) = x + norm(W_1 σ(W_2 … x)): a multilayer perceptron (MIRAS 5.3, ATLAS 42).

    Args:
        depth: number of linear maps, up to 1000; 1 has no activation.
        expansion: hidden width as a multiple of V.
        activation: ``"gelu"`` is the erf form, ``"gelu_tanh"`` the tanh approximation.
        residual: whether to add the raw key or query; needs K = V.
        norm: ``None``, ``"layer"`` or ``"rms"`` after the last map, before the residual.
        bias: whether each map has one more column, the last, for a constant input 1.
        static_weights: whether learned weights W̄_l outside the memory are added to every map:
            M(x) = x + norm((W̄_1 + W_1) σ((W̄_2 + W_2) … x)). They are the params ``base_W1``,
            ``base_W2``, …, each ``[H, out, in]``. A memory W of zeros then learns, and weights
            decay towards the base: with A = W̄ + W, A_t = W̄ + α_t (A_(t−1) − W̄) + …. It needs
            finite features.
        read: ``Read(normalize="sum")`` for the features of a kernel.

    Examples:
        >>> memory = rc.memory.MLP(depth=2, expansion=4)
        >>> memory.shapes(8, 8)
        ((32, 8), (8, 32))
        >>> memory.prediction_text("k_t")
        'k_t + W1 gelu(W2 k_t)'
        >>> recipe = rc.Recipe(memory=rc.memory.MLP(static_weights=True))
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
    bias: bool = flag(False)  # type: ignore[assignment]
    static_weights: bool = flag(False)
    read: Read = slot(Read(), "read")

    def validate(self) -> None:
        if self.depth > 1000:
            raise RecipeError(
                f"{self.title}(depth=...) must be from 1 to 1000, not {short_repr(self.depth)}: "
                "each map has its own weights"
            )

    @property
    def chain_activation(self) -> str:
        return self.activation

    def maps(self, F: int, V: int) -> tuple[LinearMap, ...]:
        widths = (F, *(self.expansion * V,) * (self.depth - 1), V)
        return tuple(
            LinearMap(
                name=f"W{self.depth - i}",
                out_features=widths[i + 1],
                in_features=widths[i] + self.bias,
                reads_features=i == 0,
                is_output=i == self.depth - 1,
                bias=self.bias,
            )
            for i in range(self.depth)
        )

    def compute(self, apply: Apply, x: Tensor, raw: Tensor, params: Mapping[str, Tensor]) -> Tensor:
        apply = self._add_base(apply, params)
        h = apply(0, append_ones(x, self.bias))
        for index in range(1, self.depth):
            h = apply(index, append_ones(_ACTIVATIONS[self.activation](h), self.bias))
        return self.output_map(h, raw, params)

    def prediction_text(self, x: str, *, raw: str = "", W: str = "") -> str:
        network = f"{self._weights(f'W{self.depth}')} {x}"
        for index in range(self.depth - 1, 0, -1):
            network = f"{self._weights(f'W{index}')} {self.activation}({network})"
        return self._with_norm_and_residual(network, raw or x)


@member
class GatedMLP(_Perceptron):
    """M(x) = x + norm(W_1(σ(W_2 x) ⊙ W_3 x)): a gated memory (ATLAS 43).

    Weights in order of application: W_2, W_3, W_1. Arguments as for `MLP`.

    Examples:
        >>> memory = rc.memory.GatedMLP(expansion=2, residual=False)
        >>> memory.shapes(8, 4)
        ((8, 8), (8, 8), (4, 8))
        >>> memory.prediction_text("k_t")
        'W1(silu(W2 k_t) ⊙ W3 k_t)'
    """

    expansion: int = integer(4, at_least=1, size=True)
    activation: str = option("silu", *_ACTIVATIONS)
    residual: bool = flag(True)  # type: ignore[assignment]
    norm: str | None = option(None, "layer", "rms", optional=True)
    bias: bool = flag(False)  # type: ignore[assignment]
    static_weights: bool = flag(False)
    read: Read = slot(Read(), "read")

    def maps(self, F: int, V: int) -> tuple[LinearMap, ...]:
        M, num_ones = self.expansion * V, int(self.bias)
        W2 = LinearMap(
            name="W2",
            out_features=M,
            in_features=F + num_ones,
            reads_features=True,
            is_output=False,
            bias=self.bias,
        )
        W1 = LinearMap(
            name="W1",
            out_features=V,
            in_features=M + num_ones,
            reads_features=False,
            is_output=True,
            bias=self.bias,
        )
        return W2, replace(W2, name="W3"), W1

    def compute(self, apply: Apply, x: Tensor, raw: Tensor, params: Mapping[str, Tensor]) -> Tensor:
        apply = self._add_base(apply, params)
        x = append_ones(x, self.bias)
        h = _ACTIVATIONS[self.activation](apply(0, x)) * apply(1, x)
        return self.output_map(apply(2, append_ones(h, self.bias)), raw, params)

    def prediction_text(self, x: str, *, raw: str = "", W: str = "") -> str:
        W1, W2, W3 = (self._weights(name) for name in ("W1", "W2", "W3"))
        return self._with_norm_and_residual(
            f"{W1}({self.activation}({W2} {x}) ⊙ {W3} {x})", raw or x
        )


def activation(name: str) -> Callable[[Tensor], Tensor]:
    """Return an activation of memories by name."""
    return _ACTIVATIONS[name]
