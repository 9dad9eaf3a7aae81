"""Features: how keys and queries are lifted before the memory sees them.

A finite map answers ``dim`` and ``phi``; an infinite one (a *kernel*) answers ``kappa`` only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache
from itertools import combinations_with_replacement
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional

from recollect.choices.member import Member, Param, integer, member, number

__all__ = [
    "Cosine",
    "Dpfp",
    "EluPlusOne",
    "Exponential",
    "Features",
    "FrequencyDomain",
    "Gaussian",
    "Hedgehog",
    "Identity",
    "Kernel",
    "LearnedRelu",
    "LinearKernel",
    "Polynomial",
    "PolynomialSketch",
    "PositiveRandom",
    "Quadratic",
    "RandomFourier",
    "Relu",
    "ReluKernel",
    "Round",
    "Silu",
    "Solu",
    "SwishKernel",
    "Taylor",
]


class Features(Member):
    """What keys and queries become: φ with φ(q)·φ(k) = κ(q, k).

    Override `phi` (and `dim` when the width changes) for a finite map, or extend `Kernel`. Its
    numbers are learned tensors: params, or quantities given as ``"static"``.

    Attributes:
        definite: whether every Gram matrix κ(K, K) is known to be positive semidefinite.
        decimals: digits to which κ is rounded, if it is.
    """

    choice = "features"

    definite: bool = False
    decimals: int | None = None

    @property
    def positive(self) -> bool:
        """Whether κ > 0 and its logarithm is stated."""
        return False

    def __post_init__(self) -> None:
        super().__post_init__()
        self._handed_params("phi")

    def similarity(self, k: str, q: str) -> str:
        """How κ(q, k) is written in an equation."""
        return f"{self.lift(q)}·{self.lift(k)}"

    @property
    def finite(self) -> bool:
        """Whether φ(x) can be written down as a vector."""
        return True

    def dim(self, K: int) -> int:
        """F, the number of features of a key of size K."""
        return K

    def axes(self, K: int) -> dict[str, int]:
        """Sizes of the axes that this map's params have beside K and F."""
        return {}

    def flops(self, K: int) -> int:
        """Operations of the matrix products that lift one key or query."""
        return 0

    def phi(self, x: Tensor, params: Mapping[str, Tensor], side: str, position: Tensor) -> Tensor:
        """Lift ``x [B, T, H, N, K]`` to ``[B, T, H, N, F]``.

        Args:
            x: keys (N = 1) or queries (N = queries per memory).
            params: this map's learned tensors, each ``[H, ...]``.
            side: ``"key"`` or ``"query"``, for maps that treat them apart.
            position: index of the token in its document, ``[B, T]``, from 0.
        """
        raise NotImplementedError(f"{self.title} must override phi")

    def kappa(self, q: Tensor, k: Tensor) -> Tensor:
        """κ(q, k) for every pair: ``[..., M, K], [..., N, K] -> [..., M, N]``."""
        raise NotImplementedError(f"{self.title} has no closed kernel; use phi")

    def lift(self, x: str) -> str:
        """How φ(x) is written in an equation."""
        return f"φ({x})"

    @property
    def text(self) -> str:
        """What φ is, when `lift` does not say it; the class's name unless overridden."""
        return type(self).__name__.lower()

    def notes(self) -> tuple[str, ...]:
        return (f"φ: {self.text}",) if self.lift("x") == "φ(x)" else ()


class Kernel(Features):
    """Infinitely many features, known only through κ(q, k).

    Override `kappa`; or `log_kappa`, from which it follows, where κ is positive.

    Attributes:
        smooth: whether its gradient is its slope; otherwise it stands in for one (`Round`).
    """

    smooth: bool = True

    @property
    def finite(self) -> bool:
        return False

    def dim(self, K: int) -> int:
        raise ValueError(f"{self.title} has infinitely many features")

    def log_kappa(self, q: Tensor, k: Tensor) -> Tensor:
        """log κ(q, k), shaped like `kappa`, so that a softmax over it never overflows."""
        raise NotImplementedError(f"{self.title} is not known to be positive; use kappa")

    @property
    def positive(self) -> bool:
        """Whether κ > 0 and its logarithm is stated."""
        return type(self).log_kappa is not Kernel.log_kappa

    @property
    def nonnegative(self) -> bool:
        """Whether κ ≥ 0."""
        return self.positive

    def exponent(self, K: int) -> tuple[float, float] | None:
        """(a, b) when log κ = a q·k + b (‖q‖² + ‖k‖²) for keys of size K, else ``None``."""
        return None

    def kappa(self, q: Tensor, k: Tensor) -> Tensor:
        return self.log_kappa(q, k).exp()

    @property
    def text(self) -> str:
        return f"infinitely many, with φ(q)·φ(k) = {self.similarity('k', 'q')}"

    def similarity(self, k: str, q: str) -> str:
        """How κ(q, k) is written in an equation."""
        return f"{type(self).__name__.lower()}({k}, {q})"


