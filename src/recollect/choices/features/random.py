"""Feature maps made of random directions: their inner products estimate a kernel.

The directions are params that nobody trains (``learned=False``): drawn once per head, the same for
queries and keys, at every token and in every call, so that what was written can be read. How the
error falls with their number is measured in ``tests/test_feature_maps.py``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from recollect.choices.devices import constant
from recollect.choices.features.base import Features
from recollect.choices.features.monomials import quadratic
from recollect.choices.fields import Param, flag, integer, number, option
from recollect.choices.member import RecipeError, member

__all__ = ["FrequencyDomain", "PolynomialSketch", "PositiveRandom", "RandomFourier"]


def _project(x: Tensor, directions: Tensor) -> Tensor:
    """``directions [H, m, K]`` times every x ``[B, T, H, N, K]``."""
    flat = x.flatten(3, -2)  # [B, T, H, n, K], whatever stands between heads and channels
    y = torch.einsum("bthnk,hmk->bthnm", flat, directions.to(x.dtype))
    return y.reshape(*x.shape[:-1], y.shape[-1])


def _scale(temperature: float | None) -> str:
    return "√K" if temperature is None else f"{temperature:g}"


@member
class PositiveRandom(Features):
    """Positive random features of the softmax kernel (Performer, FAVOR+).

    φ(x) = exp(−‖x‖²/2τ)/√m · [exp(ω_1·x/√τ), ..., exp(ω_m·x/√τ)], ω_i ~ N(0, I), so that
    E φ(q)·φ(k) = exp(q·k/τ), with an error of order 1/√m. All features are positive, so a
    normaliser never vanishes, as long as they are numbers of the dtype: their logarithms are
    −‖x‖²/2τ − ½ log m in the mean, so that long keys and queries underflow (`longest`), where the
    estimate, whose variance grows as exp(‖q + k‖²/τ), is of no use anyway. O(mK) per token and
    head. Source: Choromanski et al. 2020, lemma 1 and eq. 5; orthogonal directions: section 2.4.
    Their numerical guards (ε, a maximum over all keys, which sees the future) are left out.

    Args:
        features: m; ``None`` is 4K, 256 at K = 64 as there.
        temperature: τ > 0; ``None`` is √K, softmax attention's scale.
        orthogonal: directions orthogonal in blocks of K: as unbiased, and less spread.

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
        """``directions [H, m, K]``, held fixed."""
        law = "orthogonal" if self.orthogonal else "normal"
        axes = ("m", "K")
        return (Param(name="directions", owner=self.title, axes=axes, draw=law, learned=False),)

    def _tau(self, K: int) -> float:
        return math.sqrt(K) if self.temperature is None else self.temperature

    def longest(self, K: int, dtype: torch.dtype) -> float:
        """√(τ (log 1/tiny − log m)): there a typical φ_j(q) φ_j(k) is the least normal number."""
        room = -math.log(torch.finfo(dtype).tiny) - math.log(self.dim(K))
        return math.sqrt(self._tau(K) * max(room, 0.0))

    def phi(self, x: Tensor, params: Mapping[str, Tensor], side: str, position: Tensor) -> Tensor:
        K = x.shape[-1]
        x = x * self._tau(K) ** -0.5
        half = 0.5 * (x.square().sum(-1, keepdim=True) + math.log(self.dim(K)))
        return (_project(x, params["directions"]) - half).exp()

    @property
    def text(self) -> str:
        return f"positive random features, E φ(q)·φ(k) = exp(q·k/{_scale(self.temperature)})"


