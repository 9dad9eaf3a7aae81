"""Padding and packed documents, converted to dense sequences padded on the right."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from recollect.engines.common.problem import Problem
from recollect.state.state import State, join_states

__all__ = [
    "CompactedBatch",
    "DocumentBatch",
    "compact",
    "document_batches",
    "last_tokens",
    "prepend_tokens",
    "run_compacted",
    "run_documents",
    "scatter",
    "select_tokens",
    "token_counts",
]


@dataclass(frozen=True, kw_only=True)
class CompactedBatch:
    """Indices of each sequence's real tokens."""

    index: Tensor  # [B, T], real tokens first, in order
    lengths: Tensor  # real tokens per sequence [B]

    @property
    def mask(self) -> Tensor:
        """``[B, T]``: which tokens of a compacted sequence are real."""
        return torch.arange(self.index.shape[1], device=self.index.device) < self.lengths[:, None]

    @property
    def attention_mask(self) -> Tensor:
        """``[B, T]``: which tokens of an uncompacted sequence are real."""
        return torch.zeros_like(self.mask).scatter(1, self.index, self.mask)

    def gather(self, x: Tensor, fill: float = 0.0) -> Tensor:
        """Move real tokens to the left and fill the rest, whose values may be NaN."""
        shape = (*self.index.shape, *(1,) * (x.dim() - 2))
        tokens = x.gather(1, self.index.view(shape).expand_as(x))
        return torch.where(self.mask.view(shape), tokens, fill)


@dataclass(frozen=True, kw_only=True)
class DocumentBatch(CompactedBatch):
    """Documents of one sequence as separate sequences; indices are those of the one sequence."""

    documents: Tensor  # numbers of the documents, [B]

    def gather(self, x: Tensor, fill: float = 0.0) -> Tensor:
        """Return the documents of ``x [1, T, ...]``, padded on the right."""
        shape = (*self.index.shape, *(1,) * (x.dim() - 2))
        return torch.where(self.mask.view(shape), x[0][self.index], fill)


def compact(mask: Tensor) -> CompactedBatch:
    """Index the real tokens of an attention mask ``[B, T]``, padded on either side or with gaps."""
    real = mask.bool()
    index = (~real).long().argsort(dim=1, stable=True)
    return CompactedBatch(index=index, lengths=real.sum(1))


def scatter(y: Tensor, batch: CompactedBatch) -> Tensor:
    """Undo `CompactedBatch.gather` on outputs; masked tokens get 0."""
    shape = (*batch.index.shape, *(1,) * (y.dim() - 2))
    y = torch.where(batch.mask.view(shape), y, 0.0)
    return torch.zeros_like(y).scatter(1, batch.index.view(shape).expand_as(y), y)


def last_tokens(x: Tensor, n: int, lengths: Tensor | None) -> Tensor:
    """Return the last n valid tokens of each sequence of ``x [B, n + T, ...]``.

    The first n tokens are valid, and ``lengths [B]`` of the other T; all are without ``lengths``.
    """
    if lengths is None:
        return x[:, x.shape[1] - n :]
    index = lengths[:, None] + torch.arange(n, device=x.device)
    index = index.view(*index.shape, *(1,) * (x.dim() - 2))
    return x.gather(1, index.expand(-1, -1, *x.shape[2:]))


def document_batches(
    boundaries: Tensor, x: Tensor, *, in_one_batch: bool = False
) -> Iterator[DocumentBatch]:
    """Batch the documents of ``x [1, T, ...]`` by length, within a factor of two.

    Padding then at most doubles the number of tokens. With ``in_one_batch``, there is one batch.
    """
    starts, lengths = boundaries[:-1].tolist(), boundaries.diff().tolist()
    groups: dict[int, list[int]] = {}
    for document, length in enumerate(lengths):
        key = 0 if in_one_batch else max(length - 1, 0).bit_length()
        groups.setdefault(key, []).append(document)
    device, last = x.device, max(x.shape[1] - 1, 0)
    for group in groups.values():
        size = torch.tensor([lengths[d] for d in group], device=device)
        start = torch.tensor([starts[d] for d in group], device=device)
        steps = torch.arange(int(size.max()), device=device)
        yield DocumentBatch(
            index=(start[:, None] + steps).clamp_max(last),
            lengths=size,
            documents=torch.tensor(group, device=device),
        )


def token_counts(x: Tensor, mask: Tensor | None, cu_seqlens: Tensor | None) -> Tensor:
    """Return the number of real tokens of each sequence of ``x [B, T, ...]``, ``[B]``."""
    if cu_seqlens is not None:
        return cu_seqlens.diff().to(device=x.device, dtype=torch.long)
    if mask is not None:
        return (mask != 0).sum(1)
    return torch.full((x.shape[0],), x.shape[1], device=x.device)


def prepend_tokens(
    tokens: Tensor, x: Tensor, mask: Tensor | None, is_start: Tensor | bool
) -> tuple[Tensor, Tensor | None]:
    """Put tokens ``[B, n, d_model]`` before x and its mask, masked for sequences that continue.

    ``is_start`` is whether all sequences begin, or which do, ``[B]``. The mask is ``None`` if all
    tokens are real.
    """
    stream = torch.cat([tokens, x], dim=1)
    if mask is None and is_start is True:
        return stream, None
    real = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device) if mask is None else mask != 0
    front = torch.ones_like(tokens[..., 0], dtype=torch.bool)
    if isinstance(is_start, Tensor):
        front = front & is_start[:, None]
    return stream, torch.cat([front, real], dim=1)


# -- calls ----------------------------------------------------------------------------------------

Run = Callable[[Problem], tuple[Tensor, State]]


def select_tokens(call: Problem, batch: CompactedBatch) -> Problem:
    """Return the call of a batch's real tokens.

    Padding holds valid numbers, so that gradients of discarded tokens are finite.
    """
    fills = call.bound.padding_values
    return replace(
        call,
        q=batch.gather(call.q),
        k=batch.gather(call.k),
        v=batch.gather(call.v),
        gates={name: batch.gather(x, fills[name]) for name, x in call.gates.items()},
        attention_mask=None,
        cu_seqlens=None,
        lengths=batch.lengths,
        source_index=batch.index,
    )


def run_compacted(run: Run, call: Problem) -> tuple[Tensor, State]:
    """Run a call without the tokens that its mask excludes."""
    assert call.attention_mask is not None
    batch = compact(call.attention_mask)
    y, state = run(select_tokens(call, batch))
    return scatter(y, batch), state


def run_documents(run: Run, call: Problem) -> tuple[Tensor, State]:
    """Run documents packed in one sequence as sequences of their own."""
    assert call.cu_seqlens is not None
    outputs: list[Tensor] = []
    indices: list[Tensor] = []
    states: list[State] = []
    order: list[Tensor] = []
    for batch in document_batches(call.cu_seqlens, call.k):
        piece = replace(select_tokens(call, batch), rows_are_documents=True)
        if call.state is not None:
            piece.state = call.state.select(batch.documents)
        y, state = run(piece)
        outputs.append(y[batch.mask])
        indices.append(batch.index[batch.mask])
        states.append(state)
        order.append(batch.documents)
    y = torch.cat(outputs)
    out = torch.zeros_like(y).index_copy(0, torch.cat(indices), y).unsqueeze(0)
    return out, join_states(states).select(torch.cat(order).argsort())
