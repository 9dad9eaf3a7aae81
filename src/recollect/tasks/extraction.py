"""Generated texts in the format of six data sets for information extraction (ATLAS table 5).

| form | format of | text and question |
|---|---|---|
| ``swde`` | SWDE (Lockard et al. 2019) | a page of attributes; one of them, to be completed |
| ``fda`` | FDA reports (Arora et al. 2023) | a form with numbers; one of them, to be completed |
| ``squad`` | SQuAD as completion (Arora et al. 2024) | paragraphs; a sentence without its end |
| ``drop`` | DROP (Dua et al. 2019) | the rounds of a match; a difference of two numbers |
| ``triviaqa`` | TriviaQA (Joshi et al. 2017) | paragraphs; a question, with aliases |
| ``nq`` | Natural Questions (Kwiatkowski et al. 2019) | paragraphs; a question, lower case |

The texts are no part of these data sets: a generator draws all names, numbers and sentences. With
them, programs for the real data sets run and are tested without a network. A score measures whether
a model copies from its context, and is not comparable with published scores.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

import torch

from recollect.fields import Validated, int_check, integer, option, validate
from recollect.tasks.prompts import Dice

__all__ = ["Extraction", "ExtractionConfig", "ExtractionForm", "extractions"]

ExtractionForm = Literal["swde", "fda", "squad", "drop", "triviaqa", "nq"]

_FIRST = ("Alba", "Bruno", "Celia", "Dario", "Edda", "Falk", "Greta", "Hugo", "Ida", "Jonas")
_LAST = ("Arden", "Berg", "Castell", "Dorn", "Eklund", "Ferro", "Gold", "Holm", "Ivers", "Jansen")
_TOWNS = tuple(
    a + b
    for a in ("Alder", "Birch", "Clear", "Dun", "Elm", "Fair", "Glen", "High", "Kings", "Lang")
    for b in ("bury", "dale", "field", "ford", "ham", "mouth", "stead", "ton", "well", "wick")
)
_THINGS = ("bridge", "cathedral", "harbor", "library", "lighthouse", "market", "mill", "theater")
_TRADES = ("cheese", "clocks", "glass", "lace", "paper", "salt", "ships", "wool")
_SUBJECTS = ("Garden", "Harbor", "Island", "Lantern", "Mountain", "Orchard", "River", "Winter")
_KINDS = ("drama", "comedy", "mystery", "romance", "western", "musical")
_ASSAYS = ("glucose", "insulin", "ferritin", "cortisol", "albumin", "creatinine")
_MATERIALS = ("serum", "plasma", "whole blood", "urine", "saliva")


@dataclass(frozen=True, kw_only=True)
class ExtractionConfig(Validated):
    """Format and length of texts.

    Args:
        form: name of the data set.
        length: maximum number of bytes of text and question; a text of towns has at most 100 towns.

    Raises:
        ValueError: the form is unknown, or the text is too short.

    Examples:
        >>> config = rc.tasks.ExtractionConfig(form="fda", length=700)
        >>> (one,) = rc.tasks.extractions(config, 1, torch.Generator().manual_seed(0))
        >>> len(one.text) + len(one.question) <= 700
        True
    """

    form: ExtractionForm = option("squad", *get_args(ExtractionForm))
    length: int = integer(1024, at_least=600)


@dataclass(frozen=True, kw_only=True)
class Extraction:
    """A text, a question and its answers.

    Attributes:
        text: context.
        question: question; the name of an attribute for ``swde`` and ``fda``, the beginning of a
            sentence for ``squad``.
        answers: correct answers, the usual one first.

    Examples:
        >>> config = rc.tasks.ExtractionConfig(form="swde")
        >>> (one,) = rc.tasks.extractions(config, 1, torch.Generator().manual_seed(0))
        >>> one.answers[0] in one.text
        True
    """

    text: str
    question: str
    answers: tuple[str, ...]


def extractions(
    config: ExtractionConfig, batch: int, generator: torch.Generator
) -> tuple[Extraction, ...]:
    """Draw texts with a question.

    Args:
        config: format and length.
        batch: number of texts.
        generator: the only source of randomness, on the CPU.

    Raises:
        ValueError: ``batch`` is negative.

    Examples:
        >>> draw = torch.Generator().manual_seed(0)
        >>> (one,) = rc.tasks.extractions(rc.tasks.ExtractionConfig(form="swde"), 1, draw)
        >>> f"{one.question}: {one.answers[0]}" in one.text
        True
    """
    validate("extractions: batch", int_check(), batch)
    dice = Dice(generator)
    return tuple(_MAKERS[config.form](config.length, dice) for _ in range(batch))


def _person(dice: Dice) -> str:
    return f"{dice.one(_FIRST)} {dice.one(_LAST)}"


def _year(dice: Dice) -> str:
    return str(1200 + dice.below(800))


def _attributes(
    facts: dict[str, str], rows: dict[str, str], length: int, dice: Dice, *, title: str
) -> Extraction:
    """Return a page with one attribute per line, and a question about one of them.

    The number of rows grows with the page, so half of the questions are about facts.
    """
    pairs = facts | rows
    question = dice.one(list(facts if dice.below(2) else rows))
    selected = {question}
    order = [list(pairs)[i] for i in dice.order(len(pairs))]
    size = len(title) + 2 * len(question) + len(pairs[question]) + 5
    for name in order:
        line = len(name) + len(pairs[name]) + 3
        if name not in selected and size + line <= length:
            selected.add(name)
            size += line
    lines = [f"{name}: {pairs[name]}" for name in pairs if name in selected]
    return Extraction(
        text="\n".join([title, *lines]), question=question, answers=(pairs[question],)
    )


def _page(length: int, dice: Dice) -> Extraction:
    """Return a film's page: facts, then as many reviews as fit."""
    film = f"The {dice.one(_SUBJECTS)} of {dice.one(_TOWNS)}"
    facts = {
        "Title": film,
        "Director": _person(dice),
        "Writer": _person(dice),
        "Genre": dice.one(_KINDS),
        "Year": _year(dice),
        "Filmed in": dice.one(_TOWNS),
        "Running time": f"{60 + dice.below(120)} minutes",
        "Music by": _person(dice),
    }
    reviews = {
        f"Review {number}": f"{dice.one(_KINDS)} by {_person(dice)}, {1 + dice.below(9)} of 9"
        for number in range(1, length // 30)
    }
    return _attributes(facts, reviews, length, dice, title=f"{film} - films A to Z")


def _report(length: int, dice: Dice) -> Extraction:
    """Return a form about a device: numbers and sections."""
    assay = dice.one(_ASSAYS)
    facts = {
        "Number": f"K{100_000 + dice.below(900_000)}",
        "Applicant": f"{dice.one(_LAST)} Diagnostics",
        "Analyte": assay,
        "Type of test": f"quantitative, {dice.one(_MATERIALS)}",
        "Contact": _person(dice),
        "Linearity": f"{1 + dice.below(9)} to {100 + dice.below(900)} units per milliliter",
        "Product code": "".join(dice.one("ABCDEFGHJKLMNPQR") for _ in range(3)),
    }
    samples = {
        f"Sample {number}": (
            f"{dice.below(1000)}.{dice.below(10)} units, deviation 0.{1 + dice.below(9)} units"
        )
        for number in range(1, length // 30)
    }
    return _attributes(
        facts, samples, length, dice, title=f"Summary of a decision on an {assay} test"
    )


def _town(town: str, dice: Dice) -> tuple[str, list[tuple[str, str, str]]]:
    """Return a paragraph on a town, and (question, beginning of a sentence, answer) per fact."""
    founded, mayor, trade = _year(dice), _person(dice), dice.one(_TRADES)
    thing, built, builder = dice.one(_THINGS), _year(dice), _person(dice)
    text = (
        f"{town} was founded in the year {founded}. For long its people lived on {trade}. Its "
        f"{thing} was built in {built} by {builder}. The mayor of {town} is {mayor}."
    )
    return text, [
        (f"In which year was {town} founded?", f"{town} was founded in the year", founded),
        (f"Who is the mayor of {town}?", f"The mayor of {town} is", mayor),
        (f"What did the people of {town} live on?", f"The people of {town} lived on", trade),
        (f"Who built the {thing} of {town}?", f"The {thing} of {town} was built by", builder),
    ]


def _towns(length: int, dice: Dice) -> tuple[str, tuple[str, str, str]]:
    """Return paragraphs on different towns, and a fact about one of them, as in `_town`."""
    paragraphs, questions = [], []
    size = 120  # for the question
    for town in dice.sample(_TOWNS, len(_TOWNS)):
        text, facts = _town(town, dice)
        if paragraphs and size + len(text) + 1 > length:
            break
        paragraphs.append(text)
        questions.append(facts)
        size += len(text) + 1
    facts = questions[dice.below(len(questions))]
    return "\n".join(paragraphs), facts[dice.below(len(facts))]


def _completion(length: int, dice: Dice) -> Extraction:
    text, (_, beginning, answer) = _towns(length, dice)
    return Extraction(text=text, question=beginning, answers=(answer,))


def _trivia(length: int, dice: Dice) -> Extraction:
    text, (question, _, answer) = _towns(length, dice)
    return Extraction(
        text=text, question=question, answers=tuple(dict.fromkeys((answer, answer.split()[-1])))
    )


def _search(length: int, dice: Dice) -> Extraction:
    text, (question, _, answer) = _towns(length, dice)
    return Extraction(text=text, question=question.rstrip("?").lower(), answers=(answer,))


def _match(length: int, dice: Dice) -> Extraction:
    """Return the points of a match by round, and a question for the difference of two of them."""
    home, guest = dice.sample(_TOWNS, 2)
    points: dict[str, list[int]] = {home: [], guest: []}
    lines: list[str] = []
    size = 160  # for the question
    while True:
        scores = [dice.below(30) for _ in points]
        line = (
            f"In round {len(lines) + 1} {home} scored {scores[0]} points and {guest} {scores[1]}."
        )
        if len(lines) >= 2 and size + len(line) + 1 > length:
            break
        lines.append(line)
        size += len(line) + 1
        for town, score in zip(points, scores, strict=True):
            points[town].append(score)
    index = dice.below(len(lines))
    winner, loser = sorted(points, key=lambda town: -points[town][index])
    return Extraction(
        text=" ".join(lines),
        question=f"How many more points did {winner} score than {loser} in round {index + 1}?",
        answers=(str(points[winner][index] - points[loser][index]),),
    )


_MAKERS: dict[str, Callable[[int, Dice], Extraction]] = {
    "swde": _page,
    "fda": _report,
    "squad": _completion,
    "drop": _match,
    "triviaqa": _trivia,
    "nq": _search,
}
