"""Variable tracking and frequent words: three tasks of RULER (Hsieh et al. 2024).

| task | text | answer |
|---|---|---|
| variable tracking (VT) | ``VAR A = 12345``, ``VAR B = VAR A``, filler | variables with a value |
| common words (CWE) | a numbered list of ten frequent and many rare words | the ten words |
| frequent words (FWE) | words with counts ∝ rank^(−α), and dots | the three most frequent words |

The structure follows RULER. Words consist of random syllables, so that all words are equally
unfamiliar to a model. Scores compare models with each other and not with RULER's. Answers are
lists, with a comma between two entries.
"""

from __future__ import annotations

import itertools
import string
from dataclasses import dataclass

import torch

from recollect.fields import Validated, int_check, integer, number, validate, validated_field
from recollect.tasks.needles import FILLER
from recollect.tasks.prompts import Dice, Prompt, hide

__all__ = [
    "CommonWordsConfig",
    "FrequentWordsConfig",
    "VariableConfig",
    "common_words",
    "frequent_words",
    "variable_prompts",
]

_SYLLABLES = tuple(a + b for a in "bdfgjklmnprstvz" for b in "aeiou")
_DOTS = "...."  # the most frequent string, which does not count as a word


@dataclass(frozen=True, kw_only=True)
class VariableConfig(Validated):
    """Chains of assignments.

    Args:
        hops: number of assignments of one variable to another in a chain.
        chains: number of chains; the question is about one of them.
        length: number of bytes of the prompt with its answer.

    Raises:
        ValueError: a number is out of range; names the number.

    Examples:
        >>> config = rc.tasks.VariableConfig(hops=2, length=600)
        >>> (prompt,) = rc.tasks.variable_prompts(config, 1, torch.Generator().manual_seed(0))
        >>> len(prompt.answer.split())  # the chain's first variable, and two hops
        3
    """

    hops: int = validated_field(4, int_check(1, 50))
    chains: int = validated_field(1, int_check(1, 50))
    length: int = integer(1024, at_least=300)


@dataclass(frozen=True, kw_only=True)
class CommonWordsConfig(Validated):
    """Words that are common in a list.

    Args:
        words: number of common words.
        often: count of each common word.
        seldom: count of each other word, less than ``often``.
        length: maximum number of bytes of the prompt with its answer.

    Raises:
        ValueError: a number is out of range; names the number.

    Examples:
        >>> config = rc.tasks.CommonWordsConfig(words=3, often=6, seldom=1, length=1024)
        >>> (prompt,) = rc.tasks.common_words(config, 1, torch.Generator().manual_seed(0))
        >>> len(prompt.answer.split())
        3
    """

    words: int = validated_field(10, int_check(1, 1000))
    often: int = integer(30, at_least=2)
    seldom: int = integer(3, at_least=1)
    length: int = integer(8192, at_least=300)

    def validate(self) -> None:
        validate(self.field_label("seldom"), int_check(1, self.often - 1), self.seldom)

    @property
    def min_length(self) -> int:
        """Number of bytes for the common words, with a margin for the question."""
        return 300 + (self.often + 1) * self.words * 12


@dataclass(frozen=True, kw_only=True)
class FrequentWordsConfig(Validated):
    """Words with counts that decrease with their rank.

    Args:
        alpha: α > 1; a word of rank r has a count of N r^(−α) / ζ(α) among N words.
        words: number of words in the answer, without the dots of rank 1.
        length: maximum number of bytes of the prompt with its answer.

    Raises:
        ValueError: a number is out of range; names the number.

    Examples:
        >>> config = rc.tasks.FrequentWordsConfig(words=2, length=1024)
        >>> (prompt,) = rc.tasks.frequent_words(config, 1, torch.Generator().manual_seed(0))
        >>> len(prompt.text + prompt.answer) <= 1024
        True
    """

    alpha: float = number(2.0, above=1.0, at_most=10.0)
    words: int = validated_field(3, int_check(1, 20))
    length: int = integer(2048, at_least=300)


def variable_prompts(
    config: VariableConfig, batch: int, generator: torch.Generator
) -> tuple[Prompt, ...]:
    """Draw prompts of variable tracking; text and answer have ``length`` bytes together.

    Args:
        config: configuration of the prompts.
        batch: number of prompts.
        generator: the only source of randomness, on the CPU.

    Raises:
        ValueError: ``batch`` is negative, or the length is too short for the assignments.

    Examples:
        >>> draw = torch.Generator().manual_seed(0)
        >>> config = rc.tasks.VariableConfig(hops=2, length=400)
        >>> (prompt,) = rc.tasks.variable_prompts(config, 1, draw)
        >>> len(prompt.answer.rstrip(".").split(", ")), prompt.text.count("VAR ")
        (3, 5)
    """
    validate("variable tracking: batch", int_check(), batch)
    dice = Dice(generator)
    return tuple(_variables(config, dice) for _ in range(batch))


def _variables(config: VariableConfig, dice: Dice) -> Prompt:
    names: list[str] = []
    numbers: list[str] = []
    num_variables = config.hops + 1
    while len(names) < config.chains * num_variables:
        name = "".join(dice.one(string.ascii_uppercase) for _ in range(5))
        names += [name] if name not in names else []
    while len(numbers) < config.chains:
        value = str(10_000 + dice.below(90_000))
        numbers += [value] if value not in numbers else []
    assignments: list[tuple[float, str]] = []
    for index, value in enumerate(numbers):
        chain = names[index * num_variables :][:num_variables]
        lines = [f"VAR {chain[0]} = {value}."]
        lines += [f"VAR {b} = VAR {a}." for a, b in itertools.pairwise(chain)]
        # Depths are sorted, because an assignment follows the assignment of its right side.
        assignments += zip(sorted(dice.fraction() for _ in lines), lines, strict=True)
    assignments.sort(key=lambda assignment: assignment[0])
    return hide(
        [line for _, line in assignments],
        [depth for depth, _ in assignments],
        FILLER,
        start=0,
        head="Variables are assigned in this text. Follow the assignments.",
        question=(
            f"Which variables have the value {numbers[0]}? The {num_variables} variables with "
            f"the value {numbers[0]} are"
        ),
        answer=f"{', '.join(names[:num_variables])}.",
        length=config.length,
    )


