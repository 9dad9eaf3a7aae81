"""The memory layer: tokens in, tokens out, and a state."""

from __future__ import annotations

from recollect.layer.module import InitialMemory, MemoryLayer
from recollect.layer.state import LayerState

__all__ = ["InitialMemory", "LayerState", "MemoryLayer"]
