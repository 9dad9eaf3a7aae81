"""Variables, and words that come often: three tasks of RULER (Hsieh et al. 2024) beside needles.

| task | text | question |
|---|---|---|
| variable tracking (VT) | ``VAR A = 12345``, ``VAR B = VAR A``, filler | which have the value |
| common words (CWE) | a numbered list: ten words often, others seldom | the ten |
| frequent words (FWE) | words whose counts fall as rank^(−α), and dots | the three most frequent |

The structure follows RULER, words and sentences are our own: words are made of syllables, so that
no model knows some better than others, and scores compare models with each other, not with
RULER's. An answer names everything that is asked for, with a comma between two.
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
_DOTS = "...."  # the most frequent of all, and no word


@dataclass(frozen=True, kw_only=True)
class VariableConfig(Validated):
    """Chains of assignments.

    Args:
        hops: assignments of one variable to another in a chain.
        chains: how many; one is asked for.
        length: bytes of the prompt with its answer.

    Raises:
        ValueError: a number out of range, naming it.

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
    """Words that come often in a list.

    Args:
        words: how many are common.
        often: how often each of them comes.
        seldom: how often each other word comes, less than ``often``.
        length: bytes of the prompt with its answer, at most.

    Raises:
        ValueError: a number out of range, naming it.

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
    def least(self) -> int:
        """Bytes in which the common words fit, with a margin for the question."""
        return 300 + (self.often + 1) * self.words * 12


@dataclass(frozen=True, kw_only=True)
class FrequentWordsConfig(Validated):
    """Words whose counts fall with their rank.

    Args:
        alpha: α > 1; a word of rank r comes N r^(−α) / ζ(α) times among N.
        words: how many are asked for; the dots, which are of rank 1, are not among them.
        length: bytes of the prompt with its answer, at most.

    Raises:
        ValueError: a number out of range, naming it.

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
        config: how many chains of how many hops.
        batch: how many prompts.
        generator: the only source of randomness, on the CPU.

    Raises:
        ValueError: a negative batch; a length that does not hold the assignments.

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
    while len(names) < config.chains * (config.hops + 1):
        name = "".join(dice.one(string.ascii_uppercase) for _ in range(5))
        names += [name] if name not in names else []
    while len(numbers) < config.chains:
        value = str(10_000 + dice.below(90_000))
        numbers += [value] if value not in numbers else []
    placed: list[tuple[float, str]] = []
    for chain, value in enumerate(numbers):
        own = names[chain * (config.hops + 1) :][: config.hops + 1]
        lines = [f"VAR {own[0]} = {value}."]
        lines += [f"VAR {b} = VAR {a}." for a, b in itertools.pairwise(own)]
        # Sorted: a variable is assigned only after the one that it is assigned.
        placed += zip(sorted(dice.share() for _ in lines), lines, strict=True)
    placed.sort(key=lambda one: one[0])
    return hide(
        [line for _, line in placed],
        [depth for depth, _ in placed],
        FILLER,
        start=0,
        head="Variables are assigned in this text. Follow the assignments.",
        question=(
            f"Which variables have the value {numbers[0]}? The {config.hops + 1} variables with "
            f"the value {numbers[0]} are"
        ),
        answer=f"{', '.join(names[: config.hops + 1])}.",
        length=config.length,
    )


def common_words(
    config: CommonWordsConfig, batch: int, generator: torch.Generator
) -> tuple[Prompt, ...]:
    """Draw prompts of common words; text and answer have at most ``length`` bytes together.

    Args:
        config: how many words, how often they come.
        batch: how many prompts.
        generator: the only source of randomness, on the CPU.

    Raises:
        ValueError: a negative batch; a length that does not hold the common words.

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
    room = config.length - len(head) - len(question) - len(answer) - 3
    listed = [word for word in common for _ in range(config.often)]
    while _listed(len(listed) + config.seldom) <= room:
        listed += [_word(dice, known)] * config.seldom
    if _listed(len(listed)) > room:
        raise ValueError(
            f"common words: a length of {config.length} bytes does not hold {config.words} words "
            f"{config.often} times; give at least {config.length + _listed(len(listed)) - room}"
        )
    order = dice.order(len(listed))
    items = " ".join(f"{place}. {listed[i]}" for place, i in enumerate(order, 1))
    return Prompt(text=f"{head} {items} {question}", answer=answer, places=())


def _listed(count: int) -> int:
    """Bytes of a numbered list of so many words: a word of six letters, a number, three signs."""
    digits = sum(max(0, count - 10**k + 1) for k in range(len(str(count))))
    return digits + count * (6 + len(". ") + len(" ")) - 1


def frequent_words(
    config: FrequentWordsConfig, batch: int, generator: torch.Generator
) -> tuple[Prompt, ...]:
    """Draw prompts of frequent words; text and answer have at most ``length`` bytes together.

    Args:
        config: how counts fall, how many words are asked for.
        batch: how many prompts.
        generator: the only source of randomness, on the CPU.

    Raises:
        ValueError: a negative batch; a length in which counts would be equal.

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
    taken = len(head) + len(question) + 8 * config.words + 3
    total = (config.length - taken) // 7  # a word of six letters and a space; dots are shorter
    zeta = sum(r**-config.alpha for r in range(1, total + 1))
    counts: list[int] = []
    while (left := total - sum(counts)) > 0:
        counts.append(min(left, max(1, int(total * (len(counts) + 1) ** -config.alpha / zeta))))
    asked = counts[: config.words + 2]  # the dots, what is asked for, and the next after it
    if len(asked) < config.words + 2 or len(set(asked)) < len(asked):
        raise ValueError(
            f"frequent words: a length of {config.length} bytes is too short to tell the "
            f"{config.words} most frequent from the next; give a longer one"
        )
    known: set[str] = set()
    words = [_DOTS, *(_word(dice, known) for _ in counts[1:])]
    drawn = [word for word, count in zip(words, counts, strict=True) for _ in range(count)]
    text = " ".join(drawn[i] for i in dice.order(len(drawn)))
    answer = f"{', '.join(words[1 : config.words + 1])}."
    return Prompt(text=f"{head} {text} {question}", answer=answer, places=())


def _word(dice: Dice, known: set[str]) -> str:
    """A word of three syllables that is not known yet, and is then."""
    if len(known) >= len(_SYLLABLES) ** 3 // 2:
        raise ValueError(f"there are no more than {len(known):,} words: give a shorter length")
    while (word := "".join(dice.one(_SYLLABLES) for _ in range(3))) in known:
        pass
    known.add(word)
    return word
