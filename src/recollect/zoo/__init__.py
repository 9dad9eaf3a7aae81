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

from recollect.zoo import (
    atlas,
    attention,
    decay,
    deep_transformer,
    delta_former,
    delta_rule,
    feature_maps,
    feed_forward,
    hybrid_systems,
    least_mean_squares,
    least_squares,
    linear_attention,
    local_regression,
    miras,
    miras_variants,
    rwkv,
    state_space,
    titans,
    ttt,
    xlstm,
)
from recollect.zoo.preset import (
    Fidelity,
    Hybrid,
    Preset,
    Reference,
    find,
    get,
    hybrid,
    hybrids,
    names,
    preset,
)

__all__ = [
    "Fidelity",
    "Hybrid",
    "Preset",
    "Reference",
    "atlas",
    "attention",
    "decay",
    "deep_transformer",
    "delta_former",
    "delta_rule",
    "feature_maps",
    "feed_forward",
    "find",
    "get",
    "hybrid",
    "hybrid_systems",
    "hybrids",
    "least_mean_squares",
    "least_squares",
    "linear_attention",
    "local_regression",
    "miras",
    "miras_variants",
    "names",
    "preset",
    "rwkv",
    "state_space",
    "titans",
    "ttt",
    "xlstm",
]
