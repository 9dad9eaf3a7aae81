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
from recollect.zoo.preset import Fidelity, Reference, preset
from recollect.zoo.sources import COMMON_LAYER, FREE_LENGTHS, TTR

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

# Lengths of queries and keys carry how sharp a match is, so most of these keep them.
_FREE = LayerOptions(qk_norm="none")


def _averaging(features: Features) -> Recipe:
    """Σ φ(q)·φ(k_i) v_i / Σ φ(q)·φ(k_i)."""
    return Recipe(
        memory=Matrix(read=Read(normalize="sum")),
        features=features,
        bias=DotProduct(),
        algorithm=GradientDescent(lr=1.0),
    )


def _rule(kernel: str) -> str:
    return f"y_t = Σ_(i≤t) s_ti v_i / Σ_(i≤t) s_ti,  s_ti = {kernel}"


@preset(
    "Performer",
    row=13,
    rule=_rule("mean_j exp(ω_j·(q_t + k_i)/K^¼ − (‖q_t‖² + ‖k_i‖²)/2√K)"),
    references=(
        Reference(
            paper="Choromanski et al., Rethinking attention with Performers",
            year=2020,
            where="lemma 1 and section 2.4",
        ),
        TTR("the feature maps under linear attention"),
    ),
    fidelity=Fidelity(
        kind="exact",
        source="Choromanski et al. lemma 1, orthogonal directions (FAVOR+)",
        deviations=(
            "The 4K directions are drawn once and not again in training.",
            "The features have no ε.",
            FREE_LENGTHS,
        ),
    ),
)
def performer() -> tuple[Recipe, LayerOptions]:
    """Softmax attention's kernel, estimated by positive random features."""
    return _averaging(PositiveRandom()), _FREE


@preset(
    "random feature attention (RFA)",
    row=14,
    rule=_rule("mean_j cos(w_j·(q_t − k_i)),  w_j = σ ⊙ ω_j"),
    references=(
        Reference(paper="Peng et al., Random feature attention", year=2021, where="section 3.1"),
        TTR("the feature maps under linear attention"),
    ),
    fidelity=Fidelity(
        kind="exact",
        source="Peng et al. section 3.1 (without the gate of section 3.2)",
        deviations=(
            (
                "The K frequencies are drawn once; the authors draw from a pool at each "
                "training step."
            ),
            COMMON_LAYER,
        ),
    ),
)
def rfa() -> tuple[Recipe, LayerOptions]:
    """The Gaussian kernel of unit queries and keys, estimated by random Fourier features."""
    return _averaging(RandomFourier(kernel="gaussian", temperature=1.0)), LayerOptions()


@preset(
    "cosFormer",
    row=15,
    rule=_rule("relu(q_t)·relu(k_i) cos(π(t − i)/2M)"),
    references=(
        Reference(
            paper="Qin et al., cosFormer: rethinking softmax in attention",
            year=2022,
            where="cos-based re-weighting",
        ),
        TTR("the feature maps under linear attention"),
    ),
    fidelity=Fidelity(
        kind="exact",
        source="Qin et al., the cos-based re-weighting",
        deviations=(
            (
                "M is 2048, where the authors take the length of the sequence; later "
                "positions count as M."
            ),
            FREE_LENGTHS,
        ),
    ),
)
def cosformer() -> tuple[Recipe, LayerOptions]:
    """Rectified queries and keys whose match fades with their distance."""
    return _averaging(Cosine()), _FREE


@preset(
    "Hedgehog",
    row=16,
    rule=_rule("φ(q_t)·φ(k_i),  φ(x) = softmax[Wx + b, −Wx − b]"),
    references=(
        Reference(
            paper="Zhang et al., The Hedgehog & the porcupine: expressive linear attentions with "
            "softmax mimicry",
            year=2024,
            where="the Hedgehog feature map",
        ),
        TTR("the feature maps under linear attention"),
    ),
    fidelity=Fidelity(
        kind="exact",
        source="Zhang et al., the Hedgehog feature map, made stable by a softmax over features",
        deviations=(
            "The features are trained from scratch, not distilled from softmax attention.",
            FREE_LENGTHS,
        ),
    ),
)
def hedgehog() -> tuple[Recipe, LayerOptions]:
    """Learned exponential features, one map for queries and one for keys."""
    return _averaging(Hedgehog()), _FREE


