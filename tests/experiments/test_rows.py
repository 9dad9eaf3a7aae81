"""A table that grows by rows: no row is trained twice, and unequal rows are refused."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

from recollect.experiments import Schedule, Sizes, extend_table, write_rows_table
from recollect.experiments.comparison.comparison import Comparison
from recollect.experiments.comparison.results import DEFAULTS
from recollect.tasks import TextCorpus, load_text

SMALL = Sizes(width=16, depth=1, heads=2, length=32, schedule=Schedule(steps=3, batch=2))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> TextCorpus:
    path = tmp_path_factory.mktemp("text") / "mine.txt"
    draw = random.Random(0)
    words = ["memory", "writes", "key", "value", "reads", "query", "token", "state", "again", "the"]
    paragraphs = [" ".join(draw.choices(words, k=40)) + "." for _ in range(150)]
    path.write_text("\n\n".join(paragraphs))
    return load_text(path)


def rows(models: list[str], folder: Path, corpus: TextCorpus, **options: Any) -> Comparison | None:
    options = {"sizes": SMALL, "parameters": 12_000, **options}
    return extend_table(models, folder, corpus=corpus, command="recollect compare ...", **options)


def test_stored_rows_are_not_trained_again(tmp_path: Path, corpus: TextCorpus) -> None:
    first = rows(["retnet"], tmp_path, corpus)
    assert first is not None
    assert [run.model for run in first.runs] == ["retnet"]
    initial = (tmp_path / "retnet.json").read_text()
    second = rows(["retnet", "gla"], tmp_path, corpus)
    assert second is not None
    assert [run.model for run in second.runs] == ["gla"]
    page = (tmp_path / "README.md").read_text()
    (tmp_path / "README.md").unlink()
    assert rows(["gla", "retnet"], tmp_path, corpus) is None
    assert (tmp_path / "retnet.json").read_text() == initial
    assert (tmp_path / "README.md").read_text() == page  # of stored rows, too
    for model in ("retnet", "gla"):
        row = json.loads((tmp_path / f"{model}.json").read_text())
        assert f"| `{model}` | {row['run']['value']:.3f} | " in page
        assert row["run"]["tokens"] == 3 * 2 * 32
        assert row["environment"]["torch"]
        assert row["run"]["cpu_seconds"] > 0
    assert corpus.sha256 in page
    assert "recollect compare ..." in page


def test_a_row_with_the_same_layer_options_is_another_row(
    tmp_path: Path, corpus: TextCorpus
) -> None:
    """Both rows of softmax attention remain in one table; Gated DeltaNet is not trained twice."""
    rows(["gated_delta_net", "softmax_attention"], tmp_path, corpus)
    result = rows(["gated_delta_net", "softmax_attention"], tmp_path, corpus, layer_options="same")
    assert result is not None
    assert [run.model for run in result.runs] == ["softmax_attention-same"]
    options = [
        json.loads((tmp_path / f"softmax_attention{end}.json").read_text())["options"]
        for end in ("", "-same")
    ]
    assert [(one["conv_size"], one["output_gate"]) for one in options] == [(0, "none"), (4, "silu")]
    page = (tmp_path / "README.md").read_text()
    cells = {line.split(" | ")[0]: line.split(" | ") for line in page.splitlines()}
    (column,) = (i for i, name in enumerate(cells["| model"]) if name == "layer options")
    assert cells["| `softmax_attention`"][column] == (
        "conv_size = 0, conv_activation = none, output_norm = none, output_gate = none"
    )
    assert cells["| `softmax_attention-same`"][column] == ""


@pytest.mark.slow
def test_rows_are_stored_as_processes_end(tmp_path: Path, corpus: TextCorpus) -> None:
    result = rows(["retnet", "gla"], tmp_path, corpus, jobs=2)
    assert result is not None
    assert not result.failures
    for model in ("retnet", "gla"):
        row = json.loads((tmp_path / f"{model}.json").read_text())
        assert row["environment"]["threads"] == 1
        assert row["run"]["finished"]


def test_row_may_have_another_number_of_heads(tmp_path: Path, corpus: TextCorpus) -> None:
    """Another number of heads is the choice of a row, and not another table; it is reported."""
    rows(["retnet"], tmp_path, corpus)
    assert rows(["gla"], tmp_path, corpus, sizes=SMALL.replace(heads=4, key_dim=2)) is not None
    page = (tmp_path / "README.md").read_text()
    cells = {line.split(" | ")[0]: line.split(" | ") for line in page.splitlines()}
    assert cells["| `retnet`"][3] == "2"
    assert cells["| `gla`"][3] == "4, K = 2"
    with pytest.raises(ValueError, match=r"retnet.json was trained .*heads was 2, not 4"):
        rows(["retnet"], tmp_path, corpus, sizes=SMALL.replace(heads=4))


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"parameters": 13_000}, "parameters was 12000, not 13000"),
        ({"seed": 1}, "seed was 0, not 1"),
        ({"sizes": SMALL.replace(length=16)}, "length was 32, not 16"),
    ],
)
def test_other_terms_are_refused_before_anything_is_trained(
    tmp_path: Path, corpus: TextCorpus, changed: dict[str, Any], says: str
) -> None:
    rows(["retnet"], tmp_path, corpus)
    with pytest.raises(ValueError, match=says):
        rows(["retnet"], tmp_path, corpus, **changed)
    with pytest.raises(ValueError, match=says):
        rows(["gla"], tmp_path, corpus, **changed)
    assert not (tmp_path / "gla.json").exists()


def test_rows_of_other_terms_are_no_table(tmp_path: Path, corpus: TextCorpus) -> None:
    rows(["retnet"], tmp_path, corpus)
    row = json.loads((tmp_path / "retnet.json").read_text())
    row["terms"]["seed"], row["model"] = 7, "other"
    (tmp_path / "other.json").write_text(json.dumps(row))
    with pytest.raises(ValueError, match=r"have different conditions \(seed was 7, not 0\)"):
        write_rows_table(tmp_path)
    (tmp_path / "other.json").write_text("{")
    with pytest.raises(ValueError, match="is not JSON"):
        write_rows_table(tmp_path)
    (tmp_path / "other.json").unlink()
    os.mkfifo(tmp_path / "other.json")
    with pytest.raises(OSError, match="it is a pipe"):
        write_rows_table(tmp_path)


def test_a_row_older_than_a_term_that_is_null_stays_in_the_table(
    tmp_path: Path, corpus: TextCorpus
) -> None:
    rows(["retnet"], tmp_path, corpus)
    path = tmp_path / "retnet.json"
    row = json.loads(path.read_text())
    del row["terms"]["head_dim"]
    path.write_text(json.dumps(row))
    assert rows(["gla"], tmp_path, corpus) is not None
    assert "`retnet`" in (tmp_path / "README.md").read_text()
    row["terms"]["head_dim"] = 16
    path.write_text(json.dumps(row))
    with pytest.raises(ValueError, match=r"different conditions \(head_dim was None, not 16"):
        write_rows_table(tmp_path)


def test_row_of_an_older_preset_is_marked_and_new_fields_are_not_changes(
    tmp_path: Path, corpus: TextCorpus
) -> None:
    rows(["delta_net"], tmp_path, corpus)
    path = tmp_path / "delta_net.json"
    row = json.loads(path.read_text())
    del row["recipe"]["algorithm"]["normalized_steps"]
    path.write_text(json.dumps(row))
    assert rows(["delta_net"], tmp_path, corpus) is None  # the row is stored
    assert "†" not in write_rows_table(tmp_path).read_text()
    row["recipe"]["algorithm"]["lr"] = 0.5
    path.write_text(json.dumps(row))
    page = write_rows_table(tmp_path).read_text()
    assert "| `delta_net` † |" in page
    assert "other defaults since" in page
    with pytest.raises(ValueError, match="recipe differs"):
        rows(["delta_net"], tmp_path, corpus)


def test_tokens_set_the_steps() -> None:
    size = DEFAULTS["text"].replace(tokens=1_000_000, length=512, batch=4)
    assert size.schedule.steps == 489
    with pytest.raises(ValueError, match="exclude each other"):
        size.replace(steps=3, tokens=100)
