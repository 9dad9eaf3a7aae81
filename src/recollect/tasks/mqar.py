"""Multi-query associative recall (MQAR): read key-value pairs, then answer keys with values.

An instance of length T with P pairs is laid out as in the zoology benchmark (Arora et al. 2023)::

    k1 v1 k2 v2 ... kP vP | 0 0 k2 0 0 0 k1 0 ...          inputs
     .  .  .  . ...  .  . | . . v2 . . . v1 . ...          labels (. is IGNORE)

Keys are P different tokens of 1 .. V/2 - 1 and values P different tokens of V/2 .. V - 1. The part
after the pairs is divided into slots of two positions. Each key is queried once, at the first
position of a slot. Slots are drawn without replacement, with probability proportional to
``i**(power - 1)`` for slot i = 1, 2, ... A small power puts most queries soon after the pairs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from recollect.fields import Validated, choice_check, int_check, integer, number, option, validate

IGNORE = -100
"""Label of positions that do not count; PyTorch's cross entropy skips it.

Examples:
    >>> logits, labels = torch.zeros(2, 8), torch.tensor([3, rc.tasks.IGNORE])
    >>> torch.nn.functional.cross_entropy(logits, labels)  # of the first only: log 8
    tensor(2.0794)
"""


__all__ = [
    "IGNORE",
    "MqarConfig",
    "MqarMixture",
    "mqar",
    "mqar_mix",
    "sample_without_replacement",
]


@dataclass(frozen=True, kw_only=True)
class MqarConfig(Validated):
    """Layout of an instance.

    Args:
        vocab: V, the number of tokens: 0 is filler, the lower half keys, the upper half values.
        pairs: P, the number of key-value pairs, each of which is queried once.
        length: T, the number of tokens of an instance; even, and at least 4 P.
        power: a, the exponent of the distribution of query slots; above 0. At 1 it is uniform.
        fill: tokens at other positions: token 0, or random tokens of the full vocabulary, which
            may equal keys and are harder. Both are published (`mqar_mix`).

    Raises:
        ValueError: if no instance has this layout; names the number to change.

    Examples:
        >>> config = rc.tasks.MqarConfig(vocab=32, pairs=4, length=32)
        >>> inputs, labels = rc.tasks.mqar(config, 2, torch.Generator().manual_seed(0))
        >>> (labels != rc.tasks.IGNORE).sum(1)  # every pair is queried once
        tensor([4, 4])
    """

    vocab: int = integer(at_least=1)
    pairs: int = integer(at_least=1)
    length: int = integer(at_least=1)
    power: float = number(0.01, above=0)
    fill: Literal["zero", "random"] = option("zero", "random")

    def validate(self) -> None:
        if self.length % 2:
            raise ValueError(
                f"MqarConfig: length must be even, because pairs and query slots take two "
                f"positions each; got {self.length}, try {self.length + 1}"
            )
        if self.length < 4 * self.pairs:
            raise ValueError(
                f"MqarConfig: {self.pairs} pairs and their queries need a length of at least "
                f"{4 * self.pairs}, got {self.length}"
            )
        if self.keys < self.pairs:
            raise ValueError(
                f"MqarConfig: a vocabulary of {self.vocab} has {max(self.keys, 0)} keys, fewer "
                f"than the {self.pairs} pairs; vocab must be at least {2 * self.pairs + 2}"
            )

    @property
    def keys(self) -> int:
        """Number of different keys: the tokens 1 .. V/2 - 1."""
        return self.vocab // 2 - 1

    @property
    def num_query_slots(self) -> int:
        """Number of positions for queries after the pairs."""
        return self.length // 2 - self.pairs


@dataclass(frozen=True, kw_only=True)
class MqarMixture:
    """Training and test data of one model.

    Attributes:
        train, test: layouts of instances, with the number of instances.

    Examples:
        >>> mix = rc.tasks.mqar_mix("mixed")
        >>> max(config.pairs for config, count in mix.train)
        64
        >>> max(config.pairs for config, count in mix.test)
        256
    """

    train: tuple[tuple[MqarConfig, int], ...]
    test: tuple[tuple[MqarConfig, int], ...]


_ONE_LENGTH = {64: 4, 128: 8, 256: 16, 512: 64}
_MIXED_TRAIN = ((64, 4, 100_000), (128, 8, 20_000), (256, 16, 20_000), (256, 32, 20_000),
                (256, 64, 20_000))  # fmt: skip
_MIXED_TEST = ((64, 4), (64, 8), (64, 16), (128, 32), (256, 64), (512, 128), (1024, 256))


def mqar_mix(
    recipe: Literal["one length", "mixed"], *, length: int = 64, vocab: int = 8192
) -> MqarMixture:
    """Return one of the two published recipes of training and test data, both with power 0.01.

    ``"one length"`` is the recipe of Arora et al. 2023, figure 2: 100,000 instances of one length
    for training and 3,000 for the test. 64 tokens have 4 pairs, 128 have 8, 256 have 16, 512 have
    64; fillers are token 0. ``"mixed"`` is the recipe of Arora et al. 2024, figure 2: training has
    up to 64 pairs in up to 256 tokens, the test up to 256 pairs in 1,024; fillers are random. Both
    papers train two layers of mixers without feed-forward networks.

    Args:
        recipe: name of the recipe.
        length: T of ``"one length"``.
        vocab: V; both papers have 8,192.

    Raises:
        ValueError: the recipe or the length is unknown.

    Examples:
        >>> mix = rc.tasks.mqar_mix("one length", length=64)
        >>> config, count = mix.test[0]
        >>> config.length, config.pairs
        (64, 4)
    """
    validate("mqar_mix: recipe", choice_check("one length", "mixed"), recipe)
    if recipe == "one length":
        if length not in _ONE_LENGTH:
            raise ValueError(
                f"mqar_mix: length must be one of {', '.join(map(str, _ONE_LENGTH))}, got {length}"
            )
        config = MqarConfig(vocab=vocab, pairs=_ONE_LENGTH[length], length=length)
        return MqarMixture(train=((config, 100_000),), test=((config, 3_000),))

    def shape(tokens: int, pairs: int) -> MqarConfig:
        return MqarConfig(vocab=vocab, pairs=pairs, length=tokens, fill="random")

    return MqarMixture(
        train=tuple((shape(T, P), count) for T, P, count in _MIXED_TRAIN),
        test=tuple((shape(T, P), 1_000) for T, P in _MIXED_TEST),
    )


def mqar(config: MqarConfig, batch: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw a batch of instances.

    The result depends only on ``config``, ``batch`` and the state of ``generator``.

    Args:
        config: layout of an instance.
        batch: number of instances B; 0 gives empty tensors.
        generator: source of randomness; the result is on its device.

    Returns:
        ``(inputs, labels)``, both int64 ``[B, T]``. The label of a query is at the query's
        position; every other label is :data:`IGNORE`.

    Raises:
        ValueError: if ``batch`` is negative.

    Examples:
        >>> draw = torch.Generator().manual_seed(0)
        >>> config = rc.tasks.MqarConfig(vocab=64, pairs=4, length=32)
        >>> inputs, labels = rc.tasks.mqar(config, 2, draw)
        >>> (labels != rc.tasks.IGNORE).sum(1)
        tensor([4, 4])
    """
    validate("mqar: batch", int_check(), batch)
    device, pairs, half = generator.device, config.pairs, config.vocab // 2

    def sample_indices(count: int, log_weight: Tensor | None = None) -> Tensor:
        """Return ``pairs`` different random indices below ``count``: ``[B, P]``."""
        # The largest of log-weight plus Gumbel noise are a sample without replacement (Gumbel
        # top-k). float64 makes ties, which would favour low indices, rare.
        noise = torch.rand(batch, count, generator=generator, device=device, dtype=torch.float64)
        score = -(-noise.clamp_min(torch.finfo(noise.dtype).tiny).log()).log()
        if log_weight is not None:
            score = score + log_weight
        return score.topk(pairs, dim=1).indices

    keys = 1 + sample_indices(config.keys)
    values = half + sample_indices(config.vocab - half)
    ranks = torch.arange(1, config.num_query_slots + 1, device=device, dtype=torch.float64)
    positions = 2 * pairs + 2 * sample_indices(
        config.num_query_slots, (config.power - 1) * ranks.log()
    )

    shape = (batch, config.length)
    if config.fill == "random":
        inputs = torch.randint(config.vocab, shape, generator=generator, device=device)
    else:
        inputs = torch.zeros(shape, dtype=torch.int64, device=device)
    inputs[:, 0 : 2 * pairs : 2] = keys
    inputs[:, 1 : 2 * pairs : 2] = values
    inputs.scatter_(1, positions, keys)
    labels = torch.full(shape, IGNORE, dtype=torch.int64, device=device)
    labels.scatter_(1, positions, values)
    return inputs, labels


def sample_without_replacement(
    rows: int, size: int, count: int, generator: torch.Generator
) -> Tensor:
    """Return ``count`` different integers below ``size`` per row, in random order.

    They are the indices ``[rows, count]`` of the largest of ``size`` independent numbers. In
    float64 ties, which would favour low indices, are rare.
    """
    noise = torch.rand(
        rows, size, generator=generator, device=generator.device, dtype=torch.float64
    )
    return noise.topk(count, dim=1).indices
