"""Padding and packed documents, converted to dense rows padded on the right."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from recollect.state.state import State, join_states
from recollect.typing import Gates

__all__ = ["Rows", "compact", "pack_rows", "scatter"]


@dataclass(frozen=True, kw_only=True)
class Rows:
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


def compact(mask: Tensor) -> Rows:
    """Rows of an attention mask ``[B, T]`` (nonzero = real), padded on either side or with gaps."""
    real = mask.bool()
    return Rows(index=(~real).long().argsort(dim=1, stable=True), lengths=real.sum(1))


def scatter(y: Tensor, rows: Rows) -> Tensor:
    """Undo `Rows.gather` on outputs; masked tokens read 0."""
    shape = (*rows.index.shape, *(1,) * (y.dim() - 2))
    y = torch.where(rows.real.view(shape), y, 0.0)
    return torch.zeros_like(y).scatter(1, rows.index.view(shape).expand_as(y), y)


Call = Callable[[Tensor, Tensor, Tensor, Gates, Rows | None, State | None], tuple[Tensor, State]]


def pack_rows(
    call: Call,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: Gates,
    borders: Tensor,
    state: State | None,
    fills: Mapping[str, float],
) -> tuple[Tensor, State]:
    """Run documents packed in one row as rows of their own.

    Documents of like length (within a factor of two) share a call, so padding at most doubles the
    tokens, however uneven the lengths.
    """
    starts, lengths = borders[:-1].tolist(), borders.diff().tolist()
    groups: dict[int, list[int]] = {}
    for document, length in enumerate(lengths):
        groups.setdefault(max(length - 1, 0).bit_length(), []).append(document)
    pieces: list[Tensor] = []
    places: list[Tensor] = []
    states: list[State] = []
    order: list[int] = []
    total = k.shape[1]
    for documents in groups.values():
        size = torch.tensor([lengths[d] for d in documents], device=k.device)
        start = torch.tensor([starts[d] for d in documents], device=k.device)
        steps = torch.arange(int(size.max()), device=k.device)
        where = (start[:, None] + steps).clamp_max(max(total - 1, 0))
        rows = Rows(index=where, lengths=size)

        def take(x: Tensor, fill: float = 0.0, rows: Rows = rows) -> Tensor:
            shape = (*rows.index.shape, *(1,) * (x.dim() - 2))
            return torch.where(rows.real.view(shape), x[0][rows.index], fill)

        here = None
        if state is not None:
            here = state.select(torch.tensor(documents, device=k.device))
        y, after = call(
            take(q),
            take(k),
            take(v),
            {name: take(x, fills[name]) for name, x in gates.items()},
            rows,
            here,
        )
        pieces.append(y[rows.real])
        places.append(where[rows.real])
        states.append(after)
        order += documents
    y = torch.cat(pieces)
    out = torch.zeros_like(y).index_copy(0, torch.cat(places), y).unsqueeze(0)
    back = torch.tensor(order, device=k.device).argsort()
    return out, join_states(states).select(back)
