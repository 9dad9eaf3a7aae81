"""Layers whose tokens are one rank's segment of a sequence.

The convolution, token shift, rotation and positions of a `MemoryLayer` exchange the tokens that
they need first, in parallel. The memory then follows its strategy. Any other sequence layer, and a
layer with recurrences of keys, waits for the state of the previous rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from recollect.functional.packing import compact, scatter
from recollect.layer.checks import check_state, check_tokens
from recollect.layer.feed_forward import FeedForward
from recollect.layer.memory_layer import MemoryLayer
from recollect.layer.recipe_module import RecipeModule, make_call, state_after
from recollect.layer.state import LayerState
from recollect.parallel.exchange import Exchange
from recollect.parallel.link import Link
from recollect.parallel.memorise import keep_saved_tensors, memorise_segment
from recollect.parallel.segment import Segment, segment_of
from recollect.parallel.segment_recall import consensus_values, num_microbatches
from recollect.parallel.strategies import Strategy, strategy_for
from recollect.state.state import State

__all__ = ["ContextRanks", "forward_over_ranks"]


@dataclass(frozen=True, kw_only=True)
class ContextRanks:
    """The ranks that share a sequence."""

    link: Link
    strategy: str = "auto"  # "auto" or "sequential"
    # number of microbatches of the sequential strategy; None for the default
    pieces: int | None = None

    @property
    def count(self) -> int:
        """Maximum number of microbatches of the sequential strategy."""
        return num_microbatches(self.pieces, self.link.ranks)

    def strategy_for(self, layer: MemoryLayer) -> Strategy:
        """Return the strategy of a layer's memory."""
        return strategy_for(layer.recipe, self.strategy)


def run_memory_layer(
    context_ranks: ContextRanks,
    layer: MemoryLayer,  # equal on all ranks
    x: Tensor,  # this rank's tokens [B, T, d_model]
    # state before the first token of the sequence, equal on all ranks
    state: LayerState | None = None,
    attention_mask: Tensor | None = None,  # [B, T] of this rank's tokens
    # [N + 1] boundaries of this rank's pieces (`recollect.parallel.segment`), without states
    cu_seqlens: Tensor | None = None,
    *,
    # whether to return the state after the last token of the sequence
    output_final_state: bool = True,
) -> tuple[Tensor, LayerState | None]:
    """Run `MemoryLayer.forward` on this rank's segment."""
    check_tokens(x, attention_mask, cu_seqlens, d_model=layer.d_model, weight=layer.qkv.weight)
    _check_documents(cu_seqlens, state)
    check_state(state, rows=x.shape[0])
    if state is not None:
        layer.check_state_shapes(state)
    exchange = Exchange(context_ranks.link, x, shared=tuple(layer.parameters()))
    batch = None if attention_mask is None else compact(attention_mask)
    x = x if batch is None else batch.gather(x)
    lengths = None if batch is None else batch.lengths
    strategy, pieces = context_ranks.strategy_for(layer), context_ranks.count
    sizes = (layer.num_kv_heads, layer.head_dim, layer.value_dim)
    same = consensus_values(layer.recipe, strategy, pieces, sizes)
    segment = segment_of(exchange, x, lengths=lengths, boundaries=cu_seqlens, same=same)
    initial = _state_before_segment(layer, x, segment, state)
    rows = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    inputs = layer.memory_inputs(x, _pad_pieces(initial, rows), lengths, cu_seqlens)
    call = make_call(layer, inputs, None, batch=batch, cu_seqlens=cu_seqlens)
    if state is not None:
        call.state, call.initial_memory = state.memory, None
    y, memory = memorise_segment(call, segment, strategy, pieces=pieces)
    y, final = layer.output(y, inputs), None
    if output_final_state and cu_seqlens is None:
        local = state_after(inputs, memory)
        final = exchange.broadcast_state(local, context_ranks.link.ranks - 1)
    (y,) = exchange.attach_to_outputs(y)
    return y if batch is None else scatter(y, batch), final


def _check_documents(boundaries: Tensor | None, state: Any) -> None:
    if boundaries is not None and state is not None:
        raise ValueError(
            "a layer over several ranks takes packed documents or a state, not both: pass "
            "documents from their start"
        )


def _state_before_segment(
    layer: MemoryLayer, x: Tensor, segment: Segment, state: LayerState | None
) -> LayerState:
    """Return the layer's own tensors and the position before this rank's first token."""
    position = segment.position(None if state is None else state.position)
    sizes = (layer.num_kv_heads, layer.head_dim, layer.value_dim)
    tensors: dict[str, Tensor] = {}
    if layer.shift is not None:
        earlier = None if state is None or state.shift is None else _all_valid(state.shift)
        tensors["shift"] = segment.preceding_tokens(x, 1, earlier)[0]
    if layer.conv is not None and layer.conv.width > 1:
        local = _conv_inputs(layer, x, segment, tensors.get("shift"))
        earlier = None if state is None or state.conv is None else _all_valid(state.conv)
        tensors["conv"] = segment.preceding_tokens(x, layer.conv.width - 1, earlier, local)[0]
    if layer.phase is not None:
        last = x[:, segment.start :]
        total = layer.phase(last, None, lengths=segment.lengths)[1]
        angle = segment.sum_over_preceding(total)
        if state is not None and state.phase is not None and segment.includes_start:
            angle = angle + state.phase
        tensors["phase"] = angle
    return LayerState(memory=State(weights=(), position=position, sizes=sizes), **tensors)