def common_words(
    config: CommonWordsConfig, batch: int, generator: torch.Generator
) -> tuple[Prompt, ...]:
    """Draw prompts of common words; text and answer have at most ``length`` bytes together.

    Args:
        config: configuration of the prompts.
        batch: number of prompts.
        generator: the only source of randomness, on the CPU.

    Raises:
        ValueError: ``batch`` is negative, or the length is too short for the common words.

    Examples:
        >>> draw = torch.Generator().manual_seed(0)
        >>> config = rc.tasks.CommonWordsConfig(words=2, often=4, seldom=1, length=500)
        >>> (prompt,) = rc.tasks.common_words(config, 1, draw)
        >>> [prompt.text.split().count(word) for word in prompt.answer.rstrip(".").split(", ")]
        [4, 4]
    """
    validate("common words: batch", int_check(), batch)
    dice = Dice(generator)
    return tuple(_common(config, dice) for _ in range(batch))


def _common(config: CommonWordsConfig, dice: Dice) -> Prompt:
    head = "Below is a numbered list of words. Remember the words that come most often."
    question = f"Which {config.words} words are most common in the list? They are"
    known: set[str] = set()
    common = [_word(dice, known) for _ in range(config.words)]
    answer = f"{', '.join(common)}."
    max_bytes = config.length - len(head) - len(question) - len(answer) - 3
    words = [word for word in common for _ in range(config.often)]
    while _list_bytes(len(words) + config.seldom) <= max_bytes:
        words += [_word(dice, known)] * config.seldom
    if (missing := _list_bytes(len(words)) - max_bytes) > 0:
        raise ValueError(
            f"common words: a length of {config.length} bytes is too short for {config.words} "
            f"words, {config.often} times each; give at least {config.length + missing}"
        )
    order = dice.order(len(words))
    items = " ".join(f"{number}. {words[i]}" for number, i in enumerate(order, 1))
    return Prompt(text=f"{head} {items} {question}", answer=answer, places=())


def _list_bytes(count: int) -> int:
    """Return the bytes of a numbered list: a word of six letters, a number and three signs each."""
    digits = sum(max(0, count - 10**k + 1) for k in range(len(str(count))))
    return digits + count * (6 + len(". ") + len(" ")) - 1


def frequent_words(
    config: FrequentWordsConfig, batch: int, generator: torch.Generator
) -> tuple[Prompt, ...]:
    """Draw prompts of frequent words; text and answer have at most ``length`` bytes together.

    Args:
        config: configuration of the prompts.
        batch: number of prompts.
        generator: the only source of randomness, on the CPU.

    Raises:
        ValueError: ``batch`` is negative, or the length is too short for different counts.

    Examples:
        >>> draw = torch.Generator().manual_seed(0)
        >>> config = rc.tasks.FrequentWordsConfig(length=2000)
        >>> (prompt,) = rc.tasks.frequent_words(config, 1, draw)
        >>> first, second, third = prompt.answer.rstrip(".").split(", ")
        >>> words = prompt.text.split()
        >>> words.count(first) > words.count(second) > words.count(third)
        True
    """
    validate("frequent words: batch", int_check(), batch)
    dice = Dice(generator)
    return tuple(_frequent(config, dice) for _ in range(batch))


def _frequent(config: FrequentWordsConfig, dice: Dice) -> Prompt:
    head = "Count how often each word of this text comes. Dots are no word."
    question = f"Which {config.words} words come most often? They are"
    fixed = len(head) + len(question) + 8 * config.words + 3
    total = (config.length - fixed) // 7  # a word of six letters and a space; dots are shorter
    zeta = sum(r**-config.alpha for r in range(1, total + 1))
    counts: list[int] = []
    while (remainder := total - sum(counts)) > 0:
        count = max(1, int(total * (len(counts) + 1) ** -config.alpha / zeta))
        counts.append(min(remainder, count))
    decisive = counts[: config.words + 2]  # the dots, the words of the answer, and the next word
    if len(decisive) < config.words + 2 or len(set(decisive)) < len(decisive):
        raise ValueError(
            f"frequent words: a length of {config.length} bytes is too short for different counts "
            f"of the {config.words + 1} most frequent words; give a longer one"
        )
    known: set[str] = set()
    words = [_DOTS, *(_word(dice, known) for _ in counts[1:])]
    tokens = [word for word, count in zip(words, counts, strict=True) for _ in range(count)]
    text = " ".join(tokens[i] for i in dice.order(len(tokens)))
    answer = f"{', '.join(words[1 : config.words + 1])}."
    return Prompt(text=f"{head} {text} {question}", answer=answer, places=())


def _word(dice: Dice, known: set[str]) -> str:
    """Return a new word of three syllables, and add it to the known words."""
    if len(known) >= len(_SYLLABLES) ** 3 // 2:
        raise ValueError(f"there are no more than {len(known):,} words: give a shorter length")
    while (word := "".join(dice.one(_SYLLABLES) for _ in range(3))) in known:
        pass
    known.add(word)
    return word
