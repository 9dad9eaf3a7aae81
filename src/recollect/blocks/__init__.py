"""Sequence mixers: recipes composed, as data and as layers.

::

    mac = rc.blocks.MemoryAsContext("titans", "softmax_attention", segment=128, persistent=8)
    layer = rc.blocks.build(mac, d_model=256, num_heads=4)
    y, state = layer(x)

Examples:
    >>> mac = rc.blocks.MemoryAsContext("titans", "softmax_attention", segment=4, persistent=2)
    >>> layer = rc.blocks.build(mac, d_model=8, num_heads=2)
    >>> y, state = layer(torch.randn(1, 6, 8))
    >>> y.shape, state.position
    (torch.Size([1, 6, 8]), tensor([6]))
"""

from __future__ import annotations

from recollect.blocks.builder import build, leaf_inputs
from recollect.blocks.cached import CachedMemory
from recollect.blocks.compositions import (
    MemoryAsContext,
    MemoryAsGate,
    MixtureOfMemories,
    ResidualMemory,
    Sequential,
    read_mixer,
)
from recollect.blocks.levels import Levels
from recollect.blocks.local import LocalMemories
from recollect.blocks.mixers import Mixer, RecipeMixer, as_mixer
from recollect.blocks.self_modifying import SelfModifyingMemory
from recollect.blocks.slots import SlotMemory
from recollect.blocks.state import MixerState

__all__ = [
    "CachedMemory",
    "Levels",
    "LocalMemories",
    "MemoryAsContext",
    "MemoryAsGate",
    "Mixer",
    "MixerState",
    "MixtureOfMemories",
    "RecipeMixer",
    "ResidualMemory",
    "SelfModifyingMemory",
    "Sequential",
    "SlotMemory",
    "as_mixer",
    "build",
    "leaf_inputs",
    "read_mixer",
]
