"""Recall from documents in the shape of six real data sets: ATLAS table 5."""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise

import torch
from torch import Tensor

from recollect.experiments.framework.experiment import Claim, Config, Experiment
from recollect.experiments.framework.records import Cell, Results, Values
from recollect.experiments.framework.rules import Verdict, not_testable, special, verdict
from recollect.experiments.papers.reading.course import answered, mixer_named, taught
from recollect.experiments.papers.reading.words import Words, batch_of
from recollect.report.figures import Panel, RenderedFigure, Series, panel_figure
from recollect.tasks.extraction import Extraction, ExtractionConfig, ExtractionForm, extractions

__all__ = ["EXPERIMENTS"]

FORMS: tuple[ExtractionForm, ...] = ("swde", "nq", "drop", "fda", "squad", "triviaqa")
ORDER = ("softmax_attention", "atlas", "titans", "gated_delta_net")
LEARNED = 0.2
"""Of all answers, the share that the best model must have for an order to say anything."""

END = "|"
_ATTRIBUTES = ("swde", "fda")


def _parts(one: Extraction, form: ExtractionForm) -> tuple[str, str]:
    """The text with its question as the local tasks of `recollect eval` put it, and the answer."""
    text = one.text.replace("\n", f" {END} ")
    if form in _ATTRIBUTES:
        asked = f"{one.question}:"
    elif form == "squad":
        asked = one.question
    else:
        asked = f"Question: {one.question} {END} Answer:"
    return f"{text} {END} {asked}", f"{one.answers[0]} {END}"


@lru_cache(maxsize=2)
def _words(size: int) -> Words:
    """Every word that stands in some hundreds of documents of each form, codes as letters."""
    drawn = torch.Generator().manual_seed(0)
    made = (
        part
        for form in FORMS
        for one in extractions(ExtractionConfig(form=form, length=size), 300, drawn)
        for part in _parts(one, form)
    )
    return Words(made, spelled=True)


def _documents(
    words: Words,
    form: ExtractionForm,
    size: int,
    length: int,
    batch: int,
    generator: torch.Generator,
) -> tuple[Tensor, Tensor]:
    """Documents of at most so many bytes and the last so many tokens, filled up in front."""
    texts = []
    for one in extractions(ExtractionConfig(form=form, length=size), batch, generator):
        text, answer = _parts(one, form)
        wanted = words(answer)
        tokens = [*words(text), *wanted][-length:]
        texts.append(([0] * (length - len(tokens)) + tokens, len(wanted)))
    return batch_of(texts)


def _measure(config: Config, cell: Cell, seed: int, device: torch.device) -> Values:
    size, words = config["bytes"], _words(config["bytes"])

    def draw(
        kind: str, length: int, batch: int, generator: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        parts = [
            _documents(words, form, size, length, batch // len(FORMS), generator) for form in FORMS
        ]
        return torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts])

    mixer = mixer_named(str(cell["model"]), config)
    reader, lost = taught(config, mixer, len(words), draw, seed, device)
    values = {"lost steps": float(lost)}
    test = torch.Generator().manual_seed(1_000_003 + seed)
    length = config["lessons"][-1][1]
    for form in FORMS:
        found = answered(reader, *_documents(words, form, size, length, config["tested"], test))
        values[form] = found.right
        values[f"{form}, tokens"] = found.tokens
    return values | {"average": sum(values[form] for form in FORMS) / len(FORMS)}


def _order(results: Results) -> Verdict:
    found = {model: results.mean("average", model=model) for model in ORDER}
    because = "Mean over forms and seeds: " + ", ".join(f"{m} {x:.3f}" for m, x in found.items())
    if max(found.values()) < LEARNED:
        return not_testable(f"No model answers {LEARNED} of the questions. {because}.")
    return verdict(all(a > b for a, b in pairwise(found.values())), f"{because}.")


def _attention_first(results: Results) -> Verdict:
    found = {model: results.mean("average", model=model) for model in ORDER}
    first, *rest = found.values()
    because = "Mean over forms and seeds: " + ", ".join(f"{m} {x:.3f}" for m, x in found.items())
    if max(found.values()) < LEARNED:
        return not_testable(f"No model answers {LEARNED} of the questions. {because}.")
    return verdict(first > max(rest), f"{because}.")


def _draw(results: Results) -> RenderedFigure:
    series = []
    for model in results.axis_values("model"):
        each = [results.values(form, model=model) for form in FORMS]
        series.append(
            Series(
                name=str(model),
                x=list(range(1, len(FORMS) + 1)),
                y=[sum(some) / len(some) for some in each],
                low=[min(some) for some in each],
                high=[max(some) for some in each],
            )
        )
    named = ", ".join(f"{n} {form}" for n, form in enumerate(FORMS, 1))
    return panel_figure(
        [Panel(y="right answers", series=series, y_range=(0.0, 1.05), title=named)],
        x="in the shape of",
        title="Recall from documents",
        height=4.0,
    )


RECALL_REAL = Experiment(
    name="recall-real",
    title="Recall from documents",
    source="ATLAS section 6.4, table 5",
    protocol=(
        "Documents in the shape of SWDE, NQ, DROP, FDA, SQuAD and TriviaQA, drawn by a generator, "
        "with the questions of the local tasks fixture_* of recollect eval; none of it is those "
        "data, whose numbers are beside this run for their order alone. Tokens are words, "
        "pairs of digits, and the letters of codes. The paper measures language models of up to "
        "1.3 billion parameters trained on text; here small models learn the six forms in equal "
        "parts, the loss on the answer, in one course for all that begins with repeating random "
        "tokens. Every model has its preset's options and a short convolution around its memory. "
        "AdamW, one rate. An "
        "answer counts where every token of it and its end has the largest logit after the ones "
        "before it, so where greedy decoding writes it; the first of several answers is the "
        "right one."
    ),
    claims=(
        Claim(
            name="order",
            text="Transformers above Atlas above Titans above Gated DeltaNet.",
            rule=special(
                "Mean accuracies over forms and seeds fall in this order, where the best is at "
                f"least {LEARNED}.",
                _order,
            ),
            scales=("small", "paper"),
        ),
        Claim(
            name="Transformers first",
            text="Transformers achieve the best results in in-context recall.",
            rule=special(
                "The mean accuracy of softmax attention over forms and seeds is above that of "
                f"each of the others, where the best is at least {LEARNED}.",
                _attention_first,
            ),
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
        | {"models": list(ORDER)},
        "paper": {"seeds": 1, "bytes": 8000, "width": 1024, "heads": 16, "layers": 24, "lr": 3e-4}
        | {
            "lessons": [["copy 1000", 512, 64, 2000], ["task", 4096, 30, 4000]],
            "tested": 1000,
        }
        | {"models": list(ORDER)},
    },
    cells=lambda config: [{"model": name} for name in config["models"]],
    measure=_measure,
    figure=_draw,
    tables=("atlas_table5",),
)

EXPERIMENTS = (RECALL_REAL,)
