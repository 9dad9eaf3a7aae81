"""Losses and retention gates that MIRAS derives and does not name, on a matrix memory.

Examples:
    >>> rc.zoo.names("miras_variants")
    ['elastic_net', 'elastic_net_proximal', 'sigmoid_bregman', 'f_divergence', 'value_robust',
     'value_less']
    >>> print(rc.zoo.get("elastic_net").rule)
    A_t = α_t A_(t−1) − η_t ∇ℓ_t,  W_t = S_τ(A_t),  S_τ(z) = sign(z) max(|z| − τ, 0)
"""

from __future__ import annotations

from typing import Any

from recollect.choices.algorithm.descent import GradientDescent
from recollect.choices.bias.losses import Lp, ValueRobust
from recollect.choices.retention.base import Decay
from recollect.choices.retention.divergence import FDivergence
from recollect.choices.retention.links import Bregman, ElasticNet
from recollect.layer.options import GateOptions, LayerOptions
from recollect.recipe.recipe import Recipe
from recollect.zoo.fidelity import exact
from recollect.zoo.preset import preset
from recollect.zoo.references import MIRAS

__all__ = [
    "elastic_net",
    "elastic_net_proximal",
    "f_divergence",
    "sigmoid_bregman",
    "value_less",
    "value_robust",
]

_DESCENT = GradientDescent(batch_size=16)
_MATRIX_MEMORY: dict[str, Any] = {
    "memory": (
        "The memory is the matrix of MIRAS's equations, with one decay and one rate per head: the "
        "paper states no model."
    ),
    "common_layer": True,
}


def _steps(high: float) -> GateOptions:
    return GateOptions(high=high, init=high / 2)


@preset(
    "elastic-net memory",
    rule="A_t = α_t A_(t−1) − η_t ∇ℓ_t,  W_t = S_τ(A_t),  S_τ(z) = sign(z) max(|z| − τ, 0)",
    references=(MIRAS.at("section 5.2, variant 3, and eq. 23"),),
    fidelity=exact(
        "MIRAS eq. 23",
        source_equation="A_t = A_(t−1) − η ∇ℓ(W_(t−1); k_t, v_t)\n"
        "W_t = S_(η/α)(A_t)  (MIRAS eq. 23)",
        decay="A_t decays by a gate α_t; eq. 23 has no decay.",
        link="The threshold is a gate τ_t; eq. 23 has η/α.\n"
        "The regulariser is (1/2η)‖W‖²; the paper prints (1/η)‖W‖², from which eq. 23 does not "
        "follow.\n"
        "The threshold acts at the end of an inner batch.",
        inner_batches=16,
        **_MATRIX_MEMORY,
    ),
)
def elastic_net() -> tuple[Recipe, LayerOptions]:
    """Gradients accumulate; what they leave below a threshold is read as zero."""
    retention = ElasticNet(decay=Decay(), link_every="batch")
    return Recipe(retention=retention, algorithm=_DESCENT), LayerOptions(
        gate_options={"lr": _steps(0.25)}
    )


@preset(
    "elastic-net memory, proximal",
    rule="W_t = S_τ(α_t W_(t−1) − η_t ∇ℓ(W_(t−1); k_t, v_t))",
    references=(MIRAS.at("section 5.2, variant 3, and eq. 22"),),
    fidelity=exact(
        "MIRAS eq. 22",
        gates="α_t, η_t and τ_t are separate gates; eq. 22 derives them from η, α and β.",
        **_MATRIX_MEMORY,
    ),
    twin_of="elastic_net",
)
def elastic_net_proximal() -> tuple[Recipe, LayerOptions]:
    """Soft forgetting by a factor, hard forgetting by a threshold."""
    sparse = GateOptions(init=1e-3)
    recipe = Recipe(retention=ElasticNet(form="proximal", decay=Decay()))
    return recipe, LayerOptions(gate_options={"tau": sparse})


