"""Recall from documents in the form of six real data sets: ATLAS table 5."""

from __future__ import annotations

from functools import lru_cache

import torch

from recollect.experiments.framework import (
    Batch,
    Cell,
    Claim,
    Config,
    Experiment,
    Lines,
    Rule,
    Values,
    above,
    at_least,
    decreasing,
    for_any,
    heldout_generator,
    provided,
)
from recollect.experiments.papers.reading.curriculum import train_and_test
from recollect.experiments.papers.reading.texts import Vocabulary
from recollect.tasks.extraction import Extraction, ExtractionConfig, ExtractionForm, extractions
from recollect.tasks.prompts import label_answers

__all__ = ["EXPERIMENTS"]

FORMS: tuple[ExtractionForm, ...] = ("swde", "nq", "drop", "fda", "squad", "triviaqa")
EXPECTED_ORDER = ("softmax_attention", "atlas", "titans", "gated_delta_net")
LEARNED = 0.2
"""Accuracy that the best model must have for a verdict on the order."""

END_TOKEN = "|"
_ATTRIBUTES = ("swde", "fda")


def _question_and_answer(document: Extraction, form: ExtractionForm) -> tuple[str, str]:
    """Return the prompt of the local tasks of `recollect eval`, and the answer."""
    text = document.text.replace("\n", f" {END_TOKEN} ")
    if form in _ATTRIBUTES:
        question = f"{document.question}:"
    elif form == "squad":
        question = document.question
    else:
        question = f"Question: {document.question} {END_TOKEN} Answer:"
    return f"{text} {END_TOKEN} {question}", f"{document.answers[0]} {END_TOKEN}"


@lru_cache(maxsize=2)
def _vocabulary(size: int) -> Vocabulary:
    """Return all words of some hundred documents of each form, with codes as letters."""
    generator = torch.Generator().manual_seed(0)
    texts = (
        text
        for form in FORMS
        for document in extractions(ExtractionConfig(form=form, length=size), 300, generator)
        for text in _question_and_answer(document, form)
    )
    return Vocabulary(texts, spell_capitals=True)


def _documents(
    form: ExtractionForm, size: int, length: int, batch: int, generator: torch.Generator
) -> Batch:
    """Draw the last ``length`` tokens of documents of ``size`` bytes, padded at the front."""
    vocabulary, texts = _vocabulary(size), []
    for document in extractions(ExtractionConfig(form=form, length=size), batch, generator):
        text, answer = map(vocabulary, _question_and_answer(document, form))
        tokens = [*text, *answer][-length:]
        texts.append(([0] * (length - len(tokens)) + tokens, len(answer)))
    return label_answers(texts, length)


def _measure(config: Config, cell: Cell, seed: int, device: torch.device) -> Values:
    size, length, test = config["bytes"], config["lessons"][-1][1], heldout_generator(seed)

    def draw(kind: str, length: int, batch: int, generator: torch.Generator) -> Batch:
        count = batch // len(FORMS)
        parts = (_documents(form, size, length, count, generator) for form in FORMS)
        inputs, labels = zip(*parts, strict=True)
        return torch.cat(inputs), torch.cat(labels)

    tests = ((form, _documents(form, size, length, config["tested"], test)) for form in FORMS)
    name, vocab = str(cell["model"]), len(_vocabulary(size))
    values = train_and_test(config, name, vocab, draw, tests, seed, device)
    return values | {"average": sum(values[form] for form in FORMS) / len(FORMS)}


def _if_learned(rule: Rule) -> Rule:
    return provided(for_any("model", at_least("average", LEARNED), values=EXPECTED_ORDER), rule)


RECALL_REAL = Experiment(
    name="recall-real",
    title="Recall from documents",
    source="ATLAS section 6.4, table 5",
    protocol=(
        "Documents in the form of SWDE, NQ, DROP, FDA, SQuAD and TriviaQA, drawn by a generator, "
        "with the questions of the local tasks fixture_* of recollect eval. They are not those "
        "data sets, so the report shows the paper's numbers only for their order. Tokens are "
        "words, pairs of digits, and the letters of codes. The paper measures language models of "
        "up to 1.3 billion parameters trained on text. Here small models learn the six forms in "
        "equal parts, with a loss on the answer, in one curriculum for all models that begins with "
        "the repetition of random tokens. Every model has the options of its preset and a short "
        "convolution around its memory. AdamW, one learning rate. An answer is correct if each of "
        "its tokens and its end has the largest logit after the tokens before it, as in greedy "
        "decoding. Only the first of several answers is correct."
    ),
    claims=(
        Claim(
            name="order",
            text="Transformers above Atlas above Titans above Gated DeltaNet.",
            rule=_if_learned(decreasing("average", along="model", order=EXPECTED_ORDER)),
            scales=("small", "paper"),
        ),
        Claim(
            name="Transformers first",
            text="Transformers achieve the best results in in-context recall.",
            rule=_if_learned(above("average", upper=EXPECTED_ORDER[:1], lower=EXPECTED_ORDER[1:])),
            scales=("small", "paper"),
        ),
    ),
    configs={
        "smoke": {"seeds": 1, "bytes": 600, "width": 8, "heads": 1, "layers": 1, "lr": 1e-2}
        | {"lessons": [["copy 64", 24, 2, 1], ["task", 128, 6, 1]], "tested": 2}
        | {"models": ["gated_delta_net", "titans"]},
        "small": {"seeds": 1, "bytes": 600, "width": 64, "heads": 4, "layers": 1, "lr": 1e-2}
        | {
            "lessons": [
                ["copy 64", 24, 24, 300],
                ["copy 128", 24, 24, 80],
                ["copy 256", 24, 24, 80],
                ["copy 700", 24, 24, 160],
                ["task", 216, 6, 250],
            ],
            "tested": 32,
        }
        | {"models": list(EXPECTED_ORDER)},
        "paper": {"seeds": 1, "bytes": 8000, "width": 1024, "heads": 16, "layers": 24, "lr": 3e-4}
        | {
            "lessons": [["copy 1000", 512, 64, 2000], ["task", 4096, 30, 4000]],
            "tested": 1000,
        }
        | {"models": list(EXPECTED_ORDER)},
    },
    cells=lambda config: [{"model": name} for name in config["models"]],
    measure=_measure,
    figure=Lines(
        y=lambda _: dict(enumerate(FORMS, 1)),
        by="model",
        y_label="right answers",
        y_range=(0.0, 1.05),
        panel_title=", ".join(f"{n} {form}" for n, form in enumerate(FORMS, 1)),
        x_label="in the shape of",
        title="Recall from documents",
        height=4.0,
    ),
    tables=("atlas_table5",),
)

EXPERIMENTS = (RECALL_REAL,)
