"""Perplexity against FLOPs and context length: MIRAS figure 3 and ATLAS figure 8."""

from __future__ import annotations

import math
from itertools import pairwise

from recollect.experiments.framework import (
    Cell,
    Claim,
    Config,
    Lines,
    NotMeasured,
    Results,
    Verdict,
    special,
    verdict,
)
from recollect.experiments.papers.language_models import (
    BITS,
    C4,
    TRAINED,
    if_learned,
    language_models,
)
from recollect.report.figures import Panel, RenderedFigure, Series, panel_figure

__all__ = ["EXPERIMENTS"]

DEEP_MEMORIES = ("yaad", "moneta", "memora", "titans", "omega_net", "atlas")
MATRIX_MEMORIES = ("mamba2", "gated_delta_net")
MIRAS = ("yaad", "moneta", "memora")
BASELINES = ("softmax_attention", *MATRIX_MEMORIES)


def _cells(config: Config) -> list[Cell]:
    """Return every length at the first size, and every other size at one length."""
    (width, parameters, lr), *others = config["sizes"]
    sizes = [(width, parameters, lr, length) for length in config["lengths"]]
    sizes_at_one_length = [(*size, config["length"]) for size in others]
    names = ("width", "parameters", "lr", "length")
    return [
        {"model": model, **dict(zip(names, size, strict=True))}
        for part in (sizes, sizes_at_one_length)
        for model in config["models"]
        for size in part
    ]


def _measured(results: Results, models: tuple[str, ...]) -> list[str]:
    measured = [name for name in models if results.has_cell(model=name)]
    if not measured:
        raise NotMeasured(f"none of {', '.join(models)} was measured")
    return measured


def _gains_from_length(results: Results) -> Verdict:
    deep, matrix = _measured(results, DEEP_MEMORIES), _measured(results, MATRIX_MEMORIES)
    width = results.config["sizes"][0][0]
    lengths = sorted(results.axis_values("length", model=matrix[0], width=width))
    gains = {}
    for name in (*deep, *matrix):
        short, long = (
            results.mean(BITS, model=name, width=width, length=length)
            for length in (lengths[0], lengths[-1])
        )
        gains[name] = -math.inf if math.isnan(short - long) else short - long
    ranked = sorted(gains, key=lambda name: gains[name], reverse=True)
    return verdict(
        min(gains[name] for name in deep) > max(gains[name] for name in matrix),
        f"Bits per byte gained from sequences of {lengths[0]} to {lengths[-1]}: "
        + ", ".join(f"{name} {gains[name]:.3f}" for name in ranked)
        + ".",
    )


def _bits_per_flops(results: Results, model: str) -> list[tuple[float, float]]:
    """Return FLOPs of the training and bits per byte of each size, at the common length."""
    cell = {"model": model, "length": results.config["length"]}
    widths = results.axis_values("width", **cell)
    return sorted(
        (results.mean("FLOPs", width=w, **cell), results.mean(BITS, width=w, **cell))
        for w in widths
    )


def _interpolate(curve: list[tuple[float, float]], flops: float) -> float:
    """Return the bits at a number of FLOPs, linear in log FLOPs; NaN outside of the curve."""
    for (x0, y0), (x1, y1) in pairwise(curve):
        if x0 <= flops <= x1:
            fraction = math.log(flops / x0) / math.log(x1 / x0) if x1 > x0 else 0.0
            return y0 + fraction * (y1 - y0)
    return math.nan


def _bits_at_equal_flops(results: Results) -> Verdict:
    models, baselines = _measured(results, MIRAS), _measured(results, BASELINES)
    curves = {name: _bits_per_flops(results, name) for name in baselines}
    comparisons = []
    for name in models:
        for flops, bits in _bits_per_flops(results, name):
            rivals = {m: _interpolate(curve, flops) for m, curve in curves.items()}
            rivals = {m: x for m, x in rivals.items() if not math.isnan(x)}
            if rivals:
                best = min(rivals, key=lambda m: rivals[m])
                difference = math.inf if math.isnan(bits) else bits - rivals[best]
                comparisons.append((difference, name, bits, rivals[best], best, flops))
    if not comparisons:
        raise NotMeasured("no model of MIRAS has FLOPs between those of a baseline")
    difference, name, bits, level, best, flops = max(comparisons)
    return verdict(
        difference < 0,
        f"Closest to failing: {name} {bits:.3f} against {level:.3f} of {best} at {flops:.2g} "
        "FLOPs.",
    )


