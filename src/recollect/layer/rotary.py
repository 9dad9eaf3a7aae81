"""Rotations of pairs of channels: rotary positions, and the angles of complex decays.

Rotary positions are computed from the positions of tokens, without a table.

A memory with the decay α_t e^{iθ_t} per complex channel rotates while it decays. In a rotating
frame, with Θ_t = θ_1 + … + θ_t and R(Θ) orthogonal and blockwise 2×2, it only decays:

    A_t = α_t A_{t−1} R(θ_t)ᵀ + u_t k_tᵀ,  y_t = A_t q_t
    ⇔  Ã_t = α_t Ã_{t−1} + u_t (R(−Θ_t) k_t)ᵀ,  y_t = Ã_t R(−Θ_t) q_t,   Ã_t = A_t R(Θ_t)

Channels (i, i + D/2) are real and imaginary part and share α. So a complex decay is a real decay in
the recipe and an angle in the layer, and every engine runs it. The state is Ã_t, with Θ_t in
float64: after 100,000 tokens the angle is within 1e-6.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from recollect.choices.features.finite import Identity
from recollect.choices.runtime import cached_constant
from recollect.fields import Gate, Param
from recollect.functional.packing import last_tokens
from recollect.layer.options import LayerOptions
from recollect.messages import RecipeError
from recollect.recipe.recipe import Recipe

__all__ = [
    "ComplexDecayPhase",
    "num_rotated",
    "pairs_share",
    "phase_misfit",
    "positions",
    "rope_cos_sin",
    "rotate_by_phase",
    "rotate_pairs",
    "transposed_misfit",
]

BASE = 10000.0


def phase_misfit(recipe: Recipe, options: LayerOptions) -> str | None:
    """Return the reason why a complex decay does not fit a recipe, or ``None``."""
    option = f"LayerOptions(complex_decay={options.complex_decay!r})"
    if recipe.memory.read.transposed:
        return transposed_misfit(recipe, option)
    if not recipe.memory.linear or recipe.features != Identity():
        return (
            f"{option} rotates the keys of a linear memory, which {recipe.memory.title} with "
            f"{recipe.features.title} is not: use memory.Matrix or Vector, and features.Identity()"
        )
    if recipe.bias.probe is not None or (
        recipe.retention.decay is not None and recipe.retention.decay.per == "entry"
    ):
        return f"{option} needs a decay that pairs of channels share, and no probe"
    if recipe.memory.is_elementwise and options.qk != "ones":
        return f"{option} with memory.Vector needs queries and keys of ones: set qk='ones'"
    if recipe.memory.is_elementwise and recipe.bias.affine != (0.0, 1.0):
        return f"{option} with memory.Vector needs bias.DotProduct()"
    decay = recipe.retention.decay
    per_channel = decay is not None and decay.per in ("key", "key_value")
    if options.partial_rotary_factor < 1 and (recipe.memory.is_elementwise or per_channel):
        return (
            f"{option} with partial_rotary_factor={options.partial_rotary_factor:g} rotates some "
            "channels of keys, so it needs memory.Matrix and a decay per head"
        )
    return None


def transposed_misfit(recipe: Recipe, option: str) -> str:
    """Return the reason why a rotation does not fit a transposed read."""
    return (
        f"{option} rotates queries and keys, and {recipe.memory.brief} compares queries with "
        "values: leave the option out, or take a memory without a transposed read"
    )


class ComplexDecayPhase(nn.Module):
    """Θ_t, the cumulative angle of every pair of channels: θ_t = bias + W x_t, or bias alone.

    ``source`` is ``"input"`` or ``"learned"``. Biases start at RoPE's angles, 10000^(−2i/D).
    """

    def __init__(self, source: str, *, d_model: int, heads: int, size: int) -> None:
        super().__init__()
        if size % 2:
            raise RecipeError(
                f"LayerOptions(complex_decay={source!r}) rotates pairs of channels and needs an "
                f"even size, not {size}"
            )
        self.heads, self.size = heads, size
        self.bias = nn.Parameter(torch.empty(heads, size // 2))
        shape = (heads * size // 2, d_model)
        self.weight = nn.Parameter(torch.empty(shape)) if source == "input" else None
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Reset the biases, and sample new weights."""
        exponent = torch.arange(0, self.size, 2, dtype=torch.float64) / self.size
        self.bias.copy_((BASE**-exponent).expand_as(self.bias))
        if self.weight is not None:
            # An angle of about 0.05, small against the biases.
            nn.init.normal_(self.weight, std=0.05 * self.weight.shape[1] ** -0.5)

    def forward(
        self,
        x: Tensor,  # tokens [B, T, d_model]; lengths and cu_seqlens as in `ShortConvolution`
        start: Tensor | None,  # Θ before the first token; by default 0
        *,
        lengths: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        factor: Tensor | None = None,  # factor of every θ_t [B, T, H]; by default 1
    ) -> tuple[Tensor, Tensor]:
        """Return Θ ``[B, T, H, D/2]`` in float64, and Θ after the last token ``[B, H, D/2]``."""
        B, T = x.shape[:2]
        angle = self.bias.double()
        if self.weight is not None:
            angle = angle + functional.linear(x, self.weight).double().unflatten(-1, angle.shape)
        if factor is not None:
            angle = angle * factor.double().unsqueeze(-1)
        path = angle.expand(B, T, *angle.shape[-2:]).cumsum(1)
        path = functional.pad(path, (0, 0, 0, 0, 1, 0))  # 0 before the first token
        if cu_seqlens is not None:
            ends = cu_seqlens.to(device=x.device, dtype=torch.long)
            offset = -path[0, ends[:-1]]
            offset = offset if start is None else offset + start.double()
            document = torch.bucketize(torch.arange(T, device=x.device), ends[1:], right=True)
            final = path[0, ends[1:]] + offset
            return path[:, 1:] + offset[document], final.remainder(2 * math.pi)
        if start is not None:
            path = path + start.double()[:, None]
        final = last_tokens(path, 1, lengths).squeeze(1)
        return path[:, 1:], final.remainder(2 * math.pi)

    def extra_repr(self) -> str:
        return f"heads={self.heads}, channels={self.size}, data-dependent={self.weight is not None}"


