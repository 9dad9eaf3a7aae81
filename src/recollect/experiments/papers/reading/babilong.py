"""Facts in long background text: ATLAS figure 4, on the first of the bAbI tasks."""

from __future__ import annotations

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
    special,
    verdict,
)
from recollect.experiments.papers.reading.curriculum import measures_by_length, train_and_test
from recollect.experiments.papers.reading.texts import story_batch, story_vocabulary
from recollect.tasks.stories import PLACES, StoryConfig

__all__ = ["EXPERIMENTS"]

CHANCE = 1 / len(PLACES)
LEARNED = 0.5
TOLERANCE = 0.1
"""Decrease of the accuracy that still counts as flat."""

MEMORY_AS_CONTEXT = ("titans_mac", "atlas_mac")
MODELS = ("titans", "gated_delta_net", "softmax_attention", *MEMORY_AS_CONTEXT)


def _measure(config: Config, cell: Cell, seed: int, device: torch.device) -> Values:
    vocabulary = story_vocabulary(1, config["frequent"])
    story = StoryConfig(task=1, facts=config["facts"], people=config["people"])

    def draw(kind: str, length: int, batch: int, generator: torch.Generator) -> Batch:
        return story_batch(vocabulary, story, length, batch, generator)

    tests = (
        (
            f"{length} tokens",
            story_batch(vocabulary, story, length, count, heldout_generator(seed), heldout=True),
        )
        for length, count in config["tested"]
    )
    name = str(cell["model"])
    values = train_and_test(config, name, len(vocabulary), draw, tests, seed, device)
    return {"chance": CHANCE} | {k: x for k, x in values.items() if not k.endswith(", tokens")}


def _accuracies(results: Results) -> tuple[dict[str, list[float]], str]:
    """Return the accuracy of memories as context at each length, and a sentence."""
    lengths = [length for length, _ in results.config["tested"]]
    accuracies = {
        model: [results.mean(f"{length} tokens", model=model) for length in lengths]
        for model in MEMORY_AS_CONTEXT
        if results.has_cell(model=model)
    }
    numbers = (f"{m} {', '.join(f'{x:.3f}' for x in row)}" for m, row in accuracies.items())
    evidence = f"At {', '.join(f'{n:,}' for n in lengths)} tokens: {'; '.join(numbers)}."
    return accuracies, evidence


def _is_flat(results: Results) -> Verdict:
    accuracies, evidence = _accuracies(results)
    drops = [row[0] - min(row[1:]) for row in accuracies.values() if row[0] >= LEARNED]
    if not drops:
        return not_testable(f"None learned the task at the shortest. {evidence}")
    return verdict(max(drops) <= TOLERANCE, evidence)


def _atlas_in_the_longest(results: Results) -> Verdict:
    accuracies, evidence = _accuracies(results)
    titans, atlas = (accuracies.get(model, [0.0]) for model in MEMORY_AS_CONTEXT)
    if min(titans[0], atlas[0]) < LEARNED:
        return not_testable(f"Not both learned the task. {evidence}")
    return verdict(atlas[0] - atlas[-1] <= TOLERANCE < titans[0] - titans[-1], evidence)


BABILONG = Experiment(
    name="babilong",
    title="Facts in long background text",
    source="ATLAS section 6.3, figure 4; Kuratov et al. 2024",
    protocol=(
        "The first bAbI task, the place of a person, from a simulator: facts at random positions "
        "of background text, in order, and a question at its end; six places can be the answer. "
        "Text is the documentation of Python and torch, tokens are words. Memories as context "
        "(MAC) have no persistent tokens, as in the paper, and segments shorter than the texts of "
        "the training. The papers fine-tune a language model and test up to ten million tokens. "
        "Here small models learn the task from random weights, in one curriculum for all models "
        "from short texts to the first length of the figure, with tests up to 16 times that "
        "length. Every model has the options of its preset and a short convolution around each "
        "memory and attention. AdamW, one learning rate. An answer is correct if each of its "
        "tokens has the largest logit after the tokens before it, as in greedy decoding."
    ),
    claims=(
        Claim(
            name="flat with length",
            text="Accuracy of a memory as context is flat with the length of the text.",
            rule=special(
                "The mean accuracy over seeds of each MAC that answers at least half of the texts "
                f"of the training's length is at no length more than {TOLERANCE} below it.",
                _is_flat,
            ),
            scales=("small", "paper"),
        ),
        Claim(
            name="Atlas in the longest",
            text="Titans drops in the longest texts, where Atlas maintains its performance.",
            rule=special(
                "If both MACs answer at least half of the texts of the training's length, the mean "
                f"accuracy of Titans' MAC in the longest texts is more than {TOLERANCE} lower, and "
                "the accuracy of Atlas's MAC is not.",
                _atlas_in_the_longest,
            ),
            scales=("small", "paper"),
        ),
    ),
    configs={
        "smoke": {"seeds": 1, "frequent": 20, "facts": 2, "people": 2, "width": 8, "heads": 1}
        | {"layers": 1, "segment": 32, "lr": 1e-2}
        | {"lessons": [["task", 64, 2, 2]], "tested": [[64, 2], [128, 2]]}
        | {"models": ["gated_delta_net", "titans_mac"]},
        "small": {"seeds": 1, "frequent": 100, "facts": 4, "people": 4, "width": 48, "heads": 3}
        | {"layers": 2, "segment": 64, "lr": 4e-3}
        | {
            "lessons": [
                ["task", 40, 24, 500],
                ["task", 128, 6, 80],
                ["task", 256, 6, 60],
            ]
        }
        | {"tested": [[256, 64], [512, 64], [1024, 32], [4096, 16]]}
        | {"models": list(MODELS)},
        "paper": {"seeds": 1, "frequent": 30_000, "facts": 8, "people": 4, "width": 1024}
        | {"heads": 16, "layers": 24, "segment": 1024, "lr": 3e-4}
        | {
            "lessons": [
                ["task", 1024, 64, 4000],
                ["task", 4096, 32, 2000],
            ]
        }
        | {"tested": [[4096, 500], [16384, 500], [131_072, 100], [1_048_576, 50], [10_485_760, 20]]}
        | {"models": list(MODELS)},
    },
    cells=lambda config: [{"model": name} for name in config["models"]],
    measure=_measure,
    figure=Lines(
        y=measures_by_length("{} tokens"),
        by="model",
        y_label="right answers",
        baselines={"chance": CHANCE},
        log_x=True,
        y_range=(0.0, 1.05),
        x_label="length of the text (tokens)",
        title=lambda config: (
            f"Where a person is, learned in texts of {config['tested'][0][0]} tokens"
        ),
        height=4.0,
    ),
    notes=(
        "With a rate of 0.01, Gated DeltaNet answered 0.50 of the texts of 256 tokens instead of "
        "0.48, and Titans' MAC 0.20 instead of 0.39."
    ),
)

EXPERIMENTS = (BABILONG,)
