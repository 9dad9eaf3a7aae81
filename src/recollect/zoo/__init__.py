"""The zoo: named systems of the literature as recipes.

::

    rc.zoo.names()
    layer = rc.zoo.get("gated_delta_net").build(d_model=256, num_heads=4)

Examples:
    >>> "gated_delta_net" in rc.zoo.names()
    True
    >>> layer = rc.zoo.get("gated_delta_net").build(d_model=8, num_heads=2)
    >>> layer(torch.randn(1, 4, 8))[0].shape
    torch.Size([1, 4, 8])
"""

from __future__ import annotations

# The order of these imports is the order of the presets.
# isort: off
from recollect.zoo import (
    attention,
    attention_2025,
    local_regression,
    linear_attention,
    feature_maps,
    product_keys,
    decay,
    state_space,
    mamba3,
    rwkv,
    xlstm,
    least_squares,
    delta_rule,
    delta_rule_2025,
    least_mean_squares,
    falcon,
    ttt,
    ttt_2025,
    titans,
    miras,
    miras_variants,
    atlas,
    deep_transformer,
    delta_former,
    feed_forward,
    hybrid_systems,
    published_equations,
)

# isort: on
from recollect.zoo.fidelity import Deviation, Fidelity
from recollect.zoo.preset import Preset, get, names, preset, variants
from recollect.zoo.references import Reference

__all__ = [
    "Deviation",
    "Fidelity",
    "Preset",
    "Reference",
    "atlas",
    "attention",
    "attention_2025",
    "decay",
    "deep_transformer",
    "delta_former",
    "delta_rule",
    "delta_rule_2025",
    "falcon",
    "feature_maps",
    "feed_forward",
    "get",
    "hybrid_systems",
    "least_mean_squares",
    "least_squares",
    "linear_attention",
    "local_regression",
    "mamba3",
    "miras",
    "miras_variants",
    "names",
    "preset",
    "product_keys",
    "published_equations",
    "rwkv",
    "state_space",
    "titans",
    "ttt",
    "ttt_2025",
    "variants",
    "xlstm",
]