@preset(
    "Based",
    row=17,
    rule=_rule("1 + q_t·k_i/√K + (q_t·k_i)²/2K"),
    references=(
        Reference(
            paper="Arora et al., Simple linear attention language models balance the "
            "recall-throughput tradeoff",
            year=2024,
            where="the Taylor feature map",
        ),
        TTR("the feature maps under linear attention"),
    ),
    fidelity=Fidelity(
        kind="exact",
        source="Arora et al., the second-order Taylor map",
        deviations=(
            "There are no sliding-window layers in between.",
            (
                "Queries and keys have as many channels as values; the authors have 16: "
                "build(..., head_dim=16, value_dim=...)."
            ),
            FREE_LENGTHS,
        ),
    ),
)
def based() -> tuple[Recipe, LayerOptions]:
    """Softmax attention's exponential to second order."""
    return _averaging(Taylor(order=2)), _FREE


@preset(
    "ReBased",
    row=18,
    rule=_rule("(q'_t·k'_i)²/K,  x' = γ ⊙ norm(x) + β"),
    references=(
        Reference(
            paper="Aksenov et al., Linear transformers with learnable kernel functions are better "
            "in-context models",
            year=2024,
            where="section 4",
        ),
        TTR("the feature maps under linear attention"),
    ),
    fidelity=Fidelity(
        kind="exact",
        source="Aksenov et al. section 4",
        deviations=(
            "Queries and keys have as many channels as values; the authors have 16.",
            FREE_LENGTHS,
        ),
    ),
)
def rebased() -> tuple[Recipe, LayerOptions]:
    """A square whose minimum, a weight of zero, is learned."""
    return _averaging(Quadratic()), _FREE


@preset(
    "DiJiang",
    row=19,
    rule=_rule("Σ_j D_j² exp(t_j c_j·(q_t + k_i))"),
    references=(
        Reference(
            paper="Chen et al., DiJiang: efficient large language models through compact "
            "kernelization",
            year=2024,
            where="the weighted DCT features",
        ),
        TTR("the feature maps under linear attention"),
    ),
    fidelity=Fidelity(
        kind="exact",
        source="Chen et al., D exp(T C x), under the sum of weights",
        deviations=(
            "Queries and keys have length √K, so that exponentials stay bounded.",
            (
                "The authors' code takes a softmax over features (normalize=True), adds "
                "RetNet's decays and norms the output in place of the sum."
            ),
        ),
    ),
)
def dijiang() -> tuple[Recipe, LayerOptions]:
    """Exponentials of the key's cosine transform at random scales, with learned weights."""
    return _averaging(FrequencyDomain()), LayerOptions(qk_norm="rms")


@preset(
    "DPFP fast weights",
    row=20,
    rule="M_t = M_(t−1) + β_t (v_t − M_(t−1) φ(k_t)) φ(k_t)ᵀ",
    references=(
        Reference(
            paper="Schlag et al., Linear transformers are secretly fast weight programmers",
            year=2021,
            where="sections 4.2 and 5",
        ),
    ),
    fidelity=Fidelity(
        kind="exact",
        source="Schlag et al. section 4.2, with DPFP-1 (section 5) and sum normalisation",
        deviations=(FREE_LENGTHS,),
    ),
)
def dpfp() -> tuple[Recipe, LayerOptions]:
    """The delta rule on sparse products of rectified channels."""
    return Recipe(features=Dpfp(normalize=True)), _FREE


@preset(
    "PolySketchFormer",
    row=21,
    rule=_rule("(M(q_t)·M(k_i))² ≈ (q_t·k_i)⁴,  M(x) = G_1 x ⊙ G_2 x/√r"),
    references=(
        Reference(
            paper="Kacham et al., PolySketchFormer: fast transformers via sketching polynomial "
            "kernels",
            year=2024,
            where="algorithm 1 and theorem 1.1",
        ),
        Reference(
            paper="Behrouz et al., Atlas: learning to optimally memorize the context at test time",
            year=2025,
            where="table 1",
        ),
    ),
    fidelity=Fidelity(
        kind="approximation",
        source="Kacham et al. algorithm 1 at degree 4",
        deviations=(
            "The weights are divided by their sum; the authors divide by 1 plus it.",
            (
                "All weights are sketched; the authors take exact ones within blocks of the "
                "sequence."
            ),
            "Queries and keys have length 1; the authors have a layer norm.",
            "The sketches are Gaussian, not learned.",
        ),
    ),
)
def polysketchformer() -> tuple[Recipe, LayerOptions]:
    """A polynomial kernel of degree four, sketched so that no weight is negative."""
    return _averaging(PolynomialSketch(degree=4)), LayerOptions()
