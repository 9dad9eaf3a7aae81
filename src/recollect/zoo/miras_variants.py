"""What MIRAS derives but does not name: other losses and retention gates, on a matrix memory.

Examples:
    >>> rc.zoo.names("miras_variants")
    ['elastic_net', 'elastic_net_proximal', 'sigmoid_bregman', 'f_divergence', 'value_robust',
     'value_less']
    >>> print(rc.zoo.get("elastic_net").rule)
    A_t = α_t A_(t−1) − η_t ∇ℓ_t,  W_t = S_τ(A_t),  S_τ(z) = sign(z) max(|z| − τ, 0)
"""

from __future__ import annotations

from recollect.choices.algorithm.descent import GradientDescent
from recollect.choices.bias.losses import Lp, ValueRobust
from recollect.choices.retention.base import Decay
from recollect.choices.retention.divergence import FDivergence
from recollect.choices.retention.links import Bregman, ElasticNet
from recollect.layer.options import GateOptions, LayerOptions
from recollect.recipe.recipe import Recipe
from recollect.zoo.preset import Fidelity, preset
from recollect.zoo.sources import COMMON_LAYER, INNER_BATCHES, MIRAS

__all__ = [
    "elastic_net",
    "elastic_net_proximal",
    "f_divergence",
    "sigmoid_bregman",
    "value_less",
    "value_robust",
]

_DESCENT = GradientDescent(batch_size=16)
_OPEN = (
    "The memory is the matrix of MIRAS's equations, with one decay and one rate per head: the "
    "paper states no model.",
    COMMON_LAYER,
)


def _steps(high: float) -> GateOptions:
    return GateOptions(high=high, init=high / 2)


