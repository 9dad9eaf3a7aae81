"""The layer of `AsContext`: a memory as the context of attention to segments (Titans' MAC).

Segments come one after the other, because each reads what the one before it taught the memory. In
a segment all tokens run at once. The attention layer runs over the stream

    p_1 … p_P, h_1, x_1, h_2, x_2, …, h_C, x_C

from an empty state, and what it says at x_j is y_j. In a causal layer x_j then meets the persistent
tokens, the retrievals h_1 … h_j and the tokens x_1 … x_j, which is the mask of eqs. 22–23; and the
state of any causal layer continues the stream at any token.

What one part says is another's input, and no residual stream is between them, so both h and what
the memory learns have RMS 1 per channel but for learned weights, as a block's norm gives its layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from recollect.blocks.composed import Composed, GateOf, PersistentTokens, initial_memory_of, kept
from recollect.blocks.compositions import AsContext
from recollect.blocks.state import MixerState
from recollect.layer.memory_layer import NORM_EPS, MemoryLayer
from recollect.layer.state import LayerState
from recollect.recall.packing import CompactedBatch, compact, scatter
from recollect.recall.reading import read

__all__ = ["AsContextLayer", "Retrieval"]

BESIDE = ("conv", "phase", "shift")


class AsContextLayer(Composed):
    """The layer of `AsContext`.

    Its state is that of the memory, the memory as it was when the open segment began, that of the
    attention to the open segment, and what the last questions leave to the next (the tail of a
    convolution): nothing of it grows with the text.

    Args:
        d_model: width of the tokens.
        mixer: what is composed.
        parts: the layers of ``"memory"`` and ``"attention"``.
    """

    keeps_attention = True

    def __init__(self, d_model: int, mixer: AsContext, parts: Mapping[str, nn.Module]) -> None:
        super().__init__(d_model, mixer, parts)
        self.segment, self.count = mixer.segment, mixer.persistent
        self.persistent = PersistentTokens(self.count, d_model) if self.count else None
        self.retrieved_norm = nn.RMSNorm(d_model, eps=NORM_EPS)
        self.learned_norm = nn.RMSNorm(d_model, eps=NORM_EPS)
        self.gate = GateOf(d_model)
        self.retrieval = Retrieval()

    @property
    def memory(self) -> MemoryLayer:
        """The layer that learns what the attention says."""
        layer = self.parts["memory"]
        assert isinstance(layer, MemoryLayer)
        return layer

    def mix(
        self,
        x: Tensor,
        state: MixerState | None,
        mask: Tensor | None,
        borders: Tensor | None,
        *,
        output_state: bool,
    ) -> tuple[Tensor, MixerState | None]:
        if borders is not None:
            return self._packed(x, state, borders, output_state=output_state)
        if mask is None:
            return self._rows(x, state, None)
        batch = compact(mask)
        y, after = self._rows(batch.gather(x), state, batch.lengths)
        return scatter(y, batch), after

    def _packed(
        self, x: Tensor, state: MixerState | None, borders: Tensor, *, output_state: bool
    ) -> tuple[Tensor, MixerState | None]:
        """Documents as rows; where nobody wants their states, those of like lengths together.

        A row is as long as the longest beside it, and at most twice its own length then.
        """
        documents, flat, after = _documents(borders, x), torch.zeros_like(x[0]), None
        for chosen in [None] if output_state else _of_like_length(documents.lengths):
            group, before = documents, state
            if chosen is not None:
                lengths = documents.lengths[chosen]
                index = documents.index[chosen, : int(lengths.max())]
                group = CompactedBatch(index=index, lengths=lengths)
                before = None if state is None else state.select(chosen)
            real = group.real
            rows = torch.where(real[..., None], x[0][group.index], 0.0)
            y, after = self._rows(rows, before, group.lengths)
            flat = flat.index_copy(0, group.index[real], y[real].to(flat.dtype))
        return flat.unsqueeze(0), after

    def _rows(
        self, x: Tensor, state: MixerState | None, lengths: Tensor | None
    ) -> tuple[Tensor, MixerState]:
        """Rows without padding, or padded on the right only."""
        now = self._start(x) if state is None else _Now.of(state)
        pieces = [*_pieces(now.memory, x, lengths, self.segment)]
        said = [self._piece(piece.take(x), now, piece) for piece in pieces]
        return _joined(said, pieces, x), now.state()

    def _start(self, x: Tensor) -> _Now:
        """Before the first token."""
        _, memory = self.memory(x[:, :0])
        assert memory is not None
        _, attention = self.parts["attention"](x[:, :0])
        return _Now(memory=memory, start=memory, asked=memory, attention=attention)

    def _piece(self, x: Tensor, now: _Now, piece: _Piece) -> Tensor:
        """Outputs of tokens of one segment per row; ``now`` moves on behind them."""
        live, begins = piece.live, piece.begins
        prefix = self.persistent is not None and begins is not False
        if begins is True:
            now.start, now.attention = now.memory, None
        elif begins is not False:
            now.start = now.memory.where(begins, now.start)
            fresh = initial_memory_of(self.parts["attention"])
            now.attention = now.attention.reset(begins, fresh)
        h = _normed(self.retrieved_norm, self._retrieve(x, now, piece.lengths))
        stream = torch.stack([h, x], dim=2).flatten(1, 2)  # h_1, x_1, h_2, x_2, ...
        real = None if live is None else live.repeat_interleave(2, dim=1)
        if prefix:
            assert self.persistent is not None
            learned = self.persistent.rows(x)
            stream = torch.cat([learned, stream], dim=1)
            if real is not None or begins is not True:
                front = torch.ones_like(learned[..., 0], dtype=torch.bool)
                if isinstance(begins, Tensor):
                    front = front & begins[:, None]
                there = torch.ones_like(stream[:, self.count :, 0], dtype=torch.bool)
                real = torch.cat([front, there if real is None else real], dim=1)
        y, after = self.parts["attention"](stream, now.attention, real)
        if piece.index is not None:  # rows begin anew at different tokens, and leave empty slots
            after = kept(self.parts["attention"], after, self.count + 2 * self.segment)
        now.attention = after
        y = y[:, self.count if prefix else 0 :][:, 1::2]
        read_after, now.memory = self.memory(_normed(self.learned_norm, y), now.memory, live)
        return self.gate(y, read_after)

    def _retrieve(self, x: Tensor, now: _Now, lengths: Tensor | None) -> Tensor:
        """h = M(q(x)) from the memory as it was when the segment began, without writing (21)."""
        layer, asked = self.memory, now.asked
        # Positions are the text's: those of the memory, which has learned as many tokens.
        before = LayerState(
            memory=now.memory.memory, conv=asked.conv, phase=asked.phase, shift=asked.shift
        )
        h, now.asked = self.retrieval(x, layer, now.start, before, lengths)
        return h


class Retrieval(nn.Module):
    """A question to a memory layer: a call of its own, so that it may have hooks as the layer's."""

    def forward(
        self,
        x: Tensor,
        layer: MemoryLayer,
        start: LayerState,
        before: LayerState,
        lengths: Tensor | None,
    ) -> tuple[Tensor, LayerState]:
        """What the layer says, and what stands beside its memory after these questions.

        Args:
            x: tokens ``[B, T, d_model]``.
            layer: that is asked; it writes nothing.
            start: whose memory answers.
            before: the memory that has learned the tokens before, and what stands beside it.
            lengths: real tokens per row ``[B]``, where rows are padded on the right.
        """
        inputs = layer.associations(x, before, lengths)
        params = inputs.params or None
        h = read(layer.recipe, inputs.q, gates=inputs.gates, state=start.memory, params=params)
        after = LayerState(
            memory=before.memory, conv=inputs.conv, phase=inputs.turned, shift=inputs.shift
        )
        return layer.outputs(h, inputs), after


