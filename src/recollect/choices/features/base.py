"""Base classes of features: finite feature maps, and kernels with infinitely many features."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from recollect.choices.member import Member, RecipeError
from recollect.choices.trial import check_phi

__all__ = ["Features", "Kernel"]


class Features(Member):
    """What keys and queries become: φ with φ(q)·φ(k) = κ(q, k).

    Override `phi` (and `dim` when the width changes) for a finite map, or extend `Kernel`. Its
    numbers are learned tensors: params, or quantities given as ``"static"``.

    Attributes:
        definite: whether every Gram matrix κ(K, K) is known to be positive semidefinite.
        decimals: digits to which κ is rounded, if it is.

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

    definite: bool = False
    decimals: int | None = None

    @property
    def lifts(self) -> bool:
        """Whether φ(x) may be anything but x itself, so that `phi` has to be asked."""
        return True

    @property
    def positive(self) -> bool:
        """Whether κ > 0 and its logarithm is stated."""
        return False

    def __post_init__(self) -> None:
        super().__post_init__()
        self._handed_params("phi")
        if type(self).phi is not Features.phi and self.finite and (wrong := check_phi(self)):
            raise RecipeError(wrong)

    def similarity(self, k: str, q: str) -> str:
        """How κ(q, k) is written in an equation.

        Args:
            k: how the key is written, e.g. ``"k_i"``.
            q: how the query is written, e.g. ``"q_t"``.
        """
        return f"{self.lift(q)}·{self.lift(k)}"

    @property
    def finite(self) -> bool:
        """Whether φ(x) can be written down as a vector."""
        return True

    def dim(self, K: int) -> int:
        """F, the number of features of a key of size K."""
        return K

    def longest(self, K: int, dtype: torch.dtype) -> float | None:
        """‖x‖ beyond which φ(x) is not to be had in a dtype; ``None`` where there is no such end.

        Where a read divides by their sum, longer keys and queries are refused on a CPU: it would
        be 0/0.

        Args:
            K: channels of x.
            dtype: of φ(x).
        """
        return None

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

        Raises:
            NotImplementedError: a kernel, whose features are infinitely many.
        """
        raise NotImplementedError(f"{self.title} must override phi")

    def kappa(self, q: Tensor, k: Tensor) -> Tensor:
        """κ(q, k) for every pair: ``[..., M, K], [..., N, K] -> [..., M, N]``.

        Args:
            q: queries ``[..., M, K]``.
            k: keys ``[..., N, K]``.

        Raises:
            NotImplementedError: features known only through `phi`.
        """
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

    @property
    def finite(self) -> bool:
        return False

    def dim(self, K: int) -> int:
        raise ValueError(f"{self.title} has infinitely many features")

    def log_kappa(self, q: Tensor, k: Tensor) -> Tensor:
        """log κ(q, k), shaped like `kappa`, so that a softmax over it never overflows.

        Args:
            q: queries ``[..., M, K]``.
            k: keys ``[..., N, K]``.

        Raises:
            NotImplementedError: a kernel that may be negative or zero.
        """
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
