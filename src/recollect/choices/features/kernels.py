"""Kernels: maps with infinitely many features, defined by κ(q, k)."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from recollect.choices.features.base import Kernel, resolve_tau, tau_text
from recollect.choices.member import member
from recollect.fields import integer, number

__all__ = [
    "Exponential",
    "Gaussian",
    "LinearKernel",
    "ReluKernel",
    "Round",
    "Solu",
    "SwishKernel",
]


class _TemperatureKernel(Kernel):
    """Function of q·k/τ."""

    temperature: float | None

    def tau(self, K: int) -> float:
        """Return the temperature for keys of size K."""
        return resolve_tau(self.temperature, K)

    def _scaled_product_text(self, k: str, q: str) -> str:
        scale = tau_text(self.temperature)
        return f"{k}·{q}" if scale == "1" else f"{k}·{q}/{scale}"


@member
class Exponential(_TemperatureKernel):
    """κ(q, k) = exp(q·k/τ), softmax attention's similarity (TTR 50).

    Args:
        temperature: τ > 0; ``None`` is √K.

    Examples:
        >>> q, k = torch.tensor([[2.0, 0.0]]), torch.tensor([[1.0, 0.0], [0.0, 1.0]])
        >>> rc.features.Exponential(temperature=2.0).kappa(q, k)  # [M, K], [N, K] → [M, N]
        tensor([[2.7183, 1.0000]])
    """

    temperature: float | None = number(None, above=0, optional=True)

    is_positive_definite = True

    def log_kappa(self, q: Tensor, k: Tensor) -> Tensor:
        return q @ k.mT / self.tau(q.shape[-1])

    def exponent(self, K: int) -> tuple[float, float]:
        return 1 / self.tau(K), 0.0

    def similarity(self, k: str, q: str) -> str:
        return f"exp({self._scaled_product_text(k, q)})"

    def lift(self, x: str) -> str:
        return f"φ*({x})"


@member
class Gaussian(Kernel):
    """κ(q, k) = exp(−‖q − k‖²/B), which decreases with the distance (TTR 51).

    Args:
        bandwidth: B > 0; ``None`` is 2√K, for the weights of `Exponential` if queries and keys have
            equal lengths.

    Examples:
        >>> q, k = torch.tensor([[1.0, 0.0]]), torch.tensor([[1.0, 0.0], [0.0, 0.0]])
        >>> rc.features.Gaussian(bandwidth=1.0).kappa(q, k)  # [M, K], [N, K] → [M, N]
        tensor([[1.0000, 0.3679]])
    """

    bandwidth: float | None = number(None, above=0, optional=True)

    is_positive_definite = True

    def exponent(self, K: int) -> tuple[float, float]:
        bandwidth = 2 * math.sqrt(K) if self.bandwidth is None else self.bandwidth
        return 2 / bandwidth, -1 / bandwidth

    def log_kappa(self, q: Tensor, k: Tensor) -> Tensor:
        a, b = self.exponent(q.shape[-1])
        lengths = q.square().sum(-1).unsqueeze(-1) + k.square().sum(-1).unsqueeze(-2)
        return a * q @ k.mT + b * lengths

    def similarity(self, k: str, q: str) -> str:
        return f"exp(−‖{k} − {q}‖²/{'2√K' if self.bandwidth is None else f'{self.bandwidth:g}'})"


@member
class LinearKernel(Kernel):
    """κ(q, k) = q·k: identity features with stored associations (AM 7).

    Examples:
        >>> q, k = torch.tensor([[2.0, 1.0]]), torch.tensor([[1.0, 0.0], [-1.0, 1.0]])
        >>> rc.features.LinearKernel().kappa(q, k)  # [M, K], [N, K] → [M, N]
        tensor([[ 2., -1.]])
    """

    is_positive_definite = True

    def kappa(self, q: Tensor, k: Tensor) -> Tensor:
        return q @ k.mT

    def similarity(self, k: str, q: str) -> str:
        return f"{k}·{q}"


@member
class ReluKernel(Kernel):
    """κ(q, k) = max(q·k, 0), as in a feed-forward network (AM 14).

    Examples:
        >>> q, k = torch.tensor([[2.0, 1.0]]), torch.tensor([[1.0, 0.0], [-1.0, 1.0]])
        >>> rc.features.ReluKernel().kappa(q, k)  # [M, K], [N, K] → [M, N]
        tensor([[2., 0.]])
    """

    nonnegative = True  # type: ignore[assignment]

    def kappa(self, q: Tensor, k: Tensor) -> Tensor:
        return functional.relu(q @ k.mT)

    def similarity(self, k: str, q: str) -> str:
        return f"relu({k}·{q})"


@member
class SwishKernel(Kernel):
    """κ(q, k) = q·k · sigmoid(q·k), as in a feed-forward network with SiLU (AM after 14).

    Examples:
        >>> q, k = torch.tensor([[2.0, 1.0]]), torch.tensor([[1.0, 0.0], [-1.0, 1.0]])
        >>> rc.features.SwishKernel().kappa(q, k)  # [M, K], [N, K] → [M, N]
        tensor([[ 1.7616, -0.2689]])
    """

    def kappa(self, q: Tensor, k: Tensor) -> Tensor:
        return functional.silu(q @ k.mT)

    def similarity(self, k: str, q: str) -> str:
        return f"silu({k}·{q})"


@member
class Solu(_TemperatureKernel):
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
        x = q @ k.mT
        return x * (x / self.tau(q.shape[-1])).exp()

    def similarity(self, k: str, q: str) -> str:
        return f"({k}·{q}) exp({self._scaled_product_text(k, q)})"


@member
class Round(Kernel):
    """κ(q, k) = q·k rounded, which tracks exchanged states exactly (AM theorem 1).

    The gradient is that of q·k. Halves are rounded to even.

    Args:
        decimals: number of decimals.

    Examples:
        >>> q, k = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.9, 0.3], [0.1, 1.0]])
        >>> rc.features.Round().kappa(q, k)  # nearly orthogonal keys become orthogonal
        tensor([[1., 0.]])
    """

    decimals: int = integer(0)  # type: ignore[assignment]

    smooth = False

    def kappa(self, q: Tensor, k: Tensor) -> Tensor:
        x = q @ k.mT
        return torch.round(x, decimals=self.decimals).detach() + (x - x.detach())

    def similarity(self, k: str, q: str) -> str:
        return f"round({k}·{q}{f', {self.decimals}' if self.decimals else ''})"
