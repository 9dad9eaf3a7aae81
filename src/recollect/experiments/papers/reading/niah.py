"""Needles in a haystack, learned in short texts and tested in long ones: MIRAS, ATLAS, tables 3."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from recollect.experiments.framework import (
    Batch,
    Cell,
    Claim,
    Config,
    Experiment,
    Lines,
    Results,
    Values,
    Verdict,
    heldout_generator,
    not_testable,
    plot_panels,
    special,
    verdict,
)
from recollect.experiments.papers.reading.curriculum import measures_by_length, train_and_test
from recollect.experiments.papers.reading.texts import needle_batch, needle_vocabulary
from recollect.tasks.needles import NeedleName

__all__ = ["EXPERIMENTS"]

TITLES: dict[NeedleName, str] = {
    "passkey": "S-NIAH-1 (passkey)",
    "number": "S-NIAH-2 (number)",
    "uuid": "S-NIAH-3 (UUID)",
}
LESSONS: dict[str, tuple[NeedleName, ...]] = {
    "numbers": ("passkey", "number"),
    "all": ("passkey", "number", "uuid"),
}
NEEDLES_IN_TEXT = ("number", "uuid")
DEEP = ("titans", "atlas")
SHALLOW = ("delta_net", "ttt_linear", "ttt_mlp")
MEMORIES = ("titans", "titans_mac", "atlas", "atlas_mag")
MODELS = ("softmax_attention", "gated_delta_net", *SHALLOW, *MEMORIES)
LEARNED = 0.5
"""Accuracy in texts of the training's length from which a task counts as learned."""


def _measure(config: Config, cell: Cell, seed: int, device: torch.device) -> Values:
    vocabulary = needle_vocabulary(config["frequent"])

    def draw(kind: str, length: int, batch: int, generator: torch.Generator) -> Batch:
        names = LESSONS[kind]
        count = batch // len(names)
        parts = (needle_batch(vocabulary, name, length, count, generator) for name in names)
        inputs, labels = zip(*parts, strict=True)
        return torch.cat(inputs), torch.cat(labels)

    def tests() -> Iterator[tuple[str, Batch]]:
        for length, count in config["tested"]:
            test = heldout_generator(seed)
            for name in TITLES:
                batch = needle_batch(vocabulary, name, length, count, test, heldout=True)
                yield f"{name} {length}", batch

    name = str(cell["model"])
    return train_and_test(config, name, len(vocabulary), draw, tests(), seed, device)


def _first_and_last(results: Results) -> tuple[int, int]:
    lengths = [length for length, _ in results.config["tested"]]
    return lengths[0], lengths[-1]


def _retained(results: Results, task: str) -> dict[str, float]:
    """Return the fraction of its accuracy that each model retains, if it learned the task."""
    first, last = _first_and_last(results)
    retained = {}
    for model in (*DEEP, *SHALLOW):
        learned = results.mean(f"{task} {first}", model=model)
        if learned >= LEARNED:
            retained[model] = results.mean(f"{task} {last}", model=model) / learned
    return retained


def _deep_memories_hold(results: Results) -> Verdict:
    parts: list[str] = []
    failures = compared = 0
    for task in NEEDLES_IN_TEXT:
        retained = _retained(results, task)
        if retained.keys() & set(DEEP) and retained.keys() & set(SHALLOW):
            compared += 1
            failures += sum((x >= 0.5) != (model in DEEP) for model, x in retained.items())
            parts.append(f"{task}: " + ", ".join(f"{m} {x:.2f}" for m, x in retained.items()))
        else:
            parts.append(f"{task}: learned by {', '.join(retained) or 'none'}")
    first, last = _first_and_last(results)
    evidence = (
        f"Fraction of the accuracy at {first:,} tokens that is retained at {last:,}: "
        f"{'; '.join(parts)}."
    )
    return verdict(not failures, evidence) if compared else not_testable(evidence)


