"""Needles in a haystack: short texts are learned, long ones asked (MIRAS and ATLAS, tables 3)."""

from __future__ import annotations

import torch
from torch import Tensor

from recollect.experiments.framework.experiment import Claim, Config, Experiment
from recollect.experiments.framework.records import Cell, Results, Values
from recollect.experiments.framework.rules import Verdict, not_testable, special, verdict
from recollect.experiments.papers.reading.course import answered, mixer_named, taught
from recollect.experiments.papers.reading.questions import needle_batch, needle_words
from recollect.report.figures import Panel, RenderedFigure, Series, panel_figure
from recollect.tasks.needles import NeedleName

__all__ = ["EXPERIMENTS"]

NAMES: dict[NeedleName, str] = {
    "passkey": "S-NIAH-1 (passkey)",
    "number": "S-NIAH-2 (number)",
    "uuid": "S-NIAH-3 (UUID)",
}
LESSONS: dict[str, tuple[NeedleName, ...]] = {
    "numbers": ("passkey", "number"),
    "all": ("passkey", "number", "uuid"),
}
IN_TEXT = ("number", "uuid")
DEEP = ("titans", "atlas")
SHALLOW = ("delta_net", "ttt_linear", "ttt_mlp")
LEARNED = 0.5
"""Of the texts as long as those of the training, the share that tells that a task was learned."""


def _tested(config: Config) -> dict[int, int]:
    return {int(length): count for length, count in config["tested"]}


def _measure(config: Config, cell: Cell, seed: int, device: torch.device) -> Values:
    words = needle_words(config["frequent"])
    mixer = mixer_named(str(cell["model"]), config)

    def draw(
        kind: str, length: int, batch: int, generator: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        names = LESSONS[kind]
        parts = [
            needle_batch(words, name, length, batch // len(names), generator) for name in names
        ]
        return torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts])

    reader, lost = taught(config, mixer, len(words), draw, seed, device)
    values = {"lost steps": float(lost)}
    for length, count in _tested(config).items():
        test = torch.Generator().manual_seed(1_000_003 + seed)
        for name in NAMES:
            texts = needle_batch(words, name, length, count, test, heldout=True)
            found = answered(reader, *texts)
            values[f"{name} {length}"] = found.right
            values[f"{name} {length}, tokens"] = found.tokens
    return values


def _ends(results: Results) -> tuple[int, int]:
    lengths = [int(length) for length, _ in results.config["tested"]]
    return lengths[0], lengths[-1]


def _kept(results: Results, task: str, model: str) -> float | None:
    """The share of the accuracy that is left at the longest; nothing where it was not learned."""
    first, last = _ends(results)
    learned = results.mean(f"{task} {first}", model=model)
    return results.mean(f"{task} {last}", model=model) / learned if learned >= LEARNED else None


def _holds_with_length(results: Results) -> Verdict:
    told: list[str] = []
    wrong = compared = 0
    for task in IN_TEXT:
        kept = {model: _kept(results, task, model) for model in (*DEEP, *SHALLOW)}
        shares = {model: share for model, share in kept.items() if share is not None}
        if not shares.keys() & set(DEEP) or not shares.keys() & set(SHALLOW):
            told.append(f"{task}: learned by {', '.join(shares) or 'none'}")
            continue
        compared += 1
        wrong += sum((share >= 0.5) != (model in DEEP) for model, share in shares.items())
        told.append(f"{task}: " + ", ".join(f"{m} {share:.2f}" for m, share in shares.items()))
    first, last = _ends(results)
    because = f"Of the accuracy at {first:,} tokens is left at {last:,}: {'; '.join(told)}."
    return verdict(not wrong, because) if compared else not_testable(because)


def _hybrid_reaches_further(results: Results) -> Verdict:
    lengths = [int(length) for length, _ in results.config["tested"]][1:]
    found: dict[str, float] = {}
    for model in ("atlas_mag", "atlas"):
        each = [results.mean(f"{t} {n}", model=model) for t in NAMES for n in lengths]
        found[model] = sum(each) / len(each)
    learned = max(results.mean(f"{t} {_ends(results)[0]}", model=m) for t in NAMES for m in found)
    because = (
        f"Beyond the training's length, mean over tasks and lengths: Atlas (MAG) "
        f"{found['atlas_mag']:.3f}, Atlas {found['atlas']:.3f}."
    )
    return verdict(found["atlas_mag"] > found["atlas"], because) if learned >= LEARNED else (
        not_testable(f"Neither learned a task. {because}")
    )  # fmt: skip


def _draw(results: Results) -> RenderedFigure:
    lengths = [int(length) for length, _ in results.config["tested"]]
    panels = []
    shown = [(title, "right answers", f"{name} {{}}") for name, title in NAMES.items()]
    shown.append(("S-NIAH-3, token by token", "right tokens", "uuid {}, tokens"))
    for title, y, measure in shown:
        series = []
        for model in results.axis_values("model"):
            each = [results.values(measure.format(length), model=model) for length in lengths]
            series.append(
                Series(
                    name=str(model),
                    x=lengths,
                    y=[sum(some) / len(some) for some in each],
                    low=[min(some) for some in each],
                    high=[max(some) for some in each],
                )
            )
        panels.append(Panel(y=y, series=series, title=title, log_x=True, y_range=(0.0, 1.05)))
    return panel_figure(
        panels,
        x="length of the text (tokens)",
        title=f"Needles, learned in texts of {lengths[0]} tokens",
        height=2.8,
    )


