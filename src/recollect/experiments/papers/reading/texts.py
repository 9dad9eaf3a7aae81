"""Questions in long texts as tokens: words, sentences in background text, needles and stories.

Every known word and every other character is a token. Digits are read in pairs, since the
tokenizers of the papers read them in groups: a number of seven digits has four tokens. All unknown
words share one token. A few hundred tokens are then a long text.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache

import torch

from recollect.experiments.framework import Batch
from recollect.tasks.needles import FILLER, NeedleConfig, NeedleName, needle_prompts
from recollect.tasks.prompts import Dice, insert_at, label_answers, sentences
from recollect.tasks.stories import Story, StoryConfig, stories
from recollect.tasks.text import load_text

__all__ = [
    "Background",
    "Vocabulary",
    "insert_sentences",
    "needle_batch",
    "needle_vocabulary",
    "story_batch",
    "story_vocabulary",
]

_UUID = r"\b[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\b"
_TOKENS = re.compile(rf"({_UUID})|([0-9]+)|([A-Za-z]+)|([^\sA-Za-z0-9])")
_NUM_DEPTHS = 40
UNKNOWN = "<unknown>"

Question = tuple[Sequence[str], str, str]
"""Sentences to insert into background text, the question, and its answer."""


def _tokenize(text: str, spell_capitals: bool = False) -> list[str]:
    """Split a text into words, pairs of digits and other characters."""
    tokens: list[str] = []
    for uuid, digits, word, character in _TOKENS.findall(text):
        if uuid:
            pairs = ([part[i : i + 2] for i in range(0, len(part), 2)] for part in uuid.split("-"))
            first, *others = pairs
            tokens += [*first, *(token for pair in others for token in ("-", *pair))]
        elif digits:
            odd = len(digits) % 2
            tokens += [digits[:odd]] if odd else []
            tokens += [digits[i : i + 2] for i in range(odd, len(digits), 2)]
        elif spell_capitals and word.isupper():
            tokens += word
        else:
            tokens.append(word or character)
    return tokens


class Vocabulary:
    """Tokens of texts."""

    def __init__(
        self,
        texts: Iterable[str],  # all their words are known
        background: Iterable[str] = (),  # sentences whose most frequent words are known
        num_frequent: int = 0,  # number of these words
        *,
        spell_capitals: bool = False,  # whether words in capitals, random codes, are letters
    ) -> None:
        self._spell_capitals = spell_capitals
        known = {token: None for text in texts for token in _tokenize(text, spell_capitals)}
        others = (token for text in background for token in _tokenize(text, spell_capitals))
        counts = Counter(token for token in others if token not in known)
        known |= dict.fromkeys(token for token, _ in counts.most_common(num_frequent))
        self._index = {token: index for index, token in enumerate((UNKNOWN, *known))}

    def __len__(self) -> int:
        return len(self._index)

    def __call__(self, text: str) -> list[int]:
        """Return the token ids of a text."""
        return [self._index.get(token, 0) for token in _tokenize(text, self._spell_capitals)]


class Background:
    """Sentences of a background as tokens, repeated from the first token after the last."""

    def __init__(self, vocabulary: Vocabulary, text: Iterable[str]) -> None:
        encoded = [tokens for sentence in text if (tokens := vocabulary(sentence))]
        sizes = torch.tensor([0, *map(len, encoded)])
        self.tokens = torch.tensor([token for tokens in encoded for token in tokens])
        self.sentence_starts = sizes.cumsum(0)[:-1]

    def read(self, start: int, count: int) -> list[int]:
        """Return ``count`` tokens from the index ``start``."""
        return self.tokens[torch.arange(start, start + count) % len(self.tokens)].tolist()

    def sentence_start(self, start: int, offset: int) -> int:
        """Return the offset from ``start`` of the sentence that contains the token at ``offset``.

        The offset is 0 if that sentence begins before ``start``.
        """
        index = (start + offset) % len(self.tokens)
        sentence = int(torch.searchsorted(self.sentence_starts, index, right=True)) - 1
        return max(0, offset - (index - int(self.sentence_starts[sentence])))


def insert_sentences(
    parts: tuple[Sequence[list[int]], list[int], list[int]],
    background: Background,
    depths: Sequence[float],
    *,
    start: int,
    length: int,
) -> list[int]:
    """Return background tokens with sentences inserted, the question and the answer.

    ``parts`` are the token ids of the sentences, of the question and of the answer. A sentence is
    inserted before the background sentence at its depth, a fraction of the background. Depths
    ascend. ``length`` is the number of tokens in total.
    """
    inserted, question, answer = parts
    fixed = sum(map(len, inserted)) + len(question) + len(answer)
    num_background = length - fixed
    if num_background < 0:
        raise ValueError(
            f"{length} tokens are too few: the sentences, the question and the answer have {fixed}"
        )
    positions: list[int] = []
    for depth in depths:
        position = num_background
        if depth < 1 and num_background:
            offset = min(int(depth * num_background), num_background - 1)
            position = background.sentence_start(start, offset)
        positions.append(max(position, *positions[-1:], 0))
    text, _ = insert_at(background.read(start, num_background), inserted, positions)
    return text + question + answer


@lru_cache(maxsize=2)
def _local_sentences(heldout: bool) -> tuple[str, ...]:
    return sentences(load_text(), heldout=heldout)


@lru_cache(maxsize=8)
def _background(vocabulary: Vocabulary, kind: str, heldout: bool) -> Background:
    text = FILLER if kind == "filler" else _local_sentences(heldout)
    return Background(vocabulary, text)


def _question_batch(
    vocabulary: Vocabulary,
    questions: Iterable[Question],
    background: Background,
    depths: Callable[[int], Sequence[float]],
    draw: Dice,
    length: int,
    *,
    random_start: bool = True,
) -> Batch:
    """Encode questions in background text that begins at a random sentence."""
    starts, texts = background.sentence_starts, []
    for inserted, question, answer in questions:
        parts = [vocabulary(text) for text in inserted], vocabulary(question), vocabulary(answer)
        start = int(starts[draw.below(len(starts))]) if random_start else 0
        tokens = insert_sentences(
            parts, background, depths(len(inserted)), start=start, length=length
        )
        texts.append((tokens, len(parts[-1])))
    return label_answers(texts, length)


# -- needles ---------------------------------------------------------------------------------------


def _needle(name: NeedleName, generator: torch.Generator) -> Question:
    """Draw a needle of `recollect.tasks.needles` with its question and its value."""
    kind: NeedleName = "uuid" if name == "uuid" else "number"
    (prompt,) = needle_prompts(NeedleConfig(name=kind, length=300), ("-",), 1, generator)
    start = prompt.places[0]
    needle = prompt.text[start : prompt.text.index(". ", start) + 1]
    return (needle,), prompt.text[prompt.text.rindex("What is") :], prompt.answer


@lru_cache(maxsize=4)
def needle_vocabulary(num_frequent: int) -> Vocabulary:
    """Return all words of the needles, and the most frequent words of the local text."""
    generator = torch.Generator().manual_seed(0)
    kinds: tuple[NeedleName, ...] = ("number", "uuid")
    questions = [_needle(kind, generator) for _ in range(500) for kind in kinds]
    texts = [text for (needle,), *others in questions for text in (needle, *others)]
    return Vocabulary([*texts, *FILLER], _local_sentences(False), num_frequent)


def needle_batch(
    vocabulary: Vocabulary,
    name: NeedleName,
    length: int,
    batch: int,
    generator: torch.Generator,
    *,
    heldout: bool = False,
) -> Batch:
    """Draw needles in background text as inputs and labels, as `recollect.tasks.label_answers`."""
    draw = Dice(generator)
    is_passkey = name == "passkey"
    return _question_batch(
        vocabulary,
        (_needle(name, generator) for _ in range(batch)),
        _background(vocabulary, "filler" if is_passkey else "text", heldout),
        lambda _: [draw.below(_NUM_DEPTHS) / (_NUM_DEPTHS - 1)],
        draw,
        length,
        random_start=not is_passkey,
    )


# -- stories ---------------------------------------------------------------------------------------


def _story_question(story: Story) -> Question:
    return story.facts, f"{story.question} Answer:", f"{story.answer}."


@lru_cache(maxsize=4)
def story_vocabulary(task: int, num_frequent: int) -> Vocabulary:
    """Return all words of a task's stories, and the most frequent words of the local text."""
    samples = stories(StoryConfig(task=task), 300, torch.Generator().manual_seed(0))
    texts = [text for facts, *others in map(_story_question, samples) for text in (*facts, *others)]
    return Vocabulary(texts, _local_sentences(False), num_frequent)


def story_batch(
    vocabulary: Vocabulary,
    config: StoryConfig,
    length: int,
    batch: int,
    generator: torch.Generator,
    *,
    heldout: bool = False,
) -> Batch:
    """Draw stories in background text, sentence by sentence in order.

    The length of the configuration is ignored.
    """
    draw = Dice(generator)
    return _question_batch(
        vocabulary,
        map(_story_question, stories(config, batch, generator)),
        _background(vocabulary, "text", heldout),
        lambda count: sorted(draw.fraction() for _ in range(count)),
        draw,
        length,
    )
