"""``recollect eval``: results next to the papers' numbers, stored, and errors in one sentence."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("typer")
pytest.importorskip("lm_eval")

from typer.testing import CliRunner

import recollect as rc
from recollect.cli import build
from recollect.experiments.framework.paper_values import match_paper_values
from recollect.lm.data.tokenizers import byte_tokenizer


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    torch.manual_seed(0)
    config = rc.lm.RecollectConfig.from_recipes(
        "gated_delta_net", vocab_size=257, hidden_size=16, num_hidden_layers=1
    )
    rc.lm.RecollectForCausalLM(config).save_pretrained(folder / "model")
    byte_tokenizer().save_pretrained(folder / "model")
    return folder


def run(*arguments: object, code: int = 0) -> tuple[str, str]:
    result = CliRunner().invoke(build(), ["eval", *map(str, arguments)])
    assert result.exit_code == code, (result.output, result.exception)
    return result.stdout, result.stderr


def test_results_are_shown_stored_and_not_measured_again(run_folder: Path, tmp_path: Path) -> None:
    options = ["--tasks", "local_niah_single_1,local_babi_1", "--limit", 2, "--context", 1024]
    output, stderr = run(run_folder, *options, "--out", tmp_path)
    assert "local_niah_single_1" in output and "MIRAS table 3" not in output, (
        "which has no passkey 1K"
    )
    assert f"results: {tmp_path / 'results.json'}" in output.replace("\n", "")
    assert "local_babi_1 (2 of 2)" in stderr
    repeated, stderr = run(run_folder, *options, "--out", tmp_path, "--json")
    assert stderr.count("measured before") == 2
    data = json.loads(repeated)
    assert [one["task"] for one in data["tasks"]] == ["local_niah_single_1", "local_babi_1"]
    assert data["published"] == []
    assert json.loads((tmp_path / "results.json").read_text()).items() <= data.items()


def test_the_local_tasks_are_listed() -> None:
    assert run("--list")[0].split() == list(rc.lm.local_tasks())
    assert json.loads(run("--list", "--json")[0]) == list(rc.lm.local_tasks())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "name a model and --tasks a,b; --list names the tasks that need no network"),
        (["MODEL"], "name a model and --tasks a,b"),
        (["MODEL", "--tasks", ","], "tasks: name at least one"),
        (["MODEL", "--tasks", "local_txt"], "did you mean 'local_text'?"),
        (["MODEL", "--tasks", "local_text", "--limit", "0"], "--limit must be"),
        (["MODEL", "--tasks", "local_text", "--batch", "x"], '--batch must be "auto" or a number'),
        (["MODEL", "--tasks", "local_text", "--context", "1"], "--context must be"),
        (["MODEL", "--tasks", "local_text", "--text", "no"], "--text no: No such file"),
        (["MODEL", "--tasks", "local_text", "--device", "tpu"], "--device 'tpu' is not here"),
        (["./no", "--tasks", "local_text"], "there is no folder './no'"),
    ],
)
def test_refusals(arguments: list[str], message: str, run_folder: Path, tmp_path: Path) -> None:
    options = [str(run_folder) if one == "MODEL" else one for one in arguments]
    out, output = run(*options, "--out", tmp_path, code=2)
    assert out == "" and output.startswith("recollect eval: ") and message in output
    assert output.count("\n") == 1 and "Traceback" not in output
    assert not list(tmp_path.iterdir())


OWN_TASK = """
task: {name}
tag: own
output_type: multiple_choice
test_split: test
custom_dataset: !function {function}
doc_to_text: "{{{{text}}}}"
doc_to_target: answer
doc_to_choice: ["b", "a"]
process_results: !function {scores}
metric_list:
  - metric: acc
    aggregation: mean
    higher_is_better: true
"""
OWN_CODE = """
import datasets

def documents(**_):
    rows = datasets.Dataset.from_dict({"text": ["a", "b"], "answer": [0, 1]})
    return {"test": rows}

def broken(**_):
    raise KeyError("choices")

def scores(document, results):
    return {"acc": 1.0}

def no_scores(document, results):
    raise IndexError("no choice 2")

def unreachable(**_):
    try:
        raise ConnectionError("nobody answers")
    except ConnectionError as error:
        raise RuntimeError("no documents") from error
"""


@pytest.fixture
def own_tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Add a user's tasks to the local ones, without a connection to the hub."""
    import lm_eval.tasks

    from recollect.lm.evaluation.names import _task_manager

    folder = tmp_path / "own"
    folder.mkdir()
    (folder / "own.py").write_text(OWN_CODE)
    for name, function, scores in (
        ("own_good", "own.documents", "own.scores"),
        ("own_broken", "own.broken", "own.scores"),
        ("own_unreachable", "own.unreachable", "own.scores"),
        ("own_unscored", "own.documents", "own.no_scores"),
    ):
        task = OWN_TASK.format(name=name, function=function, scores=scores)
        (folder / f"{name}.yaml").write_text(task)

    class WithOwnTasks(lm_eval.tasks.TaskManager):
        def __init__(self, include_path: str, include_defaults: bool, metadata: Any) -> None:
            paths = [include_path, str(folder)]
            super().__init__(include_path=paths, include_defaults=False, metadata=metadata)

    _task_manager.cache_clear()
    monkeypatch.setattr(lm_eval.tasks, "TaskManager", WithOwnTasks)
    monkeypatch.setattr("recollect.lm.evaluation.names.is_hub_reachable", lambda: False)
    yield
    _task_manager.cache_clear()


