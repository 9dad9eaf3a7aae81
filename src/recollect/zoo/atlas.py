"""ATLAS's models: polynomial features, windows of associations, and Muon as the inner optimizer.

Examples:
    >>> print(*rc.zoo.names("atlas"))
    dla swla omega_net omega_net_with_base atlas atlas_per_token atlas_plus_plus
"""

from __future__ import annotations

from typing import Any

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
from recollect.zoo.fidelity import approximation, exact, reconstruction
from recollect.zoo.preset import decay_from, limit_multiple, preset
from recollect.zoo.references import ATLAS

__all__ = [
    "atlas",
    "atlas_per_token",
    "atlas_plus_plus",
    "dla",
    "omega_net",
    "omega_net_with_base",
    "swla",
]

_POLYNOMIAL = "The polynomial has degree 2, with the coefficients of eq. 5."
_SEPARATE_GATES = "η_t and γ_i^(t) are separate gates of the token."
_OMEGA_EQUATION = "M_t = α_t M_(t−1) − ∇ Σ_(i=t−c+1)^t γ_i^(t) ‖M(φ(k_i)) − v_i‖²_2  (ATLAS eq. 10)"
_MUON_RULE = (
    "S_t = θ_t S_(t−1) − Σ_(i>t−c) γ_i^(t) ∇‖M_(t−1)(φ(k_i)) − v_i‖²,  "
    "M_t = α_t M_(t−1) + η_t λ_t NS5(S_t)"
)
_MUON_EQUATION = (
    "M_t = α_t M_(t−1) − η_t NewtonShulz-k(S_t)  (ATLAS eq. 32)\n"
    "S_t = θ_t S_(t−1) + ∇ Σ_(i=t−c+1)^t γ_i^(t) ‖M(φ*(k_i)) − v_i‖²_2  (ATLAS eq. 33)"
)


def _muon_deviations(steps: str) -> dict[str, Any]:
    return {
        "step": f"{steps}\n"
        "η_t multiplies after Newton–Schulz, as in eq. 32; before it, as in eq. 58, it would "
        "cancel.\n"
        "λ_t is the length of the orthogonalised step with the least error to first order; the "
        "papers print no length.",
        "features": f"The features are the polynomials of eq. 58; eq. 33 prints φ*.\n{_POLYNOMIAL}",
        "sign": "The signs are those of eqs. 57–58, which lead to the same memory.",
        "memory": "The memory has no layer norm, which appendix E mentions.",
        "half_loss": True,
        "window": 8,
        "gates": _SEPARATE_GATES,
        "inner_batches": 16,
        "common_layer": True,
    }


def _omega(memory: Memory, algorithm: GradientDescent | Muon) -> Recipe:
    return Recipe(
        memory=memory,
        features=Polynomial(),
        context=Window(size=8),
        retention=Decay(),
        algorithm=algorithm,
    )