@preset(
    "sigmoid-Bregman memory",
    rule="A_t = α_t A_(t−1) − η_t ∇ℓ(W_(t−1); k_t, v_t),  W_t = σ(A_t)",
    references=(MIRAS.at("section 5.2, variant 5"),),
    fidelity=exact(
        "MIRAS section 5.2, variant 5: f' = logit, so W_t = σ(logit W_(t−1) − η ∇ℓ)",
        source_equation="W_t = σ(ln(W_t / (1 − W_t)) − η ∇ℓ(W_(t−1); k_t, v_t))  "
        "(MIRAS section 5.2, variant 5)",
        link="The logit is that of W_(t−1); the paper prints W_t.\n"
        "The sigmoid acts at the end of an inner batch.",
        decay="The logit decays by a gate α_t; the paper has no decay.",
        initial_memory="The memory starts at one half.",
        inner_batches=16,
        **_MATRIX_MEMORY,
    ),
)
def sigmoid_bregman() -> tuple[Recipe, LayerOptions]:
    """Every weight stays between 0 and 1, by mirror descent."""
    retention = Bregman(link_function="sigmoid", decay=Decay(), link_every="batch")
    return Recipe(retention=retention, algorithm=_DESCENT), LayerOptions(
        gate_options={"lr": _steps(2.0)}
    )


@preset(
    "f-divergence memory",
    rule="W_t = W̄_t ⊙ g(−ζ_t − η_t ∇ℓ(W_(t−1); k_t, v_t)),  g = (f')⁻¹,  ‖W_t‖₁ = c,  "
    "W̄_t = c W_(t−1)^(α_t) / ‖W_(t−1)^(α_t)‖₁",
    references=(MIRAS.at("eq. 18"),),
    fidelity=exact(
        "MIRAS eq. 18 with f = (√x − 1)², normalised per slice: each row a measure",
        source_equation="W_t = W_(t−1) ⊙ g(−ζ_t − η_t ∇ℓ(W_(t−1); k_t, v_t))  (MIRAS eq. 18)",
        link="f is (√x − 1)²; the paper leaves it open.\n"
        "Each row is a measure of mass c = 8; eq. 18 has one sum over the whole matrix "
        "(axis='all').",
        decay="The memory decays to W_(t−1)^(α_t), as under MIRAS's KL gate; eq. 18 has no decay.",
        solver="ζ_t is computed by bisection.",
        rate="η_t is a gate between 0 and 1.",
        **_MATRIX_MEMORY,
    ),
)
def f_divergence() -> tuple[Recipe, LayerOptions]:
    """Weights are measures, moved by the inverse derivative of a divergence."""
    recipe = Recipe(retention=FDivergence(kind="hellinger", scale=8.0, decay=Decay()))
    return recipe, LayerOptions(gate_options={"lr": _steps(1.0)})


@preset(
    "value-robust memory",
    rule="W_t = α_t W_(t−1) − η_t (e_t + Δ_t e_t/‖e_t‖) k_tᵀ,  e_t = W_(t−1) k_t − v_t",
    references=(MIRAS.at("eq. 17 and what follows"),),
    fidelity=exact(
        "the gradient of MIRAS's robust loss ½‖e‖² + Δ‖e‖ + ½Δ²",
        source_equation="W_t = W_(t−1) − η ((M(W_(t−1), k_t) − v_t) k_tᵀ\n"
        "                   + Δ (M(W_(t−1), k_t) − v_t) / ‖M(W_(t−1), k_t) − v_t‖_2 "
        "k_tᵀ)  (MIRAS, after eq. 17)",
        decay="The memory decays by a gate α_t; the paper's update has no decay.",
        gates="Δ_t is a gate; the paper's update has a constant.",
        inner_batches=16,
        **_MATRIX_MEMORY,
    ),
)
def value_robust() -> tuple[Recipe, LayerOptions]:
    """Least squares against the worst value within a distance Δ."""
    recipe = Recipe(bias=ValueRobust(), retention=Decay(), algorithm=_DESCENT)
    return recipe, LayerOptions(gate_options={"lr": _steps(0.25)})


@preset(
    "value-less memory",
    rule="W_t = α_t W_(t−1) − η_t sign(W_(t−1) k_t − v_t) k_tᵀ",
    references=(MIRAS.at("eq. 12"),),
    fidelity=exact(
        "MIRAS eq. 12",
        source_equation="W_t = W_t − η_t Sign(W_t k_t − v_t) k_tᵀ  (MIRAS eq. 12)",
        decay="The memory decays by a gate α_t; eq. 12 has no decay.",
        loss="The sign is smoothed to e/√(e² + 0.01), so that its gradient reaches the values; "
        "the paper takes tanh(αe).\n"
        "The error is that of W_(t−1); eq. 12 prints W_t.",
        inner_batches=16,
        **_MATRIX_MEMORY,
    ),
)
def value_less() -> tuple[Recipe, LayerOptions]:
    """Only the sign of each error is written."""
    recipe = Recipe(bias=Lp(p=1, eps=1e-2), retention=Decay(), algorithm=_DESCENT)
    return recipe, LayerOptions(gate_options={"lr": _steps(1 / 16)})
