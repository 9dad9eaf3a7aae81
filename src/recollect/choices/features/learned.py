"""Feature maps that are learned, that follow the position, or that multiply channels."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional

from recollect.choices.features.base import Features
from recollect.choices.features.monomials import quadratic
from recollect.choices.fields import Param, flag, integer
from recollect.choices.member import member

__all__ = ["Cosine", "Dpfp", "Hedgehog", "LearnedRelu", "Quadratic"]

SIDES = {"query": 0, "key": 1}


def _sides(params: Mapping[str, Tensor], name: str, side: str, like: Tensor) -> Tensor:
    """The query's or the key's part of a param ``[H, side, ...]``."""
    return params[name][:, SIDES[side]].to(like.dtype)


def _affine(x: Tensor, weight: Tensor, shift: Tensor) -> Tensor:
    """``weight [H, m, K]`` x + ``shift [H, m]``, for x ``[B, T, H, N, K]``."""
    flat = x.flatten(3, -2)  # [B, T, H, n, K], whatever stands between heads and channels
    y = torch.einsum("bthnk,hmk->bthnm", flat, weight.to(x.dtype))
    return (y + shift.to(x.dtype).unsqueeze(-2)).reshape(*x.shape[:-1], y.shape[-1])


@member
class Cosine(Features):
    """Rectified features whose match fades with distance (cosFormer).

    φ(x_t) = [relu(x) cos(πt/2M), relu(x) sin(πt/2M)], so φ(q_t)·φ(k_i) = relu(q)·relu(k)
    cos(π(t − i)/2M): never negative within M tokens. t is the token's index in its document, from
    0. From t = M on it stands still at M, which keeps every weight non-negative. F = 2K.
    Source: Qin et al. 2022 (cosFormer), eqs. 9–12; beyond M, the length of their sequences, they
    define nothing.

    Args:
        length: M ≥ 1, the longest sequence in which positions count.

    Examples:
        >>> features, x = rc.features.Cosine(length=8), torch.ones(1, 8, 1, 1, 1)
        >>> phi = features.phi(x, {}, "key", torch.arange(8)[None]).view(8, 2)  # [T, F]
        >>> (phi @ phi[0]).round(decimals=2)  # the match of token 0 fades with the distance
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


@member
class Hedgehog(Features):
    """Learned features that imitate softmax's spikes (Hedgehog).

    φ(x) = [exp(Wx + b), exp(−Wx − b)], with W ``[K, K]`` and b of the query's and of the key's own;
    ``normalize`` divides by the sum of the features (a softmax over them), which keeps them
    bounded. W starts at the identity and b at 0. F = 2K, O(K²) per token and head.
    Source: Zhang et al. 2024 (the Hedgehog & the porcupine), section 4.2; the softmax is their
    guard against overflow.

    Args:
        normalize: the features of a token sum to one.

    Examples:
        >>> features = rc.features.Hedgehog()
        >>> features.dim(8)
        16
        >>> layer = rc.MemoryLayer(16, heads=2, recipe=rc.Recipe(features=features))
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
        z = _affine(x, weight, _sides(params, "feature_shift", side, x))
        z = torch.cat([z, -z], dim=-1)
        return z.softmax(-1) if self.normalize else z.exp()

    @property
    def text(self) -> str:
        return f"{'softmax' if self.normalize else 'exp'}[Wx + b, −Wx − b], learned"


@member
class LearnedRelu(Features):
    """φ(x) = relu(Wx + b), learned per head, one map for queries and keys (T2R).

    O(mK) per token and head. Source: Kasai et al. 2021, eq. 4. W starts N(0, 1/K), b at 0.

    Args:
        features: m; ``None`` is K. (T2R finds 32 to be enough for heads of 64.)

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
        return functional.relu(_affine(x, params["feature_map"], params["feature_shift"]))

    @property
    def text(self) -> str:
        return "relu(Wx + b), learned"


@member
class Quadratic(Features):
    """The square of an inner product after a learned normalisation (ReBased).

    φ(q)·φ(k) = (q'·k')²/K with x' = γ ⊙ norm(x) + β, γ and β of the query's and of the key's own,
    norm(x) = (x − mean)/√(variance + 1e-5). A product of zero is a weight of zero, which the Taylor
    map cannot give. F = K(K + 1)/2.
    Source: Aksenov et al. 2024 (ReBased), section 4. γ starts at 1, β at 0.

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

    @property
    def text(self) -> str:
        return "φ(q)·φ(k) = (q'·k')²/K, x' = γ norm(x) + β, learned"


@member
class Dpfp(Features):
    """Products of shifted halves, without parameters (DPFP, Schlag 2021).

    With r = relu([x, −x]) of length 2K, φ(x) = [r_i r_{i+j}] for i ≤ 2K and j = 1..ν, indices
    modulo 2K; F = 2Kν. At most K entries of r are nonzero, so few pairs of keys share a feature.
    Source: Schlag et al. 2021, section 5 (DPFP-ν), and section 4.2 for ``normalize``.

    Args:
        nu: ν ≥ 1; shifts from 2K on repeat.
        normalize: the features of a token sum to one, or are all 0.

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
        # Entry i + j stands at i: a shift to the left by j.
        lifted = torch.cat([r * r.roll(-j, dims=-1) for j in range(1, self.nu + 1)], dim=-1)
        if not self.normalize:
            return lifted
        total = lifted.sum(-1, keepdim=True)
        return torch.where(total > 0, lifted / torch.where(total > 0, total, 1.0), 0.0)

    @property
    def text(self) -> str:
        total = " / Σ" if self.normalize else ""
        return f"r_i r_(i+j){total} of r = relu[x, −x], j ≤ {self.nu}"
