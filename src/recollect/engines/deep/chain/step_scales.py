"""Step scales of a normalized step in the recurrence over boundaries, and their gradient.

ρ scales the gradients of an association (`recollect.choices.algorithm.normalized_steps`). It is one
number for all maps. The coefficients contain it, c′ = ρ c and C′ = ρ C, and h and δ do not:

    N = ⟨e, g⟩,    Q = Σ_l |h_(l−1)|²|δ_l|² + ε|g|²,    ρ = N/Q            (0 if Q is 0)

Writes and reads depend on ρ δ_l h_(l−1)ᵀ alone. In the backward pass, with the gradients h̄ and δ̄:

    π = ρ ρ̄ = Σ_l ⟨h̄_(l−1), h_(l−1)⟩ = Σ_l ⟨δ̄_l, δ_l⟩,    N̄ = π/N,    Q̄ = −π/Q
    h̄_(l−1) += 2Q̄|δ_l|² h_(l−1),    δ̄_l += 2Q̄|h_(l−1)|² δ_l,    ḡ += 2εQ̄ g

The output head uses N̄. If the error is affine, a·prediction − b·value, then δ_L = g and e = g/a.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from recollect.choices.algorithm.normalized_steps import EPS, polyak_scale
from recollect.choices.runtime import cached_constant
from recollect.engines.deep.chain.output_head.head import HeadGradients

__all__ = ["StepScaleGradients", "StepScales", "compute_step_scales", "differentiable_step_scales"]

Tensors = Sequence[Tensor]


def differentiable_step_scales(h: Tensors, delta: Tensors, head: HeadGradients) -> Tensor:
    """Return ρ ``[P, R]`` by operations that autograd follows.

    Args:
        h: Inputs of every map, ``[P, R, ·]``.
        delta: Gradients of the maps' outputs.
        head: Gradients at the output head.
    """
    gain: Tensor | None = None
    for x, y in zip(h, delta, strict=True):
        product = x.square().sum(-1) * y.square().sum(-1)
        gain = product if gain is None else gain + product
    assert gain is not None  # a chain has a map
    return polyak_scale(head.alignment(), head.error, gain)


def compute_step_scales(h: Tensors, delta: Tensors, head: HeadGradients) -> Tensor:
    """Return ρ ``[P, R]`` without a graph, in few operations.

    Args:
        h: Inputs of every map, ``[P, R, ·]``.
        delta: Gradients of the maps' outputs.
        head: Gradients at the output head.
    """
    sizes = [torch.linalg.vector_norm(x, dim=-1) for x in (*h, *delta, head.error)]
    denominator = (sizes[-1] * sizes[-1]).mul_(EPS)
    for x, y in zip(sizes, sizes[len(h) : -1], strict=False):
        product = x * y
        denominator.addcmul_(product, product)
    return head.alignment() / denominator.clamp_min_(torch.finfo(denominator.dtype).tiny)


def _full_constant(tiny: float) -> Tensor:
    """Return a positive constant that prevents the division 0/0."""
    return torch.tensor(tiny, dtype=torch.float64)


def _row_floors(rows: int, top_row: int, last: int, tiny: float) -> Tensor:
    """Return the addends of the squared factors, ``[rows, 1, 1]``: ε, a tiny number or 0."""
    floors = torch.zeros(rows, 1, 1, dtype=torch.float64)
    floors[last] = tiny
    if top_row >= 0:
        floors[top_row] = EPS
    return floors


class StepScales:
    """ρ of inner batches, computed as their factors are written, span by span; without a graph.

    If the error is affine, |g|² = a N is in every term of Q but those of the lower maps:

        1/ρ = a (|h_(L−1)|² + ε + Σ_(l<L) |h_(l−1)|²|δ_l|² / |g|²)

    This is never 0. If g is 0, nothing is written and ρ is arbitrary.

    Call `begin_span` for every span, and `update` for each of its batches. All spans have the
    layout of the first.

    Attributes:
        alignment: N ``[P, R]`` of the span's batches until now, if the error is not affine.
        error_norm_sq: |g|² ``[P, R]`` of the span's batches until now, if the error is not affine.
    """

    def __init__(self, k: Tensor, c: Tensor, L: int, *, slope: float | None) -> None:
        """Allocate the step scales of all batches.

        Args:
            k: Features of keys, ``[N, P, R, ·]``.
            c: Write coefficients, ``[N, P, R, J]``.
            L: Number of maps.
            slope: a of an affine error, else ``None``.
        """
        self.L, self.slope, self.tiny = L, slope, torch.finfo(k.dtype).tiny
        coefficients = c if slope is None or slope == 1 else c / slope
        key_norms_sq = torch.linalg.vector_norm(k, dim=-1).square_()
        self.all_weights, self.denominator = torch.empty_like(c), torch.empty_like(key_norms_sq)
        if L == 1 and slope is not None:
            torch.add(key_norms_sq, EPS, out=self.denominator)
        self.scales: Tensor | None = None
        if slope is None:
            self.scales = torch.empty_like(key_norms_sq)
            self.positive_floor = cached_constant(
                _full_constant, self.tiny, device=k.device, dtype=k.dtype
            )
        weights, expanded = self.all_weights, self.all_weights[:, :, None, :, :, None]
        # Divisor of c if the error is affine, else a factor of c.
        factor = self.denominator if self.scales is None else self.scales
        views = (
            expanded,
            key_norms_sq,
            self.denominator,
            factor,
            coefficients,
            factor.unsqueeze(-1),
            weights,
        )
        self.batch_views = [*zip(*(x.unbind(0) for x in views), strict=True)]
        self.first, self.count, self.row = 0, 0, {}
        self.alignment: list[Tensor] = []
        self.error_norm_sq: list[Tensor] = []

    def begin_span(self, factors: Sequence[tuple[Tensor, Sequence[int]]], count: int) -> None:
        """Begin the next span, before its factors are written.

        Args:
            factors: Stacks ``[count, factors, P, R, ·]`` of all factors but the keys, and their
                indices. Index i is h_i, and L + i is the gradient of the outputs of map i, from 0.
            count: Number of batches.
        """
        self.first, self.count = self.first + self.count, count
        self.alignment, self.error_norm_sq = [], []
        if not self.row:
            denominator = self.denominator
            names = [name for _, names in factors for name in names]
            self.row = {name: row for row, name in enumerate(names)}
            top_row = -1 if self.slope is None else self.row.get(self.L - 1, -1)
            layout = (len(names), top_row, self.row[2 * self.L - 1], self.tiny)
            self.floors = cached_constant(
                _row_floors, *layout, device=denominator.device, dtype=denominator.dtype
            )
            self.sizes = denominator.new_empty(len(names), *denominator.shape[1:])
            self.norms_sq = self.sizes.unbind(0)
        self.factors = [
            (x.unbind(0), self.sizes[self.row[names[0]] :][: len(names)]) for x, names in factors
        ]

    def _square(self, i: int, key_norms_sq: Tensor) -> Tensor:
        return self.norms_sq[self.row[i]] if i else key_norms_sq

    def update(self, n: int, head: HeadGradients | None) -> Tensor:
        """Return c′ of batch n of the span, ``[P, 1, R, J, 1]``, from its factors.

        Args:
            n: Index of the batch.
            head: Gradients at the output head, or ``None`` if the error is affine.
        """
        expanded, key_norms_sq, denominator, factor, coefficients, per, weights = self.batch_views[
            self.first + n
        ]
        L = self.L
        if L > 1 or head is not None:
            for x, out in self.factors:
                torch.linalg.vector_norm(x[n], dim=-1, out=out)
            torch.addcmul(self.floors, self.sizes, self.sizes, out=self.sizes)
        if head is None:
            partial_sum = self._square(L - 1, key_norms_sq)
            for i in range(L - 1):
                gain = self._square(i, key_norms_sq) * self.norms_sq[self.row[L + i]]
                partial_sum = torch.addcdiv(
                    partial_sum, gain, self.norms_sq[self.row[2 * L - 1]], out=denominator
                )
            torch.div(coefficients, per, out=weights)
            return expanded
        alignment, error_norm_sq = head.alignment(), head.error.square().sum(-1)
        torch.add(self.positive_floor, error_norm_sq, alpha=EPS, out=denominator)
        for i in range(L):
            denominator.addcmul_(self._square(i, key_norms_sq), self.norms_sq[self.row[L + i]])
        torch.div(alignment, denominator, out=factor)
        torch.mul(coefficients, per, out=weights)
        self.alignment.append(alignment)
        self.error_norm_sq.append(error_norm_sq)
        return expanded

    def rho(self) -> Tensor:
        """Return ρ of the span's batches, ``[count, P, R]``."""
        batches = slice(self.first, self.first + self.count)
        if self.slope is None:
            assert self.scales is not None
            return self.scales[batches]
        denominator = self.denominator[batches]
        return (denominator if self.slope == 1 else self.slope * denominator).reciprocal()

    @property
    def weights(self) -> Tensor:
        """c′ = ρ c of the span's batches, ``[count, P, R, J]``."""
        return self.all_weights[self.first : self.first + self.count]