def _normed(norm: nn.RMSNorm, x: Tensor) -> Tensor:
    return norm(x.to(norm.weight.dtype)).to(x.dtype)


@dataclass(kw_only=True)
class _Now:
    """Where a call has come to: states of the memory, and of the attention to the open segment."""

    memory: LayerState
    start: LayerState
    asked: LayerState
    attention: Any

    @classmethod
    def of(cls, state: MixerState) -> _Now:
        memory, start = state.parts["memory"], state.parts["start"]
        assert isinstance(memory, LayerState) and isinstance(start, LayerState)
        asked = LayerState(memory=memory.memory, **state.tensors)
        attention = state.parts.get("attention")
        return cls(memory=memory, start=start, asked=asked, attention=attention)

    def state(self) -> MixerState:
        beside = {name: getattr(self.asked, name) for name in BESIDE}
        return MixerState(
            parts={"memory": self.memory, "start": self.start, "attention": self.attention},
            tensors={name: x for name, x in beside.items() if x is not None},
            clock="memory",
        )


@dataclass(frozen=True, kw_only=True)
class _Piece:
    """Tokens of one segment in every row.

    Attributes:
        columns: of rows that have all come equally far;
        index: of each row ``[B, w]``, where they have not.
        live: ``[B, w]``, which of these are real; ``None`` where all are.
        lengths: how many are ``[B]``.
        begins: rows whose first token here begins a segment: all, none, or ``[B]``.
    """

    columns: slice | None = None
    index: Tensor | None = None
    live: Tensor | None = None
    lengths: Tensor | None = None
    begins: Tensor | bool = False

    def take(self, x: Tensor) -> Tensor:
        """Its tokens, 0 where there is none."""
        if self.index is None:
            return x[:, self.columns]  # type: ignore[index]
        taken = x.gather(1, self.index[..., None].expand(-1, -1, x.shape[2]))
        return taken if self.live is None else torch.where(self.live[..., None], taken, 0.0)


