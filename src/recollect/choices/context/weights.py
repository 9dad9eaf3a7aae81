"""Inputs and results of `Context.over`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

__all__ = ["ContextWeights", "KeyTransition", "VisibleAssociations"]


@dataclass(frozen=True, kw_only=True)
class VisibleAssociations:
    """Associations in n consecutive slots, oldest first, and T queries."""

    q: Tensor  # queries [B, T, H, G, K]
    k: Tensor  # keys [B, n, H, K]
    rates: Mapping[str, Tensor]  # every quantity of the recipe for each association, [B, n, H, ...]
    query_rates: Mapping[str, Tensor]  # every quantity of the recipe for each query, [B, T, H, ...]
    valid: Tensor  # [B, n], False for empty slots
    position: Tensor  # index of each association in its document, [B, n]
    query_position: Tensor  # index of each query in its document, [B, T]
    # slot of each query's own association [T]; the last one if a state is only read
    query_slots: Tensor
    first_slot: int  # slot of the first query's own association; n if a state is only read
    is_full: bool = False  # whether every slot holds an association; False if unknown
    # upper bound of position and query_position, exclusive; None if unknown
    max_position: int | None = None


@dataclass(frozen=True, kw_only=True)
class KeyTransition:
    """Linear maps M_s = (I − β_s w_s w_sᵀ) Diag(α_s) by which token s moves all earlier keys.

    The query at t compares with M_t … M_(i+1) k_i in place of k_i.
    """

    log_decay: Tensor | None = None  # log α of each token, [B, n, H, K]; None for 1
    direction: Tensor | None = None  # w of each token, [B, n, H, K]; None without the second factor
    rate: Tensor | None = None  # β of each token, [B, n, H]

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
    """A context's weights γ_i^(t), computed piece by piece."""

    log: Piece | None = None  # their logarithms if none is negative; −∞ hides an association
    value: Piece | None = None  # the weights if they may be negative
    # [B, n, H] if the logarithm is this plus a function of the query
    key_part: Tensor | None = None
    is_binary: bool = False  # whether they are 0 or 1 (without a gradient)
    # whether all associations of a query may have weight 0, its own included
    may_hide_all: bool = False
    # (n, c) if exactly the first n associations of a document and the last c have weight 1
    sink_and_window: tuple[int, int] | None = None
    # maps by which later tokens move the keys, if the context declares key_transition
    transition: KeyTransition | None = None
    # function from the logarithms of all other weights and the similarity, [B, H, G, C, m] with all
    # visible associations in order and −∞ for hidden ones, to the logarithms of the weights, if the
    # context declares reweighs
    reweigh: Callable[[Tensor], Tensor] | None = None
