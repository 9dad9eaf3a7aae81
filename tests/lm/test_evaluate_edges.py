"""Edge cases of evaluation: missing numbers, other settings, lengths in other units."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("lm_eval")

import recollect as rc
from recollect.lm.data.tokenizers import byte_tokenizer
from recollect.lm.evaluation import documents, harness
from recollect.lm.evaluation.evaluate import _temporary_tokenizer
from recollect.lm.evaluation.names import find_tasks, load_tasks
from recollect.lm.evaluation.results import load_finished_tasks, save_task


def tiny() -> rc.lm.RecollectForCausalLM:
    torch.manual_seed(0)
    config = rc.lm.RecollectConfig.from_recipes(
        "gated_delta_net", vocab_size=257, hidden_size=16, num_hidden_layers=1
    )
    return rc.lm.RecollectForCausalLM(config).eval()


def short(out: Path | None = None, **more: Any) -> dict[str, Any]:
    return {"tokenizer": byte_tokenizer(), "limit": 2, "context": 600, "out": out} | more


def rows(samples: Any) -> list[dict[str, Any]]:
    return list(samples["test"])


def paragraphs(prefix: str, suffix: str) -> str:
    """Return different paragraphs, because repeated ones are dropped."""
    letters = "abcdefghijklmnopqrst"
    return "\n\n".join(f"{prefix}{a}{b}{suffix}" for a in letters for b in letters)


def strict(path: Path) -> Any:
    """Parse JSON by its standard, which has no NaN."""

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    return json.loads(path.read_text(), parse_constant=refuse)


# -- missing numbers -------------------------------------------------------------------------------


def test_a_model_of_logits_that_are_not_finite_has_no_numbers(tmp_path: Path) -> None:
    model = tiny()
    torch.nn.init.constant_(model.lm_head.weight, math.nan)
    names = ["local_babi_1", "local_niah_single_1"]
    result = rc.lm.evaluate(model, names, **short(tmp_path))
    for name in names:
        assert all(math.isnan(x) for x in result[name].metrics.values()), "an accuracy of no logits"
        assert result[name].metrics, name
        assert "the model's logits are not finite" in result[name].notes[0]
    assert {x["task"]: x["metrics"] for x in strict(tmp_path / "results.json")["tasks"]} == {
        "local_babi_1": {"acc": None},
        "local_niah_single_1": {"string_match": None},
    }
    assert not (tmp_path / "tasks").exists(), "none is finished"
    json.dumps(result.to_dict(), allow_nan=False)
    repeated = rc.lm.TaskResult.from_dict(result[names[0]].to_dict())
    assert math.isnan(repeated.metrics["acc"])


def test_a_task_without_a_number_does_not_end_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_task = harness.run_task

    def overflows(model: Any, task: Any, limit: int | None) -> Any:
        if task.task_name == "local_babi_1":
            raise OverflowError("math range error")
        return run_task(model, task, limit)

    monkeypatch.setattr(harness, "run_task", overflows)
    result = rc.lm.evaluate(tiny(), ["local_babi_1", "local_babi_2"], **short(tmp_path))
    assert result.notes == ("local_babi_1: its numbers cannot be computed (math range error)",)
    assert "acc" in result["local_babi_2"].metrics
    assert [x.name for x in (tmp_path / "tasks").iterdir()] == ["local_babi_2.json"]


def test_a_text_of_few_words_has_bits_per_byte(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text(paragraphs("", "x" * 2000))
    result = rc.lm.evaluate(tiny(), "local_text", **short(text=text))["local_text"].metrics
    assert set(result) == {"byte_perplexity", "bits_per_byte"}
    assert all(map(math.isfinite, result.values()))


def test_texts_that_are_cut_are_counted_one_by_one() -> None:
    how = {"max_gen_toks": 4, "until": ["\n"], "do_sample": False}
    from lm_eval.api.instance import Instance

    texts = ["a" * 20, "b" * 61, "c" * 60, "d" * 90]
    requested = [
        Instance(request_type="generate_until", doc={}, arguments=(x, how), idx=i)  # type: ignore[arg-type]
        for i, x in enumerate(texts)
    ]
    with harness.hidden_output():
        under = harness.RecollectHFLM(tiny(), byte_tokenizer(), batch_size=4, context=64)
        under.generate_until(requested)
    assert under.num_truncated == 2, "of one batch, 60 tokens and the 4 to write being the context"
    under.reset_counters()
    assert under.num_truncated == 0 and under.notes() == ()


# -- settings --------------------------------------------------------------------------------------


def _other_bos(tokenizer: Any) -> None:
    tokenizer.bos_token = "b"


def _cleans(tokenizer: Any) -> None:
    tokenizer.clean_up_tokenization_spaces = not tokenizer.clean_up_tokenization_spaces


def _adds_bos(tokenizer: Any) -> None:
    tokenizer.add_bos_token = not getattr(tokenizer, "add_bos_token", False)


@pytest.mark.parametrize("change", [_other_bos, _cleans, _adds_bos])
def test_other_settings_of_one_vocabulary_are_another_tokenizer(
    change: Callable[[Any], None],
) -> None:
    one, same, other = byte_tokenizer(), byte_tokenizer(), byte_tokenizer()
    for tokenizer in (one, same, other):
        tokenizer.bos_token = "a"
    change(other)
    digests: list[str] = []
    for tokenizer in (one, same, other):
        with _temporary_tokenizer(tokenizer) as (_, digest):
            digests.append(digest)
    assert digests[0] == digests[1] != digests[2]


def result_of(task: str, version: str, **settings: Any) -> rc.lm.TaskResult:
    return rc.lm.TaskResult(
        task=task, metrics={"acc": 0.5}, errors={}, documents=2, version=version, settings=settings
    )


def test_other_and_unknown_versions_and_settings_are_refused(tmp_path: Path) -> None:
    requested = {"seed": 1, "text": "abc"}
    save_task(tmp_path / "theirs", result_of("piqa", "1.0", seed=1))
    assert list(load_finished_tasks(tmp_path / "theirs", requested)) == ["piqa"], (
        "which reads no local text"
    )
    for name, result, message in (
        (
            "old",
            result_of("local_ruler_cwe", "1.0", **requested),
            "cwe of version 1.0 and this one",
        ),
        ("text", result_of("local_babi_1", "1.0", seed=1), "no record of its text"),
        ("seed", result_of("piqa", "1.0", text="abc"), "no record of its seed"),
    ):
        save_task(tmp_path / name, result)
        with pytest.raises(ValueError, match=message):
            load_finished_tasks(tmp_path / name, requested)


def test_groups_of_an_earlier_run_are_stored(tmp_path: Path) -> None:
    model = tiny()
    one = rc.lm.evaluate(model, "local_babi_1", **short(tmp_path))
    settings = {k: v for k, v in one["local_babi_1"].settings.items() if k != "text"}
    group = rc.lm.TaskResult(
        task="both",
        metrics={"acc": 0.5},
        errors={},
        documents=2,
        version="1",
        settings=settings,
        members=("local_babi_1",),
    )
    for groups, expected in (
        ((group,), ["both"]),
        ((result_of("else", "1", **{**settings, "seed": 5}),), []),
    ):
        rc.lm.Evaluation(model="m", tasks=one.tasks, groups=groups, environment={}).save(tmp_path)
        result = rc.lm.evaluate(model, "local_babi_2", **short(tmp_path))
        assert [x.task for x in result.groups] == expected
        assert [x["task"] for x in strict(tmp_path / "results.json")["groups"]] == expected
    (tmp_path / "results.json").write_text("[]")
    initial = {path.name for path in (tmp_path / "tasks").iterdir()}
    with pytest.raises(ValueError, match=r"results\.json is not an evaluation"):
        rc.lm.evaluate(model, "local_babi_3", **short(tmp_path))
    assert {path.name for path in (tmp_path / "tasks").iterdir()} == initial  # announced at once


def test_frozen_modules_stay_frozen() -> None:
    model = tiny().train()
    frozen = model.get_input_embeddings()
    frozen.eval()
    rc.lm.evaluate(model, "local_babi_1", **short(limit=1))
    assert not frozen.training
    assert all(x.training for x in model.modules() if x is not frozen)


def test_a_context_beyond_learned_positions_is_refused() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes: dict[str, Any] = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 400}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=257, **sizes))
    with pytest.raises(ValueError, match="context 600 is more than the 400 positions that GPT2LM"):
        rc.lm.evaluate(model, "local_babi_1", **short())
    result = rc.lm.evaluate(model, "local_babi_1", **short(context=400))
    assert result["local_babi_1"].settings["context"] == 400


# -- documents -------------------------------------------------------------------------------------


def test_tokens_of_many_bytes_fill_a_short_context(monkeypatch: pytest.MonkeyPatch) -> None:
    """102 tokens of eight bytes, which in bytes is less than the 600 of a fixture."""
    monkeypatch.setattr(
        documents._TaskOptions, "count_tokens", lambda options, text: len(text) // 8
    )
    how: dict[str, Any] = {"config": {"form": "swde"}, "reserve": 48, "limit": 3}
    for doc in rows(documents.fixtures(context=150, **how)):
        assert 600 < len(doc["input"]) < 102 * 8
    with pytest.raises(ValueError, match=r"its shortest prompt has \d+ tokens and 20 are left"):
        documents.fixtures(context=68, **how)
    with pytest.raises(ValueError, match="it leaves nothing to read"):
        documents.fixtures(context=40, **how)


def test_short_texts_are_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths: list[int] = []
    draw = documents.extractions

    def counted(config: Any, batch: int, generator: torch.Generator) -> Any:
        lengths.append(config.length)
        return draw(config, batch, generator)

    monkeypatch.setattr(documents, "extractions", counted)
    how: dict[str, Any] = {"config": {"form": "squad"}, "limit": 2}
    docs = rows(documents.fixtures(context=40_000, **how))
    assert [doc["input"].count("was founded") for doc in docs] == [100, 100], "all towns"
    assert len(lengths) == 4, "a second time each, to see that there is no more"


def test_changed_text_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    for word in ("first", "other"):
        path.write_text(paragraphs(f"The {word} sentence is ", "."))
        (piece,) = rows(documents.text_chunks(text=str(path), limit=1))
        assert word in piece["input"]
        how: dict[str, Any] = {"config": {"task": 1, "facts": 3}, "context": 600, "limit": 1}
        (hidden,) = rows(documents.hidden_stories(text=str(path), **how))
        assert f"The {word} sentence" in hidden["input"]


def test_numbered_answers_are_not_cut(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text(paragraphs("The sentence of ", " is here."))
    options = {"context": 1500, "limit": 1, "text": str(text)}
    manager, names = find_tasks(["local_ruler"], options)
    tasks = load_tasks(manager, names, context=1500).tasks
    assert len(tasks) == 11
    for name, task in tasks.items():
        until = task.config.generation_kwargs["until"]
        assert until and not any(x in " 1. baba 2. dada, gaga." for x in until), name
