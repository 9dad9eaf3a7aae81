"""Associations as a context sees them when it computes their log weights for a query."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

__all__ = ["ContextWeights", "VisibleAssociations"]


@dataclass(frozen=True, kw_only=True)
class VisibleAssociations:
    """Associations in one run of n slots, oldest first, and the T queries that ask for them.

    Attributes:
        q: ``[B, T, H, G, K]``. k: ``[B, n, H, K]``.
        rates: every number of the recipe for each association, ``[B, n, H, ...]``.
        asked: those of the queries, ``[B, T, H, ...]``.
        valid: ``[B, n]``, False where a slot holds nothing.
        position: index of each association in its document, ``[B, n]``.
        where: index of each query in its document, ``[B, T]``.
        slots: slot of each query's own association ``[T]``; the last one for queries that only
            read.
        first: slot of the first query's own association; n for queries that only read.
        full: whether it is known, without looking, that every slot holds an association.
        end: what ``position`` and ``where`` stay below, where that is known without looking.
    """

    q: Tensor
    k: Tensor
    rates: Mapping[str, Tensor]
    asked: Mapping[str, Tensor]
    valid: Tensor
    position: Tensor
    where: Tensor
    slots: Tensor
    first: int
    full: bool = False
    end: int | None = None


Piece = Callable[[slice, slice], Tensor]
"""Numbers for a piece of the queries and one of the slots, ``[B, H, G, C, m]`` or broadcastable."""


@dataclass(frozen=True, kw_only=True)
class ContextWeights:
    """A context's weights γ_i^(t), computed piece by piece.

    Attributes:
        log: their logarithms, where none is negative; −∞ hides an association.
        value: the weights themselves, where they may be negative.
        of_key: ``[B, n, H]`` when the logarithm is this plus something of the query alone.
        hard: whether they are 0 or 1 (no gradient flows through them).
        hides: whether all of a query's associations may weigh 0, its own included.
        band: (n, c), where exactly the first n associations of a document and the last c weigh 1.
    """

    log: Piece | None = None
    value: Piece | None = None
    of_key: Tensor | None = None
    hard: bool = False
    hides: bool = False
    band: tuple[int, int] | None = None
