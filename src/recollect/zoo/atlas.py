"""ATLAS's models: polynomial features, windows of associations, and Muon as the inner optimizer.

Examples:
    >>> print(*rc.zoo.names("atlas"))
    dla swla omega_net omega_net_with_base atlas atlas_per_token atlas_plus_plus
    >>> print(rc.zoo.get("dla").rule)
    M_t = α_t M_(t−1) + η_t ∇⟨M_(t−1)(φ(k_t)), v_t⟩
"""

from __future__ import annotations

from recollect.choices.algorithm.descent import GradientDescent
from recollect.choices.algorithm.muon import Muon
from recollect.choices.bias.losses import DotProduct
from recollect.choices.context.windows import Window
from recollect.choices.features.finite import Polynomial
from recollect.choices.memory.base import Memory
from recollect.choices.memory.maps import MLP, GatedMLP
from recollect.choices.retention.base import Decay
from recollect.layer.options import GateOptions, LayerOptions
from recollect.recipe.recipe import Recipe
from recollect.zoo.preset import Fidelity, preset
from recollect.zoo.sources import (
    ATLAS,
    COMMON_LAYER,
    FORGETFUL,
    HALF_LOSS,
    INNER_BATCHES,
    KEY_OVERLAP,
    NORMALIZED_STEPS,
    REPEATED,
    SILENT,
    SLOW,
    UNDER_A_NORM,
    limited_rate,
)

__all__ = [
    "atlas",
    "atlas_per_token",
    "atlas_plus_plus",
    "dla",
    "omega_net",
    "omega_net_with_base",
    "swla",
]

_FEATURES = "The polynomial has degree 2, with the coefficients of eq. 5."
_WINDOW_CHOICES = (
    _FEATURES,
    "The window holds 8 associations.",
    "η_t and γ_i^(t) are separate gates of the token.",
)
_OMEGA_EQUATION = "M_t = α_t M_(t−1) − ∇ Σ_(i=t−c+1)^t γ_i^(t) ‖M(φ(k_i)) − v_i‖²_2  (ATLAS eq. 10)"
_SURPRISE = "S_t = θ_t S_(t−1) − Σ_(i>t−c) γ_i^(t) ∇‖M_(t−1)(φ(k_i)) − v_i‖²"
_MUON_RULE = f"{_SURPRISE},  M_t = α_t M_(t−1) + η_t λ_t NS5(S_t)"
_MUON_EQUATION = (
    "M_t = α_t M_(t−1) − η_t NewtonShulz-k(S_t)  (ATLAS eq. 32)\n"
    "S_t = θ_t S_(t−1) + ∇ Σ_(i=t−c+1)^t γ_i^(t) ‖M(φ*(k_i)) − v_i‖²_2  (ATLAS eq. 33)"
)
_MUON = (
    "The features are the polynomials of eq. 58; eq. 33 prints φ*.",
    "The signs are those of eqs. 57–58, which lead to the same memory.",
    "η_t multiplies after Newton–Schulz, as in eq. 32; before it, as in eq. 58, it would cancel.",
    "λ_t is the length of the orthogonalised step that leaves the least error to first order; the "
    "papers state no length.",
    limited_rate(GateOptions()),
    "The memory has no layer norm, which appendix E mentions.",
    HALF_LOSS,
    *_WINDOW_CHOICES,
    INNER_BATCHES,
    COMMON_LAYER,
)


_SLOW = LayerOptions(gate_options={"log_decay": SLOW})


def _gates(most: float) -> dict[str, GateOptions]:
    return {"lr": GateOptions(high=most, init=most / 2), "log_decay": SLOW}


