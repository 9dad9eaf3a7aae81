"""Associative recall in TTR's layout: random cue-response pairs with repetition, then queries.

P cues have one response each. An instance contains random pairs, with repetition, and then queries
cues of these pairs (TTR section 6)::

    u3 v3 u1 v1 u3 v3 u2 v2 ... | u1 [v1 u2 v2 ...] u3      inputs
     .  .  .  .  .  .  .  . ... | v1   . v2   .     v3      labels (. is IGNORE)

The benchmark of Arora et al. (`recollect.tasks.mqar`) has an equal name and another layout: every
pair once, fillers between the queries.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from recollect.fields import Validated, int_check, integer, option, validate
from recollect.tasks.mqar import IGNORE, sample_without_replacement

__all__ = ["CueConfig", "cues"]


@dataclass(frozen=True, kw_only=True)
class CueConfig(Validated):
    """Layout of an instance.

    The paper leaves three choices open. Here each sequence has its own map, because a shared map
    needs no recall. By default the vocabulary has only the P cues of an instance, so that P keys
    can be orthogonal in P dimensions. ``asks`` decides whether repeated cues have labels.

    Args:
        pairs: P, number of pairs from which an instance draws.
        length: T, number of tokens before the first query; even.
        vocab_pairs: number of cues, and of responses; P if ``None``.
        queries: number of cues at the end. A response follows each but the last, so that every
            bigram that begins with a cue is a pair.
        asks: labelled positions: ``"end"``, the queries; ``"repeats"``, also every repeated cue
            among the T tokens.

    Raises:
        ValueError: if no instance has this shape; names the number to change.

    Examples:
        >>> config = rc.tasks.CueConfig(pairs=4, length=16)
        >>> inputs, labels = rc.tasks.cues(config, 2, torch.Generator().manual_seed(0))
        >>> inputs.shape, (labels != rc.tasks.IGNORE).sum().item()  # one query each
        (torch.Size([2, 17]), 2)
    """

    pairs: int = integer(at_least=1)
    length: int = integer(at_least=2)
    vocab_pairs: int | None = integer(None, at_least=1, optional=True)
    queries: int = integer(1, at_least=1)
    asks: Literal["end", "repeats"] = option("end", "repeats")

    def validate(self) -> None:
        if self.length % 2:
            raise ValueError(
                f"CueConfig: length must be even, because a pair takes two tokens; got "
                f"{self.length}, try {self.length + 1}"
            )
        if self.vocab_pairs is not None and self.vocab_pairs < self.pairs:
            raise ValueError(
                f"CueConfig: {self.pairs} pairs cannot be drawn from {self.vocab_pairs} cues; "
                f"vocab_pairs must be at least {self.pairs}"
            )

    @property
    def cues(self) -> int:
        """Number of cues C: tokens 0..C−1 are cues, C..2C−1 responses."""
        return self.pairs if self.vocab_pairs is None else self.vocab_pairs

    @property
    def vocab(self) -> int:
        """Number of tokens, 2C."""
        return 2 * self.cues

    @property
    def total(self) -> int:
        """Number of tokens of an instance: T + 2 queries − 1."""
        return self.length + 2 * self.queries - 1


def cues(config: CueConfig, batch: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw a batch of instances.

    Args:
        config: layout of an instance.
        batch: number of instances B; 0 gives empty tensors.
        generator: the only source of randomness; the result is on its device.

    Returns:
        ``(inputs, labels)``, both int64 ``[B, T + 2 queries − 1]``.

    Raises:
        ValueError: if ``batch`` is negative.

    Examples:
        >>> draw = torch.Generator().manual_seed(0)
        >>> config = rc.tasks.CueConfig(pairs=3, length=16, vocab_pairs=8)
        >>> inputs, labels = rc.tasks.cues(config, 2, draw)
        >>> inputs.shape, labels.shape
        (torch.Size([2, 17]), torch.Size([2, 17]))
    """
    validate("cues: batch", int_check(), batch)
    P, C, device = config.pairs, config.cues, generator.device
    cue = sample_without_replacement(batch, C, P, generator)
    response = C + sample_without_replacement(batch, C, P, generator)
    shown = torch.randint(P, (batch, config.length // 2), generator=generator, device=device)
    # Queries are uniform over the shown pairs ("j was drawn earlier"): the query of a pair that is
    # shown twice has twice the probability.
    queried = torch.randint(
        config.length // 2, (batch, config.queries), generator=generator, device=device
    )
    order = torch.cat([shown, shown.gather(1, queried)], dim=1)
    pair = torch.stack([cue.gather(1, order), response.gather(1, order)], dim=-1)
    inputs = pair.flatten(1)[:, : config.total]
    labels = torch.full_like(inputs, IGNORE)
    labels[:, config.length :: 2] = pair[:, config.length // 2 :, 1]
    if config.asks == "repeats":
        same = order[:, :, None] == order[:, None, :]
        is_repeated = same.tril(-1).any(-1)[:, : config.length // 2]
        repeats = pair[:, : config.length // 2, 1]
        labels[:, : config.length : 2] = torch.where(is_repeated, repeats, IGNORE)
    return inputs, labels
