"""MAD's tasks, each solved by plain dictionaries and lists."""

from __future__ import annotations

import pytest
import torch

from recollect.tasks import (
    IGNORE,
    MadCompression,
    MadCopying,
    MadFuzzy,
    MadMemorization,
    MadRecall,
    mad,
    mad_settings,
)

RECALLS = [
    MadRecall(),
    MadRecall(length=20),
    MadRecall(vocab=32, noise=0.2, noise_vocab=16),
    MadRecall(vocab=7, length=12, noise=0.8, noise_vocab=3),
]


def rows(config: object, split: str, batch: int = 12, seed: int = 0):
    inputs, labels = mad(config, batch, torch.Generator().manual_seed(seed), split=split)  # type: ignore[arg-type]
    assert inputs.dtype == labels.dtype == torch.int64
    assert inputs.shape == labels.shape
    return zip(inputs.tolist(), labels.tolist(), strict=True)


@pytest.mark.parametrize("config", RECALLS)
def test_recall_is_solved_by_a_dictionary(config: MadRecall) -> None:
    plain = config.vocab - config.noise_vocab
    for tokens, answers in rows(config, "test"):
        assert len(tokens) == config.length - 1
        memory: dict[int, int] = {}
        for t in range(0, config.length, 2):
            token, answer = tokens[t], answers[t]
            if token >= plain:
                assert answer == IGNORE and tokens[t + 1] >= plain, "noise comes in pairs"
                continue
            assert token < plain // 2, "a key"
            assert answer == memory.get(token, IGNORE)
            if t + 1 < config.length - 1:
                value = tokens[t + 1]
                assert plain // 2 <= value < plain
                assert answers[t + 1] == IGNORE
                assert memory.setdefault(token, value) == value, "one value per key"
        assert answers[-1] != IGNORE, "the last key was named before"


def test_recalls_train_on_every_next_token() -> None:
    for config in (MadRecall(), MadRecall(vocab=32, noise=0.4, noise_vocab=16), MadFuzzy()):
        for tokens, answers in rows(config, "train"):
            assert answers[:-1] == tokens[1:]
        # The same draw with the requested labels.
        test = list(rows(config, "test"))
        train = list(rows(config, "train"))
        if isinstance(config, MadRecall):
            for (tokens, requested), (same, following) in zip(test, train, strict=True):
                assert tokens == same
                assert all(a in (IGNORE, b) for a, b in zip(requested, following, strict=True))


def test_noise_has_the_requested_fraction() -> None:
    config = MadRecall(vocab=32, noise=0.4, noise_vocab=16)
    inputs, _ = mad(config, 400, torch.Generator().manual_seed(0))
    noisy = (inputs[:, :-1:2] >= 16).double()
    pairs = noisy.shape[1]  # 63, one of which is never noise
    expected = 0.4 * (pairs - 1) / pairs
    assert abs(float(noisy.mean()) - expected) < 5 * (0.24 / noisy.numel()) ** 0.5


@pytest.mark.parametrize("split", ["train", "test"])
@pytest.mark.parametrize("config", [MadFuzzy(), MadFuzzy(vocab=9, length=40), MadFuzzy(motif=1)])
def test_fuzzy_recall_is_solved_by_a_dictionary_of_motifs(config: MadFuzzy, split: str) -> None:
    keys, fill = (config.vocab - 1) // 2, config.vocab - 1
    asked_somewhere = 0
    for tokens, answers in rows(config, split, batch=30):
        assert len(tokens) == config.length
        line = [*tokens, answers[-1]]  # the last answer is the token after the last
        start = next(i for i, token in enumerate(line) if token != fill)
        labels = [IGNORE, *answers]  # next to the requested token
        memory: dict[tuple[int, ...], tuple[int, ...]] = {}
        at = start
        while at < len(line):
            key_end = next(i for i in range(at, len(line)) if line[i] >= keys)
            end = next((i for i in range(key_end, len(line)) if line[i] < keys), len(line))
            key, value = tuple(line[at:key_end]), tuple(line[key_end:end])
            last = end == len(line)
            assert len(key) == config.motif if split == "test" else 1 <= len(key) <= config.motif
            assert len(set(key)) == len(key) and len(set(value)) == len(value)
            if split == "test":
                expected = list(value) if key in memory else [IGNORE] * len(value)
                assert labels[key_end:end] == expected
                assert all(label == IGNORE for label in labels[at:key_end])
                asked_somewhere += key in memory
            assert memory.setdefault(key, value) == value or last
            if last:
                assert key in memory, "the question was named before"
            at = end
    assert split == "train" or asked_somewhere > 0


