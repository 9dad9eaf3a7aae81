"""What MONETA's powers and YAAD's parts do for language models: MIRAS figure 4 and table 4."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from recollect.choices.bias.losses import L2, Lp
from recollect.choices.memory.maps import Matrix
from recollect.choices.retention.base import Keep
from recollect.choices.retention.links import Lq
from recollect.experiments.framework.experiment import Claim, Config, Experiment
from recollect.experiments.framework.records import Cell, NotMeasured, Results, Values
from recollect.experiments.framework.rules import Verdict, special, verdict
from recollect.experiments.papers.language import (
    BITS,
    FINEWEB,
    LOCAL,
    SMOKE,
    language_model,
)
from recollect.experiments.papers.language_results import (
    beside_bigram,
    bits,
    curves_by,
    learned,
    ranked_models,
    told,
)
from recollect.layer.options import LayerOptions
from recollect.recipe.recipe import Recipe
from recollect.report.figures import Panel, RenderedFigure, panel_figure
from recollect.zoo.preset import get

if TYPE_CHECKING:
    from recollect.experiments.comparison.compare import ModelSpec as Named

__all__ = ["EXPERIMENTS", "PARTS", "yaad_variant"]

# -- figure 4 --------------------------------------------------------------------------------------

P, Q = 3.0, 4.0
"""MONETA's own."""


def _moneta(cell: Cell) -> Named:
    preset, p, q = get("moneta"), float(cell["p"]), float(cell["q"])
    retention = preset.recipe.retention
    assert isinstance(retention, Lq)
    recipe = replace(preset.recipe, bias=Lp(p=p), retention=replace(retention, q=q))
    return f"MONETA, p = {p:g}, q = {q:g}", recipe, preset.options


def _pq_cells(config: Config) -> list[Cell]:
    powers = [(p, Q) for p in config["p"]] + [(P, q) for q in config["q"] if q != Q]
    return [{"p": p, "q": q, "length": T} for p, q in powers for T in config["lengths"]]


def _pq_measure(config: Config, cell: Cell, seed: int, device: torch.device) -> Values:
    return language_model(config, _moneta(cell), seed=seed, device=device, length=cell["length"])


def _over_lengths(results: Results, p: float) -> float:
    lengths = results.axis_values("length", p=p, q=Q)
    return sum(bits(results, p=p, q=Q, length=T) for T in lengths) / len(lengths)


def _pq_best(results: Results) -> Verdict:
    learned(results)
    found = {p: _over_lengths(results, p) for p in results.axis_values("p", q=Q)}
    return verdict(
        min(found, key=lambda p: found[p]) == P and max(found, key=lambda p: found[p]) == 4.0,
        f"Bits per byte, mean over lengths: {told({f'p = {p:g}': x for p, x in found.items()})}.",
    )


def _gain(results: Results, p: float, q: float) -> float:
    """Bits by which the longest rows are better than the shortest."""
    lengths = sorted(results.axis_values("length", p=p, q=q))
    short, long = (results.mean(BITS, p=p, q=q, length=at) for at in (lengths[0], lengths[-1]))
    if not math.isfinite(short - long):
        raise NotMeasured(f"p = {p:g}, q = {q:g} diverged, and has no gain from length")
    return short - long


def _pq_slope(results: Results) -> Verdict:
    learned(results)
    over_p = [_gain(results, p, Q) for p in results.axis_values("p", q=Q)]
    over_q = [_gain(results, P, q) for q in results.axis_values("q", p=P)]
    apart_p, apart_q = statistics.stdev(over_p), statistics.stdev(over_q)
    return verdict(
        apart_q > apart_p,
        f"From the shortest to the longest rows bits per byte fall by {min(over_q):.3f} to "
        f"{max(over_q):.3f} over q (standard deviation {apart_q:.3f}) and by {min(over_p):.3f} to "
        f"{max(over_p):.3f} over p ({apart_p:.3f}).",
    )


