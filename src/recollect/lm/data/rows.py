"""Rows of tokens from documents, and batches whose memory starts anew where a document does.

A row has ``context`` tokens: documents one after the other, the last one cut where the row ends and
going on in the next row. A batch of rows that hold borders becomes one row of all their tokens with
``cu_seqlens``; a batch without any is passed on as it is. Both mean the same: every stretch of a
document alone, from an empty memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset
from transformers import PreTrainedTokenizerFast

from recollect.lm.data.tokenizers import encode

__all__ = ["Row", "RowStream", "Rows", "collate", "pack", "read_rows"]

IGNORE = -100


@dataclass(frozen=True, kw_only=True)
class Row:
    """``context`` tokens and the places at which a document starts, 0 first.

    Attributes:
        tokens: int32 ``[context]``. starts: increasing, the first is 0.
    """

    tokens: np.ndarray
    starts: tuple[int, ...]


@dataclass
class Tally:
    """What was read so far, for bits per byte.

    Attributes:
        documents, tokens, bytes: of the documents read.
    """

    documents: int = 0
    tokens: int = 0
    bytes: int = 0

    @property
    def bytes_per_token(self) -> float:
        """1 where nothing was read."""
        # The end of a document is a token of no bytes; it is predicted like any other.
        return self.bytes / self.tokens if self.tokens else 1.0


def pack(
    documents: Iterable[str],
    tokenizer: PreTrainedTokenizerFast,
    *,
    context: int,
    tally: Tally | None = None,
) -> Iterator[Row]:
    """Rows of exactly ``context`` tokens; what does not fill a last row is dropped.

    Args:
        documents: texts. tokenizer: as in `encode`. context: tokens per row.
        tally: counts what is read.
    """
    pieces: list[np.ndarray] = []
    starts: list[int] = []
    filled = 0
    for text in documents:
        tokens = encode(tokenizer, text)
        if tally is not None:
            tally.documents += 1
            tally.tokens += len(tokens)
            tally.bytes += len(text.encode("utf-8"))
        while len(tokens):
            taken = tokens[: context - filled]
            starts.append(filled)
            pieces.append(taken)
            filled += len(taken)
            tokens = tokens[len(taken) :]
            if filled == context:
                yield Row(tokens=np.concatenate(pieces), starts=tuple(starts))
                pieces, starts, filled = [], [], 0


class Rows(Dataset[Row]):
    """Rows in memory, in an order drawn from a seed: as many as a run takes, epoch after epoch.

    The order is a function of the seed alone, so a run that goes on meets the rows it would have.

    Args:
        rows: all rows. length: how many to give. seed: of the order; ``None`` keeps it.
    """

    def __init__(self, rows: Sequence[Row], *, length: int, seed: int | None) -> None:
        self.rows, self.length, self.seed = rows, length, seed
        self._epoch: tuple[int, np.ndarray] | None = None

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Row:
        if not 0 <= index < self.length:
            raise IndexError(index)
        epoch, place = divmod(index, len(self.rows))
        if self.seed is None:
            return self.rows[place]
        if self._epoch is None or self._epoch[0] != epoch:
            draw = np.random.default_rng((self.seed, epoch))
            self._epoch = epoch, draw.permutation(len(self.rows))
        return self.rows[self._epoch[1][place]]


class RowStream(IterableDataset[Row]):
    """Rows made while they are asked for, from the beginning again when the documents end.

    As many as a run takes, as in `Rows`: a run that is over asks for none when it is resumed.

    Args:
        documents: can be iterated again. tokenizer, context: as in `pack`.
        length: how many to give.
        shuffle: how many rows the buffer holds, of which one is drawn; 1 keeps the order.
        seed: of the draws.
        what: names the documents in a message.

    Raises:
        ValueError: documents that fill no row, when the first is asked for.
    """

    def __init__(
        self,
        documents: Iterable[str],
        tokenizer: PreTrainedTokenizerFast,
        *,
        context: int,
        length: int,
        shuffle: int,
        seed: int,
        what: str = "the text",
    ) -> None:
        self.documents, self.tokenizer, self.context = documents, tokenizer, context
        self.what = what
        self.length, self.shuffle, self.seed = length, shuffle, seed
        self.tally = Tally()

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[Row]:
        return islice(self._endless(), self.length)

    def _endless(self) -> Iterator[Row]:
        draw = np.random.default_rng(self.seed)
        buffer: list[Row] = []
        while True:
            made = 0
            for row in pack(self.documents, self.tokenizer, context=self.context, tally=self.tally):
                made += 1
                buffer.append(row)
                if len(buffer) >= self.shuffle:
                    yield _drawn(buffer, draw)
            if not made:
                raise ValueError(_TOO_SHORT.format(what=self.what, context=self.context))
            while buffer:
                yield _drawn(buffer, draw)


def _drawn(buffer: list[Row], draw: np.random.Generator) -> Row:
    """One of the rows in the buffer, whose place the last one takes."""
    place = int(draw.integers(len(buffer)))
    buffer[place], buffer[-1] = buffer[-1], buffer[place]
    return buffer.pop()


_TOO_SHORT = (
    "{what} does not fill one row of {context} tokens: shorten context in [data], or give more"
)


def read_rows(
    documents: Iterable[str],
    tokenizer: PreTrainedTokenizerFast,
    *,
    context: int,
    what: str = "the text",
) -> tuple[list[Row], Tally]:
    """All rows of some documents, and what was read.

    Args:
        documents, tokenizer, context: as in `pack`.
        what: names the documents in a message.

    Raises:
        ValueError: documents that fill no row.
    """
    tally = Tally()
    rows = list(pack(documents, tokenizer, context=context, tally=tally))
    if not rows:
        raise ValueError(_TOO_SHORT.format(what=what, context=context))
    return rows, tally


def collate(rows: Sequence[Row], *, reset: bool, flat: bool = True) -> dict[str, Tensor]:
    """A batch: ``input_ids``, ``labels`` of that shape, and ``cu_seqlens`` where there are borders.

    Args:
        rows: of one length. reset: whether the memory starts anew at every document; otherwise a
            row is one sequence. flat: whether rows that hold borders become one.
    """
    tokens = torch.from_numpy(np.stack([row.tokens for row in rows])).long()  # [B, T]
    if not reset or all(len(row.starts) == 1 for row in rows):
        return {"input_ids": tokens, "labels": tokens.clone()}
    T = tokens.shape[1]
    starts = [i * T + start for i, row in enumerate(rows) for start in row.starts]
    labels = tokens.view(1, -1).clone()
    labels[0, starts] = IGNORE  # nothing precedes a document's first token
    return {
        "input_ids": tokens.view(1, -1) if flat else tokens,
        "labels": labels if flat else labels.view_as(tokens),
        "cu_seqlens": torch.tensor([*starts, tokens.numel()]),
    }
