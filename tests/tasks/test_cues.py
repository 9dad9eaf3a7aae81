"""TTR's associative recall: a dictionary and TTR's untrained construction both solve it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from recollect.tasks import IGNORE, CueConfig, cues


@st.composite
def configs(draw: st.DrawFn) -> CueConfig:
    pairs = draw(st.integers(1, 9))
    return CueConfig(
        pairs=pairs,
        length=2 * draw(st.integers(1, 20)),
        vocab_pairs=draw(st.sampled_from([None, pairs, pairs + 3])),
        queries=draw(st.integers(1, 3)),
        asks=draw(st.sampled_from(["end", "repeats"])),
    )


@given(configs(), st.integers(0, 4), st.integers(0, 2**31))
def test_a_dictionary_solves_every_instance(config: CueConfig, batch: int, seed: int) -> None:
    inputs, labels = cues(config, batch, torch.Generator().manual_seed(seed))
    assert inputs.shape == labels.shape == (batch, config.total)
    for tokens, answers in zip(inputs.tolist(), labels.tolist(), strict=True):
        memory: dict[int, int] = {}
        for t, token in enumerate(tokens):
            if t % 2 == 0:
                assert 0 <= token < config.cues
                requested = t >= config.length or (config.asks == "repeats" and token in memory)
                assert answers[t] == (memory[token] if requested else IGNORE)
            else:
                assert config.cues <= token < config.vocab
                assert memory.setdefault(tokens[t - 1], token) == token, "one response per cue"
                assert answers[t] == IGNORE
        assert len(memory) <= config.pairs
        assert len(set(memory.values())) == len(memory), "one cue per response"


def test_linear_attention_over_bigrams_solves_it_untrained() -> None:
    """TTR eqs. 57 and 58: orthonormal embeddings, k_t = x_(t−1), v_t = q_t = x_t."""
    config = CueConfig(pairs=8, length=64)
    inputs, labels = cues(config, 20, torch.Generator().manual_seed(0))
    x = torch.eye(config.vocab).double()[inputs]
    y = sum(
        x[:, t] * (x[:, t - 1] * x[:, -1]).sum(-1, keepdim=True) for t in range(1, config.total)
    )
    assert torch.equal(y.argmax(-1), labels[:, -1])


def test_pairs_repeat_and_are_uniform() -> None:
    config = CueConfig(pairs=4, length=8, vocab_pairs=6)
    inputs, _ = cues(config, 6000, torch.Generator().manual_seed(0))
    named = inputs[:, 0]
    share = named.bincount(minlength=6).double() / 6000
    # Five standard errors of a frequency of 1/6.
    assert (share - 1 / 6).abs().max() < 5 * (5 / 36 / 6000) ** 0.5
    repeated = (inputs[:, 0] == inputs[:, 2]).double().mean()
    assert abs(float(repeated) - 1 / 4) < 5 * (3 / 16 / 6000) ** 0.5


def test_the_map_is_drawn_for_each_sequence() -> None:
    config = CueConfig(pairs=4, length=40)
    inputs, _ = cues(config, 200, torch.Generator().manual_seed(0))
    followers = {int(row[list(row[::2]).index(0) * 2 + 1]) for row in inputs if 0 in row[::2]}
    assert followers == {4, 5, 6, 7}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"length": 7}, "try 8"),
        ({"pairs": 0}, "pairs must be a whole number >= 1, not 0"),
        ({"vocab_pairs": 3}, "at least 4"),
        ({"queries": 0}, "queries"),
        ({"asks": "all"}, "one of 'end', 'repeats', not 'all'"),
    ],
)
def test_impossible_instances_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CueConfig(**({"pairs": 4, "length": 8} | changes))  # type: ignore[arg-type]


def test_a_negative_batch_is_refused() -> None:
    with pytest.raises(ValueError, match="cues: batch must be a whole number >= 0, not -"):
        cues(CueConfig(pairs=1, length=2), -1, torch.Generator())
