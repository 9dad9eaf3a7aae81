"""Shares of a normalised step in the recurrence over borders, and their gradient.

Every association's gradients are scaled by ρ (`recollect.choices.algorithm.normalized_steps`).
ρ is one number
for all maps, so it is put into the coefficients, c′ = ρ c and C′ = ρ C, and h and δ stay as they
are:

    N = ⟨e, g⟩,    Q = Σ_l |h_(l−1)|²|δ_l|² + ε|g|²,    ρ = N/Q            (0 where Q is)

Backwards, what is written and read depends on ρ δ_l h_(l−1)ᵀ alone, so with the gradients h̄, δ̄
of that

    π = ρ ρ̄ = Σ_l ⟨h̄_(l−1), h_(l−1)⟩ = Σ_l ⟨δ̄_l, δ_l⟩,    N̄ = π/N,    Q̄ = −π/Q
    h̄_(l−1) += 2Q̄|δ_l|² h_(l−1),    δ̄_l += 2Q̄|h_(l−1)|² δ_l,    ḡ += 2εQ̄ g

N̄ is for `ending`. Where the error is affine, a·prediction − b·value, δ_L = g and e = g/a.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from recollect.choices.algorithm.normalized_steps import EPS, polyak_scale
from recollect.choices.runtime import cached_constant
from recollect.engines.deep.chain.ends.ending import End

__all__ = ["ShareSlopes", "Shares", "share_now", "share_of"]

Tensors = Sequence[Tensor]


def share_of(h: Tensors, delta: Tensors, end: End) -> Tensor:
    """ρ ``[P, R]`` by operations that autograd follows.

    Args:
        h: inputs of every map ``[P, R, ·]``. delta: gradients of their outputs.
        end: what follows the last.
    """
    gain: Tensor | None = None
    for x, y in zip(h, delta, strict=True):
        own = x.square().sum(-1) * y.square().sum(-1)
        gain = own if gain is None else gain + own
    assert gain is not None  # a chain has a map
    return polyak_scale(end.above(), end.error, gain)


def share_now(h: Tensors, delta: Tensors, end: End) -> Tensor:
    """ρ ``[P, R]`` without a graph, in few operations.

    Args:
        h: inputs of every map ``[P, R, ·]``. delta: gradients of their outputs.
        end: what follows the last.
    """
    sizes = [torch.linalg.vector_norm(x, dim=-1) for x in (*h, *delta, end.error)]
    below = (sizes[-1] * sizes[-1]).mul_(EPS)
    for x, y in zip(sizes, sizes[len(h) : -1], strict=False):
        each = x * y
        below.addcmul_(each, each)
    return end.above() / below.clamp_min_(torch.finfo(below.dtype).tiny)


def _some(tiny: float) -> Tensor:
    """What keeps a division by 0 from being 0/0."""
    return torch.tensor(tiny, dtype=torch.float64)


def _least(rows: int, ahead: int, last: int, tiny: float) -> Tensor:
    """What is added to the squares of a batch's factors, ``[rows, 1, 1]``: ε, and next to 0."""
    made = torch.zeros(rows, 1, 1, dtype=torch.float64)
    made[last] = tiny
    if ahead >= 0:
        made[ahead] = EPS
    return made