@pytest.mark.usefixtures("own_tasks")
def test_failing_task_is_named_and_others_run(run_folder: Path, tmp_path: Path) -> None:
    """An error in a task is not missing data, and does not end the command before other tasks."""
    out = tmp_path / "out"
    tasks = "own_broken,own_unreachable,own_unscored,local_babi_1,own_good"
    options = ["--tasks", tasks, "--limit", 2, "--context", 600, "--out", out]
    page, errors = run(run_folder, *options, code=1)
    assert "task own_broken cannot be loaded: KeyError: 'choices'" in errors
    assert "task own_unreachable needs data of the hub, which does not answer" in errors
    assert "task own_unscored failed: IndexError: no choice 2" in errors
    assert errors.endswith("not measured: own_broken, own_unreachable, own_unscored\n")
    assert "Traceback" not in errors and "own_good" in page and "local_babi_1" in page
    data = json.loads((out / "results.json").read_text())
    assert [one["task"] for one in data["tasks"]] == ["local_babi_1", "own_good"]
    assert list(data["failures"]) == ["own_broken", "own_unreachable", "own_unscored"]
    report = (out / "report.html").read_text()
    assert "own_broken was not measured" in report
    printed, errors = run(run_folder, *options, "--json", code=1)
    assert errors.count("measured before") == 2
    assert list(json.loads(printed)["failures"]) == list(data["failures"])
    _, errors = run(run_folder, "--tasks", "own_broken", "--out", tmp_path / "none", code=2)
    assert errors == "recollect eval: task own_broken cannot be loaded: KeyError: 'choices'\n"


def test_interrupt_lists_stored_results(
    run_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from recollect.lm.evaluation import harness

    run_task = harness.run_task

    def stops(model: Any, task: Any, limit: int | None) -> Any:
        if task.task_name == "local_babi_2":
            raise KeyboardInterrupt
        return run_task(model, task, limit)

    monkeypatch.setattr(harness, "run_task", stops)
    tasks = ["--tasks", "local_babi_1,local_babi_2,local_babi_3", "--limit", 2]
    _, output = run(run_folder, *tasks, "--out", tmp_path, code=130)
    assert "interrupted: 1 of 3 tasks are measured and saved" in output
    monkeypatch.setattr(harness, "run_task", run_task)
    _, output = run(run_folder, *tasks, "--out", tmp_path)
    assert output.count("measured before") == 1 and "local_babi_3 (2 of 2)" in output


def evaluation(task: str, metric: str, value: float, context: int = 2048) -> rc.lm.Evaluation:
    one = rc.lm.TaskResult(
        task=task,
        metrics={metric: value},
        errors={},
        documents=9,
        version="1",
        settings={"context": context},
    )
    return rc.lm.Evaluation(model="m", tasks=(one,), environment={})


def test_results_next_to_published_numbers_of_the_task_and_metric() -> None:
    result = match_paper_values(evaluation("wikitext", "word_perplexity", 31.0))
    assert {one.table for one in result} == {"miras_table2", "atlas_table2", "atlas_table8"}
    small = next(one for one in result if one.group.startswith("340M") and "miras" in one.table)
    assert dict(small.rows)["Transformer++"] == 31.52 and small.value == 31.0
    assert str(small).endswith("MIRAS table 2, 340M / 15B tokens")
    (recall,) = match_paper_values(evaluation("swde", "contains", 0.5))
    assert dict(recall.rows)["Atlas"] == 66.8 and recall.value == 50.0, "per cent, as the table"
    ours = match_paper_values(evaluation("local_niah_single_2", "string_match", 0.25))
    assert {one.column for one in ours} == {"S-NIAH-N 2K"}
    assert all(one.note == "the same form, other words" for one in ours)
    theirs = match_paper_values(evaluation("niah_single_3", "4096", 0.25, context=8192))
    assert {one.column for one in theirs} == {"S-NIAH-W 4K"} and theirs[0].note == ""


@pytest.mark.parametrize(
    ("task", "metric", "context"),
    [
        ("fixture_swde", "contains", 2048),
        ("triviaqa", "exact_match", 2048),
        ("wikitext", "bits_per_byte", 2048),
        ("local_niah_single_2", "string_match", 2000),
        ("local_niah_multikey_1", "string_match", 2048),
        ("niah_single_1", "32768", 2048),
    ],
)
def test_results_without_published_numbers(task: str, metric: str, context: int) -> None:
    assert match_paper_values(evaluation(task, metric, 0.5, context)) == ()
