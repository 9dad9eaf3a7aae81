"""Attention of 2024 to 2026: keys that later tokens move, and weights without a softmax.

Examples:
    >>> for name in rc.zoo.names("attention_2025"):
    ...     print(f"{name:<15} {rc.zoo.get(name).title}")
    stick_breaking  stick-breaking attention
    path_attention  PaTH attention
    wall_attention  Wall attention
"""

from __future__ import annotations

from dataclasses import replace

from recollect.choices.algorithm.closed_form import Analytic
from recollect.choices.bias.losses import DotProduct
from recollect.choices.context.base import Context
from recollect.choices.context.moved_keys import KeyDecay, KeyReflection
from recollect.choices.context.similar import KernelWeighted
from recollect.choices.context.stick_breaking import StickBreaking
from recollect.choices.memory.local import LocalConstant
from recollect.layer.options import GateOptions, LayerOptions
from recollect.recipe.recipe import Recipe
from recollect.zoo.attention import PLAIN_ATTENTION_LAYER
from recollect.zoo.fidelity import exact
from recollect.zoo.preset import preset
from recollect.zoo.references import Paper

__all__ = ["path_attention", "stick_breaking", "wall_attention"]

_WITHOUT_POSITIONS = replace(PLAIN_ATTENTION_LAYER, rope_theta=None)


def _attention(restriction: Context) -> Recipe:
    return Recipe(
        memory=LocalConstant(),
        context=KernelWeighted(restrictions=(restriction,)),
        algorithm=Analytic(),
    )


@preset(
    "stick-breaking attention",
    rule="y_t = Σ_(i<t) β_ti Π_(i<j<t) (1 − β_tj) v_i,  β_ti = σ(q_t·k_i/√K)",
    references=(
        Paper("Tan et al., Scaling stick-breaking attention", 2024).at(
            "arXiv 2410.17980, definition of the weights"
        ),
    ),
    fidelity=exact(
        "the stick-breaking weights of Tan et al.",
        layer="The layer is that of softmax_attention, without rotary positions.",
    ),
)
def stick_breaking() -> tuple[Recipe, LayerOptions]:
    """A sum of earlier values: each takes a fraction of the weight that later ones leave."""
    return _attention(StickBreaking()).replace(bias=DotProduct()), _WITHOUT_POSITIONS


@preset(
    "PaTH attention",
    rule="y_t = Σ_(i≤t) softmax_i(k_iᵀ H_(i+1)ᵀ … H_tᵀ q_t/√K) v_i,  H_j = I − β_j w_j w_jᵀ",
    references=(
        Paper(
            "Yang et al., PaTH attention: position encoding via accumulating Householder "
            "transformations",
            2025,
        ).at("arXiv 2505.16381, definition of the logits"),
    ),
    fidelity=exact(
        "the logits of Yang et al., with β_j in (0, 2) and ‖w_j‖ = 1",
        gates="w_j is a projection of rank 32; the paper adds a short convolution after it.\n"
        "β_j is 2 sigmoid(linear(x)), as in the paper.",
        layer="The layer is that of softmax_attention, without rotary positions.\n"
        "Query heads that share a key also share w_j and β_j.",
    ),
)
def path_attention() -> tuple[Recipe, LayerOptions]:
    """Softmax attention to keys that every later token reflects."""
    gates = {"reflection": GateOptions(rank=32)}
    return _attention(KeyReflection()), replace(_WITHOUT_POSITIONS, gate_options=gates)


@preset(
    "Wall attention",
    rule="y_t = Σ_(i≤t) softmax_i(Σ_n q_tn k_in Π_(i<j≤t) α_jn/√K) v_i",
    references=(
        Paper(
            "Averbuch and Pai (Tilde Research), Wall attention: length generalization with "
            "diagonal gates",
            2026,
        ).at("blog.tilderesearch.com/blog/wall-attn"),
    ),
    fidelity=exact(
        "the logits of Wall attention, in the form of flash-linear-attention",
        gates="α is sigmoid(linear(x)) per key channel, with a bias of 8 at the start.\n"
        "Query heads that share a key also share α; the source has one per query head.\n"
        "The optional decay per head is context.Prefix(decay='input') as a further restriction.",
        layer="The layer is that of softmax_attention, without rotary positions, output gate and "
        "norm of queries and keys.",
    ),
)
def wall_attention() -> tuple[Recipe, LayerOptions]:
    """Softmax attention to keys whose channels decay at rates of their own."""
    gate = GateOptions(activation="logsigmoid", init=-0.00033540637, head_spread=1.0, rank=0)
    return _attention(KeyDecay()), replace(_WITHOUT_POSITIONS, gate_options={"log_key_decay": gate})
