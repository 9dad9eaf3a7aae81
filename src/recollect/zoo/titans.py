"""Titans: a deep memory that learns by gradient descent with momentum and decays.

Examples:
    >>> rc.zoo.names("titans")
    ['titans', 'titans_with_base', 'titans_minus']
"""

from __future__ import annotations

from recollect.choices.algorithm.descent import GradientDescent, Momentum
from recollect.choices.memory.maps import MLP
from recollect.choices.retention.base import Decay
from recollect.layer.options import GateOptions, LayerOptions
from recollect.recipe.recipe import Recipe
from recollect.zoo.fidelity import approximation, reconstruction
from recollect.zoo.preset import decay_from, limit_multiple, preset
from recollect.zoo.references import ATLAS, MIRAS, TITANS

__all__ = ["titans", "titans_minus", "titans_with_base"]

_NORMED_MEMORY = (
    "The memory is x + LN(W_1 gelu(W_2 x)), the equation of MIRAS 5.3; ATLAS eq. 42 prints no "
    "layer norm, which appendix E mentions."
)
_EQUATION = (
    "M_t = α_t M_(t−1) + S_t  (ATLAS eq. 12)\n"
    "S_t = θ_t S_(t−1) − η_t ∇ℓ(M_(t−1); k_t, v_t)  (ATLAS eq. 13)"
)


@preset(
    "Titans (LMM)",
    rule="S_t = θ_t S_(t−1) − η_t r_t ρ_t ∇ℓ(M_(t−1); k_t, v_t),  M_t = α_t M_(t−1) + S_t",
    references=(TITANS.at("eqs. 12–14"), ATLAS.at("eqs. 12–13 and 34–35"), MIRAS.at("table 1")),
    fidelity=reconstruction(
        "ATLAS eqs. 12–13",
        source_equation=_EQUATION,
        memory=_NORMED_MEMORY,
        normalized_step=True,
        key_overlap=True,
        half_loss=True,
        inner_batches=16,
        common_layer=True,
    ),
)
def titans() -> tuple[Recipe, LayerOptions]:
    """Gradient steps with momentum on a perceptron under a layer norm, which decays."""
    algorithm = Momentum(batch_size=16, normalized_steps=True, batch_overlap="measured")
    recipe = Recipe(memory=MLP(norm="layer"), retention=Decay(), algorithm=algorithm)
    # The inner norm bounds outputs, so that steps above the stability limit cannot diverge.
    # results/notes/steps.md has the measurements.
    gates = {
        "lr": limit_multiple(1.5, low=0.2, high=2.0),
        "momentum": GateOptions(high=0.9, init=0.3),
        "log_decay": decay_from(0.999),
        "norm_weight": GateOptions(init=0.7),
    }
    return recipe, LayerOptions(gate_options=gates, last_map_init_scale=0.01)


@preset(
    "Titans with a base",
    rule="M(x) = x + (W̄_1 + W_1) σ((W̄_2 + W_2) x),  "
    "S_t = θ_t S_(t−1) − η_t r_t ρ_t ∇ℓ(M_(t−1); k_t, v_t),  W_t = α_t W_(t−1) + S_t",
    references=(TITANS.at("eqs. 12–14"), ATLAS.at("eqs. 12–13 and 34–35")),
    fidelity=approximation(
        "ATLAS eqs. 12–13, with a memory of recollect",
        source_equation=_EQUATION,
        memory="The memory has learned weights W̄ that are not memory; only W is written and "
        "decays, where all weights of titans decay.\n"
        "The memory has no layer norm.",
        decay="α_t starts near 0.98; that of titans starts near 0.999.",
        normalized_step=True,
        key_overlap=True,
        half_loss=True,
        inner_batches=16,
        common_layer=True,
    ),
    twin_of="titans",
)
def titans_with_base() -> tuple[Recipe, LayerOptions]:
    """Titans with learned weights that do not decay, next to the memory."""
    algorithm = Momentum(batch_size=16, normalized_steps=True, batch_overlap="measured")
    recipe = Recipe(memory=MLP(static_weights=True), retention=Decay(), algorithm=algorithm)
    # A rate that is 0 for some tokens at the start does not open again in training.
    gates = {
        "lr": limit_multiple(0.35, low=0.1),
        "momentum": GateOptions(high=0.9, init=0.7),
        "log_decay": decay_from(0.98),
    }
    return recipe, LayerOptions(gate_options=gates)


@preset(
    "Titans without momentum",
    rule="M_t = α_t M_(t−1) − η_t r_t ρ_t ∇ℓ(M_(t−1); k_t, v_t)",
    references=(ATLAS.at("table 1"), TITANS.at("eqs. 12–14 at θ = 0", introduces=False)),
    fidelity=reconstruction(
        "ATLAS eqs. 12–13 at θ = 0",
        source_equation="M_t = α_t M_(t−1) − η_t ∇ℓ(M_(t−1); k_t, v_t)  (ATLAS table 1, Titans–)",
        memory=_NORMED_MEMORY,
        normalized_step=True,
        key_overlap=True,
        half_loss=True,
        inner_batches=16,
        common_layer=True,
    ),
)
def titans_minus() -> tuple[Recipe, LayerOptions]:
    """Gradient steps without momentum on the memory of titans."""
    algorithm = GradientDescent(batch_size=16, normalized_steps=True, batch_overlap="measured")
    recipe = Recipe(memory=MLP(norm="layer"), retention=Decay(), algorithm=algorithm)
    gates = {
        "lr": limit_multiple(1.5, low=0.2, high=2.0),
        "log_decay": decay_from(0.999),
        "norm_weight": GateOptions(init=0.7),
    }
    return recipe, LayerOptions(gate_options=gates, last_map_init_scale=0.01)
