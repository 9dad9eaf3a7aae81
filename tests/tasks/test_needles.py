"""Needles are found by a regular expression, at the drawn depth, in text of the exact length."""

from __future__ import annotations

import itertools
import re
import uuid

import pytest
import torch

from recollect.tasks import (
    IGNORE,
    NeedleConfig,
    TextCorpus,
    needle_prompts,
    needles,
    sentences,
)
from recollect.tasks.prompts import hide

HAY = tuple(f"Sentence {i} is naïve and says {'word ' * (i % 7)}little." for i in range(50))
NEEDLE = re.compile(r"The secret of the (\w+ \w+) is ([0-9a-f-]+)\.")


@pytest.mark.parametrize("name", ["passkey", "number", "uuid"])
@pytest.mark.parametrize("length", [300, 701, 2000])
def test_a_regular_expression_finds_the_value(name: str, length: int) -> None:
    config = NeedleConfig(name=name, length=length)  # type: ignore[arg-type]
    prompts = needle_prompts(config, HAY, 12, torch.Generator().manual_seed(length))
    inputs, labels = needles(config, HAY, 12, torch.Generator().manual_seed(length))
    assert inputs.shape == labels.shape == (12, length - 1)
    for prompt, tokens, answers in zip(prompts, inputs.tolist(), labels.tolist(), strict=True):
        matches = NEEDLE.findall(prompt.text)
        assert len(matches) == 1, "one needle"
        key, value = matches[0]
        assert prompt.text.endswith(f"What is the secret of the {key}? The secret of the {key} is")
        assert prompt.answer == f"{value}."
        assert prompt.text[prompt.places[0] :].startswith(f"The secret of the {key} is {value}.")
        if name == "uuid":
            assert str(uuid.UUID(value)) == value and uuid.UUID(value).version == 4
        else:
            assert re.fullmatch(r"[1-9]\d{6}", value)
        # Bytes: the answer is the label, and the inputs before it are the text.
        requested = [t for t, label in enumerate(answers) if label != IGNORE]
        assert bytes(answers[t] for t in requested).decode() == prompt.answer
        assert requested == list(range(length - 1 - len(prompt.answer), length - 1))
        assert bytes(tokens[: requested[0] + 1]).decode() == prompt.text + " "


def test_haystacks() -> None:
    g = torch.Generator().manual_seed(0)
    for prompt in needle_prompts(NeedleConfig(name="number", length=900), HAY, 4, g):
        rest = NEEDLE.sub("", prompt.text)
        numbers = [int(n) for n in re.findall(r"Sentence (\d+) is", rest)]
        steps = {(b - a) % 50 for a, b in itertools.pairwise(numbers)}
        assert steps == {1}, "sentences in order, from a random one on"
    filler = needle_prompts(NeedleConfig(length=600), (), 1, g)[0].text
    assert "Sentence" not in filler
    assert filler.count("A train goes by.") > 3
    with pytest.raises(ValueError, match="no sentences"):
        needles(NeedleConfig(name="uuid"), (), 1, g)


def test_depths_reach_from_the_beginning_to_the_end() -> None:
    config = NeedleConfig(name="number", length=3000)
    prompts = needle_prompts(config, HAY, 400, torch.Generator().manual_seed(0))
    head = len("A secret is hidden in this text. Remember it. ")
    depth = torch.tensor([p.places[0] - head for p in prompts]).double()
    depth = depth / max(p.text.index("What is the secret") - 40 for p in prompts)
    assert depth.min() == 0
    assert depth.max() > 0.95
    # Uniform: a mean of 1/2 with a standard error of √(1/12/400), and the variation of sentences.
    assert abs(float(depth.mean()) - 0.5) < 5 * (1 / 12 / 400) ** 0.5


def test_sentences_of_a_corpus() -> None:
    train = b"One is here. Two is there!\n\nThree stands\nalone? Four"
    heldout = b"Five. six goes on."
    corpus = TextCorpus(
        train=torch.tensor(list(train), dtype=torch.uint8),
        heldout=torch.tensor(list(heldout), dtype=torch.uint8),
        sha256="",
        source="a test",
    )
    assert sentences(corpus) == ("One is here.", "Two is there!", "Three stands alone?", "Four")
    assert sentences(corpus, heldout=True) == ("Five. six goes on.",)


@pytest.mark.parametrize("length", range(60, 140, 7))
def test_text_is_cut_at_its_front_to_the_byte(length: int) -> None:
    prompt = hide(
        ["Found."], [0.5], ["Ünïcode here.", "A."], start=1, head="", question="Q?", answer="yes",
        length=length,
    )  # fmt: skip
    assert len(f"{prompt.text} yes".encode()) == length
    assert "Found. " in prompt.text


def test_bad_configurations_are_refused() -> None:
    with pytest.raises(ValueError, match="name must be"):
        NeedleConfig(name="word")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="length must be a whole number >= 300"):
        NeedleConfig(length=100)
    with pytest.raises(ValueError, match="too short"):
        hide(["x" * 50], [0], HAY, start=0, head="", question="?", answer="!", length=20)
