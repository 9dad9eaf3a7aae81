"""Language models with MONETA's powers and without YAAD's parts: MIRAS figure 4 and table 4."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from recollect.choices.bias.losses import L2, Lp
from recollect.choices.memory.maps import Matrix
from recollect.choices.retention.base import Keep
from recollect.choices.retention.links import Lq
from recollect.experiments.framework import (
    Cell,
    Claim,
    Config,
    Lines,
    NotMeasured,
    Results,
    Verdict,
    below,
    plot_panels,
    special,
    verdict,
)
from recollect.experiments.papers.language_models import (
    BIGRAM,
    BITS,
    C4,
    TRAINED,
    bits_ranking,
    if_learned,
    language_models,
)
from recollect.layer.options import LayerOptions
from recollect.recipe.recipe import Recipe
from recollect.zoo.preset import get

if TYPE_CHECKING:
    from recollect.experiments.comparison.compare import ModelSpec

__all__ = ["COMPONENTS", "EXPERIMENTS", "yaad_variant"]

# -- figure 4 --------------------------------------------------------------------------------------

P, Q = 3.0, 4.0
"""Powers of MONETA."""


def _moneta(cell: Cell) -> ModelSpec:
    preset, p, q = get("moneta"), float(cell["p"]), float(cell["q"])
    retention = preset.recipe.retention
    assert isinstance(retention, Lq)
    recipe = replace(preset.recipe, bias=Lp(p=p), retention=replace(retention, q=q))
    return f"MONETA, p = {p:g}, q = {q:g}", recipe, preset.options


def _pq_cells(config: Config) -> list[Cell]:
    powers = [(p, Q) for p in config["p"]] + [(P, q) for q in config["q"] if q != Q]
    return [{"p": p, "q": q, "length": T} for p, q in powers for T in config["lengths"]]


def _best_and_worst_p(results: Results) -> Verdict:
    bits = {p: results.mean(BITS, p=p, q=Q) for p in results.axis_values("p", q=Q)}
    bits = {p: math.inf if math.isnan(x) else x for p, x in bits.items()}
    ranked = sorted(bits, key=lambda p: bits[p])
    return verdict(
        (ranked[0], ranked[-1]) == (P, 4.0),
        "Mean bits per byte: " + ", ".join(f"p = {p:g} {bits[p]:.3f}" for p in ranked) + ".",
    )


def _gain(results: Results, p: float, q: float) -> float:
    """Return the decrease in bits from the shortest to the longest sequences."""
    lengths = results.axis_values("length", p=p, q=q)
    short, long = (results.mean(BITS, p=p, q=q, length=f(lengths)) for f in (min, max))
    if not math.isfinite(short - long):
        raise NotMeasured(f"p = {p:g}, q = {q:g} diverged, and has no gain from length")
    return short - long


def _spread_over_q(results: Results) -> Verdict:
    over_p = [_gain(results, p, Q) for p in results.axis_values("p", q=Q)]
    over_q = [_gain(results, P, q) for q in results.axis_values("q", p=P)]
    spread_p, spread_q = statistics.stdev(over_p), statistics.stdev(over_q)
    return verdict(
        spread_q > spread_p,
        f"From the shortest to the longest sequences bits per byte fall by {min(over_q):.3f} to "
        f"{max(over_q):.3f} over q (standard deviation {spread_q:.3f}) and by {min(over_p):.3f} to "
        f"{max(over_p):.3f} over p ({spread_p:.3f}).",
    )


_POWERS = {
    "y": BITS,
    "by": "length",
    "name": "rows of {length}",
    "baselines": {BIGRAM: BIGRAM},
}

PQ = language_models(
    name="miras-pq",
    title="Powers of bias and retention",
    source="MIRAS figure 4",
    protocol=(
        "MONETA with the loss ℓ_p and the retention L_q, at equal parameters and tokens: p "
        "varies at q = 4 and q at p = 3, with one training for every length of the sequences. All "
        "powers use the step sizes of the preset, which are relative to the correction. The paper: "
        "2K to 16K tokens; it does not print the size of the models. Small scale: sequences of 64 "
        "and 256 bytes, two layers of width 64, 80 steps of 512 bytes. The paper's scale: 340M "
        "parameters, 15 · 10⁹ tokens of C4, as in its scaling figures."
    ),
    claims=(
        Claim(
            name="p = 3 best, 4 worst",
            text="The best performance is achieved at p = 3, and the worst at p = 4.",
            rule=if_learned(
                special(
                    "Of the mean bits per byte over lengths and seeds those at p = 3 are the "
                    "smallest and those at p = 4 the largest.",
                    _best_and_worst_p,
                )
            ),
            scales=TRAINED,
        ),
        Claim(
            name="q changes the scaling",
            text="The scaling with the length of the context is almost the same for all p, and q "
            "changes it.",
            rule=if_learned(
                special(
                    "The bits per byte gained from the shortest to the longest sequences have a "
                    "larger standard deviation over q than over p.",
                    _spread_over_q,
                )
            ),
            scales=TRAINED,
        ),
    ),
    smoke={"p": [1.0, 3.0], "q": [2.0, 4.0], "lengths": [16, 32]},
    small={"steps": 80, "lengths": [64, 256]}
    | {"p": [1.0, 1.5, 2.0, 2.8, 3.0, 3.2, 4.0], "q": [2.0, 3.0, 4.0, 5.0]},
    paper=C4
    | {"width": 1024, "parameters": 340_000_000, "tokens": 15 * 10**9, "lr": 1.5e-3}
    | {"lengths": [2048, 4096, 8192, 16_384]}
    | {"p": [1.0, 1.5, 2.0, 2.8, 3.0, 3.2, 4.0], "q": [2.0, 3.0, 4.0, 5.0]},
    model=_moneta,
    cells=_pq_cells,
    figure=plot_panels(
        Lines(x="p", cell={"q": Q}, panel_x="p", panel_title=f"q = {Q:g}", **_POWERS),
        Lines(x="q", cell={"p": P}, panel_x="q", panel_title=f"p = {P:g}", **_POWERS),
        title="MONETA's powers",
        height=3.6,
    ),
    notes=(
        "The spread over p is larger only because of p = 1: without it the standard deviations "
        "are 0.031 over p and 0.110 over q (one seed). At equal tokens a step has fewer of the "
        "longer sequences, and after so few steps every power predicts them worse."
    ),
)

# -- table 4 ---------------------------------------------------------------------------------------

FULL = "YAAD"

RecipeEdit = Callable[[Recipe, LayerOptions], tuple[Recipe, LayerOptions]]


def _without_gates(options: LayerOptions, *names: str) -> LayerOptions:
    gates = {name: gate for name, gate in dict(options.gate_options).items() if name not in names}
    return replace(options, gate_options=gates)


def _learned_threshold(recipe: Recipe, options: LayerOptions) -> tuple[Recipe, LayerOptions]:
    gates = dict(options.gate_options)
    gates["threshold"] = replace(gates["threshold"], source="learned")
    return recipe, replace(options, gate_options=gates)


def _linear_memory(recipe: Recipe, options: LayerOptions) -> tuple[Recipe, LayerOptions]:
    plain = replace(_without_gates(options, "norm_weight"), last_map_init_scale=1.0)
    return replace(recipe, memory=Matrix()), plain


COMPONENTS: Mapping[str, RecipeEdit] = {
    "without retention gate": lambda recipe, options: (
        replace(recipe, retention=Keep()),
        _without_gates(options, "log_decay"),
    ),
    "without input-dependent threshold": _learned_threshold,
    # The smoothing of value_less, with which values can be learned.
    "without ℓ₂": lambda recipe, options: (
        replace(recipe, bias=Lp(p=1, eps=1e-2)),
        _without_gates(options, "threshold"),
    ),
    "without ℓ₁": lambda recipe, options: (
        replace(recipe, bias=L2()),
        _without_gates(options, "threshold"),
    ),
    "without deep memory": _linear_memory,
}
"""Functions that remove one part of YAAD."""


def yaad_variant(name: str) -> ModelSpec:
    """Return YAAD, or YAAD without one of its `COMPONENTS`."""
    preset = get("yaad")
    if name == FULL:
        return FULL, preset.recipe, preset.options
    return name, *COMPONENTS[name](preset.recipe, preset.options)


ABLATION = language_models(
    name="miras-ablation",
    title="YAAD without its parts",
    source="MIRAS table 4",
    protocol=(
        "YAAD, and YAAD without one part, at equal parameters and tokens: without its retention "
        "gate (α = 1), with a learned threshold δ that does not depend on the token, with the ℓ₁ "
        "loss alone (smoothed as in value_less), with the ℓ₂ loss alone, with a matrix memory. "
        "Nothing else changes, except that options of a removed part are removed. The paper "
        "measures the mean score of its tasks, this experiment the held-out bits per byte; the "
        "paper does not print the size. Small scale: two layers of width 64, 100 steps of 512 "
        "bytes, sequences of 128. The paper's scale: 760M parameters on FineWeb-Edu, bits per byte "
        "of WikiText, and the tasks."
    ),
    claims=tuple(
        Claim(
            name=f"{name.removeprefix('without ')} helps",
            text="All design choices contribute to the performance.",
            rule=if_learned(below(BITS, lower=(FULL,), upper=(name,))),
            scales=TRAINED,
        )
        for name in COMPONENTS
    ),
    smoke={"models": [FULL, *COMPONENTS]},
    small={"models": [FULL, *COMPONENTS]},
    paper={"models": [FULL, *COMPONENTS]},
    model=lambda cell: yaad_variant(str(cell["model"])),
    figure=bits_ranking("YAAD without its parts", {"whole": [FULL]}),
    tables=("miras_table4",),
)

EXPERIMENTS = (PQ, ABLATION)