def _all_valid(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return tokens with a mask that is True everywhere."""
    return x, torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)


def _conv_inputs(layer: MemoryLayer, x: Tensor, segment: Segment, shift: Tensor | None) -> Tensor:
    """Return the last convolution inputs of this rank's last piece, aligned right."""
    assert layer.conv is not None
    last, n = x[:, segment.start :], layer.conv.width  # one more, for the token shift
    initial = last.new_zeros(last.shape[0], n, last.shape[2])
    if shift is not None and not segment.start:
        initial = torch.cat([initial[:, 1:], shift], dim=1)
    joined = torch.cat([initial, last], dim=1)
    if segment.lengths is None:
        tokens = joined[:, joined.shape[1] - n :]
    else:
        index = segment.lengths[:, None] + torch.arange(n, device=x.device)
        tokens = joined.gather(1, index.unsqueeze(-1).expand(-1, -1, x.shape[2]))
    shift_state = LayerState(
        memory=State(weights=(), position=segment.counts[0], sizes=(1, 1, 1)), shift=tokens[:, :1]
    )
    shifted, _ = layer.shift_tokens(tokens[:, 1:], shift_state, None, None)
    return layer.project_qkv(tokens[:, 1:], shifted)


def _pad_pieces(state: LayerState, rows: int) -> LayerState:
    """Return the state of the first piece, with empty states for the other pieces."""
    missing = rows - state.rows
    if not missing:
        return state
    return state.map(lambda x: torch.cat([x, x.new_zeros(missing, *x.shape[1:])]))


def run_feed_forward(
    context_ranks: ContextRanks,
    layer: FeedForward,
    x: Tensor,
    state: LayerState | None = None,
    attention_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    *,
    output_final_state: bool = True,
) -> tuple[Tensor, LayerState | None]:
    """Run `FeedForward.forward` on this rank's segment, and exchange the number of tokens."""
    _check_documents(cu_seqlens, state)
    returns_state = output_final_state and cu_seqlens is None
    y, final = original_forward(
        layer, x, state, attention_mask, cu_seqlens, output_final_state=returns_state
    )
    if final is not None:
        initial = 0 if state is None else state.position
        count = context_ranks.link.gather(final.position - initial).sum(0)
        memory = State(weights=(), position=initial + count, sizes=final.memory.sizes)
        final = LayerState(memory=memory)
    return y, final


def original_forward(layer: nn.Module, *args: Any, **kwargs: Any) -> tuple[Tensor, Any]:
    """Call the original forward of a layer."""
    memories = [part for part in layer.modules() if isinstance(part, RecipeModule)]
    with keep_saved_tensors(any(part.inner_gradients for part in memories)):
        return type(layer).forward(layer, *args, **kwargs)  # type: ignore[no-any-return]


def run_layer(
    context_ranks: ContextRanks,
    layer: nn.Module,
    x: Tensor,
    state: Any = None,
    attention_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    *,
    output_final_state: bool = True,
) -> tuple[Tensor, Any]:
    """Run any sequence layer on this rank's segment, after the previous rank's state arrived."""
    _check_documents(cu_seqlens, state)
    link = context_ranks.link
    exchange = Exchange(link, x, shared=tuple(layer.parameters()))
    segment = segment_of(
        exchange, x, boundaries=cu_seqlens, same=(("pieces", context_ranks.count),)
    )
    outputs: list[Tensor] = []
    state_after: Any = None
    size = x.shape[1] if cu_seqlens is None else int(cu_seqlens[1])
    if segment.start and cu_seqlens is not None:
        y, states = original_forward(layer, x[:, size:], None, None, cu_seqlens[1:] - size)
        if not link.last:
            exchange.send_state(states.select(torch.tensor([states.rows - 1], device=x.device)))
        outputs.append(y)
    # Only memories can join the final states of several pieces.
    count = 1 if output_final_state else min(x.shape[0], context_ranks.count)
    parts: list[Tensor] = []
    for rows in torch.arange(x.shape[0], device=x.device).tensor_split(count):
        initial = (
            exchange.recv_state() if link.rank else None if state is None else state.select(rows)
        )
        mask = None if attention_mask is None else attention_mask[rows]
        y, state_after = original_forward(layer, x[rows, :size], initial, mask, None)
        if not (segment.start or link.last):
            exchange.send_state(state_after)
        parts.append(y)
    y = torch.cat([torch.cat(parts), *outputs], dim=1)
    final_state = None
    if output_final_state and cu_seqlens is None:
        final_state = exchange.broadcast_state(state_after if link.last else None, link.ranks - 1)
    (y,) = exchange.attach_to_outputs(y)
    return y, final_state


def forward_over_ranks(layer: nn.Module, context_ranks: ContextRanks) -> Callable[..., Any]:
    """Return the forward method of a sequence layer whose tokens are one rank's segment."""
    if (
        isinstance(layer, MemoryLayer)
        and not layer.ties.num_recurrences
        and all(tie.target != "angle" for tie in layer.options.ties)
    ):
        return partial(run_memory_layer, context_ranks, layer)
    run: Any = run_feed_forward if isinstance(layer, FeedForward) else run_layer
    return partial(run, context_ranks, layer)
