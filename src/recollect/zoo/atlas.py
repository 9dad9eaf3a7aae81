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
    COMMON,
    FORGETFUL,
    HALF,
    NORMALISED,
    REPEATED,
    SILENT,
    SLOW,
    UNDER_A_NORM,
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

_FEATURES = "the degree of the polynomial, 2, is ours, with the coefficients of eq. 5"
_WINDOW = "the window, 8 associations, is ours; η_t and γ_i^(t) are gates of the token both"
_CHUNKS = "gradients are taken at the start of inner batches of 16 tokens"
_SURPRISE = "S_t = θ_t S_(t−1) − Σ_(i>t−c) γ_i^(t) ∇‖M_(t−1)(φ(k_i)) − v_i‖²"
_MUON_RULE = f"{_SURPRISE},  M_t = α_t M_(t−1) + η_t λ_t NS5(S_t)"
_MUON = (
    "memories are those of eqs. 42 and 43, without the layer norm of which appendix E speaks; the "
    "signs are those of eqs. 57–58, the step is outside of Newton–Schulz as in eq. 32 (inside, as "
    "eq. 58 has it, Newton–Schulz would cancel it); an orthogonalised step has an absolute "
    "size, of which the papers say nothing: λ_t is the length that leaves least of the errors to "
    "first order, and η_t a share of twice that, one half at the start"
)


_SLOW = LayerOptions(gates={"log_decay": SLOW})


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
        note="eq. 19 prints the other sign. The memory is x + LN(W_1 gelu(W_2 φ(x))), with the "
        "layer norm of ATLAS's appendix E: without it an inner product that is maximised through "
        f"two maps grows without bound. {_FEATURES}; {_CHUNKS}; {COMMON}",
    ),
)
def dla() -> tuple[Recipe, LayerOptions]:
    """Linear attention's objective, on a perceptron."""
    recipe = Recipe(
        memory=MLP(norm="layer"),
        features=Polynomial(),
        bias=DotProduct(),
        retention=Decay(),
        algorithm=GradientDescent(batch=16),
    )
    return recipe, LayerOptions(gates=_gates(1 / 64))


@preset(
    "sliding-window linear attention (SWLA)",
    row=57,
    rule="M_t = α_t M_(t−1) + η_t Σ_(i>t−c) γ_i^(t) v_i φ(k_i)ᵀ",
    references=(ATLAS("eqs. 20 and 52–55"),),
    fidelity=Fidelity(
        kind="exact",
        source="ATLAS eq. 20 with the decay of eq. 19",
        note=f"eqs. 53–55 print the other sign. {_FEATURES}; {_WINDOW}; {COMMON}",
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
        note="the memory is x + LN(W_1 gelu(W_2 φ(x))), with the layer norm of ATLAS's appendix E, "
        "which eq. 42 leaves out; "
        f"{NORMALISED}. {HALF}. {_FEATURES}; {_WINDOW}; {_CHUNKS}; {COMMON}",
    ),
)
def omega_net() -> tuple[Recipe, LayerOptions]:
    """The Omega rule: a window of associations is fitted at every step."""
    memory = MLP(norm="layer")
    recipe = _omega(memory, GradientDescent(batch=16, normalize=True, limit="keys"))
    gates = {**UNDER_A_NORM, "lr": REPEATED}
    return recipe, LayerOptions(gates=gates, last_map=SILENT)


@preset(
    "OmegaNet with a base",
    row=58,
    rule="M(x) = x + (W̄_1 + W_1) σ((W̄_2 + W_2) φ(x)),  "
    "W_t = α_t W_(t−1) − η_t r_t Σ_(i>t−c) γ_i^(t) ρ_i ∇‖M_(t−1)(k_i) − v_i‖²",
    references=(ATLAS("eqs. 8–10, 15–16 and 56"),),
    fidelity=Fidelity(
        kind="approximation",
        source="ATLAS eq. 10, in inner batches as eq. 16, on a memory that is ours",
        note="there is no inner norm. W̄ is learned and no memory: the memory W forgets towards "
        "W̄, where in OmegaNet all of the initial memory fades with what was written. So it may "
        "forget from the start (α_t from "
        f"0.98), which is what text asks for (`docs/design/steps.md`). {NORMALISED}. {HALF}. "
        f"{_FEATURES}; {_WINDOW}; {_CHUNKS}; {COMMON}",
    ),
)
def omega_net_with_base() -> tuple[Recipe, LayerOptions]:
    """OmegaNet beside learned weights that do not fade."""
    recipe = _omega(MLP(base=True), GradientDescent(batch=16, normalize=True, limit="keys"))
    return recipe, LayerOptions(gates={"log_decay": FORGETFUL})


@preset(
    "Atlas",
    row=59,
    rule=_MUON_RULE,
    references=(ATLAS("eqs. 32–33, 40 and 57–58"),),
    fidelity=Fidelity(
        kind="approximation",
        source="ATLAS eqs. 32–33",
        note="tokens read the memory of the inner batch's start and Newton–Schulz runs once, at "
        f"its end; atlas_per_token is the definition. {_MUON}. {HALF}. {_FEATURES}; {_WINDOW}; "
        f"{_CHUNKS}; {COMMON}",
    ),
)
def atlas() -> tuple[Recipe, LayerOptions]:
    """The Omega rule, optimised by Muon once in every inner batch."""
    return _omega(MLP(), Muon(batch=16, every="batch", normalize=True)), _SLOW


@preset(
    "Atlas, token by token",
    row=59,
    rule=_MUON_RULE,
    references=(ATLAS("eqs. 32–33, 40 and 57–58"),),
    fidelity=Fidelity(
        kind="reconstruction",
        source="ATLAS eqs. 32–33 and 40",
        note=f"Newton–Schulz runs at every token, some 200 times the cost of plain descent. "
        f"{_MUON}. {HALF}. {_FEATURES}; {_WINDOW}; {_CHUNKS}; {COMMON}",
    ),
)
def atlas_per_token() -> tuple[Recipe, LayerOptions]:
    """The Omega rule, optimised by Muon at every token."""
    return _omega(MLP(), Muon(batch=16, normalize=True)), _SLOW


@preset(
    "Atlas++",
    row=60,
    rule=_MUON_RULE.replace("M_t =", "M(x) = x + W_1(σ(W_2 x) ⊗ W_3 x),  M_t ="),
    references=(ATLAS("eqs. 32–33 and 43"),),
    fidelity=Fidelity(
        kind="approximation",
        source="ATLAS eqs. 32–33 with the memory of eq. 43",
        note="tokens read the memory of the inner batch's start and Newton–Schulz runs once, at "
        f"its end. {_MUON}. {HALF}. {_FEATURES}; {_WINDOW}; {_CHUNKS}; {COMMON}",
    ),
)
def atlas_plus_plus() -> tuple[Recipe, LayerOptions]:
    """Atlas with a gated memory."""
    return _omega(GatedMLP(), Muon(batch=16, every="batch", normalize=True)), _SLOW
