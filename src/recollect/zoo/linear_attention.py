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
from recollect.zoo.fidelity import exact
from recollect.zoo.preset import preset
from recollect.zoo.references import TTR, Paper

__all__ = ["linear_attention", "normalized_linear_attention"]

_KATHAROPOULOS = "Katharopoulos et al., Transformers are RNNs"


@preset(
    "linear attention",
    rule="M_t = M_(t−1) + v_t k_tᵀ",
    references=(TTR.at("eqs. 2 and 24"), Paper(_KATHAROPOULOS, 2020).at("eqs. 18–20")),
    fidelity=exact("TTR eq. 24", common_layer=True),
)
def linear_attention() -> tuple[Recipe, LayerOptions]:
    """A sum of outer products that never forgets."""
    return Recipe(bias=DotProduct(), algorithm=GradientDescent(lr=1.0)), LayerOptions()


@preset(
    "normalised linear attention",
    rule="M_t = M_(t−1) + v_t φ(k_t)ᵀ,  n_t = n_(t−1) + φ(k_t),  y_t = M_t φ(q_t) / n_t·φ(q_t)",
    references=(
        Paper(_KATHAROPOULOS, 2020).at("eqs. 7 and 18–20"),
        Paper("Qin et al., The devil in linear transformer", 2022).at("NormAttention"),
    ),
    fidelity=exact(
        "Katharopoulos et al. eqs. 18–20 with φ = elu + 1",
        no_qk_norm=True,
        normalizer="Qin et al. normalise the output instead of dividing, as linear_attention does.",
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
