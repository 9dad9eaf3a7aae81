"""Linear attention on lifted keys and queries: kernels of softmax's kind at constant state.

Examples:
    >>> rc.zoo.names("feature_maps")
    ['performer', 'rfa', 'cosformer', 'hedgehog', 'based', 'rebased', 'dijiang', 'dpfp',
     'polysketchformer']
    >>> print(rc.zoo.get("rfa").rule)
    y_t = Σ_(i≤t) s_ti v_i / Σ_(i≤t) s_ti,  s_ti = mean_j cos(w_j·(q_t − k_i)),  w_j = σ ⊙ ω_j
"""

from __future__ import annotations

from recollect.choices.algorithm.descent import GradientDescent
from recollect.choices.bias.losses import DotProduct
from recollect.choices.features.base import Features
from recollect.choices.features.finite import Taylor
from recollect.choices.features.learned import Cosine, Dpfp, Hedgehog, Quadratic
from recollect.choices.features.random import (
    FrequencyDomain,
    PolynomialSketch,
    PositiveRandom,
    RandomFourier,
)
from recollect.choices.memory.base import Read
from recollect.choices.memory.maps import Matrix
from recollect.layer.options import LayerOptions
from recollect.recipe.recipe import Recipe
from recollect.zoo.fidelity import approximation, exact
from recollect.zoo.preset import preset
from recollect.zoo.references import ATLAS, TTR, Paper

__all__ = [
    "based",
    "cosformer",
    "dijiang",
    "dpfp",
    "hedgehog",
    "performer",
    "polysketchformer",
    "rebased",
    "rfa",
]

# The norms of queries and keys set the sharpness of the kernel, so most presets keep them.
_NO_QK_NORM = LayerOptions(qk_norm="none")


def _normalized(features: Features) -> Recipe:
    """Σ φ(q)·φ(k_i) v_i / Σ φ(q)·φ(k_i)."""
    return Recipe(
        memory=Matrix(read=Read(normalize="sum")),
        features=features,
        bias=DotProduct(),
        algorithm=GradientDescent(lr=1.0),
    )


def _kernel_rule(kernel: str) -> str:
    return f"y_t = Σ_(i≤t) s_ti v_i / Σ_(i≤t) s_ti,  s_ti = {kernel}"


@preset(
    "Performer",
    rule=_kernel_rule("mean_j exp(ω_j·(q_t + k_i)/K^¼ − (‖q_t‖² + ‖k_i‖²)/2√K)"),
    references=(
        Paper("Choromanski et al., Rethinking attention with Performers", 2020).at(
            "lemma 1 and section 2.4"
        ),
        TTR.at("the feature maps under linear attention"),
    ),
    fidelity=exact(
        "Choromanski et al. lemma 1, orthogonal directions (FAVOR+)",
        features="The 4K directions are drawn once, before training.\nThe features have no ε.",
        no_qk_norm=True,
    ),
)
def performer() -> tuple[Recipe, LayerOptions]:
    """Softmax attention's kernel, estimated by positive random features."""
    return _normalized(PositiveRandom()), _NO_QK_NORM


@preset(
    "random feature attention (RFA)",
    rule=_kernel_rule("mean_j cos(w_j·(q_t − k_i)),  w_j = σ ⊙ ω_j"),
    references=(
        Paper("Peng et al., Random feature attention", 2021).at("section 3.1"),
        TTR.at("the feature maps under linear attention"),
    ),
    fidelity=exact(
        "Peng et al. section 3.1 (without the gate of section 3.2)",
        features="The K frequencies are drawn once; the authors draw from a pool at each "
        "training step.",
        common_layer=True,
    ),
)
def rfa() -> tuple[Recipe, LayerOptions]:
    """The Gaussian kernel of unit queries and keys, estimated by random Fourier features."""
    return _normalized(RandomFourier(kernel="gaussian", temperature=1.0)), LayerOptions()


@preset(
    "cosFormer",
    rule=_kernel_rule("relu(q_t)·relu(k_i) cos(π(t − i)/2M)"),
    references=(
        Paper("Qin et al., cosFormer: rethinking softmax in attention", 2022).at(
            "cos-based re-weighting"
        ),
        TTR.at("the feature maps under linear attention"),
    ),
    fidelity=exact(
        "Qin et al., the cos-based re-weighting",
        features="M is 2048, where the authors take the length of the sequence; later positions "
        "count as M.",
        no_qk_norm=True,
    ),
)
def cosformer() -> tuple[Recipe, LayerOptions]:
    """Rectified queries and keys whose match fades with their distance."""
    return _normalized(Cosine()), _NO_QK_NORM


