"""Layers whose tokens are one rank's segment of a sequence.

A `MemoryLayer` is taken apart: what its convolution, token shift, rotation and positions need of
the tokens before is exchanged first, in parallel, and only the memory goes its own way. Any other
sequence layer is handed over as a whole, state by state.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from recollect.layer.checks import check_state, check_tokens
from recollect.layer.feed_forward import FeedForward
from recollect.layer.memory_layer import MemoryLayer
from recollect.layer.numbers import RecipeNumbers
from recollect.layer.state import LayerState
from recollect.parallel.exchange import Exchange
from recollect.parallel.link import Ranks
from recollect.parallel.memorise import memorise_segment, own_saved
from recollect.parallel.recall import agreed, number_of_pieces
from recollect.parallel.segment import Segment, segment_of
from recollect.parallel.ways import Way, way_of
from recollect.recall.packing import compact, scatter
from recollect.state.state import State

__all__ = ["Along", "run_feed_forward", "run_layer", "run_memory_layer"]


@dataclass(frozen=True, kw_only=True)
class Along:
    """The ranks that a sequence lies along.

    Attributes:
        link: the ranks.
        way: ``"auto"`` or ``"hand_over"``.
        pieces: of a hand-over, or ``None`` for the default.
    """

    link: Ranks
    way: str = "auto"
    pieces: int | None = None

    @property
    def count(self) -> int:
        """Pieces that a hand-over is cut into, if there are as many rows and heads."""
        return number_of_pieces(self.pieces, self.link.ranks)

    def way_of(self, layer: MemoryLayer) -> Way:
        """How a layer's memory goes from rank to rank."""
        return way_of(layer.recipe, self.way)


def run_memory_layer(
    along: Along,
    layer: MemoryLayer,
    x: Tensor,
    state: LayerState | None = None,
    attention_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    *,
    output_state: bool = True,
) -> tuple[Tensor, LayerState | None]:
    """`MemoryLayer.forward` of this rank's segment.

    Args:
        along: the ranks.
        layer: the same on all ranks.
        x: this rank's tokens ``[B, T, d_model]``.
        state: before the first token of all, the same on all ranks.
        attention_mask: ``[B, T]`` of this rank's tokens.
        cu_seqlens: ``[N + 1]`` borders of this rank's pieces (`recollect.parallel.segment`); then
            there are no states.
        output_state: whether all ranks want the state after the last token of all.
    """
    check_tokens(x, attention_mask, cu_seqlens, d_model=layer.d_model, weight=layer.qkv.weight)
    _check_documents(cu_seqlens, state)
    shift, phase = layer.shift is not None, layer.phase is not None
    check_state(state, rows=x.shape[0], tail=layer.tail, phase=phase, shift=shift)
    exchange = Exchange(along.link, x, shared=tuple(layer.parameters()))
    batch = None if attention_mask is None else compact(attention_mask)
    x = x if batch is None else batch.gather(x)
    lengths = None if batch is None else batch.lengths
    way, pieces = along.way_of(layer), along.count
    sizes = (layer.kv_heads, layer.head_dim, layer.value_dim)
    same = agreed(layer.recipe, way, pieces, sizes)
    segment = segment_of(exchange, x, lengths=lengths, borders=cu_seqlens, same=same)
    before = _before(layer, x, segment, state)
    rows = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    inputs = layer.associations(x, _for_pieces(before, rows), lengths, cu_seqlens)
    call = layer.call(inputs, None, batch=batch, borders=cu_seqlens)
    if state is not None:
        call.state, call.init = state.memory, None
    y, memory = memorise_segment(call, segment, way, pieces=pieces)
    y, after = layer.outputs(y, inputs), None
    if output_state and cu_seqlens is None:
        own = LayerState(memory=memory, conv=inputs.conv, phase=inputs.turned, shift=inputs.shift)
        after = exchange.share(own, along.link.ranks - 1)
    (y,) = exchange.tie(y)
    return y if batch is None else scatter(y, batch), after


def _check_documents(borders: Tensor | None, state: Any) -> None:
    if borders is not None and state is not None:
        raise ValueError(
            "a layer whose tokens lie along several ranks takes packed documents or a state, not "
            "both: give documents from their beginning"
        )


def _before(
    layer: MemoryLayer, x: Tensor, segment: Segment, state: LayerState | None
) -> LayerState:
    """What stands beside the memory before this rank's first token, and where that is."""
    position = segment.position(None if state is None else state.position)
    sizes = (layer.kv_heads, layer.head_dim, layer.value_dim)
    made: dict[str, Tensor] = {}
    if layer.shift is not None:
        given = None if state is None or state.shift is None else _full(state.shift)
        made["shift"] = segment.ends(x, 1, given)[0]
    if layer.conv is not None and layer.conv.width > 1:
        own = _conv_inputs(layer, x, segment, made.get("shift"))
        given = None if state is None or state.conv is None else _full(state.conv)
        made["conv"] = segment.ends(x, layer.conv.width - 1, given, own)[0]
    if layer.phase is not None:
        last = x[:, segment.start :]
        total = layer.phase(last, None, lengths=segment.lengths)[1]
        angle = segment.sums(total)
        if state is not None and state.phase is not None and segment.from_start:
            angle = angle + state.phase
        made["phase"] = angle
    return LayerState(memory=State(weights=(), position=position, sizes=sizes), **made)


