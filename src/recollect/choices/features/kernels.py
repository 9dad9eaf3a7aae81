"""Kernels: infinitely many features, known only through κ(q, k).

All but the Gaussian are functions of the product q·k. A kernel that is positive also states its
logarithm, so that a softmax over it never overflows; one whose Gram matrices are positive
semidefinite says so with ``definite``.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from recollect.choices.features.base import Kernel
from recollect.choices.fields import integer, number
from recollect.choices.member import member

__all__ = [
    "Exponential",
    "Gaussian",
    "LinearKernel",
    "ReluKernel",
    "Round",
    "Solu",
    "SwishKernel",
]


def _products(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.transpose(-1, -2)


class _OfTemperature(Kernel):
    """A function of q·k/τ; ``None`` is τ = √K."""

    temperature: float | None

    def tau(self, K: int) -> float:
        """The temperature for keys of size K."""
        return math.sqrt(K) if self.temperature is None else self.temperature

    @property
    def _scale(self) -> str:
        return "√K" if self.temperature is None else f"{self.temperature:g}"

    def _scaled(self, k: str, q: str) -> str:
        return f"{k}·{q}/{self._scale}" if self._scale != "1" else f"{k}·{q}"


@member
class Exponential(_OfTemperature):
    """κ(q, k) = exp(q·k/τ), softmax attention's similarity (TTR 50).

    Args:
        temperature: τ > 0; ``None`` is √K.

    Examples:
        >>> q, k = torch.tensor([[2.0, 0.0]]), torch.tensor([[1.0, 0.0], [0.0, 1.0]])
        >>> rc.features.Exponential(temperature=2.0).kappa(q, k)  # [M, K], [N, K] → [M, N]
        tensor([[2.7183, 1.0000]])
    """

    temperature: float | None = number(None, above=0, optional=True)

    definite = True

    def log_kappa(self, q: Tensor, k: Tensor) -> Tensor:
        return _products(q, k) / self.tau(q.shape[-1])

    def exponent(self, K: int) -> tuple[float, float]:
        return 1 / self.tau(K), 0.0

    def similarity(self, k: str, q: str) -> str:
        return f"exp({self._scaled(k, q)})"

    def lift(self, x: str) -> str:
        return f"φ*({x})"


@member
class Gaussian(Kernel):
    """κ(q, k) = exp(−‖q − k‖²/B), a likeness that falls with the distance (TTR 51).

    Args:
        bandwidth: B > 0; ``None`` is 2√K, with which queries and keys of one length give
            `Exponential`'s weights.

    Examples:
        >>> q, k = torch.tensor([[1.0, 0.0]]), torch.tensor([[1.0, 0.0], [0.0, 0.0]])
        >>> rc.features.Gaussian(bandwidth=1.0).kappa(q, k)  # [M, K], [N, K] → [M, N]
        tensor([[1.0000, 0.3679]])
    """

    bandwidth: float | None = number(None, above=0, optional=True)

    definite = True

    def exponent(self, K: int) -> tuple[float, float]:
        bandwidth = 2 * math.sqrt(K) if self.bandwidth is None else self.bandwidth
        return 2 / bandwidth, -1 / bandwidth

    def log_kappa(self, q: Tensor, k: Tensor) -> Tensor:
        a, b = self.exponent(q.shape[-1])
        lengths = q.square().sum(-1).unsqueeze(-1) + k.square().sum(-1).unsqueeze(-2)
        return a * _products(q, k) + b * lengths

    def similarity(self, k: str, q: str) -> str:
        return f"exp(−‖{k} − {q}‖²/{'2√K' if self.bandwidth is None else f'{self.bandwidth:g}'})"


@member
class LinearKernel(Kernel):
    """κ(q, k) = q·k: the identity's features, kept as associations (AM 7).

    Examples:
        >>> q, k = torch.tensor([[2.0, 1.0]]), torch.tensor([[1.0, 0.0], [-1.0, 1.0]])
        >>> rc.features.LinearKernel().kappa(q, k)  # [M, K], [N, K] → [M, N]
        tensor([[ 2., -1.]])
    """

    definite = True

    def kappa(self, q: Tensor, k: Tensor) -> Tensor:
        return _products(q, k)

    def similarity(self, k: str, q: str) -> str:
        return f"{k}·{q}"


@member
class ReluKernel(Kernel):
    """κ(q, k) = max(q·k, 0), a feed-forward network's (AM 14).

    Examples:
        >>> q, k = torch.tensor([[2.0, 1.0]]), torch.tensor([[1.0, 0.0], [-1.0, 1.0]])
        >>> rc.features.ReluKernel().kappa(q, k)  # [M, K], [N, K] → [M, N]
        tensor([[2., 0.]])
    """

    @property
    def nonnegative(self) -> bool:
        return True

    def kappa(self, q: Tensor, k: Tensor) -> Tensor:
        return functional.relu(_products(q, k))

    def similarity(self, k: str, q: str) -> str:
        return f"relu({k}·{q})"


@member
class SwishKernel(Kernel):
    """κ(q, k) = q·k · sigmoid(q·k), of a feed-forward network with SiLU (AM after 14).

    Examples:
        >>> q, k = torch.tensor([[2.0, 1.0]]), torch.tensor([[1.0, 0.0], [-1.0, 1.0]])
        >>> rc.features.SwishKernel().kappa(q, k)  # [M, K], [N, K] → [M, N]
        tensor([[ 1.7616, -0.2689]])
    """

    def kappa(self, q: Tensor, k: Tensor) -> Tensor:
        return functional.silu(_products(q, k))

    def similarity(self, k: str, q: str) -> str:
        return f"silu({k}·{q})"


@member
class Solu(_OfTemperature):
    """κ(q, k) = (q·k) exp(q·k/τ): linear times exponential (AM 16).

    Args:
        temperature: τ > 0; ``None`` is √K.

    Examples:
        >>> q, k = torch.tensor([[2.0, 1.0]]), torch.tensor([[1.0, 0.0], [-1.0, 1.0]])
        >>> rc.features.Solu(temperature=2.0).kappa(q, k)  # [M, K], [N, K] → [M, N]
        tensor([[ 5.4366, -0.6065]])
    """

    temperature: float | None = number(None, above=0, optional=True)

    def kappa(self, q: Tensor, k: Tensor) -> Tensor:
        x = _products(q, k)
        return x * (x / self.tau(q.shape[-1])).exp()

    def similarity(self, k: str, q: str) -> str:
        return f"({k}·{q}) exp({self._scaled(k, q)})"


@member
class Round(Kernel):
    """κ(q, k) = q·k rounded, which tracks exchanged states exactly (AM theorem 1).

    Gradients pass straight through, as if nothing were rounded. Halves go to the even neighbour.

    Args:
        decimals: digits after the point that stay.

    Examples:
        >>> q, k = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.9, 0.3], [0.1, 1.0]])
        >>> rc.features.Round().kappa(q, k)  # what is nearly orthogonal becomes so
        tensor([[1., 0.]])
    """

    decimals: int = integer(0)  # type: ignore[assignment]

    smooth = False

    def kappa(self, q: Tensor, k: Tensor) -> Tensor:
        x = _products(q, k)
        return torch.round(x, decimals=self.decimals).detach() + (x - x.detach())

    def similarity(self, k: str, q: str) -> str:
        return f"round({k}·{q}{f', {self.decimals}' if self.decimals else ''})"
