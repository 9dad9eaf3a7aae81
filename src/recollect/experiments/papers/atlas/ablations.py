"""OmegaNet's window and Atlas's parts in language models: ATLAS figure 5 and table 6."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from recollect.choices.context.windows import Window
from recollect.choices.features.finite import Identity
from recollect.choices.memory.maps import Matrix
from recollect.experiments.framework import (
    Cell,
    Claim,
    Lines,
    Results,
    Rule,
    Verdict,
    below,
    decreasing,
    for_each,
    special,
    verdict,
)
from recollect.experiments.papers.atlas.models import PAPER
from recollect.experiments.papers.language_models import (
    BIGRAM,
    BITS,
    TRAINED,
    bits_ranking,
    if_learned,
    language_models,
)
from recollect.zoo.preset import get

if TYPE_CHECKING:
    from recollect.experiments.comparison.compare import ModelSpec

__all__ = ["EXPERIMENTS", "VARIANTS", "atlas_variant"]

# -- figure 5 --------------------------------------------------------------------------------------


def _omega_net(cell: Cell) -> ModelSpec:
    preset, size = get("omega_net"), int(cell["c"])
    recipe = replace(preset.recipe, context=Window(size=size))
    return f"OmegaNet, c = {size}", recipe, preset.options


WINDOW = language_models(
    name="atlas-window",
    title="OmegaNet's window by context length",
    source="ATLAS figure 5",
    protocol=(
        "OmegaNet with windows of c associations, whose weights γ are gates of the token, at "
        "equal parameters and tokens, with one training for every length of the sequences. The "
        "parameters of the gate, c per head, reduce the MLP. The paper does not print the models, "
        "windows and measure of the figure. Small scale: sequences of 64 and 256 bytes, c of 1, 4 "
        "and 16, two layers of width 64, 100 steps of 512 bytes. The paper's scale: 340M "
        "parameters, 15 · 10⁹ tokens of FineWeb, bits per byte of WikiText in sequences of the "
        "length."
    ),
    claims=(
        Claim(
            name="a larger window helps",
            text="With the increase of c we can achieve better performance.",
            rule=if_learned(
                for_each("length", decreasing(BITS, along="c", ends=True, lower_is_better=True))
            ),
            scales=TRAINED,
        ),
    ),
    smoke={"windows": [1, 4], "lengths": [16, 32]},
    small={"windows": [1, 4, 16], "lengths": [64, 256]},
    paper=PAPER
    | {"width": 1024, "parameters": 340_000_000, "tokens": 15 * 10**9, "lr": 1.5e-3}
    | {"tasks": ["wikitext"], "windows": [1, 2, 4, 8, 16, 32, 64]}
    | {"lengths": [2048, 4096, 8192, 16_384]},
    model=_omega_net,
    cells=lambda config: [
        {"c": c, "length": length} for length in config["lengths"] for c in config["windows"]
    ],
    figure=Lines(
        x="c",
        y=BITS,
        by="length",
        name="rows of {length}",
        baselines={BIGRAM: BIGRAM},
        log_x=True,
        x_label="window c",
        title="OmegaNet's window by the length of rows",
        height=4.0,
    ),
)

# -- table 6 ---------------------------------------------------------------------------------------

FULL, MAG, MAL = "Atlas", "+ attention (MAG)", "+ attention (MAL)"

VARIANTS: Mapping[str, str | Mapping[str, object]] = {
    FULL: "atlas",
    "+ gated memory": "atlas_plus_plus",
    MAG: "atlas_mag",
    MAL: "atlas_mal",
    "linear memory": {"memory": Matrix()},
    "without Muon": {"algorithm": get("omega_net").recipe.algorithm},
    "c = 1": {"context": Window(size=1)},
    "without polynomials": {"features": Identity()},
}
"""Rows of table 6: a name of the zoo, or changed choices of Atlas.

