from __future__ import annotations

import itertools
import math
import random
import sys
from pathlib import Path

import pytest
import torch

from recollect.tasks import (
    IGNORE,
    TextCorpus,
    batches,
    bigram_bits_per_byte,
    heldout_windows,
    load_text,
)
from recollect.tasks.documentation import prose
from recollect.tasks.text import _default_corpus


def decode(part: torch.Tensor) -> str:
    return bytes(part.tolist()).decode("utf-8")


def paragraphs_of(part: torch.Tensor) -> list[str]:
    return decode(part).split("\n\n")


def corpus_of(train: bytes, heldout: bytes) -> TextCorpus:
    def tensor(data: bytes) -> torch.Tensor:
        return torch.tensor(list(data), dtype=torch.uint8)

    return TextCorpus(train=tensor(train), heldout=tensor(heldout), sha256="", source="a test")


def some_paragraphs(count: int, seed: int = 0) -> list[str]:
    rng = random.Random(seed)
    words = ["".join(rng.choices("abcdefghij", k=rng.randint(3, 8))) for _ in range(200)]
    return [" ".join(rng.choices(words, k=20)) for _ in range(count)]


@pytest.fixture(scope="module")
def default_corpus() -> TextCorpus:
    return load_text()


class TestDefaultText:
    def test_is_large_and_reads_as_english(self, default_corpus: TextCorpus) -> None:
        assert 1_000_000 < default_corpus.train.numel() <= 8_000_000
        text = decode(default_corpus.train)
        assert text.isascii()
        assert ">>>" not in text
        words = text.split()
        common = sum(word in {"the", "of", "a", "is", "to", "and"} for word in words)
        assert common > 0.12 * len(words)

    def test_parts_share_no_paragraph(self, default_corpus: TextCorpus) -> None:
        train = paragraphs_of(default_corpus.train)
        heldout = paragraphs_of(default_corpus.heldout)
        assert len(set(train)) == len(train)
        assert not set(train) & set(heldout)
        assert 0.03 < len(heldout) / (len(train) + len(heldout)) < 0.07

    @pytest.mark.slow
    def test_gathering_is_repeatable_without_imports(self, default_corpus: TextCorpus) -> None:
        initial = set(sys.modules)
        _default_corpus.cache_clear()
        assert load_text().sha256 == default_corpus.sha256
        assert set(sys.modules) == initial
        assert "this" not in initial, "a module that prints a poem when it is imported"

    def test_changes_of_a_corpus_stay_in_it(self, default_corpus: TextCorpus) -> None:
        changed = load_text()
        changed.train.zero_()
        changed.heldout.zero_()
        repeated = load_text()
        assert repeated.train.all() and repeated.heldout.all()
        assert repeated.sha256 == default_corpus.sha256

    def test_the_bigram_is_better_than_bytes_alone(self, default_corpus: TextCorpus) -> None:
        share = torch.bincount(default_corpus.train.long(), minlength=256).double()
        share = share[share > 0] / share.sum()
        unigram = float(-(share * share.log2()).sum())
        assert 3.0 < bigram_bits_per_byte(default_corpus) < unigram - 0.5

    def test_name_describes_the_text(self, default_corpus: TextCorpus) -> None:
        assert "Python" in default_corpus.source
        assert torch.__version__ in default_corpus.source
        assert "held out" in repr(default_corpus)


class TestProse:
    def test_keeps_sentences_and_drops_the_rest(self) -> None:
        doc = """Return the mean of all the elements in the given input tensor.

            The ``dim`` argument names the dimension, or the dimensions, over which
            :attr:`input` is reduced to one value.

            +------+------+
            | a    | b    |
            +------+------+

            .. math:: out_i = sum_j input_ij + beta - gamma over all of the things that are here

            This is a sentence with enough words before an example begins below:
            >>> print("this output must never be part of the text that is learned from")
            this output must never be part of the text that is learned from

            x = foo(bar[0], baz={"a": 1}) + f(y)[::-1]; return (x, y, z)
        """
        assert list(prose(doc)) == [
            "Return the mean of all the elements in the given input tensor.",
            "The dim argument names the dimension, or the dimensions, over which input is reduced "
            "to one value.",
            "This is a sentence with enough words before an example begins below:",
        ]


