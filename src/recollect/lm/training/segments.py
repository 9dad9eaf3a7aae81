"""Rows in segments: a row of T tokens is processed in N segments, with the state carried over.

The loss of a row is L = Σ_i L_i(θ, s_{i−1}) with s_i = f(θ, s_{i−1}, tokens of segment i). Only one
segment and the states between segments are in memory. There are two gradients:

- *cut*: Σ_i ∂L_i/∂θ with constant s_{i−1}, truncated backpropagation through time. Each segment
  runs forward and backward before the next one.
- *kept*: dL/dθ of the whole row. A first pass computes the states. A second pass runs from the last
  segment to the first: the backward pass of segment i, with g_i = dL/ds_i, computes
  ∂L_i/∂θ + g_i · ∂s_i/∂θ and g_{i−1}.

The last token of a segment predicts the first token of the next. The memory is reset at the start
of a document, between segments and within one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from recollect.blocks.layers import initial_memory_of
from recollect.lm.model.cache import RecollectCache
from recollect.lm.model.config import RecollectConfig
from recollect.lm.model.loss import IGNORE_INDEX, next_token_targets
from recollect.lm.model.model import RecollectForCausalLM

__all__ = [
    "Segment",
    "as_leaves",
    "check_segments",
    "count_targets",
    "float_tensors",
    "split_into_segments",
]


@dataclass(frozen=True, kw_only=True)
class Segment:
    """Tokens of a batch that are processed at once: D documents or parts of documents."""

    inputs: Mapping[str, Any]  # arguments of the forward pass, without the cache
    rows: tuple[int, ...]  # [D], element of the previous segment's states
    starts_document: tuple[bool, ...]  # [D]

    def forward_kwargs(
        self, model: RecollectForCausalLM, cache: RecollectCache | None
    ) -> dict[str, Any]:
        """Return the arguments of the forward pass after the states of the previous segment."""
        if cache is not None:
            if self.rows != tuple(range(cache.batch_size)):
                rows = torch.tensor(self.rows)
                cache = cache.map(lambda state: state.select(rows))
            if any(self.starts_document):
                cache = _reset_rows(model, cache, torch.tensor(self.starts_document))
        return {**self.inputs, "cache": cache, "use_cache": True}


def _reset_rows(model: RecollectForCausalLM, cache: RecollectCache, rows: Tensor) -> RecollectCache:
    """Reset the batch elements of a mask ``[D]`` to the initial memories."""
    layers = [cast(nn.Module, block.layer) for block in model.model.blocks]
    return RecollectCache(
        (
            state.reset(rows, initial_memory_of(layer))
            for state, layer in zip(cache.states, layers, strict=True)
        ),
        cache.past_length,
    )


def split_into_segments(batch: Mapping[str, Tensor], num_segments: int) -> list[Segment]:
    """Split ``input_ids`` and ``labels`` ``[B, T]``; the last segment may be shorter.

    Documents within rows start at the ``cu_seqlens`` of the flattened batch.
    """
    ids, labels = batch["input_ids"], batch["labels"]
    B, T = ids.shape
    cu_seqlens = batch.get("cu_seqlens")
    starts: list[list[int]] = [[] for _ in range(B)]
    for start in [] if cu_seqlens is None else cu_seqlens[:-1].tolist():
        starts[start // T].append(start % T)
    length = -(-T // num_segments)
    segments: list[Segment] = []
    last_document = list(range(B))  # of each row, among the documents of the previous segment
    for begin in range(0, T, length):
        end = min(begin + length, T)
        inner = [[s for s in row if begin < s < end] for row in starts]
        rows: list[int] = []
        starts_document: list[bool] = []
        boundaries: list[int] = []
        for r, row in enumerate(inner):
            rows += [last_document[r]] * (1 + len(row))
            starts_document += [begin in starts[r], *(True for _ in row)]
            boundaries += [r * (end - begin) + s - begin for s in (begin, *row)]
        last_document = [sum(1 + len(row) for row in inner[: r + 1]) - 1 for r in range(B)]
        inputs = {
            "input_ids": ids[:, begin:end],
            "shift_labels": _targets(labels, begin, end, starts),
        }
        if any(inner):
            inputs = {name: x.reshape(1, -1) for name, x in inputs.items()}
            boundaries.append(B * (end - begin))
            inputs["cu_seqlens"] = torch.tensor(boundaries, device=ids.device)
        segments.append(
            Segment(inputs=inputs, rows=tuple(rows), starts_document=tuple(starts_document))
        )
    return segments


def _targets(labels: Tensor, begin: int, end: int, starts: list[list[int]]) -> Tensor:
    """Return the targets of a segment, as `next_token_targets` returns them for whole rows."""
    targets = labels[:, begin + 1 : end + 1].clone()
    if end == labels.shape[1]:
        targets = nn.functional.pad(targets, (0, 1), value=IGNORE_INDEX)
    for r, row in enumerate(starts):
        targets[r, [s - 1 - begin for s in row if begin < s <= end]] = IGNORE_INDEX
    return targets


def count_targets(batch: Mapping[str, Tensor]) -> Tensor:
    """Return the number of targets of a batch."""
    targets = next_token_targets(batch["labels"], None, batch.get("cu_seqlens"))
    return (targets != IGNORE_INDEX).sum()


def check_segments(model: RecollectForCausalLM, num_segments: int) -> None:
    """Raise `ValueError` if the states of a model cannot be carried from segment to segment."""
    if num_segments == 1:
        return
    if not isinstance(model.config, RecollectConfig):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(
            f"[data] segments = {num_segments} needs a model of recollect, and "
            f"{type(model).__name__} is another decoder: leave segments out"
        )
    if not model.has_growing_cache:
        return
    layers = zip(model.config.layer_names, model.config.layer_specs, strict=True)
    name = next(name for name, (mixer, _) in layers if mixer.grows)
    raise ValueError(
        f"[data] segments = {num_segments} carries the state of a memory over, and that of {name} "
        "grows with the text: use a memory or a window of a fixed size, or leave segments out"
    )


def float_tensors(cache: RecollectCache) -> list[Tensor]:
    """Return the floating-point tensors of all states, in a fixed order."""
    tensors: list[Tensor] = []

    def collect(x: Tensor) -> Tensor:
        if x.is_floating_point():
            tensors.append(x)
        return x

    cache.map(lambda state: state.map(collect))
    return tensors


def as_leaves(cache: RecollectCache) -> RecollectCache:
    """Return detached states whose floating-point tensors require gradients."""
    return cache.map(
        lambda state: state.map(
            lambda x: x.detach().requires_grad_() if x.is_floating_point() else x
        )
    )
