"""Attention masks of a decoder: which new tokens are valid, and where documents start.

In a causal mask each valid token attends to itself and padding to nothing, so the diagonal is the
padding mask. A document starts at a valid token that does not attend to a valid token just before.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from recollect.lm.model.arguments import cu_seqlens_from_starts

__all__ = ["ParsedMask", "parse_attention_mask"]


class ParsedMask(NamedTuple):
    """The new tokens of a batch."""

    token_mask: Tensor | None = None  # [B, T], true at valid tokens; None if all are
    # boundaries of documents in the flattened batch; None if each row is one
    cu_seqlens: Tensor | None = None


# A decoder passes one mask to all its layers: its meaning, and the layers that have read it.
_parsed_masks = WeakTensorKeyDictionary()


def parse_attention_mask(
    mask: Tensor | None,  # [B, S], or [B or 1, heads, T, S] of booleans or numbers added to scores
    x: Tensor,  # [B, T, ...]
    cu_seqlens: Tensor | None = None,  # of packed documents, which replace the mask
    *,
    layer_idx: int,
) -> ParsedMask:
    """Return the valid tokens and documents of a mask, parsed once per forward pass.

    Raises ValueError for a mask of another shape, or a mask that a memory cannot follow.
    """
    if mask is None or cu_seqlens is not None:
        return ParsedMask(cu_seqlens=cu_seqlens)
    if not isinstance(mask, Tensor) or torch.compiler.is_compiling():
        return _parse(mask, *x.shape[:2])
    entry = _parsed_masks.get(mask)
    if entry is None or layer_idx in entry[1]:  # the mask may have changed since the last pass
        entry = _parsed_masks[mask] = _parse(mask, *x.shape[:2]), set()
    parsed, readers = entry
    readers.add(layer_idx)
    return parsed  # type: ignore[no-any-return]


def _parse(mask: Tensor, B: int, T: int) -> ParsedMask:
    if not isinstance(mask, Tensor) or mask.dim() not in (2, 4) or mask.shape[-1] < T:
        shape = list(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        raise ValueError(
            f"attention_mask must have shape [B, S] or [B, 1, {T}, S], not {shape}: load the model "
            "with attn_implementation='sdpa' or 'eager'"
        )
    if mask.dim() == 2:
        valid = mask[:, -T:] != 0
        return ParsedMask(None if bool(valid.all()) else valid)
    if mask.shape[2] != T:
        raise ValueError(f"attention_mask must have shape [B, 1, {T}, S], not {list(mask.shape)}")
    attends = mask[:, 0] if mask.dtype == torch.bool else mask[:, 0] > -1
    attends = attends.expand(B, T, mask.shape[-1])
    past_length = mask.shape[-1] - T
    valid = attends.diagonal(past_length, dim1=1, dim2=2).clone()  # a view would keep the mask
    previous = attends.diagonal(past_length - 1, dim1=1, dim2=2)[:, -(T - 1) :]
    starts = valid[:, 1:] & valid[:, :-1] & ~previous if T > 1 else valid[:, :0]
    is_future = attends.triu(past_length + 1).any()
    flags = torch.stack([is_future, starts.any(), valid.all()])  # one synchronisation
    sees_future, has_starts, is_full = flags.tolist()
    if sees_future:
        raise ValueError(
            "attention_mask lets tokens attend to later ones, and a memory depends on earlier "
            "tokens only: give a causal mask"
        )
    if has_starts and not is_full:
        raise ValueError(
            "attention_mask has padding and boundaries of packed documents, and a batch has one or "
            "the other: pack rows that are full"
        )
    return ParsedMask(
        None if is_full else valid, cu_seqlens_from_starts(starts) if has_starts else None
    )
