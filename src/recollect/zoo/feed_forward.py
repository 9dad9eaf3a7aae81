"""Feed-forward networks as memories that are read and never written (AM section 2.1).

The same recipe memorises tokens in a `MemoryLayer`; here its associations are learned.

Examples:
    >>> rc.zoo.names("feed_forward")
    ['ffn_relu', 'ffn_swiglu', 'ffn_moe', 'ffn_multi_head', 'ffn_normalized']
    >>> print(rc.zoo.get("ffn_relu").rule)
    y = W_Vᵀ ReLU(W_K x) = Σ_i v_i ReLU(k_i·x)
"""

from __future__ import annotations

from dataclasses import replace

from recollect.choices.algorithm.closed_form import Analytic
from recollect.choices.bias.losses import DotProduct
from recollect.choices.context.restrictions import Bilinear, TopBlocks
from recollect.choices.context.similar import KernelWeighted
from recollect.choices.features.base import Kernel
from recollect.choices.features.kernels import Exponential, ReluKernel, SwishKernel
from recollect.choices.memory.local import LocalConstant
from recollect.layer.options import LayerOptions
from recollect.recipe.recipe import Recipe
from recollect.zoo.attention import PLAIN_ATTENTION_LAYER
from recollect.zoo.fidelity import exact, reconstruction
from recollect.zoo.preset import preset
from recollect.zoo.references import AM, Paper

__all__ = ["ffn_moe", "ffn_multi_head", "ffn_normalized", "ffn_relu", "ffn_swiglu"]

_PLAIN = replace(PLAIN_ATTENTION_LAYER, rope_theta=None, persistent=4.0, joined=True)
_SHAZEER = "Shazeer, GLU variants improve transformer"


def _sum(kernel: Kernel, *within: Bilinear | TopBlocks) -> Recipe:
    """Σ_i v_i γ_i κ(x, k_i)."""
    return Recipe(
        memory=LocalConstant(),
        bias=DotProduct(),
        context=KernelWeighted(kernel=kernel, restrictions=within),
        algorithm=Analytic(),
    )


@preset(
    "feed-forward network with ReLU",
    rule="y = W_Vᵀ ReLU(W_K x) = Σ_i v_i ReLU(k_i·x)",
    references=(AM.at("eq. 14"),),
    fidelity=exact("AM eq. 14"),
)
def ffn_relu() -> tuple[Recipe, LayerOptions]:
    """A two-layer network: learned keys, learned values, and ReLU as the kernel."""
    return _sum(ReluKernel()), _PLAIN


@preset(
    "SwiGLU feed-forward network",
    rule="y = W_Vᵀ (W_G x ⊙ Swish(W_K x)) = Σ_i v_i (g_i·x) Swish(k_i·x)",
    references=(AM.at("eqs. 28–29"), Paper(_SHAZEER, 2020).at("eq. 6")),
    fidelity=exact("AM eq. 29"),
    twin_of="ffn_relu",
)
def ffn_swiglu() -> tuple[Recipe, LayerOptions]:
    """A network whose pairs pass a second, bilinear gate of the query."""
    return _sum(SwishKernel(), Bilinear()), replace(_PLAIN, persistent=8 / 3)


@preset(
    "mixture of experts",
    rule="y = Σ_(e in the top 2) g_e(x) Σ_(i in expert e) v_i ReLU(k_i·x),  g = softmax(r_e·x)",
    references=(
        AM.at("eq. 24"),
        Paper(
            "Shazeer et al., Outrageously large neural networks: the sparsely-gated "
            "mixture-of-experts layer",
            2017,
        ).at("eqs. 1–5"),
    ),
    fidelity=exact(
        "AM eq. 24",
        gates="g_e is the softmax over the chosen experts (Shazeer et al. eq. 3 without noise), "
        "so that routers learn.",
        blocks="Experts have 16 pairs each, and a token reads 2 of them.",
    ),
    twin_of="ffn_relu",
)
def ffn_moe() -> tuple[Recipe, LayerOptions]:
    """Blocks of pairs, of which a router shows each query the two best."""
    experts = TopBlocks(
        size=16, top_k=2, score="router", include_current=False, weighting="softmax"
    )
    return _sum(ReluKernel(), experts), _PLAIN


@preset(
    "multi-head feed-forward network",
    rule="y = W_O [Σ_i v_(i,1) ReLU(k_(i,1)·x_1); …; Σ_i v_(i,h) ReLU(k_(i,h)·x_h)]",
    references=(AM.at("eqs. 19–23"),),
    fidelity=exact(
        "AM eqs. 19–23", sizes="Each head has as many pairs as one network without heads."
    ),
    twin_of="ffn_relu",
)
def ffn_multi_head() -> tuple[Recipe, LayerOptions]:
    """One network per slice of the token, joined by a matrix."""
    return _sum(ReluKernel()), replace(_PLAIN, joined=False)


@preset(
    "normalised feed-forward network",
    rule="y = Σ_i v_i exp(k_i·x/√K) / Σ_i exp(k_i·x/√K)",
    references=(AM.at("eq. 18, over learned pairs"),),
    fidelity=reconstruction(
        "AM eq. 18",
        source_equation="S_t φ(q_t) = Σ_(i=1)^t v_i exp(q_tᵀ k_i) / Σ_(i=1)^t exp(q_tᵀ k_i)  "
        "(AM eq. 18)",
        normalizer="AM mentions a denominator and prints none; this is the one of attention (eq. "
        "18), over learned pairs.\n"
        "The exponent is divided by √K.",
    ),
    twin_of="ffn_relu",
)
def ffn_normalized() -> tuple[Recipe, LayerOptions]:
    """A network whose hidden activations are a softmax: attention over learned pairs."""
    recipe = Recipe(
        memory=LocalConstant(), context=KernelWeighted(kernel=Exponential()), algorithm=Analytic()
    )
    return recipe, _PLAIN
