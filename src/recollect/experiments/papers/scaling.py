"""Perplexity against FLOPs and context length: MIRAS figure 3 and ATLAS figure 8."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import torch

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
from recollect.experiments.papers.language_results import bits, curves_by, learned
from recollect.report.figures import Panel, RenderedFigure, Series, panel_figure

__all__ = ["EXPERIMENTS"]

DEEP = ("yaad", "moneta", "memora", "titans", "omega_net", "atlas")
MATRIX = ("mamba2", "gated_delta_net")
MIRAS = ("yaad", "moneta", "memora")
BASELINES = ("softmax_attention", *MATRIX)


def _cells(config: Config) -> list[Cell]:
    """Every length at the first size, and every further size at its own length."""
    (width, parameters, lr), *others = config["sizes"]
    first = {"width": width, "parameters": parameters, "lr": lr}
    return [
        *(
            {"model": name, **first, "length": length}
            for name in config["models"]
            for length in config["lengths"]
        ),
        *(
            {"model": name, "width": w, "parameters": p, "lr": rate, "length": config["length"]}
            for name in config["models"]
            for w, p, rate in others
        ),
    ]


def _terms(cell: Cell) -> dict[str, float | int | str]:
    return {name: cell[name] for name in ("width", "parameters", "lr", "length")}


def _measure(config: Config, cell: Cell, seed: int, device: torch.device) -> Values:
    return language_model(config, str(cell["model"]), seed=seed, device=device, **_terms(cell))


def _measured(results: Results, *groups: tuple[str, ...]) -> list[list[str]]:
    """Of each group of models those that were measured."""
    models = results.axis_values("model")
    found = [[name for name in group if name in models] for group in groups]
    for group, names in zip(groups, found, strict=True):
        if not names:
            raise NotMeasured(f"none of {', '.join(group)} was measured")
    return found


def _length(results: Results) -> Verdict:
    deep, matrix = _measured(results, DEEP, MATRIX)
    learned(results, models=(*deep, *matrix))
    width = results.config["sizes"][0][0]
    lengths = sorted(results.axis_values("length", model=matrix[0], width=width))
    gains = {}
    for name in (*deep, *matrix):
        short, long = (
            bits(results, model=name, width=width, length=at) for at in (lengths[0], lengths[-1])
        )
        gains[name] = -math.inf if math.isinf(long) or math.isinf(short) else short - long
    order = sorted(gains, key=lambda name: gains[name], reverse=True)
    return verdict(
        min(gains[name] for name in deep) > max(gains[name] for name in matrix),
        f"Bits per byte gained from rows of {lengths[0]} to {lengths[-1]}: "
        + ", ".join(f"{name} {gains[name]:.3f}" for name in order)
        + ".",
    )


def _curve(results: Results, model: str) -> list[tuple[float, float]]:
    """(FLOPs of training, bits per byte) over the sizes, at the length that all have."""
    length = results.config["length"]
    return sorted(
        (
            results.mean("FLOPs", model=model, width=width, length=length),
            bits(results, model=model, width=width, length=length),
        )
        for width in results.axis_values("width", model=model, length=length)
    )


def _at(curve: list[tuple[float, float]], flops: float) -> float | None:
    """Bits at so many FLOPs, between the two nearest of a curve in log FLOPs."""
    for (low, a), (high, b) in pairwise(curve):
        if low <= flops <= high:
            share = math.log(flops / low) / math.log(high / low) if high > low else 0.0
            return a + share * (b - a)
    return None


def _flops(results: Results) -> Verdict:
    own_models, baselines = _measured(results, MIRAS, BASELINES)
    lines = {name: _curve(results, name) for name in baselines}
    worst, said = -math.inf, ""
    for name in own_models:
        for flops, own in _curve(results, name):
            rivals = {m: _at(line, flops) for m, line in lines.items()}
            known = {m: x for m, x in rivals.items() if x is not None}
            if not known:
                continue
            best = min(known, key=lambda m: known[m])
            if own - known[best] > worst:
                worst = own - known[best]
                said = f"{name} {own:.3f} against {known[best]:.3f} of {best} at {flops:.2g} FLOPs"
    if not said:
        raise NotMeasured("no model of MIRAS's has FLOPs between those of a baseline")
    return verdict(worst < 0, f"Nearest to failing: {said}.")


def _draw(results: Results) -> RenderedFigure:
    config = results.config
    width = config["sizes"][0][0]
    flops = [
        Series(name=name, x=[x for x, _ in line], y=[y for _, y in line])
        for name in results.axis_values("model")
        if (line := _curve(results, name))
    ]
    panels = [
        Panel(
            y=BITS,
            series=curves_by(results, line="model", along="length", width=width),
            x="tokens of a row",
            log_x=True,
            title=f"width {width}",
        ),
        Panel(
            y=BITS,
            series=[
                replace(line, y=[y if math.isfinite(y) else math.nan for y in line.y])
                for line in flops
            ],
            x="FLOPs of training",
            title=f"rows of {config['length']}",
        ),
    ]
    return panel_figure(panels, x="", title="Length of rows, and size", height=4.0)


SCALING = Experiment(
    name="scaling",
    title="Perplexity against FLOPs and context length",
    source="MIRAS figure 3, ATLAS figure 8",
    protocol=(
        "Each model is trained anew for every length of rows at one size, and for every size at "
        "one length; equal parameters within a size, and equal tokens everywhere. FLOPs are "
        "those of training by recollect.cost. The papers: 2K to 32K tokens of C4 at 340M and "
        "760M. Small scale: rows of 64, 128 and 256 bytes at width 64 and 240,000 parameters, "
        "widths 32 and 96 with rows of 128, two layers, 100 steps of 512 bytes of the "
        "documentation of Python and torch; YAAD, Titans and OmegaNet for the deep memories, "
        "Mamba-2 and Gated DeltaNet for the matrices, softmax attention beside them. At one "
        "budget of FLOPs models of 10⁵ parameters after so few bytes order otherwise than those "
        "of the papers, so that claim waits for their scale, where heads have 32 channels, as in "
        "atlas-table2."
    ),
    claims=(
        Claim(
            name="deep memories gain more from length",
            text="Deep memories scale better than matrix memories with the length of the context.",
            rule=special(
                "The mean bits per byte gained from the shortest to the longest rows are more for "
                "every deep memory than for every matrix memory.",
                _length,
            ),
            scales=("small", "paper"),
        ),
        Claim(
            name="lower at equal FLOPs",
            text="MIRAS's models outperform all baselines at almost the same budget of FLOPs.",
            rule=special(
                "Wherever the FLOPs of YAAD, MONETA or MEMORA lie between those of a baseline, "
                "its mean bits per byte are below that one's, between its two sizes in log FLOPs. "
                "Baselines are softmax attention, Mamba-2 and Gated DeltaNet.",
                _flops,
            ),
            scales=("paper",),
        ),
    ),
    configs={
        "smoke": {**SMOKE, "models": ["gated_delta_net", "titans"], "lengths": [16, 32]}
        | {"sizes": [[16, 24_000, 4e-3], [24, 32_000, 4e-3]]},
        "small": {**LOCAL, "seeds": 3, "lengths": [64, 128, 256]}
        | {"models": ["softmax_attention", *MATRIX, "yaad", "titans", "omega_net"]}
        | {"sizes": [[64, 240_000, 1e-2], [32, 80_000, 1e-2], [96, 480_000, 1e-2]]},
        "paper": {
            **FINEWEB,
            "depth": 24,
            "channels": 32,
            "tokens": 15 * 10**9,
            "models": ["softmax_attention", *MATRIX, *DEEP],
            "lengths": [2048, 4096, 8192, 16_384, 32_768],
            "sizes": [
                [1024, 340_000_000, 1.5e-3],
                [768, 190_000_000, 3e-3],
                [1536, 760_000_000, 1.25e-3],
            ],
            "data": {
                "dataset": "allenai/c4",
                "name": "en",
                "heldout_split": "validation",
                "tokenizer": "fla-hub/gla-1.3B-100B",
            },
            "tasks": [],
        },
    },
    cells=_cells,
    measure=_measure,
    figure=_draw,
)

EXPERIMENTS = (SCALING,)
