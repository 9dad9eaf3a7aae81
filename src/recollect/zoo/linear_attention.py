"""Linear attention: one step of gradient descent on the dot product, or on least squares from 0.

Examples:
    >>> rc.zoo.names("linear_attention")
    ['linear_attention', 'normalized_linear_attention']
    >>> print(rc.zoo.get("linear_attention").rule)
    M_t = M_(t−1) + v_t k_tᵀ
"""

from __future__ import annotations

from recollect.choices.algorithm.descent import GradientDescent
from recollect.choices.bias.losses import DotProduct
from recollect.choices.features.finite import EluPlusOne
from recollect.choices.memory.base import Read
from recollect.choices.memory.maps import Matrix
from recollect.layer.options import LayerOptions
from recollect.recipe.recipe import Recipe
from recollect.zoo.preset import Fidelity, Reference, preset
from recollect.zoo.sources import COMMON_LAYER, FREE_LENGTHS, TTR

__all__ = ["linear_attention", "normalized_linear_attention"]

_KATHAROPOULOS = "Katharopoulos et al., Transformers are RNNs"


@preset(
    "linear attention",
    row=11,
    rule="M_t = M_(t−1) + v_t k_tᵀ",
    references=(
        TTR("eqs. 2 and 24"),
        Reference(paper=_KATHAROPOULOS, year=2020, where="eqs. 18–20"),
    ),
    fidelity=Fidelity(
        kind="exact",
        source="TTR eq. 24",
        deviations=(COMMON_LAYER,),
    ),
)
def linear_attention() -> tuple[Recipe, LayerOptions]:
    """A sum of outer products that never forgets."""
    return Recipe(bias=DotProduct(), algorithm=GradientDescent(lr=1.0)), LayerOptions()


@preset(
    "normalised linear attention",
    row=12,
    rule="M_t = M_(t−1) + v_t φ(k_t)ᵀ,  n_t = n_(t−1) + φ(k_t),  y_t = M_t φ(q_t) / n_t·φ(q_t)",
    references=(
        Reference(paper=_KATHAROPOULOS, year=2020, where="eqs. 7 and 18–20"),
        Reference(
            paper="Qin et al., The devil in linear transformer", year=2022, where="NormAttention"
        ),
    ),
    fidelity=Fidelity(
        kind="exact",
        source="Katharopoulos et al. eqs. 18–20 with φ = elu + 1",
        deviations=(
            FREE_LENGTHS,
            "Qin et al. norm the output in place of the denominator; linear_attention does so.",
        ),
    ),
)
def normalized_linear_attention() -> tuple[Recipe, LayerOptions]:
    """Linear attention whose weights are positive and sum to one."""
    recipe = Recipe(
        memory=Matrix(read=Read(normalize="sum")),
        features=EluPlusOne(),
        bias=DotProduct(),
        algorithm=GradientDescent(lr=1.0),
    )
    return recipe, LayerOptions(qk_norm="none")
