"""The delta rule on a kernel's features.

Examples:
    >>> rc.zoo.names("delta_former")
    ['delta_former']
    >>> print(rc.zoo.get("delta_former").rule)
    u_t = α_t v_t − β_t Σ_(i<t) κ₁(k_i, w_t) u_i,  y_t = Σ_(i≤t) κ₂(k_i, q_t) u_i
"""

from __future__ import annotations

from recollect.choices.bias.base import Probe
from recollect.choices.bias.losses import L2
from recollect.choices.features.kernels import Exponential
from recollect.choices.memory.base import Read
from recollect.choices.memory.maps import Matrix
from recollect.layer.options import GateOptions, LayerOptions
from recollect.recipe.recipe import Recipe
from recollect.zoo.preset import Fidelity, preset
from recollect.zoo.sources import AM

__all__ = ["delta_former"]


@preset(
    "DeltaFormer",
    row=64,
    rule="u_t = α_t v_t − β_t Σ_(i<t) κ₁(k_i, w_t) u_i,  y_t = Σ_(i≤t) κ₂(k_i, q_t) u_i",
    references=(AM("eqs. 41–42, 94–95 and 111"),),
    fidelity=Fidelity(
        kind="exact",
        source="AM eqs. 41–42 with both kernels of eqs. 94–95, softmax over the past",
        deviations=(
            "α_t and β_t are gates of the token; the paper's experiments learn one number each.",
            "The layer is that of softmax_attention, with rotary positions on q, k and w.",
        ),
    ),
)
def delta_former() -> tuple[Recipe, LayerOptions]:
    """Softmax attention over values from which what was known of them has been subtracted."""
    recipe = Recipe(
        memory=Matrix(read=Read(normalize="sum")),
        features=Exponential(),
        bias=L2(probe=Probe(at="token", kernel=Exponential(), normalize="sum")),
    )
    options = LayerOptions(
        conv_size=0,
        conv_activation="none",
        qk_norm="none",
        rope_theta=10000.0,
        output_norm="none",
        output_gate="none",
        gate_options={"lr": GateOptions(init=0.9)},
    )
    return recipe, options
