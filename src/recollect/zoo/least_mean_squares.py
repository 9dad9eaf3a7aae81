"""Adaptive filters as sequence layers: leaky, implicit and normalised least mean squares."""

from __future__ import annotations

from recollect.choices.algorithm import Implicit, Normalized
from recollect.choices.retention import Decay
from recollect.options import GateOptions, LayerOptions
from recollect.recipe import Recipe
from recollect.zoo.preset import Fidelity, Reference, preset
from recollect.zoo.sources import COMMON, TTR

__all__ = ["leaky_lms", "longhorn", "nlms"]


@preset(
    "leaky LMS, decoupled",
    row=39,
    rule="M_t = M_(t−1)(α_t I − β_t k_t k_tᵀ) + β_t v_t k_tᵀ",
    references=(TTR("eq. 37"),),
    fidelity=Fidelity(
        kind="reconstruction",
        source="TTR eq. 37",
        note=f"a recurrence without a published model; the gates are ours; {COMMON}",
    ),
)
def leaky_lms() -> tuple[Recipe, LayerOptions]:
    """The delta rule with weight decay apart: the error is measured before forgetting."""
    return Recipe(retention=Decay(when="after")), LayerOptions()


@preset(
    "Longhorn",
    row=40,
    rule="M_t = M_(t−1)(I − ε_t k_t k_tᵀ) + ε_t v_t k_tᵀ,  ε_t = δ_t/(1 + δ_t‖k_t‖²)",
    references=(
        TTR("eqs. 30–31"),
        Reference(
            paper="Liu et al., Longhorn: state space models are amortized online learners",
            year=2024,
            where="theorem 3.1",
        ),
    ),
    fidelity=Fidelity(
        kind="exact",
        source="TTR eq. 31",
        note="one δ per head as in TTR, and softplus instead of a sigmoid: an implicit step is "
        "stable at any δ. Longhorn's own layer has one δ per value channel and keeps the diagonal "
        f"of the erasure only; {COMMON}",
    ),
)
def longhorn() -> tuple[Recipe, LayerOptions]:
    """The exact minimiser of the new error and the distance moved."""
    step = GateOptions(squash="softplus", init=1.0)
    return Recipe(algorithm=Implicit()), LayerOptions(gates={"lr": step})


@preset(
    "NLMS (Kaczmarz)",
    row=41,
    rule="M_t = M_(t−1) + (v_t − M_(t−1) k_t) k_tᵀ/‖k_t‖²",
    references=(
        TTR("eq. 33"),
        Reference(
            paper="Nagumo and Noda, A learning method for system identification",
            year=1967,
            where="the learning identification",
        ),
    ),
    fidelity=Fidelity(
        kind="reconstruction",
        source="TTR eq. 33",
        note=f"TTR leaves it unexplored: there is no published layer; {COMMON}",
    ),
)
def nlms() -> tuple[Recipe, LayerOptions]:
    """The newest association is stored exactly, at the least change of the memory."""
    return Recipe(algorithm=Normalized()), LayerOptions()
