"""Initial memories of a layer, learned by the outer loop."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from recollect.recipe.recipe import Recipe

__all__ = ["InitialMemory", "InitialPairs"]


class InitialMemory(nn.Module):
    """A₀ of a deep memory, learned: one ``[H, *shape]`` tensor per map.

    Entries of deviation scale · in^(−1/2), at scale 1, keep the lengths of what they multiply: a
    key of unit length meets hidden activations of unit length, so an inner step of size below 1
    does not overshoot.

    Args:
        heads: H, memories.
        shapes: of the maps, without the head, in order of application.
        scale: of the entries, > 0.
    """

    def __init__(self, heads: int, shapes: tuple[tuple[int, ...], ...], scale: float = 1.0) -> None:
        super().__init__()
        self.scale = scale
        self.maps = nn.ParameterList([torch.empty(heads, *shape) for shape in shapes])
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Back to the start."""
        for weight in self.maps:
            if weight.dim() < 3:
                nn.init.zeros_(weight)  # a bias of a user's own module
            else:
                nn.init.normal_(weight, std=self.scale * math.prod(weight.shape[2:]) ** -0.5)

    def forward(self) -> tuple[Tensor, ...]:
        """The tensors, as `recall` takes them."""
        return tuple(self.maps)


class InitialPairs(nn.Module):
    """A₀ of a deep memory over a kernel: m anchors z_j with rows u_j, and dense maps (ATLAS 25).

    A map that reads features starts as W = Σ_j u_j φ(z_j)ᵀ. Rows have deviation (m out)^(−1/2), or
    out^(−1/2) where what is read is a mean of rows, so that hidden activations have about unit
    length; anchors have the length that queries and keys have.

    Args:
        heads: H, memories.
        recipe: whose memory it is.
        K: key channels.
        V: value channels.
        pairs: m, anchors.
        length: ‖q‖ and ‖k‖, which anchors have too.
    """

    def __init__(
        self, heads: int, recipe: Recipe, *, K: int, V: int, pairs: int, length: float
    ) -> None:
        super().__init__()
        self.rows, self.length = len(recipe.row_widths(V)), length
        self.mean = recipe.memory.read.normalize == "sum"
        shapes = recipe.init_shapes(K, V, pairs=pairs)
        self.maps = nn.ParameterList([torch.empty(heads, *shape) for shape in shapes])
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Back to the start."""
        for index, x in enumerate(self.maps):
            size = x.shape[-1] ** -0.5
            if index == 0:
                size *= self.length
            elif index <= self.rows and not self.mean:
                size *= x.shape[-2] ** -0.5
            nn.init.normal_(x, std=size)

    def forward(self) -> tuple[Tensor, ...]:
        """The tensors, as `recall` takes them."""
        return tuple(self.maps)