def _hybrid_reaches_further(results: Results) -> Verdict:
    (first, _), *longer = results.config["tested"]
    hybrid, atlas = (
        sum(results.mean(f"{task} {n}", model=model) for task in TITLES for n, _ in longer)
        / (len(TITLES) * len(longer))
        for model in ("atlas_mag", "atlas")
    )
    evidence = (
        "Beyond the training's length, mean over tasks and lengths: Atlas (MAG) "
        f"{hybrid:.3f}, Atlas {atlas:.3f}."
    )
    best = max(
        results.mean(f"{task} {first}", model=model)
        for task in TITLES
        for model in ("atlas_mag", "atlas")
    )
    if best < LEARNED:
        return not_testable(f"Neither learned a task. {evidence}")
    return verdict(hybrid > atlas, evidence)


_LINES = {"by": "model", "log_x": True, "y_range": (0.0, 1.05)}

NIAH = Experiment(
    name="niah",
    title="Needles in a haystack, by length",
    source="MIRAS section 6.3, table 3; ATLAS section 6.2, table 3",
    protocol=(
        "RULER's single needles with other words: a number in a filler paragraph (1), a number in "
        "text (2), a UUID in text (3). The text is the documentation of Python and torch, with its "
        "held-out part for the test. Tokens are the most frequent words, other characters, and "
        "pairs of digits, so that a number has four tokens and a UUID twenty. The papers measure "
        "language models trained on text. Here small models learn the tasks, with a loss on the "
        "answer, in one curriculum for all models: the repetition of random tokens from a growing "
        "vocabulary, then needles with numbers, then all three in texts that grow to 512 tokens. "
        "Every model has the options of its preset, a short convolution around each memory and "
        "attention, and tied embeddings. AdamW, one learning rate. An answer is correct if each of "
        "its tokens has the largest logit after the tokens before it, as in greedy decoding; a "
        "model reads a text in one pass. One seed, at most 45 minutes of a core."
    ),
    claims=(
        Claim(
            name="deep memories hold",
            text="Deep memories hold with length where DeltaNet and TTT fall, in text.",
            rule=special(
                "A model has learned a task if it answers at least half of the texts of the "
                "training's length. S-NIAH-2 and 3 count if Titans or Atlas, and DeltaNet or TTT, "
                "have learned them. Titans and Atlas retain at least half of their accuracy in the "
                "longest texts of each task that they learned, and DeltaNet, TTT-Linear and "
                "TTT-MLP less than half.",
                _deep_memories_hold,
            ),
            scales=("small", "paper"),
        ),
        Claim(
            name="hybrid reaches further",
            text="Atlas's hybrids further improve the effective context length.",
            rule=special(
                "The mean accuracy of Atlas (MAG) over the three tasks and all lengths beyond the "
                "training's is above that of Atlas, if one of them answers a task in at least half "
                "of the texts of the training's length.",
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
    figure=plot_panels(
        *(
            Lines(
                y=measures_by_length(f"{name} {{}}"),
                y_label="right answers",
                panel_title=title,
                **_LINES,
            )
            for name, title in TITLES.items()
        ),
        Lines(
            y=measures_by_length("uuid {}, tokens"),
            y_label="right tokens",
            panel_title="S-NIAH-3, token by token",
            **_LINES,
        ),
        x_label="length of the text (tokens)",
        title=lambda config: f"Needles, learned in texts of {config['tested'][0][0]} tokens",
        height=2.8,
    ),
    notes=(
        "Bytes instead of words: after 600 steps neither softmax attention nor Gated DeltaNet "
        "gave one complete value. Single digits: Gated DeltaNet learned more slowly. No repetition "
        "first: Titans learned nothing in 500 steps. Repetition of all tokens from the first step: "
        "Titans and Gated DeltaNet did not learn it in 250 steps, but they did with a growing "
        "vocabulary. Repetition without a pause: Atlas cannot learn it, since it reads the memory "
        "as of the start of an inner batch of 16 tokens. Half as many steps on numbers and a width "
        "of 48: Gated DeltaNet answered less than half of the texts of 512 tokens."
    ),
    tables=("miras_table3", "atlas_table3"),
)

EXPERIMENTS = (NIAH,)
