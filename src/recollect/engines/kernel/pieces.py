"""Pieces of queries, each with the keys that any of them sees, for memory O(T)."""

from __future__ import annotations

import math
from collections.abc import Callable
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
    "Pieces",
    "context_weights",
    "cut",
    "piece_size",
    "piecewise",
    "strict_visibility_mask",
    "visibility_mask",
]

PIECE = 256  # queries of a piece with a long past
ENTRIES = 2**25  # logits of one piece


Pieces = list[tuple[slice, slice]]
"""Pieces of queries in order, each with the keys that any of them sees."""


def piece_size(rows: int, n: int, size: int = PIECE) -> int:
    """Return the number of queries per piece: ``size``, or fewer if the logits exceed `ENTRIES`."""
    return max(1, min(size, ENTRIES // max(1, rows * n)))


def cut(visible: VisibleAssociations, horizon: int | None, size: int | None = None) -> Pieces:
    """Return pieces of ``size`` queries, by default of `piece_size`."""
    B, T, H, G, _ = visible.q.shape
    n, first = visible.k.shape[1], visible.first_slot
    size = piece_size(B * H * G, n) if size is None else size
    pieces: Pieces = []
    for start in range(0, T, size):
        stop, low = min(start + size, T), 0
        if horizon is not None:
            low = max((first + start + 1 if first < n else n) - horizon, 0)
        pieces.append((slice(start, stop), slice(low, min(first + stop, n))))
    return pieces


def piecewise(
    pieces: Pieces, piece: Callable[[slice, slice], Tensor], device_type: str, *, recompute: bool
) -> Tensor:
    """Return ``piece(queries, keys) [..., C, V]`` of all pieces, concatenated to ``[..., T, V]``.

    The backward pass computes each piece again if ``recompute``.
    """
    results: list[Tensor] = []
    for queries, keys in pieces:
        if recompute and torch.is_grad_enabled():
            more: dict[str, Any] = {}
            if active.precision is not None:
                # A compiler rejects every context_fn, so it is passed only if needed.
                more["context_fn"] = partial(_contexts, active.precision, device_type)
            result = checkpoint(piece, queries, keys, use_reentrant=False, **more)
        else:
            result = piece(queries, keys)
        assert isinstance(result, Tensor)
        results.append(result)
    return torch.cat(results, dim=-2)


def _contexts(
    precision: str, device_type: str
) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Return the contexts of a piece's first run and of its recomputation."""
    return nullcontext(), matmul_precision(precision, device_type)


def visibility_mask(
    visible: VisibleAssociations,
    queries: slice,
    keys: slice,
    horizon: int | None,
    *,
    gapped: bool = True,
) -> Tensor | None:
    """Return the mask of visible associations ``[B or 1, C, m]``, or ``None`` if all are visible.

    A padded query sees itself, so that no softmax is empty. Slots may be empty if ``gapped``.
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


def strict_visibility_mask(
    visible: VisibleAssociations,
    queries: slice,
    keys: slice,
    horizon: int | None,
    *,
    hides_current: bool = False,
) -> Tensor:
    """Return `visibility_mask` without the self-visibility of padded queries, for sums.

    If ``hides_current``, no query sees the association of its own token.
    """
    mask = visibility_mask(visible, queries, keys, horizon)
    assert mask is not None
    mask = mask & visible.valid[:, None, keys]
    if not hides_current or visible.first_slot >= visible.k.shape[1]:
        return mask
    key = torch.arange(keys.start, keys.stop, device=mask.device)
    return mask & (key != visible.query_slots[queries, None])


def context_weights(visible: VisibleAssociations, recipe: Recipe) -> list[ContextWeights]:
    """Return the weights of all context restrictions whose weights are not all 1."""
    parts = (part.over(visible) for part in recipe.context.restrictions)
    return [weights for weights in parts if weights is not None]


@dataclass(frozen=True, kw_only=True)
class DecayCutoff:
    """Cutoff of associations with a negligible weight after a decay.

    The logits are q_t·k_i + d_ti with |q·k| ≤ L, and d_tt = 0 for a query's own association.
    Association i has at most e^(2L + d_ti) of the softmax. Below ε^2.5 it changes no digit of
    float32 or float64. Between e^−103 and e^−87 its probability is a subnormal number of float32,
    and products with subnormal numbers are slow on a CPU.
    """

    of_key: Tensor  # log weights up to a constant of the query, [B, n, H]
    furthest: float  # largest difference of logarithms to a query's own association, inf for any

    @classmethod
    def of(
        cls, of_key: Tensor, q: Tensor, k: Tensor, *, scale: float, by_length: float
    ) -> DecayCutoff:
        """Return the cutoff for queries and keys with logits scale·q·k + by_length·‖k‖²."""
        if not can_read_values(q) or not q.numel() or not k.numel():
            return cls(of_key=of_key.detach(), furthest=math.inf)
        longest = [x.detach().square().sum(-1).amax() for x in (q, k)]
        max_logit = abs(scale) * (longest[0] * longest[1]).sqrt() + abs(by_length) * longest[1]
        min_log_weight = 2.5 * math.log(torch.finfo(k.dtype).eps)
        return cls(of_key=of_key.detach(), furthest=float(2 * max_logit) - min_log_weight)

    def negligible(self, slots: Tensor, keys: slice) -> Tensor:
        """Return the mask of keys ``[B, m, H]`` that all queries in ``slots`` can ignore."""
        lowest = self.of_key[:, slots].amin(1, keepdim=True)
        return self.of_key[:, keys] < lowest - self.furthest

    def shorten(self, pieces: Pieces, slots: Tensor) -> Pieces:
        """Return the pieces without the negligible keys before their first other key."""
        if math.isinf(self.furthest):
            return pieces
        gone = [self.negligible(slots[queries], keys).all(-1).all(0) for queries, keys in pieces]
        firsts = [keys_gone.logical_not().to(torch.uint8).argmax() for keys_gone in gone]
        return [
            (queries, slice(keys.start + first, keys.stop))
            for (queries, keys), first in zip(pieces, torch.stack(firsts).tolist(), strict=True)
        ]