@preset(
    "deep linear attention (DLA)",
    row=56,
    rule="M_t = α_t M_(t−1) + η_t ∇⟨M_(t−1)(φ(k_t)), v_t⟩",
    references=(ATLAS("eqs. 19 and 48–51"),),
    fidelity=Fidelity(
        kind="exact",
        source="ATLAS eq. 19, its inner product maximised",
        source_equation="M_t = α_t M_(t−1) − η_t ∇ℓ(M_(t−1); φ(k_t), v_t),  "
        "ℓ = ⟨M_(t−1)(φ(k_t)), v_t⟩  (ATLAS eq. 19)",
        deviations=(
            "The inner product is maximised; eq. 19 prints a minus sign.",
            (
                "The memory is x + LN(W_1 gelu(W_2 φ(x))): without the layer norm of "
                "appendix E the output grows without bound."
            ),
            _FEATURES,
            INNER_BATCHES,
            COMMON_LAYER,
        ),
    ),
)
def dla() -> tuple[Recipe, LayerOptions]:
    """Linear attention's objective, on a perceptron."""
    recipe = Recipe(
        memory=MLP(norm="layer"),
        features=Polynomial(),
        bias=DotProduct(),
        retention=Decay(),
        algorithm=GradientDescent(batch_size=16),
    )
    return recipe, LayerOptions(gate_options=_gates(1 / 64))


@preset(
    "sliding-window linear attention (SWLA)",
    row=57,
    rule="M_t = α_t M_(t−1) + η_t Σ_(i>t−c) γ_i^(t) v_i φ(k_i)ᵀ",
    references=(ATLAS("eqs. 20 and 52–55"),),
    fidelity=Fidelity(
        kind="exact",
        source="ATLAS eq. 20 with the decay of eq. 19",
        source_equation=(
            "M_t = α_t M_(t−1) − η_t ∇ Σ_(i=t−c+1)^t ℓ(M_(t−1); φ(k_i), v_i)\n"
            "    = M_(t−1) + Σ_(i=t−c+1)^t γ_i^(t) v_i φ(k_i)ᵀ  (ATLAS eq. 20)"
        ),
        deviations=(
            (
                "The memory decays by α_t, as in the first form of eq. 20; the second form "
                "drops α_t."
            ),
            (
                "The write has the sign of the second form of eq. 20; eqs. 53–55 print the "
                "other sign."
            ),
            *_WINDOW_CHOICES,
            COMMON_LAYER,
        ),
    ),
)
def swla() -> tuple[Recipe, LayerOptions]:
    """Linear attention that writes the last associations again with every token."""
    recipe = Recipe(
        features=Polynomial(), bias=DotProduct(), context=Window(size=8), retention=Decay()
    )
    return recipe, LayerOptions()


def _omega(memory: Memory, algorithm: GradientDescent | Muon) -> Recipe:
    return Recipe(
        memory=memory,
        features=Polynomial(),
        context=Window(size=8),
        retention=Decay(),
        algorithm=algorithm,
    )


@preset(
    "OmegaNet",
    row=58,
    rule="M_t = α_t M_(t−1) − η_t r_t Σ_(i>t−c) γ_i^(t) ρ_i ∇‖M_(t−1)(φ(k_i)) − v_i‖²",
    references=(ATLAS("eqs. 8–10, 15–16 and 56"),),
    fidelity=Fidelity(
        kind="reconstruction",
        source="ATLAS eq. 10, in inner batches as eq. 16",
        source_equation=_OMEGA_EQUATION,
        deviations=(
            (
                "The memory is x + LN(W_1 gelu(W_2 φ(x))), with the layer norm of appendix "
                "E; eq. 42 prints none."
            ),
            NORMALIZED_STEPS,
            KEY_OVERLAP,
            limited_rate(REPEATED),
            HALF_LOSS,
            *_WINDOW_CHOICES,
            INNER_BATCHES,
            COMMON_LAYER,
        ),
    ),
)
def omega_net() -> tuple[Recipe, LayerOptions]:
    """The Omega rule: a window of associations is fitted at every step."""
    memory = MLP(norm="layer")
    recipe = _omega(
        memory, GradientDescent(batch_size=16, normalized_steps=True, batch_overlap="measured")
    )
    gates = {**UNDER_A_NORM, "lr": REPEATED}
    return recipe, LayerOptions(gate_options=gates, last_map_init_scale=SILENT)


