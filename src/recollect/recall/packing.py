"""Padding and packed documents, converted to dense rows padded on the right."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from recollect.recall.call import Call
from recollect.state.state import State, join_states

__all__ = ["CompactedBatch", "compact", "run_compacted", "run_documents", "scatter", "taken"]


@dataclass(frozen=True, kw_only=True)
class CompactedBatch:
    """Where each row's real tokens are.

    Attributes:
        index: ``[B, T]``, real tokens first, in order.
        lengths: real tokens per row ``[B]``.
    """

    index: Tensor
    lengths: Tensor

    @property
    def real(self) -> Tensor:
        """``[B, T]``: which slots of a compacted row are real."""
        return torch.arange(self.index.shape[1], device=self.index.device) < self.lengths[:, None]

    def gather(self, x: Tensor, fill: float = 0.0) -> Tensor:
        """Real tokens to the left; the rest is ``fill``, whatever stood there (it may be NaN)."""
        shape = (*self.index.shape, *(1,) * (x.dim() - 2))
        moved = x.gather(1, self.index.view(shape).expand_as(x))
        return torch.where(self.real.view(shape), moved, fill)


def compact(mask: Tensor) -> CompactedBatch:
    """An attention mask ``[B, T]`` (nonzero = real), padded on either side or with gaps."""
    real = mask.bool()
    index = (~real).long().argsort(dim=1, stable=True)
    return CompactedBatch(index=index, lengths=real.sum(1))


def scatter(y: Tensor, batch: CompactedBatch) -> Tensor:
    """Undo `CompactedBatch.gather` on outputs; masked tokens read 0."""
    shape = (*batch.index.shape, *(1,) * (y.dim() - 2))
    y = torch.where(batch.real.view(shape), y, 0.0)
    return torch.zeros_like(y).scatter(1, batch.index.view(shape).expand_as(y), y)


Run = Callable[[Call], tuple[Tensor, State]]


def run_compacted(run: Run, call: Call) -> tuple[Tensor, State]:
    """Run a call without the tokens that its mask excludes.

    Args:
        run: of dense calls.
        call: with an attention mask.
    """
    assert call.attention_mask is not None
    batch = compact(call.attention_mask)
    y, after = run(taken(call, batch, batch.gather))
    return scatter(y, batch), after


def run_documents(run: Run, call: Call) -> tuple[Tensor, State]:
    """Run documents packed in one row as rows of their own.

    Documents of like length (within a factor of two) share a call, so padding at most doubles the
    tokens, however uneven the lengths.

    Args:
        run: of dense calls.
        call: of one row, with the borders of its documents.
    """
    borders = call.cu_seqlens
    assert borders is not None
    starts, lengths = borders[:-1].tolist(), borders.diff().tolist()
    groups: dict[int, list[int]] = {}
    for document, length in enumerate(lengths):
        groups.setdefault(max(length - 1, 0).bit_length(), []).append(document)
    pieces: list[Tensor] = []
    places: list[Tensor] = []
    states: list[State] = []
    order: list[int] = []
    device, total = call.k.device, call.k.shape[1]
    for documents in groups.values():
        size = torch.tensor([lengths[d] for d in documents], device=device)
        start = torch.tensor([starts[d] for d in documents], device=device)
        steps = torch.arange(int(size.max()), device=device)
        where = (start[:, None] + steps).clamp_max(max(total - 1, 0))
        batch = CompactedBatch(index=where, lengths=size)

        def take(x: Tensor, fill: float = 0.0, batch: CompactedBatch = batch) -> Tensor:
            shape = (*batch.index.shape, *(1,) * (x.dim() - 2))
            return torch.where(batch.real.view(shape), x[0][batch.index], fill)

        piece = taken(call, batch, take)
        if call.state is not None:
            here = call.state.select(torch.tensor(documents, device=device))
            piece = replace(piece, state=here)
        y, after = run(replace(piece, documents=True))
        pieces.append(y[batch.real])
        places.append(where[batch.real])
        states.append(after)
        order += documents
    y = torch.cat(pieces)
    out = torch.zeros_like(y).index_copy(0, torch.cat(places), y).unsqueeze(0)
    back = torch.tensor(order, device=device).argsort()
    return out, join_states(states).select(back)


def taken(call: Call, batch: CompactedBatch, take: Callable[..., Tensor]) -> Call:
    """The call of a batch's real tokens.

    Padding holds valid numbers, so that what is discarded cannot poison a gradient.
    """
    fills = call.bound.sized.fills
    return replace(
        call,
        q=take(call.q),
        k=take(call.k),
        v=take(call.v),
        gates={name: take(x, fills[name]) for name, x in call.gates.items()},
        attention_mask=None,
        cu_seqlens=None,
        lengths=batch.lengths,
        places=batch.index,
    )
