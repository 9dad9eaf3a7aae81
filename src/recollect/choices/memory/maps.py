"""Memory: what function stores the associations, and how it is read.

A finite memory answers its weights' shapes and a `forward`. Memories made of linear maps extend
`Stack` and state a program over `apply(l, h)`; engines that know linear maps run any such program.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional

from recollect.choices.member import (
    Member,
    Param,
    RecipeError,
    flag,
    integer,
    member,
    option,
    quantity,
    slot,
    text,
)
from recollect.choices.memory.norms import NORM_EPS, layer_norm

if TYPE_CHECKING:
    from recollect.recipe.recipe import Recipe

__all__ = [
    "MLP",
    "GatedMLP",
    "LinearMap",
    "LocalConstant",
    "LocalPolynomial",
    "Matrix",
    "Memory",
    "Module",
    "Read",
    "Stack",
    "Vector",
    "module_factory",
]

Apply = Callable[[int, Tensor], Tensor]
Forward = Callable[[Sequence[Tensor], Tensor, Tensor, Mapping[str, Tensor]], Tensor]

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "relu": functional.relu,
    "silu": functional.silu,
    "tanh": torch.tanh,
    "identity": lambda x: x,
}


@member
class Read(Member):
    """How a memory is read.

    Over finite features this is for memories that are linear in their weights. Over kernels,
    ``normalize="sum"`` divides what every map reads from the features by Σ_i κ(z_i, x) over the
    keys it holds: a softmax, in which each weighs 1 (decayed like the memory), whatever its rate.
    What is written is not divided: such a map moves by δ φ(k)ᵀ, δ the gradient of what it gives,
    as in attention. `docs/design/kernel-delta.md` says why that is not δ φ(k)ᵀ / Σ_i κ(z_i, k).

    Args:
        normalize: ``"none"``: y = W φ(q). ``"sum"``: divided by n·φ(q), n the dot-product memory of
            ones with the same rates (0 where that is 0). ``"floor"``: divided by
            max(|n·φ(q)|, 1), mLSTM's floor, which is exp(−m) in its stabilised scale.
        when: ``"after"`` the token's write, or ``"before"`` it (RWKV-6).
        bonus: adds ⟨φ(q), u ⊙ φ(k)⟩ v of the current token; a constant or ``"static"``, one u per
            head and channel.
    """

    choice = "read"

    normalize: str = option("none", "sum", "floor")
    when: str = option("after", "before")
    bonus: float | str = quantity(0.0, axes=("F",), kinds=("static",), init=0.5)

    @property
    def plain(self) -> bool:
        """Whether this is y_t = W_t φ(q_t) and nothing else."""
        return self == Read()


class Memory(Member):
    """The function M(W; x) that stores associations in its weights W.

    Its numbers are learned tensors: params, or quantities given as ``"static"``.

    Attributes:
        linear: whether M(W; x) = W x with one matrix W ``[V, F]`` (w ⊙ x where ``diagonal``), and
            nothing else.
        degree: degree of a local polynomial; ``None`` for a memory with weights.
        channelled: whether decays and rates per channel have a meaning.
        diagonal: whether there is one weight per channel instead of a matrix.
        residual: whether the raw key or query is added to the prediction, which needs K = V.
    """

    choice = "memory"

    linear: bool = False
    degree: int | None = None
    channelled: bool = False
    diagonal: bool = False
    residual: bool = False
    read: Read = Read()

    def __post_init__(self) -> None:
        super().__post_init__()
        self._handed_params("forward")

    def requires(self, recipe: Recipe) -> Iterator[str]:
        yield from super().requires(recipe)
        if self.linear and self.shapes(2, 2) != (((2,),) if self.diagonal else ((2, 2),)):
            yield (
                f"{self.title} says linear, which is M(W; x) = W x with one matrix [V, F], and its "
                "weights are of other shapes: leave linear out"
            )

    def shapes(self, F: int, V: int) -> tuple[tuple[int, ...], ...]:
        """Shapes of the weights (without ``[B, H]``) for F input features and V outputs."""
        raise NotImplementedError(f"{self.title} has no weights")

    def forward(
        self, weights: Sequence[Tensor], x: Tensor, raw: Tensor, params: Mapping[str, Tensor]
    ) -> Tensor:
        """M(W; x): weights ``[B, H, *shape]``, x ``[B, H, N, F]``, raw ``[B, H, N, K]`` → V.

        ``raw`` is the key or query before features; ``params`` are this memory's own, each
        ``[H, ...]``.
        """
        raise NotImplementedError(f"{self.title} has no weights")

    def function(self, F: int, V: int) -> Forward:
        """`forward`, bound to its sizes; overridden where the structure depends on them."""
        return self.forward

    def basis(self, difference: Tensor) -> Tensor:
        """Monomials of k − q that a local polynomial is made of, ``[..., K]`` to ``[..., D]``."""
        raise NotImplementedError(f"{self.title} is no local polynomial")

    letter: str = "W"
    """What its weights are called in an equation."""

    def at(self, x: str, *, raw: str = "", W: str = "") -> str:
        """How M(W; x) is written in an equation.

        Args:
            x: the lifted key or query; ``raw``: the same before features, where they differ.
            W: what stands for the weights, e.g. ``"α_t W_(t−1)"``; their letter when omitted.
        """
        return f"M({W or self.letter}; {x})"

    def outer(self, error: str, x: str) -> str | None:
        """How ∂⟨error, M(W; x)⟩/∂W is written; ``None`` where that is no short product."""
        return None


@dataclass(frozen=True, kw_only=True)
class LinearMap:
    """One linear map of a `Stack`: ``[out, in]``, and where it stands.

    Attributes:
        first: its input is the features; ``last``: its output is the prediction.
        bias: its last input column multiplies a constant 1.
    """

    name: str
    out: int
    inp: int
    first: bool
    last: bool
    bias: bool = False


class Stack(Memory):
    """A memory made of linear maps, activations, norms and a residual."""

    channelled = True

    @property
    def chain(self) -> str | None:
        """The activation between maps that follow one another, with nothing else around them.

        Only a residual, which ``residual`` states, may be added. ``None`` for any other program.
        """
        return None

    @property
    def biases(self) -> bool:
        """Whether a map has a column for a constant 1."""
        return any(one.bias for one in self.maps(1, 1))

    def maps(self, F: int, V: int) -> tuple[LinearMap, ...]:
        """The linear maps in order of application."""
        raise NotImplementedError(f"{self.title} must state its maps")

    def program(self, apply: Apply, x: Tensor, raw: Tensor, params: Mapping[str, Tensor]) -> Tensor:
        """M(x), calling ``apply(l, h)`` for the l-th linear map on ``h [B, H, N, in]``."""
        raise NotImplementedError(f"{self.title} must state its program")

    def shapes(self, F: int, V: int) -> tuple[tuple[int, ...], ...]:
        return tuple((m.out, m.inp) for m in self.maps(F, V))

    def forward(
        self, weights: Sequence[Tensor], x: Tensor, raw: Tensor, params: Mapping[str, Tensor]
    ) -> Tensor:
        def apply(index: int, h: Tensor) -> Tensor:
            return h @ weights[index].transpose(-1, -2)

        return self.program(apply, x, raw, params)


def _factor(W: str) -> str:
    """Weights as a factor: an entrywise product needs parentheses."""
    return f"({W})" if " ⊙ " in W else W


@member
class Vector(Memory):
    """M(x) = w ⊙ x: one weight per channel; needs K = V."""

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
    """M(x) = W x, W ``[V, F]``: one linear map."""

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
    return torch.cat([h, torch.ones_like(h[..., :1])], dim=-1) if bias else h


def _normed(h: Tensor, norm: str | None, params: Mapping[str, Tensor]) -> Tensor:
    """Normalise over the last axis; norm weights are params ``[H, V]``."""
    if norm is None:
        return h
    weight = params["norm_weight"].to(h.dtype)[:, None, :]  # [H, 1, V]
    if norm == "layer":
        return layer_norm(h) * weight + params["norm_bias"].to(h.dtype)[:, None, :]
    return h * (h.square().mean(-1, keepdim=True) + NORM_EPS).rsqrt() * weight


class _Perceptron(Stack):
    """What MLP and GatedMLP share: x + norm(network(x)).

    ``norm_weight`` and ``norm_bias`` are params (learned by the outer loop), not memory.
    """

    norm: str | None

    def params(self) -> tuple[Param, ...]:
        names = {None: (), "rms": ("norm_weight",), "layer": ("norm_weight", "norm_bias")}
        return tuple(
            Param(name=name, owner=self.title, axes=("V",), init=float(name == "norm_weight"))
            for name in names[self.norm]
        )

    def _finish(self, h: Tensor, raw: Tensor, params: Mapping[str, Tensor]) -> Tensor:
        h = _normed(h, self.norm, params)
        return raw + h if self.residual else h

    def _wrap(self, network: str, raw: str) -> str:
        norm = {None: "{}", "layer": "LN({})", "rms": "RMS({})"}[self.norm].format(network)
        return f"{raw} + {norm}" if self.residual else norm

    def notes(self) -> tuple[str, ...]:
        weights = {None: "", "layer": "LN", "rms": "RMS"}[self.norm]
        found = (f"{weights}: its weights are learned, not memory",) if weights else ()
        biases = ("each map has a bias, which is memory too",) if self.biases else ()
        return (*found, *biases)


@member
class MLP(_Perceptron):
    """M(x) = x + norm(W_1 σ(W_2 … x)): a multilayer perceptron (MIRAS 5.3, ATLAS 42).

    Args:
        depth: number of linear maps; 1 has no activation.
        expansion: hidden width as a multiple of V.
        activation: ``"gelu"`` is the erf form, ``"gelu_tanh"`` the other.
        residual: adds the raw key or query; needs K = V.
        norm: ``None``, ``"layer"`` or ``"rms"`` after the last map, before the residual.
        biases: each map gets a weight on a constant input 1: one more column, last.
        read: ``Read(normalize="sum")`` for a kernel's features.
    """

    depth: int = integer(2, at_least=1)
    expansion: int = integer(4, at_least=1, size=True)
    activation: str = option("gelu", *_ACTIVATIONS)
    residual: bool = flag(True)  # type: ignore[assignment]
    norm: str | None = option(None, "layer", "rms", optional=True)
    biases: bool = flag(False)  # type: ignore[assignment]
    read: Read = slot(Read(), "read")

    @property
    def chain(self) -> str | None:
        return None if self.norm is not None or self.biases else self.activation

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
        h = apply(0, _with_one(x, self.biases))
        for index in range(1, self.depth):
            h = apply(index, _with_one(_ACTIVATIONS[self.activation](h), self.biases))
        return self._finish(h, raw, params)

    def at(self, x: str, *, raw: str = "", W: str = "") -> str:
        network = f"W{self.depth} {x}"
        for index in range(self.depth - 1, 0, -1):
            network = f"W{index} {self.activation}({network})"
        return self._wrap(network, raw or x)


@member
class GatedMLP(_Perceptron):
    """M(x) = x + norm(W_1(σ(W_2 x) ⊙ W_3 x)): a gated memory (ATLAS 43).

    Weights in order of application: W_2, W_3, W_1. Arguments as for `MLP`.
    """

    expansion: int = integer(4, at_least=1, size=True)
    activation: str = option("silu", *_ACTIVATIONS)
    residual: bool = flag(True)  # type: ignore[assignment]
    norm: str | None = option(None, "layer", "rms", optional=True)
    biases: bool = flag(False)  # type: ignore[assignment]
    read: Read = slot(Read(), "read")

    def maps(self, F: int, V: int) -> tuple[LinearMap, ...]:
        M, one = self.expansion * V, int(self.biases)
        return (
            LinearMap(name="W2", out=M, inp=F + one, first=True, last=False, bias=self.biases),
            LinearMap(name="W3", out=M, inp=F + one, first=True, last=False, bias=self.biases),
            LinearMap(name="W1", out=V, inp=M + one, first=False, last=True, bias=self.biases),
        )

    def program(self, apply: Apply, x: Tensor, raw: Tensor, params: Mapping[str, Tensor]) -> Tensor:
        x = _with_one(x, self.biases)
        h = _ACTIVATIONS[self.activation](apply(0, x)) * apply(1, x)
        return self._finish(apply(2, _with_one(h, self.biases)), raw, params)

    def at(self, x: str, *, raw: str = "", W: str = "") -> str:
        return self._wrap(f"W1({self.activation}(W2 {x}) ⊙ W3 {x})", raw or x)


Factory = Callable[[int, int], nn.Module]
_FACTORIES: dict[str, Factory] = {}


def module_factory(name: str) -> Callable[[Factory], Factory]:
    """Decorator: register ``factory(F, V) -> torch.nn.Module`` under a name for `Module`.

    The module maps ``[N, F]`` to ``[N, V]``, keeps no buffers, and draws no random numbers.
    """

    def register(factory: Factory) -> Factory:
        known = _FACTORIES.get(name)
        if known is not None and getattr(known, "__qualname__", known) != getattr(
            factory, "__qualname__", factory
        ):
            raise RecipeError(f"a module factory named {name!r} exists already: choose another")
        _FACTORIES[name] = factory
        return factory

    return register


@member
class Module(Memory):
    """Any stateless torch module as memory: its parameters are the weights.

    Args:
        factory: the name under which ``factory(F, V)`` was registered with
            ``rc.memory.module_factory``. A recipe is data, so it holds the name, not the callable.
    """

    factory: str = text()

    def validate(self) -> None:
        if self.factory not in _FACTORIES:
            raise RecipeError(
                f"memory.Module: no factory named {self.factory!r} is registered; decorate a "
                "function (F, V) -> torch.nn.Module with "
                f"@rc.memory.module_factory({self.factory!r})"
            )

    def template(self, F: int, V: int) -> nn.Module:
        """A fresh module on the meta device: structure without values."""
        with torch.device("meta"):
            module = _FACTORIES[self.factory](F, V)
        if any(True for _ in module.buffers()):
            raise RecipeError(
                f"memory.Module({self.factory!r}) has buffers, which no recipe can carry: "
                "make them constants or parameters"
            )
        return module

    def shapes(self, F: int, V: int) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(p.shape) for p in self.template(F, V).parameters())

    def function(self, F: int, V: int) -> Forward:
        module = self.template(F, V)
        names = [name for name, _ in module.named_parameters()]

        def call(weights: tuple[Tensor, ...], h: Tensor) -> Tensor:
            return torch.func.functional_call(module, dict(zip(names, weights, strict=True)), (h,))

        batched = torch.vmap(torch.vmap(call))

        def forward(
            weights: Sequence[Tensor], x: Tensor, raw: Tensor, params: Mapping[str, Tensor]
        ) -> Tensor:
            return batched(tuple(weights), x)

        return forward

    def at(self, x: str, *, raw: str = "", W: str = "") -> str:
        return f"{self.factory}({W or self.letter}; {x})"


def activation(name: str) -> Callable[[Tensor], Tensor]:
    """The activation of that name, as memories use it."""
    return _ACTIVATIONS[name]


# They extend `Memory`, which stands above.
from recollect.choices.memory.local import LocalConstant, LocalPolynomial  # noqa: E402
