"""The layer of `SlotMemory`: the output of one memory is the query of the next.

Both memories run over all tokens, by any engine: the second one after the first.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from recollect.blocks.slots import SlotMemory
from recollect.blocks.state import MixerState
from recollect.blocks.two_memories import TwoMemoriesLayer
from recollect.functional.packing import CompactedBatch
from recollect.layer.key_recurrence import Sequences, decayed_sums
from recollect.layer.recipe_module import run_memory, state_after
from recollect.layer.state import LayerState

__all__ = ["RunningSoftmax", "SlotMemoryLayer", "SlotRouter"]

MAX_SCORE = 32.0
"""Limit of the scores of a running softmax. float32 represents exp(−32) and exp(32)."""


class RunningSoftmax(nn.Module):
    """Weights exp(z_t)/Z_t of the slots of each head, Z_t = Z_(t−1) + exp(z_t), z = W x."""

    def __init__(self, d_model: int, heads: int, num_slots: int) -> None:
        super().__init__()
        self.scores = nn.Linear(d_model, heads * num_slots, bias=False)
        self.heads = heads

    def forward(self, x: Tensor, sequences: Sequences) -> tuple[Tensor, Tensor, Tensor]:
        """Return the weights and log decays of the slots ``[B, T, H, m]``, and the last Z.

        The state of a recurrence of ``sequences`` is Z before the call.
        """
        z = self.scores(x).unflatten(-1, (self.heads, -1))
        z = z.to(torch.promote_types(z.dtype, torch.float32))
        u = z.clamp(-MAX_SCORE, MAX_SCORE).exp()
        initial = sequences.initial(0, u)
        Z = decayed_sums(u, u.new_zeros(u.shape[:3]), initial, sequences.cu_seqlens)
        previous, final = sequences.previous(Z, initial)
        # The first token of a sequence has Z_(t−1) = 0, and its memory is 0: no decay.
        log_decay = torch.where(previous > 0, previous, Z).log() - Z.log()
        return u / Z, log_decay, final


class SlotRouter(nn.Module):
    """Weights w = σ(W x) of the slots of each head, divided by their sum.

    ``top_k`` slots have a weight above 0; ``None``: all.
    """

    def __init__(self, d_model: int, heads: int, num_slots: int, top_k: int | None) -> None:
        super().__init__()
        self.scores = nn.Linear(d_model, heads * num_slots, bias=False)
        self.heads, self.top_k = heads, top_k

    def forward(self, x: Tensor) -> Tensor:
        """Return the weights ``[B, T, H, m]`` of tokens ``[B, T, d_model]``."""
        scores = self.scores(x).unflatten(-1, (self.heads, -1))
        w = torch.sigmoid(scores.to(torch.promote_types(scores.dtype, torch.float32)))
        if self.top_k is not None:
            largest, chosen = w.topk(self.top_k, dim=-1)
            w = torch.zeros_like(w).scatter(-1, chosen, largest)
        return w / w.sum(-1, keepdim=True)


class SlotMemoryLayer(TwoMemoriesLayer):
    """The layer of `SlotMemory`."""

    mixer: SlotMemory

    def __init__(self, d_model: int, mixer: SlotMemory, parts: Mapping[str, nn.Module]) -> None:
        super().__init__(d_model, mixer, parts)
        m = self.first.memory_value_dim
        heads = self.first.num_kv_heads
        self.router: SlotRouter | RunningSoftmax | None = None
        if mixer.write == "running_softmax":
            self.router = RunningSoftmax(d_model, heads, m)
        elif mixer.routes:
            self.router = SlotRouter(d_model, heads, m, mixer.top_k and min(mixer.top_k, m))

    def forward_rows(
        self,
        x: Tensor,
        state: MixerState | None,
        batch: CompactedBatch | None,
        cu_seqlens: Tensor | None,
        output_final_state: bool,
    ) -> tuple[Tensor, MixerState | None]:
        first, second, mixer = self.first, self.second, self.mixer
        first_state, second_state = (None, None) if state is None else self.states(state)
        lengths = None if batch is None else batch.lengths
        inputs = first.memory_inputs(x, first_state, lengths, cu_seqlens)
        sums = None if state is None else state.tensors.get("slot_sums")
        rows = Sequences(
            keys=None if sums is None else sums.unsqueeze(1), lengths=lengths, cu_seqlens=cu_seqlens
        )
        slots, first_gates, tensors = self._slots(x, inputs.gates, rows)
        slots = slots.to(inputs.k.dtype)
        sequences = {
            "batch": batch,
            "cu_seqlens": cu_seqlens,
            "output_final_state": output_final_state,
        }
        logits, memory = run_memory(
            first, replace(inputs, v=slots, gates=first_gates), first_state, **sequences
        )
        queries = logits
        if mixer.activation == "softmax":
            dtype = torch.promote_types(logits.dtype, torch.float32)
            queries = logits.softmax(-1, dtype=dtype).to(logits.dtype)
        shared = {name: first_gates[name] for name in mixer.share}
        gates, params = second.gates_and_params(x, slots, shared)
        y, second_memory = run_memory(
            second,
            replace(inputs, q=queries, k=slots, gates=gates, params=params),
            second_state,
            **sequences,
        )
        y = first.output(y, inputs)
        if memory is None or second_memory is None:
            return y, None
        parts = {"first": state_after(inputs, memory), "second": LayerState(memory=second_memory)}
        return y, MixerState(parts=parts, tensors=tensors, clock="first")

    def _slots(
        self, x: Tensor, gates: dict[str, Tensor], sequences: Sequences
    ) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
        """Return weights of slots ``[B, T, H, m]``, gates of the first memory, and the state."""
        if isinstance(self.router, RunningSoftmax):
            slots, log_decay, final = self.router(x, sequences)
            return slots, {**gates, "log_decay": log_decay}, {"slot_sums": final}
        weights = None if self.router is None else self.router(x)
        if self.mixer.write == "input":
            assert weights is not None
            return weights, gates, {}
        log_decay = gates["log_decay"]
        if weights is not None:
            log_decay = weights * log_decay
            gates = {**gates, "log_decay": log_decay}
        return -torch.expm1(log_decay), gates, {}