class Shares:
    """ρ of inner batches as their factors are written, one span of batches after another; no graph.

    Where the error is affine, |g|² = a N is in every term of Q but those of the maps before:

        1/ρ = a (|h_(L−1)|² + ε + Σ_(l<L) |h_(l−1)|²|δ_l|² / |g|²)

    which is never 0, and ρ may be anything where g is 0: nothing is written there.

    A span begins with `begin`, and each of its batches has a `step`. Factors of later spans lie as
    those of the first do.

    Attributes:
        above, size: N and |g|² ``[P, R]`` of the span's batches up to the last `step`, where the
            error is not affine.
    """

    def __init__(self, k: Tensor, c: Tensor, L: int, *, slope: float | None) -> None:
        """For all batches.

        Args:
            k: keys ``[N, P, R, ·]``. c: ``[N, P, R, J]``. L: maps. slope: a of an affine error.
        """
        self.L, self.slope, self.tiny = L, slope, torch.finfo(k.dtype).tiny
        given = c if slope is None or slope == 1 else c / slope
        keys = torch.linalg.vector_norm(k, dim=-1).square_()
        self.all_weights, self.below = torch.empty_like(c), torch.empty_like(keys)
        if L == 1 and slope is not None:
            torch.add(keys, EPS, out=self.below)
        self.along: Tensor | None = None
        if slope is None:
            self.along = torch.empty_like(keys)
            self.positive_floor = cached_constant(_some, self.tiny, device=k.device, dtype=k.dtype)
        weights, made = self.all_weights, self.all_weights[:, :, None, :, :, None]
        # What c is divided by where the error is affine, or multiplied by.
        factor = self.below if self.along is None else self.along
        views = (made, keys, self.below, factor, given, factor.unsqueeze(-1), weights)
        self.places = [*zip(*(x.unbind(0) for x in views), strict=True)]
        self.first, self.count, self.row = 0, 0, {}
        self.above: list[Tensor] = []
        self.size: list[Tensor] = []

    def begin(self, factors: Sequence[tuple[Tensor, Sequence[int]]], count: int) -> None:
        """The next span begins, whose factors are to be written.

        Args:
            factors: stacks ``[count, some, P, R, ·]`` of all but the keys, and what each holds: i
                for h_i, L + i for the gradient of the outputs of map i, from 0.
            count: its batches.
        """
        self.first, self.count, self.above, self.size = self.first + self.count, count, [], []
        if not self.row:
            below = self.below
            names = [name for _, some in factors for name in some]
            self.row = {name: row for row, name in enumerate(names)}
            ahead = -1 if self.slope is None else self.row.get(self.L - 1, -1)
            layout = (len(names), ahead, self.row[2 * self.L - 1], self.tiny)
            self.floors = cached_constant(_least, *layout, device=below.device, dtype=below.dtype)
            self.sizes = below.new_empty(len(names), *below.shape[1:])
            self.each = self.sizes.unbind(0)
        self.factors = [
            (x.unbind(0), self.sizes[self.row[some[0]] :][: len(some)]) for x, some in factors
        ]

    def _square(self, i: int, keys: Tensor) -> Tensor:
        return self.each[self.row[i]] if i else keys

    def step(self, n: int, end: End | None) -> Tensor:
        """c′ of batch n of the span, ``[P, 1, R, J, 1]``, when its factors are written.

        Args:
            n: the batch. end: what follows the last map, ``None`` where the error is affine.
        """
        made, keys, below, factor, given, per, weights = self.places[self.first + n]
        L = self.L
        if L > 1 or end is not None:
            for x, out in self.factors:
                torch.linalg.vector_norm(x[n], dim=-1, out=out)
            torch.addcmul(self.floors, self.sizes, self.sizes, out=self.sizes)
        if end is None:
            so_far = self._square(L - 1, keys)
            for i in range(L - 1):
                gain = self._square(i, keys) * self.each[self.row[L + i]]
                so_far = torch.addcdiv(so_far, gain, self.each[self.row[2 * L - 1]], out=below)
            torch.div(given, per, out=weights)
            return made
        above, size = end.above(), end.error.square().sum(-1)
        torch.add(self.positive_floor, size, alpha=EPS, out=below)
        for i in range(L):
            below.addcmul_(self._square(i, keys), self.each[self.row[L + i]])
        torch.div(above, below, out=factor)
        torch.mul(given, per, out=weights)
        self.above.append(above)
        self.size.append(size)
        return made

    def rho(self) -> Tensor:
        """ρ of the span's batches, ``[count, P, R]``."""
        here = slice(self.first, self.first + self.count)
        if self.slope is None:
            assert self.along is not None
            return self.along[here]
        below = self.below[here]
        return (below if self.slope == 1 else self.slope * below).reciprocal()

    @property
    def weights(self) -> Tensor:
        """c′ = ρ c of the span's batches ``[count, P, R, J]``."""
        return self.all_weights[self.first : self.first + self.count]


@dataclass(frozen=True, kw_only=True)
class ShareSlopes:
    """What a unit of π adds to the gradients of all batches' factors.

    Attributes:
        h, delta: per map, ``[N, P, R, 1]``, in units of h_(l−1) and δ_l.
        end: N̄, and ḡ in units of g, ``[N, P, R, 1]``; ``None`` where the error is affine, and
            δ_L is g.
    """

    h: list[Tensor]
    delta: list[Tensor]
    end: tuple[Tensor, Tensor] | None

    @classmethod
    def of(
        cls, h: Tensors, delta: Tensors, above: Tensor | None, size: Tensor | None
    ) -> ShareSlopes:
        """For the factors of all batches.

        Args:
            h: inputs of the maps ``[N, P, R, ·]``. delta: gradients of their outputs.
            above, size: N and |g|² ``[N, P, R]``, ``None`` where the error is affine.
        """
        inputs, outputs = (
            [torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_() for x in part]
            for part in (h, delta)
        )
        last, info = outputs[-1], torch.finfo(h[0].dtype)
        least = info.tiny / info.eps  # below it a square is nothing: its reciprocal overflows
        before = torch.zeros_like(last)
        for x, y in zip(inputs[:-1], outputs[:-1], strict=True):
            before.addcmul_(x, y)
        if size is None:
            below = torch.addcmul(before, inputs[-1] + EPS, last)
        else:
            below = torch.addcmul(before, inputs[-1], last).add_(size.unsqueeze(-1), alpha=EPS)
        twice = -2 / below.clamp_min_(least)
        to_h = [y * twice for y in outputs]
        to_delta = [x * twice for x in inputs[:-1]]
        if size is None:
            # 2/|g|² − 2 (|h_(L−1)|² + ε)/Q, without a difference of large numbers.
            to_delta.append(before.mul_(twice).div_(-last.clamp_min(info.tiny)))
            return cls(h=to_h, delta=to_delta, end=None)
        assert above is not None
        to_delta.append(inputs[-1] * twice)
        to_N = above.masked_fill(above < least, torch.inf).reciprocal_().unsqueeze(-1)
        return cls(h=to_h, delta=to_delta, end=(to_N, EPS * twice))
