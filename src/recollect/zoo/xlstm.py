"""xLSTM's matrix memory: exponential input gates, kept in range by a running maximum.

Examples:
    >>> rc.zoo.names("xlstm")
    ['mlstm']
"""

from __future__ import annotations

from recollect.choices.algorithm.descent import GradientDescent
from recollect.choices.bias.losses import DotProduct
from recollect.choices.memory.base import Read
from recollect.choices.memory.maps import Matrix
from recollect.choices.retention.base import Decay
from recollect.layer.options import GateOptions, LayerOptions
from recollect.recipe.recipe import Recipe
from recollect.zoo.fidelity import exact
from recollect.zoo.preset import preset
from recollect.zoo.references import TTR, Paper

__all__ = ["mlstm"]


@preset(
    "mLSTM (xLSTM)",
    rule="C_t = f_t C_(t−1) + i_t v_t k_tᵀ,  n_t = f_t n_(t−1) + i_t k_t,  "
    "y_t = C_t q_t / max(|n_t·q_t|, 1)",
    references=(Paper("Beck et al., xLSTM", 2024).at("eqs. 19–27"), TTR.at("section 3.1")),
    fidelity=exact(
        "xLSTM eqs. 19–27, i = exp(·), f = sigmoid(·), keys divided by √K",
        layer="The output gate is SiLU; xLSTM has a sigmoid.\nThe convolution is also on values.",
    ),
)
def mlstm() -> tuple[Recipe, LayerOptions]:
    """Linear attention with an input gate that may outweigh the whole past."""
    return Recipe(
        memory=Matrix(read=Read(normalize="floor")),
        bias=DotProduct(),
        retention=Decay(),
        algorithm=GradientDescent(lr="log_input"),
    ), LayerOptions(qk_norm="scaled", gate_options={"log_lr": GateOptions(init=0.0)})
