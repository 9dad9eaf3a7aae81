"""Softmax attention as a regression: the local constant that fits the values near the query.

What tells these apart is which associations count, and how much: the context.

Examples:
    >>> rc.zoo.names("attention")
    ['softmax_attention', 'qk_norm_attention', 'sliding_window_attention',
     'unnormalized_attention', 'fox', 'bilinear_gated_attention', 'moba']
    >>> print(rc.zoo.get("softmax_attention").rule)
    y_t = Σ_(i≤t) softmax_i(q_t·k_i/√K) v_i
"""

from __future__ import annotations

from dataclasses import replace

from recollect.choices.algorithm.closed_form import Analytic
from recollect.choices.algorithm.descent import GradientDescent
from recollect.choices.bias.losses import DotProduct
from recollect.choices.context.restrictions import Bilinear, TopBlocks
from recollect.choices.context.similar import KernelWeighted
from recollect.choices.context.windows import Prefix, Window
from recollect.choices.features.kernels import Exponential
from recollect.choices.memory.local import LocalConstant
from recollect.choices.memory.maps import Matrix
from recollect.layer.options import GateOptions, LayerOptions
from recollect.recipe.recipe import Recipe
from recollect.zoo.fidelity import exact, reconstruction
from recollect.zoo.preset import preset
from recollect.zoo.references import AM, ATLAS, TTR, Paper

__all__ = [
    "PLAIN_ATTENTION_LAYER",
    "bilinear_gated_attention",
    "fox",
    "moba",
    "qk_norm_attention",
    "sliding_window_attention",
    "softmax_attention",
    "unnormalized_attention",
]

# As in Transformer++: rotary positions, and nothing else around the attention.
PLAIN_ATTENTION_LAYER = LayerOptions(
    conv_size=0,
    conv_activation="none",
    qk_norm="none",
    rope_theta=10000.0,
    output_norm="none",
    output_gate="none",
)
_VASWANI = Paper("Vaswani et al., Attention is all you need", 2017).at("eq. 1")


def _local(context: KernelWeighted) -> Recipe:
    return Recipe(memory=LocalConstant(), context=context, algorithm=Analytic())


@preset(
    "softmax attention",
    rule="y_t = Σ_(i≤t) softmax_i(q_t·k_i/√K) v_i",
    references=(TTR.at("eq. 50"), _VASWANI),
    fidelity=exact("TTR eq. 50"),
)
def softmax_attention() -> tuple[Recipe, LayerOptions]:
    """The mean of the values, weighed by exp(q·k/√K)."""
    return _local(KernelWeighted()), PLAIN_ATTENTION_LAYER


@preset(
    "softmax attention with QK norm",
    rule="y_t = Σ_(i≤t) s_ti v_i / Σ_(i≤t) s_ti,  s_ti = exp(−‖k_i − q_t‖²/2√K)",
    references=(
        TTR.at("eq. 51"),
        Paper("Henry et al., Query-key normalization for transformers", 2020).at("section 3"),
    ),
    fidelity=exact(
        "TTR eq. 51",
        query_key_norm="Queries and keys have length √K, so that the softmax can be sharp at "
        "temperature √K; Henry et al. learn the temperature.",
    ),
)
def qk_norm_attention() -> tuple[Recipe, LayerOptions]:
    """With queries and keys of one length: a Nadaraya–Watson estimator with a Gaussian kernel."""
    return _local(KernelWeighted()), replace(PLAIN_ATTENTION_LAYER, qk_norm="rms")


@preset(
    "sliding-window attention",
    rule="y_t = Σ_(t−c<i≤t) softmax_i(q_t·k_i/√K) v_i",
    references=(
        ATLAS.at("eq. 18"),
        Paper("Beltagy et al., Longformer: the long-document transformer", 2020).at("3.1"),
    ),
    fidelity=exact("ATLAS eq. 18", window="The window holds 128 tokens."),
)
def sliding_window_attention() -> tuple[Recipe, LayerOptions]:
    """Softmax attention over the last c tokens: constant state."""
    return _local(
        KernelWeighted(restrictions=(Window(size=128, gated=False),))
    ), PLAIN_ATTENTION_LAYER


@preset(
    "unnormalised softmax attention",
    rule="y_t = Σ_(i≤t) exp(q_t·k_i/√K) v_i",
    references=(TTR.at("eq. 47"), AM.at("table 2")),
    fidelity=exact(
        "TTR eq. 47",
        query_key_norm="Queries and keys have length √K, and the output is normalised per head "
        "as in AM 5.1, because it grows with the number of tokens.",
    ),
)
def unnormalized_attention() -> tuple[Recipe, LayerOptions]:
    """Linear attention with the exponential kernel's infinitely many features."""
    recipe = Recipe(
        memory=Matrix(),
        features=Exponential(),
        bias=DotProduct(),
        algorithm=GradientDescent(lr=1.0),
    )
    return recipe, replace(PLAIN_ATTENTION_LAYER, qk_norm="rms", output_norm="rms")