def _figure(results: Results) -> RenderedFigure:
    width, length = results.config["sizes"][0][0], results.config["length"]
    (by_length,) = Lines(
        x="length",
        y=BITS,
        by="model",
        panel_x="tokens of a row",
        log_x=True,
        panel_title=f"width {width}",
        cell={"width": width},
    ).make_panels(results)
    curves = {name: _bits_per_flops(results, name) for name in results.axis_values("model")}
    by_flops = Panel(
        y=BITS,
        series=[
            Series(name=name, x=[x for x, _ in curve], y=[y for _, y in curve])
            for name, curve in curves.items()
        ],
        x="FLOPs of training",
        title=f"rows of {length}",
    )
    return panel_figure([by_length, by_flops], x="", title="Length of rows, and size", height=4.0)


SCALING = language_models(
    name="scaling",
    title="Perplexity against FLOPs and context length",
    source="MIRAS figure 3, ATLAS figure 8",
    protocol=(
        "One training of each model for every length of the sequences at one size, and for every "
        "size at one length; equal parameters within a size, and equal tokens everywhere. FLOPs "
        "are those of the training by recollect.cost. The papers: 2K to 32K tokens of C4 at 340M "
        "and 760M. Small scale: sequences of 64, 128 and 256 bytes at width 64 and 240,000 "
        "parameters, widths 32 and 96 with sequences of 128, two layers, 100 steps of 512 bytes of "
        "the documentation of Python and torch; YAAD, Titans and OmegaNet as deep memories, "
        "Mamba-2 and Gated DeltaNet as matrix memories, and softmax attention. At equal FLOPs "
        "models of 10⁵ parameters after so few bytes have another order than those of the papers, "
        "so that claim is tested only at the paper's scale, where heads have 32 channels, as in "
        "atlas-table2."
    ),
    claims=(
        Claim(
            name="deep memories gain more from length",
            text="Deep memories scale better than matrix memories with the length of the context.",
            rule=if_learned(
                special(
                    "The mean bits per byte gained from the shortest to the longest sequences are "
                    "more for every deep memory than for every matrix memory.",
                    _gains_from_length,
                ),
                models=(*DEEP_MEMORIES, *MATRIX_MEMORIES),
            ),
            scales=TRAINED,
        ),
        Claim(
            name="lower at equal FLOPs",
            text="MIRAS's models outperform all baselines at almost the same budget of FLOPs.",
            rule=special(
                "If the FLOPs of YAAD, MONETA or MEMORA are between those of a baseline, its mean "
                "bits per byte are below those of the baseline, which are interpolated between two "
                "sizes in log FLOPs. Baselines are softmax attention, Mamba-2 and Gated DeltaNet.",
                _bits_at_equal_flops,
            ),
            scales=("paper",),
        ),
    ),
    smoke={"models": ["gated_delta_net", "titans"], "lengths": [16, 32]}
    | {"sizes": [[16, 24_000, 4e-3], [24, 32_000, 4e-3]]},
    small={"models": [*BASELINES, "yaad", "titans", "omega_net"], "lengths": [64, 128, 256]}
    | {"sizes": [[64, 240_000, 1e-2], [32, 80_000, 1e-2], [96, 480_000, 1e-2]]},
    paper=C4
    | {"channels": 32, "tokens": 15 * 10**9, "models": [*BASELINES, *DEEP_MEMORIES]}
    | {"lengths": [2048, 4096, 8192, 16_384, 32_768]}
    | {
        "sizes": [
            [1024, 340_000_000, 1.5e-3],
            [768, 190_000_000, 3e-3],
            [1536, 760_000_000, 1.25e-3],
        ]
    },
    cells=_cells,
    figure=_figure,
)

EXPERIMENTS = (SCALING,)
