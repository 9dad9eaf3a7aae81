"""Inputs and results of `Context.over`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

__all__ = ["ContextWeights", "KeyTransition", "VisibleAssociations"]


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


@dataclass(frozen=True, kw_only=True)
class KeyTransition:
    """Linear maps M_s = (I − β_s w_s w_sᵀ) Diag(α_s) by which token s moves all earlier keys.

    The query at t compares with M_t … M_(i+1) k_i in place of k_i.

    Attributes:
        log_decay: log α of each token, ``[B, n, H, K]``; ``None`` for 1.
        direction: w of each token, ``[B, n, H, K]``; ``None`` without the second factor.
        rate: β of each token, ``[B, n, H]``.
    """

    log_decay: Tensor | None = None
    direction: Tensor | None = None
    rate: Tensor | None = None

    def move(self, keys: Tensor, slot: int) -> Tensor:
        """Return M_s k for the keys ``[B, H, m, K]`` before the slot of token s."""
        if self.log_decay is not None:
            keys = keys * self.log_decay[:, slot].exp().unsqueeze(-2)
        if self.direction is not None and self.rate is not None:
            w = self.direction[:, slot].unsqueeze(-2)  # [B, H, 1, K]
            moved = (keys * w).sum(-1, keepdim=True)
            keys = keys - self.rate[:, slot, :, None, None] * moved * w
        return keys


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
        transition: maps by which later tokens move the keys, if the context declares
            ``key_transition``.
        reweigh: function from the logarithms of all other weights and the similarity,
            ``[B, H, G, C, m]`` with all visible associations in order and −∞ for hidden ones, to
            the logarithms of the weights, if the context declares ``reweighs``.
    """

    log: Piece | None = None
    value: Piece | None = None
    key_part: Tensor | None = None
    is_binary: bool = False
    may_hide_all: bool = False
    sink_and_window: tuple[int, int] | None = None
    transition: KeyTransition | None = None
    reweigh: Callable[[Tensor], Tensor] | None = None
