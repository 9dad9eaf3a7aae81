"""Heads of linear and softmax attention at a fixed width: AM figure 2."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from recollect.choices.features.base import Features
from recollect.choices.features.finite import Identity
from recollect.choices.features.kernels import Exponential
from recollect.experiments.framework import Cell, Claim, Lines, decreasing, increasing
from recollect.experiments.papers.language_models import (
    BIGRAM,
    BITS,
    TRAINED,
    if_learned,
    language_models,
)
from recollect.zoo.preset import get

if TYPE_CHECKING:
    from recollect.experiments.comparison.compare import ModelSpec

__all__ = ["FIG2"]

KERNELS: dict[str, Features] = {"linear": Identity(), "exp": Exponential()}


def _model(cell: Cell) -> ModelSpec:
    """Return attention without a denominator and with the kernel of the cell."""
    preset, kernel = get("unnormalized_attention"), str(cell["kernel"])
    return f"{kernel} kernel", replace(preset.recipe, features=KERNELS[kernel]), preset.options


FIG2 = language_models(
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
            rule=if_learned(
                increasing(BITS, along="heads", ends=True, kernel="linear"), kernel="linear"
            ),
            scales=TRAINED,
        ),
        Claim(
            name="fewer heads hurt the exponential kernel",
            text="Softmax attention degrades with fewer heads.",
            rule=if_learned(
                decreasing(BITS, along="heads", ends=True, lower_is_better=True, kernel="exp"),
                kernel="exp",
            ),
            scales=TRAINED,
        ),
    ),
    smoke={"grid": [1, 2]},
    small={"steps": 400, "grid": [1, 2, 4, 8]},
    paper={"depth": 12, "width": 768, "parameters": 162_000_000, "vocab": 50_257, "length": 1024}
    | {"tokens": 27 * 10**8, "lr": 1e-3, "tasks": ["wikitext"], "grid": [1, 2, 3, 4, 6, 12]}
    | {
        "data": {
            "dataset": "HuggingFaceFW/fineweb",
            "name": "sample-10BT",
            "tokenizer": "openai-community/gpt2",
        }
    },
    model=_model,
    cells=lambda config: [
        {"kernel": kernel, "heads": heads} for kernel in KERNELS for heads in config["grid"]
    ],
    figure=Lines(
        x="heads",
        y=BITS,
        by="kernel",
        baselines={BIGRAM: BIGRAM},
        log_x=True,
        x_label="heads",
        title="Heads at width {width}",
        height=4.0,
    ),
    notes=(
        "After 100 steps of 512 bytes (one seed), no model is better than a byte bigram, so the "
        "claims cannot be tested. After 150 steps of 1,024 bytes at a learning rate of 0.004, the "
        "exponential kernel is not better than the bigram either."
    ),
)
