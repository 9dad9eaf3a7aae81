"""The one legend of axis letters and the names that every module shares.

=====  ==========================================================
 B      batch row
 T      token
 H      head = one memory (query heads are a multiple of memories)
 G      query heads that read the same memory
 K      key and query channels, before features
 F      feature channels (K when the features are the identity)
 V      value channels
 M      hidden channels of a deep memory
 C      chunk (an execution detail)
 b      inner batch of the algorithm (part of the model)
 c      context window, in associations
 n      associations per token
=====  ==========================================================

Public tensors are ``[B, T, H, D]``; per-token scalars are ``[B, T, H]``; decays are logs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

from torch import Tensor

Gates: TypeAlias = Mapping[str, Tensor]
"""Per-token numbers by gate name, each ``[B, T, H]`` or with one more axis."""

Params: TypeAlias = Mapping[str, Tensor]
"""Learned tensors of a recipe by param name, each ``[H, ...]``."""

Weights: TypeAlias = tuple[Tensor, ...]
"""One tensor per map of a memory, each ``[B, H, out, in]`` (``[B, H, V]`` for a vector)."""

Init: TypeAlias = Tensor | Sequence[Tensor]
"""Initial memory A0: one ``[H, out, in]`` tensor per map, or the only one by itself."""
