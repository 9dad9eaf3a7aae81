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
from recollect.zoo.sources import COMMON, MIRAS

__all__ = [
    "elastic_net",
    "elastic_net_proximal",
    "f_divergence",
    "sigmoid_bregman",
    "value_less",
    "value_robust",
]

_DESCENT = GradientDescent(batch=16)
_OPEN = (
    "MIRAS gives the rule and no model: the memory is the matrix of its equations, one decay and "
    "one step per head; "
)
_CHUNKS = "gradients are taken at the start of inner batches of 16 tokens; "


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
        note="the regulariser is (1/2η)‖W‖², where the paper misses the half; τ is a gate. "
        f"{_OPEN}{_CHUNKS}{COMMON}",
    ),
)
def elastic_net() -> tuple[Recipe, LayerOptions]:
    """Gradients accumulate; what they leave below a threshold is read as zero."""
    retention = ElasticNet(decay=Decay(), every="batch")
    return Recipe(retention=retention, algorithm=_DESCENT), LayerOptions(gates={"lr": _steps(0.25)})


@preset(
    "elastic-net memory, proximal",
    row=51,
    rule="W_t = S_τ(α_t W_(t−1) − η_t ∇ℓ(W_(t−1); k_t, v_t))",
    references=(MIRAS("section 5.2, variant 3, and eq. 22"),),
    fidelity=Fidelity(
        kind="exact",
        source="MIRAS eq. 22",
        note=f"what falls below the threshold is forgotten for good, so the rule is sequential: "
        f"one token after the other. {_OPEN}{COMMON}",
    ),
)
def elastic_net_proximal() -> tuple[Recipe, LayerOptions]:
    """Soft forgetting by a factor, hard forgetting by a threshold."""
    sparse = GateOptions(init=1e-3)
    recipe = Recipe(retention=ElasticNet(form="proximal", decay=Decay()))
    return recipe, LayerOptions(gates={"tau": sparse})


@preset(
    "sigmoid-Bregman memory",
    row=52,
    rule="A_t = α_t A_(t−1) − η_t ∇ℓ(W_(t−1); k_t, v_t),  W_t = σ(A_t)",
    references=(MIRAS("section 5.2, variant 5"),),
    fidelity=Fidelity(
        kind="exact",
        source="MIRAS section 5.2, variant 5: f' = logit, so W_t = σ(logit W_(t−1) − η ∇ℓ)",
        note="the gradient is taken at W_(t−1), where the paper prints W_t; the memory starts at "
        f"one half. {_OPEN}{_CHUNKS}{COMMON}",
    ),
)
def sigmoid_bregman() -> tuple[Recipe, LayerOptions]:
    """Every weight stays between 0 and 1, by mirror descent."""
    retention = Bregman(map="sigmoid", decay=Decay(), every="batch")
    return Recipe(retention=retention, algorithm=_DESCENT), LayerOptions(gates={"lr": _steps(2.0)})


@preset(
    "f-divergence memory",
    row=53,
    rule="W_t = W_(t−1) ⊙ g(−ζ_t − η_t ∇ℓ(W_(t−1); k_t, v_t)),  g = (f')⁻¹,  ‖W_t‖₁ = c",
    references=(MIRAS("eq. 18"),),
    fidelity=Fidelity(
        kind="exact",
        source="MIRAS eq. 18 with f = (√x − 1)², normalised per slice: each row a measure",
        note="left open: f; eq. 18 has one sum over the whole matrix (axis='all'), and the paper "
        "allows one per slice, whose mass c does not grow with the width; "
        "ζ is found by bisection. The decay flattens the measure, W_(t−1)^α, as MIRAS's KL gate "
        "does; c = 8; steps stay below 1 (below 4, outer gradients of 10⁴ ended a training). "
        f"The rule is sequential: one token after the other. {_OPEN}{COMMON}",
    ),
)
def f_divergence() -> tuple[Recipe, LayerOptions]:
    """Weights are measures, moved by the inverse derivative of a divergence."""
    recipe = Recipe(retention=FDivergence(kind="hellinger", scale=8.0, decay=Decay()))
    return recipe, LayerOptions(gates={"lr": _steps(1.0)})


@preset(
    "value-robust memory",
    row=54,
    rule="W_t = α_t W_(t−1) − η_t (e_t + Δ_t e_t/‖e_t‖) k_tᵀ,  e_t = W_(t−1) k_t − v_t",
    references=(MIRAS("eq. 17 and what follows"),),
    fidelity=Fidelity(
        kind="exact",
        source="the gradient of MIRAS's robust loss ½‖e‖² + Δ‖e‖ + ½Δ²",
        note=f"Δ is a gate. {_OPEN}{_CHUNKS}{COMMON}",
    ),
)
def value_robust() -> tuple[Recipe, LayerOptions]:
    """Least squares against the worst value within a distance Δ."""
    recipe = Recipe(bias=ValueRobust(), retention=Decay(), algorithm=_DESCENT)
    return recipe, LayerOptions(gates={"lr": _steps(0.25)})


@preset(
    "value-less memory",
    row=55,
    rule="W_t = α_t W_(t−1) − η_t sign(W_(t−1) k_t − v_t) k_tᵀ",
    references=(MIRAS("eq. 12"),),
    fidelity=Fidelity(
        kind="exact",
        source="MIRAS eq. 12",
        note="the sign is smoothed, e/√(e² + 0.01), so that values can be learned through it, and "
        f"is that of the error at W_(t−1), where the paper prints W_t. {_OPEN}{_CHUNKS}{COMMON}",
    ),
)
def value_less() -> tuple[Recipe, LayerOptions]:
    """Only the sign of each error is written."""
    recipe = Recipe(bias=Lp(p=1, eps=1e-2), retention=Decay(), algorithm=_DESCENT)
    return recipe, LayerOptions(gates={"lr": _steps(1 / 16)})
