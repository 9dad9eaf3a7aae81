"""Needles in a haystack: find sentences in a long text (the NIAH tasks of RULER).

| task | haystack | value |
|---|---|---|
| 1, ``passkey`` | one filler paragraph, repeated | a number of seven digits |
| 2, ``number`` | local text | a number of seven digits |
| 3, ``uuid`` | local text | a UUID |

One sentence, the needle, states the secret value of a key, and the question is about this key. Keys
are pairs of an adjective and a noun. There are 40 depths, evenly spaced from the beginning to the
end. The structure follows RULER (Hsieh et al. 2024), with other words and with a local text as the
haystack, so scores compare models with each other and not with RULER's. MIRAS table 3 and ATLAS
table 3 call the tasks S-NIAH-PK, -N and -W.

RULER's other kinds have more needles:

* ``keys``: several keys, and a question about one of them (multikey 1)
* ``distractors``: a haystack of needles (multikey 2; multikey 3 with ``uuid_keys``)
* ``values``: several values of one key
* ``queries``: a question about several keys

The answer lists all values, with a comma between two.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from recollect.fields import Validated, flag, int_check, integer, option, validate, validated_field
from recollect.tasks.prompts import Dice, Prompt, as_bytes, hide

__all__ = ["NeedleConfig", "NeedleName", "needle_prompts", "needles"]

NeedleName = Literal["passkey", "number", "uuid"]


def _list(words: str) -> tuple[str, ...]:
    return tuple(words.split())


FILLER = (
    "The river is wide.",
    "The hills are far away.",
    "A train goes by.",
    "It comes back in the evening.",
)
_HEAD = "A secret is hidden in this text. Remember it."
_HEAD_MANY = "Secrets are hidden in this text. Remember them."
_NEEDLE = "The secret of the {key} is {value}."
_QUESTION = "What is the secret of the {key}? The secret of the {key} is"
_VALUES = "What are all secrets of the {key}? The secrets of the {key} are"
_QUERIES = "What are the secrets of {keys}? The secrets of {keys} are"
_DEPTHS = 40
_ADJECTIVES = _list(
    "amber bold brisk calm clever copper curious dusty early eager faint gentle golden "
    "grand hollow humble icy jolly keen lively lofty mellow misty noble odd pale plain "
    "proud quick quiet rapid rusty silent silver small solid steep sunny tidy warm "
)
_NOUNS = _list(
    "anchor apron arrow barrel basket beacon bell bottle bridge candle canyon carpet "
    "castle cellar chimney clock compass drum engine feather fiddle forest garden hammer "
    "harbor kettle ladder lantern meadow mirror needle orchard pebble piano pillow saddle "
    "tunnel violin wagon window "
)


@dataclass(frozen=True, kw_only=True)
class NeedleConfig(Validated):
    """Haystack, form of the values, and number of needles.

    Args:
        name: name of the task.
        length: number of bytes of the prompt with its answer, at least 300.
        keys: number of different keys with needles; keys without a question are distractors.
        values: number of needles of each key.
        queries: number of keys in the question.
        distractors: whether the haystack consists of needles of other keys.
        uuid_keys: whether keys are UUIDs in place of words.

    Raises:
        ValueError: the name is unknown, the text is too short, or there are more queries than keys
            or more than 100 keys.

    Examples:
        >>> config = rc.tasks.NeedleConfig(keys=2, queries=2, length=1024)
        >>> (prompt,) = rc.tasks.needle_prompts(config, [], 1, torch.Generator().manual_seed(0))
        >>> len(prompt.places)
        2
    """

    name: NeedleName = option("passkey", *get_args(NeedleName))
    length: int = integer(1024, at_least=300)
    keys: int = validated_field(1, int_check(1, 100))
    values: int = integer(1, at_least=1)
    queries: int = integer(1, at_least=1)
    distractors: bool = flag(False)
    uuid_keys: bool = flag(False)

    def validate(self) -> None:
        validate(self.field_label("queries"), int_check(1, self.keys), self.queries)

    @property
    def vocab(self) -> int:
        """The number of tokens: one per value of a byte."""
        return 256


def _value(name: NeedleName, dice: Dice) -> str:
    return _uuid(dice) if name == "uuid" else str(1_000_000 + dice.below(9_000_000))


def _key(config: NeedleConfig, dice: Dice) -> str:
    return _uuid(dice) if config.uuid_keys else f"{dice.one(_ADJECTIVES)} {dice.one(_NOUNS)}"


def _uuid(dice: Dice) -> str:
    digits = [f"{dice.below(16):x}" for _ in range(32)]
    digits[12], digits[16] = "4", f"{8 + dice.below(4):x}"  # version 4, of RFC 9562
    text = "".join(digits)
    return "-".join((text[:8], text[8:12], text[12:16], text[16:20], text[20:]))


def needle_prompts(
    config: NeedleConfig,
    haystack: Sequence[str],
    batch: int,
    generator: torch.Generator,
) -> tuple[Prompt, ...]:
    """Draw prompts as text.

    Args:
        config: configuration of the prompts.
        haystack: sentences of a text (`recollect.tasks.sentences`); ``passkey`` needs none.
        batch: number of prompts B.
        generator: the only source of randomness, on the CPU.

    Raises:
        ValueError: ``batch`` is negative, or there are no sentences.

    Examples:
        >>> draw = torch.Generator().manual_seed(0)
        >>> config = rc.tasks.NeedleConfig(name="passkey", length=400)
        >>> (prompt,) = rc.tasks.needle_prompts(config, [], 1, draw)
        >>> prompt.answer.rstrip('.') in prompt.text
        True
    """
    validate("needles: batch", int_check(), batch)
    dice = Dice(generator)
    hay = FILLER if config.name == "passkey" else tuple(haystack)
    if not hay and not config.distractors:
        raise ValueError("needles: the haystack has no sentences; give rc.tasks.sentences(corpus)")
    return tuple(_prompt(config, hay, dice) for _ in range(batch))


def _prompt(config: NeedleConfig, hay: Sequence[str], dice: Dice) -> Prompt:
    """Draw keys and values, their order and depths, and the first sentence of the haystack."""
    values: dict[str, list[str]] = {}
    while len(values) < config.keys:
        key = _key(config, dice)
        if key not in values:
            values[key] = [_value(config.name, dice) for _ in range(config.values)]
    needles = [_NEEDLE.format(key=key, value=x) for key in values for x in values[key]]
    if len(needles) > 1:
        needles = [needles[i] for i in dice.order(len(needles))]
    depths = sorted(dice.below(_DEPTHS) / (_DEPTHS - 1) for _ in needles)
    if config.distractors:
        hay, start = _other_needles(config, values, dice), 0
    else:
        start = 0 if config.name == "passkey" else dice.below(len(hay))
    queried = list(values)[: config.queries]
    return hide(
        needles,
        depths,
        hay,
        start=start,
        head=_HEAD if len(needles) == 1 else _HEAD_MANY,
        question=_question(queried, config.values),
        answer=f"{', '.join(x for key in queried for x in values[key])}.",
        length=config.length,
    )


def _question(keys: Sequence[str], values: int) -> str:
    if len(keys) == 1:
        return (_QUESTION if values == 1 else _VALUES).format(key=keys[0])
    *first, last = [f"the {key}" for key in keys]
    return _QUERIES.format(keys=f"{', '.join(first)} and {last}")


def _other_needles(config: NeedleConfig, taken: Collection[str], dice: Dice) -> list[str]:
    """Return enough needles for the length, of keys that are not taken."""
    needles: list[str] = []
    size = 0
    while size < config.length:
        key = _key(config, dice)
        if key not in taken:
            needles.append(_NEEDLE.format(key=key, value=_value(config.name, dice)))
            size += len(needles[-1]) + 1
    return needles


def needles(
    config: NeedleConfig,
    haystack: Sequence[str],
    batch: int,
    generator: torch.Generator,
) -> tuple[Tensor, Tensor]:
    """Draw prompts as bytes, see `needle_prompts`.

    Args:
        config: configuration of the prompts.
        haystack: sentences of a text (`recollect.tasks.sentences`); ``passkey`` needs none.
        batch: number of prompts B.
        generator: the only source of randomness, on the CPU.

    Returns:
        ``(inputs, labels)``, int64 ``[B, length − 1]``, with labels at the answer's bytes: the
        value and the full stop that ends it.

    Raises:
        ValueError: ``batch`` is negative, there are no sentences, or the length is too small.

    Examples:
        >>> draw = torch.Generator().manual_seed(0)
        >>> config = rc.tasks.NeedleConfig(name="passkey", length=400)
        >>> inputs, labels = rc.tasks.needles(config, [], 2, draw)
        >>> inputs.shape
        torch.Size([2, 399])
    """
    return as_bytes(needle_prompts(config, haystack, batch, generator), config.length)