def _pieces(memory: LayerState, x: Tensor, lengths: Tensor | None, C: int) -> Iterator[_Piece]:
    """The rows of a call cut where segments of C tokens begin."""
    B, T = x.shape[:2]
    seen = memory.seen if lengths is None else None
    if seen is None:
        places: list[int] = memory.position.tolist()
        if lengths is None and len(set(places)) == 1:
            seen = places[0]
    if seen is not None:
        start, stop = 0, C - seen % C
        while start < T:
            begins = (seen + start) % C == 0
            yield _Piece(columns=slice(start, min(stop, T)), begins=begins)
            start, stop = stop, stop + C
        return
    device = x.device
    offset = memory.position.to(device) % C
    size = torch.full((B,), T, device=device) if lengths is None else lengths.to(device)
    done, room = torch.zeros_like(size), C - offset
    starting = offset == 0
    while B and int((size - done).max()):
        left = size - done
        count = torch.minimum(left, room)
        steps = torch.arange(int(count.max()), device=device)
        live = steps < count[:, None]
        index = (done[:, None] + steps).clamp_max(T - 1)
        begins = starting & (count > 0)
        every = bool(begins.all())
        full = bool(live.all())
        yield _Piece(
            index=index,
            live=None if full else live,
            lengths=None if full else count,
            begins=every or (begins if bool(begins.any()) else False),
        )
        done, room, starting = done + count, torch.full_like(count, C), torch.ones_like(starting)


def _joined(said: list[Tensor], pieces: list[_Piece], x: Tensor) -> Tensor:
    """What was said of every piece, at the columns that it came from."""
    if not said:
        return torch.zeros_like(x)
    if pieces[0].index is None:
        return torch.cat(said, dim=1)
    out = torch.zeros_like(x, dtype=said[0].dtype)
    for y, piece in zip(said, pieces, strict=True):
        assert piece.index is not None
        if piece.live is not None:
            y = torch.where(piece.live[..., None], y, 0.0)
        out = out.scatter_add(1, piece.index[..., None].expand_as(y), y)
    return out


def _documents(borders: Tensor, x: Tensor) -> CompactedBatch:
    """Where the tokens of packed documents are, a row for each."""
    starts = borders[:-1].to(device=x.device, dtype=torch.long)
    lengths = borders.diff().to(device=x.device, dtype=torch.long)
    steps = torch.arange(int(lengths.max()) if len(lengths) else 0, device=x.device)
    index = (starts[:, None] + steps).clamp_max(max(x.shape[1] - 1, 0))
    return CompactedBatch(index=index, lengths=lengths)


def _of_like_length(lengths: Tensor) -> list[Tensor]:
    """Documents by the power of two that their lengths reach; empty ones say nothing."""
    groups: dict[int, list[int]] = {}
    for row, length in enumerate(lengths.tolist()):
        if length:
            groups.setdefault(length.bit_length(), []).append(row)
    return [torch.tensor(rows, device=lengths.device) for rows in groups.values()]
