"""Where a rank's tokens stand in their sequences: what came before, what goes on.

Packed documents are borders of *pieces* on each rank. The first piece always goes on from the rank
before, and the last one on the next rank; a document that ends where its rank's tokens end is
followed by an empty piece, the beginning of the next document. So nobody needs to be told which
pieces are whole.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from recollect.parallel.exchange import Exchange

__all__ = ["Segment", "pieces_of", "segment_of"]


@dataclass(frozen=True, kw_only=True)
class Segment:
    """One rank's tokens among those of all ranks.

    Attributes:
        exchange: the call's.
        tokens: T of each rank, padding included.
        counts: real tokens of each rank that go on to the next (of the last piece), ``[R, B]``.
        onward: the same of its longest row, padding included.
        fresh: of each rank, whether a document begins within it: nothing before then goes on.
        lengths: real tokens per row of this rank ``[B]``, where rows are padded on the right.
        padded: whether rows of any rank are.
        start: first token of this rank's last piece.
    """

    exchange: Exchange
    tokens: tuple[int, ...]
    counts: Tensor
    onward: tuple[int, ...]
    fresh: tuple[bool, ...]
    lengths: Tensor | None
    padded: bool
    start: int

    @property
    def rank(self) -> int:
        """Of this process."""
        return self.exchange.link.rank

    @property
    def reach(self) -> int:
        """The first rank whose last piece this rank's first one goes on from."""
        first = self.rank
        while first > 0 and not (first < self.rank and self.fresh[first]):
            first -= 1
        return first

    @property
    def from_start(self) -> bool:
        """Whether this rank's first piece began before the first token of all."""
        return self.rank == 0 or (self.reach == 0 and not self.fresh[0])

    def position(self, given: Tensor | None = None) -> Tensor:
        """Tokens of its document before this rank's first, ``[B]``.

        Args:
            given: tokens before the first of all.
        """
        before = self.counts[self.reach : self.rank].sum(0)
        return before + given if given is not None and self.from_start else before

    @property
    def seen(self) -> int | None:
        """What every entry of `position` is, where all ranks know it."""
        if self.padded:
            return None
        if any(self.fresh[: self.rank]):
            return None
        return sum(self.tokens[: self.rank])

    def ends(
        self,
        x: Tensor,
        n: int | None,
        given: tuple[Tensor, Tensor] | None = None,
        own: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The n tokens before this rank's first, ``[B, n, ...]``, and which of them there are.

        They are aligned right, and 0 where the document has not begun.

        Args:
            x: this rank's tokens ``[B, T, ...]``, padded on the right.
            n: at least 1; ``None`` for all of them.
            given: tokens before the first of all ``[B, m, ...]``, aligned right, and which of them
                there are.
            own: the last tokens of this rank's last piece ``[B, m, ...]``, aligned right, where x
                are not the tokens that end with it.
        """
        each = max(self.tokens) if n is None else n
        slots = torch.arange(each, device=x.device)
        if own is None:
            last = x[:, self.start :]
            real = self.lengths
            if real is None:
                real = torch.full((last.shape[0],), last.shape[1], device=x.device)
        else:
            last, real = own, torch.full((own.shape[0],), own.shape[1], device=x.device)
        index = real[:, None] - each + slots  # [B, n]
        own = _picked(last, index, index >= 0)
        every = self.exchange.gather(own)  # [R, B, n, ...]
        held = slots >= each - self.counts[:, :, None]  # [R, B, n]
        reach = self.reach
        blocks, masks = list(every[reach : self.rank]), list(held[reach : self.rank])
        if given is not None and self.from_start:
            blocks.insert(0, given[0].to(own.dtype))
            masks.insert(0, given[1])
        if not blocks:
            shape = (own.shape[0], n or 0, *own.shape[2:])
            return own.new_zeros(shape), held.new_zeros(shape[:2])
        joined, mask = torch.cat(blocks, 1), torch.cat(masks, 1)
        if n is None and (self.padded or (given is not None and self.from_start)):
            n = int(mask.sum(1).max())
        elif n is None:  # known without looking at numbers
            n = sum(self.onward[reach : self.rank])
        if mask.shape[1] < n:
            short = n - mask.shape[1]
            blank = joined.new_zeros(own.shape[0], short, *own.shape[2:])
            joined = torch.cat([blank, joined], 1)
            mask = torch.cat([mask.new_zeros(own.shape[0], short), mask], 1)
        kept, order = mask.long().sort(dim=1, stable=True)  # tokens to the right, in order
        kept, order = kept[:, kept.shape[1] - n :].bool(), order[:, order.shape[1] - n :]
        return _picked(joined, order, kept), kept

    def sums(self, x: Tensor) -> Tensor:
        """Σ of ``x [B, ...]`` over the ranks whose last pieces this rank's first goes on from."""
        every = self.exchange.gather(x)
        return every[self.reach : self.rank].sum(0)


def _picked(x: Tensor, index: Tensor, real: Tensor) -> Tensor:
    """``x [B, T, ...]`` at ``index [B, n]``, 0 where not ``real``."""
    shape = (*index.shape, *(1,) * (x.dim() - 2))
    if not x.shape[1]:
        return x.new_zeros(*index.shape, *x.shape[2:])
    index = index.clamp(0, x.shape[1] - 1).view(shape).expand(*index.shape, *x.shape[2:])
    zero = torch.zeros((), dtype=x.dtype, device=x.device)
    return torch.where(real.view(shape), x.gather(1, index), zero)


def segment_of(
    exchange: Exchange,
    x: Tensor,
    *,
    lengths: Tensor | None = None,
    borders: Tensor | None = None,
    same: tuple[tuple[str, int], ...] = (),
) -> Segment:
    """Tell all ranks how many tokens each holds, and hold what has to be the same against theirs.

    Args:
        exchange: the call's.
        x: this rank's tokens ``[B, T, ...]``.
        lengths: real tokens per row ``[B]``, where rows are padded on the right.
        borders: ``[N + 1]`` of this rank's pieces, of one row.
        same: numbers by name that all ranks have to agree on.

    Raises:
        ValueError: ranks that differ, or one that has no token.
    """
    B, T = x.shape[:2]
    start = 0 if borders is None else int(borders[-2])
    fresh = borders is not None and borders.shape[0] > 2
    names = ("rows", "whether documents are packed", *(name for name, _ in same))
    own = (B, borders is not None, *(n for _, n in same))
    told = exchange.numbers(*own, lengths is not None, T, T - start, fresh)
    for index, name in enumerate(names):
        other = next((r for r, row in enumerate(told) if row[index] != told[0][index]), None)
        if other is not None:
            raise ValueError(
                f"rank {other} disagrees with rank 0 on {name} ({told[other][index]} and "
                f"{told[0][index]}): the ranks of one sequence call the same layer on their "
                "segments of the same rows"
            )
    tokens = tuple(row[-3] for row in told)
    if 0 in tokens:
        raise ValueError(
            f"rank {tokens.index(0)} has no token: split the sequence into at most as many "
            f"segments as it has tokens (T = {sum(tokens)})"
        )
    counts = x.new_tensor([row[-2] for row in told], dtype=torch.long)
    counts = counts[:, None].expand(-1, B)
    padded = any(row[-4] for row in told)
    if padded:
        counts = exchange.counts(counts[exchange.link.rank] if lengths is None else lengths)
    return Segment(
        exchange=exchange,
        tokens=tokens,
        counts=counts,
        onward=tuple(row[-2] for row in told),
        fresh=tuple(bool(row[-1]) for row in told),
        lengths=lengths,
        padded=padded,
        start=start,
    )


def pieces_of(borders: Tensor, tokens: tuple[int, ...], rank: int) -> tuple[Tensor, list[int]]:
    """Borders of a rank's pieces, and of which document each is.

    Args:
        borders: ``[N + 1]`` of the documents in the whole sequence.
        tokens: of each rank.
        rank: of this one.

    Raises:
        ValueError: borders that do not fit the tokens, or a document without any.
    """
    ends = borders.tolist()
    if len(ends) < 2 or ends[0] != 0 or ends[-1] != sum(tokens):
        raise ValueError(
            f"cu_seqlens must run from 0 to the {sum(tokens)} tokens of all ranks, not "
            f"{ends if len(ends) < 2 else f'from {ends[0]} to {ends[-1]}'}: every rank is given "
            "the borders of the whole sequence"
        )
    if any(a >= b for a, b in pairwise(ends)):
        raise ValueError(
            "cu_seqlens must grow: a document shared by several ranks has at least one token"
        )
    first = (0, *accumulate(tokens))[rank]
    stop = first + tokens[rank]
    inside = [end for end in ends if first < end < stop or (end == stop and end < ends[-1])]
    local = [0, *(end - first for end in inside), tokens[rank]]
    earliest = sum(end <= first for end in ends) - 1
    documents = [min(earliest + i, len(ends) - 2) for i in range(len(local) - 1)]
    return borders.new_tensor(local), documents