@preset(
    "gated softmax attention (forgetting transformer)",
    rule="y_t = Σ_(i≤t) softmax_i(q_t·k_i/√K + Σ_(i<j≤t) log γ_j) v_i",
    references=(
        AM.at("eqs. 30–31 and table 2"),
        Paper("Lin et al., Forgetting transformer: softmax attention with a forget gate", 2025).at(
            "eqs. 4–6"
        ),
    ),
    fidelity=exact(
        "AM eqs. 30–31 with the normaliser they omit",
        source_equation="o_(t,gated) = Σ_(i=1)^t v_i g_i(x_(i:t)) κ(q_t, k_i)  (AM eq. 30)\n"
        "g_i(x_(i:t)) = Π_(j=i+1)^t α_j  (AM eq. 31)",
        normalizer="The weights are divided by their sum; AM omits the normaliser.",
        layer="The layer is that of softmax_attention, without rotary positions.",
    ),
)
def fox() -> tuple[Recipe, LayerOptions]:
    """Softmax attention that forgets: every token's gate discounts all before it."""
    gate = GateOptions(activation="logsigmoid", temperature=1.0)
    return (
        _local(KernelWeighted(restrictions=(Prefix(decay="input"),))),
        replace(PLAIN_ATTENTION_LAYER, rope_theta=None, gate_options={"log_decay": gate}),
    )


@preset(
    "bilinear-gated attention",
    rule="y_t = Σ_(i≤t) g_ti s_ti v_i / Σ_(i≤t) g_ti s_ti,  g_ti = σ(a_i·b_t/√K)",
    references=(AM.at("section 2.1.2, the conjecture after eq. 31"),),
    fidelity=reconstruction(
        "AM section 2.1.2: g_i = W_G(x_i)ᵀ x_t",
        source_equation="o_(t,gated) = Σ_(i=1)^t v_i g_i(x_(i:t)) κ(q_t, k_i)  (AM eq. 30)\n"
        "g_i(x_(i:t)) = W_G(x_i)ᵀ x_t  (AM, after eq. 31)",
        normalizer="The weights are divided by their sum; the paper omits the normaliser.",
        gates="The bilinear form passes through a sigmoid, because the weights of a mean must "
        "not be negative.\n"
        "The bilinear form is one per head, divided by √K.",
        other_forms="The paper's own form is context.Bilinear() with bias.DotProduct(); the "
        "paper tests none.",
    ),
)
def bilinear_gated_attention() -> tuple[Recipe, LayerOptions]:
    """Softmax attention whose weights pass a second, bilinear gate of association and query."""
    return _local(
        KernelWeighted(restrictions=(Bilinear(link="sigmoid", temperature=None),))
    ), PLAIN_ATTENTION_LAYER


@preset(
    "mixture-of-block attention (MoBA)",
    rule="y_t = Σ_(i in the top blocks of t) softmax_i(q_t·k_i/√K) v_i",
    references=(
        AM.at("eqs. 25–27"),
        Paper("Lu et al., MoBA: mixture of block attention for long-context LLMs", 2025).at(
            "eqs. 2–6"
        ),
    ),
    fidelity=exact(
        "AM eqs. 25–27",
        source_equation="o_(t,MoE) = Σ_(e=1)^E g_e(q_t, {k_i}_(i∈Expert(e))) (Σ_(i∈Expert(e)) v_i "
        "κ(q_t, k_i))  (AM eq. 25)\n"
        "g_e = 1 if s_e(q_t) ∈ Topk({s_e′(q_t) | e′ ∈ [E]}, k), 0 otherwise  (AM eq. 26)\n"
        "s_e(q_t) = ⟨q_t, mean-pool({k_i}_(i∈Expert(e)))⟩  (AM eq. 27)",
        normalizer="The weights are divided by their sum; AM omits the normaliser.",
        blocks="The current block is always among the top, as in Lu et al.\n"
        "Blocks hold 64 tokens, and a query reads 3 of them.",
    ),
)
def moba() -> tuple[Recipe, LayerOptions]:
    """Softmax attention over the few blocks whose mean key fits the query."""
    return _local(
        KernelWeighted(restrictions=(TopBlocks(size=64, top_k=3),))
    ), PLAIN_ATTENTION_LAYER
