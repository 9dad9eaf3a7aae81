"""Position of a rank's tokens in their sequences.

Packed documents are split into pieces on each rank. The first piece continues the last piece of the
previous rank, and the next rank continues the last piece. If a document ends at the end of its
rank, an empty piece follows, with which the next document starts. All ranks therefore treat their
first and last piece alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from recollect.parallel.exchange import Exchange

__all__ = ["Segment", "local_pieces", "segment_of"]


@dataclass(frozen=True, kw_only=True)
class Segment:
    """One rank's tokens among those of all ranks."""

    exchange: Exchange
    tokens: tuple[int, ...]  # number of tokens T of each rank, including padding
    counts: Tensor  # number of valid tokens in the last piece of each rank [R, B]
    # number of tokens in the last piece of each rank, including padding
    longest_last_piece: tuple[int, ...]
    # whether a document starts within each rank, whose last piece then depends on no earlier rank
    starts_document: tuple[bool, ...]
    lengths: Tensor | None  # number of valid tokens of this rank [B], if it is padded on the right
    padded: bool  # whether any rank is padded
    start: int  # index of the first token of this rank's last piece

    @property
    def rank(self) -> int:
        """Rank of this process."""
        return self.exchange.link.rank

    @property
    def first_source_rank(self) -> int:
        """First rank with tokens of the document that this rank's first piece continues."""
        first = self.rank
        while first > 0 and not (first < self.rank and self.starts_document[first]):
            first -= 1
        return first

    @property
    def includes_start(self) -> bool:
        """Whether this rank's first piece continues the state before the sequence."""
        return self.rank == 0 or (self.first_source_rank == 0 and not self.starts_document[0])

    def position(self, initial: Tensor | None = None) -> Tensor:
        """Return the number of tokens of the document before this rank ``[B]``."""
        earlier = self.counts[self.first_source_rank : self.rank].sum(0)
        return earlier + initial if initial is not None and self.includes_start else earlier

    @property
    def host_position(self) -> int | None:
        """Value of every entry of `position`, if the host knows it."""
        if self.padded:
            return None
        if any(self.starts_document[: self.rank]):
            return None
        return sum(self.tokens[: self.rank])

    def preceding_tokens(
        self,
        x: Tensor,  # this rank's tokens [B, T, ...], padded on the right
        n: int | None,  # number of tokens, at least 1; None for all
        # tokens before the sequence [B, m, ...], aligned right, and their mask
        initial: tuple[Tensor, Tensor] | None = None,
        # last tokens of this rank's last piece [B, m, ...], aligned right; by default those of x
        last_tokens: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the n tokens before this rank ``[B, n, ...]``, and the mask of valid ones.

        They are aligned right, and 0 before the start of the document.
        """
        num_slots = max(self.tokens) if n is None else n
        slots = torch.arange(num_slots, device=x.device)
        if last_tokens is None:
            last = x[:, self.start :]
            num_valid = self.lengths
        else:
            last, num_valid = last_tokens, None
        if num_valid is None:
            num_valid = torch.full((last.shape[0],), last.shape[1], device=x.device)
        index = num_valid[:, None] - num_slots + slots  # [B, n]
        last_tokens = _gather_or_zero(last, index, index >= 0)  # [B, n, ...]
        gathered = self.exchange.gather(last_tokens)  # [R, B, n, ...]
        valid = slots >= num_slots - self.counts[:, :, None]  # [R, B, n]
        first_source_rank = self.first_source_rank
        blocks, masks = (
            list(gathered[first_source_rank : self.rank]),
            list(valid[first_source_rank : self.rank]),
        )
        if initial is not None and self.includes_start:
            blocks.insert(0, initial[0].to(last_tokens.dtype))
            masks.insert(0, initial[1])
        if not blocks:
            shape = (last_tokens.shape[0], n or 0, *last_tokens.shape[2:])
            return last_tokens.new_zeros(shape), valid.new_zeros(shape[:2])
        joined, mask = torch.cat(blocks, 1), torch.cat(masks, 1)
        if n is None and (self.padded or (initial is not None and self.includes_start)):
            n = int(mask.sum(1).max())
        elif n is None:  # known without a synchronisation
            n = sum(self.longest_last_piece[first_source_rank : self.rank])
        if mask.shape[1] < n:
            missing = n - mask.shape[1]
            blank = joined.new_zeros(last_tokens.shape[0], missing, *last_tokens.shape[2:])
            joined = torch.cat([blank, joined], 1)
            mask = torch.cat([mask.new_zeros(last_tokens.shape[0], missing), mask], 1)
        is_valid, order = mask.long().sort(dim=1, stable=True)  # valid tokens last, in order
        is_valid, order = (
            is_valid[:, is_valid.shape[1] - n :].bool(),
            order[:, order.shape[1] - n :],
        )
        return _gather_or_zero(joined, order, is_valid), is_valid

    def sum_over_preceding(self, x: Tensor) -> Tensor:
        """Sum ``x [B, ...]`` over the earlier ranks of the document of this rank's first piece."""
        gathered = self.exchange.gather(x)
        return gathered[self.first_source_rank : self.rank].sum(0)


def _gather_or_zero(x: Tensor, index: Tensor, mask: Tensor) -> Tensor:
    """Return ``x [B, T, ...]`` at ``index [B, n]``, and 0 if ``mask [B, n]`` is False."""
    shape = (*index.shape, *(1,) * (x.dim() - 2))
    if not x.shape[1]:
        return x.new_zeros(*index.shape, *x.shape[2:])
    index = index.clamp(0, x.shape[1] - 1).view(shape).expand(*index.shape, *x.shape[2:])
    zero = torch.zeros((), dtype=x.dtype, device=x.device)
    return torch.where(mask.view(shape), x.gather(1, index), zero)


def segment_of(
    exchange: Exchange,
    x: Tensor,  # this rank's tokens [B, T, ...]
    *,
    lengths: Tensor | None = None,  # number of valid tokens [B], for padding on the right
    boundaries: Tensor | None = None,  # [N + 1] boundaries of this rank's pieces (B = 1)
    same: tuple[tuple[str, int], ...] = (),  # integers by name that must be equal on all ranks
) -> Segment:
    """Exchange the numbers of tokens, and check that all ranks run equal calls.

    Raises:
        ValueError: ranks that differ, or a rank without a token.
    """
    B, T = x.shape[:2]
    start = 0 if boundaries is None else int(boundaries[-2])
    starts_document = boundaries is not None and boundaries.shape[0] > 2
    names = ("rows", "whether documents are packed", *(name for name, _ in same))
    consensus = (B, boundaries is not None, *(n for _, n in same))
    values = (*consensus, lengths is not None, T, T - start, starts_document)
    all_values = exchange.link.numbers(values, x.device)
    for index, name in enumerate(names):
        other = next(
            (r for r, row in enumerate(all_values) if row[index] != all_values[0][index]), None
        )
        if other is not None:
            raise ValueError(
                f"rank {other} disagrees with rank 0 on {name} ({all_values[other][index]} and "
                f"{all_values[0][index]}): call one layer on segments of the same sequences on all "
                "ranks"
            )
    tokens = tuple(row[-3] for row in all_values)
    if 0 in tokens:
        raise ValueError(
            f"rank {tokens.index(0)} has no token: split the sequence into at most as many "
            f"segments as it has tokens (T = {sum(tokens)})"
        )
    counts = x.new_tensor([row[-2] for row in all_values], dtype=torch.long)
    counts = counts[:, None].expand(-1, B)
    padded = any(row[-4] for row in all_values)
    if padded:
        counts = exchange.link.gather(counts[exchange.link.rank] if lengths is None else lengths)
    return Segment(
        exchange=exchange,
        tokens=tokens,
        counts=counts,
        longest_last_piece=tuple(row[-2] for row in all_values),
        starts_document=tuple(bool(row[-1]) for row in all_values),
        lengths=lengths,
        padded=padded,
        start=start,
    )


def local_pieces(
    boundaries: Tensor, tokens: tuple[int, ...], rank: int
) -> tuple[Tensor, list[int]]:
    """Return the boundaries of a rank's pieces, and the index of the document of each piece.

    ``boundaries [N + 1]`` are those of the documents in the full sequence.

    Raises:
        ValueError: boundaries that do not fit the tokens of the ranks, or a document without
            tokens.
    """
    ends = boundaries.tolist()
    if len(ends) < 2 or ends[0] != 0 or ends[-1] != sum(tokens):
        raise ValueError(
            f"cu_seqlens must run from 0 to the {sum(tokens)} tokens of all ranks, not "
            f"{ends}: pass the boundaries in the full sequence on every rank"
        )
    if any(a >= b for a, b in pairwise(ends)):
        raise ValueError(
            "cu_seqlens must increase: documents over several ranks have at least one token"
        )
    first = (0, *accumulate(tokens))[rank]
    stop = first + tokens[rank]
    inside = [end for end in ends if first < end < stop or (end == stop and end < ends[-1])]
    local = [0, *(end - first for end in inside), tokens[rank]]
    earliest = sum(end <= first for end in ends) - 1
    documents = [min(earliest + i, len(ends) - 2) for i in range(len(local) - 1)]
    return boundaries.new_tensor(local), documents
