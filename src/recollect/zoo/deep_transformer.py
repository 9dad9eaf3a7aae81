"""Transformers whose memory is deep: a perceptron over the exponential kernel's features.

Examples:
    >>> rc.zoo.names("deep_transformer")
    ['deep_transformer', 'swdt', 'dot']
"""

from __future__ import annotations

from recollect.choices.algorithm.descent import GradientDescent
from recollect.choices.bias.losses import DotProduct
from recollect.choices.context.windows import Window
from recollect.choices.features.kernels import Exponential
from recollect.choices.memory.base import Read
from recollect.choices.memory.maps import MLP
from recollect.choices.retention.base import Decay
from recollect.layer.options import GateOptions, LayerOptions
from recollect.recipe.recipe import Recipe
from recollect.zoo.fidelity import Fidelity, Sentences, reconstruction
from recollect.zoo.preset import preset
from recollect.zoo.references import ATLAS

__all__ = ["deep_transformer", "dot", "swdt"]

_BATCH = 64


def _fidelity(source: str, *, source_equation: str, **sentences: Sentences) -> Fidelity:
    return reconstruction(
        source,
        source_equation=source_equation,
        **sentences,
        memory="The memory is x + LN(W_1 gelu(W_2 φ*(x))), with a hidden width of 2 V.\n"
        "W_2 is stored as one row per key, over learned anchors.",
        normalizer="The output of W_2 is divided by the softmax's sum, as in eq. 24; the source's "
        "equation is unnormalised (Read(normalize='none')).\n"
        "Steps are not divided by that sum, so that a linear memory is softmax attention.",
        inner_batches=64,
        layer="The layer is the common one, with queries and keys of length √K.",
    )


def _memory() -> MLP:
    return MLP(expansion=2, norm="layer", read=Read(normalize="sum"))


def _options(steps: int) -> LayerOptions:
    """Steps that move a batch's sum of gradients by about one gradient."""
    high = 1 / steps
    return LayerOptions(qk_norm="rms", gate_options={"lr": GateOptions(high=high, init=high / 2)})


@preset(
    "DeepTransformer",
    rule="M_t = M_(t−1) + η_t ∇⟨M_(t−1)(φ*(k_t)), v_t⟩",
    references=(ATLAS.at("eq. 25"),),
    fidelity=_fidelity(
        "ATLAS eq. 25, its inner product maximised",
        source_equation="M_t = M_(t−1) − ∇⟨M_(t−1)(φ*(k_t)), v_t⟩  (ATLAS eq. 25)",
        sign="The inner product is maximised; eq. 25 prints a minus sign.",
        rate="Steps have a rate η_t; eq. 25 prints none.",
    ),
)
def deep_transformer() -> tuple[Recipe, LayerOptions]:
    """Attention's memory and attention's objective, with a nonlinear map behind the softmax."""
    recipe = Recipe(
        memory=_memory(),
        features=Exponential(),
        bias=DotProduct(),
        algorithm=GradientDescent(batch_size=_BATCH),
    )
    return recipe, _options(_BATCH)


@preset(
    "sliding-window DeepTransformer (SWDT)",
    rule="M_t = α_t M_(t−1) + η_t Σ_(i>t−c) γ_i^(t) ∇⟨M_(t−1)(φ*(k_i)), v_i⟩",
    references=(ATLAS.at("table 1"),),
    fidelity=_fidelity(
        "ATLAS table 1",
        source_equation="M_t = α_t M_(t−1) − η_t ∇ℓ(M_(t−1); k_t, v_t),  "
        "ℓ = Σ_(i=c)^L ⟨M_t(φ*(k_i)), v_i⟩  (ATLAS table 1)",
        sign="The inner product is maximised; table 1 prints a minus sign.",
        window="The window holds 8 associations, with a gate γ_i^(t) for each.",
    ),
)
def swdt() -> tuple[Recipe, LayerOptions]:
    """DeepTransformer, written from a window of associations at every token."""
    recipe = Recipe(
        memory=_memory(),
        features=Exponential(),
        bias=DotProduct(),
        context=Window(size=8),
        retention=Decay(),
        algorithm=GradientDescent(batch_size=_BATCH),
    )
    return recipe, _options(_BATCH)


@preset(
    "Deep Omega Transformer (Dot)",
    rule="M_t = M_(t−1) − η_t Σ_(i>t−c) γ_i^(t) ∇½‖M_(t−1)(φ*(k_i)) − v_i‖²",
    references=(ATLAS.at("eq. 27"),),
    fidelity=_fidelity(
        "ATLAS eq. 27",
        source_equation="M_t = M_(t−1) − ∇ Σ_(i=t−c+1)^t γ_i^(t) ‖M(φ*(k_i)) − v_i‖²_2  "
        "(ATLAS eq. 27)",
        rate="Steps have a rate η_t next to γ_i^(t); eq. 27 prints none.",
        window=8,
        half_loss=True,
    ),
)
def dot() -> tuple[Recipe, LayerOptions]:
    """The Omega rule on a perceptron over the exponential kernel."""
    recipe = Recipe(
        memory=_memory(),
        features=Exponential(),
        context=Window(size=8),
        algorithm=GradientDescent(batch_size=_BATCH),
    )
    return recipe, _options(_BATCH)
