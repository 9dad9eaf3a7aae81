"""Text as words, so that a few hundred tokens hold a text, and sentences hidden among them.

Each word that is known is a token, and each other mark. Digits are read in pairs, as the tokenizers
of the papers read them in groups: a number of seven digits is four tokens, a UUID sixteen and its
four dashes. Codes in capitals may be read letter by letter. All words that are not known are one
token.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from recollect.tasks.mqar import IGNORE
from recollect.tasks.needles import FILLER
from recollect.tasks.prompts import sentences
from recollect.tasks.text import load_text

__all__ = ["Asked", "Haystack", "Words", "batch_of", "haystack", "hidden_among"]

_UUID = r"\b[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\b"
_MARKS = re.compile(rf"({_UUID})|([0-9]+)|([A-Za-z]+)|([^\sA-Za-z0-9])")
UNKNOWN = "<unknown>"
"""What all words are that are not known."""


def _marks(text: str, spelled: bool = False) -> list[str]:
    """Words, pairs of digits and other marks, in order; words in capitals as letters if asked."""
    found: list[str] = []
    for uuid, digits, word, mark in _MARKS.findall(text):
        if uuid:
            parts = uuid.split("-")
            for index, part in enumerate(parts):
                found += ["-"] if index else []
                found += [part[i : i + 2] for i in range(0, len(part), 2)]
        elif digits:
            odd = len(digits) % 2
            found += [digits[:odd]] if odd else []
            found += [digits[i : i + 2] for i in range(odd, len(digits), 2)]
        elif spelled and word.isupper():
            found += word
        else:
            found.append(word or mark)
    return found


class Words:
    """Tokens of a text.

    Args:
        needed: texts whose words are all known.
        text: sentences, of whose words the most frequent are known too.
        frequent: how many of these.
        spelled: whether words in capitals, drawn as codes, are read letter by letter.
    """

    def __init__(
        self,
        needed: Iterable[str],
        text: Iterable[str] = (),
        frequent: int = 0,
        *,
        spelled: bool = False,
    ) -> None:
        self._spelled = spelled
        known = {mark: None for one in needed for mark in _marks(one, spelled)}
        others = (mark for one in text for mark in _marks(one, spelled))
        counted = Counter(mark for mark in others if mark not in known)
        known |= dict.fromkeys(mark for mark, _ in counted.most_common(frequent))
        self._index = {mark: index for index, mark in enumerate((UNKNOWN, *known))}

    def __len__(self) -> int:
        return len(self._index)

    def __call__(self, text: str) -> list[int]:
        """The tokens of a text."""
        return [self._index.get(mark, 0) for mark in _marks(text, self._spelled)]


@dataclass(frozen=True, kw_only=True)
class Haystack:
    """Background text as tokens.

    Attributes:
        tokens: int64 ``[N]``, read as a ring.
        borders: where sentences begin, ascending.
    """

    tokens: Tensor
    borders: Tensor

    @classmethod
    def of(cls, words: Words, text: Sequence[str]) -> Haystack:
        """Sentences as tokens."""
        each = [found for sentence in text if (found := words(sentence))]
        sizes = torch.tensor([0, *(len(one) for one in each)])
        return cls(
            tokens=torch.tensor([token for one in each for token in one]),
            borders=sizes.cumsum(0)[:-1],
        )

    def piece(self, start: int, count: int) -> Tensor:
        """``count`` tokens from a place on, and from the first after the last."""
        return self.tokens[torch.arange(start, start + count) % len(self.tokens)]

    def border(self, start: int, at: int) -> int:
        """How many tokens after ``start`` the sentence begins in which the ``at``-th is."""
        size = len(self.tokens)
        here = (start + at) % size
        index = int(torch.searchsorted(self.borders, here, right=True)) - 1
        return max(0, at - (here - int(self.borders[index])))


@lru_cache(maxsize=2)
def _sentences(heldout: bool) -> tuple[str, ...]:
    return sentences(load_text(), heldout=heldout)


def haystack(kind: str, *, heldout: bool = False) -> tuple[str, ...]:
    """Sentences of background: ``"filler"``, one paragraph, or ``"text"``, of this machine."""
    return FILLER if kind == "filler" else _sentences(heldout)


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A question and its answer as tokens, with what tells it.

    Attributes:
        hidden: sentences to be put into background, in order.
        question, answer: what ends the text, and what should follow.
    """

    hidden: tuple[list[int], ...]
    question: list[int]
    answer: list[int]


def hidden_among(
    asked: Asked, hay: Haystack, depths: Sequence[float], *, start: int, length: int
) -> list[int]:
    """Tokens of background with the sentences among it, the question and the answer.

    Args:
        asked: what is hidden and asked.
        hay: the background. start: where in it to begin.
        depths: for each sentence, the share of background before it, not decreasing; it stands
            where the sentence of the background begins that is there.
        length: tokens of all.

    Raises:
        ValueError: no room.
    """
    fixed = sum(map(len, asked.hidden)) + len(asked.question) + len(asked.answer)
    room = length - fixed
    if room < 0:
        raise ValueError(f"{length} tokens do not hold the sentences and the question, {fixed}")
    filler = hay.piece(start, room).tolist()
    found: list[int] = []
    done = 0
    for sentence, depth in zip(asked.hidden, depths, strict=True):
        whole = depth >= 1 or room == 0
        at = max(done, room if whole else hay.border(start, min(int(depth * room), room - 1)))
        found += filler[done:at] + sentence
        done = at
    return found + filler[done:] + asked.question + asked.answer


def batch_of(texts: Sequence[tuple[list[int], int]]) -> tuple[Tensor, Tensor]:
    """Inputs and labels of texts of one length, whose last tokens are asked.

    Args:
        texts: tokens, and how many of them are the answer.

    Returns:
        int64 ``[B, length − 1]``: the tokens but the last, and the next ones where they belong to
        the answer, `recollect.tasks.IGNORE` elsewhere.
    """
    whole = torch.tensor([tokens for tokens, _ in texts])
    labels = torch.full_like(whole, IGNORE)
    for row, (_, asked) in enumerate(texts):
        labels[row, -asked:] = whole[row, -asked:]
    return whole[:, :-1], labels[:, 1:]
