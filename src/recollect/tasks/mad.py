"""The six tasks of mechanistic architecture design (Poli et al. 2024), with their difficulty axes.

| name | what is asked |
|---|---|
| ``in_context_recall`` | the value of a key that was named before, of a map drawn per sequence |
| ``noisy_recall`` | the same, with pairs of noise tokens in between |
| ``fuzzy_recall`` | the same, where keys and values are motifs of one to three tokens |
| ``memorization`` | the value of a key, of one map for all sequences |
| ``selective_copying`` | the tokens that are not blank, in order, after a sign |
| ``compression`` | the whole sequence, from what stands at its last token |

A score is the mean accuracy over the baseline and every difficulty (`mad_settings`), each trained
on its own with the best of three learning rates (1e-4, 5e-4, 1e-3) and two weight decays (0, 0.1).

*Targets.* The three recalls train on every next token and are tested on the values of keys that
were named before; fuzzy recall is tested on keys of the longest motif alone. The other tasks have
the same labels in both. Where the published program and its description differ, or it can fail,
this module says what it does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from recollect.tasks.checks import at_least, below, distinct, one_of, same_batch
from recollect.tasks.mqar import IGNORE

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
class MadRecall:
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
    """

    vocab: int = 16
    length: int = 128
    noise: float = 0.0
    noise_vocab: int = 0

    def __post_init__(self) -> None:
        at_least("MadRecall", 4, length=self.length)
        at_least("MadRecall", 0, noise_vocab=self.noise_vocab)
        at_least("MadRecall", 2 + self.noise_vocab, vocab=self.vocab)
        below("MadRecall", 0, 1, noise=self.noise)
        if self.length % 2:
            raise ValueError(f"MadRecall: length must be even, got {self.length}")
        if self.noise == 1 or (self.noise > 0 and self.noise_vocab < 1):
            raise ValueError(
                "MadRecall: noise must be below 1 and needs noise_vocab tokens, got noise = "
                f"{self.noise} and noise_vocab = {self.noise_vocab}"
            )


