"""The six tasks of mechanistic architecture design (Poli et al. 2024), with their difficulty axes.

| name | question |
|---|---|
| ``in_context_recall`` | the value of an earlier key, of one map per sequence |
| ``noisy_recall`` | in-context recall with pairs of noise tokens in between |
| ``fuzzy_recall`` | in-context recall with motifs of one to three tokens as keys and values |
| ``memorization`` | the value of a key, of one map for all sequences |
| ``selective_copying`` | the tokens other than blanks, in order, after a sign |
| ``compression`` | the full sequence, from the output at its last token |

A score is the mean accuracy over the baseline and every difficulty (`mad_settings`), each trained
separately with the best of three learning rates (1e-4, 5e-4, 1e-3) and two weight decays (0, 0.1).

*Targets.* The three recalls train on every next token and are tested on the values of earlier keys;
fuzzy recall is tested on keys of the longest motif only. The other tasks have equal labels in both.
Docstrings describe differences from the published program.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from recollect.fields import Validated, choice_check, int_check, integer, number, validate
from recollect.tasks.mqar import IGNORE, sample_without_replacement

__all__ = [
    "MadCompression",
    "MadConfig",
    "MadCopying",
    "MadFuzzy",
    "MadMemorization",
    "MadRecall",
    "MadSetting",
    "mad",
    "mad_settings",
]

Split = Literal["train", "test"]


@dataclass(frozen=True, kw_only=True)
class MadRecall(Validated):
    """In-context recall, and noisy recall if ``noise`` is above 0.

    Keys are the lower half of the tokens that are not noise, values the upper half; the last
    ``noise_vocab`` tokens are noise.

    Args:
        vocab: V, with noise.
        length: T, even; instances have T − 1 tokens, since labels are shifted by one.
        noise: probability that a pair of tokens is noise, below 1. One pair never is. (The
            published program fails if all pairs but that of the question are noise.)
        noise_vocab: number of noise tokens.

    Raises:
        ValueError: a number out of range.

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
    ``motif``. The pair of the question always occurs before it (in the published program it may
    come too late).

    Args:
        vocab: V.
        length: T, number of tokens of an instance.
        motif: maximum number of tokens of a key and of a value.

    Raises:
        ValueError: a number out of range.

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
    """Memorization: one map from keys to values for all sequences.

    The last token is "insert"; of the others the lower half is keys, the upper half values.
    Instances are key, insert, key, insert, …; the label at each insert is the key's value.

    Args:
        vocab: V.
        length: T, even.
        facts: seed of the map.

    Raises:
        ValueError: a number out of range.

    Examples:
        >>> config = rc.tasks.MadMemorization(vocab=17, length=8)
        >>> inputs, labels = rc.tasks.mad(config, 1, torch.Generator().manual_seed(0))
        >>> inputs[0, 1::2], bool((labels[0, 1::2] >= 8).all())  # "insert"
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
        """Value of each key, int64 ``[(V − 1) // 2]``; all are different."""
        keys = (self.vocab - 1) // 2
        generator = torch.Generator().manual_seed(self.facts)
        return keys + torch.randperm(self.vocab - 1 - keys, generator=generator)[:keys]


@dataclass(frozen=True, kw_only=True)
class MadCopying(Validated):
    """Selective copying: tokens to copy with blanks in between, a sign, and blanks to fill.

    Token V − 1 is the sign and V − 2 the blank. Each blank precedes one of the tokens to copy,
    independently and uniformly, so that no blank is between the last one and the sign. (The
    published program draws these positions from a generator that cannot be seeded.)

    Args:
        vocab: V.
        length: T.
        copies: number of tokens to copy.

    Raises:
        ValueError: a number out of range.

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

    A model must use only the last output of its layers, and decode it together with an embedding
    of the position of each label.

    Args:
        vocab: V; token V − 1 is the sign.
        length: T.

    Raises:
        ValueError: a number out of range.

    Examples:
        >>> config = rc.tasks.MadCompression(vocab=16, length=8)
        >>> inputs, labels = rc.tasks.mad(config, 2, torch.Generator().manual_seed(0))
        >>> torch.equal(inputs, labels), inputs[:, -1]
        (True, tensor([15, 15]))
    """

    vocab: int = integer(16, at_least=2)
    length: int = integer(32, at_least=2)


MadConfig = MadRecall | MadFuzzy | MadMemorization | MadCopying | MadCompression
"""Configuration of one of MAD's six tasks.

Examples:
    >>> isinstance(rc.tasks.MadRecall(vocab=16, length=32), rc.tasks.MadConfig)
    True
"""


@dataclass(frozen=True, kw_only=True)
class MadSetting:
    """One training of the benchmark.

    Attributes:
        task: name of the task.
        axis, value: difference from the baseline; ``""`` and 0 for the baseline.
        config: configuration of the task.
        train, test: numbers of examples.

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


_TRAIN_SIZES = (6400, 3200, 1600, 800)
_LENGTHS = (256, 512, 1024)
_Axes = Mapping[str, tuple[float, ...]]
_TASKS: Mapping[str, tuple[MadConfig, int, _Axes]] = {
    "compression": (
        MadCompression(),
        12_800,
        {"vocab": (32, 64, 128), "length": (64, 128, 256), "train": _TRAIN_SIZES},
    ),
    "fuzzy_recall": (
        MadFuzzy(),
        12_800,
        {"vocab": (32, 64, 128), "length": _LENGTHS, "train": _TRAIN_SIZES},
    ),
    "in_context_recall": (
        MadRecall(),
        12_800,
        {"vocab": (32, 64, 128), "length": _LENGTHS, "train": _TRAIN_SIZES},
    ),
    "memorization": (MadMemorization(), 256, {"vocab": (512, 1024, 2048, 4096, 8192)}),
    "noisy_recall": (
        MadRecall(vocab=32, noise=0.2, noise_vocab=16),
        12_800,
        {
            "vocab": (48, 80, 144),  # with the 16 of noise
            "length": _LENGTHS,
            "train": _TRAIN_SIZES,
            "noise": (0.4, 0.6, 0.8),
        },
    ),
    "selective_copying": (
        MadCopying(),
        12_800,
        {
            "vocab": (32, 64, 128),
            "length": (512, 1024),
            "train": _TRAIN_SIZES,
            "copies": (32, 64, 96),
        },
    ),
}


def mad_settings(task: str) -> tuple[MadSetting, ...]:
    """Return the baseline of a task, then each difficulty: one changed number at a time.

    Args:
        task: one of the six names.

    Raises:
        ValueError: the name is unknown.

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
    settings = [base]
    for axis, values in axes.items():
        for value in values:
            if axis == "train":
                settings.append(replace(base, axis=axis, value=value, train=int(value)))
            else:
                harder = replace(config, **{axis: value})  # type: ignore[arg-type]
                settings.append(replace(base, axis=axis, value=value, config=harder))
    return tuple(settings)


def mad(
    config: MadConfig,
    batch: int,
    generator: torch.Generator,
    *,
    split: Split = "train",
) -> tuple[Tensor, Tensor]:
    """Draw instances of the task of a configuration.

    Args:
        config: configuration of a task.
        batch: number of instances B.
        generator: the only source of randomness.
        split: labels for training or for tests, see above.

    Returns:
        ``(inputs, labels)``, int64 ``[B, T]`` (``[B, T − 1]`` of `MadRecall`).

    Raises:
        ValueError: ``batch`` is negative, or the split is unknown.

    Examples:
        >>> draw = torch.Generator().manual_seed(0)
        >>> config = rc.tasks.MadRecall(vocab=16, length=32)
        >>> inputs, labels = rc.tasks.mad(config, 2, draw)
        >>> inputs.shape, labels.shape
        (torch.Size([2, 31]), torch.Size([2, 31]))
    """
    validate("mad: batch", int_check(), batch)
    validate("mad: split", choice_check("train", "test"), split)
    if isinstance(config, MadRecall):
        return _recall(config, batch, generator, split)
    if isinstance(config, MadFuzzy):
        return _fuzzy(config, batch, generator, split)
    if isinstance(config, MadMemorization):
        return _memorization(config, batch, generator)
    if isinstance(config, MadCopying):
        return _copying(config, batch, generator)
    return _compression(config, batch, generator)


def _recall(
    config: MadRecall, batch: int, generator: torch.Generator, split: Split
) -> tuple[Tensor, Tensor]:
    device, pairs = generator.device, config.length // 2 - 1
    plain = config.vocab - config.noise_vocab
    keys = plain // 2

    def uniform(high: int, *shape: int) -> Tensor:
        return torch.randint(high, shape, generator=generator, device=device)

    values = keys + uniform(plain - keys, batch, keys)  # two keys may share a value
    key = uniform(keys, batch, pairs)
    noise = torch.rand(batch, pairs, generator=generator, device=device) < config.noise
    noise.scatter_(1, uniform(pairs, batch, 1), False)
    is_shown = torch.zeros(batch, keys, dtype=torch.int64, device=device)
    is_shown = is_shown.scatter_add(1, key, (~noise).long()) > 0
    score = torch.rand(batch, keys, generator=generator, device=device).masked_fill(~is_shown, -1)
    key = torch.cat([key, score.argmax(1, keepdim=True)], dim=1)
    noise = torch.nn.functional.pad(noise, (0, 1))
    tokens = torch.stack([key, values.gather(1, key)], dim=-1)
    if config.noise_vocab:
        other = plain + uniform(config.noise_vocab, *tokens.shape)
        tokens = torch.where(noise[..., None], other, tokens)
    tokens = tokens.flatten(1)  # [B, T]
    if split == "train":
        return tokens[:, :-1], tokens[:, 1:]
    same = (key[:, :, None] == key[:, None, :]) & ~noise[:, None, :]
    is_repeated = same.tril(-1).any(-1) & ~noise
    labels = torch.full_like(tokens, IGNORE)
    labels[:, 0::2] = torch.where(is_repeated, tokens[:, 1::2], IGNORE)
    return tokens[:, :-1], labels[:, :-1]


def _fuzzy(
    config: MadFuzzy, batch: int, generator: torch.Generator, split: Split
) -> tuple[Tensor, Tensor]:
    T, motif = config.length, config.motif
    keys = (config.vocab - 1) // 2
    max_pairs = T // 2 + 1  # of two tokens or more; the last pair is that of the question

    def sizes() -> list[list[int]]:
        return (1 + torch.randint(motif, (batch, max_pairs), generator=generator)).tolist()

    def motifs(count: int, first: int) -> list[list[list[int]]]:
        tokens = sample_without_replacement(batch * max_pairs, count, motif, generator) + first
        return tokens.view(batch, max_pairs, motif).tolist()

    key_sizes, value_sizes = sizes(), sizes()
    key_motifs, value_motifs = motifs(keys, 0), motifs(config.vocab - 1 - keys, keys)
    positions = torch.rand(batch, generator=generator, dtype=torch.float64).tolist()
    inputs, labels = [], []
    for row in range(batch):
        pairs = [
            (tuple(k[: motif if split == "test" else i]), tuple(v[:j]))
            for k, v, i, j in zip(
                key_motifs[row], value_motifs[row], key_sizes[row], value_sizes[row], strict=True
            )
        ]
        tokens, answers = _fuzzy_row(config, pairs, positions[row])
        fill = [config.vocab - 1] * (T + 1 - len(tokens))
        tokens, answers = fill + tokens, [IGNORE] * len(fill) + answers
        inputs.append(tokens[:-1])
        labels.append(tokens[1:] if split == "train" else answers[1:])
    shape = (batch, T)
    return torch.tensor(inputs).view(shape), torch.tensor(labels).view(shape)


def _fuzzy_row(
    config: MadFuzzy, pairs: list[tuple[tuple[int, ...], tuple[int, ...]]], position: float
) -> tuple[list[int], list[int]]:
    """Return the tokens of one instance, and the label at each."""
    question, answer = pairs[-1]
    size = len(question) + len(answer)
    # Early enough to fit for any sizes of the pairs before it.
    start = int(position * (config.length - size - 4 * config.motif))
    memory, used = {question: answer}, set[tuple[int, ...]]()
    tokens: list[int] = []
    answers: list[int] = []

    def write(key: tuple[int, ...]) -> None:
        value = memory[key]
        tokens.extend(key + value)
        answers.extend([IGNORE] * len(key))
        answers.extend(value if key in used else [IGNORE] * len(value))
        used.add(key)

    others = iter(pairs[:-1])
    while len(tokens) < config.length - size - 2 * config.motif:
        if len(tokens) >= start and question not in used:
            write(question)
            continue
        key, value = next(others)
        memory.setdefault(key, value)
        write(key)
    write(question)
    return tokens, answers


def _memorization(
    config: MadMemorization, batch: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    facts = config.map.to(generator.device)
    shape = (batch, config.length // 2)
    key = torch.randint(len(facts), shape, generator=generator, device=generator.device)
    inputs = torch.stack([key, torch.full_like(key, config.vocab - 1)], dim=-1).flatten(1)
    labels = torch.stack([torch.full_like(key, IGNORE), facts[key]], dim=-1).flatten(1)
    return inputs, labels


def _copying(config: MadCopying, batch: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    device, T, n = generator.device, config.length, config.copies
    blanks = T - 2 * n - 1
    copied = torch.randint(config.vocab - 2, (batch, n), generator=generator, device=device)
    next_token = torch.randint(n, (batch, blanks), generator=generator, device=device)
    # Token i follows all blanks before tokens 0..i.
    upto = next_token[:, None, :] <= torch.arange(n, device=device)[:, None]  # [B, n, blanks]
    positions = torch.arange(n, device=device) + upto.sum(-1)
    inputs = torch.full((batch, T), config.vocab - 2, device=device)
    inputs.scatter_(1, positions, copied)
    inputs[:, T - n - 1] = config.vocab - 1
    labels = torch.full_like(inputs, IGNORE)
    labels[:, T - n :] = copied
    return inputs, labels


def _compression(
    config: MadCompression, batch: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    shape = (batch, config.length)
    inputs = torch.randint(config.vocab - 1, shape, generator=generator, device=generator.device)
    inputs[:, -1] = config.vocab - 1
    return inputs, inputs.clone()
