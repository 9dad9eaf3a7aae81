"""Queries in pieces, each with the keys that any of them sees, so that memory stays O(T)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from recollect.choices.context.weights import ContextWeights, VisibleAssociations

if TYPE_CHECKING:
    from recollect.recipe.recipe import Recipe

__all__ = [
    "PIECE",
    "context_weights",
    "piece_size",
    "piecewise",
    "seen",
    "seen_or_all",
    "slices",
]

PIECE = 256  # queries at a time, where the past is long
ENTRIES = 2**25  # numbers of one piece of logits


def piece_size(rows: int, n: int, size: int) -> int:
    """Queries of a piece: ``size``, or fewer where ``rows`` of n keys would fill the memory."""
    return max(1, min(size, ENTRIES // max(1, rows * n)))


def piecewise(
    visible: VisibleAssociations,
    piece: Callable[[slice, slice], Tensor],
    horizon: int | None,
    *,
    recompute: bool,
    size: int = PIECE,
) -> Iterator[Tensor]:
    """``piece(queries, keys)`` for all queries in order, with the keys that any of them sees.

    Args:
        recompute: keep nothing of a piece for the backward pass.
        size: queries at a time; fewer where the past is very long.
    """
    B, _, H, G, _ = visible.q.shape
    size = piece_size(B * H * G, visible.k.shape[1], size)
    for queries, keys in slices(visible, horizon, size):
        if recompute and torch.is_grad_enabled():
            result = checkpoint(piece, queries, keys, use_reentrant=False)
        else:
            result = piece(queries, keys)
        assert isinstance(result, Tensor)
        yield result


def slices(
    visible: VisibleAssociations, horizon: int | None, size: int
) -> Iterator[tuple[slice, slice]]:
    """Pieces of ``size`` queries in order, each with the keys that any of them sees."""
    T, n = visible.q.shape[1], visible.k.shape[1]
    for start in range(0, T, size):
        stop, low = min(start + size, T), 0
        if horizon is not None:
            low = max((visible.first + start + 1 if visible.first < n else n) - horizon, 0)
        yield slice(start, stop), slice(low, min(visible.first + stop, n))


def seen(
    visible: VisibleAssociations,
    queries: slice,
    keys: slice,
    horizon: int | None,
    *,
    gapped: bool = True,
) -> Tensor | None:
    """``[B or 1, C, m]``: which associations each query sees; ``None`` when it is all of them.

    A padded query sees itself, so that no softmax is empty.

    Args:
        gapped: whether slots may hold nothing.
    """
    n, device = visible.k.shape[1], visible.k.device
    key = torch.arange(keys.start, keys.stop, device=device)
    valid = visible.valid[:, None, keys]
    if visible.first >= n:
        return valid.expand(-1, queries.stop - queries.start, -1) if gapped else None
    query = visible.slots[queries, None]
    mask = (key <= query)[None]
    if horizon is not None:
        mask = mask & (key > query - horizon)
    return (mask & valid) | (key == query) if gapped else mask


def seen_or_all(
    visible: VisibleAssociations, queries: slice, keys: slice, horizon: int | None
) -> Tensor:
    """`seen`, with an empty past where a padded query would see itself: for sums."""
    mask = seen(visible, queries, keys, horizon)
    assert mask is not None
    return mask & visible.valid[:, None, keys]


def context_weights(visible: VisibleAssociations, recipe: Recipe) -> list[ContextWeights]:
    """The weights of everything that restricts the context, where they are not all 1."""
    parts = (part.over(visible) for part in recipe.context.within)
    return [weights for weights in parts if weights is not None]
