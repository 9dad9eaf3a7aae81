"""The delta rule: one step of online gradient descent on least squares.

Examples:
    >>> rc.zoo.names("delta_rule")
    ['delta_net', 'momentum_delta_net', 'gated_delta_net', 'delta_product', 'gated_delta_product']
    >>> print(rc.zoo.get("delta_net").rule)
    M_t = M_(t−1)(I − β_t k_t k_tᵀ) + β_t v_t k_tᵀ
"""

from __future__ import annotations

from recollect.choices.algorithm.descent import GradientDescent, Momentum
from recollect.choices.retention.base import Decay
from recollect.layer.options import GateOptions, LayerOptions
from recollect.recipe.recipe import Recipe
from recollect.zoo.fidelity import exact, reconstruction
from recollect.zoo.preset import preset
from recollect.zoo.references import AM, MIRAS, TTR, Paper

__all__ = [
    "delta_net",
    "delta_product",
    "gated_delta_net",
    "gated_delta_product",
    "momentum_delta_net",
]

_DELTA_PRODUCT = Paper("Siems et al., DeltaProduct", 2025).at("eqs. 3–4 and section 3")
_LR_UP_TO_2 = LayerOptions(gate_options={"lr": GateOptions(low=0.0, high=2.0, init=1.0)})


@preset(
    "DeltaNet",
    rule="M_t = M_(t−1)(I − β_t k_t k_tᵀ) + β_t v_t k_tᵀ",
    references=(
        TTR.at("eq. 29"),
        Paper("Schlag et al., Linear transformers are secretly fast weight programmers", 2021).at(
            "section 4.2"
        ),
        Paper("Yang et al., Parallelizing linear transformers with the delta rule", 2024).at(
            "section 2.2"
        ),
    ),
    fidelity=exact("TTR eq. 29", common_layer=True),
)
def delta_net() -> tuple[Recipe, LayerOptions]:
    """The prediction at the key moves to the value by a fraction β."""
    return Recipe(), LayerOptions()


@preset(
    "DeltaNet with momentum",
    rule="C_t = θ_t C_(t−1) + β_t v_t k_tᵀ,  M_t = M_(t−1)(I − β_t k_t k_tᵀ) + C_t",
    references=(AM.at("table 2"),),
    fidelity=reconstruction(
        "AM table 2: the momentum acts on the write only",
        source_equation="S_t = A_t S_(t−1) B_t + C_t  (AM eq. 35)\n"
        "A_t = I,  B_t = I − k_t k_tᵀ,  C_t = η_t C_(t−1) + v_t k_tᵀ  (AM table 2)",
        gates="Steps have a rate β_t; AM prints none.",
        momentum="The momentum θ_t is a gate of the token; AM leaves its source open.",
        common_layer=True,
    ),
)
def momentum_delta_net() -> tuple[Recipe, LayerOptions]:
    """Past writes go on being written for a while, erasures act at once."""
    return Recipe(algorithm=Momentum(momentum_on="value")), LayerOptions()


@preset(
    "Gated DeltaNet",
    rule="M_t = α_t M_(t−1)(I − β_t k_t k_tᵀ) + β_t v_t k_tᵀ",
    references=(TTR.at("eq. 41"), Paper("Yang et al., Gated delta networks", 2024).at("eq. 10")),
    fidelity=exact("TTR eq. 41", logsigmoid_decay=True, common_layer=True),
)
def gated_delta_net() -> tuple[Recipe, LayerOptions]:
    """The delta rule on a memory that has already decayed."""
    return Recipe(retention=Decay(when="before")), LayerOptions()


@preset(
    "DeltaProduct",
    rule="M_(t,j) = M_(t,j−1)(I − β_(t,j) k_(t,j) k_(t,j)ᵀ) + β_(t,j) v_(t,j) k_(t,j)ᵀ,  j = 1..n",
    references=(_DELTA_PRODUCT, MIRAS.at("table 1")),
    fidelity=exact(
        "DeltaProduct with n = 2 and β in [0, 2], whose factors may reflect",
        other_forms="MIRAS's table 1 prints another second product; the preset has that of the "
        "DeltaProduct paper.",
        common_layer=True,
    ),
)
def delta_product() -> tuple[Recipe, LayerOptions]:
    """Several steps of the delta rule per token, so that the state may be permuted."""
    return Recipe(algorithm=GradientDescent(updates_per_token=2)), _LR_UP_TO_2


@preset(
    "Gated DeltaProduct",
    rule="M_(t,0) = α_t M_(t−1), then as DeltaProduct",
    references=(_DELTA_PRODUCT,),
    fidelity=exact(
        "gated DeltaProduct: one decay per token, before its first step",
        logsigmoid_decay=True,
        common_layer=True,
    ),
    twin_of="delta_product",
)
def gated_delta_product() -> tuple[Recipe, LayerOptions]:
    """DeltaProduct on a memory that has already decayed."""
    recipe = Recipe(algorithm=GradientDescent(updates_per_token=2), retention=Decay(when="before"))
    return recipe, _LR_UP_TO_2
