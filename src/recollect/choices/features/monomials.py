"""Monomials of keys, weighted so that products of features are powers of products."""

from __future__ import annotations

import math
from functools import lru_cache
from itertools import combinations_with_replacement
from typing import Any, cast

import torch
from torch import Tensor

from recollect.choices.devices import constant
from recollect.choices.gradients import HandWritten


def _weights(K: int, degree: int) -> Tensor:
    """√multinomial of every monomial of that degree in K variables, in lexicographic order.

    (q·k)^p = Σ_j multinomial_j · monomial_j(q) · monomial_j(k).
    """
    weights: list[float] = []
    for index in combinations_with_replacement(range(K), degree):
        ways = math.factorial(degree)
        for variable in set(index):
            ways //= math.factorial(index.count(variable))
        weights.append(math.sqrt(ways))
    return torch.tensor(weights, dtype=torch.float64)


class _Times(HandWritten):
    """x_i times the end of ``lower`` from its first monomial in x_i on, for every i.

    Slices are written in place, and so are their gradients: autograd would make a full-size zero
    tensor per slice, gathering entry by entry takes several times as long.
    """

    @staticmethod
    def forward(x: Tensor, lower: Tensor, degree: int) -> Tensor:
        sizes = _starts(x.shape[-1], degree)
        out = x.new_empty(*x.shape[:-1], sum(sizes))
        for i, (n, part) in enumerate(zip(sizes, out.split(sizes, dim=-1), strict=True)):
            torch.mul(x[..., i : i + 1], lower[..., -n:], out=part)
        return out

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, int], output: Tensor) -> None:
        x, lower, ctx.degree = inputs
        ctx.save_for_backward(x, lower)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        (x, lower), (dy,) = ctx.saved_tensors, gradients
        sizes = _starts(x.shape[-1], ctx.degree)
        slopes, below = [], torch.zeros_like(lower)
        for i, (n, part) in enumerate(zip(sizes, dy.split(sizes, dim=-1), strict=True)):
            slopes.append((part * lower[..., -n:]).sum(-1))
            below[..., -n:].addcmul_(part, x[..., i : i + 1])
        return torch.stack(slopes, dim=-1), below, None


@lru_cache(maxsize=64)
def _starts(K: int, degree: int) -> list[int]:
    """How many monomials of one degree less start at variable i or later, for every i."""
    return [math.comb(K - i + degree - 2, degree - 1) for i in range(K)]


def _times(x: Tensor, lower: Tensor, degree: int) -> Tensor:
    """All monomials of a degree in lexicographic order, from those of one degree less."""
    return cast(Tensor, _Times.apply(x, lower, degree))


def quadratic(x: Tensor) -> Tensor:
    """Products of two channels, weighted so that φ(q)·φ(k) = (q·k)²; K(K + 1)/2 features."""
    return _times(x, x, 2) * constant(_weights, x.shape[-1], 2, device=x.device, dtype=x.dtype)


def monomials(x: Tensor, coefficients: list[Tensor]) -> Tensor:
    """Features with φ(q)·φ(k) = Σ_i a_i (q·k)^i; each a_i is broadcastable to ``x[..., :1]``."""
    K = x.shape[-1]
    block = torch.ones_like(x[..., :1])
    blocks: list[Tensor] = []
    for degree, coefficient in enumerate(coefficients):
        if degree > 0:
            block = x if degree == 1 else _times(x, block, degree)
        weight = coefficient.sqrt()
        if degree > 1:
            weight = weight * constant(_weights, K, degree, device=x.device, dtype=x.dtype)
        blocks.append(weight * block)
    return torch.cat(blocks, dim=-1)
