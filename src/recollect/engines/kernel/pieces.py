"""Queries in pieces, each with the keys that any of them sees, so that memory stays O(T)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from recollect.choices.context.weights import ContextWeights, VisibleAssociations
from recollect.choices.matmul_precision import active, matmul_precision
from recollect.choices.runtime import can_read_values

if TYPE_CHECKING:
    from recollect.recipe.recipe import Recipe

__all__ = [
    "PIECE",
    "DecayCutoff",
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
            more: dict[str, Any] = {}
            if active.precision is not None:
                # A compiler refuses a context_fn, even the one that does nothing.
                device_type = visible.q.device.type
                more["context_fn"] = partial(_contexts, active.precision, device_type)
            result = checkpoint(piece, queries, keys, use_reentrant=False, **more)
        else:
            result = piece(queries, keys)
        assert isinstance(result, Tensor)
        yield result


def _contexts(
    precision: str, device_type: str
) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Return the contexts of a piece's first run and of its recomputation."""
    return nullcontext(), matmul_precision(precision, device_type)


def slices(
    visible: VisibleAssociations, horizon: int | None, size: int
) -> Iterator[tuple[slice, slice]]:
    """Pieces of ``size`` queries in order, each with the keys that any of them sees."""
    T, n = visible.q.shape[1], visible.k.shape[1]
    for start in range(0, T, size):
        stop, low = min(start + size, T), 0
        if horizon is not None:
            low = max(
                (visible.first_slot + start + 1 if visible.first_slot < n else n) - horizon, 0
            )
        yield slice(start, stop), slice(low, min(visible.first_slot + stop, n))


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
    if visible.first_slot >= n:
        return valid.expand(-1, queries.stop - queries.start, -1) if gapped else None
    query = visible.query_slots[queries, None]
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
    parts = (part.over(visible) for part in recipe.context.restrictions)
    return [weights for weights in parts if weights is not None]


@dataclass(frozen=True, kw_only=True)
class DecayCutoff:
    """Which associations a decay leaves a weight that changes a digit.

    With logits q_t·k_i + d_ti, |q·k| ≤ L and d_tt = 0 for a query's own association, association i
    has at most e^(2L + d_ti) of the softmax. Where that is below ε^2.5 it changes no digit of
    float32 or float64, but costs as much as any other; and between e^−103 and e^−87 its probability
    is a subnormal number of float32, with which a product takes a processor ten times as long
    (measured: FoX at 4096 tokens, forward and backward, 5.2 s with and 0.9 s without them on one
    core).

    Attributes:
        of_key: logarithms of the weights up to something of the query alone, ``[B, n, H]``.
        furthest: how far below a query's own association a logarithm may lie; inf for any.
    """

    of_key: Tensor
    furthest: float

    @classmethod
    def of(
        cls, of_key: Tensor, q: Tensor, k: Tensor, *, scale: float, by_length: float
    ) -> DecayCutoff:
        """From queries and keys ``[..., K]`` with logits scale·q·k + by_length·‖k‖²."""
        if not can_read_values(q) or not q.numel() or not k.numel():
            return cls(of_key=of_key.detach(), furthest=math.inf)
        longest = [x.detach().square().sum(-1).amax() for x in (q, k)]
        most = abs(scale) * (longest[0] * longest[1]).sqrt() + abs(by_length) * longest[1]
        least = 2.5 * math.log(torch.finfo(k.dtype).eps)
        return cls(of_key=of_key.detach(), furthest=float(2 * most) - least)

    def negligible(self, own: Tensor, keys: slice) -> Tensor:
        """``[B, m, H]``: keys that no query with its own association in slots ``own`` can weigh."""
        lowest = self.of_key[:, own].amin(1, keepdim=True)
        return self.of_key[:, keys] < lowest - self.furthest

    def first_keys(self, slots: Tensor, cuts: list[tuple[slice, slice]]) -> dict[int, int]:
        """By each piece's first query, the first key that one of its queries may weigh."""
        if math.isinf(self.furthest):
            return {}
        gone = [self.negligible(slots[queries], keys).all(-1).all(0) for queries, keys in cuts]
        firsts = [keys_gone.logical_not().to(torch.uint8).argmax() for keys_gone in gone]
        return {
            queries.start: keys.start + low
            for (queries, keys), low in zip(cuts, torch.stack(firsts).tolist(), strict=True)
        }
