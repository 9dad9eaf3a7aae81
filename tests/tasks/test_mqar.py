from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from recollect.tasks import IGNORE, MqarConfig, mqar, mqar_mix


@st.composite
def configs(draw: st.DrawFn) -> MqarConfig:
    pairs = draw(st.integers(1, 9))
    return MqarConfig(
        vocab=draw(st.integers(2 * pairs + 2, 80)),
        pairs=pairs,
        length=4 * pairs + 2 * draw(st.integers(0, 20)),
        power=draw(st.sampled_from([0.01, 0.5, 1.0, 2.0])),
        fill=draw(st.sampled_from(["zero", "random"])),
    )


@given(configs(), st.integers(0, 5), st.integers(0, 2**31))
def test_a_dictionary_solves_every_instance(config: MqarConfig, batch: int, seed: int) -> None:
    inputs, labels = mqar(config, batch, torch.Generator().manual_seed(seed))
    assert inputs.shape == labels.shape == (batch, config.length)
    assert inputs.dtype == labels.dtype == torch.int64
    half, context = config.vocab // 2, 2 * config.pairs
    for tokens, answers in zip(inputs.tolist(), labels.tolist(), strict=True):
        memory = dict(zip(tokens[0:context:2], tokens[1:context:2], strict=True))
        assert len(memory) == config.pairs, "keys repeat"
        assert len(set(memory.values())) == config.pairs, "values repeat"
        assert all(1 <= key < half for key in memory)
        assert all(half <= value < config.vocab for value in memory.values())
        requested = [t for t, answer in enumerate(answers) if answer != IGNORE]
        assert [memory[tokens[t]] for t in requested] == [answers[t] for t in requested]
        assert {tokens[t] for t in requested} == set(memory), "each key is asked once"
        assert all(t >= context and t % 2 == 0 for t in requested)
        if config.fill == "zero":
            rest = set(range(context, config.length)) - set(requested)
            assert all(tokens[t] == 0 for t in rest)


def test_one_seed_gives_one_batch(generator: torch.Generator) -> None:
    config = MqarConfig(vocab=64, pairs=4, length=32)
    first = mqar(config, 8, generator)
    repeated = mqar(config, 8, torch.Generator().manual_seed(0))
    later = mqar(config, 8, generator)
    assert all(torch.equal(a, b) for a, b in zip(first, repeated, strict=True))
    assert not torch.equal(first[0], later[0])


def test_the_first_query_slot_follows_the_power_law(generator: torch.Generator) -> None:
    # With one pair there is one draw, so its distribution is the power law.
    config = MqarConfig(vocab=8, pairs=1, length=22, power=0.01)
    draws = 20_000
    _, labels = mqar(config, draws, generator)
    counts = (labels != IGNORE)[:, 2::2].sum(0).double()
    expected = torch.arange(1, 11).double() ** (0.01 - 1)
    expected = draws * expected / expected.sum()
    # Chi-squared with 9 degrees of freedom passes 33.7 once in 10,000 times; the seed is fixed.
    assert float(((counts - expected) ** 2 / expected).sum()) < 33.7


def test_two_slots_follow_successive_draws_without_replacement(generator: torch.Generator) -> None:
    config = MqarConfig(vocab=8, pairs=2, length=10, power=0.5)  # three slots, two of them taken
    draws = 20_000
    _, labels = mqar(config, draws, generator)
    left_out = (labels[:, 4::2] == IGNORE).double().mean(0)
    p = torch.arange(1, 4).double() ** -0.5
    p = (p / p.sum()).tolist()
    for slot in range(3):
        a, b = (other for other in range(3) if other != slot)
        chance = p[a] * p[b] / (1 - p[a]) + p[b] * p[a] / (1 - p[b])
        # Five standard errors of a share of 20,000 draws are at most 0.018.
        assert abs(float(left_out[slot]) - chance) < 0.018


def test_keys_and_values_are_uniform_and_unrelated_to_the_order(
    generator: torch.Generator,
) -> None:
    config = MqarConfig(vocab=12, pairs=3, length=12)
    draws = 10_000
    inputs, _ = mqar(config, draws, generator)
    for position in range(3):
        keys = inputs[:, 2 * position].bincount(minlength=12)[1:6].double() / draws
        values = inputs[:, 2 * position + 1].bincount(minlength=12)[6:].double() / draws
        assert float((keys - 1 / 5).abs().max()) < 0.02
        assert float((values - 1 / 6).abs().max()) < 0.02


def test_the_largest_instance_that_fits_uses_every_slot_and_key(
    generator: torch.Generator,
) -> None:
    config = MqarConfig(vocab=18, pairs=8, length=32)
    inputs, labels = mqar(config, 16, generator)
    assert inputs[:, 0:16:2].sort().values.tolist() == [list(range(1, 9))] * 16
    assert bool((labels[:, 16::2] != IGNORE).all())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"length": 33}, "length must be even.*try 34"),
        ({"length": 14}, "at least 16"),
        ({"vocab": 8}, "3 keys, fewer than the 4 pairs; vocab must be at least 10"),
        ({"vocab": 1}, "0 keys"),
        ({"pairs": 0}, "pairs must be a whole number >= 1, not 0"),
        ({"length": 32.0}, "length must be a whole number"),
        ({"power": 0.0}, "power must be a finite number > 0, not"),
        ({"power": float("nan")}, "power must be a finite number > 0, not"),
        ({"fill": "noise"}, "one of 'zero', 'random', not 'noise'"),
    ],
)
def test_impossible_instances_are_refused(change: dict[str, object], message: str) -> None:
    good: dict[str, object] = {"vocab": 64, "pairs": 4, "length": 32}
    with pytest.raises(ValueError, match=message):
        MqarConfig(**(good | change))  # type: ignore[arg-type]


def test_a_negative_batch_is_refused(generator: torch.Generator) -> None:
    with pytest.raises(ValueError, match="mqar: batch must be a whole number >= 0, not -"):
        mqar(MqarConfig(vocab=64, pairs=4, length=32), -1, generator)


def test_the_published_mixes() -> None:
    one = mqar_mix("one length", length=256)
    assert one.train == ((MqarConfig(vocab=8192, pairs=16, length=256), 100_000),)
    assert one.test == ((one.train[0][0], 3_000),)
    mixed = mqar_mix("mixed")
    assert sum(count for _, count in mixed.train) == 180_000
    assert max(config.pairs for config, _ in mixed.train) == 64
    assert [(c.length, c.pairs) for c, _ in mixed.test][-2:] == [(512, 128), (1024, 256)]
    assert {c.fill for c, _ in (*mixed.train, *mixed.test)} == {"random"}
    with pytest.raises(ValueError, match="512, got 1024"):
        mqar_mix("one length", length=1024)
    with pytest.raises(ValueError, match="'one length', 'mixed', not"):
        mqar_mix("both")  # type: ignore[arg-type]