@dataclass(frozen=True, kw_only=True)
class StepScaleGradients:
    """Terms of the step scales in the gradients of all factors, per unit of π.

    Attributes:
        h: Factors of h_(l−1), per map ``[N, P, R, 1]``.
        delta: Factors of δ_l, per map ``[N, P, R, 1]``.
        head: N̄, and the factor of g in ḡ, ``[N, P, R, 1]``. ``None`` if the error is affine.
    """

    h: list[Tensor]
    delta: list[Tensor]
    head: tuple[Tensor, Tensor] | None

    @classmethod
    def from_factors(
        cls, h: Tensors, delta: Tensors, alignment: Tensor | None, error_norm_sq: Tensor | None
    ) -> StepScaleGradients:
        """Return the terms for the factors of all batches.

        Args:
            h: Inputs of the maps, ``[N, P, R, ·]``.
            delta: Gradients of the maps' outputs.
            alignment: N ``[N, P, R]``, or ``None`` if the error is affine.
            error_norm_sq: |g|² ``[N, P, R]``, or ``None`` if the error is affine.
        """
        inputs, outputs = (
            [torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_() for x in part]
            for part in (h, delta)
        )
        last, info = outputs[-1], torch.finfo(h[0].dtype)
        smallest = info.tiny / info.eps  # reciprocals of smaller squares overflow
        lower_maps = torch.zeros_like(last)
        for x, y in zip(inputs[:-1], outputs[:-1], strict=True):
            lower_maps.addcmul_(x, y)
        if error_norm_sq is None:
            denominator = torch.addcmul(lower_maps, inputs[-1] + EPS, last)
        else:
            denominator = torch.addcmul(lower_maps, inputs[-1], last).add_(
                error_norm_sq.unsqueeze(-1), alpha=EPS
            )
        twice = -2 / denominator.clamp_min_(smallest)
        to_h = [y * twice for y in outputs]
        to_delta = [x * twice for x in inputs[:-1]]
        if error_norm_sq is None:
            # 2/|g|² − 2 (|h_(L−1)|² + ε)/Q, without a difference of large numbers.
            to_delta.append(lower_maps.mul_(twice).div_(-last.clamp_min(info.tiny)))
            return cls(h=to_h, delta=to_delta, head=None)
        assert alignment is not None
        to_delta.append(inputs[-1] * twice)
        to_alignment = (
            alignment.masked_fill(alignment < smallest, torch.inf).reciprocal_().unsqueeze(-1)
        )
        return cls(h=to_h, delta=to_delta, head=(to_alignment, EPS * twice))
