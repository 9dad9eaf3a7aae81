"""The layer of `Levels`: chunks of tokens, or one token of every sequence.

The state is an ordinary state of the recipe with L V value channels, of which level ℓ has channels
ℓ V to (ℓ + 1) V. Value channels of such a memory are independent and have equal transitions, so a
token is one call with the value [v, 0, …, 0]. Then the levels that end at the next token join.

A chunk of C tokens is one call that starts from the channels [0; I] with the values e_1 … e_C of C
channels and 0 of the others. The outputs and the final channels are then (A, Q) and (N, M)::

    y_t = Σ_s λ_t^ℓ(t, s) A_ts v_s + Σ_ℓ λ_t^ℓ M^ℓ Q_t,       M^ℓ ← M^ℓ M,  plus Σ_s v_s N_s

Between tokens p < t, with n = the number of binary digits of p XOR t, levels below n join in level
n, which was empty, and higher levels remain.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import groupby

import torch
from torch import Tensor, nn
from torch.nn import functional

from recollect.blocks.layers import RowsLayer
from recollect.blocks.levels import CHUNK_SIZE, Levels
from recollect.blocks.state import MixerState
from recollect.choices.runtime import without_autocast
from recollect.engines.common.problem import state_dtype
from recollect.fields import Gate, Range
from recollect.functional.binding import bind, named
from recollect.functional.checks import check_state_sizes
from recollect.layer.gates import GateProjection
from recollect.layer.options import GateOptions
from recollect.layer.recipe_module import make_call, run_call, state_after
from recollect.layer.state import LayerState, MemoryInputs
from recollect.recipe.bound import BoundRecipe
from recollect.state.state import State, initial_state

__all__ = ["LevelsLayer"]


class LevelsLayer(RowsLayer):
    """The layer of `Levels`; projections, norm and output map are those of its memory."""

    parts_fed_directly = ("memory",)
    mixer: Levels

    def __init__(self, d_model: int, mixer: Levels, parts: Mapping[str, nn.Module]) -> None:
        super().__init__(d_model, mixer, parts)
        layer = self.memory
        self.level_weights = GateProjection(
            Gate(name="level", owner="blocks.Levels", axes=("L",), range=Range(low=0.0)),
            GateOptions(rank=0),
            sizes={"L": mixer.num_levels},
            d_model=d_model,
            heads=layer.num_heads,
            depth=layer.depth,
            recipe=layer.recipe,
        )

    def forward_rows(
        self,
        x: Tensor,
        state: MixerState | None,
        lengths: Tensor | None,
        *,
        output_final_state: bool,
    ) -> tuple[Tensor, MixerState | None]:
        layer, layer_state = self.memory, None
        if state is not None:
            layer_state = state.parts["memory"]
            assert isinstance(layer_state, LayerState)
        inputs = layer.memory_inputs(x, layer_state, lengths)
        dtype = state_dtype(inputs.q, inputs.k, inputs.v)
        inputs.q, inputs.k, inputs.v = (z.to(dtype) for z in (inputs.q, inputs.k, inputs.v))
        weights = self.level_weights(x).to(dtype)  # [B, T, heads, L]
        bound = self._bound_with(self.mixer.num_levels * layer.value_dim)
        if layer_state is None:
            memory = initial_state(bound, B=x.shape[0], dtype=dtype, device=x.device)
        else:
            check_state_sizes(bound, layer_state.memory)
            memory = layer_state.memory.to(dtype=dtype)
        with without_autocast(x.device.type):
            if x.shape[1] == 1 and lengths is None:
                y, memory = self._token(inputs, weights, memory, bound)
            else:
                y, memory = self._rows_by_position(
                    inputs, weights, memory, lengths, output_final_state
                )
        y = layer.output(y.to(x.dtype), inputs)
        if not output_final_state:
            return y, None
        return y, MixerState(parts={"memory": state_after(inputs, memory)}, clock="memory")

    def _bound_with(self, value_dim: int) -> BoundRecipe:
        """Bind the recipe to another number of value channels."""
        layer = self.memory
        sizes = {"H": layer.num_kv_heads, "K": layer.head_dim, "V": value_dim}
        bound = bind(layer.recipe, **sizes, engine=layer.engine, precision=layer.precision)
        return named(bound)

    # -- one token --------------------------------------------------------------------------------

    def _token(
        self, inputs: MemoryInputs, weights: Tensor, memory: State, bound: BoundRecipe
    ) -> tuple[Tensor, State]:
        """Return outputs ``[B, 1, heads, V]`` of one token per sequence, and the next state."""
        L, V = self.mixer.num_levels, inputs.v.shape[-1]
        values = functional.pad(inputs.v, (0, (L - 1) * V))
        call = make_call(self.memory, replace(inputs, v=values), memory)
        y, final_memory = run_call(replace(call, bound=bound))
        assert final_memory is not None
        y = (y.unflatten(-1, (L, V)) * weights.unsqueeze(-1)).sum(-2)
        levels = torch.arange(L, device=y.device)
        position = memory.position.to(y.device)
        joined = _num_digits(position ^ (position + 1)).clamp_max(L - 1)
        is_below, is_joined = (
            mask.view(-1, 1, L, 1, 1)
            for mask in (levels < joined[:, None], levels == joined[:, None])
        )
        M = final_memory.weights[0].unflatten(2, (L, V))  # [B, H, L, V, F]
        total = torch.where(is_below, M, 0.0).sum(2, keepdim=True)
        M = torch.where(is_below, 0.0, torch.where(is_joined, M + total, M))
        return y, replace(final_memory, weights=(M.flatten(2, 3),), cache={})

    # -- chunks -----------------------------------------------------------------------------------

    def _rows_by_position(
        self,
        inputs: MemoryInputs,
        weights: Tensor,
        memory: State,
        lengths: Tensor | None,
        output_final_state: bool,
    ) -> tuple[Tensor, State]:
        """Run the sequences of each position and length, which join levels at equal tokens."""
        B, T = inputs.q.shape[:2]
        start = memory.host_position
        if start is not None and lengths is None:
            return self._chunks(inputs, weights, memory, start, T)
        starts = memory.position.tolist() if start is None else [start] * B
        counts = [T] * B if lengths is None else lengths.tolist()
        rows: dict[tuple[int, int], list[int]] = {}
        for row, key in enumerate(zip(starts, counts, strict=True)):
            # Tokens after the last one change no output.
            key = key if output_final_state else (key[0], T)
            rows.setdefault(key, []).append(row)
        y = inputs.v.new_zeros(*inputs.q.shape[:3], inputs.v.shape[-1])
        M, position = memory.weights[0], memory.position
        for (first, count), group in rows.items():
            index = torch.tensor(group, device=y.device)
            part = _select_rows(inputs.first(count), index)
            outputs, final_memory = self._chunks(
                part, weights[index, :count], memory.select(index), first, count
            )
            y = y.index_copy(0, index, functional.pad(outputs, (0, 0, 0, 0, 0, T - count)))
            M = M.index_copy(0, index, final_memory.weights[0])
            position = position.index_copy(0, index.to(position.device), final_memory.position)
        return y, replace(memory, weights=(M,), position=position, cache={})

    def _chunks(
        self, inputs: MemoryInputs, weights: Tensor, memory: State, start: int, T: int
    ) -> tuple[Tensor, State]:
        """Return outputs ``[B, T, heads, V]`` and the state of sequences of equal positions."""
        if T == 0:
            return inputs.v.new_zeros(*inputs.q.shape[:3], inputs.v.shape[-1]), memory
        L, last, (H, V) = self.mixer.num_levels, self.mixer.num_levels - 1, inputs.v.shape[2:]
        C = min(self.memory.chunk_size or CHUNK_SIZE, T)
        A, Q, N, M = self._units(inputs, start, C)
        n, G, device = A.shape[1], A.shape[4], A.device
        tokens = start + torch.arange(n * C, device=device).view(n, C)
        weights = _in_chunks(weights, C).unflatten(3, (H, G))  # [B, n, C, H, G, L]
        v = _in_chunks(inputs.v, C).transpose(2, 3)  # [B, n, H, C, V]
        level = _num_digits(tokens.unsqueeze(2) ^ tokens.unsqueeze(1)).clamp_max(last)  # [n, C, C]
        scores = A * _take_levels(weights, level)
        scores = scores.permute(0, 1, 3, 4, 2, 5).flatten(3, 4)  # [B, n, H, G C, C]
        outputs = list((scores @ v).unbind(1))
        queries = Q.permute(0, 1, 3, 4, 2, 5).flatten(3, 4).unbind(1)
        if not self.memory.recipe.step_sees_prediction:
            M = M.diagonal(dim1=-2, dim2=-1).unsqueeze(-2)  # decays of columns
        rows = (weights.unbind(1), v.unbind(1), N.unbind(1), M.unbind(1))
        stored = memory.weights[0].unflatten(2, (L, V)).unbind(2)
        levels = {i: stored[i] for i in range(1, L) if (start >> (i - 1)) & 1 or i == last}
        if not start:
            levels = {}
        for c, (weight, values, writes, transition) in enumerate(zip(*rows, strict=True)):
            first, stop = start + c * C, min(start + (c + 1) * C, start + T)
            if levels:
                below = _num_digits(first ^ tokens[c])[:, None]  # [C, 1]
                numbers = torch.tensor([*levels], device=device)
                level = torch.maximum(numbers, below).clamp_max(last).unsqueeze(0)
                factors = _take_levels(weight.unsqueeze(1), level).squeeze(1)  # [B, C, H, G, ·]
                factors = factors.permute(0, 2, 3, 1, 4).flatten(2, 3).unsqueeze(-1)
                M_levels = torch.cat([*levels.values()], dim=2)  # [B, H, · V, F]
                read = (queries[c] @ M_levels.mT).unflatten(-1, (-1, V))
                outputs[c] = outputs[c] + (read * factors).sum(-2)
                is_decay = transition.shape[-2] == 1  # per column, and not a matrix
                moved = M_levels * transition if is_decay else M_levels @ transition
                levels = dict(zip(levels, moved.split(V, dim=2), strict=True))
                levels = _join(levels, first, stop, last)
            for i, part in _written_levels(first, stop, last):
                write = values[:, :, part].mT @ writes[:, :, part]
                levels[i] = levels[i] + write if i in levels else write
        y = torch.stack(outputs, dim=1).unflatten(3, (G, C)).permute(0, 1, 4, 2, 3, 5)
        empty = stored[0].new_zeros(()).expand_as(stored[0])
        final = torch.stack([levels.get(i, empty) for i in range(L)], dim=2).flatten(2, 3)
        position = memory.position + T
        final_memory = replace(memory, weights=(final,), position=position, cache={})
        return y.flatten(3, 4).flatten(1, 2)[:, :T], final_memory.with_position(start + T)

    def _units(
        self, inputs: MemoryInputs, start: int, C: int
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Run chunks from unit matrices with unit values; see the equations of the module.

        Returns A ``[B, n, C, H, G, C]``, Q ``[B, n, C, H, G, F]``, N ``[B, n, H, C, F]`` and M
        ``[B, n, H, F, F]`` of n chunks.
        """
        layer, (B, T, H, _) = self.memory, inputs.k.shape
        n, F = -(-T // C), layer.recipe.axes(layer.head_dim, layer.value_dim)["F"]
        bound = self._bound_with(C + F)
        options = {"dtype": inputs.v.dtype, "device": inputs.v.device}
        units = torch.eye(C + F, **options)
        fills = bound.padding_values
        gates = {name: _rows(x, C, fills[name]) for name, x in inputs.gates.items()}
        chunks = replace(
            inputs,
            q=_rows(inputs.q, C),
            k=_rows(inputs.k, C),
            v=units[:C].unsqueeze(1).expand(B * n, C, H, C + F),
            gates=gates,
        )
        init = functional.pad(units[C:, C:], (0, 0, C, 0)).expand(H, C + F, F)
        state = initial_state(bound, B=B * n, init=init, **options)
        position = (start + C * torch.arange(n, device=state.position.device)).repeat(B)
        state = replace(state, position=position, position_on_host=None)
        call = replace(make_call(layer, chunks, state), bound=bound)
        if T % C:
            lengths = torch.full((B, n), C, device=inputs.v.device)
            lengths[:, -1] = T % C
            call.lengths = lengths.flatten()
        call.chunk_size = None
        y, final_memory = run_call(call)
        assert final_memory is not None
        A, Q = y.unflatten(0, (B, n)).unflatten(3, (H, -1)).split([C, F], dim=-1)
        N, M = final_memory.weights[0].unflatten(0, (B, n)).split([C, F], dim=3)
        return A, Q, N, M


def _num_digits(x: Tensor) -> Tensor:
    """Return the number of binary digits of integers from 0 to 2^53."""
    return torch.frexp(x.double()).exponent.long()


def _take_levels(weights: Tensor, level: Tensor) -> Tensor:
    """Return ``weights[b, n, t, h, g, level[n, t, j]]``, ``[B, n, C, H, G, J]``."""
    index = level[None, :, :, None, None, :].expand(*weights.shape[:-1], level.shape[-1])
    return weights.gather(-1, index)


def _in_chunks(x: Tensor, C: int, fill: float = 0.0) -> Tensor:
    """``[B, T, ...]`` to ``[B, n, C, ...]``, padded on the right."""
    if missing := -x.shape[1] % C:
        x = torch.cat([x, x.new_full((x.shape[0], missing, *x.shape[2:]), fill)], dim=1)
    return x.unflatten(1, (-1, C))


def _rows(x: Tensor, C: int, fill: float = 0.0) -> Tensor:
    """``[B, T, ...]`` to ``[B n, C, ...]``, padded on the right."""
    return _in_chunks(x, C, fill).flatten(0, 1)


def _select_rows(inputs: MemoryInputs, index: Tensor) -> MemoryInputs:
    """Return the queries, keys, values and gates of some sequences."""
    gates = {name: x[index] for name, x in inputs.gates.items()}
    return replace(inputs, q=inputs.q[index], k=inputs.k[index], v=inputs.v[index], gates=gates)


def _join(levels: dict[int, Tensor], first: int, stop: int, last: int) -> dict[int, Tensor]:
    """Return the levels at token ``stop`` of the associations before token ``first``."""
    joined = min((first ^ stop).bit_length(), last)
    remaining = {i: M for i, M in levels.items() if i >= joined}
    for i, M in levels.items():
        if i < joined:
            remaining[joined] = remaining[joined] + M if joined in remaining else M
    return remaining


def _written_levels(first: int, stop: int, last: int) -> Iterator[tuple[int, slice]]:
    """Yield the levels of tokens from ``first`` at token ``stop``, with slices of the tokens."""
    numbered = range(stop - first)
    for level, part in groupby(numbered, lambda i: min(((first + i) ^ stop).bit_length(), last)):
        indices = [*part]
        yield level, slice(indices[0], indices[-1] + 1)
