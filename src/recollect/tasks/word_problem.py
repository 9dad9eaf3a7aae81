"""The word problem of a permutation group: the product of all permutations so far.

S₃, S₅ and A₅ are groups of permutations of 3 and 5 items. Parity is S₂: its permutations are 0 and
1, and a product is the parity of the number of ones. `word_config` returns them by name.

The state of a correct model permutes n items. One generalised Householder factor per token is a
reflection at best, and a rotation of S₃ is a product of two reflections. So a single layer of a
delta rule cannot track S₃, and DeltaProduct with two steps per token can (Siems et al. 2025,
section 3).
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from recollect.fields import Validated, choice_check, int_check, integer, option, validate
from recollect.tasks.mqar import IGNORE

__all__ = ["WordConfig", "cayley_table", "permutations", "word_batch", "word_config"]


@dataclass(frozen=True, kw_only=True)
class WordConfig(Validated):
    """Words over Sₙ or Aₙ.

    Attributes:
        items: n; S₃ has six permutations.
        length: number of permutations per word, after an initial token.
        group: ``"symmetric"``, all permutations, or ``"alternating"``, the even permutations.

    Raises:
        ValueError: a size is below one, or the group is unknown.

    Examples:
        >>> config = rc.tasks.WordConfig(items=3, length=4)
        >>> inputs, labels = rc.tasks.word_batch(config, 2, torch.Generator().manual_seed(0))
        >>> inputs.shape  # the initial token, and four permutations
        torch.Size([2, 5])
    """

    items: int = integer(3, at_least=1)
    length: int = integer(32, at_least=1)
    group: Literal["symmetric", "alternating"] = option("symmetric", "alternating")

    @property
    def vocab(self) -> int:
        """Number of tokens: the permutations, and the initial token."""
        return len(permutations(self.items, self.group)) + 1


_NAMES: dict[str, tuple[int, Literal["symmetric", "alternating"]]] = {
    "parity": (2, "symmetric"),
    "S3": (3, "symmetric"),
    "S4": (4, "symmetric"),
    "S5": (5, "symmetric"),
    "A4": (4, "alternating"),
    "A5": (5, "alternating"),
}


def word_config(name: str, length: int = 32) -> WordConfig:
    """Return the configuration of a word problem by its name in the literature.

    Args:
        name: ``"parity"``, ``"S3"``, ``"S4"``, ``"S5"``, ``"A4"`` or ``"A5"``.
        length: number of permutations per word.

    Raises:
        ValueError: the name is unknown; lists the names.

    Examples:
        >>> config = rc.tasks.word_config("S3", length=8)
        >>> config.items, config.group
        (3, 'symmetric')
    """
    validate("word_config: name", choice_check(*_NAMES), name)
    items, group = _NAMES[name]
    return WordConfig(items=items, length=length, group=group)


def permutations(items: int, group: str = "symmetric") -> list[tuple[int, ...]]:
    """Return the permutations of a group in lexicographic order, the identity first."""
    symmetric = itertools.permutations(range(items))
    return [p for p in symmetric if group == "symmetric" or _is_even(p)]


def _is_even(p: tuple[int, ...]) -> bool:
    """Whether a permutation has an even number of inversions."""
    return sum(a > b for a, b in itertools.combinations(p, 2)) % 2 == 0


def cayley_table(items: int, group: str = "symmetric") -> Tensor:
    """Return the table ``[g, g]``: the index of a ∘ b (first b, then a) in row a and column b."""
    members = permutations(items, group)
    index = {p: i for i, p in enumerate(members)}
    rows = [[index[tuple(a[b[i]] for i in range(items))] for b in members] for a in members]
    return torch.tensor(rows)


def word_batch(config: WordConfig, batch: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw uniform words and their running products.

    Args:
        config: configuration of the words.
        batch: number of words.
        generator: the only source of randomness.

    Returns:
        inputs ``[batch, length + 1]``: the initial token (the last of the vocabulary), then
        indices of permutations p_1, p_2, …
        labels: the index of p_t ∘ … ∘ p_1, and :data:`IGNORE` at the initial token.

    Raises:
        ValueError: ``batch`` is negative.

    Examples:
        >>> draw = torch.Generator().manual_seed(0)
        >>> config = rc.tasks.word_config("S3", length=8)
        >>> inputs, labels = rc.tasks.word_batch(config, 2, draw)
        >>> inputs.shape, int(labels[0, 0]) == rc.tasks.IGNORE
        (torch.Size([2, 9]), True)
    """
    validate("word_batch: batch", int_check(), batch)
    compose = cayley_table(config.items, config.group)
    size = compose.shape[0]
    picks = torch.randint(size, (batch, config.length), generator=generator)
    product, labels = torch.zeros(batch, dtype=torch.long), [torch.full((batch,), IGNORE)]
    for p in picks.unbind(1):
        product = compose[p, product]
        labels.append(product)
    initial = torch.full((batch, 1), size)
    return torch.cat([initial, picks], dim=1), torch.stack(labels, dim=1)
