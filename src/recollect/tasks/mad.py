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

from typing import Literal

import torch
from torch import Tensor

from recollect.fields import choice_check, int_check, validate
from recollect.tasks.drawn import distinct
from recollect.tasks.mad_config import (
    MadCompression,
    MadConfig,
    MadCopying,
    MadFuzzy,
    MadMemorization,
    MadRecall,
    MadSetting,
    mad_settings,
)
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
