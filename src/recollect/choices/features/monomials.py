"""Monomials of keys, weighted so that products of features are powers of inner products."""

from __future__ import annotations

import math
from functools import lru_cache
from itertools import combinations_with_replacement
from typing import Any, cast

import torch
from torch import Tensor

from recollect.choices.autograd import CustomFunction
from recollect.choices.runtime import cached_constant


def _weights(K: int, degree: int) -> Tensor:
    """Return √multinomial of every monomial of a degree in K variables, in lexicographic order.

    (q·k)^p = Σ_j multinomial_j · monomial_j(q) · monomial_j(k).
    """
    weights: list[float] = []
    for index in combinations_with_replacement(range(K), degree):
        multinomial = math.factorial(degree)
        for variable in set(index):
            multinomial //= math.factorial(index.count(variable))
        weights.append(math.sqrt(multinomial))
    return torch.tensor(weights, dtype=torch.float64)


class _NextDegree(CustomFunction):
    """x_i times the end of ``lower`` from its first monomial in x_i on, for every i.

    Slices and their gradients are written in place: autograd would allocate a full-size zero tensor
    per slice.
    """

    @staticmethod
    def forward(x: Tensor, lower: Tensor, degree: int) -> Tensor:
        sizes = _suffix_counts(x.shape[-1], degree)
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
        sizes = _suffix_counts(x.shape[-1], ctx.degree)
        grad_x, grad_lower = [], torch.zeros_like(lower)
        for i, (n, part) in enumerate(zip(sizes, dy.split(sizes, dim=-1), strict=True)):
            grad_x.append((part * lower[..., -n:]).sum(-1))
            grad_lower[..., -n:].addcmul_(part, x[..., i : i + 1])
        return torch.stack(grad_x, dim=-1), grad_lower, None


@lru_cache(maxsize=64)
def _suffix_counts(K: int, degree: int) -> list[int]:
    """Return for every i the number of monomials of degree − 1 in the variables from i on."""
    return [math.comb(K - i + degree - 2, degree - 1) for i in range(K)]


def _next_degree(x: Tensor, lower: Tensor, degree: int) -> Tensor:
    """Return all monomials of a degree in lexicographic order from those of degree − 1."""
    return cast(Tensor, _NextDegree.apply(x, lower, degree))


def quadratic(x: Tensor) -> Tensor:
    """Return the products of two channels, weighted so that φ(q)·φ(k) = (q·k)²."""
    return _next_degree(x, x, 2) * cached_constant(
        _weights, x.shape[-1], 2, device=x.device, dtype=x.dtype
    )


def monomials(x: Tensor, coefficients: list[Tensor]) -> Tensor:
    """Return features with φ(q)·φ(k) = Σ_i a_i (q·k)^i; a_i is broadcastable to ``x[..., :1]``."""
    K = x.shape[-1]
    block = torch.ones_like(x[..., :1])
    blocks: list[Tensor] = []
    for degree, coefficient in enumerate(coefficients):
        if degree > 0:
            block = x if degree == 1 else _next_degree(x, block, degree)
        weight = coefficient.sqrt()
        if degree > 1:
            weight = weight * cached_constant(_weights, K, degree, device=x.device, dtype=x.dtype)
        blocks.append(weight * block)
    return torch.cat(blocks, dim=-1)
