"""Printed equations of deep presets, term by term: variants ``"published"`` of the presets.

Steps are plain gradient steps, one token at a time where the equation prints one token. Nothing is
normalised. The layer around the memory is that of the papers.

Examples:
    >>> print(*(name.partition(":")[0] for name in rc.zoo.variants()))
    ttt_linear ttt_mlp titans titans_minus moneta yaad memora dla omega_net atlas atlas_plus_plus
    deep_transformer swdt dot
    >>> rc.zoo.get("titans", variant="published").recipe.algorithm
    Momentum(batch_size=1, lr='input', momentum='input', momentum_on='gradient', outer_lr=1.0,
             per='head', normalized_steps=False, batch_overlap='worst_case', erasure=0.0)
"""

from __future__ import annotations

from recollect.choices.algorithm.descent import GradientDescent, Momentum
from recollect.choices.algorithm.muon import Muon
from recollect.choices.bias.losses import DotProduct, Huber, Lp
from recollect.choices.context.windows import Window
from recollect.choices.features.finite import Polynomial
from recollect.choices.features.kernels import Exponential
from recollect.choices.memory.maps import MLP, GatedMLP
from recollect.choices.retention.base import Decay
from recollect.choices.retention.links import Lq, Simplex
from recollect.layer.options import GateOptions, LayerOptions
from recollect.recipe.recipe import Recipe
from recollect.zoo.fidelity import exact
from recollect.zoo.preset import decay_from, published
from recollect.zoo.references import ATLAS, MIRAS, TITANS, TTT

__all__ = [
    "atlas_plus_plus_published",
    "atlas_published",
    "deep_transformer_published",
    "dla_published",
    "dot_published",
    "memora_published",
    "moneta_published",
    "omega_net_published",
    "swdt_published",
    "titans_minus_published",
    "titans_published",
    "ttt_linear_published",
    "ttt_mlp_published",
    "yaad_published",
]

_SQUARE = Lp(p=2)  # ‖M(k) − v‖², whose gradient has the factor 2
_FACTOR_2 = (
    "∇‖·‖² has the factor 2 of the printed norm, which the linear forms of ATLAS (eqs. 28 and 47) "
    "omit."
)
_POLYNOMIAL = "The polynomial has degree 2, with the coefficients of eq. 5."
_ASCENT = "The inner product is maximised; the paper prints a minus sign."


def _range_of(letter: str, high: str) -> str:
    return f"{letter} is a gate between 0 and {high}; the paper prints no range."


# -- TTT -------------------------------------------------------------------------------------------


def _ttt(memory: MLP, max_rate: float) -> tuple[Recipe, LayerOptions]:
    recipe = Recipe(memory=memory, bias=_SQUARE, algorithm=GradientDescent(batch_size=16))
    gates = {
        "lr": GateOptions(high=max_rate, init=max_rate / 2),
        "norm_weight": GateOptions(init=1.0),
    }
    return recipe, LayerOptions(gate_options=gates)


_TTT_RULE = (
    "W_t = W_(t′) − Σ_(s=t′+1)^t η_s ∇‖f(k_s; W_(t′)) − v_s‖²,  f(x; W) = x + LN({}),  "
    "t′ = 16 ⌊(t − 1)/16⌋"
)
_TTT_NORM = "The weights of the norm are learned and are not part of the memory."
_TTT_BATCH = (
    "t′ is the last token of the previous inner batch; the printed t′ = t − mod(t, 16) is t at the "
    "last token of a batch."
)


@published(
    "ttt_linear",
    rule=_TTT_RULE.format("W x"),
    references=(TTT.at("sections 2.3–2.7"),),
    fidelity=exact(
        "TTT sections 2.3–2.7", memory=_TTT_NORM, inner_batches=_TTT_BATCH, common_layer=True
    ),
)
def ttt_linear_published() -> tuple[Recipe, LayerOptions]:
    """Steps of a mini-batch are summed, with rates up to 1."""
    return _ttt(MLP(depth=1, norm="layer"), 1.0)


@published(
    "ttt_mlp",
    rule=_TTT_RULE.format("W_1 gelu(W_2 x)"),
    references=(TTT.at("sections 2.3–2.7"),),
    fidelity=exact(
        "TTT sections 2.3–2.7",
        memory=f"{_TTT_NORM}\nThe GELU is its tanh form, as in the published code.",
        inner_batches=_TTT_BATCH,
        common_layer=True,
    ),
)
def ttt_mlp_published() -> tuple[Recipe, LayerOptions]:
    """Steps of a mini-batch are summed, with rates up to 0.1."""
    return _ttt(MLP(activation="gelu_tanh", norm="layer"), 0.1)


