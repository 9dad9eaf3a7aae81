"""What an instance of each MAD task looks like, and the settings that a score is a mean of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from recollect.fields import Validated, choice_check, int_check, integer, number, validate

__all__ = [
    "MadCompression",
    "MadConfig",
    "MadCopying",
    "MadFuzzy",
    "MadMemorization",
    "MadRecall",
    "MadSetting",
    "mad_settings",
]


@dataclass(frozen=True, kw_only=True)
class MadRecall(Validated):
    """In-context recall, and noisy recall where ``noise`` is above 0.

    Keys are the lower half of the tokens that are not noise, values the upper half; the last
    ``noise_vocab`` tokens are noise.

    Args:
        vocab: V, noise included.
        length: T, even; instances have T − 1 tokens, because inputs and labels are T tokens apart
            by one.
        noise: chance that a pair of tokens is noise, below 1. One pair never is. (The published
            program may leave that one to the question, and then fails when all others are noise.)
        noise_vocab: how many tokens are noise.

    Raises:
        ValueError: a number out of range, naming it.

    Examples:
        >>> config = rc.tasks.MadRecall(vocab=16, length=32)
        >>> inputs, labels = rc.tasks.mad(config, 2, torch.Generator().manual_seed(0))
        >>> inputs.shape, int(inputs.max()) < config.vocab
        (torch.Size([2, 31]), True)
    """

    vocab: int = integer(16)
    length: int = integer(128, at_least=4)
    noise: float = number(0.0, at_least=0, below=1)
    noise_vocab: int = integer(0)

    def validate(self) -> None:
        validate(self.field_label("vocab"), int_check(2 + self.noise_vocab), self.vocab)
        if self.length % 2:
            raise ValueError(f"MadRecall: length must be even, got {self.length}")
        if self.noise > 0 and self.noise_vocab < 1:
            raise ValueError(
                f"MadRecall: noise needs noise_vocab tokens, got noise = {self.noise} and "
                f"noise_vocab = {self.noise_vocab}"
            )


@dataclass(frozen=True, kw_only=True)
class MadFuzzy(Validated):
    """Fuzzy in-context recall: keys and values are motifs of different tokens.

    The last token of the vocabulary fills the front; of the others the lower half is for keys, the
    upper half for values. The sizes of motifs are uniform in 1..motif; in tests keys have size
    ``motif``. The pair that is asked at the end has always been named (in the published program it
    may come too late).

    Args:
        vocab: V.
        length: T, the tokens of an instance.
        motif: the most tokens of a key and of a value.

    Raises:
        ValueError: a number out of range, naming it.

    Examples:
        >>> config = rc.tasks.MadFuzzy(vocab=16, length=64, motif=2)
        >>> rc.tasks.mad(config, 2, torch.Generator().manual_seed(0))[0].shape
        torch.Size([2, 64])
    """

    vocab: int = integer(16)
    length: int = integer(128)
    motif: int = integer(3, at_least=1)

    def validate(self) -> None:
        validate(self.field_label("vocab"), int_check(2 * self.motif + 1), self.vocab)
        validate(self.field_label("length"), int_check(6 * self.motif), self.length)


@dataclass(frozen=True, kw_only=True)
class MadMemorization(Validated):
    """Facts: one map from keys to values for every sequence.

    The last token says "insert"; of the others the lower half is keys, the upper half values.
    Instances are key, insert, key, insert, …; the label at each insert is the key's value.

    Args:
        vocab: V.
        length: T, even.
        facts: the seed of the map.

    Raises:
        ValueError: a number out of range, naming it.

    Examples:
        >>> config = rc.tasks.MadMemorization(vocab=17, length=8)
        >>> inputs, labels = rc.tasks.mad(config, 1, torch.Generator().manual_seed(0))
        >>> inputs[0, 1::2], bool((labels[0, 1::2] >= 8).all())  # "insert": a value is asked
        (tensor([16, 16, 16, 16]), True)
    """

    vocab: int = integer(256, at_least=3)
    length: int = integer(32, at_least=2)
    facts: int = integer(0)

    def validate(self) -> None:
        if self.length % 2:
            raise ValueError(f"MadMemorization: length must be even, got {self.length}")

    @property
    def map(self) -> Tensor:
        """The value of every key, int64 ``[(V − 1) // 2]``; no two keys share one."""
        keys = (self.vocab - 1) // 2
        generator = torch.Generator().manual_seed(self.facts)
        return keys + torch.randperm(self.vocab - 1 - keys, generator=generator)[:keys]


@dataclass(frozen=True, kw_only=True)
class MadCopying(Validated):
    """Selective copying: blanks stand between the tokens to copy, a sign, then blanks to fill.

    Token V − 1 is the sign and V − 2 the blank. Each blank stands before one of the tokens to copy,
    independently and uniformly, so that none stands between the last one and the sign. (The
    published program draws these places from a generator of its own that no seed reaches.)

    Args:
        vocab: V.
        length: T.
        copies: tokens to copy.

    Raises:
        ValueError: a number out of range, naming it.

    Examples:
        >>> config = rc.tasks.MadCopying(vocab=16, length=32, copies=4)
        >>> inputs, labels = rc.tasks.mad(config, 1, torch.Generator().manual_seed(0))
        >>> int((inputs[0] < 14).sum()), labels[0, -4:].equal(inputs[inputs < 14])
        (4, True)
    """

    vocab: int = integer(16, at_least=3)
    length: int = integer(256)
    copies: int = integer(16, at_least=1)

    def validate(self) -> None:
        validate(self.field_label("length"), int_check(2 * self.copies + 2), self.length)


@dataclass(frozen=True, kw_only=True)
class MadCompression(Validated):
    """Compression: T − 1 uniform tokens and a sign; labels are the inputs themselves.

    A model must use nothing of its layers' outputs but the last, and decode it together with an
    embedding of the position that is asked.

    Args:
        vocab: V; token V − 1 is the sign.
        length: T.

    Raises:
        ValueError: a number out of range, naming it.

    Examples:
        >>> config = rc.tasks.MadCompression(vocab=16, length=8)
        >>> inputs, labels = rc.tasks.mad(config, 2, torch.Generator().manual_seed(0))
        >>> torch.equal(inputs, labels), inputs[:, -1]
        (True, tensor([15, 15]))
    """

    vocab: int = integer(16, at_least=2)
    length: int = integer(32, at_least=2)


MadConfig = MadRecall | MadFuzzy | MadMemorization | MadCopying | MadCompression
"""What an instance of one of MAD's six tasks looks like.

Examples:
    >>> isinstance(rc.tasks.MadRecall(vocab=16, length=32), rc.tasks.MadConfig)
    True
"""


@dataclass(frozen=True, kw_only=True)
class MadSetting:
    """One training of the benchmark.

    Attributes:
        task: the task's name.
        axis, value: what differs from the baseline; ``""`` and 0 for the baseline.
        config: what an instance looks like.
        train, test: how many examples there are.

    Examples:
        >>> baseline, *harder = rc.tasks.mad_settings("compression")
        >>> baseline.axis, baseline.config
        ('', MadCompression(vocab=16, length=32))
        >>> sorted({setting.axis for setting in harder})
        ['length', 'train', 'vocab']
    """

    task: str
    axis: str
    value: float
    config: MadConfig
    train: int
    test: int


_LESS = (6400, 3200, 1600, 800)
_LONGER = (256, 512, 1024)
_Axes = Mapping[str, tuple[float, ...]]
_TASKS: Mapping[str, tuple[MadConfig, int, _Axes]] = {
    "compression": (
        MadCompression(),
        12_800,
        {"vocab": (32, 64, 128), "length": (64, 128, 256), "train": _LESS},
    ),
    "fuzzy_recall": (
        MadFuzzy(),
        12_800,
        {"vocab": (32, 64, 128), "length": _LONGER, "train": _LESS},
    ),
    "in_context_recall": (
        MadRecall(),
        12_800,
        {"vocab": (32, 64, 128), "length": _LONGER, "train": _LESS},
    ),
    "memorization": (MadMemorization(), 256, {"vocab": (512, 1024, 2048, 4096, 8192)}),
    "noisy_recall": (
        MadRecall(vocab=32, noise=0.2, noise_vocab=16),
        12_800,
        {
            "vocab": (48, 80, 144),  # with the 16 of noise
            "length": _LONGER,
            "train": _LESS,
            "noise": (0.4, 0.6, 0.8),
        },
    ),
    "selective_copying": (
        MadCopying(),
        12_800,
        {"vocab": (32, 64, 128), "length": (512, 1024), "train": _LESS, "copies": (32, 64, 96)},
    ),
}


def mad_settings(task: str) -> tuple[MadSetting, ...]:
    """The baseline of a task, then every difficulty: one number changed at a time.

    Args:
        task: one of the six names.

    Raises:
        ValueError: another name, listing these.

    Examples:
        >>> settings = rc.tasks.mad_settings("compression")
        >>> settings[0].axis, settings[0].config.length
        ('', 32)
        >>> sorted({setting.axis for setting in settings[1:]})
        ['length', 'train', 'vocab']
    """
    validate("mad_settings: task", choice_check(*_TASKS), task)
    config, train, axes = _TASKS[task]
    base = MadSetting(task=task, axis="", value=0, config=config, train=train, test=1280)
    found = [base]
    for axis, values in axes.items():
        for value in values:
            if axis == "train":
                found.append(replace(base, axis=axis, value=value, train=int(value)))
            else:
                harder = replace(config, **{axis: value})  # type: ignore[arg-type]
                found.append(replace(base, axis=axis, value=value, config=harder))
    return tuple(found)