def pairs_share(declared: Gate | Param, recipe: Recipe, options: LayerOptions) -> bool:
    """Whether real and imaginary channels share this gate, so that rotations commute with it."""
    if options.complex_decay == "none":
        return False
    if recipe.memory.is_elementwise:
        return declared.axes in (("F",), ("V",))
    return declared.axes == ("F",) and declared.role == "decay"


def positions(x: Tensor, start: Tensor | None, cu_seqlens: Tensor | None) -> Tensor:
    """Return the index of each token in its document ``[B, T]``; arbitrary at padding.

    ``start [B]`` is the number of earlier tokens.
    """
    if x.shape[1] == 1 and start is not None and cu_seqlens is None:
        return start[:, None]
    steps = torch.arange(x.shape[1], device=x.device)
    if cu_seqlens is None:
        return steps.expand(x.shape[:2]) if start is None else start[:, None] + steps
    ends = cu_seqlens.to(device=x.device, dtype=torch.long)
    document = torch.bucketize(steps, ends[1:], right=True)
    origins = ends[:-1] if start is None else ends[:-1] - start
    return (steps - origins[document])[None]


def rope_cos_sin(position: Tensor, size: int, base: float) -> tuple[Tensor, Tensor]:
    """Return cos and sin ``[B, T, size/2]`` of position · base^(−2i/size) (RoFormer, eq. 15)."""
    # In float64 the phase of token 100,000 is exact.
    phase = position.unsqueeze(-1) * cached_constant(
        _frequencies, size, base, device=position.device
    )
    return phase.cos(), phase.sin()


def _frequencies(size: int, base: float) -> Tensor:
    """base^(−2i/size) ``[size/2]``."""
    return base ** -(torch.arange(0, size, 2, dtype=torch.float64) / size)


def rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each pair (i, i + r/2) of the first r channels of ``x [B, T, ..., D]`` by an angle.

    ``cos`` and ``sin`` are ``[B, T, ..., r/2]``; missing axes are inserted before the last one.
    """
    size = cos.shape[-1]
    shape = (*cos.shape[:-1], *(1,) * (x.dim() - cos.dim()), size)
    cos, sin = cos.view(shape).to(x.dtype), sin.view(shape).to(x.dtype)
    a, b, *rest = x.split([size, size, *([x.shape[-1] - 2 * size] * (x.shape[-1] > 2 * size))], -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin, *rest], dim=-1)


def num_rotated(K: int, factor: float) -> int:
    """Return the number of channels that are rotated, which is even."""
    return K if factor == 1 else max(2, int(K * factor) // 2 * 2)


def rotate_by_phase(x: Tensor, phase: Tensor, *, inverse: bool = False) -> Tensor:
    """Return R(−Θ) x, or R(Θ) x if ``inverse``.

    x is ``[B, T, H', ..., D]``, Θ ``[B, T, H, D/2]``; H' may be a multiple of H (query heads).
    """
    phase = phase.repeat_interleave(x.shape[2] // phase.shape[2], dim=2)
    sin = phase.sin()
    return rotate_pairs(x, phase.cos(), sin if inverse else -sin)
