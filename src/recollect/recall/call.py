"""Arguments of one call of `recollect.recall`, on their way to an engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from recollect.recall.bound import Bound
from recollect.state.state import State
from recollect.typing import Init

__all__ = ["Call"]


@dataclass(kw_only=True)  # made for every decoded token: frozen ones take five times as long
class Call:
    """What the caller gave; packing makes dense calls of it, with rows padded on the right.

    Attributes:
        bound: the recipe at the sizes of q, k and v, and the engine.
        q, k, v, gates, params, init, state: as `recollect.recall` takes them.
        attention_mask, cu_seqlens: where tokens are real, or documents end; ``None`` once packed.
        causal, chunk_size, output_state: as `recollect.recall` takes them.
        lengths: of a packed call: real tokens per row ``[B]``.
        places: of a packed call: where each token stands in the caller's row, ``[B, T]``.
        sure: whether whoever calls made the gates and params, and of the same projections as in an
            earlier call: their names, shapes and ranges are then not looked at again.
        sources: tensors that params were made of, or ``None``: they are themselves what was given.
        documents: whether the rows of a packed call are documents of the caller's only row.
    """

    bound: Bound
    q: Tensor
    k: Tensor
    v: Tensor
    gates: Mapping[str, Tensor]
    params: Mapping[str, Tensor]
    init: Init | None = None
    state: State | None = None
    attention_mask: Tensor | None = None
    cu_seqlens: Tensor | None = None
    causal: bool = True
    chunk_size: int | None = None
    output_state: bool = True
    lengths: Tensor | None = None
    places: Tensor | None = None
    sure: bool = False
    sources: Sequence[Tensor] | None = None
    documents: bool = False
