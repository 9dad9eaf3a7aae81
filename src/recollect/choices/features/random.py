"""Feature maps of random directions with inner products that estimate a kernel.

The directions are params that are not trained (``learned=False``). They are drawn once per head,
and are equal for queries and keys, at every token and in every call.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from recollect.choices.features.base import (
    Features,
    affine_map,
    resolve_tau,
    tau_text,
)
from recollect.choices.features.monomials import quadratic
from recollect.choices.member import member
from recollect.choices.runtime import cached_constant
from recollect.fields import Param, flag, integer, number, option
from recollect.messages import RecipeError

__all__ = ["FrequencyDomain", "PolynomialSketch", "PositiveRandom", "RandomFourier"]


@member
class PositiveRandom(Features):
    """Positive random features of the softmax kernel (Performer, FAVOR+).

    φ(x) = exp(−‖x‖²/2τ)/√m · [exp(ω_1·x/√τ), ..., exp(ω_m·x/√τ)], ω_i ~ N(0, I). Hence
    E φ(q)·φ(k) = exp(q·k/τ), with an error of order 1/√m. All features are positive, so a
    normaliser is positive unless the features underflow: the mean of their logarithms is
    −‖x‖²/2τ − ½ log m, which bounds the norm of keys and queries (`longest`). The variance of the
    estimate grows as exp(‖q + k‖²/τ). O(mK) per token and head.
    Source: Choromanski et al. 2020, lemma 1 and eq. 5; orthogonal directions: section 2.4. Their
    numerical guards (ε, and a maximum over all keys, later ones included) are left out.

    Args:
        features: m; ``None`` is 4K, the paper's 256 at K = 64.
        temperature: τ > 0; ``None`` is √K, softmax attention's scale.
        orthogonal: whether directions are orthogonal in blocks of K: unbiased, of lower variance.

    Examples:
        >>> features, position = rc.features.PositiveRandom(features=4096), torch.zeros(1, 1)
        >>> g = torch.Generator().manual_seed(0)
        >>> q, k = 0.5 * torch.randn(2, 1, 1, 1, 1, 4, generator=g)
        >>> params = rc.initial_params(rc.Recipe(features=features), H=1, K=4, V=4, generator=g)
        >>> lifted = [features.phi(x, params, "key", position) for x in (q, k)]
        >>> estimate, exact = (lifted[0] * lifted[1]).sum(), ((q * k).sum() / 2).exp()
        >>> bool(abs(estimate / exact - 1) < 0.1)
        True
    """

    features: int | None = integer(None, at_least=1, optional=True, size=True)
    temperature: float | None = number(None, above=0, optional=True)
    orthogonal: bool = flag(True)

    def dim(self, K: int) -> int:
        return 4 * K if self.features is None else self.features

    def axes(self, K: int) -> dict[str, int]:
        return {"m": self.dim(K)}

    def flops(self, K: int) -> int:
        return 2 * self.dim(K) * K

    def params(self) -> tuple[Param, ...]:
        """``directions [H, m, K]``, not trained."""
        distribution = "orthogonal" if self.orthogonal else "normal"
        me, axes = self.title, ("m", "K")
        return (Param(name="directions", owner=me, axes=axes, draw=distribution, learned=False),)

    def longest(self, K: int, dtype: torch.dtype) -> float:
        """Return √(τ (log 1/tiny − log m)), beyond which a typical φ_j(q) φ_j(k) underflows."""
        log_range = -math.log(torch.finfo(dtype).tiny) - math.log(self.dim(K))
        return math.sqrt(resolve_tau(self.temperature, K) * max(log_range, 0.0))

    def phi(self, x: Tensor, params: Mapping[str, Tensor], side: str, position: Tensor) -> Tensor:
        K = x.shape[-1]
        x = x * resolve_tau(self.temperature, K) ** -0.5
        half = 0.5 * (x.square().sum(-1, keepdim=True) + math.log(self.dim(K)))
        return (affine_map(x, params["directions"]) - half).exp()

    @property
    def text(self) -> str:
        return f"positive random features, E φ(q)·φ(k) = exp(q·k/{tau_text(self.temperature)})"


@member
class RandomFourier(Features):
    """Random Fourier features of the Gaussian or the softmax kernel (RFA).

    φ(x) = [sin(w_i·x), cos(w_i·x)]_i/√D with w_i = σ ⊙ ω_i/√τ, ω_i ~ N(0, I). Hence
    E φ(q)·φ(k) = exp(−‖σ ⊙ (q − k)‖²/2τ), with an error of order 1/√D. ``kernel="softmax"``
    multiplies by exp(‖σ ⊙ x‖²/2τ), for a kernel of exp(Σ σ² q k/τ). O(DK) per token and head.
    Source: Peng et al. 2021, eqs. 4–5; σ is learned, section 3.1. The paper draws ω from several
    pools; here it is drawn once. The two kernels are proportional for queries and keys of equal
    length.

    Args:
        frequencies: D; ``None`` is K. F = 2D.
        kernel: ``"gaussian"`` as in the paper, or ``"softmax"``.
        temperature: τ > 0; ``None`` is √K.

    Examples:
        >>> features = rc.features.RandomFourier(frequencies=16, kernel="gaussian")
        >>> features.dim(8)
        32
        >>> [(param.name, param.axes) for param in features.params()]
        [('directions', ('m', 'K')), ('bandwidth', ('K',))]
    """

    frequencies: int | None = integer(None, at_least=1, optional=True, size=True)
    kernel: str = option("softmax", "gaussian")
    temperature: float | None = number(None, above=0, optional=True)

    def _count(self, K: int) -> int:
        return K if self.frequencies is None else self.frequencies

    def dim(self, K: int) -> int:
        return 2 * self._count(K)

    def axes(self, K: int) -> dict[str, int]:
        return {"m": self._count(K)}

    def flops(self, K: int) -> int:
        return 2 * self._count(K) * K

    def params(self) -> tuple[Param, ...]:
        """``directions [H, m, K]``, not trained, and ``bandwidth [H, K]``, σ."""
        axes, me = ("m", "K"), self.title
        return (
            Param(name="directions", owner=me, axes=axes, draw="normal", learned=False),
            Param(name="bandwidth", owner=me, axes=("K",), init=1.0),
        )

    def phi(self, x: Tensor, params: Mapping[str, Tensor], side: str, position: Tensor) -> Tensor:
        K = x.shape[-1]
        tau = resolve_tau(self.temperature, K)
        x = x * (params["bandwidth"].to(x.dtype) * tau**-0.5).unsqueeze(-2)  # [H, 1, K]
        phase = affine_map(x, params["directions"])
        lifted = torch.cat([phase.sin(), phase.cos()], dim=-1) * self._count(K) ** -0.5
        if self.kernel == "gaussian":
            return lifted
        return lifted * (0.5 * x.square().sum(-1, keepdim=True)).exp()

    @property
    def text(self) -> str:
        scale = tau_text(self.temperature)
        kernel = f"q·k/{scale}" if self.kernel == "softmax" else f"−‖q − k‖²/2{scale}"
        return f"random Fourier features, E φ(q)·φ(k) = exp({kernel}) at σ = 1"


def _cosines(K: int) -> Tensor:
    """Return the orthonormal DCT-II: s_j cos(π(2i + 1)j/2K), s_0 = √(1/K), else √(2/K)."""
    i = torch.arange(K, dtype=torch.float64)
    table = (math.pi * (2 * i + 1) * i.unsqueeze(-1) / (2 * K)).cos()
    table[0] *= math.sqrt(0.5)
    return table * math.sqrt(2 / K)


@member
class FrequencyDomain(Features):
    """Weighted features of the discrete cosine transform (DiJiang).

    φ(x) = D ⊙ exp(T C x)/√F: C is the orthonormal DCT-II, T = diag(t) with t_i ~ N(0, 1) is not
    trained, and D is learned, initially 1. With c_i the rows of C and D = 1,
    E φ(q)·φ(k) = mean_i exp((c_i·(q + k))²/2). O(FK) per token and head.
    Source: Chen et al. 2024, their weighted DCT features D exp(T C x). The paper takes ω = t v, v
    of unit length, for a normal vector in K dimensions, which is √K times longer. The kernel is
    therefore the one above, not the Gaussian.

    Args:
        copies: draws of T per frequency, so F = copies · K; 1 in the paper.
        normalize: whether to divide by the sum of the features, which bounds the exponentials (the
            softmax over features of the authors' code).

    Examples:
        >>> features = rc.features.FrequencyDomain(copies=2)
        >>> features.dim(8)
        16
        >>> [(param.name, param.axes) for param in features.params()]
        [('frequencies', ('F',)), ('feature_weight', ('F',))]
    """

    copies: int = integer(1, at_least=1, size=True)
    normalize: bool = flag(False)

    def dim(self, K: int) -> int:
        return self.copies * K

    def flops(self, K: int) -> int:
        return 2 * K * K

    def params(self) -> tuple[Param, ...]:
        """``frequencies [H, F]``, the diagonal of T, not trained; ``feature_weight [H, F]``, D."""
        me = self.title
        return (
            Param(name="frequencies", owner=me, axes=("F",), draw="normal", learned=False),
            Param(name="feature_weight", owner=me, axes=("F",), init=1.0),
        )

    def phi(self, x: Tensor, params: Mapping[str, Tensor], side: str, position: Tensor) -> Tensor:
        K = x.shape[-1]
        table = cached_constant(_cosines, K, device=x.device, dtype=x.dtype)
        phase = (x @ table.T).repeat(*(1,) * (x.dim() - 1), self.copies)
        phase = phase * params["frequencies"].to(x.dtype).unsqueeze(-2)
        weight = params["feature_weight"].to(x.dtype).unsqueeze(-2)
        if self.normalize:
            return weight * phase.softmax(-1)
        return weight * self.dim(K) ** -0.5 * phase.exp()

    @property
    def text(self) -> str:
        form = "softmax" if self.normalize else "exp"
        return f"D ⊙ {form}(T C x), C the discrete cosine transform, T random, D learned"


@member
class PolynomialSketch(Features):
    """Non-negative sketch of the polynomial kernel: E φ(q)·φ(k) ≈ (q·k)^p (PolySketchFormer).

    M is a sketch of x^{⊗p/2}: products of pairs of random projections, (G_1 M_1) ⊙ (G_2 M_2)/√r,
    in a binary tree. φ(x) = M ⊗ M, so φ(q)·φ(k) = (M(q)·M(k))² ≥ 0. M ⊗ M is symmetric: its upper
    half with √2 off the diagonal has the same products with F = r(r + 1)/2 features.
    The error is O(√(p/r)) ‖q‖^p ‖k‖^p. p = 2 is exact, without a sketch. O(p r (K + r)) per token
    and head. Source: Kacham et al. 2024, algorithm 1 and theorem 1.1. Their learned sketches (small
    networks in place of G) are left out; ``GateOptions(source="learned")`` trains the G.

    Args:
        degree: p, a power of two.
        size: r; ``None`` is K/2, the paper's 32 at K = 64.

    Examples:
        >>> rc.features.PolynomialSketch(degree=4, size=8).dim(16)  # r(r + 1)/2
        36
        >>> exact, position = rc.features.PolynomialSketch(degree=2), torch.zeros(1, 1)
        >>> q, k = torch.randn(2, 1, 1, 1, 1, 3)
        >>> lifted = [exact.phi(x, {}, "key", position) for x in (q, k)]
        >>> torch.allclose((lifted[0] * lifted[1]).sum(), (q * k).sum() ** 2, atol=1e-5)
        True
    """

    shown = ("degree",)

    degree: int = integer(4, at_least=2)
    size: int | None = integer(None, at_least=1, optional=True, size=True)

    def validate(self) -> None:
        if self.degree & (self.degree - 1):
            raise RecipeError(f"{self.title}(degree=...) must be a power of two, not {self.degree}")

    def _rank(self, K: int) -> int:
        if self.degree == 2:
            return K
        return max(K // 2, 1) if self.size is None else self.size

    def dim(self, K: int) -> int:
        r = self._rank(K)
        return r * (r + 1) // 2

    def axes(self, K: int) -> dict[str, int]:
        half = self.degree // 2
        return {"r": self._rank(K), "leaf": half, "node": half - 2}

    def flops(self, K: int) -> int:
        if self.degree == 2:
            return 0
        r, half = self._rank(K), self.degree // 2
        return 2 * r * (half * K + (half - 2) * r)

    def params(self) -> tuple[Param, ...]:
        """``sketch [H, p/2, r, K]`` of the leaves, ``resketch [H, p/2 − 2, r, r]`` above them."""
        maps = (("sketch", ("leaf", "r", "K"), 4), ("resketch", ("node", "r", "r"), 8))
        return tuple(
            Param(name=name, owner=self.title, axes=axes, draw="normal", learned=False)
            for name, axes, min_degree in maps
            if self.degree >= min_degree
        )

    def phi(self, x: Tensor, params: Mapping[str, Tensor], side: str, position: Tensor) -> Tensor:
        if self.degree == 2:
            return quadratic(x)
        first, rest = params["sketch"], params.get("resketch")
        r, num_used = first.shape[-2], 0
        nodes = list(affine_map(x, first.flatten(1, 2)).split(r, dim=-1))
        while len(nodes) > 1:
            nodes = [r**-0.5 * a * b for a, b in zip(nodes[::2], nodes[1::2], strict=True)]
            if len(nodes) > 1:
                assert rest is not None
                maps = rest[:, num_used : num_used + len(nodes)].unbind(1)
                num_used += len(nodes)
                nodes = [affine_map(z, g) for z, g in zip(nodes, maps, strict=True)]
        return quadratic(nodes[0])

    @property
    def text(self) -> str:
        return f"a random sketch with φ(q)·φ(k) ≥ 0, in the mean (q·k)^{self.degree}"