def _full(x: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens, and that all of them are there."""
    return x, torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)


def _conv_inputs(layer: MemoryLayer, x: Tensor, segment: Segment, shift: Tensor | None) -> Tensor:
    """The convolution's last inputs of this rank's last piece, aligned right."""
    assert layer.conv is not None
    last, n = x[:, segment.start :], layer.conv.width  # one more: what the token shift looks at
    before = last.new_zeros(last.shape[0], n, last.shape[2])
    if shift is not None and not segment.start:
        before = torch.cat([before[:, 1:], shift], dim=1)
    joined = torch.cat([before, last], dim=1)
    if segment.lengths is None:
        tokens = joined[:, joined.shape[1] - n :]
    else:
        index = segment.lengths[:, None] + torch.arange(n, device=x.device)
        tokens = joined.gather(1, index.unsqueeze(-1).expand(-1, -1, x.shape[2]))
    known = LayerState(
        memory=State(weights=(), position=segment.counts[0], sizes=(1, 1, 1)), shift=tokens[:, :1]
    )
    seen, _ = layer.streams(tokens[:, 1:], known, None, None)
    return layer.project(tokens[:, 1:], seen)


def _for_pieces(state: LayerState, rows: int) -> LayerState:
    """The state of the first piece, then pieces that begin anew."""
    more = rows - state.rows
    return state.map(lambda x: torch.cat([x, x.new_zeros(more, *x.shape[1:])])) if more else state


def run_feed_forward(
    along: Along,
    layer: FeedForward,
    x: Tensor,
    state: LayerState | None = None,
    attention_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    *,
    output_state: bool = True,
) -> tuple[Tensor, LayerState | None]:
    """`FeedForward.forward` of this rank's segment: nothing but the number of tokens goes on.

    Args:
        along: the ranks.
        layer: the same on all ranks.
        x, state, attention_mask, cu_seqlens, output_state: as `run_memory_layer` takes them.
    """
    _check_documents(cu_seqlens, state)
    wanted = output_state and cu_seqlens is None
    y, after = layer_forward(layer, x, state, attention_mask, cu_seqlens, output_state=wanted)
    if after is not None:
        before = 0 if state is None else state.position
        count = Exchange(along.link, x).counts(after.position - before).sum(0)
        memory = State(weights=(), position=before + count, sizes=after.memory.sizes)
        after = LayerState(memory=memory)
    return y, after


def layer_forward(layer: nn.Module, *given: Any, **named: Any) -> tuple[Tensor, Any]:
    """A layer's own forward, whatever has been put in its place."""
    memories = [part for part in layer.modules() if isinstance(part, RecipeNumbers)]
    with own_saved(any(part.inner_gradients for part in memories)):
        return type(layer).forward(layer, *given, **named)  # type: ignore[no-any-return]


def run_layer(
    along: Along,
    layer: nn.Module,
    x: Tensor,
    state: Any = None,
    attention_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    *,
    output_state: bool = True,
) -> tuple[Tensor, Any]:
    """Any sequence layer of this rank's segment: it waits for the state of the rank before.

    Args:
        along: the ranks.
        layer: the same on all ranks.
        x, state, attention_mask, cu_seqlens, output_state: as `run_memory_layer` takes them.
    """
    _check_documents(cu_seqlens, state)
    link = along.link
    exchange = Exchange(link, x, shared=tuple(layer.parameters()))
    segment = segment_of(exchange, x, borders=cu_seqlens, same=(("pieces", along.count),))
    said: list[Tensor] = []
    after: Any = None
    size = x.shape[1] if cu_seqlens is None else int(cu_seqlens[1])
    if segment.start and cu_seqlens is not None:
        rest, states = layer_forward(layer, x[:, size:], None, None, cu_seqlens[1:] - size)
        if not link.last:
            exchange.hand(states.select(torch.tensor([states.rows - 1], device=x.device)))
        said.append(rest)
    # The final state of several pieces would have to be joined, which only memories can.
    count = 1 if output_state else min(x.shape[0], along.count)
    parts: list[Tensor] = []
    for rows in torch.arange(x.shape[0], device=x.device).tensor_split(count):
        before = exchange.take() if link.rank else None if state is None else state.select(rows)
        mask = None if attention_mask is None else attention_mask[rows]
        y, after = layer_forward(layer, x[rows, :size], before, mask, None)
        if not (segment.start or link.last):
            exchange.hand(after)
        parts.append(y)
    y = torch.cat([torch.cat(parts), *said], dim=1)
    final = None
    if output_state and cu_seqlens is None:
        final = exchange.share(after if link.last else None, link.ranks - 1)
    (y,) = exchange.tie(y)
    return y, final
