"""Heads of linear and softmax attention at a fixed width: AM figure 2."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from recollect.choices.features.base import Features
from recollect.choices.features.finite import Identity
from recollect.choices.features.kernels import Exponential
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
from recollect.experiments.papers.language_results import beside_bigram, bits, curves_by, learned
from recollect.report.figures import Panel, RenderedFigure, panel_figure
from recollect.zoo.preset import get

if TYPE_CHECKING:
    from recollect.experiments.comparison.compare import ModelSpec as Named

__all__ = ["FIG2"]

KERNELS: dict[str, Features] = {"linear": Identity(), "exp": Exponential()}


def _model(cell: Cell) -> Named:
    """Attention without a denominator, the kernel as told, and nothing else apart."""
    preset, kernel = get("unnormalized_attention"), str(cell["kernel"])
    return f"{kernel} kernel", replace(preset.recipe, features=KERNELS[kernel]), preset.options


def _measure(config: Config, cell: Cell, seed: int, device: torch.device) -> Values:
    return language_model(config, _model(cell), seed=seed, device=device, heads=cell["heads"])


def _ends(results: Results, kernel: str) -> tuple[float, float, str]:
    """Bits with the fewest heads and with the most, and both in words."""
    learned(results, kernel=kernel)
    heads = sorted(results.axis_values("heads", kernel=kernel))
    few, many = (bits(results, kernel=kernel, heads=at) for at in (heads[0], heads[-1]))
    told = f"Bits per byte: {few:.3f} with heads = {heads[0]}, {many:.3f} with {heads[-1]}."
    return few, many, told


def _linear(results: Results) -> Verdict:
    few, many, told = _ends(results, "linear")
    return verdict(few < many, told)


def _softmax(results: Results) -> Verdict:
    few, many, told = _ends(results, "exp")
    return verdict(few > many, told)


def _draw(results: Results) -> RenderedFigure:
    return panel_figure(
        [
            Panel(
                y=BITS,
                series=curves_by(results, line="kernel", along="heads"),
                baselines=beside_bigram(results),
                log_x=True,
            )
        ],
        x="heads",
        title=f"Heads at width {results.config['width']}",
        height=4.0,
    )


FIG2 = Experiment(
    name="am-fig2",
    title="Heads of linear and softmax attention",
    source="AM 3.1, figure 2",
    protocol=(
        "Language models of one width whose layers have 1, 2, 4, … heads; the linear and the "
        "exponential kernel, both without a denominator and with an RMS norm per head, rotary "
        "positions, queries and keys of length √K, so that the exponential cannot overflow. The "
        "paper: GPT-2 small (12 layers, width 768) in BlaGPT's setting, validation loss. Small "
        "scale: two layers of width 64 on bytes of the documentation of Python and torch, 400 "
        "steps of 512 bytes in rows of 128, held-out bits per byte. The paper's scale: FineWeb, "
        "GPT-2's tokenizer, bits per byte of WikiText; the paper prints neither the number of "
        "tokens, here 2.7 · 10⁹, nor the learning rate."
    ),
    claims=(
        Claim(
            name="fewer heads help the linear kernel",
            text="Linear attention benefits from fewer heads.",
            rule=special(
                "The linear kernel's mean bits per byte with one head are below those with the "
                "most heads.",
                _linear,
            ),
            scales=("small", "paper"),
        ),
        Claim(
            name="fewer heads hurt the exponential kernel",
            text="Softmax attention degrades with fewer heads.",
            rule=special(
                "The exponential kernel's mean bits per byte with one head are above those with "
                "the most heads.",
                _softmax,
            ),
            scales=("small", "paper"),
        ),
    ),
    configs={
        "smoke": {**SMOKE, "grid": [1, 2]},
        "small": {**LOCAL, "seeds": 3, "steps": 400, "grid": [1, 2, 4, 8]},
        "paper": {
            **FINEWEB,
            "depth": 12,
            "width": 768,
            "parameters": 162_000_000,
            "vocab": 50_257,
            "length": 1024,
            "step_tokens": 2**19,
            "tokens": 27 * 10**8,
            "lr": 1e-3,
            "data": {
                "dataset": "HuggingFaceFW/fineweb",
                "name": "sample-10BT",
                "tokenizer": "openai-community/gpt2",
            },
            "tasks": ["wikitext"],
            "grid": [1, 2, 3, 4, 6, 12],
        },
    },
    cells=lambda config: [
        {"kernel": kernel, "heads": heads} for kernel in KERNELS for heads in config["grid"]
    ],
    measure=_measure,
    figure=_draw,
    notes=(
        "100 steps of 512 bytes (one seed), after which no model knows more than a byte bigram, so "
        "there was nothing to judge; 150 steps of 1,024 at a learning rate of 0.004, where the "
        "exponential kernel knew no more either."
    ),
)
