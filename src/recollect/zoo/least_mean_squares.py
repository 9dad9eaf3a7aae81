"""Adaptive filters as sequence layers: least mean squares, and a Kalman filter per key channel.

Examples:
    >>> rc.zoo.names("least_mean_squares")
    ['leaky_lms', 'longhorn', 'longhorn_diagonal', 'nlms', 'kalman_linear_attention']
    >>> print(rc.zoo.get("leaky_lms").rule)
    M_t = M_(t−1)(α_t I − β_t k_t k_tᵀ) + β_t v_t k_tᵀ
"""

from __future__ import annotations

from recollect.choices.algorithm.descent import NLMS, GradientDescent, Implicit
from recollect.choices.bias.losses import DotProduct
from recollect.choices.retention.base import Decay
from recollect.layer.options import GateOptions, LayerOptions, Tie
from recollect.recipe.recipe import Recipe
from recollect.zoo.fidelity import exact, reconstruction
from recollect.zoo.preset import preset
from recollect.zoo.references import TTR, Paper

__all__ = ["kalman_linear_attention", "leaky_lms", "longhorn", "longhorn_diagonal", "nlms"]

_LONGHORN = Paper(
    "Liu et al., Longhorn: state space models are amortized online learners", 2024
).at("theorem 3.1")


@preset(
    "leaky LMS, decoupled",
    rule="M_t = M_(t−1)(α_t I − β_t k_t k_tᵀ) + β_t v_t k_tᵀ",
    references=(TTR.at("eq. 37"),),
    fidelity=reconstruction(
        "TTR eq. 37",
        source_equation="M_t = (1 − β_t λ_t) M_(t−1) + β_t (v_t − M_(t−1) k_t) k_tᵀ  (TTR eq. 37)",
        decay="α_t is a separate gate; eq. 37 has α_t = 1 − β_t λ_t.",
        unpublished="No layer of this recurrence is published.",
        common_layer=True,
    ),
)
def leaky_lms() -> tuple[Recipe, LayerOptions]:
    """The delta rule with weight decay apart: the error is measured before forgetting."""
    return Recipe(retention=Decay(when="after")), LayerOptions()


@preset(
    "Longhorn",
    rule="M_t = M_(t−1)(I − ε_t k_t k_tᵀ) + ε_t v_t k_tᵀ,  ε_t = δ_t/(1 + δ_t‖k_t‖²)",
    references=(TTR.at("eqs. 30–31"), _LONGHORN),
    fidelity=exact(
        "TTR eq. 31",
        gates="δ_t is one number per head, as in TTR; Longhorn's layer has one per value channel "
        "(longhorn_diagonal).\n"
        "The gate of δ_t is a softplus in place of a sigmoid, because an implicit step is stable "
        "at any δ_t.",
        common_layer=True,
    ),
)
def longhorn() -> tuple[Recipe, LayerOptions]:
    """The exact minimiser of the new error and the distance moved."""
    step = GateOptions(activation="softplus", init=1.0)
    return Recipe(algorithm=Implicit()), LayerOptions(gate_options={"lr": step})


@preset(
    "Longhorn, as its layer has it",
    rule="M_t = (1 − ε_t (k_t²)ᵀ) ⊙ M_(t−1) + (ε_t ⊙ v_t) k_tᵀ,  ε_t = δ_t/(1 + δ_t‖k_t‖²)",
    references=(_LONGHORN,),
    fidelity=exact(
        "Longhorn's layer: one δ per value channel, and the diagonal of the erasure only",
        layer="The state has 16 channels per value channel, without norms, with D-skip and a "
        "SiLU gate as in Mamba's block.",
    ),
    twin_of="longhorn",
)
def longhorn_diagonal() -> tuple[Recipe, LayerOptions]:
    """An implicit step whose erasure does not see the other channels of the key."""
    ties = (
        Tie(target="lr", source="k", rule="implicit"),
        Tie(target="log_decay", source="lr", rule="diagonal"),
    )
    step = GradientDescent(per="value")
    recipe = Recipe(bias=DotProduct(), retention=Decay(per="entry"), algorithm=step)
    return recipe, LayerOptions(
        qk_norm="none", key_dim=16, value_skip=True, output_norm="none", ties=ties
    )


@preset(
    "NLMS (Kaczmarz)",
    rule="M_t = M_(t−1) + (v_t − M_(t−1) k_t) k_tᵀ/‖k_t‖²",
    references=(
        TTR.at("eq. 33"),
        Paper("Nagumo and Noda, A learning method for system identification", 1967).at(
            "the learning identification"
        ),
    ),
    fidelity=reconstruction(
        "TTR eq. 33",
        unpublished="No layer of this recurrence is published: TTR leaves it unexplored.",
        common_layer=True,
    ),
)
def nlms() -> tuple[Recipe, LayerOptions]:
    """The newest association is stored exactly, at the least change of the memory."""
    return Recipe(algorithm=NLMS()), LayerOptions()


@preset(
    "Kalman linear attention",
    rule="M_t = M_(t−1) Diag(a (1 − w_t k_t²/Λ_t)) + v_t (w_t k_t/Λ_t)ᵀ,  "
    "Λ_t = Λ_(t−1)/(a² + p Λ_(t−1)) + w_t k_t²",
    references=(
        Paper(
            "Shaj et al., Kalman linear attention: parallel Bayesian filtering for efficient "
            "language modelling and state tracking",
            2026,
        ).at("arXiv 2602.10743"),
    ),
    fidelity=reconstruction(
        "the filter of Kalman linear attention: each channel of the key observes the value alone",
        gates="w_t is one number per head; the source has a precision per value channel, and a "
        "precision Λ per entry of the memory.\n"
        "a and p are learned per key channel of every head.",
        initial_memory="Λ is 1 before the first token.",
        layer="The output is the mean; the source can also read its variance.",
        common_layer=True,
    ),
)
def kalman_linear_attention() -> tuple[Recipe, LayerOptions]:
    """Writes and decays follow the precision of the memory, which grows with what it has seen."""
    recipe = Recipe(
        bias=DotProduct(), retention=Decay(per="key"), algorithm=GradientDescent(lr=1.0)
    )
    learned = GateOptions(source="learned")
    return recipe, LayerOptions(
        gate_options={"log_decay": learned, "process_noise": learned},
        ties=(Tie(target="k", source="k", rule="filter"),),
    )
