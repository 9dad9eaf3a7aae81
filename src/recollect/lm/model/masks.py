"""Attention masks of a decoder: which new columns are real, and where documents begin.

A causal mask with padding lets each real token see itself, and no padded one, so its diagonal is
the padding; where it does not let a real token see the real one before, a document begins.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Columns", "columns"]


@dataclass(frozen=True, kw_only=True)
class Columns:
    """The new columns of a batch.

    Attributes:
        mask: ``[B, T]``, True at real tokens; ``None`` where all are.
        borders: of documents, in all rows one after the other; ``None`` where rows are documents.
    """

    mask: Tensor | None = None
    borders: Tensor | None = None


def columns(mask: Tensor | None, x: Tensor, borders: Tensor | None = None) -> Columns:
    """What a mask says.

    Args:
        mask: ``None``, ``[B, S]`` of all columns, or ``[B or 1, heads, T, S]``: of booleans, or of
            numbers to add to scores, 0 where a token is seen.
        x: ``[B, T, ...]``.
        borders: of packed documents, given beside the mask (B = 1).

    Raises:
        ValueError: a mask of another shape, or one that no memory can follow.
    """
    B, T = x.shape[:2]
    if borders is not None:
        return Columns(borders=borders)
    if mask is None:
        return Columns()
    if not isinstance(mask, Tensor) or mask.dim() not in (2, 4) or mask.shape[-1] < T:
        shape = list(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        raise ValueError(
            f"attention_mask must have shape [B, S] or [B, 1, {T}, S], not {shape}: load the model "
            "with attn_implementation='sdpa' or 'eager'"
        )
    if mask.dim() == 2:
        return _real(mask[:, -T:] != 0)
    if mask.shape[2] != T:
        raise ValueError(f"attention_mask must have shape [B, 1, {T}, S], not {list(mask.shape)}")
    seen = mask[:, 0] if mask.dtype == torch.bool else mask[:, 0] > -1
    seen = seen.expand(B, T, mask.shape[-1])
    past = mask.shape[-1] - T
    if bool(seen.triu(past + 1).any()):
        raise ValueError(
            "attention_mask lets tokens see later ones, and a memory knows only the past: give a "
            "causal mask"
        )
    real = seen.diagonal(past, dim1=1, dim2=2)
    before = seen.diagonal(past - 1, dim1=1, dim2=2)[:, -(T - 1) :] if T > 1 else real[:, :0]
    begins = real[:, 1:] & real[:, :-1] & ~before
    if not bool(begins.any()):
        return _real(real)
    if not bool(real.all()):
        raise ValueError(
            "attention_mask has padding and borders of packed documents, and a batch has one or "
            "the other: pack rows that are full"
        )
    starts = torch.cat([torch.ones_like(begins[:, :1]), begins], 1).flatten().nonzero()[:, 0]
    return Columns(borders=torch.cat([starts, starts.new_tensor([B * T])]))


def _real(real: Tensor) -> Columns:
    # Without padding the rows need no compaction; asking costs less than doing it for nothing.
    return Columns() if bool(real.all()) else Columns(mask=real)
