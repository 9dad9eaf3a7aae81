"""The layer of `Boosted`: a second memory learns what the first one gets wrong.

What the first memory says of a key before it is written is asked one token early: beside q_t, token
t asks k_(t+1), which its memory M_t answers after token t and before token t + 1. So the residuals
of all tokens come from the call that the first memory makes anyway, by whatever engine runs it. The
first token of a row asks the memory as the call found it, without writing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from recollect.blocks.composed import Composed
from recollect.blocks.compositions import Boosted
from recollect.blocks.mixers import Leaf
from recollect.blocks.state import MixerState
from recollect.choices.member import RecipeError
from recollect.layer.checks import check_options, check_sizes
from recollect.layer.memory_layer import MemoryLayer
from recollect.layer.numbers import RecipeNumbers
from recollect.layer.state import Associations, LayerState
from recollect.recall.packing import CompactedBatch, compact, scatter
from recollect.recall.reading import read

__all__ = ["BoostedLayer", "SecondMemory"]


class SecondMemory(RecipeNumbers):
    """The gates, params and initial memory of a recipe that has another layer's q, k and v.

    Args:
        first: the layer that makes them.
        leaf: the recipe, and its options of what is made here.
        share: gates that come from the first memory.

    Raises:
        RecipeError: a recipe that wants keys of its own, or sizes that do not fit it.
    """

    def __init__(self, first: MemoryLayer, leaf: Leaf, share: tuple[str, ...]) -> None:
        super().__init__()
        options = replace(leaf.options, qk_norm=first.options.qk_norm, phase=first.options.phase)
        self.d_model, self.kv_heads = first.d_model, first.kv_heads
        self.head_dim, self.value_dim = first.head_dim, first.value_dim
        check_sizes(
            *(first.d_model, first.heads, first.kv_heads, first.head_dim, first.value_dim),
            *(leaf.recipe, options),
        )
        check_options(leaf.recipe, options)
        self._recipe, self.options = leaf.recipe, options
        self.depth, self.chunk_size = first.depth, first.chunk_size
        self._bind(first.method, first.precision)
        self._make_ties()
        self._make_numbers(without=share)
        if self.key_gates or self.ties.key is not None:
            own = ", ".join(self.key_gates) or "k"
            raise RecipeError(
                f"the second memory of Boosted has the keys of the first, and its recipe or its "
                f"ties make {own} anew: leave that out"
            )
        self.memory = self._initial_memory()

    def gates_of(
        self, x: Tensor, k: Tensor, shared: Mapping[str, Tensor]
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Gates and params of tokens ``x`` with keys ``k``.

        Args:
            x: tokens ``[B, T, d_model]``.
            k: ``[B, T, H, K]``.
            shared: gates of the first memory.
        """
        values = {**self.values(x, {}), **shared}
        if self.options.ties:
            values = self.ties.numbers(values, k, self.gates)
        return self._limited(values)


