"""Fixed-length rows of tokens from documents, and batches of rows.

A row has ``context`` tokens: documents one after another, with the last one continued in the next
row. A batch with document boundaries becomes one row with ``cu_seqlens``, and a batch without them
stays ``[B, T]``. In both, the memory is reset at every document.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset
from transformers import PreTrainedTokenizerFast

from recollect.functional.packing import document_batches
from recollect.lm.data.sources import iter_chunks
from recollect.lm.data.tokenizers import encode

__all__ = [
    "PackedDataset",
    "PackedRow",
    "PackedStream",
    "collate",
    "pack",
    "pad_documents",
    "read_rows",
]

IGNORE_INDEX = -100


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedRow:
    """Tokens of one row and the positions at which its documents start."""

    tokens: np.ndarray  # int32 [context]
    starts: tuple[int, ...]  # increasing, the first is 0


@dataclass
class TextStats:
    """Size of the documents read so far, for bits per byte."""

    tokens: int = 0
    bytes: int = 0

    @property
    def bytes_per_token(self) -> float:
        """Bytes per token, 1 for an empty text; the end of a document is a token of no bytes."""
        return self.bytes / self.tokens if self.tokens else 1.0


def pack(
    documents: Iterable[str],
    tokenizer: PreTrainedTokenizerFast,
    *,
    context: int,
    stats: TextStats | None = None,  # is updated
) -> Iterator[PackedRow]:
    """Yield rows of exactly ``context`` tokens; an incomplete last row is dropped."""
    parts: list[np.ndarray] = []
    starts: list[int] = []
    filled, starts_document = 0, True
    for text, is_last in iter_chunks(documents):
        tokens = encode(tokenizer, text, add_eos=is_last)
        if stats is not None:
            stats.tokens += len(tokens)
            stats.bytes += len(text.encode("utf-8"))
        while len(tokens):
            part = tokens[: context - filled]
            if starts_document or not filled:
                starts.append(filled)
            starts_document = False
            parts.append(part)
            filled += len(part)
            tokens = tokens[len(part) :]
            if filled == context:
                yield PackedRow(tokens=np.concatenate(parts), starts=tuple(starts))
                parts, starts, filled = [], [], 0
        starts_document = starts_document or is_last


@dataclass(eq=False)
class PackedDataset(Dataset[PackedRow]):
    """Rows in memory, repeated epoch after epoch in an order that is a function of the seed alone.

    A resumed run therefore reads the rows that an uninterrupted run reads.
    """

    rows: Sequence[PackedRow]
    length: int  # number of rows of the whole run
    seed: int | None  # None keeps the order of the rows

    def __post_init__(self) -> None:
        self._permutation: tuple[int, np.ndarray] | None = None  # epoch, order

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> PackedRow:
        if not 0 <= index < self.length:
            raise IndexError(index)
        epoch, position = divmod(index, len(self.rows))
        if self.seed is None:
            return self.rows[position]
        if self._permutation is None or self._permutation[0] != epoch:
            generator = np.random.default_rng((self.seed, epoch))
            self._permutation = epoch, generator.permutation(len(self.rows))
        return self.rows[self._permutation[1][position]]


@dataclass(eq=False)
class PackedStream(IterableDataset[PackedRow]):
    """Rows that are read during training; after the last document the first one follows again.

    Iteration raises a ValueError if the documents do not fill one row.
    """

    documents: Iterable[str]  # can be iterated again
    tokenizer: PreTrainedTokenizerFast
    context: int
    length: int  # number of rows of the whole run
    shuffle: int  # rows in the buffer from which one is drawn; 1 keeps the order
    seed: int
    source_name: str = "the text"  # name of the text in messages

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[PackedRow]:
        return islice(self._iter_forever(), self.length)

    def _iter_forever(self) -> Iterator[PackedRow]:
        generator = np.random.default_rng(self.seed)
        buffer: list[PackedRow] = []
        while True:
            is_empty = True
            for row in pack(self.documents, self.tokenizer, context=self.context):
                is_empty = False
                buffer.append(row)
                if len(buffer) >= self.shuffle:
                    yield _pop_random(buffer, generator)
            if is_empty:
                raise _too_short(self.source_name, self.context)
            while buffer:
                yield _pop_random(buffer, generator)


def _pop_random(buffer: list[PackedRow], generator: np.random.Generator) -> PackedRow:
    """Remove a random row of the buffer; the last row takes its place."""
    index = int(generator.integers(len(buffer)))
    buffer[index], buffer[-1] = buffer[-1], buffer[index]
    return buffer.pop()


def _too_short(source_name: str, context: int) -> ValueError:
    return ValueError(
        f"{source_name} does not fill one row of {context} tokens: shorten context in [data], or "
        "give more"
    )


def read_rows(
    documents: Iterable[str],
    tokenizer: PreTrainedTokenizerFast,
    *,
    context: int,
    source_name: str = "the text",  # name of the text in messages
) -> tuple[list[PackedRow], TextStats]:
    """Return all rows of documents and the size of the text, which fills at least one row."""
    stats = TextStats()
    rows = list(pack(documents, tokenizer, context=context, stats=stats))
    if not rows:
        raise _too_short(source_name, context)
    return rows, stats


def collate(
    rows: Sequence[PackedRow],
    *,
    reset_memory: bool,  # at every document; otherwise a row is one sequence
    flatten: bool = True,  # whether rows with document boundaries become one row
) -> dict[str, Tensor]:
    """Return ``input_ids``, ``labels`` and, with document boundaries, ``cu_seqlens`` of rows."""
    tokens = torch.from_numpy(np.stack([row.tokens for row in rows])).long()  # [B, T]
    if not reset_memory or all(len(row.starts) == 1 for row in rows):
        return {"input_ids": tokens, "labels": tokens.clone()}
    T = tokens.shape[1]
    starts = [i * T + start for i, row in enumerate(rows) for start in row.starts]
    labels = tokens.view(1, -1).clone()
    labels[0, starts] = IGNORE_INDEX  # no token precedes the first one of a document
    return {
        "input_ids": tokens.view(1, -1) if flatten else tokens,
        "labels": labels if flatten else labels.view_as(tokens),
        "cu_seqlens": torch.tensor([*starts, tokens.numel()]),
    }


def pad_documents(batch: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    """Return the packed documents of a batch as rows, for models that read padding alone.

    Documents of similar lengths are one batch with an ``attention_mask``, so that padding at most
    doubles the number of tokens. Documents without a target are left out.
    """
    if "cu_seqlens" not in batch:
        return [dict(batch)]
    groups = [
        {
            "input_ids": documents.gather(batch["input_ids"], 0),
            "labels": documents.gather(batch["labels"], IGNORE_INDEX),
            "attention_mask": documents.mask.long(),
        }
        for documents in document_batches(batch["cu_seqlens"], batch["input_ids"])
    ]
    return [group for group in groups if group["input_ids"].shape[1] > 1] or groups
