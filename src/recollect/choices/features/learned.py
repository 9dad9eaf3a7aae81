"""Feature maps that are learned, depend on the position, or multiply channels."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.nn import functional

from recollect.choices.features.base import Features, affine_map
from recollect.choices.features.monomials import quadratic
from recollect.choices.member import member
from recollect.fields import Param, flag, integer, option
from recollect.numerics import safe_divide

__all__ = ["Cosine", "Dpfp", "GatedUnits", "Hedgehog", "LearnedRelu", "Quadratic"]

SIDES = {"query": 0, "key": 1}


def _sides(params: Mapping[str, Tensor], name: str, side: str, like: Tensor) -> Tensor:
    """Return the part of a param ``[H, side, ...]`` for queries or keys."""
    return params[name][:, SIDES[side]].to(like.dtype)


@member
class Cosine(Features):
    """Rectified features with a similarity that decreases with distance (cosFormer).

    φ(x_t) = [relu(x) cos(πt/2M), relu(x) sin(πt/2M)]. Hence φ(q_t)·φ(k_i) = relu(q)·relu(k)
    cos(π(t − i)/2M) ≥ 0 for t, i ≤ M. t is the token's index in its document, from 0; later tokens
    use t = M, which keeps every weight non-negative. F = 2K.
    Source: Qin et al. 2022 (cosFormer), eqs. 9–12, for sequences of at most M tokens.

    Args:
        length: M ≥ 1, the longest sequence with distinct positions.

    Examples:
        >>> features, x = rc.features.Cosine(length=8), torch.ones(1, 8, 1, 1, 1)
        >>> phi = features.phi(x, {}, "key", torch.arange(8)[None]).view(8, 2)  # [T, F]
        >>> (phi @ phi[0]).round(decimals=2)  # similarity to token 0
        tensor([1.0000, 0.9800, 0.9200, 0.8300, 0.7100, 0.5600, 0.3800, 0.2000])
    """

    shown = ("length",)

    length: int = integer(2048, at_least=1, size=True)

    def dim(self, K: int) -> int:
        return 2 * K

    def phi(self, x: Tensor, params: Mapping[str, Tensor], side: str, position: Tensor) -> Tensor:
        angle = position.clamp_max(self.length).double() * (math.pi / (2 * self.length))
        angle = angle[..., None, None, None]  # [B, T, 1, 1, 1]
        x = functional.relu(x)
        return torch.cat([x * angle.cos().to(x.dtype), x * angle.sin().to(x.dtype)], dim=-1)

    @property
    def text(self) -> str:
        return f"φ(q_t)·φ(k_i) = relu(q_t)·relu(k_i) cos(π(t − i)/{2 * self.length})"


_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "relu": functional.relu,
}


@member
class GatedUnits(Features):
    """φ(x) = σ(Gx) ⊙ Ux: hidden units of a gated MLP, whose output map is then the memory.

    G and U are learned per head, one pair for queries and keys, initially N(0, 1/K). F =
    expansion · K, O(FK) per token and head. Source: Feng et al. 2026 (In-place test-time training);
    Shazeer 2020, eq. 6, for the units.

    Args:
        expansion: number of units per channel of x.
        activation: σ.

    Examples:
        >>> features = rc.features.GatedUnits(expansion=3)
        >>> features.dim(8)
        24
        >>> G, U = torch.tensor([[[1.0, 0.0]]]), torch.tensor([[[0.0, 2.0]]])  # [H, F, K]
        >>> x = torch.tensor([3.0, 5.0]).view(1, 1, 1, 1, 2)
        >>> params = {"feature_gate": G, "feature_map": U}
        >>> rc.features.GatedUnits(activation="relu").phi(x, params, "key", torch.zeros(1, 1))
        tensor([[[[[30.]]]]])
    """

    expansion: int = integer(4, at_least=1, size=True)
    activation: str = option("silu", *_ACTIVATIONS)

    def dim(self, K: int) -> int:
        return self.expansion * K

    def flops(self, K: int) -> int:
        return 4 * self.dim(K) * K

    def params(self) -> tuple[Param, ...]:
        """G ``feature_gate [H, F, K]`` and U ``feature_map [H, F, K]``."""
        axes, me = ("F", "K"), self.title
        return (
            Param(name="feature_gate", owner=me, axes=axes, draw="fan_in"),
            Param(name="feature_map", owner=me, axes=axes, draw="fan_in"),
        )

    def phi(self, x: Tensor, params: Mapping[str, Tensor], side: str, position: Tensor) -> Tensor:
        gate = _ACTIVATIONS[self.activation](affine_map(x, params["feature_gate"]))
        return gate * affine_map(x, params["feature_map"])

    @property
    def text(self) -> str:
        return f"{self.activation}(Gx) ⊙ Ux, learned"


@member
class Hedgehog(Features):
    """Learned features that approximate the peaks of a softmax (Hedgehog).

    φ(x) = [exp(Wx + b), exp(−Wx − b)], with separate W ``[K, K]`` and b for queries and keys,
    initially the identity and 0. ``normalize`` divides by the sum of the features (a softmax over
    them), which bounds them. F = 2K, O(K²) per token and head.
    Source: Zhang et al. 2024 (the Hedgehog & the porcupine), section 4.2; the softmax is their
    guard against overflow.

    Args:
        normalize: whether the features of a token sum to one.

    Examples:
        >>> features = rc.features.Hedgehog()
        >>> features.dim(8)
        16
        >>> layer = rc.MemoryLayer(16, num_heads=2, recipe=rc.Recipe(features=features))
        >>> layer(torch.randn(1, 4, 16))[0].shape
        torch.Size([1, 4, 16])
    """

    normalize: bool = flag(True)

    def dim(self, K: int) -> int:
        return 2 * K

    def axes(self, K: int) -> dict[str, int]:
        return {"side": len(SIDES)}

    def flops(self, K: int) -> int:
        return 2 * K * K

    def params(self) -> tuple[Param, ...]:
        """``feature_map [H, side, K, K]`` and ``feature_shift [H, side, K]``, queries first."""
        me = self.title
        return (
            Param(name="feature_map", owner=me, axes=("side", "K", "K"), draw="eye"),
            Param(name="feature_shift", owner=me, axes=("side", "K")),
        )

    def phi(self, x: Tensor, params: Mapping[str, Tensor], side: str, position: Tensor) -> Tensor:
        weight = _sides(params, "feature_map", side, x)
        z = affine_map(x, weight, _sides(params, "feature_shift", side, x))
        z = torch.cat([z, -z], dim=-1)
        return z.softmax(-1) if self.normalize else z.exp()

    @property
    def text(self) -> str:
        return f"{'softmax' if self.normalize else 'exp'}[Wx + b, −Wx − b], learned"


@member
class LearnedRelu(Features):
    """φ(x) = relu(Wx + b), learned per head, one map for queries and keys (T2R).

    O(mK) per token and head. Source: Kasai et al. 2021, eq. 4. Initially W ~ N(0, 1/K), b = 0.

    Args:
        features: m; ``None`` is K. T2R uses 32 for heads of 64.

    Examples:
        >>> features = rc.features.LearnedRelu(features=32)
        >>> features.dim(64)
        32
        >>> [(param.name, param.axes) for param in features.params()]
        [('feature_map', ('F', 'K')), ('feature_shift', ('F',))]
    """

    features: int | None = integer(None, at_least=1, optional=True, size=True)

    def dim(self, K: int) -> int:
        return K if self.features is None else self.features

    def flops(self, K: int) -> int:
        return 2 * self.dim(K) * K

    def params(self) -> tuple[Param, ...]:
        """``feature_map [H, F, K]`` and ``feature_shift [H, F]``."""
        me = self.title
        return (
            Param(name="feature_map", owner=me, axes=("F", "K"), draw="fan_in"),
            Param(name="feature_shift", owner=me, axes=("F",)),
        )

    def phi(self, x: Tensor, params: Mapping[str, Tensor], side: str, position: Tensor) -> Tensor:
        return functional.relu(affine_map(x, params["feature_map"], params["feature_shift"]))

    text = "relu(Wx + b), learned"  # type: ignore[assignment]


@member
class Quadratic(Features):
    """Square of an inner product after a learned normalisation (ReBased).

    φ(q)·φ(k) = (q'·k')²/K with x' = γ ⊙ norm(x) + β, norm(x) = (x − mean)/√(variance + 1e-5), and
    separate γ and β for queries and keys, initially 1 and 0. Unlike those of `Taylor`, weights can
    be zero. F = K(K + 1)/2. Source: Aksenov et al. 2024 (ReBased), section 4.

    Examples:
        >>> features = rc.features.Quadratic()
        >>> features.dim(4)
        10
        >>> [param.name for param in features.params()]
        ['feature_scale', 'feature_shift']
    """

    def dim(self, K: int) -> int:
        return K * (K + 1) // 2

    def axes(self, K: int) -> dict[str, int]:
        return {"side": len(SIDES)}

    def params(self) -> tuple[Param, ...]:
        """γ ``feature_scale`` and β ``feature_shift``, ``[H, side, K]``, queries first."""
        axes, me = ("side", "K"), self.title
        return (
            Param(name="feature_scale", owner=me, axes=axes, init=1.0),
            Param(name="feature_shift", owner=me, axes=axes),
        )

    def phi(self, x: Tensor, params: Mapping[str, Tensor], side: str, position: Tensor) -> Tensor:
        scale, shift = (
            _sides(params, name, side, x).unsqueeze(-2)
            for name in ("feature_scale", "feature_shift")
        )
        K = x.shape[-1]
        x = functional.layer_norm(x, (K,), eps=1e-5)
        return quadratic(K**-0.25 * (scale * x + shift))

    text = "φ(q)·φ(k) = (q'·k')²/K, x' = γ norm(x) + β, learned"  # type: ignore[assignment]


@member
class Dpfp(Features):
    """Products of shifted halves, without parameters (DPFP, Schlag 2021).

    With r = relu([x, −x]) of length 2K, φ(x) = [r_i r_{i+j}] for i ≤ 2K and j = 1..ν, indices
    modulo 2K; F = 2Kν. At most K entries of r are nonzero, so few pairs of keys share a feature.
    Source: Schlag et al. 2021, section 5 (DPFP-ν), and section 4.2 for ``normalize``.

    Args:
        nu: ν ≥ 1; shifts from 2K on repeat.
        normalize: whether the features of a token sum to one, unless all are 0.

    Examples:
        >>> features = rc.features.Dpfp(nu=2)
        >>> features.dim(4)
        16
        >>> x = torch.tensor([1.0, -2.0]).view(1, 1, 1, 1, 2)  # r = [1, 0, 0, 2]
        >>> rc.features.Dpfp(nu=1).phi(x, {}, "key", torch.zeros(1, 1)).flatten()
        tensor([0., 0., 0., 2.])
    """

    nu: int = integer(1, at_least=1, size=True)
    normalize: bool = flag(False)

    def dim(self, K: int) -> int:
        return 2 * K * self.nu

    def phi(self, x: Tensor, params: Mapping[str, Tensor], side: str, position: Tensor) -> Tensor:
        r = functional.relu(torch.cat([x, -x], dim=-1))
        lifted = torch.cat([r * r.roll(-j, dims=-1) for j in range(1, self.nu + 1)], dim=-1)
        if not self.normalize:
            return lifted
        total = lifted.sum(-1, keepdim=True)
        return safe_divide(lifted, total)

    @property
    def text(self) -> str:
        total = " / Σ" if self.normalize else ""
        return f"r_i r_(i+j){total} of r = relu[x, −x], j ≤ {self.nu}"