class BoostedLayer(Composed):
    """The layer of `Boosted`: everything around the memories is the first part's.

    Args:
        d_model: width of the tokens.
        mixer: what is composed.
        parts: the layer of ``"first"``, and the `SecondMemory`.
    """

    reads_itself = ("first",)

    def __init__(self, d_model: int, mixer: Boosted, parts: Mapping[str, nn.Module]) -> None:
        super().__init__(d_model, mixer, parts)
        self.how = mixer

    @property
    def first(self) -> MemoryLayer:
        """The layer whose queries, keys and values both memories have."""
        layer = self.parts["first"]
        assert isinstance(layer, MemoryLayer)
        return layer

    @property
    def second(self) -> SecondMemory:
        """The memory of the residuals."""
        memory = self.parts["second"]
        assert isinstance(memory, SecondMemory)
        return memory

    def mix(
        self,
        x: Tensor,
        state: MixerState | None,
        mask: Tensor | None,
        borders: Tensor | None,
        *,
        output_state: bool,
    ) -> tuple[Tensor, MixerState | None]:
        if mask is None:
            return self._rows(x, state, None, borders, output_state=output_state)
        batch = compact(mask)
        y, after = self._rows(batch.gather(x), state, batch, None, output_state=output_state)
        return scatter(y, batch), after

    def _rows(
        self,
        x: Tensor,
        state: MixerState | None,
        batch: CompactedBatch | None,
        borders: Tensor | None,
        *,
        output_state: bool,
    ) -> tuple[Tensor, MixerState | None]:
        """Rows without padding, or padded on the right only."""
        first, second, how = self.first, self.second, self.how
        begun, learned = self._before(x, state, borders)
        lengths = None if batch is None else batch.lengths
        inputs = first.associations(x, begun, lengths, borders)
        q = inputs.q.unflatten(2, (first.kv_heads, -1))  # [B, T, H, G, K]
        early = [inputs.k.unsqueeze(3)] if how.read == "after" else [inputs.k.unsqueeze(3), q]
        ahead = torch.cat(early, dim=3)
        asked = [q] if how.read == "after" else []
        asked = torch.cat([*asked, ahead.roll(-1, dims=1)], dim=3)  # the last asks for nobody
        said, memory = first.learn(
            replace(inputs, q=asked.flatten(2, 3)),
            begun,
            batch=batch,
            borders=borders,
            output_state=output_state,
        )
        said = said.unflatten(2, (first.kv_heads, -1))  # [B, T, H, ·, V]
        G = q.shape[3] if how.read == "after" else 0
        known = self._known(said[:, :, :, G:], ahead, inputs, begun, borders)
        residual = inputs.v - known[:, :, :, 0].to(inputs.v.dtype)
        if how.clip is not None:
            residual = residual.clamp(-how.clip, how.clip)
        y = said[:, :, :, :G] if how.read == "after" else known[:, :, :, 1:]
        shared = {name: inputs.gates[name] for name in how.share}
        gates, params = second.gates_of(x, inputs.k, shared)
        errors = replace(inputs, v=residual, gates=gates, params=params)
        more, corrected = second.learn(
            errors, learned, batch=batch, borders=borders, output_state=output_state
        )
        more = more.unflatten(2, (first.kv_heads, -1))
        total = _weighed(y, inputs.gates, how.weigh_first) + _weighed(more, gates, how.weigh_second)
        out = first.outputs(total.flatten(2, 3), inputs)
        if memory is None or corrected is None:
            return out, None
        beside = {"conv": inputs.conv, "phase": inputs.turned, "shift": inputs.shift}
        parts = {
            "first": LayerState(memory=memory, **beside),
            "second": LayerState(memory=corrected),
        }
        return out, MixerState(parts=parts, clock="first")

    def _before(
        self, x: Tensor, state: MixerState | None, borders: Tensor | None
    ) -> tuple[LayerState, LayerState | None]:
        """The states of both memories before the first token."""
        if state is not None:
            first, second = state.parts["first"], state.parts["second"]
            assert isinstance(first, LayerState) and isinstance(second, LayerState)
            return first, second
        rows = x.shape[0] if borders is None else borders.shape[0] - 1
        _, begun = self.first(x.new_zeros(rows, 0, x.shape[2]))
        assert begun is not None
        return begun, None

    def _known(
        self,
        said: Tensor,
        ahead: Tensor,
        inputs: Associations,
        begun: LayerState,
        borders: Tensor | None,
    ) -> Tensor:
        """M_(t−1) of what is asked of it ``[B, T, H, ·, V]``, where ``said`` is M_t of the next's.

        The first token of a row, or of a packed document, asks the memory as it was found.
        """
        T = ahead.shape[1]
        if T == 0:
            return said
        params = inputs.params or None

        def found(asked: Tensor) -> Tensor:  # [rows, H, ·, K] to [rows, 1, H, ·, V]
            q = asked.flatten(1, 2).unsqueeze(1)
            y = read(self.first.recipe, q, state=begun.memory, params=params)
            return y.unflatten(2, asked.shape[1:3])

        if borders is None:
            return torch.cat([found(ahead[:, 0]).to(said.dtype), said[:, :-1]], dim=1)
        starts = borders[:-1].to(device=said.device, dtype=torch.long)
        there = borders.diff().to(said.device) > 0
        firsts = found(ahead[0, starts.clamp_max(T - 1)])[there, 0]
        return said.roll(1, dims=1).index_copy(1, starts[there], firsts.to(said).unsqueeze(0))


def _weighed(y: Tensor, gates: Mapping[str, Tensor], name: str | None) -> Tensor:
    """What was read ``[B, T, H, G, V]`` times the gate ``[B, T, H]`` of that name, if any."""
    if name is None:
        return y
    gate = gates[name].exp() if name.startswith("log_") else gates[name]
    return y * gate[..., None, None].to(y.dtype)