@member
class Identity(Features):
    """φ(x) = x."""

    def phi(self, x: Tensor, params: Mapping[str, Tensor], side: str, position: Tensor) -> Tensor:
        return x

    def kappa(self, q: Tensor, k: Tensor) -> Tensor:
        return q @ k.transpose(-1, -2)

    def lift(self, x: str) -> str:
        return x


@member
class EluPlusOne(Features):
    """φ(x) = elu(x) + 1 > 0 (Katharopoulos et al. 2020, eq. 7)."""

    def phi(self, x: Tensor, params: Mapping[str, Tensor], side: str, position: Tensor) -> Tensor:
        return functional.elu(x) + 1

    @property
    def text(self) -> str:
        return "elu(x) + 1"


@member
class Relu(Features):
    """φ(x) = max(x, 0)."""

    def phi(self, x: Tensor, params: Mapping[str, Tensor], side: str, position: Tensor) -> Tensor:
        return functional.relu(x)

    def lift(self, x: str) -> str:
        return f"relu({x})"


@member
class Silu(Features):
    """φ(x) = x · sigmoid(x)."""

    def phi(self, x: Tensor, params: Mapping[str, Tensor], side: str, position: Tensor) -> Tensor:
        return functional.silu(x)

    def lift(self, x: str) -> str:
        return f"silu({x})"


@lru_cache(maxsize=64)
def _weights(K: int, degree: int) -> Tensor:
    """√multinomial of every monomial of that degree in K variables, in lexicographic order.

    (q·k)^p = Σ_j multinomial_j · monomial_j(q) · monomial_j(k).
    """
    weights: list[float] = []
    for index in combinations_with_replacement(range(K), degree):
        ways = math.factorial(degree)
        for variable in set(index):
            ways //= math.factorial(index.count(variable))
        weights.append(math.sqrt(ways))
    return torch.tensor(weights, dtype=torch.float64, device="cpu")


class _Times(torch.autograd.Function):
    """x_i times the end of ``lower`` from its first monomial in x_i on, for every i.

    Slices are written in place, and so are their gradients: autograd would make a full-size zero
    tensor per slice, gathering entry by entry takes several times as long.
    """

    @staticmethod
    def forward(x: Tensor, lower: Tensor, degree: int) -> Tensor:
        sizes = _starts(x.shape[-1], degree)
        out = x.new_empty(*x.shape[:-1], sum(sizes))
        for i, (n, part) in enumerate(zip(sizes, out.split(sizes, dim=-1), strict=True)):
            torch.mul(x[..., i : i + 1], lower[..., -n:], out=part)
        return out

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, int], output: Tensor) -> None:
        x, lower, ctx.degree = inputs
        ctx.save_for_backward(x, lower)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        (x, lower), (dy,) = ctx.saved_tensors, gradients
        sizes = _starts(x.shape[-1], ctx.degree)
        slopes, below = [], torch.zeros_like(lower)
        for i, (n, part) in enumerate(zip(sizes, dy.split(sizes, dim=-1), strict=True)):
            slopes.append((part * lower[..., -n:]).sum(-1))
            below[..., -n:].addcmul_(part, x[..., i : i + 1])
        return torch.stack(slopes, dim=-1), below, None


@lru_cache(maxsize=64)
def _starts(K: int, degree: int) -> list[int]:
    """How many monomials of one degree less start at variable i or later, for every i."""
    return [math.comb(K - i + degree - 2, degree - 1) for i in range(K)]