class TestOwnFile:
    def test_every_paragraph_is_in_one_part_with_its_line_breaks(self, tmp_path: Path) -> None:
        paragraphs = some_paragraphs(400)
        paragraphs[3] = "Ein Löwe saß\n    auf dem Dach."
        path = tmp_path / "own.txt"
        path.write_text("\n \n\n".join(paragraphs), "utf-8")
        corpus = load_text(path)
        result = paragraphs_of(corpus.train) + paragraphs_of(corpus.heldout)
        assert sorted(result) == sorted(paragraphs)
        assert corpus.source == str(path)

    def test_repeats_are_dropped_before_the_split(self, tmp_path: Path) -> None:
        paragraphs = some_paragraphs(400)
        single, triple = tmp_path / "once.txt", tmp_path / "thrice.txt"
        single.write_text("\n\n".join(paragraphs), "utf-8")
        shouted = [p.upper() + " 17!" for p in paragraphs]
        triple.write_text("\r\n\r\n".join([*paragraphs, *shouted, *paragraphs]), "utf-8")
        assert load_text(single).sha256 == load_text(triple).sha256

    def test_a_paragraphs_part_does_not_depend_on_the_others(self, tmp_path: Path) -> None:
        paragraphs = some_paragraphs(800)
        path = tmp_path / "own.txt"
        path.write_text("\n\n".join(paragraphs), "utf-8")
        all_heldout = set(paragraphs_of(load_text(path).heldout))
        path.write_text("\n\n".join(reversed(paragraphs[:500])), "utf-8")
        some_heldout = set(paragraphs_of(load_text(path).heldout))
        assert some_heldout == all_heldout & set(paragraphs[:500])

    def test_a_file_without_empty_lines_is_cut_at_line_ends(self, tmp_path: Path) -> None:
        lines = some_paragraphs(1000)
        path = tmp_path / "lines.txt"
        path.write_text("\n".join(lines), "utf-8")
        corpus = load_text(path)
        result = decode(corpus.train) + "\n\n" + decode(corpus.heldout)
        assert sorted(result.replace("\n\n", "\n").split("\n")) == sorted(lines)

    def test_a_file_of_one_endless_line_loses_nothing_but_spaces(self, tmp_path: Path) -> None:
        text = " ".join(some_paragraphs(1000))
        path = tmp_path / "line.txt"
        path.write_text(text, "utf-8")
        corpus = load_text(path)
        words = (decode(corpus.train) + " " + decode(corpus.heldout)).split()
        assert sorted(words) == sorted(text.split())

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            (b"", "is empty"),
            (b" \n\n ", "is empty"),
            (b"abc\0def", "binary"),
            (b"fine until here \xff\xfe", "not UTF-8 at byte 16"),
            (b"Too short to say anything about anything.", "too short"),
            (b"The same again.\n\n" * 10_000, "too short: without repeated"),
        ],
    )
    def test_indivisible_texts_are_refused(
        self, tmp_path: Path, content: bytes, message: str
    ) -> None:
        path = tmp_path / "bad.txt"
        path.write_bytes(content)
        with pytest.raises(ValueError, match=message):
            load_text(path)

    def test_a_missing_file_and_a_directory_are_refused(self, tmp_path: Path) -> None:
        with pytest.raises(FileNotFoundError, match="there is no file"):
            load_text(tmp_path / "absent.txt")
        with pytest.raises(ValueError, match="is a directory"):
            load_text(tmp_path)


