"""Stories are answered by reading the sentences, with logic that does not use the simulator."""

from __future__ import annotations

import re

import pytest
import torch

from recollect.tasks import IGNORE, StoryConfig, stories, story_bytes, story_prompts

BACKGROUND = tuple(f"The weather of day {i} was fair." for i in range(40))
FACT = re.compile(
    r"[A-Z]\w+ (?:went to|took|left) the \w+\.|The \w+ is \w+ of the \w+\.|"
    r"[A-Z]\w+ gave the \w+ to [A-Z]\w+\."
)


def words(sentence: str) -> list[str]:
    return re.findall(r"\w+", sentence)


def solve(facts: list[str], question: str) -> str:
    """Read the facts in order, then answer."""
    requested = words(question)
    if requested[0] in ("What", "Who"):
        return solve_relation(facts, requested)
    place: dict[str, str] = {}
    has: dict[str, str] = {}
    at: dict[str, list[str]] = {}
    for fact in facts:
        who, what, *rest = words(fact)
        if what == "went":
            place[who] = rest[-1]
            for thing, holder in has.items():
                if holder == who:
                    at[thing].append(rest[-1])
        elif what == "took":
            has[rest[-1]] = who
            recorded = at.setdefault(rest[-1], [])
            if who in place and recorded[-1:] != [place[who]]:
                recorded.append(place[who])
        elif what == "left":
            assert has.pop(rest[-1]) == who
    if requested[:2] == ["Where", "was"]:
        path = at[requested[3]]
        return path[path.index(requested[-1]) - 1]
    return at[requested[-1]][-1] if requested[2] == "the" else place[requested[-1]]


BACKWARDS = {"north": "south", "south": "north", "east": "west", "west": "east"}
STEP = {"north": (0, 1), "south": (0, -1), "east": (1, 0), "west": (-1, 0)}


def backwards(fact: str) -> str:
    """Return the relation from the other place."""
    _, a, _, d, *_, b = words(fact)
    return f"The {b} is {BACKWARDS[d]} of the {a}."


def solve_relation(facts: list[str], question: list[str]) -> str:
    result = set()
    for fact in [*facts, *(backwards(x) for x in facts if words(x)[2] == "is")]:
        parts = words(fact)
        if parts[2] == "is":  # The a is d of the b
            a, d, b = parts[1], parts[3], parts[-1]
            if question[-2] == "the" and question[2] == d and question[-1] == b:
                result.add(a)  # A question: place in direction d of b
            if question[-1] == "of" and question[3] == a and question[4] == d:
                result.add(b)  # A question: direction of a from b
        elif parts[1] == "gave":  # a gave the b to c
            a, b, c = parts[0], parts[3], parts[-1]
            if question[1] == "gave" and (question[3], question[-1]) == (b, c):
                result.add(a)
            if question[1] == "did" and (question[2], question[-1]) == (a, c):
                result.add(b)
            if question[1] == "got" and (question[3], question[-1]) == (b, a):
                result.add(c)
    assert len(result) == 1, "one answer"
    return result.pop()


@pytest.mark.parametrize("task", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("facts", [3, 8, 14])
def test_readers_find_the_answer(task: int, facts: int) -> None:
    config = StoryConfig(task=task, facts=facts)
    answers = set()
    for story in stories(config, 60, torch.Generator().manual_seed(task)):
        assert len(story.facts) == (2 if task == 4 else facts)
        assert solve(list(story.facts), story.question) == story.answer
        answers.add(story.answer)
        supports = sorted(story.supports)
        assert list(story.supports) == supports
        assert supports[-1] < len(story.facts)
    assert len(answers) > 3, "different answers"


def test_one_place_is_in_the_direction_of_the_question() -> None:
    """On a map in which each relation is one step, no other place is in this direction."""
    kinds = set()
    for story in stories(StoryConfig(task=4), 400, torch.Generator().manual_seed(4)):
        facts = [words(fact) for fact in story.facts]
        at = {facts[0][-1]: (0, 0)}
        for _ in facts:  # twice, since the second may have to be known first
            for one in facts:
                (x, y), a, b = STEP[one[3]], one[1], one[-1]
                if b in at:
                    at.setdefault(a, (at[b][0] + x, at[b][1] + y))
                elif a in at:
                    at.setdefault(b, (at[a][0] - x, at[a][1] - y))
        assert len(at) == 3
        requested = words(story.question)
        of_it = requested[-1] != "of"  # place in direction d of b, or else direction of a from b
        target, d = (
            (requested[-1], requested[2]) if of_it else (requested[3], BACKWARDS[requested[4]])
        )
        (x, y), (east, north) = at[target], STEP[d]
        straight = {
            place
            for place, (u, v) in at.items()
            if (u - x) * east + (v - y) * north > 0 and (u - x) * north == (v - y) * east
        }
        assert straight == {story.answer}, (story.facts, story.question)
        kinds.add((of_it, story.supports, len({one[3] for one in facts})))
    assert len(kinds) == 8, "both questions, of both relations, of one direction and of two"


@pytest.mark.parametrize(("task", "maximum"), [(1, 1), (2, 2), (3, 4), (4, 1), (5, 1)])
def test_the_supporting_facts_are_enough(task: int, maximum: int) -> None:
    """Only these facts are needed. A left object needs the fact that it was left."""
    for story in stories(StoryConfig(task=task, facts=10), 80, torch.Generator().manual_seed(9)):
        facts = [story.facts[i] for i in story.supports]
        assert 1 <= len(facts) <= maximum
        leaving = [fact for fact in facts if " left " in fact]
        if (
            leaving
        ):  # the fact with "took" instead, which the reader understands without its beginning
            facts = [fact.replace(" left ", " took ") for fact in facts]
        assert solve(facts, story.question) == story.answer


def test_stories_in_background_text() -> None:
    config = StoryConfig(task=2, facts=6, length=1500)
    prompts = story_prompts(config, BACKGROUND, 10, torch.Generator().manual_seed(0))
    plain = stories(config, 10, torch.Generator().manual_seed(0))
    inputs, labels = story_bytes(config, BACKGROUND, 10, torch.Generator().manual_seed(0))
    assert inputs.shape == (10, 1499)
    for prompt, story, tokens, requested in zip(prompts, plain, inputs, labels, strict=True):
        assert FACT.findall(prompt.text) == list(story.facts), "all there, in order"
        assert [
            prompt.text[i:].startswith(f) for i, f in zip(prompt.places, story.facts, strict=True)
        ]
        question = prompt.text.rsplit(". ", 1)[1].removesuffix(" Answer:")
        assert solve(FACT.findall(prompt.text), question) == story.answer
        assert bytes(requested[requested != IGNORE].tolist()).decode() == f"{story.answer}."
        assert bytes(tokens.tolist()).decode().startswith(prompt.text)
    spread = [p.places[0] for p in prompts]
    assert max(spread) - min(spread) > 100


def test_one_seed_gives_one_story() -> None:
    config = StoryConfig(task=3)
    one, two, other = (stories(config, 3, torch.Generator().manual_seed(s)) for s in (1, 1, 2))
    assert one == two != other


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"task": 6}, "1 to 5"),
        ({"task": 3, "facts": 2}, "facts must be a whole number >= 3, not 2"),
        ({"people": 7}, "people must be a whole number from 2 to 6, not 7"),
        ({"length": 100}, "length"),
    ],
)
def test_bad_configurations_are_refused(changes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        StoryConfig(**changes)
