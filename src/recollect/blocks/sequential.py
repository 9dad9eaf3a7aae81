"""Layers of `Sequential` and `MemoryAsGate`, whose parts run over all tokens.

Persistent tokens are in front of every document. The parts memorise and attend to them as to other
tokens, and their outputs are dropped. A sequence that continues a document has read them already.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from recollect.blocks.compositions import MemoryAsGate, Sequential
from recollect.blocks.layers import MixerLayer, OutputGate, PersistentTokens, rows_at_start
from recollect.blocks.state import AnyState, MixerState
from recollect.functional.packing import prepend_tokens

__all__ = ["MemoryAsGateLayer", "PartsLayer", "SequentialLayer"]


class PartsLayer(MixerLayer):
    """Base of layers whose parts run over all tokens, after the persistent ones."""

    def __init__(
        self, d_model: int, mixer: Sequential | MemoryAsGate, parts: Mapping[str, nn.Module]
    ) -> None:
        super().__init__(d_model, mixer, parts)
        self.persistent = PersistentTokens(mixer.persistent, d_model) if mixer.persistent else None

    @abstractmethod
    def run_parts(
        self, x: Tensor, states: Mapping[str, Any], **kwargs: Any
    ) -> tuple[Tensor, dict[str, Any]]:
        """Return outputs and the states of the parts by name."""
        raise NotImplementedError

    def forward_checked(
        self,
        x: Tensor,
        state: MixerState | None,
        mask: Tensor | None,
        cu_seqlens: Tensor | None,
        *,
        output_final_state: bool,
    ) -> tuple[Tensor, MixerState | None]:
        states: Mapping[str, AnyState | None] = (
            dict.fromkeys(self.parts) if state is None else state.parts
        )
        position_source = next(iter(self.parts))
        count, stream, text = 0, x, None
        if self.persistent is not None:
            count = self.persistent.tokens.shape[0]
            at_start = rows_at_start(states[position_source], x.device)
            if at_start is not False:
                learned = self.persistent.rows(x)
                if cu_seqlens is None:
                    stream, mask = prepend_tokens(learned, x, mask, at_start)
                    text = slice(count, None)
                else:
                    stream, cu_seqlens, text = _prepend_packed(learned, x, cu_seqlens, at_start)
        y, parts = self.run_parts(
            stream,
            states,
            attention_mask=mask,
            cu_seqlens=cu_seqlens,
            output_final_state=output_final_state,
        )
        if text is not None:
            y = y[:, text]
        if not output_final_state:
            return y, None
        return y, MixerState(parts=parts, clock=position_source, prefix=count)


class SequentialLayer(PartsLayer):
    """The layer of `Sequential`: y = m_n(… m_1(x))."""

    def run_parts(
        self, x: Tensor, states: Mapping[str, Any], **kwargs: Any
    ) -> tuple[Tensor, dict[str, Any]]:
        final_states: dict[str, Any] = {}
        for name, part in self.parts.items():
            x, final_states[name] = part(x, states[name], **kwargs)
        return x, final_states


class MemoryAsGateLayer(PartsLayer):
    """The layer of `MemoryAsGate`: y = w_a ⊙ RMS(attention(x)) ⊙ σ(w_m ⊙ RMS(memory(x)))."""

    def __init__(self, d_model: int, mixer: MemoryAsGate, parts: Mapping[str, nn.Module]) -> None:
        super().__init__(d_model, mixer, parts)
        self.gate = OutputGate(d_model)

    def run_parts(
        self, x: Tensor, states: Mapping[str, Any], **kwargs: Any
    ) -> tuple[Tensor, dict[str, Any]]:
        outputs, final_states = {}, {}
        for name in ("memory", "attention"):
            outputs[name], final_states[name] = self.parts[name](x, states[name], **kwargs)
        return self.gate(**outputs), final_states


def _prepend_packed(
    learned: Tensor, x: Tensor, cu_seqlens: Tensor, at_start: Tensor | bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Put learned tokens in front of documents at their start; also return boundaries and text."""
    ends = cu_seqlens.to(device=x.device, dtype=torch.long)
    count, N = learned.shape[1], ends.shape[0] - 1
    starts = torch.ones(N, dtype=torch.bool, device=x.device)
    if isinstance(at_start, Tensor):
        starts = at_start
    added = starts.long().cumsum(0) * count
    steps = torch.arange(x.shape[1], device=x.device)
    text = steps + added[torch.bucketize(steps, ends[1:], right=True).clamp_max(N - 1)]
    shifted = ends + torch.cat([added.new_zeros(1), added])
    fronts = (shifted[:-1, None] + torch.arange(count, device=x.device))[starts].flatten()
    total = x.shape[1] + len(fronts)
    stream = x.new_zeros(1, total, x.shape[2]).index_copy(1, text, x)
    stream = stream.index_copy(1, fronts, learned.repeat(1, len(fronts) // count, 1))
    return stream, shifted.to(cu_seqlens.dtype), text
