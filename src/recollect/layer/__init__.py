"""The memory layer: tokens in, tokens out, and a state."""

from __future__ import annotations

from recollect.layer.feed_forward import FeedForward, build_layer
from recollect.layer.inspection import InspectableLayer, MemorySpec
from recollect.layer.memory_layer import MemoryLayer
from recollect.layer.recipe_module import InitialMemory
from recollect.layer.state import LayerState

__all__ = [
    "FeedForward",
    "InitialMemory",
    "InspectableLayer",
    "LayerState",
    "MemoryLayer",
    "MemorySpec",
    "build_layer",
]
