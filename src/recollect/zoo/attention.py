"""Softmax attention as a regression: the local constant that fits the values near the query."""

from __future__ import annotations

from dataclasses import replace

from recollect.choices.algorithm import Analytic
from recollect.choices.context import Similar, Window
from recollect.choices.memory import LocalConstant
from recollect.options import LayerOptions
from recollect.recipe import Recipe
from recollect.zoo.preset import Fidelity, Reference, preset
from recollect.zoo.sources import TTR

__all__ = ["qk_norm_attention", "sliding_window_attention", "softmax_attention"]

# As in Transformer++: rotary positions, and nothing else around the attention.
_BARE = LayerOptions(
    conv=0,
    conv_activation="none",
    qk_norm="none",
    rope=10000.0,
    output_norm="none",
    output_gate="none",
)
_VASWANI = Reference(paper="Vaswani et al., Attention is all you need", year=2017, where="eq. 1")


def _local(context: Similar) -> Recipe:
    return Recipe(memory=LocalConstant(), context=context, algorithm=Analytic())


@preset(
    "softmax attention",
    row=1,
    rule="y_t = Σ_(i≤t) softmax_i(q_t·k_i/√K) v_i",
    references=(TTR("eq. 50"), _VASWANI),
    fidelity=Fidelity(kind="exact", source="TTR eq. 50"),
)
def softmax_attention() -> tuple[Recipe, LayerOptions]:
    """The mean of the values, weighed by exp(q·k/√K)."""
    return _local(Similar()), _BARE


@preset(
    "softmax attention with QK norm",
    row=2,
    rule="y_t = Σ_(i≤t) s_ti v_i / Σ_(i≤t) s_ti,  s_ti = exp(−‖k_i − q_t‖²/2√K)",
    references=(
        TTR("eq. 51"),
        Reference(
            paper="Henry et al., Query-key normalization for transformers",
            year=2020,
            where="section 3",
        ),
    ),
    fidelity=Fidelity(
        kind="exact",
        source="TTR eq. 51",
        note="the identity holds for queries and keys of any one length: theirs is √K here, so "
        "that the softmax can be sharp at the temperature √K; Henry et al. learn the temperature",
    ),
)
def qk_norm_attention() -> tuple[Recipe, LayerOptions]:
    """With queries and keys of one length: a Nadaraya–Watson estimator with a Gaussian kernel."""
    return _local(Similar()), replace(_BARE, qk_norm="rms")


@preset(
    "sliding-window attention",
    row=3,
    rule="y_t = Σ_(t−c<i≤t) softmax_i(q_t·k_i/√K) v_i",
    references=(
        Reference(
            paper="Behrouz et al., Atlas: learning to optimally memorize the context at test time",
            year=2025,
            where="eq. 18",
        ),
        Reference(
            paper="Beltagy et al., Longformer: the long-document transformer",
            year=2020,
            where="3.1",
        ),
    ),
    fidelity=Fidelity(
        kind="exact", source="ATLAS eq. 18", note="the window's size, 128, is a choice of ours"
    ),
)
def sliding_window_attention() -> tuple[Recipe, LayerOptions]:
    """Softmax attention over the last c tokens: constant state."""
    return _local(Similar(within=(Window(size=128, gated=False),))), _BARE
