"""Evaluation with lm-eval, offline: numbers equal direct computations."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("lm_eval")

import recollect as rc
from recollect.lm.data.tokenizers import byte_tokenizer, train_bpe
from recollect.lm.evaluation import documents, harness
from recollect.lm.evaluation.evaluate import _group_results
from recollect.lm.evaluation.local_tasks import local_folder, local_tasks, local_version
from recollect.lm.evaluation.names import LoadedTasks, _task_manager, find_tasks, load_tasks

END = 256
LETTERS = "abcdefghijklmnop"


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A haystack of this test, so that no data is downloaded."""
    path = tmp_path_factory.mktemp("text") / "hay.txt"
    lines = [f"The {a}{b} is near the {b}{a}. It waits." for a in LETTERS for b in LETTERS]
    path.write_text("\n\n".join(" ".join(lines[i:]) for i in range(0, 256, 2)))
    return path


def tiny(recipe: str = "gated_delta_net", vocab: int = 257) -> rc.lm.RecollectForCausalLM:
    torch.manual_seed(0)
    config = rc.lm.RecollectConfig.from_recipes(
        recipe, vocab_size=vocab, hidden_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    return rc.lm.RecollectForCausalLM(config).eval()


@pytest.fixture(scope="module")
def model() -> rc.lm.RecollectForCausalLM:
    return tiny()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's folder, whose model has a separate folder."""
    folder = tmp_path_factory.mktemp("run")
    tiny().save_pretrained(folder / "model")
    byte_tokenizer().save_pretrained(folder / "model")
    return folder


@torch.no_grad()
def likelihood(model: Any, context: list[int], continuation: list[int]) -> float:
    """Return Σ log p(continuation | context) of one text, with float64 logits."""
    ids = torch.tensor([[*context, *continuation]])
    log = model(ids[:, :-1]).logits.double().log_softmax(-1)[0, len(context) - 1 :]
    return float(log.gather(1, ids[0, len(context) :, None]).sum())


def data(text: str) -> list[int]:
    return list(text.encode())


def instances(kind: str, *arguments: Any) -> list[Any]:
    from lm_eval.api.instance import Instance

    return [
        Instance(request_type=kind, doc={}, arguments=one, idx=i)  # type: ignore[arg-type]
        for i, one in enumerate(arguments)
    ]


# -- numbers ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", ["gated_delta_net", "titans_mac", "softmax_attention"])
def test_log_likelihoods_equal_those_of_single_texts(recipe: str) -> None:
    model = tiny(recipe)
    pairs = [("The memory", " of a"), ("A", " b"), ("", "c d"), ("Where is it? In the", " attic")]
    with harness.hidden_output():
        under = harness.RecollectHFLM(model, byte_tokenizer(), batch_size=3, context=64)
        result = under.loglikelihood(instances("loglikelihood", *pairs))
    for (initial, later), (value, _) in zip(pairs, result, strict=True):
        # Without a context a text begins after an end-of-document token.
        want = likelihood(model, data(initial) or [END], data(later))
        assert value == pytest.approx(want, rel=0, abs=1e-5)


def test_multiple_choice(model: Any) -> None:
    """Accuracy is the fraction of documents whose right choice is the likeliest."""
    result = rc.lm.evaluate(
        model, "local_babi_2", tokenizer=byte_tokenizer(), limit=12, batch=5, context=600
    )
    docs = documents.short_stories(config={"task": 2}, limit=12)["test"]
    right = 0
    for doc in docs:
        scores = [likelihood(model, data(doc["input"]), data(f" {x}")) for x in doc["choices"]]
        right += max(range(len(scores)), key=scores.__getitem__) == doc["answer"]
    share = right / 12
    assert result["local_babi_2"].metrics == {"acc": pytest.approx(share)}
    error = math.sqrt(share * (1 - share) / 11)  # of a mean of zeros and ones
    assert result["local_babi_2"].errors == {"acc": pytest.approx(error)}
    assert result["local_babi_2"].documents == 12


@pytest.mark.parametrize("vocab", [256, 257])
def test_rolling_is_bits_per_byte_of_windows(vocab: int, text: Path, tmp_path: Path) -> None:
    context = 300
    model = tiny(vocab=vocab)
    model.save_pretrained(tmp_path)
    result = rc.lm.evaluate(tmp_path, ["local_text"], limit=2, context=context, text=text)
    docs = [one["input"] for one in documents.text_chunks(text=str(text), limit=2)["test"]]
    nats = count = 0.0
    for doc in docs:
        # A vocabulary of bytes has no end-of-document token: byte 0 is used.
        ids = [END if vocab > 256 else 0, *data(doc)]
        count += len(ids) - 1
        for start in range(1, len(ids), context):
            new = ids[start : start + context]
            # The last window is filled up with the tokens before it.
            old = min(start, 1 if start == 1 else context + 1 - len(new))
            nats -= likelihood(model, ids[start - old : start], new)
    assert len(docs) == 2 and count > 4 * context
    metrics = result["local_text"].metrics
    assert metrics["bits_per_byte"] == pytest.approx(nats / count / math.log(2), rel=1e-6)
    assert metrics["byte_perplexity"] == pytest.approx(math.exp(nats / count), rel=1e-6)
    assert "bits_per_byte" in result["local_text"].lower_is_better


def test_generation_of_a_batch_equals_single_prompts(model: Any) -> None:
    tokenizer = byte_tokenizer()
    prompts = ["The memory of", "A", "Where is the cup?"]
    with harness.hidden_output():
        under = harness.RecollectHFLM(model, tokenizer, batch_size=3, context=64)
        how = {"max_gen_toks": 12, "until": ["\n"], "do_sample": False}
        result = under.generate_until(instances("generate_until", *[(x, how) for x in prompts]))
    for prompt, generated in zip(prompts, result, strict=True):
        ids = torch.tensor([data(prompt)])
        new = model.generate(ids, max_new_tokens=12, do_sample=False, eos_token_id=END)
        single = tokenizer.decode(new[0, ids.shape[1] :], skip_special_tokens=True)
        assert generated == single.partition("\n")[0]
    assert len(set(result)) > 1


def test_scores_of_generated_text(model: Any, monkeypatch: pytest.MonkeyPatch, text: Path) -> None:
    """All values, half of them, and none, as a model that reads the prompt would generate them."""

    def writes(self: Any, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        return [
            " " + ", ".join(one.doc["outputs"][: (4, 2, 0)[i]]) for i, one in enumerate(requests)
        ]

    monkeypatch.setattr(harness.RecollectHFLM, "generate_until", writes)
    names = ["local_niah_multivalue", "local_niah_multiquery", "fixture_squad"]
    result = rc.lm.evaluate(
        model, names, tokenizer=byte_tokenizer(), limit=3, context=1000, text=text
    )
    assert result[names[0]].metrics == {"string_match": 0.5}
    assert result[names[1]].metrics == {"string_match": 0.5}
    assert result[names[2]].metrics == {"contains": pytest.approx(2 / 3)}
    assert documents.contains({"outputs": ["7"]}, ["17 of 70"]) == {"contains": 0.0}
    assert documents.contains({"outputs": ["Hugo"]}, ["it is hugo."]) == {"contains": 1.0}


def test_results_do_not_depend_on_batches_or_earlier_tasks(model: Any, text: Path) -> None:
    how: dict[str, Any] = {"tokenizer": byte_tokenizer(), "limit": 4, "context": 700, "text": text}
    full = rc.lm.evaluate(model, ["local_babilong_1", "local_text", "local_babi_1"], **how)
    single = rc.lm.evaluate(model, ["local_text"], batch=1, **how)
    for name, value in single["local_text"].metrics.items():
        assert full["local_text"].metrics[name] == pytest.approx(value, rel=1e-6)
    assert single["local_text"].batch == 1


def test_other_and_swapped_decoders(tmp_path: Path, text: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 512}
    llama = LlamaForCausalLM(LlamaConfig(vocab_size=257, pad_token_id=END, **sizes, **heads))
    for name in ("plain", "swapped"):
        if name == "swapped":
            rc.lm.replace_attention(llama, "gated_delta_net", layers=[0])
        llama.save_pretrained(tmp_path / name)
        byte_tokenizer().save_pretrained(tmp_path / name)
        tasks = ["local_babi_1", "local_niah_single_1"]
        result = rc.lm.evaluate(str(tmp_path / name), tasks, limit=2)
        assert result["local_babi_1"].settings["context"] == 512, "what the configuration says"
        docs = documents.short_stories(config={"task": 1}, limit=2)["test"]
        best = []
        for doc in docs:
            scores = [
                likelihood(llama.eval(), data(doc["input"]), data(f" {x}")) for x in doc["choices"]
            ]
            best.append(max(range(len(scores)), key=scores.__getitem__) == doc["answer"])
        assert result["local_babi_1"].metrics["acc"] == pytest.approx(sum(best) / 2)


def test_groups_are_aggregated_by_their_rule(model: Any) -> None:
    from lm_eval.api.group import Group
    from lm_eval.config.group import AggMetricConfig

    result = rc.lm.evaluate(
        model, "local_babi_[12]", tokenizer=byte_tokenizer(), limit=6, context=600
    )
    manager, names = find_tasks(["local_babi_1", "local_babi_2"], {"context": 600, "limit": 6})
    tasks = load_tasks(manager, names, context=600).tasks
    group = Group("both", aggregate_metric_list=[AggMetricConfig(metric="acc")])
    for task in tasks.values():
        group.add(task)
    (both,) = _group_results(
        LoadedTasks(tasks=tasks, groups={"both": group}), {x.task: x for x in result.tasks}, {}
    )
    values = [one.metrics["acc"] for one in result.tasks]
    assert both.metrics["acc"] == pytest.approx(sum(values) / 2)
    assert both.members == ("local_babi_1", "local_babi_2") and both.documents == 12


# -- memory, texts that are too long ---------------------------------------------------------------


@pytest.mark.parametrize("says", ["oom", "cpu"])
def test_batch_is_halved_until_it_fits_memory(
    model: Any, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows: list[int] = []
    forward = model.forward

    def small(ids: torch.Tensor, *args: Any, **options: Any) -> Any:
        rows.append(len(ids))
        if len(ids) > 3:
            if says == "oom":
                raise torch.OutOfMemoryError("CUDA out of memory.")
            raise RuntimeError(
                "[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory"
            )
        return forward(ids, *args, **options)

    monkeypatch.setattr(harness, "MAX_BATCH_SIZE", 16)
    how: dict[str, Any] = {"tokenizer": byte_tokenizer(), "limit": 3, "context": 600}
    want = rc.lm.evaluate(model, "local_babi_1", **how)
    monkeypatch.setattr(model, "forward", small)
    result = rc.lm.evaluate(model, "local_babi_1", **how)
    assert rows[:4] == [16, 8, 4, 2] and set(rows[4:]) <= {1, 2}
    assert result["local_babi_1"].batch == 2
    assert result["local_babi_1"].metrics == want["local_babi_1"].metrics
    with pytest.raises(ValueError, match=r"task local_babi_1 failed: \w+Error: .*memory"):
        rc.lm.evaluate(model, "local_babi_1", batch=4, **how)


def test_first_batch_on_a_cpu_leaves_memory(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pages = {"SC_AVPHYS_PAGES": 1000, "SC_PAGE_SIZE": 4096}
    monkeypatch.setattr(harness.os, "sysconf", pages.__getitem__)
    # A quarter of 4 MB, in logits of 257 tokens at 100 places, twice in float32.
    assert harness.max_batch_size(model, 100) == 1000 * 4096 // 4 // (8 * 100 * 257)
    assert harness.max_batch_size(model, 10**6) == 1
    assert harness.max_batch_size(model, 1) == 64


def test_truncated_texts_are_reported(model: Any) -> None:
    result = rc.lm.evaluate(
        model, "local_babi_1", tokenizer=byte_tokenizer(), limit=2, context=60, batch=2
    )
    (note,) = result.notes
    # Two documents of six choices each, in six batches.
    message = "texts longer than the context of 60 tokens lost their beginning 12 times"
    assert note == f"local_babi_1: {message}"
    assert note in str(result)


# -- stored results --------------------------------------------------------------------------------


class Watcher:
    def __init__(self, stop: str = "") -> None:
        self.stop, self.started, self.loaded = stop, list[str](), list[str]()

    def begin(self, task: str, index: int, count: int) -> None:
        if task == self.stop:
            raise KeyboardInterrupt
        self.started.append(task)

    def end(self, result: rc.lm.TaskResult, *, loaded: bool) -> None:
        if loaded:
            self.loaded.append(result.task)

    def fail(self, task: str, reason: str) -> None:
        raise AssertionError(reason)


def test_an_interrupted_evaluation_loses_one_task_at_most(
    saved: Path, text: Path, tmp_path: Path
) -> None:
    tasks = ["local_babi_1", "local_text", "local_babi_2"]
    how: dict[str, Any] = {"limit": 3, "context": 600, "text": text}
    with pytest.raises(KeyboardInterrupt):
        rc.lm.evaluate(saved, tasks, out=tmp_path, watcher=Watcher("local_babi_2"), **how)
    assert sorted(x.name for x in (tmp_path / "tasks").iterdir()) == [
        "local_babi_1.json",
        "local_text.json",
    ]
    watcher = Watcher()
    result = rc.lm.evaluate(saved, tasks, out=tmp_path, watcher=watcher, **how)
    assert watcher.started == ["local_babi_2"]
    assert watcher.loaded == ["local_babi_1", "local_text"]
    full = rc.lm.evaluate(saved, tasks, out=tmp_path / "whole", **how)
    assert {x.task: x.metrics for x in result.tasks} == {x.task: x.metrics for x in full.tasks}
    stored = json.loads((tmp_path / "results.json").read_text())
    assert stored == json.loads(json.dumps(result.to_dict()))
    assert {"torch", "device", "commit", "transformers"} <= stored["environment"].keys()
    assert not list(tmp_path.glob("**/.*")), "no lock and no half file is left"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"limit": 2}, "limit 3 and this one has limit 2"),
        ({"limit": None}, "limit 3 and this one has no limit"),
        ({"context": 500}, "context 600 and this one has context 500"),
        ({"text": "other"}, "the text .* and this one has the text"),
        ({"model": "other"}, "the model .* and this one has the model"),
    ],
)
def test_other_settings_are_refused(
    saved: Path, text: Path, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    how: dict[str, Any] = {"limit": 3, "context": 600, "text": text}
    rc.lm.evaluate(saved, ["local_babi_1"], out=tmp_path / "out", **how)
    initial = (tmp_path / "out" / "tasks" / "local_babi_1.json").read_bytes()
    if "text" in change:
        change = {"text": tmp_path / "other.txt"}
        change["text"].write_text(text.read_text() + "\n\nMore of it.")
    if "model" in change:
        other = tiny("gla")
        other.save_pretrained(tmp_path / "model")
        change, saved = {}, tmp_path / "model"
    with pytest.raises(
        ValueError, match=f"holds an evaluation with {message}.*: give another --out"
    ):
        rc.lm.evaluate(saved, ["local_babi_2"], out=tmp_path / "out", **{**how, **change})
    assert (tmp_path / "out" / "tasks" / "local_babi_1.json").read_bytes() == initial


def test_invalid_results_file_is_named(saved: Path, tmp_path: Path) -> None:
    (tmp_path / "tasks").mkdir()
    for content in ("{", "[]", '{"schema": 1, "task": "x"}', '{"schema": 9}'):
        (tmp_path / "tasks" / "x.json").write_text(content)
        with pytest.raises(ValueError, match=r"x\.json is not a result of a task .*: delete it"):
            rc.lm.evaluate(saved, ["local_babi_1"], out=tmp_path)


def test_process_settings_are_restored(model: Any, capsys: pytest.CaptureFixture[str]) -> None:
    model.train()
    torch.manual_seed(5)
    initial, propagates = torch.get_rng_state(), logging.getLogger("lm_eval").propagate
    rc.lm.evaluate(model, ["local_babi_1", ""], tokenizer=byte_tokenizer(), limit=2, context=600)
    assert torch.equal(torch.get_rng_state(), initial)
    assert model.training
    assert logging.getLogger("lm_eval").propagate == propagates
    assert capsys.readouterr() == ("", "")
    model.eval()


# -- local tasks -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bpe(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("bpe")
    train_bpe([text.read_text(), "The secret of the amber anchor is"], 300).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("kind", ["bytes", "bpe"])
def test_every_local_task_fills_its_context(kind: str, bpe: Path, text: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = byte_tokenizer() if kind == "bytes" else AutoTokenizer.from_pretrained(bpe)
    options = {"context": 1500, "limit": 3, "text": str(text)}
    options |= {} if kind == "bytes" else {"tokenizer": str(bpe)}
    manager, names = find_tasks(["local"], options)
    assert tuple(names) == local_tasks()
    for name, task in load_tasks(manager, names, context=1500).tasks.items():
        docs = list(task.eval_docs)
        assert local_version(name) == str(task.VERSION)
        assert 1 <= len(docs) <= 3, name
        if task.OUTPUT_TYPE != "generate_until":
            continue
        reserve = task.config.generation_kwargs["max_gen_toks"]
        assert task.config.dataset_kwargs["reserve"] == reserve, name
        for doc in docs:
            prompt = task.doc_to_text(doc)
            tokens = len(tokenizer(prompt)["input_ids"])
            assert tokens + reserve <= 1500, name
            assert tokens + reserve > (1000 if name.startswith("fixture") else 1280), name
            if "drop" not in name:
                assert all(x in prompt for x in doc["outputs"]), name


def test_a_smaller_limit_gives_the_first_documents(text: Path) -> None:
    how = {"config": {"name": "number"}, "context": 800, "reserve": 128, "text": str(text)}
    few, many = (documents.needles(limit=n, **how)["test"] for n in (2, 5))
    assert list(few) == list(many)[:2]
    assert len(documents.needles(limit=200, documents=7, **how)["test"]) == 7


def test_every_local_task_is_a_file_of_its_name() -> None:
    import yaml

    assert len(local_tasks()) == 28
    for name in local_tasks():
        assert f"task: {name}\n" in (local_folder() / f"{name}.yaml").read_text()
    assert all(path.suffix in ("", ".yaml") for path in local_folder().iterdir())
    assert yaml.safe_load((local_folder() / "local_babi_1.yaml").read_text())["tag"][0] == "local"


# -- errors ----------------------------------------------------------------------------------------


def test_refusals_are_sentences(model: Any, saved: Path, tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    mine = {"tokenizer": tokenizer}
    for tasks, how, message in (
        ("local_babi_9", mine, r"there is no task 'local_babi_9'; did you mean 'local_babi_"),
        ([], mine, "tasks: name at least one"),
        ("local_text", {}, "a model alone has no tokenizer: give tokenizer="),
        ("local_text", {**mine, "limit": 0}, r"limit must be .* not 0"),
        ("local_text", {**mine, "context": 1}, r"context must be .* not 1"),
        ("local_text", {**mine, "batch": "many"}, 'batch must be "auto" or a number'),
        ("local_text", {**mine, "batch": 0}, r"batch must be .* not 0"),
        ("local_text", {**mine, "text": tmp_path / "no.txt"}, "no.txt: No such file"),
        ("local_niah_single_1", {**mine, "context": 300}, "local_niah_single_1: a context of 300"),
        (
            "local_ruler_cwe",
            {**mine, "context": 900},
            "its shortest prompt has .* and 772 are left",
        ),
    ):
        with pytest.raises(ValueError, match=message) as refused:
            rc.lm.evaluate(model, tasks, **how)
        assert "\n" not in str(refused.value)
    with pytest.raises(ValueError, match="a folder has its own"):
        rc.lm.evaluate(saved, "local_text", tokenizer=tokenizer)
    with pytest.raises(ValueError, match=r"there is no folder '\./nowhere'"):
        rc.lm.evaluate("./nowhere", "local_text")


def test_models_that_cannot_be_evaluated(tmp_path: Path) -> None:
    from transformers import BertConfig, BertForMaskedLM

    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    bert = BertForMaskedLM(BertConfig(vocab_size=257, intermediate_size=16, **sizes))
    with pytest.raises(ValueError, match="and BertForMaskedLM cannot generate: give one such as"):
        rc.lm.evaluate(bert, "local_text", tokenizer=byte_tokenizer())
    large = tiny(vocab=300)
    large.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="has no tokenizer, and its vocabulary of 300 tokens"):
        rc.lm.evaluate(tmp_path, "local_text")
    with pytest.raises(ValueError, match="has a token 256 and the model 256 tokens: this is"):
        rc.lm.evaluate(tiny(vocab=256), "local_text", tokenizer=byte_tokenizer())


def test_a_task_that_needs_the_hub_does_not_stop_the_others(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import lm_eval.tasks

    class Arc(lm_eval.tasks.TaskManager):
        """Replaces lm-eval's tasks, whose index takes ten seconds to read."""

        def __init__(self, include_path: str, include_defaults: bool, metadata: Any) -> None:
            arc = Path(str(lm_eval.tasks.__file__)).parent / "arc"
            paths = [str(arc)] * include_defaults + [include_path]
            super().__init__(include_path=paths, include_defaults=False, metadata=metadata)

    _task_manager.cache_clear()
    monkeypatch.setattr(lm_eval.tasks, "TaskManager", Arc)
    monkeypatch.setattr("recollect.lm.evaluation.names.is_hub_reachable", lambda: False)
    how: dict[str, Any] = {"tokenizer": byte_tokenizer(), "out": tmp_path, "limit": 1}
    needs = "task arc_easy needs data of the hub, which does not"
    with pytest.raises(ValueError, match=needs):
        rc.lm.evaluate(model, ["arc_easy"], context=600, **how)
    assert not (tmp_path / "tasks").exists()
    result = rc.lm.evaluate(model, ["arc_easy", "local_babi_1"], context=600, **how)
    assert [one.task for one in result.tasks] == ["local_babi_1"]
    assert list(result.failures) == ["arc_easy"] and result.failures["arc_easy"].startswith(needs)
    with pytest.raises(ValueError, match=r"there is no task 'arc_esy'; did you mean 'arc_easy'\?"):
        rc.lm.evaluate(model, ["arc_esy"], **how)
    _task_manager.cache_clear()


def test_no_code_of_the_hub_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    import evaluate

    fetched: list[str] = []
    monkeypatch.setattr(evaluate, "load", fetched.append)
    manager, _ = find_tasks(["local_text"], {"context": 600, "limit": 1})
    for name, extra in (("mine", {"metric": "strange"}), ("yours", {"metric": "bleurt"})):
        spec = {
            "task": name,
            "output_type": "generate_until",
            "test_split": "test",
            "custom_dataset": documents.short_stories,
            "dataset_kwargs": {"config": {"task": 1}},
            "doc_to_text": "{{input}}",
            "doc_to_target": "{{answer}}",
            "metric_list": [{**extra, "aggregation": "mean", "higher_is_better": True}],
        }
        loaded = load_tasks(manager, [spec], context=600)  # type: ignore[list-item]
        assert f"takes the metric {extra['metric']} as code of" in loaded.failures[name]
        assert not loaded.tasks
    assert fetched == []


def test_code_next_to_a_model_is_not_run(tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    code = f"import pathlib\npathlib.Path({str(mark)!r}).touch()\n"
    folder = tmp_path / "model"
    tiny().save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    (folder / "mine.py").write_text(code + "class Mine: ...\n")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["auto_map"] = {"AutoTokenizer": ["mine.Mine", "mine.Mine"]}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    rc.lm.evaluate(folder, ["local_babi_1"], limit=1, context=600)
    config = {"model_type": "mine", "auto_map": {"AutoConfig": "mine.Mine"}}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="type 'mine', which transformers does not have; code"):
        rc.lm.evaluate(folder, ["local_babi_1"], limit=1)
    assert not mark.exists()


def test_without_the_extra(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    for name in list(sys.modules):
        if name.startswith(("lm_eval", "recollect.lm.evaluation.harness")):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr("recollect.lm.evaluation.harness")
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(ImportError, match=r'needs lm-eval, .*: pip install -e "\.\[lm,eval\]"'):
        rc.lm.evaluate(model, "local_text", tokenizer=byte_tokenizer())


# -- printed results -------------------------------------------------------------------------------


def test_numbers_of_lm_eval_are_read_by_their_keys() -> None:
    raw = {
        "alias": "t",
        "sample_len": 4,
        "acc,none": 0.5,
        "acc_stderr,none": 0.1,
        "exact_match,flexible-extract": 0.25,
        "exact_match_stderr,flexible-extract": "N/A",
        "4096,none": -1,
        "1024,none": 0.75,
        "perplexity,none": 9.0,
    }
    more = {"task": "t", "documents": 4, "version": "1", "settings": {}}
    one = rc.lm.TaskResult.from_harness(raw, {"perplexity": False, "acc": True}, **more)
    want = {"acc": 0.5, "exact_match (flexible-extract)": 0.25, "1024": 0.75, "perplexity": 9.0}
    assert one.metrics == want and one.errors == {"acc": 0.1}
    assert one.lower_is_better == ("perplexity",)
    values = {k: v for k, v in raw.items() if v != "N/A" and v != -1 and k != "alias"}
    assert one.to_harness() == values, "groups read what tasks gave"


def test_results_read_as_a_table(model: Any) -> None:
    result = rc.lm.evaluate(model, "local_babi_1", tokenizer=byte_tokenizer(), limit=4, context=600)
    head, row = str(result).splitlines()
    assert head.split() == ["task", "metric", "measured", "documents"]
    assert row.split()[:2] == ["local_babi_1", "acc"] and row.endswith("4")
    assert repr(result).startswith("Evaluation(RecollectForCausalLM: local_babi_1 acc ")
    one = result["local_babi_1"]
    assert rc.lm.TaskResult.from_dict(json.loads(json.dumps(one.to_dict()))) == one
    with pytest.raises(KeyError, match="no task 'x'"):
        result["x"]
    with pytest.raises(AttributeError):
        result.model = "other"  # type: ignore[misc]
