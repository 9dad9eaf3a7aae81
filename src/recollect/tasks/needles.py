"""A needle in a haystack: find one sentence in a long text (S-NIAH 1 to 3 of RULER).

| task | haystack | value |
|---|---|---|
| 1, ``passkey`` | one filler paragraph, repeated | a number of seven digits |
| 2, ``number`` | local text | a number of seven digits |
| 3, ``uuid`` | local text | a UUID |

One sentence says that the special magic value of a key is so and so; the question asks for the
value of that key. Keys are pairs of an adjective and a noun. Depths are 40, evenly spaced from the
beginning to the end. The structure follows RULER (Hsieh et al. 2024), the words are our own and the
haystack is a text of this machine, so scores compare models with each other and not with RULER's.
MIRAS table 3 and ATLAS table 3 call the tasks S-NIAH-PK, -N and -W.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from recollect.fields import Validated, held, integer, option, whole
from recollect.tasks.prompts import Dice, Prompt, as_bytes, hide

__all__ = ["NeedleConfig", "NeedleName", "needle_prompts", "needles"]

NeedleName = Literal["passkey", "number", "uuid"]


def _list(words: str) -> tuple[str, ...]:
    return tuple(words.split())


_FILLER = (
    "The river is wide.",
    "The hills are far away.",
    "A train goes by.",
    "It comes back in the evening.",
)
_HEAD = "A secret is hidden in this text. Remember it."
_NEEDLE = "The secret of the {key} is {value}."
_QUESTION = "What is the secret of the {key}? The secret of the {key} is"
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
    """Which haystack and value.

    Args:
        name: one of the three.
        length: bytes of the prompt with its answer, at least 300.

    Raises:
        ValueError: another name, or too short a text.
    """

    name: NeedleName = option("passkey", *get_args(NeedleName))
    length: int = integer(1024, at_least=300)

    @property
    def vocab(self) -> int:
        """The number of tokens: one per value of a byte."""
        return 256


def _value(name: NeedleName, dice: Dice) -> str:
    if name != "uuid":
        return str(1_000_000 + dice.below(9_000_000))
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
        config: which task.
        haystack: sentences of a text (`recollect.tasks.sentences`); ``passkey`` needs none.
        batch: B, how many.
        generator: the only source of randomness, on the CPU.

    Raises:
        ValueError: a negative batch; no sentences.

    Examples:
        >>> draw = torch.Generator().manual_seed(0)
        >>> config = rc.tasks.NeedleConfig(name="passkey", length=400)
        >>> (prompt,) = rc.tasks.needle_prompts(config, [], 1, draw)
        >>> prompt.answer.rstrip('.') in prompt.text
        True
    """
    held("needles: batch", whole(), batch)
    dice = Dice(generator)
    hay = _FILLER if config.name == "passkey" else tuple(haystack)
    if not hay:
        raise ValueError("needles: the haystack has no sentences; give rc.tasks.sentences(corpus)")
    found: list[Prompt] = []
    for _ in range(batch):
        key = f"{dice.one(_ADJECTIVES)} {dice.one(_NOUNS)}"
        value = _value(config.name, dice)
        found.append(
            hide(
                [_NEEDLE.format(key=key, value=value)],
                [dice.below(_DEPTHS) / (_DEPTHS - 1)],
                hay,
                start=0 if config.name == "passkey" else dice.below(len(hay)),
                head=_HEAD,
                question=_QUESTION.format(key=key),
                answer=f"{value}.",
                length=config.length,
            )
        )
    return tuple(found)


def needles(
    config: NeedleConfig,
    haystack: Sequence[str],
    batch: int,
    generator: torch.Generator,
) -> tuple[Tensor, Tensor]:
    """Draw prompts as bytes, see `needle_prompts`.

    Args:
        config: of the prompts.
        haystack: sentences of a text (`recollect.tasks.sentences`); ``passkey`` needs none.
        batch: B, how many.
        generator: the only source of randomness, on the CPU.

    Returns:
        ``(inputs, labels)``, int64 ``[B, length − 1]``, with labels at the answer's bytes: the
        value and the full stop that ends it.

    Raises:
        ValueError: a negative batch; no sentences; a length that holds too little.

    Examples:
        >>> draw = torch.Generator().manual_seed(0)
        >>> config = rc.tasks.NeedleConfig(name="passkey", length=400)
        >>> inputs, labels = rc.tasks.needles(config, [], 2, draw)
        >>> inputs.shape
        torch.Size([2, 399])
    """
    return as_bytes(needle_prompts(config, haystack, batch, generator), config.length)
