"""A question in a long text: what stands where, as text and as bytes.

Tasks that hide sentences in background text (`needles`, `stories`) differ in the sentences. Here is
what they share: sentences of a local text, where among them the others are put, the exact length,
and which bytes a model is asked for.
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

_BORDER = re.compile(r"(?<=[.!?])\s+(?=[A-Z])")


def sentences(corpus: TextCorpus, *, heldout: bool = False) -> tuple[str, ...]:
    r"""The sentences of a text, in order: what hidden ones are put among.

    Args:
        corpus: a text of `recollect.tasks.load_text`.
        heldout: those of the held-out part, to test on text that was not trained on.

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
    found = (" ".join(s.split()) for block in text.split("\n\n") for s in _BORDER.split(block))
    return tuple(s for s in found if s)


class Dice:
    """Choices of a torch generator, for tasks that are made of words.

    Args:
        generator: on the CPU; every choice takes a number from it.
    """

    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator

    def below(self, count: int) -> int:
        """A whole number in 0..count−1."""
        return int(torch.randint(count, (), generator=self._generator))

    def one(self, things: Sequence[str]) -> str:
        """One of several things."""
        return things[self.below(len(things))]

    def order(self, count: int) -> list[int]:
        """The numbers 0..count−1 in random order."""
        return torch.randperm(count, generator=self._generator).tolist()

    def some(self, things: Sequence[str], count: int) -> list[str]:
        """``count`` different things in random order."""
        return [things[i] for i in self.order(len(things))[:count]]

    def share(self) -> float:
        """A number in [0, 1)."""
        return float(torch.rand((), generator=self._generator, dtype=torch.float64))


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """A text that ends in a question, and its answer.

    Attributes:
        text: the context and the question, up to where the answer begins.
        answer: what should follow, word for word.
        places: where each hidden sentence begins in ``text``, in order.

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

    Args:
        hidden: sentences to find, in their order.
        depths: for each, the share of the background before it, 0 to 1, not decreasing.
        background: sentences, read from ``start`` on and again from the first after the last.
        start: where in the background to begin.
        head: what is said before the context.
        question: the end of the text; a space and the answer follow.
        answer: what should follow.
        length: bytes of the text, the space and the answer; background is cut at its front.

    Raises:
        ValueError: background is empty, or the hidden sentences alone are longer.
    """
    if not background:
        raise ValueError("hide: the background has no sentences; give a longer text")
    lead = f"{head} " if head else ""
    fixed = sum(len(s.encode()) + 1 for s in hidden)
    fixed += len(lead.encode()) + len(question.encode()) + 1 + len(answer.encode())
    room = length - fixed
    if room < 0:
        raise ValueError(
            f"a length of {length} bytes is too short: the sentences to find and the question "
            f"take {fixed}"
        )
    filler: list[str] = []
    size, at = 0, start
    while size < room:
        sentence = background[at % len(background)]
        filler.append(sentence)
        size, at = size + len(sentence.encode()) + 1, at + 1
    _cut(filler, size - room)
    positions = [min(len(filler), int(depth * (len(filler) + 1))) for depth in depths]
    merged, indices = insert_at(filler, [[sentence] for sentence in hidden], positions)
    places = tuple(len(lead) + sum(len(s) + 1 for s in merged[:index]) for index in indices)
    text = lead + "".join(f"{sentence} " for sentence in merged)
    return Prompt(text=text + question, answer=answer, places=places)


def insert_at(
    background: Sequence[T], inserted: Sequence[Sequence[T]], positions: Sequence[int]
) -> tuple[list[T], list[int]]:
    """Insert sequences into a background, and return the result and the index of each sequence.

    Args:
        background: sentences or tokens.
        inserted: sequences of sentences or tokens.
        positions: number of background elements before each sequence, in ascending order.
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


def _cut(filler: list[str], surplus: int) -> None:
    """Take bytes away from the front of sentences that a space follows each."""
    while surplus > 0:
        data = filler[0].encode()
        if surplus > len(data):
            del filler[0]
            surplus -= len(data) + 1
            continue
        # A cut inside a character leaves bytes that are no text: spaces stand for them.
        kept = data[surplus:].decode("utf-8", "ignore")
        filler[0] = " " * (len(data) - surplus - len(kept.encode())) + kept
        return


def as_bytes(prompts: Sequence[Prompt], length: int) -> tuple[Tensor, Tensor]:
    """Inputs and labels of prompts that have ``length`` bytes with their answers.

    Returns:
        int64 ``[B, length − 1]``: the bytes but the last, and the next ones where they belong to
        the answer, :data:`IGNORE` elsewhere. An answer is right when all of its bytes are.
    """
    texts = [(list(f"{p.text} {p.answer}".encode()), len(p.answer.encode())) for p in prompts]
    return label_answers(texts, length)


def label_answers(texts: Sequence[tuple[Sequence[int], int]], length: int) -> tuple[Tensor, Tensor]:
    """Return inputs and labels of texts of one length, whose last tokens are the answer.

    Args:
        texts: tokens, and the number of tokens of the answer.
        length: number of tokens of every text.

    Returns:
        int64 ``[B, length − 1]``: all tokens but the last, and the next tokens at the answer,
        :data:`IGNORE` elsewhere.
    """
    tokens = torch.zeros(len(texts), length, dtype=torch.int64)
    labels = torch.full_like(tokens, IGNORE)
    for row, (text, size) in enumerate(texts):
        tokens[row] = torch.tensor(text)
        labels[row, -size:] = tokens[row, -size:]
    return tokens[:, :-1], labels[:, 1:]
