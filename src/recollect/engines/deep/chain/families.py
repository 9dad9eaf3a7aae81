"""Maps of the same sizes beside each other: one product serves all of them.

What is wide of a family, and M, are ``[N, P, maps, ...]``, so that heads and maps are one axis of a
product's matrices. What is narrow lies map by map, ``[maps, N, P, ...]``: products write it, and on
a CPU they are slower in writing to places that do not touch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from recollect.choices.matmul_precision import matmul_precision
from recollect.engines.deep.chain.trace import ChainSpec, Family, ForwardTrace, Keys, ReadGradients

__all__ = [
    "GradientStacks",
    "Stacks",
    "add_product",
    "add_stacks",
    "apart",
    "beside",
    "by_batch",
    "each_map",
    "families_of",
    "hosted",
]

Tensors = list[Tensor]


def families_of(sizes: Sequence[tuple[int, int]]) -> tuple[tuple[int, ...], ...]:
    """Maps by their sizes, (narrow, wide).

    Args:
        sizes: of every map.
    """
    found: dict[tuple[int, int], list[int]] = {}
    for i, size in enumerate(sizes):
        found.setdefault(size, []).append(i)
    return tuple(map(tuple, found.values()))


def hosted(x: Tensor) -> bool:
    """Whether a CPU computes: it minds gaps in memory, and not how many operations it is told.

    Args:
        x: what is computed with.
    """
    return x.device.type == "cpu"


def add_product(out: Tensor, a: Tensor, b: Tensor, alpha: float = 1.0) -> None:
    """out += alpha a b, in one operation where that is no slower.

    Args:
        out: ``[P, m, n]``, apart in memory from one matrix to the next if need be.
        a: ``[P, m, r]``. b: ``[P, r, n]``. alpha: a factor.
    """
    if not hosted(out) or out.is_contiguous():
        out.baddbmm_(a, b, alpha=alpha)
    else:
        out.add_(torch.bmm(a, b), alpha=alpha)


def add_stacks(out: Tensor, T: Tensor, M: Tensor, *, back: bool = False) -> None:
    """out_j = Σ_i T[j, i] M_i; on the way back Σ_i T[i, j] M_i. Never with fewer bits.

    Decays and momentum are no factors of products that may be rounded. Where A stands beside a
    base, what was written is the difference of two stacks, of which rounding them at every border
    would leave little.

    Args:
        out: ``[P, J, entries]``. T: ``[P, J, J]``, zero below its diagonal. M: as ``out``.
        back: whether T is turned over.
    """
    T = T.mT if back else T
    if hosted(M):
        torch.bmm(T, M, out=out)
    else:
        with matmul_precision("float32", M.device.type):
            torch.bmm(T, M, out=out)


def by_batch(x: Tensor, N: int) -> Sequence[Tensor]:
    """Batch by batch; a stack of one is written over and over."""
    return x.unbind(0) if x.shape[0] == N else (x[0],) * N


def each_map(x: Tensor, L: int) -> Tensor:
    """``[N, P, ...]`` for every map of a family, ``[N, P L, ...]``."""
    if L == 1:
        return x
    return x.unsqueeze(2).expand(*x.shape[:2], L, *x.shape[2:]).flatten(1, 2)


def apart(spec: ChainSpec, families: Sequence[Tensor]) -> Tensors:
    """Stacks of families ``[P, L, ...]`` map by map.

    Args:
        spec: of the chain.
        families: in its order.
    """
    found = {
        i: x
        for group, stack in zip(spec.families, families, strict=True)
        for i, x in zip(group, stack.unbind(1), strict=True)
    }
    return [found[i] for i in range(len(spec.tall))]


class Stacks:
    """A family's stacks in the forward pass, batch by batch.

    Attributes:
        narrow_, wide_: ``[P, L, R, ·]``. Q_: c times narrow ``[P, L, R, J, narrow]``.
        early: whether Q is there before the first batch.
        A: of every map, ``[N, P, in, out]``.
    """

    def __init__(
        self,
        spec: ChainSpec,
        keys: Keys,
        index: int,
        start: Tensor,
        sizes: tuple[int, bool],
        new: Callable[..., Tensor],
    ) -> None:
        (turn, early), members = sizes, spec.families[index]
        self.members = [(i, spec.tall[i]) for i in members]
        k, c = keys.k, keys.c
        N, P, R, _ = k.shape
        _, L, J, small, large = start.shape
        count = N if spec.keep else 1
        self.end = new(f"end {turn}", index, *start.shape)
        if N == 1:
            self.M = start.unsqueeze(0)
        else:
            self.M = new("M", index, N, *start.shape)
            self.M[0].copy_(start)
        head, tall = members[0] == 0, spec.tall[members[0]]
        if head and tall and L == 1:
            self.narrow = k.unsqueeze(0)
        else:
            self.narrow = new("narrow", index, L, N, P, R, small)
            if head and tall:
                self.narrow[0].copy_(k)
        if head and not tall and L == 1:
            self.wide = k.unsqueeze(2)
        else:
            self.wide = new("wide", index, N, P, L, R, large)
            if head and not tall:
                self.wide[:, :, 0].copy_(k)
        self.early = early and head and tall and L == 1
        if self.early:  # the keys' own coefficients are one product
            self.Q = (k.unsqueeze(-2) * c.unsqueeze(-1)).unsqueeze(2)
        else:
            self.Q = new("Q", index, count, P, L, R, J, small)
        self.narrow_ = self.narrow.permute(1, 2, 0, 3, 4).unsqueeze(4).unbind(0)
        self.wide_ = self.wide.flatten(1, 2).unbind(0)
        self.Q_ = by_batch(self.Q, N)
        self.left = by_batch(self.Q.flatten(1, 2).flatten(3).mT, N)
        self.whole = [
            *self.M.flatten(1, 2).flatten(2, 3).unbind(0),
            self.end.flatten(0, 1).flatten(1, 2),
        ]
        self.flat = [*self.M.flatten(1, 2).flatten(3).unbind(0), self.end.flatten(0, 1).flatten(2)]
        self.T: Sequence[Tensor] | None = None
        if keys.T is not None:
            self.T = each_map(keys.T, L).unbind(0)
        self.J, self.L = J, L

    def factors(self, L: int) -> list[tuple[Tensor, Sequence[int]]]:
        """The stacks ``[N, some, P, R, ·]`` of `Shares`, which has the keys already."""
        narrow = [i if up else L + i for i, up in self.members]
        wide = [L + i if up else i for i, up in self.members]
        first = int(narrow[0] == 0)
        found: list[tuple[Tensor, Sequence[int]]] = []
        if wide != [0]:
            found.append((self.wide.transpose(1, 2), wide))
        if narrow[first:]:
            found.append((self.narrow.transpose(0, 1)[:, first:], narrow[first:]))
        return found

    def of(self, member: int, tall: bool) -> tuple[Tensor, Tensor, Tensor]:
        """h, δ and A of a map, ``[N, P, ·, ·]``."""
        narrow, wide, A = self.narrow[member], self.wide[:, :, member], self.M[:, :, member, 0]
        return (narrow, wide, A) if tall else (wide, narrow, A.mT)

    def move(self, n: int, weight: Tensor | None, commit: bool | Tensor) -> None:
        """M at the border after batch n.

        Args:
            n: the batch. weight: its coefficients ``[P, 1, R, J, 1]``, ``None`` where Q is there.
            commit: whether the border is crossed, or the rows for which it is.
        """
        before, after = self.whole[n], self.whole[n + 1]
        if commit is False:
            after.copy_(before)
            return
        if weight is not None and not self.early:
            torch.mul(self.narrow_[n], weight, out=self.Q_[n])
        left, right = self.left[n], self.wide_[n]
        if self.T is None:
            torch.baddbmm(before, left, right, out=after)
        else:
            if self.J == 1:
                torch.mul(self.flat[n], self.T[n], out=self.flat[n + 1])
            else:
                add_stacks(self.flat[n + 1], self.T[n], self.flat[n])
            after.baddbmm_(left, right)
        if commit is not True:
            after.copy_(torch.where(commit.repeat_interleave(self.L, 0), after, before))


def beside(xs: Sequence[Tensor]) -> Tensor:
    """Maps' ``[N, P, ...]`` as ``[N, P, L, ...]``; of one, the same memory."""
    return xs[0].unsqueeze(2) if len(xs) == 1 else torch.stack(list(xs), dim=2)


