"""Regression around every query: softmax attention with slopes, and least squares on a kernel.

Examples:
    >>> rc.zoo.names("local_regression")
    ['local_linear_attention', 'local_quadratic_attention', 'parallax',
     'kernel_regression_attention', 'memory_mosaics']
    >>> print(rc.zoo.get("local_linear_attention").rule)
    [y_t M_t] = (Vᵀ W X)(Xᵀ W X + λ)⁻¹,  X = [1, k_i − q_t],  W = diag(exp(q_t·k_i/√K))
"""

from __future__ import annotations

import math
from dataclasses import replace

from recollect.choices.algorithm.closed_form import Analytic
from recollect.choices.context.restrictions import SkipFirst
from recollect.choices.context.similar import KernelWeighted
from recollect.choices.context.windows import Prefix
from recollect.choices.features.kernels import Gaussian
from recollect.choices.memory.local import LocalConstant, LocalPolynomial
from recollect.choices.memory.maps import Matrix
from recollect.layer.options import GateOptions, LayerOptions, Tie
from recollect.recipe.recipe import Recipe
from recollect.zoo.attention import PLAIN_ATTENTION_LAYER
from recollect.zoo.fidelity import exact
from recollect.zoo.preset import preset
from recollect.zoo.references import TTR, Paper

__all__ = [
    "kernel_regression_attention",
    "local_linear_attention",
    "local_quadratic_attention",
    "memory_mosaics",
    "parallax",
]

_DEVIATIONS = {
    "ridge": "The slopes have a ridge λ of 1, in units of the total weight; without one there is "
    "no solution before D_k tokens.",
    "query_key_norm": "Queries and keys have length √K, at which the exponential's weights are the "
    "Gaussian's.",
}


def _local(degree: int) -> tuple[Recipe, LayerOptions]:
    recipe = Recipe(
        memory=LocalPolynomial(degree=degree),
        context=KernelWeighted(),
        algorithm=Analytic(ridge=1.0),
    )
    return recipe, replace(PLAIN_ATTENTION_LAYER, qk_norm="rms")


@preset(
    "local linear attention",
    rule="[y_t M_t] = (Vᵀ W X)(Xᵀ W X + λ)⁻¹,  X = [1, k_i − q_t],  W = diag(exp(q_t·k_i/√K))",
    references=(TTR.at("eqs. 52–54"),),
    fidelity=exact(
        "TTR eqs. 52–54",
        source_equation="[M^[0] M^[1]] = (V_tᵀ W_t X_t)(X_tᵀ W_t X_t)⁻¹,  "
        "W_t ≜ diag(s(k_1, q), …, s(k_t, q))  (TTR eq. 52)",
        **_DEVIATIONS,
    ),
)
def local_linear_attention() -> tuple[Recipe, LayerOptions]:
    """Softmax attention that fits a slope around the query as well as a value."""
    return _local(1)


@preset(
    "local quadratic attention",
    rule="as local linear attention, with X = [1, k_i − q_t, (k_i − q_t)²]",
    references=(TTR.at("eq. 49, p = 2"),),
    fidelity=exact(
        "TTR eq. 49",
        source_equation="m̂_q(k) = M^[0] + M^[1](k − q) + M^[2](k − q, k − q) + … "
        "+ M^[p](k − q, …, k − q)  (TTR eq. 49)",
        **_DEVIATIONS,
    ),
)
def local_quadratic_attention() -> tuple[Recipe, LayerOptions]:
    """Softmax attention that fits a slope and a curvature around the query."""
    return _local(2)


@preset(
    "Parallax",
    rule="y_t = (1 + Σ_i p_ti r_t·k_i) Σ_i p_ti v_i − Σ_i p_ti (r_t·k_i) v_i,  "
    "p_ti = softmax_i(q_t·k_i/√K)",
    references=(
        Paper(
            "Zuo et al., Parallax: parameterized local linear attention for language modeling", 2026
        ).at("arXiv 2605.29157, algorithm 1"),
    ),
    fidelity=exact(
        "algorithm 1 of Zuo et al., in the form of flash-linear-attention",
        gates="r_t is a full projection of the token with rotary positions, as q_t and k_t.\n"
        "Query heads that share a key also share r_t; the paper has one per query head.",
        layer="The layer is that of softmax_attention.",
    ),
)
def parallax() -> tuple[Recipe, LayerOptions]:
    """Local linear attention with a slope of the query in place of the solution of the fit."""
    recipe = Recipe(
        memory=LocalPolynomial(slope="input"), context=KernelWeighted(), algorithm=Analytic()
    )
    return recipe, PLAIN_ATTENTION_LAYER


