"""OmegaNet's window and Atlas's parts in language models: ATLAS figure 5 and table 6."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from recollect.choices.context.windows import Window
from recollect.choices.features.finite import Identity
from recollect.choices.memory.maps import Matrix
from recollect.experiments.framework.experiment import Claim, Config, Experiment
from recollect.experiments.framework.records import Cell, Results, Values
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
from recollect.recipe.recipe import Recipe
from recollect.report.figures import Panel, RenderedFigure, panel_figure
from recollect.zoo.preset import get

if TYPE_CHECKING:
    from recollect.experiments.comparison.compare import ModelSpec as Named

__all__ = ["EXPERIMENTS", "VARIANTS", "atlas_variant"]

_FINEWEB = {
    **FINEWEB,
    "channels": 32,
    "data": {
        "dataset": "HuggingFaceFW/fineweb",
        "name": "sample-100BT",
        "tokenizer": "fla-hub/gla-1.3B-100B",
    },
}

# -- figure 5 --------------------------------------------------------------------------------------


def _omega(cell: Cell) -> Named:
    preset, size = get("omega_net"), int(cell["c"])
    recipe = replace(preset.recipe, context=Window(size=size))
    return f"OmegaNet, c = {size}", recipe, preset.options


def _window_measure(config: Config, cell: Cell, seed: int, device: torch.device) -> Values:
    return language_model(config, _omega(cell), seed=seed, device=device, length=cell["length"])


def _window_larger(results: Results) -> Verdict:
    learned(results)
    said, better = [], []
    for length in results.axis_values("length"):
        sizes = sorted(results.axis_values("c", length=length))
        least, most = (bits(results, c=c, length=length) for c in (sizes[0], sizes[-1]))
        better.append(most < least)
        said.append(f"{length}: {most:.3f} with c = {sizes[-1]}, {least:.3f} with c = {sizes[0]}")
    return verdict(all(better), f"Bits per byte with rows of {'; '.join(said)}.")


def _window_draw(results: Results) -> RenderedFigure:
    lines = curves_by(results, line="length", along="c")
    series = [replace(line, name=f"rows of {line.name}") for line in lines]
    return panel_figure(
        [Panel(y=BITS, series=series, baselines=beside_bigram(results), log_x=True)],
        x="window c",
        title="OmegaNet's window by the length of rows",
        height=4.0,
    )


WINDOW = Experiment(
    name="atlas-window",
    title="OmegaNet's window by context length",
    source="ATLAS figure 5",
    protocol=(
        "OmegaNet with windows of c associations, whose weights γ are gates of the token, at "
        "equal parameters and tokens, each trained anew for every length of rows. Parameters of "
        "the gate, c per head, are taken from the MLP. The figure's models, windows and measure "
        "are not printed. Small scale: rows of 64 and 256 bytes, c of 1, 4 and 16, two layers of "
        "width 64, 100 steps of 512 bytes. The paper's scale: 340M parameters, 15 · 10⁹ tokens "
        "of FineWeb, bits per byte of WikiText read in rows of the length."
    ),
    claims=(
        Claim(
            name="a larger window helps",
            text="With the increase of c we can achieve better performance.",
            rule=special(
                "At every length the mean bits per byte with the largest window are below those "
                "with c = 1.",
                _window_larger,
            ),
            scales=("small", "paper"),
        ),
    ),
    configs={
        "smoke": {**SMOKE, "windows": [1, 4], "lengths": [16, 32]},
        "small": {**LOCAL, "seeds": 3, "windows": [1, 4, 16]} | {"lengths": [64, 256]},
        "paper": {
            **_FINEWEB,
            "width": 1024,
            "parameters": 340_000_000,
            "tokens": 15 * 10**9,
            "lr": 1.5e-3,
            "tasks": ["wikitext"],
            "windows": [1, 2, 4, 8, 16, 32, 64],
            "lengths": [2048, 4096, 8192, 16_384],
        },
    },
    cells=lambda config: [
        {"c": c, "length": length} for length in config["lengths"] for c in config["windows"]
    ],
    measure=_window_measure,
    figure=_window_draw,
)

# -- table 6 ---------------------------------------------------------------------------------------

WHOLE = "Atlas"


def _with(**choices: object) -> Callable[[], Named]:
    def made() -> Named:
        preset = get("atlas")
        recipe: Recipe = replace(preset.recipe, **choices)  # type: ignore[arg-type]
        return "Atlas, changed", recipe, preset.options

    return made


VARIANTS: Mapping[str, Callable[[], Named]] = {
    WHOLE: lambda: "atlas",
    "+ gated memory": lambda: "atlas_plus_plus",
    "+ attention (MAG)": lambda: "atlas_mag",
    "+ attention (MAL)": lambda: "atlas_mal",
    "linear memory": _with(memory=Matrix()),
    "without Muon": lambda: _with(algorithm=get("omega_net").recipe.algorithm)(),
    "c = 1": _with(context=Window(size=1)),
    "without polynomials": _with(features=Identity()),
}
"""The rows of table 6. The row without Muon is OmegaNet, whose perplexity and accuracy in table 2
it has; here with the memory of `atlas`, which has no norm, so that one part is taken away."""

REMOVED = ("linear memory", "without Muon", "c = 1", "without polynomials")


def atlas_variant(name: str) -> Named:
    """A row of table 6 as a model.

    Args:
        name: of `VARIANTS`.
    """
    return VARIANTS[name]()


def _parts_measure(config: Config, cell: Cell, seed: int, device: torch.device) -> Values:
    return language_model(config, atlas_variant(str(cell["model"])), seed=seed, device=device)


def _most(costs: Mapping[str, float], unit: str) -> Verdict:
    """Whether polynomials and depth are the two dearest losses, and losses at all."""
    order = sorted(costs, key=lambda name: costs[name], reverse=True)
    told_costs = ", ".join(f"{name} {costs[name]:+.3f}" for name in order)
    return verdict(
        set(order[:2]) == {"linear memory", "without polynomials"} and costs[order[1]] > 0,
        f"{unit} lost: {told_costs}.",
    )


def _parts_bits(results: Results) -> Verdict:
    learned(results)
    whole = bits(results, model=WHOLE)
    return _most({name: bits(results, model=name) - whole for name in REMOVED}, "Bits per byte")


def _parts_accuracy(results: Results) -> Verdict:
    whole = results.mean("accuracy", model=WHOLE)
    lost = {name: whole - results.mean("accuracy", model=name) for name in REMOVED}
    return _most(lost, "Accuracy")


def _parts_each(results: Results) -> Verdict:
    learned(results)
    found = {name: bits(results, model=name) for name in (WHOLE, *REMOVED)}
    return verdict(
        found[WHOLE] < min(found[name] for name in REMOVED), f"Bits per byte: {told(found)}."
    )


def _parts_gated(results: Results) -> Verdict:
    learned(results)
    found = {name: bits(results, model=name) for name in (WHOLE, "+ gated memory")}
    return verdict(found["+ gated memory"] < found[WHOLE], f"Bits per byte: {told(found)}.")


def _parts_attention(results: Results) -> Verdict:
    mag, mal = "+ attention (MAG)", "+ attention (MAL)"
    learned(results)
    found = {name: bits(results, model=name) for name in (WHOLE, mag, mal)}
    return verdict(found[mag] < min(found[WHOLE], found[mal]), f"Bits per byte: {told(found)}.")


def _parts_draw(results: Results) -> RenderedFigure:
    return ranked_models(
        results, axis="model", title="Atlas without its parts", marked={"whole": [WHOLE]}
    )


ABLATION = Experiment(
    name="atlas-ablation",
    title="Atlas without its parts",
    source="ATLAS table 6",
    protocol=(
        "Atlas, and Atlas with one part changed, at equal parameters and tokens: a gated memory "
        "(Atlas++), as gate (MAG) and as layer (MAL) with attention, a matrix for a memory, "
        "without Muon (the table's row is OmegaNet's of table 2), a window of one association, "
        "without polynomial features. Nothing else changes. The table says that every part "
        "contributes, and its perplexity is better without Muon; it also loses more with c = 1 "
        "than with a linear memory, where the text counts polynomials and depth as most "
        "important: perplexity and accuracy are judged apart. Small scale: two layers of width "
        "64 with eight heads of eight channels, 100 steps of 512 bytes, rows of 128, held-out "
        "bits per byte. The paper's scale: 760M parameters, 30 · 10⁹ tokens of FineWeb, bits per "
        "byte of WikiText and the mean of eight accuracies, heads of 32 channels, as in "
        "atlas-table2."
    ),
    claims=(
        Claim(
            name="every part contributes",
            text="All components of Atlas are positively contributing to its performance.",
            rule=special(
                "Atlas's mean bits per byte are below those with a linear memory, without Muon, "
                "with c = 1 and without polynomials.",
                _parts_each,
            ),
            scales=("small", "paper"),
        ),
        Claim(
            name="polynomials and depth, perplexity",
            text="Polynomial mappings and deep memory are particularly important.",
            rule=special(
                "Of the four parts these two cost most bits per byte when they are taken away, "
                "and each costs some.",
                _parts_bits,
            ),
            scales=("small", "paper"),
        ),
        Claim(
            name="polynomials and depth, accuracy",
            text="Polynomial mappings and deep memory are particularly important.",
            rule=special(
                "Of the four parts these two cost most of the mean accuracy when they are taken "
                "away, and each costs some.",
                _parts_accuracy,
            ),
            scales=("paper",),
        ),
        Claim(
            name="a gated memory helps",
            text="More powerful memories such as a gated MLP further enhance Atlas.",
            rule=special(
                "The mean bits per byte with the gated memory are below Atlas's.",
                _parts_gated,
            ),
            scales=("small", "paper"),
        ),
        Claim(
            name="attention helps, MAG more",
            text="Hybrids improve the performance, MAG more than MAL.",
            rule=special(
                "The mean bits per byte of MAG are below Atlas's and below MAL's.",
                _parts_attention,
            ),
            scales=("small", "paper"),
        ),
    ),
    configs={
        "smoke": {**SMOKE, "models": [WHOLE, *REMOVED]},
        "small": {**LOCAL, "seeds": 3, "heads": 8, "models": list(VARIANTS)},
        "paper": {**_FINEWEB, "models": list(VARIANTS)},
    },
    cells=lambda config: [{"model": name} for name in config["models"]],
    measure=_parts_measure,
    figure=_parts_draw,
    tables=("atlas_table6",),
)

EXPERIMENTS = (WINDOW, ABLATION)
