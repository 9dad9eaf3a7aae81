"""Swaps as tokens: a list of items swapped by hand gives the labels."""

from __future__ import annotations

import pytest
import torch

from recollect.tasks import SwapConfig, swap_batch
from recollect.tasks.swaps import position_pairs


@pytest.mark.parametrize("items", [2, 3, 5, 9])
def test_labels_are_the_first_item(items: int) -> None:
    config = SwapConfig(items=items, length=12)
    inputs, labels = swap_batch(config, 6, torch.Generator().manual_seed(items))
    pairs = [(i, j) for i in range(items) for j in range(i + 1, items)]
    assert config.vocab == len(pairs)
    for tokens, answers in zip(inputs.tolist(), labels.tolist(), strict=True):
        row = list(range(items))
        for token, answer in zip(tokens, answers, strict=True):
            i, j = pairs[token]
            row[i], row[j] = row[j], row[i]
            assert answer == row[0]


def test_the_published_defaults() -> None:
    assert SwapConfig() == SwapConfig(items=5, length=16)
    assert SwapConfig().vocab == 10


def test_swaps_are_uniform_and_so_is_the_end() -> None:
    config = SwapConfig(items=3, length=24)
    inputs, labels = swap_batch(config, 4000, torch.Generator().manual_seed(0))
    for values in (inputs[:, 5], labels[:, -1]):
        share = values.bincount(minlength=3).double() / 4000
        assert (share - 1 / 3).abs().max() < 5 * (2 / 9 / 4000) ** 0.5  # five standard errors


def test_pairs_are_ordered() -> None:
    assert position_pairs(4).tolist() == [[0, 1], [0, 2], [0, 3], [1, 2], [1, 3], [2, 3]]


def test_sizes_too_small_are_refused() -> None:
    with pytest.raises(ValueError, match="items must be a whole number >= 2"):
        SwapConfig(items=1)
    with pytest.raises(ValueError, match="length"):
        SwapConfig(length=0)
