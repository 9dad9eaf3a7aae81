"""Sequence mixers: recipes composed, as data and as layers.

::

    mac = rc.blocks.AsContext("titans", "softmax_attention", segment=128, persistent=8)
    layer = rc.blocks.build(mac, d_model=256, heads=4)
    y, state = layer(x)

Examples:
    >>> mac = rc.blocks.AsContext("titans", "softmax_attention", segment=4, persistent=2)
    >>> layer = rc.blocks.build(mac, d_model=8, heads=2)
    >>> y, state = layer(torch.randn(1, 6, 8))
    >>> y.shape, state.position
    (torch.Size([1, 6, 8]), tensor([6]))
"""

from __future__ import annotations

from recollect.blocks.build import build, received
from recollect.blocks.compositions import AsContext, Boosted, Chain, Gated, Routed, Together
from recollect.blocks.files import read_mixer
from recollect.blocks.mixers import Leaf, Mixer, mixer_of
from recollect.blocks.state import MixerState

__all__ = [
    "AsContext",
    "Boosted",
    "Chain",
    "Gated",
    "Leaf",
    "Mixer",
    "MixerState",
    "Routed",
    "Together",
    "build",
    "mixer_of",
    "read_mixer",
    "received",
]
