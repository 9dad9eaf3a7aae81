"""Initial memories of a layer, learned by the outer loop."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from recollect.choices.memory.base import Stack
from recollect.recipe.recipe import Recipe

__all__ = ["InitialMemory", "InitialPairs", "read_widths"]


class InitialMemory(nn.Module):
    """A₀ of a deep memory, learned: one ``[H, *shape]`` tensor per map.

    Entries of deviation scale · in^(−1/2), at scale 1, keep the lengths of what they multiply: a
    key of unit length meets hidden activations of unit length, so an inner step of size below 1
    does not overshoot. Features are about as long as the key that they lift, however many they are:
    for a map that reads them ``in`` is K.

    Args:
        heads: H, memories.
        shapes: of the maps, without the head, in order of application.
        scale: of the entries, > 0.
        inputs: of each map, ``in``; what its shape says when omitted.
        last_map: a factor more of the last map's entries, ≥ 0. At 0 the memory says nothing before
            something is written, and one write is not lost among what was drawn.
    """

    def __init__(
        self,
        heads: int,
        shapes: tuple[tuple[int, ...], ...],
        scale: float = 1.0,
        inputs: tuple[int, ...] | None = None,
        last_map: float = 1.0,
    ) -> None:
        super().__init__()
        self.scale, self.last_map = scale, last_map
        self.inputs = inputs or tuple(math.prod(shape[1:]) for shape in shapes)
        self.maps = nn.ParameterList([torch.empty(heads, *shape) for shape in shapes])
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Back to the start."""
        for weight, inputs in zip(self.maps, self.inputs, strict=True):
            if weight.dim() < 3:
                nn.init.zeros_(weight)  # a bias of a user's own module
            else:
                nn.init.normal_(weight, std=self.scale * inputs**-0.5)
        if self.last_map != 1.0:
            self.maps[-1].mul_(self.last_map)

    def forward(self) -> tuple[Tensor, ...]:
        """The tensors, as `recall` takes them."""
        return tuple(self.maps)


def read_widths(recipe: Recipe, K: int, V: int) -> tuple[int, ...]:
    """Of each map of a finite memory: how many channels it reads, features counted as their key.

    Args:
        recipe: whose memory it is.
        K: key channels.
        V: value channels.
    """
    shapes, memory = recipe.shapes(K, V), recipe.memory
    inputs = [math.prod(shape[1:]) for shape in shapes]
    if isinstance(memory, Stack) and recipe.features.finite:
        maps = memory.maps(recipe.axes(K, V)["F"], V)
        inputs = [K + one.bias if one.first else one.inp for one in maps]
    return tuple(inputs)


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
