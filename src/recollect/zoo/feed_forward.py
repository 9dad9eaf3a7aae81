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
from recollect.zoo.attention import BARE
from recollect.zoo.preset import Fidelity, Reference, preset
from recollect.zoo.sources import AM

__all__ = ["ffn_moe", "ffn_multi_head", "ffn_normalized", "ffn_relu", "ffn_swiglu"]

_PLAIN = replace(BARE, rope_theta=None, persistent=4.0, joined=True)
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
    row=65,
    rule="y = W_Vᵀ ReLU(W_K x) = Σ_i v_i ReLU(k_i·x)",
    references=(AM("eq. 14"),),
    fidelity=Fidelity(kind="exact", source="AM eq. 14"),
)
def ffn_relu() -> tuple[Recipe, LayerOptions]:
    """A two-layer network: learned keys, learned values, and ReLU as the kernel."""
    return _sum(ReluKernel()), _PLAIN


@preset(
    "SwiGLU feed-forward network",
    row=65,
    rule="y = W_Vᵀ (W_G x ⊙ Swish(W_K x)) = Σ_i v_i (g_i·x) Swish(k_i·x)",
    references=(AM("eqs. 28–29"), Reference(paper=_SHAZEER, year=2020, where="eq. 6")),
    fidelity=Fidelity(kind="exact", source="AM eq. 29"),
)
def ffn_swiglu() -> tuple[Recipe, LayerOptions]:
    """A network whose pairs pass a second, bilinear gate of the query."""
    return _sum(SwishKernel(), Bilinear()), replace(_PLAIN, persistent=8 / 3)


@preset(
    "mixture of experts",
    row=65,
    rule="y = Σ_(e in the top 2) g_e(x) Σ_(i in expert e) v_i ReLU(k_i·x),  g = softmax(r_e·x)",
    references=(
        AM("eq. 24"),
        Reference(
            paper="Shazeer et al., Outrageously large neural networks: the sparsely-gated "
            "mixture-of-experts layer",
            year=2017,
            where="eqs. 1–5",
        ),
    ),
    fidelity=Fidelity(
        kind="exact",
        source="AM eq. 24",
        deviations=(
            (
                "g_e is the softmax over the chosen experts (Shazeer et al. eq. 3 without "
                "noise), so that routers learn."
            ),
            "Experts have 16 pairs each, and a token reads 2 of them.",
        ),
    ),
)
def ffn_moe() -> tuple[Recipe, LayerOptions]:
    """Blocks of pairs, of which a router shows each query the two best."""
    experts = TopBlocks(
        size=16, top_k=2, score="router", include_current=False, weighting="softmax"
    )
    return _sum(ReluKernel(), experts), _PLAIN


@preset(
    "multi-head feed-forward network",
    row=65,
    rule="y = W_O [Σ_i v_(i,1) ReLU(k_(i,1)·x_1); …; Σ_i v_(i,h) ReLU(k_(i,h)·x_h)]",
    references=(AM("eqs. 19–23"),),
    fidelity=Fidelity(
        kind="exact",
        source="AM eqs. 19–23",
        deviations=("Each head has as many pairs as one network without heads.",),
    ),
)
def ffn_multi_head() -> tuple[Recipe, LayerOptions]:
    """One network per slice of the token, joined by a matrix."""
    return _sum(ReluKernel()), replace(_PLAIN, joined=False)


@preset(
    "normalised feed-forward network",
    row=65,
    rule="y = Σ_i v_i exp(k_i·x/√K) / Σ_i exp(k_i·x/√K)",
    references=(AM("eq. 18, over learned pairs"),),
    fidelity=Fidelity(
        kind="reconstruction",
        source="AM eq. 18",
        source_equation="S_t φ(q_t) = Σ_(i=1)^t v_i exp(q_tᵀ k_i) / Σ_(i=1)^t exp(q_tᵀ k_i)  "
        "(AM eq. 18)",
        deviations=(
            (
                "AM asks for a denominator in a feed-forward network and prints none; this "
                "is the one of attention, eq. 18, over learned pairs."
            ),
            "The exponent is divided by √K.",
        ),
    ),
)
def ffn_normalized() -> tuple[Recipe, LayerOptions]:
    """A network whose hidden activations are a softmax: attention over learned pairs."""
    recipe = Recipe(
        memory=LocalConstant(), context=KernelWeighted(kernel=Exponential()), algorithm=Analytic()
    )
    return recipe, _PLAIN
