"""Mamba-3: a state-space model with the trapezoidal rule and angles that depend on the token.

Examples:
    >>> rc.zoo.names("mamba3")
    ['mamba3', 'mamba3_mimo']
    >>> print(rc.zoo.get("mamba3").rule)
    M_t = α_t M_(t−1) + (1 − λ_t) α_t Δ_t v_(t−1) k_(t−1)ᵀ + λ_t Δ_t v_t k_tᵀ,  α_t = exp(−Δ_t a_t)
"""

from __future__ import annotations

from dataclasses import replace

from recollect.choices.algorithm.descent import GradientDescent
from recollect.choices.bias.losses import DotProduct
from recollect.choices.context.windows import Window
from recollect.choices.retention.base import Decay
from recollect.layer.options import GateOptions, LayerOptions, Tie
from recollect.recipe.recipe import Recipe
from recollect.zoo.fidelity import exact
from recollect.zoo.preset import preset
from recollect.zoo.references import Paper

__all__ = ["mamba3", "mamba3_mimo"]

_PAPER = Paper(
    "Lahoti et al., Mamba-3: improved sequence modeling using state space principles", 2026
).at("arXiv 2603.15569")
_NOTES = {
    "layer": "Every head has k, q and angles of its own; Mamba-3 shares them between heads.",
    "query_key_norm": "Factors of the RMS norm are learned per head.\n"
    "Channels i and i + K/4 of the first half of k and q are turned together.",
}
# 0.001 to 0.1, as published
_DELTA = GateOptions(activation="softplus", init=0.01, head_spread=10.0)


def _trapezoidal() -> tuple[Recipe, LayerOptions]:
    """Return the recipe and the layer of one association per token."""
    recipe = Recipe(bias=DotProduct(), context=Window(size=2), retention=Decay())
    return recipe, LayerOptions(
        conv_size=0,
        conv_activation="none",
        qk_norm="rms",
        qk_affine=True,
        complex_decay="input",
        partial_rotary_factor=0.5,
        value_skip=True,
        value_skip_per="head",
        output_norm="none",
        gate_options={
            "lr": _DELTA,
            "log_decay": GateOptions(source="input"),
            "window": GateOptions(activation="sigmoid", low=0.0, high=1.0, init=0.5),
        },
        ties=(
            Tie(target="log_decay", source="lr", rule="rate"),
            Tie(target="window", source="log_decay", rule="trapezoid"),
            Tie(target="angle", source="lr", rule="rate"),
        ),
    )


@preset(
    "Mamba-3",
    rule="M_t = α_t M_(t−1) + (1 − λ_t) α_t Δ_t v_(t−1) k_(t−1)ᵀ + λ_t Δ_t v_t k_tᵀ,  "
    "α_t = exp(−Δ_t a_t)",
    references=(_PAPER,),
    fidelity=exact(
        "the trapezoidal recurrence with rotated k and q, a_t = softplus(linear(x_t))", **_NOTES
    ),
)
def mamba3() -> tuple[Recipe, LayerOptions]:
    """Every token writes its association and that of the previous token."""
    return _trapezoidal()


@preset(
    "Mamba-3 with several inputs and outputs (MIMO)",
    rule="M_t = α_t M_(t−1) + Σ_j ((1 − λ_t) α_t Δ_t v_(t−1,j) k_(t−1,j)ᵀ + λ_t Δ_t v_tj k_tjᵀ),  "
    "v_tj = p_j ⊙ v_t,  y_t = Σ_j o_j ⊙ (M_t q_tj + D ⊙ v_tj) ⊙ silu(g_j ⊙ z_t),  "
    "α_t = exp(−Δ_t a_t),  j = 1..R",
    twin_of="mamba3",
    references=(_PAPER,),
    fidelity=exact(
        "the trapezoidal recurrence with rotated k_j and q_j, a_t = softplus(linear(x_t))",
        window="R is 4, as published.",
        **{**_NOTES, "query_key_norm": f"{_NOTES['query_key_norm']}\nFactors differ between j."},
    ),
)
def mamba3_mimo() -> tuple[Recipe, LayerOptions]:
    """Mamba-3 with four associations and four queries per token and head."""
    recipe, options = _trapezoidal()
    several = recipe.replace(algorithm=GradientDescent(updates_per_token=4))
    return several, replace(options, mimo=True)
