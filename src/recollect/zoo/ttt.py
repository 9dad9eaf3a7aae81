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
from recollect.zoo.preset import Fidelity, preset
from recollect.zoo.sources import (
    FREE_LENGTHS,
    MIRAS,
    NEARLY_ALL,
    NORMALIZED_STEPS,
    TTT,
    limited_rate,
)

__all__ = ["ttt_linear", "ttt_mlp"]

_RULE = (
    "W_t = W° − τ_t Σ_(s≤t) η_s ρ_s ∇ℓ(W°; k_s, v_s),  ℓ = ½‖LN(f(k; W)) + k − v‖²,  "
    "τ_t = max(1/place(t) + o, 0)"
)
_BEYOND_THE_LIMIT = GateOptions(unit="stability_limit", init=3.0, high=4.0)
_DEVIATIONS = (
    "The memory is f with biases, a layer norm and the key added: it learns v − k, as in TTT "
    "section 2.7.",
    "The weights of the norm are learned and are no memory.",
    "W° is the memory at the start of the inner batch of 16 tokens.",
    "τ_t averages over the tokens of the batch, as in the published code.",
    "The learned correction o is one per head and position; the published code has one per "
    "position.",
    "τ_t keeps at least a fifth of the mean; the published code lets it reach 0.",
    "Keys have length √K, as in the published code at its start.",
    NORMALIZED_STEPS,
    FREE_LENGTHS,
)


CORRECTION = GateOptions(unit="batch_mean", activation="celu", low=-0.8)
"""What τ adds to the mean, of which it leaves at least a fifth.

Where τ is 0 no gradient comes back: a place of the inner batch that a few outer steps had brought
there stayed silent (`docs/design/steps.md`).
"""


def _ttt(
    memory: MLP, step: GateOptions, last_map_init_scale: float = 1.0
) -> tuple[Recipe, LayerOptions]:
    mean = GradientDescent(batch_size=16, reduction="mean", offset="learned", normalized_steps=True)
    gates = {"lr": step, "offset": CORRECTION}
    options = LayerOptions(
        qk_norm="rms", gate_options=gates, last_map_init_scale=last_map_init_scale
    )
    return Recipe(memory=memory, algorithm=mean), options


@preset(
    "TTT-Linear",
    row=44,
    rule=_RULE.replace("f(k; W)", "W k + b"),
    references=(TTT("sections 2.3–2.7"), MIRAS("table 1")),
    fidelity=Fidelity(
        kind="reconstruction",
        source="TTT section 2.7 and its published code",
        source_equation="M_t = M_(t−1) − η ∇L(M_(t−1), x_t)  (MIRAS table 1)",
        deviations=(
            *_DEVIATIONS,
            "Steps of the published code are plain and at most 1/K.",
            limited_rate(_BEYOND_THE_LIMIT),
        ),
    ),
)
def ttt_linear() -> tuple[Recipe, LayerOptions]:
    """A linear map with a bias, layer-normed, learns what to add to the key."""
    # Under a norm predictions are bounded, so that nothing diverges beyond the limit; and the norm
    # makes whatever its one map says as long as the key, so that it says nothing at first. Steps
    # that correct what the norm can reach are shorter than the limit counts on.
    return _ttt(MLP(depth=1, norm="layer", bias=True), _BEYOND_THE_LIMIT, last_map_init_scale=0.0)


@preset(
    "TTT-MLP",
    row=45,
    rule=_RULE.replace("f(k; W)", "W_1 gelu(W_2 k + b_2) + b_1"),
    references=(TTT("sections 2.3–2.7"), MIRAS("table 1")),
    fidelity=Fidelity(
        kind="reconstruction",
        source="TTT section 2.7 and its published code",
        source_equation="M_t = M_(t−1) − η ∇L(M_(t−1); k_t, v_t)  (MIRAS table 1)",
        deviations=(
            *_DEVIATIONS,
            "Steps of the published code are plain and at most 0.1/K.",
            limited_rate(NEARLY_ALL),
        ),
    ),
)
def ttt_mlp() -> tuple[Recipe, LayerOptions]:
    """A perceptron of two layers, four times as wide inside."""
    return _ttt(MLP(activation="gelu_tanh", norm="layer", bias=True), NEARLY_ALL)
