"""Shares of a normalised step in the recurrence over borders, and their gradient.

Every association's gradients are scaled by ρ (`recollect.choices.algorithm.share`). ρ is one number
for all maps, so it is put into the coefficients, c′ = ρ c and C′ = ρ C, and h and δ stay as they
are:

    N = ⟨e, g⟩,    Q = Σ_l |h_(l−1)|²|δ_l|² + ε|g|²,    ρ = N/Q            (0 where Q is)

Backwards, what is written and read depends on ρ δ_l h_(l−1)ᵀ alone, so with the gradients h̄, δ̄
of that

    π = ρ ρ̄ = Σ_l ⟨h̄_(l−1), h_(l−1)⟩ = Σ_l ⟨δ̄_l, δ_l⟩,    N̄ = π/N,    Q̄ = −π/Q
    h̄_(l−1) += 2Q̄|δ_l|² h_(l−1),    δ̄_l += 2Q̄|h_(l−1)|² δ_l,    ḡ += N̄ e + 2εQ̄ g,    ē += N̄ g

Where the error is affine, a·prediction − b·value, e = g/a.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from recollect.choices.algorithm.share import EPS, share

__all__ = ["Shares", "share_now", "share_of"]

Tensors = Sequence[Tensor]


def share_of(h: Tensors, delta: Tensors, prediction: Tensor, v: Tensor, target: float) -> Tensor:
    """ρ ``[P, R]`` by operations that autograd follows.

    Args:
        h: inputs of every map ``[P, R, ·]``. delta: gradients of their outputs.
        prediction: ``[P, R, V]``. v: values. target: `Bias.target`.
    """
    gain: Tensor | None = None
    for x, y in zip(h, delta, strict=True):
        own = x.square().sum(-1) * y.square().sum(-1)
        gain = own if gain is None else gain + own
    assert gain is not None  # a chain has a map
    return share(prediction - target * v, delta[-1], gain)


def share_now(h: Tensors, delta: Tensors, away: Tensor | None, slope: float) -> Tensor:
    """ρ ``[P, R, 1]`` without a graph, in few operations.

    Args:
        h: inputs of every map ``[P, R, ·]``. delta: gradients of their outputs.
        away: e ``[P, R, V]``; ``None`` where the error is affine.
        slope: a of an affine error.
    """
    sizes = [torch.linalg.vector_norm(x, dim=-1, keepdim=True) for x in (*h, *delta)]
    last = sizes[-1] * sizes[-1]
    below = last * EPS
    for x, y in zip(sizes, sizes[len(h) :], strict=False):
        each = x * y
        below.addcmul_(each, each)
    below.clamp_min_(torch.finfo(below.dtype).tiny)
    if away is not None:
        last = (away * delta[-1]).sum(-1, keepdim=True)
    elif slope != 1:
        below *= slope
    return last / below


class Shares:
    """ρ of all inner batches, and per batch what its gradient needs; without a graph.

    Attributes:
        rho: ``[N, P, R]``. weights: c′ ``[N, P, R, J]``.
        sizes: |h_(l−1)|² of every map, then |δ_l|², ``[N, 2L, P, R]``.
        below: Q, at least the smallest normal number, ``[N, P, R]``. along: N.
        back: what `pull` adds to δ̄_l and then to h̄_(l−1), in units of δ_l and h_(l−1).
    """

    def __init__(self, h: Tensors, delta: Tensors, c: Tensor, *, slope: float | None) -> None:
        """For factors ``[N, P, R, ·]``, which are to be written, but the keys.

        Args:
            h: inputs of the maps; the first are keys. delta: gradients of their outputs.
            c: ``[N, P, R, J]``.
            slope: a of an affine error.
        """
        k, (N, P, R, _) = h[0], c.shape
        self.L, self.slope, self.tiny = len(h), slope, torch.finfo(k.dtype).tiny
        self.rho, self.below = k.new_empty(N, P, R), k.new_empty(N, P, R)
        self.sizes, self.weights = k.new_empty(N, 2 * self.L, P, R), torch.empty_like(c)
        # L2's ⟨e, g⟩ is |g|².
        self.along = self.sizes[:, -1] if slope == 1 else k.new_empty(N, P, R)
        self.back: Tensor | None = None
        self.sizes[:, 0] = torch.linalg.vector_norm(k, dim=-1)
        each = self.sizes.unbind(1)
        measured = [
            [*zip(*(part.unbind(0) for part in pair), strict=True)]
            for pair in zip((*h[1:], *delta), each[1:], strict=True)
        ]
        self.measured = [*zip(*measured, strict=True)]
        self.pairs = [
            [*zip(x.unbind(0), y.unbind(0), strict=True)]
            for x, y in zip(each[: self.L], each[self.L :], strict=True)
        ]
        parts = (self.sizes, each[-1], self.along, self.below, self.rho, self.weights)
        scalings = (
            c.unbind(0),
            self.rho.unsqueeze(-1).unbind(0),
            self.weights.unsqueeze(-1).unbind(0),
        )
        self.places = [*zip(*(x.unbind(0) for x in parts), *scalings, strict=True)]
        self.errors = delta[-1]

    def step(self, n: int, away: Tensor | None) -> Tensor:
        """c′ of batch n, ``[P, R, J, 1]``, when its factors are written.

        Args:
            n: the batch. away: e, ``None`` where the error is affine.
        """
        sizes, last, along, below, rho, weights, c, scale, made = self.places[n]
        for x, out in self.measured[n]:
            torch.linalg.vector_norm(x, dim=-1, out=out)
        sizes.mul_(sizes)
        torch.mul(last, EPS, out=below)
        for pair in self.pairs:
            below.addcmul_(*pair[n])
        below.clamp_min_(self.tiny)
        if away is not None:
            torch.sum(away * self.errors[n], dim=-1, out=along)
        elif self.slope is not None and self.slope != 1:
            torch.mul(last, 1 / self.slope, out=along)
        torch.div(along, below, out=rho)
        torch.mul(c, scale, out=weights)
        return made

    def pull(
        self, n: int, pi: Tensor, h: Tensors, delta: Tensors, to_h: Tensors, to_delta: Tensors
    ) -> Tensor | None:
        """Adds to the gradients of batch n but those of keys; N̄ where the error is not affine.

        Args:
            n: the batch. pi: π ``[P, R]``. h, delta: factors. to_h, to_delta: their gradients.
        """
        sizes, _, along, below, *_ = self.places[n]
        if self.back is None:
            self.back = torch.empty_like(self.sizes)
        back = self.back[n]
        twice = (pi / below).mul_(-2)
        torch.mul(sizes, twice, out=back)
        per = pi / along.masked_fill(along == 0, torch.inf)
        last = back[self.L - 1].add_(twice, alpha=EPS)
        if self.slope is not None:
            last.add_(per, alpha=2 / self.slope)
        each = back.unsqueeze(-1).unbind(0)
        for x, out, weight in zip(delta, to_delta, each, strict=False):
            out.addcmul_(x, weight)
        for x, out, weight in zip(h[1:], to_h[1:], each[self.L + 1 :], strict=True):
            out.addcmul_(x, weight)
        return per.unsqueeze(-1) if self.slope is None else None

    def of_first(self) -> Tensor:
        """What `pull` leaves to be added to the gradients of all keys, in units of the keys."""
        assert self.back is not None
        return self.back[:, self.L].unsqueeze(-1)
