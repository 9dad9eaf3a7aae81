"""Language models of equal size and tokens: ATLAS tables 2 and 8."""

from __future__ import annotations

from itertools import pairwise

import torch

from recollect.experiments.framework.experiment import Claim, Config, Experiment
from recollect.experiments.framework.records import Cell, Results, Values
from recollect.experiments.framework.rules import Verdict, special, verdict
from recollect.experiments.papers.language import (
    FINEWEB,
    LOCAL,
    SMOKE,
    language_model,
)
from recollect.experiments.papers.language_results import bits, ranked_models, told
from recollect.report.figures import RenderedFigure

__all__ = ["EXPERIMENTS"]

ATTENTION = "softmax_attention"
DEEP_ATTENTION = ("deep_transformer", "dot")
ATLAS = ("omega_net", "atlas", "atlas_plus_plus", "atlas_mag", "atlas_mal")
BASELINES = ("retnet", "delta_net", "ttt_linear", "gated_delta_net", "samba", "gated_delta_net_h2")
SMALL = (ATTENTION, *DEEP_ATTENTION, "swdt", "gated_delta_net", "dla", "titans", *ATLAS)
MODELS = (ATTENTION, *DEEP_ATTENTION, *BASELINES, "titans", "memora", "swdt", "dla", *ATLAS)


def _measure(config: Config, cell: Cell, seed: int, device: torch.device) -> Values:
    return language_model(config, str(cell["model"]), seed=seed, device=device)


def _titans(results: Results) -> Verdict:
    found = {name: bits(results, model=name) for name in ("atlas", "omega_net", "titans")}
    return verdict(
        max(found["atlas"], found["omega_net"]) < found["titans"],
        f"Bits per byte: {told(found)}.",
    )


def _attention(results: Results) -> Verdict:
    found = {name: bits(results, model=name) for name in (*DEEP_ATTENTION[::-1], ATTENTION)}
    return verdict(
        all(a < b for a, b in pairwise(found.values())), f"Bits per byte: {told(found)}."
    )


def _draw(results: Results) -> RenderedFigure:
    return ranked_models(
        results,
        axis="model",
        title="Language models at equal parameters and tokens",
        marked={"ATLAS": (*DEEP_ATTENTION, "swdt", "dla", *ATLAS)},
    )


TABLE2 = Experiment(
    name="atlas-table2",
    title="Language models of equal size",
    source="ATLAS tables 2 and 8",
    protocol=(
        "Transformer++ (softmax attention with rotary positions), DeepTransformers, Dot, SWDT, "
        "DLA, Titans, OmegaNet, Atlas, Atlas++, Atlas as gate (MAG) and as layer (MAL), each as "
        "its preset has it, at equal parameters and tokens. The paper: 340M to 1.3B parameters "
        "on 15 to 100 · 10⁹ tokens of FineWeb, perplexity of WikiText and LAMBADA, eight "
        "accuracies. Small scale: two layers of width 64 with eight heads of eight channels, "
        "240,000 parameters, 100 steps of 512 bytes of the documentation of Python and torch, "
        "rows of 128, held-out bits per byte; of the baselines that miras-table2 has, Gated "
        "DeltaNet alone. That shows that every row learns and how fast, and the order after so "
        "few bytes says nothing of that after 10¹⁰ tokens. The paper's scale is the 760M of "
        "table 2, with heads of 32 channels: over the polynomials of 96 the learned initial "
        "memories alone would be larger than the model."
    ),
    claims=(
        Claim(
            name="below Titans",
            text="Atlas and OmegaNet have lower perplexity than Titans.",
            rule=special(
                "The mean bits per byte of both are below Titans'.",
                _titans,
            ),
            scales=("paper",),
        ),
        Claim(
            name="Transformers",
            text="Dot has lower perplexity than DeepTransformers, and they than Transformer++.",
            rule=special(
                "The mean bits per byte stand in this order.",
                _attention,
            ),
            scales=("paper",),
        ),
    ),
    configs={
        "smoke": {**SMOKE, "models": [ATTENTION, "dot", "titans", "atlas", "atlas_mag"]},
        "small": {**LOCAL, "seeds": 3, "heads": 8, "models": list(SMALL)},
        "paper": {
            **FINEWEB,
            "models": list(MODELS),
            "channels": 32,
            "data": {
                "dataset": "HuggingFaceFW/fineweb",
                "name": "sample-100BT",
                "tokenizer": "fla-hub/gla-1.3B-100B",
            },
        },
    },
    cells=lambda config: [{"model": name} for name in config["models"]],
    measure=_measure,
    figure=_draw,
    tables=("atlas_table2", "atlas_table8"),
)

EXPERIMENTS = (TABLE2,)
