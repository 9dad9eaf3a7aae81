"""Language models of equal size and tokens: MIRAS table 2."""

from __future__ import annotations

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

__all__ = ["EXPERIMENTS", "OURS", "RECURRENT"]

OURS = ("moneta", "yaad", "memora")
RECURRENT = ("retnet", "gla", "mamba2", "delta_net", "ttt_linear", "gated_delta_net")
HYBRIDS = ("samba", "gated_delta_net_h2")
OURS_H = tuple(f"{name}_h" for name in OURS)
MODELS = ("softmax_attention", *RECURRENT, *OURS, *HYBRIDS, *OURS_H)


def _measure(config: Config, cell: Cell, seed: int, device: torch.device) -> Values:
    return language_model(config, str(cell["model"]), seed=seed, device=device)


def _below(results: Results, ours: tuple[str, ...], others: tuple[str, ...]) -> Verdict:
    """Whether the worst of some is below the best of others."""
    found = {name: bits(results, model=name) for name in (*ours, *others)}
    return verdict(
        max(found[name] for name in ours) < min(found[name] for name in others),
        f"Bits per byte: {told(found)}.",
    )


def _recurrent(results: Results) -> Verdict:
    return _below(results, OURS, RECURRENT)


def _transformer(results: Results) -> Verdict:
    return _below(results, OURS, ("softmax_attention",))


def _hybrids(results: Results) -> Verdict:
    return _below(results, OURS_H, HYBRIDS)


def _draw(results: Results) -> RenderedFigure:
    return ranked_models(
        results,
        axis="model",
        title="Language models at equal parameters and tokens",
        marked={"MIRAS": OURS, "MIRAS, hybrid": OURS_H, "hybrid": HYBRIDS},
    )


TABLE2 = Experiment(
    name="miras-table2",
    title="Language models of equal size",
    source="MIRAS table 2",
    protocol=(
        "Transformer++ (softmax attention with rotary positions), six recurrent models, MIRAS's "
        "three, and hybrids of a memory and sliding-window attention, each as its preset has it, "
        "at equal parameters and tokens. The paper: 340M to 1.3B parameters on 15 to 100 · 10⁹ "
        "tokens of FineWeb-Edu, perplexity of WikiText and LAMBADA and eight accuracies. Small "
        "scale: two layers of width 64, 240,000 parameters, 100 steps of 512 bytes of the "
        "documentation of Python and torch, rows of 128, held-out bits per byte, without Gated "
        "DeltaNet-H2, whose pattern has three layers: that shows that every row learns and how "
        "fast, and the order after so few bytes says nothing of that after 10¹⁰ tokens. The "
        "table of three million parameters after 10⁶ bytes (results/language_models) has other "
        "terms. The paper's scale is the 760M of the table, with Mamba-2 where it has Mamba at "
        "340M."
    ),
    claims=(
        Claim(
            name="below all recurrent baselines",
            text="MONETA, YAAD and MEMORA have lower perplexity than every recurrent baseline.",
            rule=special(
                "The largest mean bits per byte of the three are below the smallest of RetNet, "
                "GLA, Mamba-2, DeltaNet, TTT and Gated DeltaNet.",
                _recurrent,
            ),
            scales=("paper",),
        ),
        Claim(
            name="below the Transformer",
            text="MONETA, YAAD and MEMORA have lower perplexity than Transformer++.",
            rule=special(
                "The largest mean bits per byte of the three are below Transformer++'s.",
                _transformer,
            ),
            scales=("paper",),
        ),
        Claim(
            name="hybrids",
            text="MIRAS's hybrids have lower perplexity than Samba and Gated DeltaNet-H2.",
            rule=special(
                "The largest mean bits per byte of the three hybrids are below those of both.",
                _hybrids,
            ),
            scales=("paper",),
        ),
    ),
    configs={
        "smoke": {**SMOKE, "models": ["softmax_attention", "gated_delta_net", "yaad", "samba"]},
        "small": {**LOCAL, "seeds": 3, "models": [n for n in MODELS if n != "gated_delta_net_h2"]},
        "paper": {**FINEWEB, "models": list(MODELS)},
    },
    cells=lambda config: [{"model": name} for name in config["models"]],
    measure=_measure,
    figure=_draw,
    tables=("miras_table2",),
)

EXPERIMENTS = (TABLE2,)