# -- Titans ----------------------------------------------------------------------------------------


@published(
    "titans",
    rule="S_t = θ_t S_(t−1) − η_t ∇‖M_(t−1)(k_t) − v_t‖²,  M_t = α_t M_(t−1) + S_t",
    references=(TITANS.at("eqs. 12–14"), ATLAS.at("eqs. 12–13 and 42")),
    fidelity=exact(
        "ATLAS eqs. 12–13, with the memory of eq. 42",
        loss=_FACTOR_2,
        rate=_range_of("η_t", "1/32"),
        common_layer=True,
    ),
)
def titans_published() -> tuple[Recipe, LayerOptions]:
    """Plain gradient steps with momentum at every token, on a perceptron that decays."""
    recipe = Recipe(memory=MLP(), bias=_SQUARE, retention=Decay(), algorithm=Momentum())
    gates = {
        "lr": GateOptions(high=1 / 32, init=1 / 512),
        "momentum": GateOptions(high=0.9, init=0.7),
        "log_decay": decay_from(0.999),
    }
    return recipe, LayerOptions(gate_options=gates)


@published(
    "titans_minus",
    rule="M_t = α_t M_(t−1) − η_t ∇‖M_(t−1)(k_t) − v_t‖²",
    references=(ATLAS.at("table 1 and eq. 42"),),
    fidelity=exact(
        "ATLAS table 1, with the memory of eq. 42",
        loss=_FACTOR_2,
        rate=_range_of("η_t", "1/128"),
        common_layer=True,
    ),
)
def titans_minus_published() -> tuple[Recipe, LayerOptions]:
    """Plain gradient steps at every token, on a perceptron that decays."""
    recipe = Recipe(memory=MLP(), bias=_SQUARE, retention=Decay())
    gates = {"lr": GateOptions(high=1 / 128, init=1 / 256), "log_decay": decay_from(0.999)}
    return recipe, LayerOptions(gate_options=gates)


# -- MIRAS -----------------------------------------------------------------------------------------


@published(
    "moneta",
    rule="A_t = α_t A_(t−1) − η_t ∇‖M(W_(t−1); k_t) − v_t‖³_3,  W_t = A_t / ‖A_t‖_4²",
    references=(MIRAS.at("eqs. 24–25"),),
    fidelity=exact(
        "MIRAS eqs. 24–25, with the memory of section 5.3",
        initial_memory="The initial memory is not zero, where eq. 24 is undefined.",
        rate=_range_of("η_t", "1/256"),
        rate_per_head=True,
        common_layer=True,
    ),
)
def moneta_published() -> tuple[Recipe, LayerOptions]:
    """The ℓ_3 loss and the L_4 link, both at every token."""
    # ‖A‖_4 has a lower bound that float32 can square.
    retention = Lq(q=4, form="as_published", floor=1e-12, decay=Decay(per="value"))
    recipe = Recipe(memory=MLP(norm="layer"), bias=Lp(p=3, eps=0), retention=retention)
    gates = {
        "lr": GateOptions(high=1 / 256, init=1 / 512),
        "log_decay": decay_from(0.999),
        "norm_weight": GateOptions(init=1.0),
    }
    return recipe, LayerOptions(gate_options=gates)


@published(
    "yaad",
    rule="W_t = α_t W_(t−1) − η_t ∇½‖e_t‖² if ‖e_t‖ ≤ δ_t,  else α_t W_(t−1) − η_t δ_t ∇‖e_t‖_1,  "
    "e_t = M(W_(t−1); k_t) − v_t",
    references=(MIRAS.at("eqs. 16, 26 and 31"),),
    fidelity=exact(
        "MIRAS eq. 26 with ℓ_2 as in eq. 31 and the memory of section 5.3",
        gates="δ_t is one number per head that starts at 4 √V; the paper has one per channel.",
        rate=_range_of("η_t", "1/4"),
        rate_per_head=True,
        common_layer=True,
    ),
)
def yaad_published() -> tuple[Recipe, LayerOptions]:
    """Plain steps of the Huber loss at every token."""
    recipe = Recipe(memory=MLP(norm="layer"), bias=Huber(), retention=Decay(per="value"))
    gates = {
        "lr": GateOptions(high=1 / 4, init=1 / 128),
        "threshold": GateOptions(unit="value_rms", init=4.0),
        "log_decay": decay_from(0.999),
        "norm_weight": GateOptions(init=1.0),
    }
    return recipe, LayerOptions(gate_options=gates)