def _pq_draw(results: Results) -> RenderedFigure:
    panels = []
    for axis, other, value in (("p", "q", Q), ("q", "p", P)):
        lines = curves_by(results, line="length", along=axis, **{other: value})
        panels.append(
            Panel(
                y=BITS,
                series=[replace(line, name=f"rows of {line.name}") for line in lines],
                baselines=beside_bigram(results),
                x=axis,
                title=f"{other} = {value:g}",
            )
        )
    return panel_figure(panels, x="", title="MONETA's powers", height=3.6)


PQ = Experiment(
    name="miras-pq",
    title="Powers of bias and retention",
    source="MIRAS figure 4",
    protocol=(
        "MONETA with the loss ℓ_p and the retention L_q, at equal parameters and tokens: p "
        "varies at q = 4 and q at p = 3, each trained anew for every length of rows. The "
        "preset's steps, measured by what they correct, are those of every power. The paper: 2K "
        "to 16K tokens, the size of the models is not printed. Small scale: rows of 64 and 256 "
        "bytes, two layers of width 64, 80 steps of 512 bytes. The paper's scale: 340M "
        "parameters, 15 · 10⁹ tokens of C4, as its scaling figures have."
    ),
    claims=(
        Claim(
            name="p = 3 best, 4 worst",
            text="The best performance is achieved at p = 3, and the worst at p = 4.",
            rule=special(
                "Of the mean bits per byte over lengths and seeds those at p = 3 are the smallest "
                "and those at p = 4 the largest.",
                _pq_best,
            ),
            scales=("small", "paper"),
        ),
        Claim(
            name="q changes the scaling",
            text="The scaling with the length of the context is almost the same for all p, and q "
            "changes it.",
            rule=special(
                "The bits per byte gained from the shortest to the longest rows have a larger "
                "standard deviation over q than over p.",
                _pq_slope,
            ),
            scales=("small", "paper"),
        ),
    ),
    configs={
        "smoke": {**SMOKE, "p": [1.0, 3.0], "q": [2.0, 4.0], "lengths": [16, 32]},
        "small": {**LOCAL, "seeds": 3, "steps": 80, "lengths": [64, 256]}
        | {"p": [1.0, 1.5, 2.0, 2.8, 3.0, 3.2, 4.0], "q": [2.0, 3.0, 4.0, 5.0]},
        "paper": {
            **FINEWEB,
            "depth": 24,
            "width": 1024,
            "parameters": 340_000_000,
            "tokens": 15 * 10**9,
            "lr": 1.5e-3,
            "lengths": [2048, 4096, 8192, 16_384],
            "p": [1.0, 1.5, 2.0, 2.8, 3.0, 3.2, 4.0],
            "q": [2.0, 3.0, 4.0, 5.0],
            "data": {
                "dataset": "allenai/c4",
                "name": "en",
                "heldout_split": "validation",
                "tokenizer": "fla-hub/gla-1.3B-100B",
            },
            "tasks": [],
        },
    },
    cells=_pq_cells,
    measure=_pq_measure,
    figure=_pq_draw,
    notes=(
        "p = 1 alone makes the spread over p the larger one: without it the standard deviations "
        "are 0.031 over p and 0.110 over q (one seed). With equal tokens longer rows are fewer "
        "rows in a step, and after so few steps every power predicts worse with them."
    ),
)

# -- table 4 ---------------------------------------------------------------------------------------

WHOLE = "YAAD"


def _without_gates(options: LayerOptions, *names: str) -> LayerOptions:
    gates = {name: gate for name, gate in dict(options.gate_options).items() if name not in names}
    return replace(options, gate_options=gates)


def _no_retention(recipe: Recipe, options: LayerOptions) -> tuple[Recipe, LayerOptions]:
    return replace(recipe, retention=Keep()), _without_gates(options, "log_decay")