@preset(
    "deep linear attention (DLA)",
    rule="M_t = α_t M_(t−1) + η_t ∇⟨M_(t−1)(φ(k_t)), v_t⟩",
    references=(ATLAS.at("eqs. 19 and 48–51"),),
    fidelity=exact(
        "ATLAS eq. 19, its inner product maximised",
        source_equation="M_t = α_t M_(t−1) − η_t ∇ℓ(M_(t−1); φ(k_t), v_t),  "
        "ℓ = ⟨M_(t−1)(φ(k_t)), v_t⟩  (ATLAS eq. 19)",
        sign="The inner product is maximised; eq. 19 prints a minus sign.",
        memory="The memory is x + LN(W_1 gelu(W_2 φ(x))): without the layer norm of appendix E "
        "the output grows without bound.",
        features=_POLYNOMIAL,
        inner_batches=16,
        common_layer=True,
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
    gates = {"lr": GateOptions(high=1 / 64, init=1 / 128), "log_decay": decay_from(0.999)}
    return recipe, LayerOptions(gate_options=gates)


@preset(
    "sliding-window linear attention (SWLA)",
    rule="M_t = α_t M_(t−1) + η_t Σ_(i>t−c) γ_i^(t) v_i φ(k_i)ᵀ",
    references=(ATLAS.at("eqs. 20 and 52–55"),),
    fidelity=exact(
        "ATLAS eq. 20 with the decay of eq. 19",
        source_equation="M_t = α_t M_(t−1) − η_t ∇ Σ_(i=t−c+1)^t ℓ(M_(t−1); φ(k_i), v_i)\n"
        "    = M_(t−1) + Σ_(i=t−c+1)^t γ_i^(t) v_i φ(k_i)ᵀ  (ATLAS eq. 20)",
        decay="The memory decays by α_t, as in the first form of eq. 20; the second form drops "
        "α_t.",
        sign="The write has the sign of the second form of eq. 20; eqs. 53–55 print the other "
        "sign.",
        features=_POLYNOMIAL,
        window=8,
        gates=_SEPARATE_GATES,
        common_layer=True,
    ),
)
def swla() -> tuple[Recipe, LayerOptions]:
    """Linear attention that writes the last associations again with every token."""
    recipe = Recipe(
        features=Polynomial(), bias=DotProduct(), context=Window(size=8), retention=Decay()
    )
    return recipe, LayerOptions()


@preset(
    "OmegaNet",
    rule="M_t = α_t M_(t−1) − η_t r_t Σ_(i>t−c) γ_i^(t) ρ_i ∇‖M_(t−1)(φ(k_i)) − v_i‖²",
    references=(ATLAS.at("eqs. 8–10, 15–16 and 56"),),
    fidelity=reconstruction(
        "ATLAS eq. 10, in inner batches as eq. 16",
        source_equation=_OMEGA_EQUATION,
        memory="The memory is x + LN(W_1 gelu(W_2 φ(x))), with the layer norm of appendix E; eq. "
        "42 prints none.",
        normalized_step=True,
        key_overlap=True,
        half_loss=True,
        features=_POLYNOMIAL,
        window=8,
        gates=_SEPARATE_GATES,
        inner_batches=16,
        common_layer=True,
    ),
)
def omega_net() -> tuple[Recipe, LayerOptions]:
    """The Omega rule: a window of associations is fitted at every step."""
    algorithm = GradientDescent(batch_size=16, normalized_steps=True, batch_overlap="measured")
    # A window writes a token several times: the rate starts lower than that of titans.
    gates = {
        "lr": limit_multiple(0.5, low=0.2),
        "log_decay": decay_from(0.999),
        "norm_weight": GateOptions(init=0.7),
    }
    return _omega(MLP(norm="layer"), algorithm), LayerOptions(
        gate_options=gates, last_map_init_scale=0.01
    )


@preset(
    "OmegaNet with a base",
    rule="M(x) = x + (W̄_1 + W_1) σ((W̄_2 + W_2) φ(x)),  "
    "W_t = α_t W_(t−1) − η_t r_t Σ_(i>t−c) γ_i^(t) ρ_i ∇‖M_(t−1)(k_i) − v_i‖²",
    references=(ATLAS.at("eqs. 8–10, 15–16 and 56"),),
    fidelity=approximation(
        "ATLAS eq. 10, in inner batches as eq. 16, with a memory of recollect",
        source_equation=_OMEGA_EQUATION,
        memory="The memory has learned weights W̄ that are not memory; only W is written and "
        "decays, where all weights of omega_net decay.\n"
        "The memory has no layer norm.",
        decay="α_t starts near 0.98; that of omega_net starts near 0.999.",
        normalized_step=True,
        key_overlap=True,
        half_loss=True,
        features=_POLYNOMIAL,
        window=8,
        gates=_SEPARATE_GATES,
        inner_batches=16,
        common_layer=True,
    ),
    twin_of="omega_net",
)
def omega_net_with_base() -> tuple[Recipe, LayerOptions]:
    """OmegaNet with learned weights that do not decay, next to the memory."""
    algorithm = GradientDescent(batch_size=16, normalized_steps=True, batch_overlap="measured")
    return _omega(MLP(static_weights=True), algorithm), LayerOptions(
        gate_options={"log_decay": decay_from(0.98)}
    )


@preset(
    "Atlas",
    rule=_MUON_RULE,
    references=(ATLAS.at("eqs. 32–33, 40 and 57–58"),),
    fidelity=approximation(
        "ATLAS eqs. 32–33",
        source_equation=_MUON_EQUATION,
        **_muon_deviations(
            "Newton–Schulz runs once per inner batch, at its end; atlas_per_token runs it at every "
            "token.\nTokens read the memory of the start of their inner batch."
        ),
    ),
)
def atlas() -> tuple[Recipe, LayerOptions]:
    """The Omega rule, optimised by Muon once in every inner batch."""
    algorithm = Muon(batch_size=16, update_every="batch", normalized_steps=True)
    return _omega(MLP(), algorithm), LayerOptions(gate_options={"log_decay": decay_from(0.999)})


@preset(
    "Atlas, token by token",
    rule=_MUON_RULE,
    references=(ATLAS.at("eqs. 32–33, 40 and 57–58"),),
    fidelity=reconstruction(
        "ATLAS eqs. 32–33 and 40",
        source_equation=f"{_MUON_EQUATION}\nS′_t ← Newton-Schulz5(S_t)  (ATLAS eq. 40)",
        **_muon_deviations(
            "Newton–Schulz runs at every token, which costs some 200 times as much as descent."
        ),
    ),
    twin_of="atlas",
)
def atlas_per_token() -> tuple[Recipe, LayerOptions]:
    """The Omega rule, optimised by Muon at every token."""
    algorithm = Muon(batch_size=16, normalized_steps=True)
    return _omega(MLP(), algorithm), LayerOptions(gate_options={"log_decay": decay_from(0.999)})


@preset(
    "Atlas++",
    rule=_MUON_RULE.replace("M_t =", "M(x) = x + W_1(σ(W_2 x) ⊗ W_3 x),  M_t ="),
    references=(ATLAS.at("eqs. 32–33 and 43"),),
    fidelity=approximation(
        "ATLAS eqs. 32–33 with the memory of eq. 43",
        source_equation=f"{_MUON_EQUATION}\nM(·) = (·) + W_1(σ(W_2(·)) ⊗ W_3(·))  (ATLAS eq. 43)",
        **_muon_deviations(
            "Newton–Schulz runs once per inner batch, at its end.\n"
            "Tokens read the memory of the start of their inner batch."
        ),
    ),
)
def atlas_plus_plus() -> tuple[Recipe, LayerOptions]:
    """Atlas with a gated memory."""
    algorithm = Muon(batch_size=16, update_every="batch", normalized_steps=True)
    return _omega(GatedMLP(), algorithm), LayerOptions(
        gate_options={"log_decay": decay_from(0.999)}
    )
