"""RULER's other kinds: answers found in the text by counting and by following."""

from __future__ import annotations

import re
from collections import Counter

import pytest
import torch

from recollect.tasks import (
    CommonWordsConfig,
    FrequentWordsConfig,
    NeedleConfig,
    VariableConfig,
    common_words,
    frequent_words,
    needle_prompts,
    needles,
    variable_prompts,
)

HAY = tuple(f"Sentence {i} is naïve and says {'word ' * (i % 7)}little." for i in range(50))
NEEDLE = re.compile(r"The secret of the (\w+ \w+|[0-9a-f-]{36}) is ([0-9a-f-]+)\.")


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def listed(answer: str) -> list[str]:
    assert answer.endswith(".")
    return answer[:-1].split(", ")


def parse_needles(text: str) -> dict[str, list[str]]:
    """Return values by key, found by a regular expression."""
    result: dict[str, list[str]] = {}
    for key, value in NEEDLE.findall(text):
        result.setdefault(key, []).append(value)
    return result


@pytest.mark.parametrize(
    ("settings", "keys", "num_answers"),
    [
        ({"keys": 4}, 4, 1),
        ({"values": 4}, 1, 4),
        ({"keys": 4, "queries": 4}, 4, 4),
        ({"keys": 3, "queries": 2, "values": 2}, 3, 4),
    ],
)
def test_several_needles(settings: dict[str, int], keys: int, num_answers: int) -> None:
    config = NeedleConfig(name="number", length=2000, **settings)  # type: ignore[arg-type]
    prompts = needle_prompts(config, HAY, 8, generator())
    inputs, _ = needles(config, HAY, 8, generator())
    for prompt, tokens in zip(prompts, inputs.tolist(), strict=True):
        context, _, question = prompt.text.rpartition("What ")
        result = parse_needles(context)
        assert len(result) == keys
        assert all(len(values) == settings.get("values", 1) for values in result.values())
        expected = [x for key, values in result.items() if key in question for x in values]
        assert len(expected) == num_answers
        assert sorted(listed(prompt.answer)) == sorted(expected)
        assert f"{prompt.text} {prompt.answer}".encode()[:-1] == bytes(tokens)
    assert len({prompt.text.index(NEEDLE.search(prompt.text)[0]) for prompt in prompts}) > 1  # type: ignore[index]


@pytest.mark.parametrize("uuid_keys", [False, True])
def test_a_haystack_of_needles(uuid_keys: bool) -> None:
    name = "uuid" if uuid_keys else "number"
    config = NeedleConfig(name=name, distractors=True, uuid_keys=uuid_keys, length=1500)
    for prompt in needle_prompts(config, (), 6, generator(3)):
        context, _, question = prompt.text.rpartition("What ")
        result = parse_needles(context)
        assert len(result) > 8
        (key,) = (key for key in result if key in question)
        assert result[key] == listed(prompt.answer), "the asked key has one needle"
        assert len(f"{prompt.text} {prompt.answer}".encode()) == 1500


@pytest.mark.parametrize(("hops", "chains"), [(1, 1), (4, 1), (3, 3)])
def test_variables_are_found_by_following_assignments(hops: int, chains: int) -> None:
    config = VariableConfig(hops=hops, chains=chains, length=1500)
    for prompt in variable_prompts(config, 8, generator(1)):
        context, _, question = prompt.text.rpartition("Which variables")
        values: dict[str, str] = {}
        for name, source in re.findall(r"VAR ([A-Z]{5}) = (?:VAR )?(\w{5})\.", context):
            # In the order of the text: a variable is assigned before it is used.
            values[name] = source if source.isdigit() else values[source]
        assert len(values) == chains * (hops + 1)
        requested = re.search(r"\d{5}", question)
        assert requested is not None
        expected = {name for name, value in values.items() if value == requested[0]}
        assert set(listed(prompt.answer)) == expected and len(expected) == hops + 1
        assert len(f"{prompt.text} {prompt.answer}".encode()) == 1500


@pytest.mark.parametrize("length", [4100, 9000])
def test_common_words_come_more_often(length: int) -> None:
    config = CommonWordsConfig(length=length)
    for prompt in common_words(config, 3, generator(2)):
        items = re.findall(r"(\d+)\. ([a-z]{6})\b", prompt.text)
        assert [int(number) for number, _ in items] == list(range(1, len(items) + 1))
        counts = Counter(word for _, word in items)
        common = {word for word, count in counts.items() if count == 30}
        assert set(listed(prompt.answer)) == common and len(common) == 10
        assert {count for word, count in counts.items() if word not in common} <= {3}
        size = len(f"{prompt.text} {prompt.answer}".encode())
        assert length - 60 < size <= length


@pytest.mark.parametrize(("length", "alpha"), [(1000, 2.0), (5000, 1.5)])
def test_frequent_words_are_the_most_frequent(length: int, alpha: float) -> None:
    config = FrequentWordsConfig(length=length, alpha=alpha)
    for prompt in frequent_words(config, 3, generator(4)):
        body = prompt.text.partition("no word. ")[2].partition(" Which ")[0]
        counts = Counter(body.split())
        (dots, maximum), *ranks = counts.most_common()
        assert dots == "...." and maximum > ranks[0][1]
        assert [word for word, _ in ranks[:3]] == listed(prompt.answer)
        assert ranks[2][1] > ranks[3][1], "the third is told from the fourth"
        # Counts fall as a power of the rank, ranks from 1 for the dots.
        assert maximum / ranks[0][1] == pytest.approx(2**alpha, rel=0.2)
        assert 0.7 * length < len(f"{prompt.text} {prompt.answer}".encode()) <= length


def test_too_long_texts_are_refused() -> None:
    with pytest.raises(ValueError, match="too short for 10 words, 30 times each; give at least 3"):
        common_words(CommonWordsConfig(length=1000), 1, generator())
    with pytest.raises(
        ValueError, match="300 bytes is too short for different counts of the 4 most"
    ):
        frequent_words(FrequentWordsConfig(length=300), 1, generator())
    with pytest.raises(ValueError, match=r"queries must be .* not 3"):
        NeedleConfig(keys=2, queries=3)
    with pytest.raises(ValueError, match=r"seldom must be .* not 30"):
        CommonWordsConfig(seldom=30)