@published(
    "memora",
    rule="W_t = softmax(α_t log W_(t−1) − η_t ∇½‖M(W_(t−1); k_t) − v_t‖²)",
    references=(MIRAS.at("eqs. 20, 27 and 31"),),
    fidelity=exact(
        "MIRAS eq. 27 with ℓ_2 as in eq. 31 and the memory of section 5.3",
        link="The softmax runs over all weights of a map, whose sum is 1, as in eq. 20.",
        gates="α_t is one number per head, as the sum of eq. 20 requires.",
        rate=_range_of("η_t", "1/4"),
        rate_per_head=True,
        common_layer=True,
    ),
)
def memora_published() -> tuple[Recipe, LayerOptions]:
    """Weights are probabilities at every token, without a scale."""
    recipe = Recipe(memory=MLP(norm="layer"), retention=Simplex(axis="all", decay=Decay()))
    gates = {
        "lr": GateOptions(high=1 / 4, init=1 / 8),
        "log_decay": decay_from(0.999),
        "norm_weight": GateOptions(init=1.0),
    }
    return recipe, LayerOptions(gate_options=gates)


# -- ATLAS -----------------------------------------------------------------------------------------


@published(
    "dla",
    rule="M_t = α_t M_(t−1) + η_t ∇⟨M_(t−1)(φ(k_t)), v_t⟩",
    references=(ATLAS.at("eqs. 19 and 42"),),
    fidelity=exact(
        "ATLAS eq. 19, with the memory of eq. 42",
        sign=_ASCENT,
        features=_POLYNOMIAL,
        rate=_range_of("η_t", "1/64"),
        common_layer=True,
    ),
)
def dla_published() -> tuple[Recipe, LayerOptions]:
    """Plain steps of linear attention's objective at every token, on a perceptron."""
    recipe = Recipe(memory=MLP(), features=Polynomial(), bias=DotProduct(), retention=Decay())
    gates = {"lr": GateOptions(high=1 / 64, init=1 / 128), "log_decay": decay_from(0.999)}
    return recipe, LayerOptions(gate_options=gates)


@published(
    "omega_net",
    rule="M_t = α_t M_(t−1) − ∇Σ_(i=t−c+1)^t γ_i^(t) ‖M_(t−1)(φ(k_i)) − v_i‖²",
    references=(ATLAS.at("eqs. 10 and 42"),),
    fidelity=exact(
        "ATLAS eq. 10, with the memory of eq. 42",
        loss=_FACTOR_2,
        features=_POLYNOMIAL,
        window=8,
        rate=_range_of("γ_i^(t)", "1/256"),
        common_layer=True,
    ),
)
def omega_net_published() -> tuple[Recipe, LayerOptions]:
    """Plain steps of the Omega rule at every token; the weights γ are the only rates."""
    recipe = Recipe(
        memory=MLP(),
        features=Polynomial(),
        bias=_SQUARE,
        context=Window(size=8),
        retention=Decay(),
        algorithm=GradientDescent(lr=1.0),
    )
    gates = {"window": GateOptions(high=1 / 256, init=1 / 512), "log_decay": decay_from(0.999)}
    return recipe, LayerOptions(gate_options=gates)


def _muon(memory: MLP | GatedMLP) -> tuple[Recipe, LayerOptions]:
    recipe = Recipe(
        memory=memory,
        features=Polynomial(),
        bias=_SQUARE,
        context=Window(size=8),
        retention=Decay(),
        algorithm=Muon(),
    )
    gates = {"lr": GateOptions(high=0.1, init=0.05), "log_decay": decay_from(0.999)}
    return recipe, LayerOptions(gate_options=gates)


_MUON_RULE = (
    "S_t = θ_t S_(t−1) + ∇Σ_(i=t−c+1)^t γ_i^(t) ‖M_(t−1)(φ(k_i)) − v_i‖²,  "
    "M_t = α_t M_(t−1) − η_t NewtonSchulz5(S_t)"
)
_MUON_FEATURES = f"The features are the polynomials of eq. 58; eq. 33 prints φ*.\n{_POLYNOMIAL}"