@preset(
    "kernel regression attention",
    rule="y_t = Vᵀ (κ(K, K) + λ)⁻¹ κ(K, q_t) over i ≤ t",
    references=(
        TTR.at("eq. 43"),
        Paper(
            "Garnelo and Czarnecki, Exploring the space of key-value-query models with intention",
            2023,
        ).at("section 3"),
        Paper(
            "Chen et al., Skyformer: remodel self-attention with Gaussian kernel and Nyström "
            "method",
            2021,
        ).at("section 4"),
    ),
    fidelity=exact(
        "TTR eq. 43 with a ridge",
        source_equation="m_(k,t)(q) = V_tᵀ k(K_t, K_t)⁻¹ k(K_t, q)  (TTR eq. 43)",
        ridge="A ridge of 1, the kernel of equal keys, keeps the factor positive in float32; eq. "
        "43 has none.",
        query_key_norm="Queries and keys have length √K, at which the Gaussian is exp(q·k/√K) up "
        "to a factor.",
        other_forms="Intention's kernel is linear, and Skyformer's is the Gaussian without the "
        "inverse.",
    ),
)
def kernel_regression_attention() -> tuple[Recipe, LayerOptions]:
    """Least squares over all of the past, on infinitely many features."""
    recipe = Recipe(
        memory=Matrix(), features=Gaussian(), context=Prefix(), algorithm=Analytic(ridge=1.0)
    )
    return recipe, replace(PLAIN_ATTENTION_LAYER, qk_norm="rms")


@preset(
    "Memory Mosaics",
    rule="y_t = Σ_(i<t) s_ti v_i / Σ_(i<t) s_ti,  s_ti = exp(−‖k_t − k_i‖²/2),  "
    "k_t = ζ_k k̄_t/‖k̄_t‖,  k̄_t = λ k̄_(t−1) + W_K x_t,  v_t = ζ_v v̄_t/‖v̄_t‖,  "
    "v̄_t = W_V ((1 − ξ_v) x_(t+1) + ξ_v x_t)",
    references=(
        Paper("Zhang et al., Memory Mosaics", 2024).at(
            "arXiv 2405.06394, contextual memory units of the language model"
        ),
    ),
    fidelity=exact(
        "the contextual memory units of Zhang et al., in the form of their code",
        memory="The pair (k_(t−1), v_(t−1)) is stored at token t, the first that can compute the "
        "value.\n"
        "The first token stores no pair and outputs 0.",
        decay="λ per head starts at e^(−0.5) to e^(−5), with −log λ spread geometrically; the "
        "authors spread it evenly.",
        query_key_norm="The length ζ_k of keys, per head, starts at e and has no upper limit; the "
        "authors' is e⁵.",
        gates="The weight ξ_v starts at 0.5 per head; the authors draw it between 0 and 1.",
        layer="The layer has no convolution, positions, norm or output gate, and its maps have no "
        "bias.\n"
        "The paper's persistent memory units replace the feed-forward network and are not part of "
        "the layer.",
    ),
)
def memory_mosaics() -> tuple[Recipe, LayerOptions]:
    """Gaussian kernel regression that predicts the next value from a leaky average of the past."""
    recipe = Recipe(
        memory=LocalConstant(),
        context=KernelWeighted(kernel=Gaussian(bandwidth=2.0), restrictions=(SkipFirst(size=1),)),
        algorithm=Analytic(),
    )
    ties = (
        Tie(target="k", source="k", rule="leaky_average"),
        Tie(target="k", source="k", rule="length", constant=math.e),
        Tie(target="q", source="k", rule="copy"),
        Tie(target="k", source="k", rule="previous"),
        Tie(target="v", source="v", rule="mix"),
        Tie(target="v", source="v", rule="length", constant=math.exp(-0.5)),
    )
    decay = GateOptions(source="learned", init=-math.sqrt(2.5), head_spread=math.sqrt(10.0))
    layer = replace(PLAIN_ATTENTION_LAYER, rope_theta=None, ties=ties)
    return recipe, replace(layer, gate_options={"log_average_decay": decay})
