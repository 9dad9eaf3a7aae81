"""Layers of mixers that all see the text: in turn, summed, or one as the other's gate.

Learned tokens stand before every document, as if they were its first: the parts memorise them and
attend to them like any other, and their outputs are dropped. Rows that are in the middle of their
document have read them already.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from recollect.blocks.composed import Composed, GateOf, PersistentTokens, begins
from recollect.blocks.compositions import Chain, Gated, Together
from recollect.blocks.state import AnyState, MixerState

__all__ = ["ChainLayer", "GatedLayer", "TogetherLayer"]


class _Beside(Composed):
    """Parts that see the same columns, behind learned tokens."""

    def __init__(
        self, d_model: int, mixer: Chain | Gated | Together, parts: Mapping[str, nn.Module]
    ) -> None:
        super().__init__(d_model, mixer, parts)
        self.clock = next(iter(self.parts))
        self.persistent = PersistentTokens(mixer.persistent, d_model) if mixer.persistent else None

    @abstractmethod
    def through(self, x: Tensor, before: Mapping[str, Any], **how: Any) -> tuple[Tensor, Any]:
        """Outputs of the stream and the parts' states by name."""
        raise NotImplementedError

    def mix(
        self,
        x: Tensor,
        state: MixerState | None,
        mask: Tensor | None,
        borders: Tensor | None,
        *,
        output_state: bool,
    ) -> tuple[Tensor, MixerState | None]:
        before: Mapping[str, AnyState | None] = (
            dict.fromkeys(self.parts) if state is None else state.parts
        )
        count, stream, place = 0, x, None
        if self.persistent is not None:
            count = self.persistent.tokens.shape[0]
            rows = x.shape[0] if borders is None else borders.shape[0] - 1
            fresh = begins(before[self.clock], rows, x.device)
            if fresh is not False:
                learned = self.persistent.rows(x)
                if borders is None:
                    stream, mask = _in_front(learned, x, mask, fresh)
                    place = slice(count, None)
                else:
                    stream, borders, place = _packed(learned, x, borders, fresh)
        how = {"attention_mask": mask, "cu_seqlens": borders, "output_state": output_state}
        y, parts = self.through(stream, before, **how)
        if place is not None:
            y = y[:, place]
        if not output_state:
            return y, None
        return y, MixerState(parts=parts, clock=self.clock, prefix=count)


class ChainLayer(_Beside):
    """The layer of `Chain`: y = m_n(… m_1(x))."""

    def through(
        self, x: Tensor, before: Mapping[str, Any], **how: Any
    ) -> tuple[Tensor, dict[str, Any]]:
        after: dict[str, Any] = {}
        for name, part in self.parts.items():
            x, after[name] = part(x, before[name], **how)
        return x, after


class TogetherLayer(_Beside):
    """The layer of `Together`: y = m_1(x) + … + m_n(x)."""

    def through(
        self, x: Tensor, before: Mapping[str, Any], **how: Any
    ) -> tuple[Tensor, dict[str, Any]]:
        after: dict[str, Any] = {}
        said: list[Tensor] = []
        for name, part in self.parts.items():
            y, after[name] = part(x, before[name], **how)
            said.append(y)
        return torch.stack(said).sum(0), after


class GatedLayer(_Beside):
    """The layer of `Gated`: y = w_a ⊙ RMS(attention(x)) ⊙ σ(w_m ⊙ RMS(memory(x)))."""

    def __init__(self, d_model: int, mixer: Gated, parts: Mapping[str, nn.Module]) -> None:
        super().__init__(d_model, mixer, parts)
        self.gate = GateOf(d_model)

    def through(
        self, x: Tensor, before: Mapping[str, Any], **how: Any
    ) -> tuple[Tensor, dict[str, Any]]:
        memory, learned = self.parts["memory"](x, before["memory"], **how)
        attention, seen = self.parts["attention"](x, before["attention"], **how)
        return self.gate(attention, memory), {"memory": learned, "attention": seen}


def _in_front(
    learned: Tensor, x: Tensor, mask: Tensor | None, fresh: Tensor | bool
) -> tuple[Tensor, Tensor | None]:
    """Learned tokens before the rows that begin, masked before those that go on."""
    stream = torch.cat([learned, x], dim=1)
    if mask is None and fresh is True:
        return stream, None
    real = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device) if mask is None else mask != 0
    if fresh is True:
        front = torch.ones_like(learned[..., 0], dtype=torch.bool)
    else:
        assert isinstance(fresh, Tensor)
        front = fresh[:, None].expand(learned.shape[:2])
    return stream, torch.cat([front, real], dim=1)


def _packed(
    learned: Tensor, x: Tensor, borders: Tensor, fresh: Tensor | bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Documents in one row, each that begins behind the learned tokens; where the text then is."""
    ends = borders.to(device=x.device, dtype=torch.long)
    count, N = learned.shape[1], ends.shape[0] - 1
    new = torch.ones(N, dtype=torch.long, device=x.device)
    if isinstance(fresh, Tensor):
        new = fresh.long()
    added = new.cumsum(0) * count
    steps = torch.arange(x.shape[1], device=x.device)
    place = steps + added[torch.bucketize(steps, ends[1:], right=True).clamp_max(N - 1)]
    moved = ends + torch.cat([added.new_zeros(1), added])
    fronts = (moved[:-1, None] + torch.arange(count, device=x.device))[new.bool()].flatten()
    total = x.shape[1] + len(fronts)
    stream = x.new_zeros(1, total, x.shape[2]).index_copy(1, place, x)
    stream = stream.index_copy(1, fronts, learned.repeat(1, len(fronts) // count, 1))
    return stream, moved.to(borders.dtype), place
