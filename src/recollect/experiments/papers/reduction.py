"""A test-time-training layer without its parts, down to linear attention: arXiv 2602.21204."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import TYPE_CHECKING

from recollect.choices.algorithm.descent import GradientDescent, Momentum
from recollect.choices.algorithm.muon import Muon
from recollect.choices.bias.losses import DotProduct
from recollect.choices.member import Member
from recollect.choices.memory.maps import MLP, Matrix
from recollect.experiments.framework import Cell, Claim, all_of, differs
from recollect.experiments.papers.language_models import (
    BITS,
    TRAINED,
    bits_ranking,
    if_learned,
    language_models,
)
from recollect.layer.options import GateOptions, LayerOptions
from recollect.recipe.recipe import Recipe

if TYPE_CHECKING:
    from recollect.experiments.comparison.compare import ModelSpec

__all__ = ["EXPERIMENTS", "STEPS", "reduced_layer"]

FULL, LINEAR = "all parts", "linear attention"

STEPS: Mapping[str, Mapping[str, Member]] = {
    FULL: {
        "memory": MLP(norm="layer"),
        "bias": DotProduct(),
        "algorithm": Muon(batch_size=16, update_every="batch"),
    },
    "no inner norm": {"memory": MLP()},
    "no Muon": {"algorithm": Momentum(batch_size=16)},
    "no momentum": {"algorithm": GradientDescent(batch_size=16)},
    "no depth": {"memory": Matrix()},
    "no inner batch": {"algorithm": GradientDescent()},
    LINEAR: {"algorithm": GradientDescent(lr=1.0)},
}
"""Changed choices of each step. A step also has the changes of all steps before it."""

MARGIN = 0.1
"""Bits per byte below which a difference counts as little."""

_RATE = {"lr": GateOptions(activation="softplus", init=0.01)}


def reduced_layer(name: str) -> ModelSpec:
    """Return the layer after one of `STEPS`, with the changes of all steps before."""
    recipe = Recipe()
    for step, changes in STEPS.items():
        recipe = recipe.replace(**changes)
        if step == name:
            break
    return name, recipe, LayerOptions(gate_options={} if name == LINEAR else _RATE)


def _model(cell: Cell) -> ModelSpec:
    return reduced_layer(str(cell["model"]))


REDUCTION = language_models(
    name="ttt-reduction",
    title="Test-time training without its parts",
    source="Liu et al. 2026, arXiv 2602.21204",
    protocol=(
        "A layer whose memory is a perceptron of two maps under a layer norm, trained on −⟨M(k), "
        "v⟩ by orthogonalised momentum (Muon) once per inner batch of 16 tokens, with a learned "
        "rate per token. Its parts are removed one after another, each step with all earlier "
        "ones: the norm, Newton–Schulz, momentum, the depth (a matrix without a residual), the "
        "inner batch, and the rate of the token. The last step is the recipe of linear attention. "
        "The inner loss is linear in the output, so the inner batch of a matrix changes nothing. "
        "Nothing is tuned per step. The paper reduces published layers (LaCT, ViTTT) in language "
        "models, view synthesis and image classification, with norms of the weights. Small scale: "
        "one layer of width 64, 100 steps of 512 bytes, sequences of 128, held-out bits per byte. "
        "The margin of 0.1 bits is of this experiment, not of the paper."
    ),
    claims=(
        Claim(
            name="little is lost",
            text="Test-time training reduces to linear attention, and performance is preserved.",
            rule=if_learned(differs(BITS, {"model": FULL}, {"model": LINEAR}, by=-MARGIN)),
            scales=TRAINED,
        ),
        Claim(
            name="no step costs much",
            text="Every simplification on the way to linear attention preserves performance.",
            rule=if_learned(
                all_of(
                    *(
                        differs(BITS, {"model": step}, {"model": simpler}, by=-MARGIN)
                        for step, simpler in pairwise(STEPS)
                    )
                )
            ),
            scales=TRAINED,
        ),
        Claim(
            name="the inner batch of a matrix",
            text="With a linear memory and this loss, updates have a fully parallel form: when "
            "they are applied does not matter.",
            rule=all_of(
                *(
                    differs(BITS, {"model": a}, {"model": b}, by=-0.01)
                    for a, b in pairwise(("no depth", "no inner batch", "no depth"))
                )
            ),
        ),
    ),
    smoke={"models": [FULL, "no depth", "no inner batch", LINEAR]},
    small={"seeds": 2, "depth": 1, "parameters": 140_000, "models": list(STEPS)},
    paper={"models": list(STEPS)},
    model=_model,
    figure=bits_ranking("Test-time training without its parts", {"whole": [FULL]}),
    notes=(
        "The step without Muon diverged with one of two seeds. The inner loss has no minimum, so "
        "momentum of plain gradients is bounded by the length of the sequence alone."
    ),
)

EXPERIMENTS = (REDUCTION,)