class TestBigram:
    def test_a_deterministic_cycle_costs_almost_nothing(self) -> None:
        assert bigram_bits_per_byte(corpus_of(b"abcd" * 5000, b"bcda" * 100)) < 0.01

    def test_fair_coins_cost_one_bit(self) -> None:
        rng = random.Random(0)
        train, heldout = (bytes(rng.choices(b"ab", k=20_000)) for _ in range(2))
        # The held-out entropy of 20,000 tosses differs from one bit by some 1e-4.
        assert abs(bigram_bits_per_byte(corpus_of(train, heldout)) - 1) < 2e-3

    def test_it_is_a_probability_and_unseen_bytes_cost_a_finite_price(self) -> None:
        train = b"ab" * 1000
        total = sum(
            2 ** -bigram_bits_per_byte(corpus_of(train, bytes([97, byte]))) for byte in range(256)
        )
        assert math.isclose(total, 1, rel_tol=1e-9)

    def test_the_heldout_part_does_not_choose_the_smoothing(self) -> None:
        # Two held-out texts; the cost of the pair "xy" must not depend on the other held-out text.
        train = bytes(random.Random(0).choices(b"xyz", k=5000))
        single = bigram_bits_per_byte(corpus_of(train, b"xy"))
        thrice = bigram_bits_per_byte(corpus_of(train, b"xyxyxy\xff\xff\xff\xff\xff"))
        prices = [
            bigram_bits_per_byte(corpus_of(train, pair))
            for pair in (b"xy", b"yx", b"y\xff", b"\xff\xff")
        ]
        mean = (3 * prices[0] + 2 * prices[1] + prices[2] + 4 * prices[3]) / 10
        assert math.isclose(single, prices[0])
        assert math.isclose(thrice, mean, rel_tol=1e-12)


class TestWindows:
    corpus = corpus_of(bytes(range(256)) * 4, bytes(range(100)))

    def test_training_windows_are_pieces_of_the_text(self, generator: torch.Generator) -> None:
        for inputs, labels in itertools.islice(
            batches(self.corpus, length=16, batch=5, generator=generator), 20
        ):
            assert inputs.shape == labels.shape == (5, 16)
            assert inputs.dtype == torch.int64
            assert torch.equal(inputs[:, 1:], labels[:, :-1])
            assert torch.equal((inputs + 1) % 256, labels)

    def test_training_windows_begin_anywhere(self, generator: torch.Generator) -> None:
        corpus = corpus_of(bytes(range(10)), b"abc")
        stream = batches(corpus, length=4, batch=50, generator=generator)
        inputs = torch.cat([next(stream)[0] for _ in range(10)])
        assert set(inputs[:, 0].tolist()) == set(range(6))

    def test_one_seed_gives_one_stream(self) -> None:
        def first(seed: int) -> torch.Tensor:
            generator = torch.Generator().manual_seed(seed)
            return next(batches(self.corpus, length=8, batch=3, generator=generator))[0]

        assert torch.equal(first(1), first(1))
        assert not torch.equal(first(1), first(2))

    @pytest.mark.parametrize("length", [1, 7, 9, 33, 98, 99, 100, 500])
    @pytest.mark.parametrize("batch", [1, 4])
    def test_each_heldout_byte_is_a_label_once(self, length: int, batch: int) -> None:
        result: list[int] = []
        for inputs, labels in heldout_windows(self.corpus, length=length, batch=batch):
            assert inputs.shape == labels.shape
            assert inputs.shape[0] <= batch
            assert inputs.shape[1] == length
            requested = labels != IGNORE
            assert torch.equal(inputs[requested] + 1, labels[requested])
            result += labels[requested].tolist()
        assert result == list(range(1, 100))

    def test_a_limit_spreads_windows_over_the_text(self) -> None:
        parts = list(heldout_windows(self.corpus, length=10, batch=8, limit=30))
        labels = torch.cat([labels for _, labels in parts])
        assert labels[:, 0].tolist() == [1, 31, 61]
        everything = list(heldout_windows(self.corpus, length=10, batch=8, limit=10_000))
        assert sum(int((labels != IGNORE).sum()) for _, labels in everything) == 99

    def test_wrong_sizes_are_refused_at_the_call(self, generator: torch.Generator) -> None:
        with pytest.raises(ValueError, match="needs 1025 bytes and the training part has 1024"):
            batches(self.corpus, length=1024, batch=1, generator=generator)
        with pytest.raises(ValueError, match="length must be a whole number >= 1"):
            batches(self.corpus, length=0, batch=1, generator=generator)
        with pytest.raises(ValueError, match="batch must be a whole number >= 1"):
            heldout_windows(self.corpus, length=4, batch=0)
        with pytest.raises(ValueError, match="limit must be a whole number >= 1"):
            heldout_windows(self.corpus, length=4, batch=1, limit=0)
