"""TTT: the hidden state is a small network, trained on each inner batch by averaged steps.

Examples:
    >>> rc.zoo.names("ttt")
    ['ttt_linear', 'ttt_mlp']
"""

from __future__ import annotations

from recollect.choices.algorithm.descent import GradientDescent
from recollect.choices.memory.maps import MLP
from recollect.layer.options import GateOptions, LayerOptions
from recollect.recipe.recipe import Recipe
from recollect.zoo.fidelity import Fidelity, reconstruction
from recollect.zoo.preset import limit_multiple, preset
from recollect.zoo.references import MIRAS, TTT

__all__ = ["ttt_linear", "ttt_mlp"]

_RULE = (
    "W_t = W° − τ_t Σ_(s≤t) η_s ρ_s ∇ℓ(W°; k_s, v_s),  ℓ = ½‖LN(f(k; W)) + k − v‖²,  "
    "τ_t = max(1/place(t) + o, 0)"
)


def _fidelity(source_equation: str, max_rate: str) -> Fidelity:
    return reconstruction(
        "TTT section 2.7 and its published code",
        source_equation=source_equation,
        memory="The memory is f with biases, a layer norm and the key added: it learns v − k, as "
        "in TTT section 2.7.\n"
        "The weights of the norm are learned and are not part of the memory.",
        inner_batches="W° is the memory at the start of the inner batch of 16 tokens.",
        step="τ_t averages over the tokens of the batch, as in the published code.\n"
        "The learned correction o is one per head and position; the published code has one per "
        "position.\n"
        "τ_t keeps at least a fifth of the mean; the published code lets it reach 0.",
        query_key_norm="Keys have length √K, as in the published code at its start.",
        normalized_step=True,
        no_qk_norm=True,
        rate=f"Steps of the published code are plain and at most {max_rate}.",
    )


def _averaged(memory: MLP, lr: GateOptions, last_map: float) -> tuple[Recipe, LayerOptions]:
    steps = GradientDescent(
        batch_size=16, reduction="mean", offset="learned", normalized_steps=True
    )
    # At τ = 0 the gradient of o is 0, too: o stays above −4/5 of the mean.
    offset = GateOptions(unit="batch_mean", activation="celu", low=-0.8)
    return Recipe(memory=memory, algorithm=steps), LayerOptions(
        qk_norm="rms", gate_options={"lr": lr, "offset": offset}, last_map_init_scale=last_map
    )


@preset(
    "TTT-Linear",
    rule=_RULE.replace("f(k; W)", "W k + b"),
    references=(TTT.at("sections 2.3–2.7"), MIRAS.at("table 1")),
    fidelity=_fidelity("M_t = M_(t−1) − η ∇L(M_(t−1), x_t)  (MIRAS table 1)", "1/K"),
)
def ttt_linear() -> tuple[Recipe, LayerOptions]:
    """A linear map with a bias, layer-normed, learns the difference of value and key."""
    # The norm bounds outputs, so that steps above the stability limit cannot diverge. The map
    # starts at zero, because the norm would make any initial output as long as a key.
    return _averaged(MLP(depth=1, norm="layer", bias=True), limit_multiple(3.0, high=4.0), 0.0)


@preset(
    "TTT-MLP",
    rule=_RULE.replace("f(k; W)", "W_1 gelu(W_2 k + b_2) + b_1"),
    references=(TTT.at("sections 2.3–2.7"), MIRAS.at("table 1")),
    fidelity=_fidelity("M_t = M_(t−1) − η ∇L(M_(t−1); k_t, v_t)  (MIRAS table 1)", "0.1/K"),
)
def ttt_mlp() -> tuple[Recipe, LayerOptions]:
    """A perceptron of two layers with a hidden width of four times V."""
    memory = MLP(activation="gelu_tanh", norm="layer", bias=True)
    return _averaged(memory, limit_multiple(0.9), 1.0)
