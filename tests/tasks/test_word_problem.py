"""The word problem: labels are running products, and a delta product follows them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import recollect as rc
from recollect.tasks import IGNORE, WordConfig, word_batch, word_config
from recollect.tasks.word_problem import cayley_table, permutations


@pytest.mark.parametrize("items", [1, 2, 3, 4])
def test_labels_are_running_products(items: int) -> None:
    """Three (or n) items are moved by one permutation after another."""
    config = WordConfig(items=items, length=9)
    inputs, labels = word_batch(config, 5, torch.Generator().manual_seed(1))
    group = permutations(items)
    assert inputs.shape == labels.shape == (5, 10)
    assert bool((inputs[:, 0] == len(group)).all())
    assert bool((labels[:, 0] == IGNORE).all())
    assert config.vocab == len(group) + 1
    for word, answers in zip(inputs[:, 1:].tolist(), labels[:, 1:].tolist(), strict=True):
        places = list(range(items))  # position of item i
        for p, answer in zip(word, answers, strict=True):
            places = [group[p][place] for place in places]
            assert group[answer] == tuple(places)


@pytest.mark.parametrize(("name", "size"), [("parity", 2), ("S3", 6), ("A4", 12), ("A5", 60)])
def test_named_groups(name: str, size: int) -> None:
    """Items moved by hand, by one permutation after another; even ones only in Aₙ."""
    config = word_config(name, length=7)
    group = permutations(config.items, config.group)
    assert len(group) == size == config.vocab - 1
    inputs, labels = word_batch(config, 4, torch.Generator().manual_seed(0))
    for word, answers in zip(inputs[:, 1:].tolist(), labels[:, 1:].tolist(), strict=True):
        places = list(range(config.items))
        for p, answer in zip(word, answers, strict=True):
            places = [group[p][place] for place in places]
            assert group[answer] == tuple(places)
    if name.startswith("A"):
        signs = [torch.linalg.det(torch.eye(config.items)[list(p)]) for p in group]
        assert all(sign > 0.5 for sign in signs)


def test_parity_counts_ones() -> None:
    inputs, labels = word_batch(word_config("parity", 20), 5, torch.Generator().manual_seed(0))
    assert torch.equal(labels[:, 1:], inputs[:, 1:].cumsum(1) % 2)


def test_s5_has_120_permutations() -> None:
    assert word_config("S5") == WordConfig(items=5, length=32)
    assert word_config("S5").vocab == 121
    with pytest.raises(ValueError, match="'A4', 'A5', not 'M11'"):
        word_config("M11")


def test_products_are_a_group() -> None:
    table = cayley_table(3)
    assert table.shape == (6, 6)
    everything = set(range(6))
    assert all(set(row) == everything for row in table.tolist())
    assert all(set(column) == everything for column in table.T.tolist())
    assert table[0].tolist() == table[:, 0].tolist() == list(range(6))
    assert not torch.equal(table, table.T)  # S₃ does not commute
    first = table[table]  # (g h) k
    right = torch.stack([table[g][table] for g in range(6)])  # g (h k)
    assert torch.equal(first, right)


def test_words_depend_on_the_generator_only() -> None:
    config = WordConfig()
    one, two, other = (word_batch(config, 4, torch.Generator().manual_seed(s)) for s in (3, 3, 4))
    assert torch.equal(one[0], two[0])
    assert not torch.equal(one[0], other[0])


def test_empty_words_are_refused() -> None:
    with pytest.raises(ValueError, match="length"):
        WordConfig(length=0)


class Tracker(nn.Module):
    """Embedding, one memory layer, and a linear readout."""

    def __init__(self, steps: int, vocab: int, width: int = 32, heads: int = 2) -> None:
        super().__init__()
        preset = rc.zoo.get("delta_product")
        recipe = preset.recipe.replace(
            algorithm=rc.algorithm.GradientDescent(updates_per_token=steps)
        )
        # A swap of i and j is a reflection along e_i − e_j, whose signs SiLU would remove.
        options = replace(preset.options, conv_size=0, conv_activation="none")
        self.embed = nn.Embedding(vocab, width)
        self.layer = rc.MemoryLayer(width, heads, recipe, options)
        self.answer = nn.Linear(width, vocab - 1)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        return self.answer(x + self.layer(x, output_final_state=False)[0])


def trained(steps: int, *, updates: int = 400, seed: int = 0) -> Tensor:
    """Return accuracy by permutation, at the end of words of twice the training length."""
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    config = WordConfig(length=16)
    model = Tracker(steps, config.vocab)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=updates)
    for _ in range(updates):
        inputs, labels = word_batch(config, 64, g)
        loss = functional.cross_entropy(
            model(inputs).flatten(0, 1), labels.flatten(), ignore_index=IGNORE
        )
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    inputs, labels = word_batch(WordConfig(length=32), 256, g)
    with torch.no_grad():
        result = model(inputs).argmax(-1)[:, -8:]
    right = (result == labels[:, -8:]).double()
    return torch.stack([right[labels[:, -8:] == p].mean() for p in range(6)])


@pytest.mark.slow
def test_two_steps_learn_s3_and_one_does_not() -> None:
    """Rates to 2 make reflections, two of which make every permutation of three items."""
    two = trained(2)
    assert float(two.min()) > 0.95, two
    one = trained(1)
    assert float(one.mean()) < 0.6, one