@preset(
    "elastic-net memory",
    row=51,
    rule="A_t = α_t A_(t−1) − η_t ∇ℓ_t,  W_t = S_τ(A_t),  S_τ(z) = sign(z) max(|z| − τ, 0)",
    references=(MIRAS("section 5.2, variant 3, and eq. 23"),),
    fidelity=Fidelity(
        kind="exact",
        source="MIRAS eq. 23",
        source_equation=(
            "A_t = A_(t−1) − η ∇ℓ(W_(t−1); k_t, v_t)\nW_t = S_(η/α)(A_t)  (MIRAS eq. 23)"
        ),
        deviations=(
            "A_t decays by a gate α_t; eq. 23 has no decay.",
            "The threshold is a gate τ_t; eq. 23 has η/α.",
            (
                "The regulariser is (1/2η)‖W‖²; the paper prints (1/η)‖W‖², from which eq. "
                "23 does not follow."
            ),
            "The threshold acts at the end of an inner batch.",
            INNER_BATCHES,
            *_OPEN,
        ),
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
    row=51,
    rule="W_t = S_τ(α_t W_(t−1) − η_t ∇ℓ(W_(t−1); k_t, v_t))",
    references=(MIRAS("section 5.2, variant 3, and eq. 22"),),
    fidelity=Fidelity(
        kind="exact",
        source="MIRAS eq. 22",
        deviations=(
            "α_t, η_t and τ_t are gates of their own; eq. 22 makes them of η, α and β.",
            *_OPEN,
        ),
    ),
)
def elastic_net_proximal() -> tuple[Recipe, LayerOptions]:
    """Soft forgetting by a factor, hard forgetting by a threshold."""
    sparse = GateOptions(init=1e-3)
    recipe = Recipe(retention=ElasticNet(form="proximal", decay=Decay()))
    return recipe, LayerOptions(gate_options={"tau": sparse})


@preset(
    "sigmoid-Bregman memory",
    row=52,
    rule="A_t = α_t A_(t−1) − η_t ∇ℓ(W_(t−1); k_t, v_t),  W_t = σ(A_t)",
    references=(MIRAS("section 5.2, variant 5"),),
    fidelity=Fidelity(
        kind="exact",
        source="MIRAS section 5.2, variant 5: f' = logit, so W_t = σ(logit W_(t−1) − η ∇ℓ)",
        source_equation="W_t = σ(ln(W_t / (1 − W_t)) − η ∇ℓ(W_(t−1); k_t, v_t))  "
        "(MIRAS section 5.2, variant 5)",
        deviations=(
            "The logit is that of W_(t−1); the paper prints W_t.",
            "The logit decays by a gate α_t; the paper has no decay.",
            "The memory starts at one half.",
            "The sigmoid acts at the end of an inner batch.",
            INNER_BATCHES,
            *_OPEN,
        ),
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
    row=53,
    rule="W_t = W̄_t ⊙ g(−ζ_t − η_t ∇ℓ(W_(t−1); k_t, v_t)),  g = (f')⁻¹,  ‖W_t‖₁ = c,  "
    "W̄_t = c W_(t−1)^(α_t) / ‖W_(t−1)^(α_t)‖₁",
    references=(MIRAS("eq. 18"),),
    fidelity=Fidelity(
        kind="exact",
        source="MIRAS eq. 18 with f = (√x − 1)², normalised per slice: each row a measure",
        source_equation="W_t = W_(t−1) ⊙ g(−ζ_t − η_t ∇ℓ(W_(t−1); k_t, v_t))  (MIRAS eq. 18)",
        deviations=(
            "f is (√x − 1)²; the paper leaves it open.",
            (
                "Each row is a measure of mass c = 8; eq. 18 has one sum over the whole "
                "matrix (axis='all')."
            ),
            "The memory decays to W_(t−1)^(α_t), as under MIRAS's KL gate; eq. 18 has no decay.",
            "ζ_t is found by bisection.",
            "η_t is a gate between 0 and 1.",
            *_OPEN,
        ),
    ),
)
def f_divergence() -> tuple[Recipe, LayerOptions]:
    """Weights are measures, moved by the inverse derivative of a divergence."""
    recipe = Recipe(retention=FDivergence(kind="hellinger", scale=8.0, decay=Decay()))
    return recipe, LayerOptions(gate_options={"lr": _steps(1.0)})


@preset(
    "value-robust memory",
    row=54,
    rule="W_t = α_t W_(t−1) − η_t (e_t + Δ_t e_t/‖e_t‖) k_tᵀ,  e_t = W_(t−1) k_t − v_t",
    references=(MIRAS("eq. 17 and what follows"),),
    fidelity=Fidelity(
        kind="exact",
        source="the gradient of MIRAS's robust loss ½‖e‖² + Δ‖e‖ + ½Δ²",
        source_equation=(
            "W_t = W_(t−1) − η ((M(W_(t−1), k_t) − v_t) k_tᵀ\n"
            "                   + Δ (M(W_(t−1), k_t) − v_t) / ‖M(W_(t−1), k_t) − v_t‖_2 "
            "k_tᵀ)  (MIRAS, after eq. 17)"
        ),
        deviations=(
            "The memory decays by a gate α_t; the paper's update has no decay.",
            "Δ_t is a gate; the paper's update has a constant.",
            INNER_BATCHES,
            *_OPEN,
        ),
    ),
)
def value_robust() -> tuple[Recipe, LayerOptions]:
    """Least squares against the worst value within a distance Δ."""
    recipe = Recipe(bias=ValueRobust(), retention=Decay(), algorithm=_DESCENT)
    return recipe, LayerOptions(gate_options={"lr": _steps(0.25)})


@preset(
    "value-less memory",
    row=55,
    rule="W_t = α_t W_(t−1) − η_t sign(W_(t−1) k_t − v_t) k_tᵀ",
    references=(MIRAS("eq. 12"),),
    fidelity=Fidelity(
        kind="exact",
        source="MIRAS eq. 12",
        source_equation="W_t = W_t − η_t Sign(W_t k_t − v_t) k_tᵀ  (MIRAS eq. 12)",
        deviations=(
            "The memory decays by a gate α_t; eq. 12 has no decay.",
            (
                "The sign is smoothed to e/√(e² + 0.01), so that values can be learned "
                "through it; the paper takes tanh(αe)."
            ),
            "The error is that of W_(t−1); eq. 12 prints W_t.",
            INNER_BATCHES,
            *_OPEN,
        ),
    ),
)
def value_less() -> tuple[Recipe, LayerOptions]:
    """Only the sign of each error is written."""
    recipe = Recipe(bias=Lp(p=1, eps=1e-2), retention=Decay(), algorithm=_DESCENT)
    return recipe, LayerOptions(gate_options={"lr": _steps(1 / 16)})
