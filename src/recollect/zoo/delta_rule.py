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
from recollect.zoo.preset import Fidelity, Reference, preset
from recollect.zoo.sources import AM, COMMON_LAYER, LOGSIGMOID_DECAY, MIRAS, TTR

__all__ = [
    "delta_net",
    "delta_product",
    "gated_delta_net",
    "gated_delta_product",
    "momentum_delta_net",
]

_DELTA_PRODUCT = Reference(
    paper="Siems et al., DeltaProduct", year=2025, where="eqs. 3–4 and section 3"
)
_REFLECTING = LayerOptions(gate_options={"lr": GateOptions(low=0.0, high=2.0, init=1.0)})


@preset(
    "DeltaNet",
    row=36,
    rule="M_t = M_(t−1)(I − β_t k_t k_tᵀ) + β_t v_t k_tᵀ",
    references=(
        TTR("eq. 29"),
        Reference(
            paper="Schlag et al., Linear transformers are secretly fast weight programmers",
            year=2021,
            where="section 4.2",
        ),
        Reference(
            paper="Yang et al., Parallelizing linear transformers with the delta rule",
            year=2024,
            where="section 2.2",
        ),
    ),
    fidelity=Fidelity(
        kind="exact",
        source="TTR eq. 29",
        deviations=(COMMON_LAYER,),
    ),
)
def delta_net() -> tuple[Recipe, LayerOptions]:
    """What the memory predicts at the key is replaced by a share β of the value."""
    return Recipe(), LayerOptions()


@preset(
    "DeltaNet with momentum",
    row=37,
    rule="C_t = θ_t C_(t−1) + β_t v_t k_tᵀ,  M_t = M_(t−1)(I − β_t k_t k_tᵀ) + C_t",
    references=(AM("table 2"),),
    fidelity=Fidelity(
        kind="reconstruction",
        source="AM table 2: the momentum acts on the write only",
        source_equation=(
            "S_t = A_t S_(t−1) B_t + C_t  (AM eq. 35)\n"
            "A_t = I,  B_t = I − k_t k_tᵀ,  C_t = η_t C_(t−1) + v_t k_tᵀ  (AM table 2)"
        ),
        deviations=(
            "Steps have a rate β_t; AM prints none.",
            "The momentum θ_t is a gate of the token; AM leaves open what it comes from.",
            COMMON_LAYER,
        ),
    ),
)
def momentum_delta_net() -> tuple[Recipe, LayerOptions]:
    """Past writes go on being written for a while, erasures act at once."""
    return Recipe(algorithm=Momentum(momentum_on="value")), LayerOptions()


@preset(
    "Gated DeltaNet",
    row=38,
    rule="M_t = α_t M_(t−1)(I − β_t k_t k_tᵀ) + β_t v_t k_tᵀ",
    references=(
        TTR("eq. 41"),
        Reference(paper="Yang et al., Gated delta networks", year=2024, where="eq. 10"),
    ),
    fidelity=Fidelity(
        kind="exact",
        source="TTR eq. 41",
        deviations=(
            LOGSIGMOID_DECAY,
            COMMON_LAYER,
        ),
    ),
)
def gated_delta_net() -> tuple[Recipe, LayerOptions]:
    """The delta rule on a memory that has already decayed."""
    return Recipe(retention=Decay(when="before")), LayerOptions()


@preset(
    "DeltaProduct",
    row=43,
    rule="M_(t,j) = M_(t,j−1)(I − β_(t,j) k_(t,j) k_(t,j)ᵀ) + β_(t,j) v_(t,j) k_(t,j)ᵀ,  j = 1..n",
    references=(_DELTA_PRODUCT, MIRAS("table 1")),
    fidelity=Fidelity(
        kind="exact",
        source="DeltaProduct with n = 2 and β in [0, 2], whose factors may reflect",
        deviations=(
            (
                "MIRAS's table 1 prints another second product; the preset has that of the "
                "DeltaProduct paper."
            ),
            COMMON_LAYER,
        ),
    ),
)
def delta_product() -> tuple[Recipe, LayerOptions]:
    """Several steps of the delta rule per token, so that the state may be permuted."""
    return Recipe(algorithm=GradientDescent(updates_per_token=2)), _REFLECTING


@preset(
    "Gated DeltaProduct",
    row=43,
    rule="M_(t,0) = α_t M_(t−1), then as DeltaProduct",
    references=(_DELTA_PRODUCT,),
    fidelity=Fidelity(
        kind="exact",
        source="gated DeltaProduct: one decay per token, before its first step",
        deviations=(
            LOGSIGMOID_DECAY,
            COMMON_LAYER,
        ),
    ),
)
def gated_delta_product() -> tuple[Recipe, LayerOptions]:
    """DeltaProduct on a memory that has already decayed."""
    recipe = Recipe(algorithm=GradientDescent(updates_per_token=2), retention=Decay(when="before"))
    return recipe, _REFLECTING
