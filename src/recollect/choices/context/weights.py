"""Inputs and results of `Context.over`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

__all__ = ["ContextWeights", "VisibleAssociations"]


@dataclass(frozen=True, kw_only=True)
class VisibleAssociations:
    """Associations in n consecutive slots, oldest first, and T queries.

    Attributes:
        q: queries ``[B, T, H, G, K]``.
        k: keys ``[B, n, H, K]``.
        rates: every quantity of the recipe for each association, ``[B, n, H, ...]``.
        query_rates: every quantity of the recipe for each query, ``[B, T, H, ...]``.
        valid: ``[B, n]``, False for empty slots.
        position: index of each association in its document, ``[B, n]``.
        query_position: index of each query in its document, ``[B, T]``.
        query_slots: slot of each query's own association ``[T]``; the last one if a state is only
            read.
        first_slot: slot of the first query's own association; n if a state is only read.
        is_full: whether every slot holds an association; False if unknown.
        max_position: upper bound of ``position`` and ``query_position``, exclusive; ``None`` if
            unknown.
    """

    q: Tensor
    k: Tensor
    rates: Mapping[str, Tensor]
    query_rates: Mapping[str, Tensor]
    valid: Tensor
    position: Tensor
    query_position: Tensor
    query_slots: Tensor
    first_slot: int
    is_full: bool = False
    max_position: int | None = None


Piece = Callable[[slice, slice], Tensor]
"""Values for a piece of the queries and one of the slots, broadcastable to ``[B, H, G, C, m]``."""


@dataclass(frozen=True, kw_only=True)
class ContextWeights:
    """A context's weights γ_i^(t), computed piece by piece.

    Attributes:
        log: their logarithms if none is negative; −∞ hides an association.
        value: the weights if they may be negative.
        key_part: ``[B, n, H]`` if the logarithm is this plus a function of the query.
        is_binary: whether they are 0 or 1 (without a gradient).
        may_hide_all: whether all associations of a query may have weight 0, its own included.
        sink_and_window: (n, c) if exactly the first n associations of a document and the last c
            have weight 1.
    """

    log: Piece | None = None
    value: Piece | None = None
    key_part: Tensor | None = None
    is_binary: bool = False
    may_hide_all: bool = False
    sink_and_window: tuple[int, int] | None = None