@published(
    "atlas",
    rule=_MUON_RULE,
    references=(ATLAS.at("eqs. 32–33, 40 and 42"),),
    fidelity=exact(
        "ATLAS eqs. 32–33 and 40, with the memory of eq. 42",
        loss=_FACTOR_2,
        features=_MUON_FEATURES,
        window=8,
        rate=_range_of("η_t", "0.1"),
        common_layer=True,
    ),
)
def atlas_published() -> tuple[Recipe, LayerOptions]:
    """The Omega rule, optimised by Muon at every token, without a line search."""
    return _muon(MLP())


@published(
    "atlas_plus_plus",
    rule=f"M(x) = x + W_1(σ(W_2 x) ⊗ W_3 x),  {_MUON_RULE}",
    references=(ATLAS.at("eqs. 32–33, 40 and 43"),),
    fidelity=exact(
        "ATLAS eqs. 32–33 and 40, with the memory of eq. 43",
        loss=_FACTOR_2,
        features=_MUON_FEATURES,
        window=8,
        rate=_range_of("η_t", "0.1"),
        common_layer=True,
    ),
)
def atlas_plus_plus_published() -> tuple[Recipe, LayerOptions]:
    """Atlas as published with a gated memory."""
    return _muon(GatedMLP())


# -- memories over the exponential kernel ----------------------------------------------------------

_KERNEL_MEMORY = "W_2 starts from learned anchors, and is stored as one row per key."


@published(
    "deep_transformer",
    rule="M_t = M_(t−1) + ∇⟨M_(t−1)(φ*(k_t)), v_t⟩",
    references=(ATLAS.at("eqs. 23, 25 and 42"),),
    fidelity=exact(
        "ATLAS eq. 25, with the memory of eq. 42",
        sign=_ASCENT,
        memory=_KERNEL_MEMORY,
        layer="The layer is the common one, with queries and keys of length √K.",
    ),
)
def deep_transformer_published() -> tuple[Recipe, LayerOptions]:
    """Plain steps of rate 1 at every token: outputs grow exponentially with the tokens."""
    recipe = Recipe(
        memory=MLP(),
        features=Exponential(),
        bias=DotProduct(),
        algorithm=GradientDescent(lr=1.0),
    )
    return recipe, LayerOptions(qk_norm="rms")


@published(
    "swdt",
    rule="M_t = α_t M_(t−1) + η_t ∇Σ_(i=t−c+1)^t ⟨M_(t−1)(φ*(k_i)), v_i⟩",
    references=(ATLAS.at("table 1 and eq. 42"),),
    fidelity=exact(
        "ATLAS table 1, with the memory of eq. 42",
        sign=_ASCENT,
        memory=_KERNEL_MEMORY,
        window=8,
        rate=_range_of("η_t", "1/64"),
        layer="The layer is the common one, with queries and keys of length √K.",
    ),
)
def swdt_published() -> tuple[Recipe, LayerOptions]:
    """Plain steps from a window at every token, whose associations have equal weights."""
    recipe = Recipe(
        memory=MLP(),
        features=Exponential(),
        bias=DotProduct(),
        context=Window(size=8, gated=False),
        retention=Decay(),
    )
    gates = {"lr": GateOptions(high=1 / 64, init=1 / 128), "log_decay": decay_from(0.999)}
    return recipe, LayerOptions(qk_norm="rms", gate_options=gates)


@published(
    "dot",
    rule="M_t = M_(t−1) − ∇Σ_(i=t−c+1)^t γ_i^(t) ‖M_(t−1)(φ*(k_i)) − v_i‖²",
    references=(ATLAS.at("eqs. 27 and 42"),),
    fidelity=exact(
        "ATLAS eq. 27, with the memory of eq. 42",
        loss=_FACTOR_2,
        memory=_KERNEL_MEMORY,
        window=8,
        rate=_range_of("γ_i^(t)", "1/256"),
        layer="The layer is the common one, with queries and keys of length √K.",
    ),
)
def dot_published() -> tuple[Recipe, LayerOptions]:
    """Plain steps of the Omega rule at every token; the weights γ are the only rates."""
    recipe = Recipe(
        memory=MLP(),
        features=Exponential(),
        bias=_SQUARE,
        context=Window(size=8),
        algorithm=GradientDescent(lr=1.0),
    )
    gates = {"window": GateOptions(high=1 / 256, init=1 / 512)}
    return recipe, LayerOptions(qk_norm="rms", gate_options=gates)