class GradientStacks:
    """Maps of the same sizes, batch by batch, and the gradients gathered for them.

    Attributes:
        up: gradient of M at the border after the batch at hand, ``[P L, J, entries]``.
        to_wide: what reads ask of the wider of h and δ, and then what the batch's own end does,
            ``[N, P, L, R, wide]``. to_narrow: of the narrower, per map ``[N, P, R, narrow]``.
        to_Q: ``[N, P, L, R, J, narrow]``.
        key_narrow, key_wide: the factors of Ā, ``[N, P, L, rows, ·]``: (k, z̄) for the first map,
            for others (ū, δ) and below them (h, z̄).
    """

    def __init__(
        self,
        spec: ChainSpec,
        index: int,
        stacks: Family,
        trace: ForwardTrace,
        back: ReadGradients,
        end: Tensor,
    ) -> None:
        members = spec.families[index]
        M, wide, Q = stacks.M, stacks.wide, stacks.Q
        N, P, L, self.J, small, large = M.shape
        R = wide.shape[3]
        self.members, self.L, self.R = members, L, R
        self.wide_all, self.narrow_all = wide, stacks.narrow
        tall = [spec.tall[i] for i in members]
        pairs = [(back.h[i], back.delta[i]) for i in members]
        self.to_narrow_all = [pair[not up] for pair, up in zip(pairs, tall, strict=True)]
        self.to_wide_all = beside([pair[up] for pair, up in zip(pairs, tall, strict=True)])
        left, right = (beside([x[i] for i in members]) for x in (back.left, back.right))
        self.left, self.right = (x.flatten(1, 2).unbind(0) for x in (left, right))
        self.Q, self.wide = Q.flatten(1, 2).flatten(3).unbind(0), wide.flatten(1, 2).unbind(0)
        self.flat = M.flatten(1, 2).flatten(3).mT.unbind(0)
        self.to_Q_all = M.new_empty(N, P, L, R, self.J, small)
        self.to_Q = self.to_Q_all.unbind(0)
        self.to_Q_flat = self.to_Q_all.flatten(1, 2).flatten(3).unbind(0)
        self.to_wide, self.to_wide_flat = (
            x.unbind(0) for x in (self.to_wide_all, self.to_wide_all.flatten(1, 2))
        )
        # The first map has one pair of factors, the others two.
        rows = R if members == (0,) else 2 * R
        self.key_narrow, self.key_wide = (
            M.new_empty(N, P, L, rows, size) for size in (small, large)
        )
        if members[0] == 0 and rows > R:
            for x in (self.key_narrow, self.key_wide):
                x[:, :, 0, R:] = 0.0
        for m, (i, up) in enumerate(zip(members, tall, strict=True)):
            into_h, into_delta = self.sides(m, up)
            h, delta = trace.h[i], trace.delta[i]
            if i:
                into_delta[:, :, :R].copy_(delta)
                into_h[:, :, R:].copy_(h)
            else:
                into_h[:, :, :R].copy_(h)
        self.own = self.key_narrow.flatten(1, 2).mT.unbind(0), self.key_wide.flatten(1, 2).unbind(0)
        # A narrow factor of the first map are the keys, whose share can wait for the end.
        self.asked = [m for m, i in enumerate(members) if i or not tall[0]]
        self.sizes = P * L, self.J * small, large
        self.up = end.flatten(0, 1).flatten(2)
        self.spare = torch.empty_like(self.up)

    def sides(self, member: int, tall: bool) -> tuple[Tensor, Tensor]:
        """The places of a map's factors of Ā over inputs and over outputs, ``[N, P, rows, ·]``."""
        narrow, wide = self.key_narrow[:, :, member], self.key_wide[:, :, member]
        return (narrow, wide) if tall else (wide, narrow)

    def end(self, n: int, T: Tensor | None, c: Sequence[Tensor], commit: bool | Tensor) -> Tensor:
        """Back through the border after batch n; M̄′ of the rows that moved.

        Args:
            n: the batch. T: ``[P L, J, J]``, or ``None``. c: of A and S, ``[P, R, 1]``.
            commit: whether the border was crossed, or the rows for which it was.
        """
        mask = commit if isinstance(commit, Tensor) else None
        moved = self.up if mask is None else torch.where(mask, self.up, 0.0)
        flat = moved.view(self.sizes)
        self.to_wide_flat[n].baddbmm_(self.Q[n], flat)
        torch.bmm(self.wide[n], flat.mT, out=self.to_Q_flat[n])
        for m in self.asked:
            for part, each in zip(self.to_Q[n][:, m].unbind(2), c, strict=True):
                self.to_narrow_all[m][n].addcmul_(part, each)
        after = self.spare
        if T is None:
            after.copy_(moved)
        elif self.J == 1:
            torch.mul(moved, T, out=after)
        else:
            add_stacks(after, T, moved, back=True)
        if mask is not None:
            after.add_(torch.where(mask, 0.0, self.up))
        self.up, self.spare = after, self.up
        return moved

    def skip(self, n: int) -> None:
        """Back through a border that was not crossed."""
        self.to_Q[n].zero_()

    def write(self, n: int) -> None:
        """The products of reads into M̄, and of keys into Ā."""
        stacked = self.up.view(self.sizes)
        stacked.baddbmm_(self.left[n].mT, self.right[n])
        narrow, wide = self.own
        PL, entries, large = self.sizes
        own = stacked.view(PL, self.J, entries // self.J, large)[:, 0]
        add_product(own, narrow[n], wide[n])