MODELS = (
    *("softmax_attention", "gated_delta_net", "delta_net", "ttt_linear", "ttt_mlp"),
    *("titans", "titans_mac", "atlas", "atlas_mag"),
)

NIAH = Experiment(
    name="niah",
    title="Needles in a haystack, by length",
    source="MIRAS section 6.3, table 3; ATLAS section 6.2, table 3",
    protocol=(
        "RULER's single needles in words of our own: a number in a filler paragraph (1), a number "
        "in text (2), a UUID in text (3). The text is the documentation of Python and torch, its "
        "held-out part for the test. Tokens are words, of which the most frequent are known, "
        "marks, and pairs of digits, so that a number is four tokens and a UUID twenty. The papers "
        "measure language models trained on text; here small models of each row learn the tasks "
        "themselves, with the loss on the answer, in a course that is the same for all: random "
        "tokens to be repeated, of ever more different ones, then needles with numbers, then all "
        "three in texts that grow to 512 tokens and never further. Every model has its preset's "
        "options and a short convolution around each memory and attention; its read-out is its "
        "embedding. AdamW, one rate. An answer counts where every token of it has the largest "
        "logit after the ones before it, so where greedy decoding writes it; a text is read in "
        "one pass. One seed, 45 minutes of a core at most."
    ),
    claims=(
        Claim(
            name="deep memories hold",
            text="Deep memories hold with length where DeltaNet and TTT fall, in text.",
            rule=special(
                "Of S-NIAH-2 and 3 those count that Titans or Atlas, and DeltaNet or TTT, answer "
                "in at least half of the texts of the training's length. On each, whichever of "
                "Titans and Atlas does so keeps at least half of its accuracy in the longest "
                "texts, and whichever of DeltaNet, TTT-Linear and TTT-MLP less than half.",
                _holds_with_length,
            ),
            scales=("small", "paper"),
        ),
        Claim(
            name="hybrid reaches further",
            text="Atlas's hybrids further improve the effective context length.",
            rule=special(
                "The mean accuracy of Atlas (MAG) over the three tasks and all lengths beyond the "
                "training's is above that of Atlas, where one of them answers a task in at least "
                "half of the texts of the training's length.",
                _hybrid_reaches_further,
            ),
            scales=("small", "paper"),
        ),
    ),
    configs={
        "smoke": {"seeds": 1, "frequent": 20, "width": 8, "heads": 1, "layers": 1, "lr": 1e-2}
        | {"lessons": [["copy 64", 24, 3, 1], ["all", 80, 3, 1]], "tested": [[80, 2], [160, 2]]}
        | {"models": ["gated_delta_net", "titans", "titans_mac"]},
        "small": {"seeds": 1, "frequent": 30, "width": 64, "heads": 4, "layers": 1, "lr": 1e-2}
        | {
            "lessons": [
                ["copy 64", 24, 24, 300],
                ["copy 96", 24, 24, 60],
                ["copy 128", 24, 24, 60],
                ["copy 192", 24, 24, 60],
                ["copy 280", 24, 24, 60],
                ["copy 400", 24, 24, 120],
                ["numbers", 48, 16, 150],
                ["numbers", 160, 6, 60],
                ["all", 80, 12, 150],
                ["all", 160, 6, 60],
                ["all", 320, 6, 40],
                ["all", 512, 6, 60],
            ]
        }
        | {"tested": [[512, 32], [1024, 32], [2048, 16], [8192, 8]], "models": list(MODELS)},
        "paper": {"seeds": 1, "frequent": 30_000, "width": 1024, "heads": 16, "layers": 24}
        | {"lr": 3e-4}
        | {
            "lessons": [
                ["copy 1000", 512, 64, 1000],
                ["copy 30000", 512, 64, 2000],
                ["all", 1024, 66, 2000],
                ["all", 4096, 33, 2000],
            ]
        }
        | {"tested": [[4096, 500], [8192, 500], [16384, 500]], "models": list(MODELS)},
    },
    cells=lambda config: [{"model": name} for name in config["models"]],
    measure=_measure,
    figure=_draw,
    notes=(
        "Bytes in place of words: after 600 steps neither softmax attention nor Gated DeltaNet "
        "named one whole value. Digits one by one: Gated DeltaNet learned more slowly. No "
        "repetition first: Titans did not begin in 500 steps. Repetition of all tokens from the "
        "first step on: Titans and Gated DeltaNet did not learn it in 250, and of ever more "
        "different ones they did. Repetition without a pause: Atlas, which reads its memory as it "
        "stood when an inner batch of 16 tokens began, cannot. Half as many steps on numbers and a "
        "width of 48: Gated DeltaNet answered less than half of the texts of 512 tokens."
    ),
    tables=("miras_table3", "atlas_table3"),
)

EXPERIMENTS = (NIAH,)
