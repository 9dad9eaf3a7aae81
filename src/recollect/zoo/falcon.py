"""Falcon: normalised least mean squares that predict a value from the previous key.

Examples:
    >>> rc.zoo.names("falcon")
    ['falcon_1', 'falcon_2', 'falcon_3']
    >>> print(rc.explain("falcon_1").ties[0])
    k_t ← k_(t−1)
"""

from __future__ import annotations

from recollect.choices.algorithm.descent import GradientDescent
from recollect.choices.context.windows import Window
from recollect.choices.retention.base import Decay
from recollect.layer.options import GateOptions, LayerOptions, Tie
from recollect.recipe.recipe import Recipe
from recollect.zoo.fidelity import reconstruction
from recollect.zoo.preset import preset
from recollect.zoo.references import Paper

__all__ = ["falcon_1", "falcon_2", "falcon_3"]

RIDGE = 0.01
"""λ, the ridge of the weights."""

_REFERENCES = (Paper("Falcon", 2026).at("arXiv 2608.27763"),)
_LAMBDA = f"λ is {RIDGE:g}, and the ε of the authors is part of it."
_BETA = "β_t is a gate of the token in (0, 1)."
_TIES = (
    Tie(target="k", source="k", rule="previous"),
    Tie(target="lr", source="k", rule="normalize", constant=RIDGE),
    Tie(target="log_decay", source="lr", rule="shrink", constant=RIDGE),
)
_RATE = GateOptions(low=0.0, high=1.0)


@preset(
    "Falcon-1",
    rule="M_t = (1 − η_t λ) M_(t−1) − η_t (M_(t−1) x_t − v_t) x_tᵀ,  "
    "x_t = k_(t−1),  η_t = β_t/(‖x_t‖² + λ)",
    references=_REFERENCES,
    fidelity=reconstruction("Falcon's first rule", rate=_BETA, ridge=_LAMBDA, common_layer=True),
)
def falcon_1() -> tuple[Recipe, LayerOptions]:
    """The value of a token is stored at the key of the previous token."""
    return Recipe(retention=Decay()), LayerOptions(gate_options={"lr": _RATE}, ties=_TIES)


@preset(
    "Falcon-2",
    rule="as Falcon-1, with β_t and η_t per value channel",
    references=_REFERENCES,
    fidelity=reconstruction("Falcon's second rule", rate=_BETA, ridge=_LAMBDA, common_layer=True),
)
def falcon_2() -> tuple[Recipe, LayerOptions]:
    """Falcon-1 with a rate per value channel, each with a triangular system of its own."""
    recipe = Recipe(retention=Decay(per="value"), algorithm=GradientDescent(per="value"))
    return recipe, LayerOptions(gate_options={"lr": _RATE}, ties=_TIES)


@preset(
    "Falcon-3",
    rule="M_t = (1 − η_t λ) M_(t−1) − (η_t/B) Σ_(i>t−B) (M_(t−1) x_i − v_i) x_iᵀ",
    references=_REFERENCES,
    fidelity=reconstruction(
        "Falcon's third rule, B = 4",
        rate=f"The rate η_t is that of the newest association.\n{_BETA}",
        window="The first B − 1 tokens divide by B, too.",
        ridge=_LAMBDA,
        common_layer=True,
    ),
)
def falcon_3() -> tuple[Recipe, LayerOptions]:
    """Falcon-1 with the mean gradient of the last associations."""
    mean = GateOptions(source="constant", init=0.25)
    return Recipe(context=Window(size=4), retention=Decay()), LayerOptions(
        gate_options={"lr": _RATE, "window": mean}, ties=_TIES
    )
