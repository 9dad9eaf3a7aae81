"""Backward of the recurrence over inner-batch boundaries.

Given the gradients M̄′ of what stands at the border after, and h̄, δ̄ of the reads, in the letters of
`forward`:

    M̄_i = Σ_j T[j, i] M̄_j′,    δ̄ += Σ_j c_j M̄_j′ h,    h̄ += Σ_j c_j M̄_j′ᵀ δ
    ū_l = σ′(z_(l−1)) ⊙ δ̄_(l−1),    δ̄_l += A_l ū_l,    z̄_L = (∂δ_L/∂z_L)ᵀ δ̄_L
    h̄_(l−1) += A_lᵀ z̄_l,    z̄_(l−1) = σ′ ⊙ h̄_(l−1) + σ″ ⊙ u_l ⊙ δ̄_(l−1)
    Ā_l += δ_l ū_lᵀ + z̄_l h_(l−1)ᵀ

Where associations are scaled by their shares, c′ stands for c, and after the first line h̄ and δ̄ get
what `shares` adds. z̄_L then has N̄ ∂N/∂z_L and (∂g/∂z_L)ᵀ ḡ too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from recollect.engines.deep.chain.ends.gradients import end_gradients
from recollect.engines.deep.chain.families import (
    GradientStacks,
    add_product,
    beside,
    each_map,
    hosted,
)
from recollect.engines.deep.chain.shares import ShareSlopes
from recollect.engines.deep.chain.trace import ChainSpec, Commits, ForwardTrace, Keys, ReadGradients

__all__ = ["InputGradients", "backward"]


@dataclass(frozen=True, kw_only=True)
class InputGradients:
    """Gradients of the inputs of a forward pass; ``None`` where none was asked for.

    ``named``: of ``"said"``, and of the bias's numbers and the memory's params, ``"gate …"`` and
    ``"param …"``.
    """

    T: Tensor | None
    k: Tensor | None
    v: Tensor | None
    raw: Tensor | None
    c: Tensor | None
    named: dict[str, Tensor]
    start: list[Tensor]


def backward(
    spec: ChainSpec,
    keys: Keys,
    trace: ForwardTrace,
    commits: Commits,
    needs: Mapping[str, bool],
    back: ReadGradients,
    ends: Sequence[Tensor],
) -> InputGradients:
    """Backward through a forward pass, from its last batch to its first.

    Args:
        needs: whether a gradient is asked for of T, k, v, raw, c, and of what is `named`.
        back: what reads say. ends: gradients of A and S after the last batch, ``[P, J, entries]``,
            which this pass may overwrite.
    """
    saved = trace.saved
    assert saved is not None
    families = [
        GradientStacks(spec, i, stacks, trace, back, end)
        for i, (stacks, end) in enumerate(zip(saved.families, ends, strict=True))
    ]
    weights = keys.c if trace.weights is None else trace.weights
    walk = _Walk(spec, families, keys, trace, needs)
    N, P, _, J = keys.c.shape
    grams = [keys.c.new_zeros(N, P * one.L, J, J) if needs["T"] else None for one in families]
    Ts = [None if keys.T is None else each_map(keys.T, one.L).unbind(0) for one in families]
    columns = [x.unsqueeze(-1).unbind(0) for x in weights.unbind(-1)]
    for n in reversed(range(N)):
        commit = commits[n]
        for one, T, gram in zip(families, Ts, grams, strict=True):
            if commit is False:
                one.skip(n)
                continue
            crossed = commit if commit is True else commit.repeat_interleave(one.L, 0)
            c = [x[n] for x in columns]
            moved = one.end(n, None if T is None else T[n], c, crossed)
            if gram is not None:
                torch.bmm(moved, one.flat[n], out=gram[n])
        walk.batch(n)
        for one in families:
            one.write(n)
    named = walk.end.gradients(needs, walk.pi)
    first = families[0]
    to_T = None
    for one, gram in zip(families, grams, strict=True):
        if gram is not None:
            total = gram.unflatten(1, (P, one.L)).sum(2)
            to_T = total if to_T is None else to_T + total
    return InputGradients(
        T=to_T,
        k=_of_keys(spec, walk, first, weights) if needs["k"] else None,
        v=named.pop("v", None),
        raw=named.pop("raw", None),
        c=_of_coefficients(families, trace.rho) if needs["c"] else None,
        named=named,
        start=[
            one.up.view(P, one.L, *stacks.M.shape[3:])
            for one, stacks in zip(families, saved.families, strict=True)
        ],
    )


class _Walk:
    """Within a batch: from h̄ and δ̄ to ū and z̄.

    Attributes:
        to_first: z̄ of the first map, of all batches.
        end: what follows the last. pi: π of all batches, where steps are normalised.
    """

    def __init__(
        self,
        spec: ChainSpec,
        families: Sequence[GradientStacks],
        keys: Keys,
        trace: ForwardTrace,
        needs: Mapping[str, bool],
    ) -> None:
        saved = trace.saved
        assert saved is not None
        self.spec, self.families = spec, families
        L, R = len(spec.tall), trace.h[0].shape[2]
        place = {i: (one, m) for one in families for m, i in enumerate(one.members)}
        turn: list[Tensor] = []
        back: list[Tensor] = []
        to_h: list[Tensor] = []
        to_delta: list[Tensor] = []
        for i in range(L):
            one, m = place[i]
            up = spec.tall[i]
            over_in, over_out = one.sides(m, up)
            narrow, wide = one.to_narrow_all[m], one.to_wide_all[:, :, m]
            turn.append(over_in[:, :, :R])
            back.append(over_out[:, :, R if i else 0 :][:, :, :R])
            to_h.append(narrow if up else wide)
            to_delta.append(wide if up else narrow)
        affine = spec.ending.affine
        # A device writes δ̄ of an error that only is the prediction's to where z̄ belongs.
        self.same = affine is not None and affine[0] == 1 and not hosted(back[-1])
        if self.same:
            back[-1].copy_(to_delta[-1])
            one, m = place[L - 1]
            if not spec.tall[-1]:
                one.to_narrow_all[m] = to_delta[-1] = back[-1]
            else:
                self.same = False
        to_error, self.to_first = to_delta[-1], back[0]
        self.to_key = to_h[0]
        slope = [spec.curve.slope(z) for z in saved.z]
        bend = [spec.curve.bend(z).mul_(u) for z, u in zip(saved.z, saved.u, strict=True)]
        # σ″ ⊙ u ⊙ δ̄ and ū = σ′ ⊙ δ̄ are one operation where z̄ and ū belong beside each other.
        self.both: dict[int, tuple[Sequence[Tensor], Sequence[Tensor]]] = {}
        head = families[0]
        if head.members[:2] == (0, 1) and spec.tall[:2] == (True, False):
            scales = torch.stack([bend[0], slope[0]], dim=2)
            self.both[0] = scales.unbind(0), head.key_wide[:, :, :2, :R].unbind(0)
            bend[0], slope[0] = scales.unbind(2)
        self.slope, self.bend = ([x.unbind(0) for x in xs] for xs in (slope, bend))
        self.turn, self.back, self.to_h, self.to_delta = (
            [x.unbind(0) for x in xs] for xs in (turn, back, to_h, to_delta)
        )
        A = [w[:, :, 0] if up else w[:, :, 0].mT for w, up in zip(trace.M, spec.tall, strict=True)]
        self.A_first = A[0]
        self.A, self.A_back = [x.unbind(0) for x in A], [x.mT.unbind(0) for x in A]
        self.shares: ShareSlopes | None = None
        self.pi: Tensor | None = None
        if trace.rho is not None:
            self.shares = shares = ShareSlopes.of(trace.h, trace.delta, saved.above, saved.size)
            self.pi = torch.empty_like(trace.rho)
            self.keyed = shares.h[0]
            self.pulls = self._pulls(trace, shares)
        of_end = None if self.shares is None else self.shares.end
        ends = (to_error, back[-1])
        self.end = end_gradients(spec, keys, saved.last, needs, ends=ends, shares=of_end)

    def _pulls(
        self, trace: ForwardTrace, shares: ShareSlopes
    ) -> list[tuple[Sequence[Tensor], Sequence[Tensor]]]:
        """Gradients, and what a unit of π adds to them, ``[P, L, R, ·]`` or ``[P, R, ·]``."""
        found: list[tuple[Sequence[Tensor], Sequence[Tensor]]] = []
        for one in self.families:
            tall = [self.spec.tall[i] for i in one.members]
            wide = [
                (shares.delta if up else shares.h)[i]
                for i, up in zip(one.members, tall, strict=True)
            ]
            each = one.wide_all * beside(wide)
            found.append((one.to_wide_all.unbind(0), each.unbind(0)))
            for m in one.asked:
                i = one.members[m]
                per = (shares.h if tall[m] else shares.delta)[i]
                each = one.narrow_all[m] * per
                found.append((one.to_narrow_all[m].unbind(0), each.unbind(0)))
        return found

    def batch(self, n: int) -> None:
        """ū and z̄ of batch n, whose end has been passed."""
        if self.shares is not None:
            self._share(n)
        L, to_h, to_delta = len(self.to_h), self.to_h, self.to_delta
        for i in range(L - 1):
            if i in self.both:
                scales, places = self.both[i]
                torch.mul(to_delta[i][n].unsqueeze(1), scales[n], out=places[n])
            else:
                torch.mul(to_delta[i][n], self.slope[i][n], out=self.turn[i + 1][n])
            add_product(to_delta[i + 1][n], self.turn[i + 1][n], self.A[i + 1][n])
        if not self.same:
            pi = None if self.pi is None else self.pi[n]
            self.end.pull(n, to_delta[-1][n], pi, self.back[-1][n])
        for i in range(L - 1, 0, -1):
            add_product(to_h[i][n], self.back[i][n], self.A_back[i][n])
            if i - 1 in self.both:
                self.back[i - 1][n].addcmul_(to_h[i][n], self.slope[i - 1][n])
                continue
            z = torch.mul(to_h[i][n], self.slope[i - 1][n], out=self.back[i - 1][n])
            z.addcmul_(to_delta[i - 1][n], self.bend[i - 1][n])

    def _share(self, n: int) -> None:
        """The shares' part in h̄ and δ̄."""
        assert self.pi is not None and self.shares is not None
        pi = self.pi[n]
        first, *others = self.families
        torch.sum(first.to_wide[n] * first.wide_all[n], dim=(1, 3), out=pi)
        for one in others:
            pi += (one.to_wide[n] * one.wide_all[n]).sum((1, 3))
        for out, each in self.pulls:
            per = pi.unsqueeze(-1)
            out[n].addcmul_(each[n], per if out[n].dim() == 3 else per.unsqueeze(1))


def _of_keys(spec: ChainSpec, walk: _Walk, first: GradientStacks, weights: Tensor) -> Tensor:
    k = torch.add(walk.to_key, walk.to_first @ walk.A_first.mT)
    if not spec.tall[0]:
        return k
    to_Q = first.to_Q_all[:, :, 0]  # [N, P, R, J, narrow]
    k += (to_Q * weights.unsqueeze(-1)).sum(-2)
    if walk.shares is not None and walk.pi is not None:
        k.addcmul_(first.narrow_all[0], walk.keyed * walk.pi.unsqueeze(-1))
    return k


def _of_coefficients(families: Sequence[GradientStacks], rho: Tensor | None) -> Tensor:
    total: Tensor | None = None
    for one in families:
        for m in range(one.L):
            narrow = one.narrow_all[m]
            part = (one.to_Q_all[:, :, m] @ narrow.unsqueeze(-1)).squeeze(-1)
            total = part if total is None else total.add_(part)
    assert total is not None
    return total if rho is None else total.mul_(rho.unsqueeze(-1))
