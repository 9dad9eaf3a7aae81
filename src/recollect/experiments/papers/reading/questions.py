"""The questions of needles and stories as tokens, drawn anew for every batch."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from recollect.experiments.papers.reading.words import (
    Asked,
    Haystack,
    Words,
    batch_of,
    haystack,
    hidden_among,
)
from recollect.tasks.needles import NeedleConfig, NeedleName, needle_prompts
from recollect.tasks.prompts import Dice
from recollect.tasks.stories import Story, StoryConfig, stories

__all__ = ["needle_batch", "needle_words", "story_batch", "story_words"]

_PLAIN = ("-",)
_DEPTHS = 40


def _needle(name: NeedleName, generator: torch.Generator) -> tuple[str, str, str]:
    """A needle of `recollect.tasks.needles`, its question, and its value with the full stop."""
    kind: NeedleName = "uuid" if name == "uuid" else "number"
    (prompt,) = needle_prompts(NeedleConfig(name=kind, length=300), _PLAIN, 1, generator)
    at = prompt.places[0]
    needle = prompt.text[at : prompt.text.index(". ", at) + 1]
    return needle, prompt.text[prompt.text.rindex("What is") :], prompt.answer


@lru_cache(maxsize=4)
def needle_words(frequent: int) -> Words:
    """Every word and pair of digits of the needles, and the most frequent words of the text."""
    drawn = torch.Generator().manual_seed(0)
    kinds: tuple[NeedleName, ...] = ("number", "uuid")
    needed = (part for _ in range(500) for kind in kinds for part in _needle(kind, drawn))
    return Words([*needed, *haystack("filler")], haystack("text"), frequent)


@lru_cache(maxsize=8)
def _hay(words: Words, kind: str, heldout: bool) -> Haystack:
    return Haystack.of(words, haystack(kind, heldout=heldout))


def needle_batch(
    words: Words,
    name: NeedleName,
    length: int,
    batch: int,
    generator: torch.Generator,
    *,
    heldout: bool = False,
) -> tuple[Tensor, Tensor]:
    """Needles in background, as `recollect.experiments.papers.reading.words.batch_of`.

    Args:
        words: of `needle_words`.
        name: of the task, as in `recollect.tasks.NeedleConfig`.
        length: tokens of the text with its answer.
        batch: B.
        generator: the only source of randomness.
        heldout: whether the background is the text's held-out part.
    """
    hay = _hay(words, "filler" if name == "passkey" else "text", heldout)
    dice, texts = Dice(generator), []
    for _ in range(batch):
        needle, question, value = _needle(name, generator)
        asked = Asked(hidden=(words(needle),), question=words(question), answer=words(value))
        start = 0 if name == "passkey" else int(hay.borders[dice.below(len(hay.borders))])
        depth = dice.below(_DEPTHS) / (_DEPTHS - 1)
        tokens = hidden_among(asked, hay, [depth], start=start, length=length)
        texts.append((tokens, len(asked.answer)))
    return batch_of(texts)


@lru_cache(maxsize=4)
def story_words(task: int, frequent: int) -> Words:
    """Every word of the stories of a task, and the most frequent ones of the text."""
    drawn = torch.Generator().manual_seed(0)
    made = stories(StoryConfig(task=task), 300, drawn)
    needed = (part for one in made for part in (*one.facts, _question(one), f"{one.answer}."))
    return Words(needed, haystack("text"), frequent)


def _question(story: Story) -> str:
    return f"{story.question} Answer:"


def story_batch(
    words: Words,
    config: StoryConfig,
    length: int,
    batch: int,
    generator: torch.Generator,
    *,
    heldout: bool = False,
) -> tuple[Tensor, Tensor]:
    """Stories in background, sentence by sentence in order.

    Args:
        words: of `story_words`.
        config: of the stories; its length in bytes says nothing here.
        length: tokens of the text with its answer.
        batch: B.
        generator: the only source of randomness.
        heldout: whether the background is the text's held-out part.
    """
    hay = _hay(words, "text", heldout)
    dice, texts = Dice(generator), []
    for story in stories(config, batch, generator):
        asked = Asked(
            hidden=tuple(words(fact) for fact in story.facts),
            question=words(_question(story)),
            answer=words(f"{story.answer}."),
        )
        start = int(hay.borders[dice.below(len(hay.borders))])
        depths = sorted(dice.share() for _ in story.facts)
        tokens = hidden_among(asked, hay, depths, start=start, length=length)
        texts.append((tokens, len(asked.answer)))
    return batch_of(texts)
