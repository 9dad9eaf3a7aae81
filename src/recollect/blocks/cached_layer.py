"""The layer of `CachedMemory`: a memory that is read together with its states of earlier segments.

The state has one part per earlier segment, in order, and the means of their tokens. Sequences may
have different numbers of earlier segments: a part of a sequence that does not have it yet is the
initial state, whose position is 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from recollect.blocks.cached import CachedMemory
from recollect.blocks.layers import RowsLayer
from recollect.blocks.restarts import SegmentRun, run_segments, take_inputs
from recollect.blocks.segments import concat_segments, split_segments
from recollect.blocks.state import MixerState
from recollect.functional.read import read
from recollect.layer.recipe_module import state_after
from recollect.layer.state import LayerState, MemoryInputs
from recollect.state.state import State, join_states
from recollect.state.tree import where_rows

__all__ = ["CachedMemoryLayer"]


@dataclass(kw_only=True)
class _Cache:
    """Earlier segments of a call, which grow as it runs."""

    states: list[State]  # state of the memory after each earlier segment
    means: list[Tensor]  # mean of the tokens of each earlier segment [B, d_model]
    total: Tensor  # sum of the tokens of the open segment [B, d_model]
    size: int  # number of tokens of a segment

    def close_segments(self, state: State, starts: Tensor | bool, initial: State) -> None:
        """Store the state and the mean of the sequences that complete a segment.

        ``state`` is that before the next token, which starts a segment in the sequences ``starts``:
        all, none, or ``[B]``.
        """
        if starts is False or state.host_position == 0:
            return
        mean = self.total / self.size
        if starts is True and all(one.host_position is not None for one in (state, *self.states)):
            self.states.append(state)
            self.means.append(mean)
            self.total = torch.zeros_like(self.total)
            return
        closed = (state.position > 0).to(mean.device)
        if isinstance(starts, Tensor):
            closed = closed & starts
        self.total = where_rows(closed, torch.zeros_like(mean), self.total)
        for index, one in enumerate(self.states):
            stored = closed & (one.position == 0)
            self.states[index] = state.where(stored, one)
            self.means[index] = where_rows(stored, mean, self.means[index])
            closed = closed & ~stored
        if bool(closed.any()):
            self.states.append(state.where(closed, initial))
            self.means.append(where_rows(closed, mean, torch.zeros_like(mean)))

    @property
    def is_stored(self) -> Tensor | None:
        """Which sequences have each earlier segment ``[B, n]``; ``None`` if all have."""
        if all(state.host_position is not None for state in self.states):
            return None  # also without states
        return torch.stack([state.position > 0 for state in self.states], dim=1)


class CachedMemoryLayer(RowsLayer):
    """The layer of `CachedMemory`, with the part ``"memory"``."""

    shares_heads = True
    parts_fed_directly = ("memory",)
    mixer: CachedMemory

    def __init__(self, d_model: int, mixer: CachedMemory, parts: Mapping[str, nn.Module]) -> None:
        super().__init__(d_model, mixer, parts)
        is_weighted = mixer.weights == "softmax"
        self.restart_every = mixer.segment if mixer.restart else 0
        self.connector = nn.Linear(d_model, d_model, bias=False) if is_weighted else None

    def forward_rows(
        self,
        x: Tensor,
        state: MixerState | None,
        lengths: Tensor | None,
        *,
        output_final_state: bool,
    ) -> tuple[Tensor, MixerState]:
        layer, C = self.memory, self.mixer.segment
        _, initial = layer(x[:, :0])
        assert initial is not None
        current, position, cache = initial, initial.position, self._empty_cache(x)
        if state is not None:
            memory = state.parts["memory"]
            assert isinstance(memory, LayerState)
            current, position, cache = memory, state.position, self._cache_of(state)
        # Positions of tokens are those of the text.
        text_state = replace(current, memory=replace(current.memory, position=position))
        inputs = layer.memory_inputs(x, text_state, lengths)
        memory, outputs = current.memory, list[Tensor]()
        segments = [*split_segments(memory, x, lengths, C)]
        start = initial.memory if self.mixer.restart else None
        for part in run_segments(layer, inputs, memory, segments, initial=start, size=C):
            cache.close_segments(part.previous, part.tokens.starts_segment, initial.memory)
            part_inputs = take_inputs(inputs, part.tokens)
            outputs.append(self._combine(part, part_inputs, part.tokens.take(x), cache))
            memory = part.state
        y = inputs.q.new_zeros(*x.shape[:2], layer.num_heads, layer.value_dim)
        if outputs:
            y = concat_segments(outputs, segments, x)
        count = torch.full_like(position, x.shape[1]) if lengths is None else lengths.to(position)
        names = {f"segment_{i}": LayerState(memory=one) for i, one in enumerate(cache.states)}
        no_means = cache.total.new_zeros(x.shape[0], 0, x.shape[2])
        tensors = {
            "position": position + count,
            "total": cache.total,
            "means": torch.stack(cache.means, dim=1) if cache.means else no_means,
        }
        parts = {"memory": state_after(inputs, memory), **names}
        return layer.output(y, inputs), MixerState(parts=parts, tensors=tensors, clock="position")

    def _empty_cache(self, x: Tensor) -> _Cache:
        dtype = torch.promote_types(x.dtype, torch.float32)
        total = x.new_zeros(x.shape[0], x.shape[2], dtype=dtype)
        return _Cache(states=[], means=[], total=total, size=self.mixer.segment)

    def _cache_of(self, state: MixerState) -> _Cache:
        states = [state.parts[f"segment_{i}"] for i in range(len(state.parts) - 1)]
        return _Cache(
            states=[one.memory for one in states if isinstance(one, LayerState)],
            means=[*state.tensors["means"].unbind(1)],
            total=state.tensors["total"],
            size=self.mixer.segment,
        )

    def _combine(self, part: SegmentRun, inputs: MemoryInputs, x: Tensor, cache: _Cache) -> Tensor:
        """Return the weighted outputs of all states at the tokens of one segment."""
        running = cache.total.unsqueeze(1) + x.to(cache.total.dtype).cumsum(1)
        cache.total = running[:, -1]
        gamma = self._weights(x, running / _token_numbers(part, self.mixer.segment), cache)
        total = gamma[..., -1:, None] * part.outputs
        if cache.states:
            y = self._read_earlier(inputs, cache)
            dtype = torch.promote_types(y.dtype, gamma.dtype)
            total = total + torch.einsum("bwn,nbwhv->bwhv", gamma[..., :-1].to(dtype), y.to(dtype))
        return total.to(part.outputs.dtype)

    def _read_earlier(self, inputs: MemoryInputs, cache: _Cache) -> Tensor:
        """Return the outputs of the states of earlier segments ``[n, B, w, Hq, V]``."""
        n, layer = len(cache.states), self.memory
        y = read(
            layer.recipe,
            _repeat(inputs.q, n),
            gates={name: _repeat(x, n) for name, x in inputs.gates.items()},
            state=join_states(cache.states),
            params=inputs.params or None,
            precision=layer.precision,
        ).unflatten(0, (n, -1))
        is_stored = cache.is_stored
        if is_stored is not None:
            y = torch.where(is_stored.T[:, :, None, None, None], y, 0.0)
        return y

    def _weights(self, x: Tensor, open_mean: Tensor, cache: _Cache) -> Tensor:
        """Return γ of the earlier segments, then of the open one, ``[B, w, n + 1]``."""
        n, is_stored = len(cache.states), cache.is_stored
        if self.connector is None:
            ones = open_mean.new_ones(*x.shape[:2], n + 1)
            if is_stored is not None:
                stored = torch.nn.functional.pad(is_stored, (0, 1), value=True)
                ones = torch.where(stored.unsqueeze(1), ones, 0.0)
            return ones if self.mixer.weights == "sum" else ones / ones.sum(-1, keepdim=True)
        u = self.connector(x).to(open_mean.dtype)
        open_logit = (u * open_mean).sum(-1, keepdim=True)
        if not cache.means:
            return open_logit.softmax(-1)
        logits = u @ torch.stack(cache.means, dim=2).to(u.dtype)  # [B, w, n]
        if is_stored is not None:
            logits = logits.masked_fill(~is_stored.unsqueeze(1), -torch.inf)
        top_k = self.mixer.top_k
        if top_k is not None and top_k < n:
            chosen = torch.zeros_like(logits, dtype=torch.bool)
            chosen = chosen.scatter(-1, logits.topk(top_k, dim=-1).indices, True)
            logits = logits.masked_fill(~chosen, -torch.inf)
        return torch.cat([logits, open_logit], dim=-1).softmax(-1)


def _repeat(x: Tensor, n: int) -> Tensor:
    """Return n copies of the sequences of ``x [B, ...]``, ``[n B, ...]``."""
    return x.repeat(n, *(1,) * (x.dim() - 1))


def _token_numbers(part: SegmentRun, size: int) -> Tensor:
    """Return the numbers of tokens of the open segments up to each token ``[B or 1, w, 1]``."""
    steps = torch.arange(1, part.outputs.shape[1] + 1, device=part.outputs.device)
    starts, position = part.tokens.starts_segment, part.previous.host_position
    if starts is True:
        return steps.view(1, -1, 1)
    if position is not None:
        return (steps + position % size).view(1, -1, 1)
    return ((part.previous.position % size).view(-1, 1) + steps).unsqueeze(-1)