@member
class RandomFourier(Features):
    """Random Fourier features of the Gaussian or the softmax kernel (RFA).

    φ(x) = [sin(w_i·x), cos(w_i·x)]_i/√D with w_i = σ ⊙ ω_i/√τ, ω_i ~ N(0, I), so that
    E φ(q)·φ(k) = exp(−‖σ ⊙ (q − k)‖²/2τ), with an error of order 1/√D. ``kernel="softmax"``
    multiplies by exp(‖σ ⊙ x‖²/2τ), which makes it exp(Σ σ² q k/τ). O(DK) per token and head.
    Source: Peng et al. 2021, eqs. 4–5; σ is learned, section 3.1 (there from one of many pools of ω
    that are drawn anew; here ω is drawn once). At queries and keys of one length both kernels are
    proportional.

    Args:
        frequencies: D; ``None`` is K. F = 2D.
        kernel: ``"gaussian"`` as there, or ``"softmax"``.
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
        """``directions [H, m, K]``, held fixed, and the bandwidths ``[H, K]``, σ."""
        axes, me = ("m", "K"), self.title
        return (
            Param(name="directions", owner=me, axes=axes, draw="normal", learned=False),
            Param(name="bandwidth", owner=me, axes=("K",), init=1.0),
        )

    def phi(self, x: Tensor, params: Mapping[str, Tensor], side: str, position: Tensor) -> Tensor:
        K = x.shape[-1]
        tau = math.sqrt(K) if self.temperature is None else self.temperature
        x = x * (params["bandwidth"].to(x.dtype) * tau**-0.5).unsqueeze(-2)  # [H, 1, K]
        phase = _project(x, params["directions"])
        lifted = torch.cat([phase.sin(), phase.cos()], dim=-1) * self._count(K) ** -0.5
        if self.kernel == "gaussian":
            return lifted
        return lifted * (0.5 * x.square().sum(-1, keepdim=True)).exp()

    @property
    def text(self) -> str:
        scale = _scale(self.temperature)
        kernel = f"q·k/{scale}" if self.kernel == "softmax" else f"−‖q − k‖²/2{scale}"
        return f"random Fourier features, E φ(q)·φ(k) = exp({kernel}) at σ = 1"


def _cosines(K: int) -> Tensor:
    """The orthonormal DCT-II: row j is s_j cos(π(2i + 1)j/2K), s_0 = √(1/K), else √(2/K)."""
    i, j = torch.arange(K, dtype=torch.float64), torch.arange(K, dtype=torch.float64)
    table = (math.pi * (2 * i + 1) * j.unsqueeze(-1) / (2 * K)).cos()
    table[0] *= math.sqrt(0.5)
    return table * math.sqrt(2 / K)


@member
class FrequencyDomain(Features):
    """Weighted features of the discrete cosine transform (DiJiang).

    φ(x) = D ⊙ exp(T C x)/√F: C is the orthonormal DCT-II, T = diag(Φ⁻¹(u_i)) with u_i ~ U(0, 1),
    that is t_i ~ N(0, 1), held fixed, and D is learned, from ones. With c_i the rows of C and
    D = 1, E φ(q)·φ(k) = mean_i exp((c_i·(q + k))²/2). O(FK) per token and head.
    Source: Chen et al. 2024, their weighted DCT features D exp(T C x). The paper takes ω = t v, v
    of unit length, for the normal law in K dimensions that the Gaussian kernel needs; its length is
    √K times too short, so the kernel is the one above.

    Args:
        copies: draws of T per frequency, so F = copies · K; 1 as there.
        normalize: divide by the sum of the features, which is how the authors' code keeps the
            exponentials bounded (their softmax over features).

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
        """``frequencies [H, F]``, the diagonal of T, held fixed; ``feature_weight [H, F]``, D."""
        me = self.title
        return (
            Param(name="frequencies", owner=me, axes=("F",), draw="normal", learned=False),
            Param(name="feature_weight", owner=me, axes=("F",), init=1.0),
        )

    def phi(self, x: Tensor, params: Mapping[str, Tensor], side: str, position: Tensor) -> Tensor:
        K = x.shape[-1]
        table = constant(_cosines, K, device=x.device, dtype=x.dtype)
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
    """A non-negative sketch of the polynomial kernel: E φ(q)·φ(k) ≈ (q·k)^p (PolySketchFormer).

    M = sketch of x^{⊗p/2}, by products of pairs of random projections, (G_1 M_1) ⊙ (G_2 M_2)/√r up
    a binary tree (their algorithm 1), and φ(x) = M ⊗ M, so φ(q)·φ(k) = (M(q)·M(k))² ≥ 0. M ⊗ M is
    symmetric: its upper half with √2 off the diagonal is the same map in F = r(r + 1)/2 features.
    The error is O(√(p/r)) ‖q‖^p ‖k‖^p (theorem 1.1). p = 2 needs no sketch and is exact.
    O(p r (K + r)) per token and head. Source: Kacham et al. 2024, algorithm 1 and theorem 1.1;
    their learned sketches (small networks in place of G) are left out, though
    ``GateOptions(source="learned")`` trains the G.

    Args:
        degree: p, a power of two.
        size: r; ``None`` is K/2, 32 at K = 64 as there.

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
            raise RecipeError(
                f"{self.title}(degree={self.degree}) halves the degree until it is 1: use a power "
                "of two"
            )

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
        found: list[Param] = []
        for name, axes, least in (
            ("sketch", ("leaf", "r", "K"), 4),
            ("resketch", ("node", "r", "r"), 8),
        ):
            if self.degree >= least:
                found.append(
                    Param(name=name, owner=self.title, axes=axes, draw="normal", learned=False)
                )
        return tuple(found)

    def phi(self, x: Tensor, params: Mapping[str, Tensor], side: str, position: Tensor) -> Tensor:
        if self.degree == 2:
            return quadratic(x)
        first, rest = params["sketch"], params.get("resketch")
        r, used = first.shape[-2], 0
        level = list(_project(x, first.flatten(1, 2)).split(r, dim=-1))
        while len(level) > 1:
            level = [r**-0.5 * a * b for a, b in zip(level[::2], level[1::2], strict=True)]
            if len(level) > 1:
                assert rest is not None
                nodes = rest[:, used : used + len(level)].unbind(1)
                used += len(level)
                level = [_project(z, g) for z, g in zip(level, nodes, strict=True)]
        return quadratic(level[0])

    @property
    def text(self) -> str:
        return f"a random sketch with φ(q)·φ(k) ≥ 0, in the mean (q·k)^{self.degree}"
