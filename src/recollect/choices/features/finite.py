"""Feature maps in closed form: identity, elementwise functions and polynomials.

A finite map answers ``dim`` and ``phi``; an infinite one (a *kernel*) answers ``kappa`` only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from torch import Tensor
from torch.nn import functional

from recollect.choices.features.base import Features
from recollect.choices.features.monomials import monomials
from recollect.choices.fields import Param, integer, number
from recollect.choices.member import RecipeError, member
from recollect.wording import shown

__all__ = ["EluPlusOne", "Identity", "Polynomial", "Relu", "Silu", "Taylor"]


@member
class Identity(Features):
    """φ(x) = x."""

    @property
    def lifts(self) -> bool:
        return type(self).phi is not Identity.phi

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


@member
class Polynomial(Features):
    """All monomials of total degree ≤ p, weighted so that φ(q)·φ(k) = Σ_{i≤p} a_i (q·k)^i.

    a_i = exp(raw_i) is learned per head, starting at 1/i! (ATLAS eq. 5); F = C(K + p, p).

    Args:
        degree: p from 1 to 100. Cost and state grow with F: degree 2 at K = 64 is 2145 features.
    """

    shown = ("degree",)

    degree: int = integer(2, at_least=1, size=True)

    def validate(self) -> None:
        if self.degree > 100:  # 1/i! is 0 in float32 from i = 39
            raise RecipeError(
                f"{self.title}(degree=...) must be from 1 to 100, not {shown(self.degree)}: higher "
                "monomials weigh nothing"
            )

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
        a = [x.new_full((), tau**-i / math.factorial(i)) for i in range(self.order + 1)]
        return monomials(x, a)

    @property
    def text(self) -> str:
        scale = "√K" if self.temperature is None else f"{self.temperature:g}"
        return f"φ(q)·φ(k) = exp(q·k/{scale}) to order {self.order}"
