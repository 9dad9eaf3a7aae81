"""Recorded calls of layers, which generation with drafts cuts back to the accepted tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor, nn

__all__ = ["RecordedCall", "roll_back"]


@dataclass(frozen=True, kw_only=True, eq=False)
class RecordedCall:
    """A call of a layer, kept to compute the states after fewer of its tokens."""

    num_tokens: int  # T, padding included
    state: Any  # state before the call; None before the first token
    attention_mask: Tensor | None  # [B, T], nonzero at valid tokens; None if all are valid
    # function from a number of tokens n ≥ 1 and their mask [B, n], or None, to the state after the
    # first n tokens
    recompute: Callable[[int, Tensor | None], Any]

    @classmethod
    def of_forward(
        cls, layer: nn.Module, x: Tensor, state: Any, attention_mask: Tensor | None
    ) -> Self:
        """Return a call whose states are computed by the layer's forward."""
        return cls(
            num_tokens=x.shape[1],
            state=state,
            attention_mask=attention_mask,
            recompute=lambda n, mask: layer(x[:, :n], state, mask)[1],
        )

    @torch.no_grad()
    def state_at(self, n: int) -> Any:
        """Return the state after the first n tokens, without a graph."""
        if n == 0:
            return self.state
        mask = None if self.attention_mask is None else self.attention_mask[:, :n]
        if mask is not None and bool((mask != 0).all()):
            mask = None
        return self.recompute(n, mask)

    def first(self, n: int) -> Self:
        """Return the call of the first n tokens."""
        return replace(self, num_tokens=n)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return the call itself: it never changes, and a copy would contain the layer."""
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # a saved cache has no recorded calls, which refer to layers


def roll_back(calls: Sequence[RecordedCall], count: int) -> tuple[list[RecordedCall], Any]:
    """Return the remaining calls and the state after the last ``count`` ≥ 1 tokens are removed."""
    remaining, state = [*calls], None
    while count:
        call = remaining.pop()
        n = max(call.num_tokens - count, 0)
        count -= call.num_tokens - n
        if not count:
            state = call.state_at(n)
            remaining += [call.first(n)] if n else []
    return remaining, state