def _times(x: Tensor, lower: Tensor, degree: int) -> Tensor:
    """All monomials of a degree in lexicographic order, from those of one degree less."""
    return cast(Tensor, _Times.apply(x, lower, degree))


def quadratic(x: Tensor) -> Tensor:
    """Products of two channels, weighted so that φ(q)·φ(k) = (q·k)²; K(K + 1)/2 features."""
    return _times(x, x, 2) * _weights(x.shape[-1], 2).to(x)


def monomials(x: Tensor, coefficients: list[Tensor]) -> Tensor:
    """Features with φ(q)·φ(k) = Σ_i a_i (q·k)^i; each a_i is broadcastable to ``x[..., :1]``."""
    K = x.shape[-1]
    block = torch.ones_like(x[..., :1])
    blocks: list[Tensor] = []
    for degree, coefficient in enumerate(coefficients):
        if degree > 0:
            block = x if degree == 1 else _times(x, block, degree)
        weight = coefficient.sqrt()
        if degree > 1:
            weight = weight * _weights(K, degree).to(x)
        blocks.append(weight * block)
    return torch.cat(blocks, dim=-1)


@member
class Polynomial(Features):
    """All monomials of total degree ≤ p, weighted so that φ(q)·φ(k) = Σ_{i≤p} a_i (q·k)^i.

    a_i = exp(raw_i) is learned per head, starting at 1/i! (ATLAS eq. 5); F = C(K + p, p).

    Args:
        degree: p ≥ 1. Cost and state grow with F: degree 2 at K = 64 is 2145 features.
    """

    shown = ("degree",)

    degree: int = integer(2, at_least=1, size=True)

    def dim(self, K: int) -> int:
        return math.comb(K + self.degree, self.degree)

    def axes(self, K: int) -> dict[str, int]:
        return {"degree": self.degree + 1}

    def params(self) -> tuple[Param, ...]:
        """``log_coefficients [H, degree + 1]``, raw_i = log a_i."""
        init = tuple(-math.lgamma(i + 1) for i in range(self.degree + 1))
        return (Param(name="log_coefficients", owner=self.title, axes=("degree",), init=init),)

    def phi(self, x: Tensor, params: Mapping[str, Tensor], side: str, position: Tensor) -> Tensor:
        raw = params["log_coefficients"].to(x.dtype)  # [H, degree + 1]
        return monomials(x, [raw[:, i].exp()[:, None, None] for i in range(self.degree + 1)])

    @property
    def text(self) -> str:
        return f"all monomials of degree ≤ {self.degree}, with learned weights per degree"


@member
class Taylor(Features):
    """The Taylor polynomial of exp(q·k/τ): φ(q)·φ(k) = Σ_{i≤p} (q·k/τ)^i / i! (Based).

    Args:
        order: p ≥ 1.
        temperature: τ > 0; ``None`` is √K, softmax attention's scale.
    """

    shown = ("order",)

    order: int = integer(2, at_least=1, size=True)
    temperature: float | None = number(None, above=0, optional=True)

    def dim(self, K: int) -> int:
        return math.comb(K + self.order, self.order)

    def _tau(self, K: int) -> float:
        return math.sqrt(K) if self.temperature is None else self.temperature

    def phi(self, x: Tensor, params: Mapping[str, Tensor], side: str, position: Tensor) -> Tensor:
        tau = self._tau(x.shape[-1])
        a = [x.new_tensor(tau**-i / math.factorial(i)) for i in range(self.order + 1)]
        return monomials(x, a)

    @property
    def text(self) -> str:
        scale = "√K" if self.temperature is None else f"{self.temperature:g}"
        return f"φ(q)·φ(k) = exp(q·k/{scale}) to order {self.order}"


# They extend `Features`, which stands above.
# They extend `Kernel`, which stands above.
from recollect.choices.features.kernels import (  # noqa: E402
    Exponential,
    Gaussian,
    LinearKernel,
    ReluKernel,
    Round,
    Solu,
    SwishKernel,
)
from recollect.choices.features.learned import Cosine, Dpfp, Hedgehog, LearnedRelu, Quadratic  # noqa: E402
from recollect.choices.features.random import (  # noqa: E402
    FrequencyDomain,
    PolynomialSketch,
    PositiveRandom,
    RandomFourier,
)
