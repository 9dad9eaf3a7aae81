"""The memory layer: tokens in, tokens out, and a state."""

from __future__ import annotations

from recollect.layer.feed_forward import FeedForward, layer_of
from recollect.layer.memory_layer import MemoryLayer
from recollect.layer.numbers import InitialMemory
from recollect.layer.state import LayerState

__all__ = ["FeedForward", "InitialMemory", "LayerState", "MemoryLayer", "layer_of"]
