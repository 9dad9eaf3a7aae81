"""Base classes of features: finite feature maps, and kernels with infinitely many features."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from recollect.choices.member import Member
from recollect.choices.overrides import check_override

__all__ = ["Features", "Kernel", "affine_map", "resolve_tau", "tau_text"]


def resolve_tau(temperature: float | None, K: int) -> float:
    """Return a temperature τ, √K for ``None``."""
    return math.sqrt(K) if temperature is None else temperature


def tau_text(temperature: float | None) -> str:
    """Return the text of a temperature in an equation."""
    return "√K" if temperature is None else f"{temperature:g}"


def affine_map(x: Tensor, weight: Tensor, shift: Tensor | None = None) -> Tensor:
    """Return ``weight [H, m, K]`` x + ``shift [H, m]`` for x ``[B, T, H, N, K]``."""
    flat = x.flatten(3, -2)  # [B, T, H, n, K], for any axes between heads and channels
    y = torch.einsum("bthnk,hmk->bthnm", flat, weight.to(x.dtype))
    if shift is not None:
        y = y + shift.to(x.dtype).unsqueeze(-2)
    return y.reshape(*x.shape[:-1], y.shape[-1])


class Features(Member):
    """Map φ of keys and queries, with φ(q)·φ(k) = κ(q, k).

    Override `phi` (and `dim` if the width changes) for a finite map, or extend `Kernel`. Its
    quantities are learned tensors: params, or quantities with the value ``"learned"``.

    Attributes:
        is_positive_definite: whether every Gram matrix κ(K, K) is positive semidefinite.
        decimals: number of decimals to which κ is rounded; ``None`` without rounding.

    Examples:
        >>> @rc.member
        ... class Squares(rc.features.Features):  # φ(x) = [x, x²]
        ...     def dim(self, K):
        ...         return 2 * K
        ...
        ...     def phi(self, x, params, side, position):
        ...         return torch.cat([x, x.square()], dim=-1)
        >>> recipe = rc.Recipe(features=Squares(), algorithm=rc.algorithm.GradientDescent(lr=0.1))
        >>> q, k, v = torch.randn(3, 1, 4, 2, 8)
        >>> y, state = rc.recall(recipe, q, k, v)
        >>> state.weights[0].shape  # [B, H, V, F]
        torch.Size([1, 2, 8, 16])
    """

    choice = "features"

    is_positive_definite: bool = False
    decimals: int | None = None

    @property
    def lifts(self) -> bool:
        """Whether φ(x) may differ from x."""
        return True

    @property
    def positive(self) -> bool:
        """Whether κ > 0 and its logarithm is defined."""
        return False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        check_override(cls, "phi", "x, params, side, position")

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require_params_only("phi")

    def similarity(self, k: str, q: str) -> str:
        """Return the text of κ(q, k) in an equation.

        Args:
            k: text of the key, e.g. ``"k_i"``.
            q: text of the query, e.g. ``"q_t"``.
        """
        return f"{self.lift(q)}·{self.lift(k)}"

    @property
    def finite(self) -> bool:
        """Whether φ(x) is a vector of finite length."""
        return True

    def dim(self, K: int) -> int:
        """Return F, the number of features of a key of size K."""
        return K

    def longest(self, K: int, dtype: torch.dtype) -> float | None:
        """Return the norm of x beyond which φ(x) underflows in a dtype; ``None`` without a limit.

        Reads that divide by the sum of the features refuse longer keys and queries on a CPU,
        because the result would be 0/0.

        Args:
            K: channels of x.
            dtype: dtype of φ(x).
        """
        return None

    def axes(self, K: int) -> dict[str, int]:
        """Return the sizes of the axes of this map's params other than K and F."""
        return {}

    def flops(self, K: int) -> int:
        """Return the operations of the matrix products for one key or query."""
        return 0

    def phi(self, x: Tensor, params: Mapping[str, Tensor], side: str, position: Tensor) -> Tensor:
        """Return the features ``[B, T, H, N, F]`` of ``x [B, T, H, N, K]``.

        Args:
            x: keys (N = 1) or queries (N = queries per memory).
            params: this map's learned tensors, each ``[H, ...]``.
            side: ``"key"`` or ``"query"``, for maps that differ between them.
            position: index of the token in its document, ``[B, T]``, from 0.

        Raises:
            NotImplementedError: the member is a kernel, with infinitely many features.
        """
        raise NotImplementedError(f"{self.title} must override phi")

    def kappa(self, q: Tensor, k: Tensor) -> Tensor:
        """Return κ(q, k) of every pair: ``[..., M, K], [..., N, K] -> [..., M, N]``.

        Args:
            q: queries ``[..., M, K]``.
            k: keys ``[..., N, K]``.

        Raises:
            NotImplementedError: the member defines `phi` only.
        """
        raise NotImplementedError(f"{self.title} has no closed kernel; use phi")

    def lift(self, x: str) -> str:
        """Return the text of φ(x) in an equation."""
        return f"φ({x})"

    @property
    def text(self) -> str:
        """Definition of φ in an equation's legend, for maps with the text φ(x)."""
        return type(self).__name__.lower()

    def notes(self) -> tuple[str, ...]:
        return (f"φ: {self.text}",) if self.lift("x") == "φ(x)" else ()


class Kernel(Features):
    """Map with infinitely many features, defined by κ(q, k).

    Override `kappa`, or `log_kappa` if κ is positive: `kappa` is then its exponential.

    Attributes:
        smooth: whether its gradient is its derivative; `Round` replaces the derivative.

    Examples:
        >>> @rc.member
        ... class Cubic(rc.features.Kernel):  # κ(q, k) = (q·k)³
        ...     def kappa(self, q, k):
        ...         return (q @ k.mT) ** 3
        >>> recipe = rc.Recipe(
        ...     features=Cubic(),
        ...     bias=rc.bias.DotProduct(),
        ...     algorithm=rc.algorithm.GradientDescent(lr=1.0),
        ... )
        >>> x = torch.randn(1, 4, 2, 8)
        >>> rc.recall(recipe, x, x, x)[0].shape
        torch.Size([1, 4, 2, 8])
    """

    smooth: bool = True

    finite = False  # type: ignore[assignment]

    def dim(self, K: int) -> int:
        raise ValueError(f"{self.title} has infinitely many features")

    def log_kappa(self, q: Tensor, k: Tensor) -> Tensor:
        """Return log κ(q, k), with the shape of `kappa`: a softmax over it never overflows.

        Args:
            q: queries ``[..., M, K]``.
            k: keys ``[..., N, K]``.

        Raises:
            NotImplementedError: the kernel may be negative or zero.
        """
        raise NotImplementedError(
            f"{self.title} has no log_kappa, which needs a positive kernel: use kappa"
        )

    @property
    def positive(self) -> bool:
        return type(self).log_kappa is not Kernel.log_kappa

    @property
    def nonnegative(self) -> bool:
        """Whether κ ≥ 0."""
        return self.positive

    def exponent(self, K: int) -> tuple[float, float] | None:
        """Return (a, b) if log κ = a q·k + b (‖q‖² + ‖k‖²) for keys of size K, else ``None``."""
        return None

    def kappa(self, q: Tensor, k: Tensor) -> Tensor:
        return self.log_kappa(q, k).exp()

    @property
    def text(self) -> str:
        return f"infinitely many, with φ(q)·φ(k) = {self.similarity('k', 'q')}"

    def similarity(self, k: str, q: str) -> str:
        return f"{type(self).__name__.lower()}({k}, {q})"
