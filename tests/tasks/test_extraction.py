"""Fixtures in the form of real data: the text contains every answer."""

from __future__ import annotations

import re
from typing import get_args

import pytest
import torch

from recollect.tasks import Extraction, ExtractionConfig, extractions
from recollect.tasks.extraction import ExtractionForm

FORMS = get_args(ExtractionForm)


def draw_items(form: str, length: int = 900, seed: int = 0) -> tuple[Extraction, ...]:
    config = ExtractionConfig(form=form, length=length)  # type: ignore[arg-type]
    return extractions(config, 12, torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("length", [600, 3000])
def test_texts_fill_their_limit(form: str, length: int) -> None:
    result = draw_items(form, length)
    sizes = [len(f"{one.text}\n{one.question}:".encode()) for one in result]
    assert max(sizes) <= length
    assert min(sizes) > length - 350
    assert len({one.text for one in result}) == len(result)
    assert len({one.answers for one in result}) > 3


@pytest.mark.parametrize("form", ["swde", "fda"])
def test_attributes_are_on_separate_lines(form: str) -> None:
    for one in draw_items(form):
        values = dict(line.split(": ", 1) for line in one.text.splitlines()[1:])
        assert one.answers == (values[one.question],)


@pytest.mark.parametrize("form", ["swde", "fda"])
def test_questions_on_facts_are_as_frequent_as_on_rows(form: str) -> None:
    """For any length of the page, which has about a hundred rows here and seven or eight facts."""
    config = ExtractionConfig(form=form, length=4000)  # type: ignore[arg-type]
    result = extractions(config, 200, torch.Generator().manual_seed(3))
    rows = sum(bool(re.fullmatch(r"(Review|Sample) \d+", one.question)) for one in result)
    assert 70 <= rows <= 130, "of 200 fair draws, but for one time in 40,000"
    assert len({one.question for one in result if not one.question[-1].isdigit()}) >= 7


def test_completion_continues_the_text() -> None:
    for one in draw_items("squad"):
        town = re.search(r"\b[A-Z][a-z]+(?=\b.*$)", one.question.replace("The ", ""))
        assert town is not None and town[0] in one.text
        assert one.answers[0] in one.text


def test_a_difference_is_one_of_two_numbers_of_the_text() -> None:
    for one in draw_items("drop"):
        requested = re.fullmatch(
            r"How many more points did (\w+) score than (\w+) in round (\d+)\?", one.question
        )
        assert requested is not None
        more, less, number = requested.groups()
        (line,) = re.findall(rf"In round {number} [^.]*\.", one.text)
        numbers = re.fullmatch(r"In round \d+ (\w+) scored (\d+) points and (\w+) (\d+)\.", line)
        assert numbers is not None
        points = {numbers[1]: int(numbers[2]), numbers[3]: int(numbers[4])}
        assert one.answers == (str(points[more] - points[less]),)
        assert points[more] >= points[less]


@pytest.mark.parametrize("form", ["triviaqa", "nq"])
def test_questions_are_answered_by_the_paragraph_of_their_town(form: str) -> None:
    for one in draw_items(form, 1500):
        requested = one.question.lower()
        (paragraph,) = (x for x in one.text.splitlines() if x.split()[0].lower() in requested)
        assert one.answers[0] in paragraph
        if form == "nq":
            assert one.question == requested and not requested.endswith("?")
        else:
            assert one.answers[-1] == one.answers[0].split()[-1]


def test_another_form_is_refused() -> None:
    with pytest.raises(ValueError, match="form"):
        ExtractionConfig(form="race")  # type: ignore[arg-type]