@preset(
    "OmegaNet with a base",
    row=58,
    rule="M(x) = x + (W̄_1 + W_1) σ((W̄_2 + W_2) φ(x)),  "
    "W_t = α_t W_(t−1) − η_t r_t Σ_(i>t−c) γ_i^(t) ρ_i ∇‖M_(t−1)(k_i) − v_i‖²",
    references=(ATLAS("eqs. 8–10, 15–16 and 56"),),
    fidelity=Fidelity(
        kind="approximation",
        source="ATLAS eq. 10, in inner batches as eq. 16, on a memory that is ours",
        source_equation=_OMEGA_EQUATION,
        deviations=(
            (
                "The memory has learned weights W̄ that are not memory; only W is written "
                "and decays, where all weights of omega_net decay."
            ),
            "The memory has no layer norm.",
            "α_t starts near 0.98; that of omega_net starts near 0.999.",
            NORMALIZED_STEPS,
            KEY_OVERLAP,
            limited_rate(GateOptions()),
            HALF_LOSS,
            *_WINDOW_CHOICES,
            INNER_BATCHES,
            COMMON_LAYER,
        ),
    ),
)
def omega_net_with_base() -> tuple[Recipe, LayerOptions]:
    """OmegaNet beside learned weights that do not fade."""
    recipe = _omega(
        MLP(static_weights=True),
        GradientDescent(batch_size=16, normalized_steps=True, batch_overlap="measured"),
    )
    return recipe, LayerOptions(gate_options={"log_decay": FORGETFUL})


@preset(
    "Atlas",
    row=59,
    rule=_MUON_RULE,
    references=(ATLAS("eqs. 32–33, 40 and 57–58"),),
    fidelity=Fidelity(
        kind="approximation",
        source="ATLAS eqs. 32–33",
        source_equation=_MUON_EQUATION,
        deviations=(
            (
                "Newton–Schulz runs once per inner batch, at its end; atlas_per_token runs "
                "it at every token."
            ),
            "Tokens read the memory of the start of their inner batch.",
            *_MUON,
        ),
    ),
)
def atlas() -> tuple[Recipe, LayerOptions]:
    """The Omega rule, optimised by Muon once in every inner batch."""
    return _omega(MLP(), Muon(batch_size=16, update_every="batch", normalized_steps=True)), _SLOW


@preset(
    "Atlas, token by token",
    row=59,
    rule=_MUON_RULE,
    references=(ATLAS("eqs. 32–33, 40 and 57–58"),),
    fidelity=Fidelity(
        kind="reconstruction",
        source="ATLAS eqs. 32–33 and 40",
        source_equation=f"{_MUON_EQUATION}\nS′_t ← Newton-Schulz5(S_t)  (ATLAS eq. 40)",
        deviations=(
            (
                "Newton–Schulz runs at every token, which costs some 200 times as much as "
                "plain descent."
            ),
            *_MUON,
        ),
    ),
)
def atlas_per_token() -> tuple[Recipe, LayerOptions]:
    """The Omega rule, optimised by Muon at every token."""
    return _omega(MLP(), Muon(batch_size=16, normalized_steps=True)), _SLOW


@preset(
    "Atlas++",
    row=60,
    rule=_MUON_RULE.replace("M_t =", "M(x) = x + W_1(σ(W_2 x) ⊗ W_3 x),  M_t ="),
    references=(ATLAS("eqs. 32–33 and 43"),),
    fidelity=Fidelity(
        kind="approximation",
        source="ATLAS eqs. 32–33 with the memory of eq. 43",
        source_equation=f"{_MUON_EQUATION}\nM(·) = (·) + W_1(σ(W_2(·)) ⊗ W_3(·))  (ATLAS eq. 43)",
        deviations=(
            "Newton–Schulz runs once per inner batch, at its end.",
            "Tokens read the memory of the start of their inner batch.",
            *_MUON,
        ),
    ),
)
def atlas_plus_plus() -> tuple[Recipe, LayerOptions]:
    """Atlas with a gated memory."""
    return _omega(
        GatedMLP(), Muon(batch_size=16, update_every="batch", normalized_steps=True)
    ), _SLOW
