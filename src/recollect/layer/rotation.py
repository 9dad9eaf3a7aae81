"""Rotations of pairs of channels: rotary positions, and the angles of complex decays.

Rotary positions are computed from the tokens' places: no table to size, save or lose.

A memory whose decay is α_t e^{iθ_t} per complex channel turns while it decays. Seen from a frame
that turns with it, with Θ_t = θ_1 + … + θ_t, it only decays: R(Θ) orthogonal and blockwise 2×2,

    A_t = α_t A_{t−1} R(θ_t)ᵀ + u_t k_tᵀ,  y_t = A_t q_t
    ⇔  Ã_t = α_t Ã_{t−1} + u_t (R(−Θ_t) k_t)ᵀ,  y_t = Ã_t R(−Θ_t) q_t,   Ã_t = A_t R(Θ_t)

where channels (i, i + D/2) are real and imaginary part and share their α. So a complex decay is a
real decay in the recipe, and an angle here: every engine runs it, none knows. The state is the one
in the turning frame, with Θ_t beside it, in float64: after 100,000 tokens it is within 1e-6.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from recollect.choices.devices import constant
from recollect.choices.features.finite import Identity
from recollect.choices.fields import Gate, Param
from recollect.choices.member import RecipeError
from recollect.layer.options import LayerOptions
from recollect.recipe.recipe import Recipe

__all__ = [
    "Phase",
    "angles",
    "check_phase",
    "phase_misfit",
    "positions",
    "rotate",
    "shares_angle",
    "turn",
]

BASE = 10000.0


def check_phase(options: LayerOptions, size: int) -> None:
    """Check that angles fit the number of channels.

    Raises:
        RecipeError: the number is odd.
    """
    if size % 2:
        raise RecipeError(
            f"LayerOptions(phase={options.phase!r}) turns pairs of channels and needs an even "
            f"size, not {size}"
        )


def phase_misfit(recipe: Recipe, options: LayerOptions) -> str | None:
    """The reason why angles do not fit a recipe, with a recipe that they fit."""
    me = f"LayerOptions(phase={options.phase!r})"
    if not recipe.memory.linear or recipe.features != Identity():
        return (
            f"{me} turns the keys of a linear memory, which {recipe.memory.title} with "
            f"{recipe.features.title} is not: use memory.Matrix or Vector, and features.Identity()"
        )
    if recipe.bias.probe is not None or (
        recipe.retention.decay is not None and recipe.retention.decay.per == "entry"
    ):
        return f"{me} needs a decay that pairs of channels share, and no probe"
    if recipe.memory.diagonal and options.qk != "ones":
        return f"{me} with memory.Vector needs queries and keys of ones: set qk='ones'"
    if recipe.memory.diagonal and recipe.bias.affine != (0.0, 1.0):
        return f"{me} with memory.Vector needs bias.DotProduct()"
    return None


class Phase(nn.Module):
    """Θ_t, the cumulated angle of every pair of channels: θ_t = bias + W x_t, or bias alone.

    Biases start as RoPE's angles, 10000^(−2i/D): from one turn in six tokens to none in thousands.

    Args:
        source: ``"input"`` or ``"learned"``.
        d_model: width of the tokens. heads: H. size: D, even.
    """

    def __init__(self, source: str, *, d_model: int, heads: int, size: int) -> None:
        super().__init__()
        self.heads, self.size = heads, size
        self.bias = nn.Parameter(torch.empty(heads, size // 2))
        wide = (heads * size // 2, d_model)
        self.weight = nn.Parameter(torch.empty(wide)) if source == "input" else None
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Back to the start."""
        exponent = torch.arange(0, self.size, 2, dtype=torch.float64) / self.size
        self.bias.copy_((BASE**-exponent).expand_as(self.bias))
        if self.weight is not None:
            # Small against the biases: an angle of 0.05 or so.
            nn.init.normal_(self.weight, std=0.05 * self.weight.shape[1] ** -0.5)

    def forward(
        self,
        x: Tensor,
        start: Tensor | None,
        *,
        lengths: Tensor | None = None,
        borders: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Θ ``[B, T, H, D/2]`` in float64, and Θ after the last token ``[B, H, D/2]``.

        Args:
            x: tokens ``[B, T, d_model]``; with ``lengths [B]``, padded on the right; with ``borders
                [N + 1]``, N documents in one row, each with a start and an end of its own.
            start: Θ before the first token; zeros when omitted.
        """
        B, T = x.shape[:2]
        angle = self.bias.double()
        if self.weight is not None:
            angle = angle + functional.linear(x, self.weight).double().unflatten(-1, angle.shape)
        path = angle.expand(B, T, *angle.shape[-2:]).cumsum(1)
        path = functional.pad(path, (0, 0, 0, 0, 1, 0))  # 0 before the first
        if borders is not None:
            ends = borders.to(device=x.device, dtype=torch.long)
            offset = -path[0, ends[:-1]]
            offset = offset if start is None else offset + start.double()
            document = torch.bucketize(torch.arange(T, device=x.device), ends[1:], right=True)
            after = path[0, ends[1:]] + offset
            return path[:, 1:] + offset[document], after.remainder(2 * math.pi)
        if start is not None:
            path = path + start.double()[:, None]
        if lengths is None:
            after = path[:, -1]
        else:
            index = lengths.view(-1, 1, 1, 1).expand(-1, 1, *path.shape[2:])
            after = path.gather(1, index).squeeze(1)
        return path[:, 1:], after.remainder(2 * math.pi)

    def extra_repr(self) -> str:
        """Heads and channels."""
        return f"heads={self.heads}, channels={self.size}, data-dependent={self.weight is not None}"


def turn(x: Tensor, phase: Tensor, *, back: bool = False) -> Tensor:
    """R(−Θ) x for pairs (i, i + D/2), or R(Θ) x on the way ``back``.

    x is ``[B, T, H', ..., D]``, Θ ``[B, T, H, D/2]``; H' may be a multiple of H: query heads.
    """
    phase = phase.repeat_interleave(x.shape[2] // phase.shape[2], dim=2)
    phase = phase.view(*phase.shape[:3], *(1,) * (x.dim() - 4), phase.shape[-1])
    cos, sin = phase.cos().to(x.dtype), phase.sin().to(x.dtype)
    sin = sin if back else -sin
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


def shares_angle(declared: Gate | Param, recipe: Recipe, options: LayerOptions) -> bool:
    """Whether real and imaginary channels share this number, so that angles commute with it."""
    if options.phase == "none":
        return False
    if recipe.memory.diagonal:
        return declared.axes in (("F",), ("V",))
    return declared.axes == ("F",) and declared.name in ("log_decay", "decay", "decay_scale")


def positions(x: Tensor, start: Tensor | None, borders: Tensor | None) -> Tensor:
    """Index of each token in its document ``[B, T]`` (of padded tokens: anything).

    Args:
        x: tokens ``[B, T, ...]``. start: tokens seen before ``[B]``. borders: of packed documents.
    """
    if x.shape[1] == 1 and start is not None and borders is None:
        return start[:, None]
    steps = torch.arange(x.shape[1], device=x.device)
    if borders is None:
        return steps.expand(x.shape[:2]) if start is None else start[:, None] + steps
    borders = borders.to(device=x.device, dtype=torch.long)
    document = torch.bucketize(steps, borders[1:], right=True)
    starts = borders[:-1] if start is None else borders[:-1] - start
    return (steps - starts[document])[None]


def angles(position: Tensor, size: int, base: float) -> tuple[Tensor, Tensor]:
    """cos and sin ``[B, T, size/2]`` of position · base^(−2i/size) (RoFormer, eq. 15).

    Args:
        position: ``[B, T]``, from 0.
        size: channels per head, even.
        base: 10000 in the paper.
    """
    # In float64 the phase of token 100,000 is still exact.
    phase = position.unsqueeze(-1) * constant(_frequencies, size, base, device=position.device)
    return phase.cos(), phase.sin()


def _frequencies(size: int, base: float) -> Tensor:
    """base^(−2i/size) ``[size/2]``."""
    return base ** -(torch.arange(0, size, 2, dtype=torch.float64) / size)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair (i, i + D/2) of ``x [B, T, ..., D]`` by its token's angles."""
    shape = (*cos.shape[:2], *(1,) * (x.dim() - 3), cos.shape[-1])
    cos, sin = cos.view(shape).to(x.dtype), sin.view(shape).to(x.dtype)
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)
