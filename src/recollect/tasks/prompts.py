"""Prompts with hidden sentences and a question, as text and as bytes.

Shared by tasks that hide sentences in background text (`needles`, `stories`): split a text into
sentences, insert sentences at given depths, reach an exact length, and label the bytes of the
answer.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from recollect.tasks.mqar import IGNORE
from recollect.tasks.text import TextCorpus

__all__ = ["Dice", "Prompt", "as_bytes", "hide", "insert_at", "label_answers", "sentences"]

T = TypeVar("T")

_SENTENCE_BOUNDARY = re.compile(r"(?<=[.!?])\s+(?=[A-Z])")


def sentences(corpus: TextCorpus, *, heldout: bool = False) -> tuple[str, ...]:
    r"""Return the sentences of a text, in order, as background for hidden sentences.

    Args:
        corpus: a text of `recollect.tasks.load_text`.
        heldout: whether to use the held-out part instead of the training part.

    Examples:
        >>> from pathlib import Path
        >>> letters = "abcdefghijklmnop"
        >>> lines = [f"The {a}{b} is near the {b}{a}. It waits." for a in letters for b in letters]
        >>> _ = Path("text.txt").write_text("\n\n".join(lines))
        >>> corpus = rc.tasks.load_text("text.txt")
        >>> rc.tasks.sentences(corpus)[:2]
        ('The ab is near the ba.', 'It waits.')
    """
    part = corpus.heldout if heldout else corpus.train
    text = bytes(part.tolist()).decode("utf-8", "replace")
    parts = (s for block in text.split("\n\n") for s in _SENTENCE_BOUNDARY.split(block))
    return tuple(sentence for part in parts if (sentence := " ".join(part.split())))


class Dice:
    """Random choices for tasks of words, from a generator on the CPU."""

    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator

    def below(self, count: int) -> int:
        """Return an integer in 0..count−1."""
        return int(torch.randint(count, (), generator=self._generator))

    def one(self, items: Sequence[str]) -> str:
        """Return one of several strings."""
        return items[self.below(len(items))]

    def order(self, count: int) -> list[int]:
        """Return the numbers 0..count−1 in random order."""
        return torch.randperm(count, generator=self._generator).tolist()

    def sample(self, items: Sequence[str], count: int) -> list[str]:
        """Return ``count`` different strings in random order."""
        return [items[i] for i in self.order(len(items))[:count]]

    def fraction(self) -> float:
        """Return a number in [0, 1)."""
        return float(torch.rand((), generator=self._generator, dtype=torch.float64))


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """A text that ends in a question, and its answer.

    Attributes:
        text: context and question, up to the answer.
        answer: expected continuation, word for word.
        places: index in ``text`` of the first character of each hidden sentence, in order.

    Examples:
        >>> config, draw = rc.tasks.NeedleConfig(length=600), torch.Generator().manual_seed(0)
        >>> (prompt,) = rc.tasks.needle_prompts(config, [], 1, draw)
        >>> prompt.answer.rstrip(".") in prompt.text[prompt.places[0] :]
        True
    """

    text: str
    answer: str
    places: tuple[int, ...]


def hide(
    hidden: Sequence[str],
    depths: Sequence[float],
    background: Sequence[str],
    *,
    start: int,
    head: str,
    question: str,
    answer: str,
    length: int,
) -> Prompt:
    """Put sentences into background text so that text and answer have ``length`` bytes together.

    ``depths`` are the fractions of the background before each hidden sentence, not decreasing. The
    background is used from its sentence ``start`` on in a cycle, and its beginning is cut off. The
    text begins with ``head`` and ends with the question. A space and the answer follow.
    """
    if not background:
        raise ValueError("hide: the background has no sentences; give a longer text")
    lead = f"{head} " if head else ""
    fixed = sum(len(s.encode()) + 1 for s in hidden)
    fixed += len(lead.encode()) + len(question.encode()) + 1 + len(answer.encode())
    room = length - fixed
    if room < 0:
        raise ValueError(
            f"a length of {length} bytes is too short: the hidden sentences and the question "
            f"take {fixed}"
        )
    filler: list[str] = []
    size = 0
    while size < room:
        filler.append(background[(start + len(filler)) % len(background)])
        size += len(filler[-1].encode()) + 1
    _remove_bytes(filler, size - room)
    positions = [min(len(filler), int(depth * (len(filler) + 1))) for depth in depths]
    merged, indices = insert_at(filler, [[sentence] for sentence in hidden], positions)
    places = tuple(len(lead) + sum(len(s) + 1 for s in merged[:index]) for index in indices)
    text = lead + "".join(f"{sentence} " for sentence in merged)
    return Prompt(text=text + question, answer=answer, places=places)


def insert_at(
    background: Sequence[T], inserted: Sequence[Sequence[T]], positions: Sequence[int]
) -> tuple[list[T], list[int]]:
    """Insert sequences into a background, and return the result and the index of each sequence.

    ``positions`` are the numbers of background elements before each sequence, in ascending order.
    """
    merged: list[T] = []
    indices: list[int] = []
    end = 0
    for items, position in zip(inserted, positions, strict=True):
        merged += background[end:position]
        indices.append(len(merged))
        merged += items
        end = position
    return [*merged, *background[end:]], indices


def _remove_bytes(filler: list[str], count: int) -> None:
    """Remove bytes from the front of sentences, each with a space after it."""
    while count > 0:
        data = filler[0].encode()
        if count > len(data):
            del filler[0]
            count -= len(data) + 1
            continue
        # Spaces replace the bytes of a character that is cut.
        text = data[count:].decode("utf-8", "ignore")
        filler[0] = " " * (len(data) - count - len(text.encode())) + text
        return


def as_bytes(prompts: Sequence[Prompt], length: int) -> tuple[Tensor, Tensor]:
    """Return inputs and labels, as `label_answers`, of prompts with ``length`` bytes.

    An answer is correct if all of its bytes are.
    """
    texts = [(list(f"{p.text} {p.answer}".encode()), len(p.answer.encode())) for p in prompts]
    return label_answers(texts, length)


def label_answers(texts: Sequence[tuple[Sequence[int], int]], length: int) -> tuple[Tensor, Tensor]:
    """Return inputs and labels of texts of one length, with the number of tokens of each answer.

    Both are int64 ``[B, length − 1]``: all tokens but the last, and the next tokens at the answer,
    :data:`IGNORE` elsewhere. The answer is at the end of the text.
    """
    tokens = torch.zeros(len(texts), length, dtype=torch.int64)
    labels = torch.full_like(tokens, IGNORE)
    for row, (text, size) in enumerate(texts):
        tokens[row] = torch.tensor(text)
        labels[row, -size:] = tokens[row, -size:]
    return tokens[:, :-1], labels[:, 1:]