@dataclass(frozen=True, kw_only=True)
class MadFuzzy:
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
    """

    vocab: int = 16
    length: int = 128
    motif: int = 3

    def __post_init__(self) -> None:
        at_least("MadFuzzy", 1, motif=self.motif)
        at_least("MadFuzzy", 2 * self.motif + 1, vocab=self.vocab)
        at_least("MadFuzzy", 6 * self.motif, length=self.length)


@dataclass(frozen=True, kw_only=True)
class MadMemorization:
    """Facts: one map from keys to values for every sequence.

    The last token says "insert"; of the others the lower half is keys, the upper half values.
    Instances are key, insert, key, insert, …; the label at each insert is the key's value.

    Args:
        vocab: V.
        length: T, even.
        facts: the seed of the map.

    Raises:
        ValueError: a number out of range, naming it.
    """

    vocab: int = 256
    length: int = 32
    facts: int = 0

    def __post_init__(self) -> None:
        at_least("MadMemorization", 3, vocab=self.vocab)
        at_least("MadMemorization", 2, length=self.length)
        at_least("MadMemorization", 0, facts=self.facts)
        if self.length % 2:
            raise ValueError(f"MadMemorization: length must be even, got {self.length}")

    @property
    def map(self) -> Tensor:
        """The value of every key, int64 ``[(V − 1) // 2]``; no two keys share one."""
        keys = (self.vocab - 1) // 2
        generator = torch.Generator().manual_seed(self.facts)
        return keys + torch.randperm(self.vocab - 1 - keys, generator=generator)[:keys]


@dataclass(frozen=True, kw_only=True)
class MadCopying:
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
    """

    vocab: int = 16
    length: int = 256
    copies: int = 16

    def __post_init__(self) -> None:
        at_least("MadCopying", 3, vocab=self.vocab)
        at_least("MadCopying", 1, copies=self.copies)
        at_least("MadCopying", 2 * self.copies + 2, length=self.length)


@dataclass(frozen=True, kw_only=True)
class MadCompression:
    """Compression: T − 1 uniform tokens and a sign; labels are the inputs themselves.

    A model must use nothing of its layers' outputs but the last, and decode it together with an
    embedding of the position that is asked.

    Args:
        vocab: V; token V − 1 is the sign.
        length: T.

    Raises:
        ValueError: a number out of range, naming it.
    """

    vocab: int = 16
    length: int = 32

    def __post_init__(self) -> None:
        at_least("MadCompression", 2, vocab=self.vocab, length=self.length)


MadConfig = MadRecall | MadFuzzy | MadMemorization | MadCopying | MadCompression


@dataclass(frozen=True, kw_only=True)
class MadSetting:
    """One training of the benchmark.

    Attributes:
        task: the task's name.
        axis, value: what differs from the baseline; ``""`` and 0 for the baseline.
        config: what an instance looks like.
        train, test: how many examples there are.
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
    """
    one_of("mad_settings", tuple(_TASKS), task=task)
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


def mad(
    config: MadConfig,
    batch: int,
    generator: torch.Generator,
    *,
    split: Split = "train",
) -> tuple[Tensor, Tensor]:
    """Draw instances of the task that the configuration is of.

    Args:
        config: one of the five kinds.
        batch: B, instances.
        generator: the only source of randomness.
        split: which labels, see the module.

    Returns:
        ``(inputs, labels)``, int64 ``[B, T]`` (``[B, T − 1]`` of `MadRecall`).

    Raises:
        ValueError: a negative batch, or another split.
    """
    same_batch("mad", batch)
    one_of("mad", ("train", "test"), split=split)
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
    shown = torch.zeros(batch, keys, dtype=torch.int64, device=device)
    shown = shown.scatter_add(1, key, (~noise).long()) > 0
    score = torch.rand(batch, keys, generator=generator, device=device).masked_fill(~shown, -1)
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
    again = same.tril(-1).any(-1) & ~noise
    labels = torch.full_like(tokens, IGNORE)
    labels[:, 0::2] = torch.where(again, tokens[:, 1::2], IGNORE)
    return tokens[:, :-1], labels[:, :-1]


def _fuzzy(
    config: MadFuzzy, batch: int, generator: torch.Generator, split: Split
) -> tuple[Tensor, Tensor]:
    T, motif = config.length, config.motif
    keys = (config.vocab - 1) // 2
    most = T // 2 + 1  # pairs take two tokens at least; the last row is the question's pair

    def sizes() -> list[list[int]]:
        return (1 + torch.randint(motif, (batch, most), generator=generator)).tolist()

    def motifs(count: int, first: int) -> list[list[list[int]]]:
        drawn = distinct(batch * most, count, motif, generator) + first
        return drawn.view(batch, most, motif).tolist()

    key_sizes, value_sizes = sizes(), sizes()
    key_motifs, value_motifs = motifs(keys, 0), motifs(config.vocab - 1 - keys, keys)
    places = torch.rand(batch, generator=generator, dtype=torch.float64).tolist()
    inputs, labels = [], []
    for row in range(batch):
        pairs = [
            (tuple(k[: motif if split == "test" else i]), tuple(v[:j]))
            for k, v, i, j in zip(
                key_motifs[row], value_motifs[row], key_sizes[row], value_sizes[row], strict=True
            )
        ]
        tokens, answers = _fuzzy_row(config, pairs, places[row])
        fill = [config.vocab - 1] * (T + 1 - len(tokens))
        tokens, answers = fill + tokens, [IGNORE] * len(fill) + answers
        inputs.append(tokens[:-1])
        labels.append(tokens[1:] if split == "train" else answers[1:])
    shape = (batch, T)
    return torch.tensor(inputs).view(shape), torch.tensor(labels).view(shape)


def _fuzzy_row(
    config: MadFuzzy, pairs: list[tuple[tuple[int, ...], tuple[int, ...]]], place: float
) -> tuple[list[int], list[int]]:
    """Tokens of one instance and, beside each, what is asked there."""
    asked, answer = pairs[-1]
    size = len(asked) + len(answer)
    # Early enough to be named before the end, whatever the pairs before it take.
    start = int(place * (config.length - size - 4 * config.motif))
    memory, seen = {asked: answer}, set[tuple[int, ...]]()
    tokens: list[int] = []
    answers: list[int] = []

    def write(key: tuple[int, ...]) -> None:
        value = memory[key]
        tokens.extend(key + value)
        answers.extend([IGNORE] * len(key))
        answers.extend(value if key in seen else [IGNORE] * len(value))
        seen.add(key)

    drawn = iter(pairs[:-1])
    while len(tokens) < config.length - size - 2 * config.motif:
        if len(tokens) >= start and asked not in seen:
            write(asked)
            continue
        key, value = next(drawn)
        memory.setdefault(key, value)
        write(key)
    write(asked)
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
    before = torch.randint(n, (batch, blanks), generator=generator, device=device)
    # Token i comes after all blanks that stand before tokens 0..i.
    upto = before[:, None, :] <= torch.arange(n, device=device)[:, None]  # [B, n, blanks]
    places = torch.arange(n, device=device) + upto.sum(-1)
    inputs = torch.full((batch, T), config.vocab - 2, device=device)
    inputs.scatter_(1, places, copied)
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