def _learned_threshold(recipe: Recipe, options: LayerOptions) -> tuple[Recipe, LayerOptions]:
    gates = dict(options.gate_options)
    gates["threshold"] = replace(gates["threshold"], source="learned")
    return recipe, replace(options, gate_options=gates)


def _far_alone(recipe: Recipe, options: LayerOptions) -> tuple[Recipe, LayerOptions]:
    # The smoothing of value_less, through which values can be learned.
    return replace(recipe, bias=Lp(p=1, eps=1e-2)), _without_gates(options, "threshold")


def _near_alone(recipe: Recipe, options: LayerOptions) -> tuple[Recipe, LayerOptions]:
    return replace(recipe, bias=L2()), _without_gates(options, "threshold")


def _linear(recipe: Recipe, options: LayerOptions) -> tuple[Recipe, LayerOptions]:
    plain = replace(_without_gates(options, "norm_weight"), last_map_init_scale=1.0)
    return replace(recipe, memory=Matrix()), plain


Change = Callable[[Recipe, LayerOptions], tuple[Recipe, LayerOptions]]

PARTS: Mapping[str, Change] = {
    "without retention gate": _no_retention,
    "without input-dependent threshold": _learned_threshold,
    "without ℓ₂": _far_alone,
    "without ℓ₁": _near_alone,
    "without deep memory": _linear,
}
"""What is taken from YAAD, and how."""


def yaad_variant(name: str) -> Named:
    """YAAD, or YAAD without one of its `PARTS`, as a model.

    Args:
        name: of `PARTS`, or ``"YAAD"``.
    """
    preset = get("yaad")
    if name == WHOLE:
        return WHOLE, preset.recipe, preset.options
    return name, *PARTS[name](preset.recipe, preset.options)


def _parts_measure(config: Config, cell: Cell, seed: int, device: torch.device) -> Values:
    return language_model(config, yaad_variant(str(cell["model"])), seed=seed, device=device)


def _helps(less: str) -> Callable[[Results], Verdict]:
    def judge(results: Results) -> Verdict:
        learned(results)
        found = {name: bits(results, model=name) for name in (WHOLE, less)}
        return verdict(found[WHOLE] < found[less], f"Bits per byte: {told(found)}.")

    return judge


def _parts_draw(results: Results) -> RenderedFigure:
    return ranked_models(
        results, axis="model", title="YAAD without its parts", marked={"whole": [WHOLE]}
    )


ABLATION = Experiment(
    name="miras-ablation",
    title="YAAD without its parts",
    source="MIRAS table 4",
    protocol=(
        "YAAD, and YAAD without one part, at equal parameters and tokens: without its retention "
        "gate (α = 1), with a threshold δ that is learned and no function of the token, with the "
        "ℓ₁ loss alone (smoothed as in value_less), with the ℓ₂ loss alone, with a matrix for a "
        "memory. Nothing else changes; an option of what was taken away goes with it. The "
        "paper's measure is the mean score of its tasks, ours the held-out bits per byte; its "
        "size is not printed. Small scale: two layers of width 64, 100 steps of 512 bytes, rows "
        "of 128. The paper's scale: 760M parameters on FineWeb-Edu, bits per byte of WikiText, "
        "and the tasks."
    ),
    claims=tuple(
        Claim(
            name=f"{less.removeprefix('without ')} helps",
            text="All design choices contribute to the performance.",
            rule=special(
                f"YAAD's mean bits per byte are below those of YAAD {less}.",
                _helps(less),
            ),
            scales=("small", "paper"),
        )
        for less in PARTS
    ),
    configs={
        "smoke": {**SMOKE, "models": [WHOLE, *PARTS]},
        "small": {**LOCAL, "seeds": 3, "models": [WHOLE, *PARTS]},
        "paper": {**FINEWEB, "models": [WHOLE, *PARTS]},
    },
    cells=lambda config: [{"model": name} for name in config["models"]],
    measure=_parts_measure,
    figure=_parts_draw,
    tables=("miras_table4",),
)

EXPERIMENTS = (PQ, ABLATION)
