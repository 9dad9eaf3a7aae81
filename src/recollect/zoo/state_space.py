"""State-space models: diagonal recurrences, whose decay and write share one step size.

Examples:
    >>> rc.zoo.names("state_space")
    ['lru', 'rg_lru', 'mamba', 'mamba2']
    >>> print(rc.zoo.get("lru").rule)
    w_t = λ ⊙ w_(t−1) + √(1 − |λ|²) ⊙ v_t,  λ = α e^{iθ} complex
"""

from __future__ import annotations

from dataclasses import replace

from recollect.choices.algorithm.descent import GradientDescent
from recollect.choices.bias.losses import DotProduct
from recollect.choices.memory.maps import Vector
from recollect.choices.retention.base import Decay
from recollect.layer.options import GateOptions, LayerOptions, Tie
from recollect.recipe.recipe import Recipe
from recollect.zoo.fidelity import exact
from recollect.zoo.preset import preset
from recollect.zoo.references import MIRAS, TTR, Paper

__all__ = ["lru", "mamba", "mamba2", "rg_lru"]

# 0.001 to 0.1, as published
_DELTA = GateOptions(activation="softplus", init=0.01, head_spread=10.0)
_VECTOR = LayerOptions(conv_activation="none", qk="ones", qk_norm="none", output_norm="none")


def _vector(decay: Decay, algorithm: GradientDescent) -> Recipe:
    return Recipe(memory=Vector(), bias=DotProduct(), retention=decay, algorithm=algorithm)


@preset(
    "LRU (linear recurrent unit)",
    rule="w_t = λ ⊙ w_(t−1) + √(1 − |λ|²) ⊙ v_t,  λ = α e^{iθ} complex",
    references=(
        Paper("Orvieto et al., Resurrecting recurrent neural networks for long sequences", 2023).at(
            "sections 3.2–3.4"
        ),
        TTR.at("section 3.1"),
    ),
    fidelity=exact(
        "the recurrence of LRU; λ and √(1 − |λ|²) as there",
        decay="The angles start as those of RoPE; the authors draw them uniformly.",
        layer="The feedthrough D is one number per channel of v.\n"
        "The layer has the common convolution and output gate.\n"
        "Channels i and i + D/2 are real and imaginary part; B and C are the linear maps around "
        "the memory.",
    ),
)
def lru() -> tuple[Recipe, LayerOptions]:
    """A complex vector that decays and turns at learned rates."""
    recipe = _vector(
        Decay(per="value", alpha="learned"), GradientDescent(lr="learned", per="value")
    )
    return recipe, replace(
        _VECTOR,
        complex_decay="learned",
        value_skip=True,
        gate_options={"lr": GateOptions(activation="softplus", init=1.0)},
        ties=(Tie(target="lr", source="decay", rule="variance"),),
    )


@preset(
    "RG-LRU (Griffin)",
    rule="w_t = α_t ⊙ w_(t−1) + √(1 − α_t²) ⊙ i_t ⊙ v_t,  log α_t = −8 a ⊙ r_t",
    references=(Paper("De et al., Griffin", 2024).at("eqs. 1–4"), TTR.at("section 3.1")),
    fidelity=exact(
        "Griffin eqs. 1–4, c = 8, a = softplus(Λ)",
        gates="r and i are low-rank maps of the layer's input; Griffin has block-diagonal maps "
        "of v.",
        layer="The gate of the block is SiLU; Griffin has GeLU.",
    ),
    twin_of="lru",
)
def rg_lru() -> tuple[Recipe, LayerOptions]:
    """A vector whose channels decide by the token how much they keep and how much they take."""
    recurrence = GateOptions(activation="sigmoid", low=-8.0, high=0.0, init=-4.0, head_spread=1.0)
    scale = GateOptions(activation="softplus", init=0.005, head_spread=10.0)
    recipe = _vector(Decay(per="value", alpha="input_scaled"), GradientDescent(per="value"))
    return recipe, replace(
        _VECTOR,
        gate_options={"log_decay": recurrence, "decay_scale": scale},
        ties=(Tie(target="lr", source="log_decay", rule="variance"),),
    )


@preset(
    "Mamba (S6)",
    rule="M_t = exp(−Δ_t ⊙ A) ⊙ M_(t−1) + (Δ_t ⊙ v_t) k_tᵀ",
    references=(
        Paper("Gu and Dao, Mamba", 2023).at("eqs. 2a and 4, algorithm 2"),
        TTR.at("section 3.1"),
        MIRAS.at("table 1"),
    ),
    fidelity=exact(
        "Mamba's selective scan: Δ per value channel, A per entry, state size 16",
        decay="MIRAS's table 1 prints a scalar decay; the preset has one per entry, as in the "
        "Mamba paper.",
        gates="Δ comes from the layer's input; k and q come from the convolution of their own "
        "projections.",
    ),
)
def mamba() -> tuple[Recipe, LayerOptions]:
    """Every entry of the memory forgets at its own rate, and one step size drives all."""
    return Recipe(
        bias=DotProduct(),
        retention=Decay(per="entry", alpha="input_scaled"),
        algorithm=GradientDescent(per="value"),
    ), LayerOptions(
        qk_norm="none",
        key_dim=16,
        value_skip=True,
        output_norm="none",
        gate_options={
            "lr": _DELTA,
            "decay_scale": GateOptions(activation="exp", init_schedule="integers"),
        },
        ties=(Tie(target="log_decay", source="lr", rule="negative"),),
    )


@preset(
    "Mamba-2 (SSD)",
    rule="M_t = exp(−Δ_t a) M_(t−1) + Δ_t v_t k_tᵀ",
    references=(
        Paper("Dao and Gu, Transformers are SSMs", 2024).at("section 7"),
        MIRAS.at("table 1"),
    ),
    fidelity=exact(
        "Mamba-2's recurrence, Δ_t = softplus(linear(x_t)), one learned a per head",
        layer="Every head has its own k and q; Mamba-2 shares them between heads.",
    ),
)
def mamba2() -> tuple[Recipe, LayerOptions]:
    """One step size per head drives decay and write."""
    return Recipe(bias=DotProduct(), retention=Decay()), LayerOptions(
        qk_norm="none",
        value_skip=True,
        gate_options={"lr": _DELTA},
        ties=(Tie(target="log_decay", source="lr", rule="rate"),),
    )