The paper's row without Muon has the perplexity and accuracy of OmegaNet in table 2. Here it has the
memory of `atlas`, which has no norm, so that only one part changes.
"""

ABLATIONS = ("linear memory", "without Muon", "c = 1", "without polynomials")


def atlas_variant(name: str) -> ModelSpec:
    """Return a row of table 6, one of `VARIANTS`, as a model."""
    variant = VARIANTS[name]
    if isinstance(variant, str):
        return variant
    preset = get("atlas")
    return "Atlas, changed", replace(preset.recipe, **variant), preset.options  # type: ignore[arg-type]


def _largest_costs(results: Results, *, measure: str, sign: int) -> Verdict:
    def cost(name: str) -> float:
        full, changed = (results.mean(measure, model=model) for model in (FULL, name))
        return math.inf if math.isnan(changed) else sign * (changed - full)

    costs = {name: cost(name) for name in ABLATIONS}
    ranked = sorted(costs, key=lambda name: costs[name], reverse=True)
    is_first = set(ranked[:2]) == {"linear memory", "without polynomials"}
    numbers = ", ".join(f"{name} {costs[name]:+.3f}" for name in ranked)
    return verdict(is_first and costs[ranked[1]] > 0, f"Loss of {measure}: {numbers}.")


def _most_important(measure: str, *, sign: int) -> Rule:
    """Require that polynomials and the deep memory are the two most important parts.

    ``sign`` is 1 if a lower measure is better, and −1 otherwise.
    """
    return special(
        f"Of the four parts, polynomials and the deep memory cost most {measure} when they are "
        "removed, and each costs some.",
        partial(_largest_costs, measure=measure, sign=sign),
    )


ABLATION = language_models(
    name="atlas-ablation",
    title="Atlas without its parts",
    source="ATLAS table 6",
    protocol=(
        "Atlas, and Atlas with one part changed, at equal parameters and tokens: a gated memory "
        "(Atlas++), as gate (MAG) and as layer (MAL) with attention, a matrix memory, without Muon "
        "(the table's row is OmegaNet of table 2), a window of one association, without polynomial "
        "features. Nothing else changes. According to the table every part contributes, but its "
        "perplexity is better without Muon. It also loses more with c = 1 than with a linear "
        "memory, although the text calls polynomials and depth the most important parts. So there "
        "are separate verdicts on perplexity and accuracy. Small scale: two layers of width 64 "
        "with eight heads of eight channels, 100 steps of 512 bytes, sequences of 128, held-out "
        "bits per byte. The paper's scale: 760M parameters, 30 · 10⁹ tokens of FineWeb, bits per "
        "byte of WikiText and the mean of eight accuracies, heads of 32 channels, as in "
        "atlas-table2."
    ),
    claims=(
        Claim(
            name="every part contributes",
            text="All components of Atlas are positively contributing to its performance.",
            rule=if_learned(below(BITS, lower=(FULL,), upper=ABLATIONS)),
            scales=TRAINED,
        ),
        Claim(
            name="polynomials and depth, perplexity",
            text="Polynomial mappings and deep memory are particularly important.",
            rule=if_learned(_most_important(BITS, sign=1)),
            scales=TRAINED,
        ),
        Claim(
            name="polynomials and depth, accuracy",
            text="Polynomial mappings and deep memory are particularly important.",
            rule=_most_important("accuracy", sign=-1),
            scales=("paper",),
        ),
        Claim(
            name="a gated memory helps",
            text="More powerful memories such as a gated MLP further enhance Atlas.",
            rule=if_learned(below(BITS, lower=("+ gated memory",), upper=(FULL,))),
            scales=TRAINED,
        ),
        Claim(
            name="attention helps, MAG more",
            text="Hybrids improve the performance, MAG more than MAL.",
            rule=if_learned(below(BITS, lower=(MAG,), upper=(FULL, MAL))),
            scales=TRAINED,
        ),
    ),
    smoke={"models": [FULL, *ABLATIONS]},
    small={"heads": 8, "models": list(VARIANTS)},
    paper=PAPER | {"models": list(VARIANTS)},
    model=lambda cell: atlas_variant(str(cell["model"])),
    figure=bits_ranking("Atlas without its parts", {"whole": [FULL]}),
    tables=("atlas_table6",),
)

EXPERIMENTS = (WINDOW, ABLATION)
