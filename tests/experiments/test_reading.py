"""Questions on long texts as tokens, and the curriculum of readers."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")

import torch
from torch import Tensor, nn

from recollect.blocks.compositions import MemoryAsContext
from recollect.blocks.mixers import RecipeMixer
from recollect.experiments.framework.fitting import Batch, fit
from recollect.experiments.papers.reading.curriculum import (
    ReadingModel,
    answer_accuracy,
    copy_batch,
    curriculum,
    get_mixer,
)
from recollect.experiments.papers.reading.documents import FORMS, _documents, _vocabulary
from recollect.experiments.papers.reading.texts import (
    Background,
    Vocabulary,
    insert_sentences,
    needle_batch,
    needle_vocabulary,
    story_batch,
    story_vocabulary,
)
from recollect.tasks import IGNORE, StoryConfig
from recollect.tasks.needles import NeedleName

Pair = tuple[Tensor, Tensor]
SIZES = {"width": 8, "heads": 1, "layers": 1, "lr": 1e-2}


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def within(part: list[int], text: list[int]) -> list[int]:
    """Return the positions of a part in a text."""
    size = len(part)
    return [at for at in range(len(text) - size + 1) if text[at : at + size] == part]


def test_words_marks_and_pairs_of_digits() -> None:
    words = Vocabulary(["The sea is wide.", "12345 01", "The cup."])
    assert len(words("The sea is 12345.")) == 7  # 1, 23 and 45 are three
    assert words("1")[0] != words("01")[0]
    assert words("seas cups") == [0, 0]
    assert words("the") == [0]
    assert len(words) == 11  # the unknown token, five words, the full stop and four numbers


def test_codes_in_capitals_are_spelled_on_request() -> None:
    words = Vocabulary(["The code is ABC."], spell_capitals=True)
    assert words("CAB") == words("C A B")
    assert 0 not in words("CAB")
    assert words("code") != words("C O D E")
    assert Vocabulary(["The code is ABC."])("CAB") == [0]


def test_answers_of_documents_have_no_unknown_word() -> None:
    """Their words come from other documents than the questions."""
    for form in FORMS:
        _, labels = _documents(form, 600, 400, 100, generator(11))
        assert bool((labels != 0).all()), form


def test_a_uuid_is_sixteen_pairs_and_four_dashes() -> None:
    words = needle_vocabulary(0)
    tokens = words("00ff10ab-0000-4000-8000-0123456789ab")
    assert len(tokens) == 20
    assert 0 not in tokens
    assert tokens[0] == tokens[5] == words("00")[0]
    assert tokens[3] == tokens[-1]


def test_every_word_of_a_needle_is_known() -> None:
    words = needle_vocabulary(0)
    names: tuple[NeedleName, ...] = ("passkey", "number", "uuid")
    for name in names:
        inputs, labels = needle_batch(words, name, 80, 20, generator(9))
        assert bool((labels != 0).all())
        question = inputs[:, -36 if name == "uuid" else -20 :]
        assert bool((question != 0).all())


def test_the_most_frequent_words_of_a_text_are_known() -> None:
    words = Vocabulary(["cup"], ["sea sea sea", "sea hill hill", "cup road"], num_frequent=1)
    assert words("cup sea")[0] != words("cup sea")[1]
    assert words("hill road") == [0, 0]


def test_sentences_are_inserted_at_boundaries() -> None:
    """The background is complete and in order, and each sentence is at a boundary."""
    words = Vocabulary(["a b c d e f g h", "x y", "q", "z"])
    hay = Background(words, ["a b c.", "d e f.", "g h."])
    parts = [words("x y"), words("y x")], words("q"), words("z")
    for start in (0, 4, 8):
        for depths in ([0.0, 0.0], [0.2, 0.6], [0.5, 1.0], [1.0, 1.0]):
            text = insert_sentences(parts, hay, depths, start=start, length=20)
            assert len(text) == 20
            assert text[-2:] == [*words("q"), *words("z")]
            (first,), (second,) = within(words("x y"), text), within(words("y x"), text)
            assert first < second
            rest = text[:first] + text[first + 2 : second] + text[second + 2 : -2]
            assert rest == hay.read(start, 14)
            for at in (first, second - 2):
                sentence_begins = (start + at) % len(hay.tokens) in hay.sentence_starts.tolist()
                assert sentence_begins or at == 14


def test_too_long_texts_are_refused() -> None:
    words = Vocabulary(["a b", "q"])
    parts = [words("a b")], words("q"), words("a")
    with pytest.raises(ValueError, match="3 tokens are too few"):
        insert_sentences(parts, Background(words, ["a."]), [0.5], start=0, length=3)


@pytest.mark.parametrize(("name", "num_values"), [("passkey", 5), ("number", 5), ("uuid", 21)])
@pytest.mark.parametrize("length", [80, 200])
def test_question_asks_for_the_value_of_a_needle(
    name: NeedleName, num_values: int, length: int
) -> None:
    words = needle_vocabulary(20)
    inputs, labels = needle_batch(words, name, length, 5, generator())
    assert inputs.shape == labels.shape == (5, length - 1)
    for row, expected in zip(inputs.tolist(), labels, strict=True):
        assert int((expected != IGNORE).sum()) == num_values
        answer = expected[expected != IGNORE].tolist()
        assert expected[-1] != IGNORE
        assert answer[-1:] == words(".")
        assert row[-num_values + 1 :] == answer[:-1]
        assert within(answer, row)  # the needle contains it
    repeated = needle_batch(words, name, length, 5, generator())
    assert torch.equal(inputs, repeated[0])


def test_needles_are_everywhere_in_the_text() -> None:
    words = needle_vocabulary(20)
    inputs, labels = needle_batch(words, "number", 300, 60, generator())
    places = []
    for row, expected in zip(inputs.tolist(), labels, strict=True):
        places.append(within(expected[expected != IGNORE].tolist(), row)[0] / 300)
    assert min(places) < 0.2
    assert max(places) > 0.7
    assert 0.3 < sum(places) / len(places) < 0.7


def test_story_is_complete_and_in_order() -> None:
    words, config = story_vocabulary(1, 20), StoryConfig(task=1, facts=3, people=3)
    inputs, labels = story_batch(words, config, 120, 4, generator())
    went = words("went to the")
    for row, expected in zip(inputs.tolist(), labels, strict=True):
        assert len(within(went, row)) == 3
        place, stop = expected[expected != IGNORE].tolist()
        assert [stop] == words(".")
        person = row[-len(words("Anna? Answer:")) - 1]
        last = [at for at in within(went, row) if row[at - 1] == person]
        assert row[last[-1] + 3] == place


@pytest.mark.parametrize("form", FORMS)
def test_documents_end_with_their_answer(form: str) -> None:
    words = _vocabulary(600)
    inputs, labels = _documents(form, 600, 216, 3, generator(5))  # type: ignore[arg-type]
    assert inputs.shape == (3, 215)
    known = (inputs != 0).float().mean()
    assert known > 0.35
    for expected in labels:
        assert expected[-1] == words("|")[0]
        assert int((expected != IGNORE).sum()) >= 2


def test_labels_of_copies_are_the_second_occurrence() -> None:
    inputs, labels = copy_batch(9, 16, 3, generator())
    assert inputs.shape == labels.shape == (3, 15)
    assert bool((inputs[:, 4:12] == 0).all())
    assert torch.equal(inputs[:, 12:], inputs[:, :3])
    assert bool((labels[:, :12] == IGNORE).all())
    assert torch.equal(labels[:, 12:], inputs[:, 1:4])


def test_a_curriculum_has_its_lessons_in_order_and_ends_at_rate_zero() -> None:
    config = {"lessons": [["copy 9", 8, 3, 50], ["task", 12, 2, 40]], "lr": 0.5}
    requested: list[tuple[str, int, int]] = []

    def draw(kind: str, length: int, batch: int, generator: torch.Generator) -> Batch:
        requested.append((kind, length, batch))
        return copy_batch(5, length, batch, generator)

    stages, budget = curriculum(config, 9, draw)
    shapes = [tuple(stage.draw(generator())[0].shape) for stage in stages]
    assert shapes == [(3, 7), (2, 11)]
    assert [stage.steps for stage in stages] == [50, 40]
    assert requested == [("task", 12, 2)]
    rates = [budget.rate(step) for step in range(91)]
    assert rates[:20] == pytest.approx([(step + 1) / 20 for step in range(20)])
    assert rates[20:51] == [1.0] * 31
    assert rates[50:] == pytest.approx([1 - step / 40 for step in range(41)])
    assert (budget.steps, budget.lrs) == (90, (0.5,))


class _Knows(nn.Module):
    """Predicts every token of the answer but one, in the second text."""

    def __init__(self, labels: Tensor) -> None:
        super().__init__()
        self.labels, self.unused = labels.clone(), nn.Parameter(torch.zeros(1))
        self.labels[1, -1] += 1
        self.at = 0

    def forward(self, inputs: Tensor) -> Tensor:
        rows = self.labels[self.at : self.at + len(inputs)].clamp(min=0)
        self.at += len(inputs)
        return nn.functional.one_hot(rows, 12).float()


def test_answer_must_be_right_in_every_token() -> None:
    inputs, labels = copy_batch(9, 12, 4, generator())
    assert answer_accuracy(_Knows(labels), inputs, labels, max_tokens=24) == (3 / 4, 7 / 8)


def test_a_reading_model_learns_on_its_curriculum() -> None:
    """Repeating one of four tokens, within a few dozen steps."""
    config = SIZES | {"width": 16, "lessons": [["task", 8, 16, 60]]}

    def draw(kind: str, length: int, batch: int, generator: torch.Generator) -> Batch:
        tokens = torch.randint(4, (batch, 1), generator=generator).expand(-1, length)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    mixer = get_mixer("gated_delta_net", config)
    stages, budget = curriculum(config, 8, draw)
    result = fit(lambda: ReadingModel(mixer, 8, config), stages, None, budget, seed=0)
    assert result.skipped_steps == 0
    assert answer_accuracy(result.model, *draw("task", 8, 16, generator(7)))[0] == 1.0


def test_sizes_of_convolutions_and_segments() -> None:
    config = SIZES | {"segment": 32}
    softmax = get_mixer("softmax_attention", config)
    assert isinstance(softmax, RecipeMixer)
    assert softmax.options.conv_size == 4
    mac = get_mixer("titans_mac", config)
    assert isinstance(mac, MemoryAsContext)
    assert (mac.segment, mac.persistent) == (32, 0)
    assert all(leaf.options.conv_size for leaf in mac.leaves.values())
    mixer = get_mixer("titans_mac", SIZES)
    assert isinstance(mixer, MemoryAsContext)
    assert mixer.persistent == 8
