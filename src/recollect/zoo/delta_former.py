"""The delta rule on a kernel's features.

Examples:
    >>> rc.zoo.names("delta_former")
    ['delta_former']
    >>> print(rc.zoo.get("delta_former").rule)
    u_t = α_t v_t − β_t Σ_(i<t) κ₁(k_i, w_t) u_i,  y_t = Σ_(i≤t) κ₂(k_i, q_t) u_i
"""

from __future__ import annotations

from dataclasses import replace

from recollect.choices.bias.base import Probe
from recollect.choices.bias.losses import L2
from recollect.choices.features.kernels import Exponential
from recollect.choices.memory.base import Read
from recollect.choices.memory.maps import Matrix
from recollect.layer.options import GateOptions, LayerOptions
from recollect.recipe.recipe import Recipe
from recollect.zoo.attention import PLAIN_ATTENTION_LAYER
from recollect.zoo.fidelity import exact
from recollect.zoo.preset import preset
from recollect.zoo.references import AM

__all__ = ["delta_former"]


@preset(
    "DeltaFormer",
    rule="u_t = α_t v_t − β_t Σ_(i<t) κ₁(k_i, w_t) u_i,  y_t = Σ_(i≤t) κ₂(k_i, q_t) u_i",
    references=(AM.at("eqs. 41–42, 94–95 and 111"),),
    fidelity=exact(
        "AM eqs. 41–42 with both kernels of eqs. 94–95, softmax over the past",
        gates="α_t and β_t are gates of the token; the paper's experiments learn one number for "
        "each.",
        layer="The layer is that of softmax_attention, with rotary positions on q, k and w.",
    ),
)
def delta_former() -> tuple[Recipe, LayerOptions]:
    """Softmax attention over values from which what was known of them has been subtracted."""
    recipe = Recipe(
        memory=Matrix(read=Read(normalize="sum")),
        features=Exponential(),
        bias=L2(probe=Probe(at="token", kernel=Exponential(), normalize="sum")),
    )
    return recipe, replace(PLAIN_ATTENTION_LAYER, gate_options={"lr": GateOptions(init=0.9)})
