"""Least squares over all of the past: the optimum that linear attention and its kin approximate.

Examples:
    >>> rc.zoo.names("least_squares")
    ['rls', 'geometric_rls', 'mesa_net', 'gated_kalmanet']
    >>> print(rc.zoo.get("rls").rule)
    M_t = V_tᵀ K_t (K_tᵀ K_t + λ I)⁻¹
"""

from __future__ import annotations

from recollect.choices.algorithm.closed_form import LeastSquares
from recollect.choices.context.windows import Prefix
from recollect.layer.options import LayerOptions
from recollect.recipe.recipe import Recipe
from recollect.zoo.fidelity import exact, reconstruction
from recollect.zoo.preset import preset
from recollect.zoo.references import TTR, Paper

__all__ = ["gated_kalmanet", "geometric_rls", "mesa_net", "rls"]

_MESA = Paper(
    "von Oswald et al., Uncovering mesa-optimization algorithms in transformers", 2023
).at("the mesa layer")


@preset(
    "RLS (mesa layer)",
    rule="M_t = V_tᵀ K_t (K_tᵀ K_t + λ I)⁻¹",
    references=(TTR.at("eq. 11"), _MESA),
    fidelity=exact(
        "TTR eq. 11",
        source_equation="M_t = V_tᵀ K_t (K_tᵀ K_t)⁻¹  overdetermined, e.g. t ≥ D_k,\n"
        "      V_tᵀ (K_t K_tᵀ)⁻¹ K_t  underdetermined, e.g. t < D_k  (TTR eq. 11)",
        ridge="A ridge λ takes the place of the pseudoinverse, with an error in proportion to "
        "λ.\n"
        "λ is learned per head and starts at 1.",
        common_layer=True,
    ),
)
def rls() -> tuple[Recipe, LayerOptions]:
    """The least-squares solution over all of the past, at every token."""
    return Recipe(context=Prefix(), algorithm=LeastSquares(ridge="learned")), LayerOptions()


@preset(
    "geometric RLS",
    rule="M_t = V_tᵀ Γ_t K_t (K_tᵀ Γ_t K_t + ρ_t I)⁻¹,  Γ_t = diag(γ_i^(t))",
    references=(TTR.at("eqs. 14–15"),),
    fidelity=reconstruction(
        "TTR eq. 15",
        source_equation="M_t = V_tᵀ Γ_t K_t (K_tᵀ Γ_t K_t)⁻¹  overdetermined, e.g. t ≥ D_k,\n"
        "      V_tᵀ (K_t K_tᵀ)⁻¹ K_t  underdetermined, e.g. t < D_k  (TTR eq. 15)",
        unpublished="No layer of this recurrence is published.",
        decay="The decay is a gate of the token.",
        ridge="A ridge ρ_t takes the place of the pseudoinverse, with an error in proportion to "
        "it.\n"
        "The ridge is refreshed every 64 tokens, because one that only decays leaves unexcited "
        "directions without a bound.",
        common_layer=True,
    ),
)
def geometric_rls() -> tuple[Recipe, LayerOptions]:
    """Least squares whose past fades geometrically."""
    algorithm = LeastSquares(ridge="learned")
    return Recipe(context=Prefix(decay="input"), algorithm=algorithm), LayerOptions()


@preset(
    "MesaNet",
    rule="M_t = H_t (G_t + Λ)⁻¹,  H_t = γ_t H_(t−1) + β_t v_t k_tᵀ,  "
    "G_t = γ_t G_(t−1) + β_t k_t k_tᵀ",
    references=(
        Paper(
            "von Oswald et al., MesaNet: sequence modeling by locally optimal test-time training",
            2025,
        ).at("the layer's recurrence"),
        TTR.at("eqs. 14–15"),
    ),
    fidelity=exact(
        "the recurrence of MesaNet",
        solver="Conjugate gradients run to a tolerance; the paper runs a fixed number of steps.",
        ridge="Λ is diagonal and starts at 1.",
        common_layer=True,
    ),
)
def mesa_net() -> tuple[Recipe, LayerOptions]:
    """Least squares with a constant ridge per key channel, an input gate and a forget gate."""
    algorithm = LeastSquares(ridge="learned", ridge_per="key", ridge_schedule="constant")
    return Recipe(
        context=Prefix(decay="input", weight="input"), algorithm=algorithm
    ), LayerOptions()


@preset(
    "Gated KalmaNet",
    rule="M_t = H_t (G_t + ρ_t I)⁻¹,  H_t = γ_t H_(t−1) + v_t k_tᵀ,  "
    "G_t = γ_t G_(t−1) + k_t k_tᵀ,  ρ_t = 0.02 ‖G_t‖_F",
    references=(
        Paper(
            "Peng et al., Gated KalmaNet: a fading memory layer through test-time ridge regression",
            2025,
        ).at("arXiv 2511.21016, section 4"),
    ),
    fidelity=exact(
        "the ridge regression of Gated KalmaNet, with a ridge in proportion to the Gram matrix",
        logsigmoid_decay=True,
        solver="Conjugate gradients run to a tolerance; the authors run 30 Chebyshev steps.",
        ridge="ρ_t has an additional 2e-8, at which an empty memory is regular.",
        layer="The output is that of the regression; the authors' layer can mix in the output of "
        "linear attention.",
        common_layer=True,
    ),
)
def gated_kalmanet() -> tuple[Recipe, LayerOptions]:
    """Ridge regression over a fading past, with a bounded condition number."""
    algorithm = LeastSquares(ridge=0.02, ridge_schedule="relative")
    return Recipe(context=Prefix(decay="input"), algorithm=algorithm), LayerOptions()