def test_sizes_of_motifs_are_uniform() -> None:
    sizes = [0, 0, 0]
    for tokens, _ in rows(MadFuzzy(vocab=64, length=128), "train", batch=60):
        line = [t for t in tokens if t != 63]
        run = 0
        for token in line[:90]:  # far from the end, which depends on the length
            if token < 31:
                run += 1
            elif run:
                sizes[run - 1] += 1
                run = 0
    share = torch.tensor(sizes).double() / sum(sizes)
    assert (share - 1 / 3).abs().max() < 5 * (2 / 9 / sum(sizes)) ** 0.5


def test_memorization_has_one_map_for_all() -> None:
    config = MadMemorization(vocab=21, length=8)
    facts = config.map.tolist()
    assert len(facts) == 10 == len(set(facts))
    assert all(10 <= value < 20 for value in facts)
    for seed in (0, 1):
        for tokens, answers in rows(config, "train", seed=seed):
            assert tokens[1::2] == [20] * 4
            assert answers[0::2] == [IGNORE] * 4
            assert answers[1::2] == [facts[key] for key in tokens[0::2]]
    assert MadMemorization(vocab=21, length=8, facts=1).map.tolist() != facts


def test_copying_is_solved_by_skipping_blanks() -> None:
    config = MadCopying(vocab=10, length=40, copies=6)
    for tokens, answers in rows(config, "test"):
        sign = tokens.index(9)
        assert sign == 40 - 6 - 1
        copied = [token for token in tokens[:sign] if token != 8]
        assert len(copied) == 6
        assert tokens[sign - 1] != 8, "no blank between the last token and the sign"
        assert tokens[sign + 1 :] == [8] * 6
        assert answers == [IGNORE] * (sign + 1) + copied


def test_compression_labels_every_token() -> None:
    for tokens, answers in rows(MadCompression(vocab=5, length=9), "train"):
        assert answers == tokens
        assert tokens[-1] == 4
        assert all(0 <= token < 4 for token in tokens[:-1])


def test_settings_are_the_published_axes() -> None:
    counts = {
        "in_context_recall": 1 + 3 + 3 + 4,
        "noisy_recall": 1 + 3 + 3 + 4 + 3,
        "fuzzy_recall": 1 + 3 + 3 + 4,
        "memorization": 1 + 5,
        "selective_copying": 1 + 3 + 2 + 4 + 3,
        "compression": 1 + 3 + 3 + 4,
    }
    for task, count in counts.items():
        settings = mad_settings(task)
        assert len(settings) == count
        base = settings[0]
        assert base.axis == ""
        assert base.train == (256 if task == "memorization" else 12_800)
        assert base.test == 1280
        for setting in settings[1:]:
            changed = {
                name
                for name in vars(base.config)
                if getattr(setting.config, name) != getattr(base.config, name)
            }
            assert changed == ({setting.axis} if setting.axis != "train" else set())
            assert (setting.train != base.train) == (setting.axis == "train")
    with pytest.raises(ValueError, match="task must be"):
        mad_settings("recall")


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        (MadRecall, {"length": 7}, "even"),
        (MadRecall, {"noise": 0.5}, "noise_vocab"),
        (
            MadRecall,
            {"noise": 1.0, "noise_vocab": 2},
            r"number in \[0, 1\), not 1",
        ),
        (MadFuzzy, {"vocab": 6}, "vocab must be a whole number >= 7, not 6"),
        (MadCopying, {"length": 33}, "length"),
        (MadMemorization, {"length": 5}, "even"),
        (MadCompression, {"vocab": 1}, "vocab"),
    ],
)
def test_impossible_instances_are_refused(
    kind: type, changes: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        kind(**changes)
