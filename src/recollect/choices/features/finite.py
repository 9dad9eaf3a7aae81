"""Feature maps in closed form: identity, elementwise functions and polynomials."""

from __future__ import annotations

import math
from collections.abc import Mapping

from torch import Tensor
from torch.nn import functional

from recollect.choices.features.base import Features, resolve_tau, tau_text
from recollect.choices.features.monomials import monomials
from recollect.choices.member import member
from recollect.fields import Param, integer, number
from recollect.messages import RecipeError, short_repr

__all__ = ["EluPlusOne", "Identity", "Polynomial", "Relu", "Silu", "Taylor"]


@member
class Identity(Features):
    """φ(x) = x.

    Examples:
        >>> features, x = rc.features.Identity(), torch.randn(1, 4, 2, 1, 8)
        >>> features.dim(8), features.lift("k_t")
        (8, 'k_t')
        >>> torch.equal(features.phi(x, {}, "key", torch.arange(4)[None]), x)
        True
    """

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
    """φ(x) = elu(x) + 1 > 0 (Katharopoulos et al. 2020, eq. 7).

    Examples:
        >>> x = torch.tensor([-1.0, 0.0, 2.0]).view(1, 1, 1, 1, 3)  # [B, T, H, N, K]
        >>> rc.features.EluPlusOne().phi(x, {}, "key", torch.zeros(1, 1)).flatten()
        tensor([0.3679, 1.0000, 3.0000])
    """

    def phi(self, x: Tensor, params: Mapping[str, Tensor], side: str, position: Tensor) -> Tensor:
        return functional.elu(x) + 1

    text = "elu(x) + 1"  # type: ignore[assignment]


@member
class Relu(Features):
    """φ(x) = max(x, 0).

    Examples:
        >>> x = torch.tensor([-1.0, 0.0, 2.0]).view(1, 1, 1, 1, 3)  # [B, T, H, N, K]
        >>> rc.features.Relu().phi(x, {}, "key", torch.zeros(1, 1)).flatten()
        tensor([0., 0., 2.])
    """

    def phi(self, x: Tensor, params: Mapping[str, Tensor], side: str, position: Tensor) -> Tensor:
        return functional.relu(x)

    def lift(self, x: str) -> str:
        return f"relu({x})"


@member
class Silu(Features):
    """φ(x) = x · sigmoid(x).

    Examples:
        >>> x = torch.tensor([-1.0, 0.0, 2.0]).view(1, 1, 1, 1, 3)  # [B, T, H, N, K]
        >>> rc.features.Silu().phi(x, {}, "key", torch.zeros(1, 1)).flatten()
        tensor([-0.2689,  0.0000,  1.7616])
    """

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

    Examples:
        >>> features = rc.features.Polynomial(degree=2)
        >>> features.dim(3)  # 1, three of degree 1, six of degree 2
        10
        >>> [(param.name, param.axes) for param in features.params()]
        [('log_coefficients', ('degree',))]
    """

    shown = ("degree",)

    degree: int = integer(2, at_least=1, size=True)

    def validate(self) -> None:
        if self.degree > 100:  # 1/i! is 0 in float32 from i = 39
            raise RecipeError(
                f"{self.title}(degree=...) must be from 1 to 100, not {short_repr(self.degree)}: "
                "the weights of higher monomials are 0"
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

    Examples:
        >>> features, position = rc.features.Taylor(order=2, temperature=1.0), torch.zeros(1, 1)
        >>> q, k = torch.randn(2, 1, 1, 1, 1, 3)
        >>> lifted = [features.phi(x, {}, "key", position) for x in (q, k)]
        >>> s = (q * k).sum()
        >>> torch.allclose((lifted[0] * lifted[1]).sum(), 1 + s + s**2 / 2, atol=1e-5)
        True
    """

    shown = ("order",)

    order: int = integer(2, at_least=1, size=True)
    temperature: float | None = number(None, above=0, optional=True)

    def dim(self, K: int) -> int:
        return math.comb(K + self.order, self.order)

    def phi(self, x: Tensor, params: Mapping[str, Tensor], side: str, position: Tensor) -> Tensor:
        tau = resolve_tau(self.temperature, x.shape[-1])
        a = [x.new_full((), tau**-i / math.factorial(i)) for i in range(self.order + 1)]
        return monomials(x, a)

    @property
    def text(self) -> str:
        return f"φ(q)·φ(k) = exp(q·k/{tau_text(self.temperature)}) to order {self.order}"
