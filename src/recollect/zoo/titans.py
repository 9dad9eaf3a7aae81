"""Titans: a deep memory that learns by gradient descent with momentum and forgets.

Examples:
    >>> rc.zoo.names("titans")
    ['titans', 'titans_with_base', 'titans_minus']
    >>> print(rc.zoo.get("titans").rule)
    S_t = θ_t S_(t−1) − η_t r_t ρ_t ∇ℓ(M_(t−1); k_t, v_t),  M_t = α_t M_(t−1) + S_t
"""

from __future__ import annotations

from recollect.choices.algorithm.descent import GradientDescent, Momentum
from recollect.choices.memory.maps import MLP
from recollect.choices.retention.base import Decay
from recollect.layer.options import GateOptions, LayerOptions
from recollect.recipe.recipe import Recipe
from recollect.zoo.preset import Fidelity, preset
from recollect.zoo.sources import (
    ATLAS,
    BEYOND,
    COMMON_LAYER,
    FORGETFUL,
    HALF_LOSS,
    INNER_BATCHES,
    KEY_OVERLAP,
    MIRAS,
    NORMALIZED_STEPS,
    SILENT,
    TITANS,
    UNDER_A_NORM,
    limited_rate,
)

__all__ = ["titans", "titans_minus", "titans_with_base"]

_STEPS = (NORMALIZED_STEPS, KEY_OVERLAP, HALF_LOSS, INNER_BATCHES, COMMON_LAYER)
_NORMED_MEMORY = (
    "The memory is x + LN(W_1 gelu(W_2 x)), the equation of MIRAS 5.3; ATLAS eq. 42 prints no "
    "layer norm, which appendix E mentions."
)
_TITANS_EQUATION = (
    "M_t = α_t M_(t−1) + S_t  (ATLAS eq. 12)\n"
    "S_t = θ_t S_(t−1) − η_t ∇ℓ(M_(t−1); k_t, v_t)  (ATLAS eq. 13)"
)
_SHARE = GateOptions(unit="stability_limit", init=0.35, low=0.1)


@preset(
    "Titans (LMM)",
    row=46,
    rule="S_t = θ_t S_(t−1) − η_t r_t ρ_t ∇ℓ(M_(t−1); k_t, v_t),  M_t = α_t M_(t−1) + S_t",
    references=(TITANS("eqs. 12–14"), ATLAS("eqs. 12–13 and 34–35"), MIRAS("table 1")),
    fidelity=Fidelity(
        kind="reconstruction",
        source="ATLAS eqs. 12–13",
        source_equation=_TITANS_EQUATION,
        deviations=(
            _NORMED_MEMORY,
            limited_rate(BEYOND),
            *_STEPS,
        ),
    ),
)
def titans() -> tuple[Recipe, LayerOptions]:
    """Surprise with momentum, written into a perceptron that forgets, under a layer norm."""
    recipe = Recipe(
        memory=MLP(norm="layer"),
        retention=Decay(),
        algorithm=Momentum(batch_size=16, normalized_steps=True, batch_overlap="measured"),
    )
    momentum = GateOptions(high=0.9, init=0.3)
    gates = {**UNDER_A_NORM, "lr": BEYOND, "momentum": momentum}
    return recipe, LayerOptions(gate_options=gates, last_map_init_scale=SILENT)


@preset(
    "Titans with a base",
    row=46,
    rule="M(x) = x + (W̄_1 + W_1) σ((W̄_2 + W_2) x),  "
    "S_t = θ_t S_(t−1) − η_t r_t ρ_t ∇ℓ(M_(t−1); k_t, v_t),  W_t = α_t W_(t−1) + S_t",
    references=(TITANS("eqs. 12–14"), ATLAS("eqs. 12–13 and 34–35")),
    fidelity=Fidelity(
        kind="approximation",
        source="ATLAS eqs. 12–13, on a memory that is ours",
        source_equation=_TITANS_EQUATION,
        deviations=(
            (
                "The memory has learned weights W̄ that are not memory; only W is written "
                "and decays, where all weights of titans decay."
            ),
            "The memory has no layer norm.",
            "α_t starts near 0.98; that of titans starts near 0.999.",
            limited_rate(_SHARE),
            *_STEPS,
        ),
    ),
)
def titans_with_base() -> tuple[Recipe, LayerOptions]:
    """Titans beside learned weights that do not fade: it forgets what it was told, and no more."""
    recipe = Recipe(
        memory=MLP(static_weights=True),
        retention=Decay(),
        algorithm=Momentum(batch_size=16, normalized_steps=True, batch_overlap="measured"),
    )
    # Momentum keeps what is written: half of the limit was chosen where that was 2/b, this for 2/8.
    # A share that closes for some tokens before training knows what they are for stays closed.
    gates = {
        "lr": _SHARE,
        "momentum": GateOptions(high=0.9, init=0.7),
        "log_decay": FORGETFUL,
    }
    return recipe, LayerOptions(gate_options=gates)


@preset(
    "Titans without momentum",
    row=47,
    rule="M_t = α_t M_(t−1) − η_t r_t ρ_t ∇ℓ(M_(t−1); k_t, v_t)",
    references=(ATLAS("table 1"), TITANS("eqs. 12–14 at θ = 0")),
    fidelity=Fidelity(
        kind="reconstruction",
        source="ATLAS eqs. 12–13 at θ = 0",
        source_equation="M_t = α_t M_(t−1) − η_t ∇ℓ(M_(t−1); k_t, v_t)  (ATLAS table 1, Titans–)",
        deviations=(
            _NORMED_MEMORY,
            limited_rate(BEYOND),
            *_STEPS,
        ),
    ),
)
def titans_minus() -> tuple[Recipe, LayerOptions]:
    """Titans with momentary surprise only."""
    recipe = Recipe(
        memory=MLP(norm="layer"),
        retention=Decay(),
        algorithm=GradientDescent(batch_size=16, normalized_steps=True, batch_overlap="measured"),
    )
    return recipe, LayerOptions(
        gate_options={**UNDER_A_NORM, "lr": BEYOND}, last_map_init_scale=SILENT
    )