@preset(
    "Hedgehog",
    rule=_kernel_rule("φ(q_t)·φ(k_i),  φ(x) = softmax[Wx + b, −Wx − b]"),
    references=(
        Paper(
            "Zhang et al., The Hedgehog & the porcupine: expressive linear attentions with "
            "softmax mimicry",
            2024,
        ).at("the Hedgehog feature map"),
        TTR.at("the feature maps under linear attention"),
    ),
    fidelity=exact(
        "Zhang et al., the Hedgehog feature map, made stable by a softmax over features",
        features="The features are trained from scratch, not distilled from softmax attention.",
        no_qk_norm=True,
    ),
)
def hedgehog() -> tuple[Recipe, LayerOptions]:
    """Learned exponential features, one map for queries and one for keys."""
    return _normalized(Hedgehog()), _NO_QK_NORM


@preset(
    "Based",
    rule=_kernel_rule("1 + q_t·k_i/√K + (q_t·k_i)²/2K"),
    references=(
        Paper(
            "Arora et al., Simple linear attention language models balance the "
            "recall-throughput tradeoff",
            2024,
        ).at("the Taylor feature map"),
        TTR.at("the feature maps under linear attention"),
    ),
    fidelity=exact(
        "Arora et al., the second-order Taylor map",
        layer="There are no sliding-window layers in between.",
        sizes="Queries and keys have as many channels as values; the authors have 16: build(..., "
        "head_dim=16, value_dim=...).",
        no_qk_norm=True,
    ),
)
def based() -> tuple[Recipe, LayerOptions]:
    """Softmax attention's exponential to second order."""
    return _normalized(Taylor(order=2)), _NO_QK_NORM


@preset(
    "ReBased",
    rule=_kernel_rule("(q'_t·k'_i)²/K,  x' = γ ⊙ norm(x) + β"),
    references=(
        Paper(
            "Aksenov et al., Linear transformers with learnable kernel functions are better "
            "in-context models",
            2024,
        ).at("section 4"),
        TTR.at("the feature maps under linear attention"),
    ),
    fidelity=exact(
        "Aksenov et al. section 4",
        sizes="Queries and keys have as many channels as values; the authors have 16.",
        no_qk_norm=True,
    ),
)
def rebased() -> tuple[Recipe, LayerOptions]:
    """A square whose minimum, a weight of zero, is learned."""
    return _normalized(Quadratic()), _NO_QK_NORM


@preset(
    "DiJiang",
    rule=_kernel_rule("Σ_j D_j² exp(t_j c_j·(q_t + k_i))"),
    references=(
        Paper(
            "Chen et al., DiJiang: efficient large language models through compact kernelization",
            2024,
        ).at("the weighted DCT features"),
        TTR.at("the feature maps under linear attention"),
    ),
    fidelity=exact(
        "Chen et al., D exp(T C x), under the sum of weights",
        query_key_norm="Queries and keys have length √K, so that exponentials stay bounded.",
        features="The authors' code takes a softmax over features (normalize=True), adds "
        "RetNet's decays and normalises the output.",
    ),
)
def dijiang() -> tuple[Recipe, LayerOptions]:
    """Exponentials of the key's cosine transform at random scales, with learned weights."""
    return _normalized(FrequencyDomain()), LayerOptions(qk_norm="rms")


@preset(
    "DPFP fast weights",
    rule="M_t = M_(t−1) + β_t (v_t − M_(t−1) φ(k_t)) φ(k_t)ᵀ",
    references=(
        Paper("Schlag et al., Linear transformers are secretly fast weight programmers", 2021).at(
            "sections 4.2 and 5"
        ),
    ),
    fidelity=exact(
        "Schlag et al. section 4.2, with DPFP-1 (section 5) and sum normalisation", no_qk_norm=True
    ),
)
def dpfp() -> tuple[Recipe, LayerOptions]:
    """The delta rule on sparse products of rectified channels."""
    return Recipe(features=Dpfp(normalize=True)), _NO_QK_NORM


@preset(
    "PolySketchFormer",
    rule=_kernel_rule("(M(q_t)·M(k_i))² ≈ (q_t·k_i)⁴,  M(x) = G_1 x ⊙ G_2 x/√r"),
    references=(
        Paper(
            "Kacham et al., PolySketchFormer: fast transformers via sketching polynomial kernels",
            2024,
        ).at("algorithm 1 and theorem 1.1"),
        ATLAS.at("table 1"),
    ),
    fidelity=approximation(
        "Kacham et al. algorithm 1 at degree 4",
        normalizer="The weights are divided by their sum; the authors divide by 1 plus it.",
        features="All weights are sketched; the authors take exact ones within blocks of the "
        "sequence.\n"
        "The sketches are Gaussian, not learned.",
        query_key_norm="Queries and keys have length 1; the authors have a layer norm.",
    ),
)
def polysketchformer() -> tuple[Recipe, LayerOptions]:
    """A polynomial kernel of degree four, sketched so that no weight is negative."""
    return _normalized(PolynomialSketch(degree=4)), LayerOptions()
