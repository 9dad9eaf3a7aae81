"""``recollect eval``: results beside the papers' numbers, kept, and refused in one sentence."""

from __future__ import annotations

import json
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
from recollect.experiments.framework.beside import beside
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


def test_results_are_shown_kept_and_not_measured_again(run_folder: Path, tmp_path: Path) -> None:
    options = ["--tasks", "local_niah_single_1,local_babi_1", "--limit", 2, "--context", 1024]
    said, beside = run(run_folder, *options, "--out", tmp_path)
    assert "local_niah_single_1" in said and "MIRAS table 3" not in said, "which has no passkey 1K"
    assert f"results: {tmp_path / 'results.json'}" in said.replace("\n", "")
    assert "local_babi_1 (2 of 2)" in beside
    again, beside = run(run_folder, *options, "--out", tmp_path, "--json")
    assert beside.count("measured before") == 2
    data = json.loads(again)
    assert [one["task"] for one in data["tasks"]] == ["local_niah_single_1", "local_babi_1"]
    assert data["published"] == []
    assert json.loads((tmp_path / "results.json").read_text()).items() <= data.items()


def test_the_local_tasks_are_listed() -> None:
    assert run("--list")[0].split() == list(rc.lm.local_tasks())
    assert json.loads(run("--list", "--json")[0]) == list(rc.lm.local_tasks())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "name a model and --tasks a,b; --list names the tasks that need no network"),
        (["MODEL"], "name a model and --tasks a,b"),
        (["MODEL", "--tasks", ","], "tasks: name at least one"),
        (["MODEL", "--tasks", "local_txt"], "did you mean 'local_text'?"),
        (["MODEL", "--tasks", "local_text", "--limit", "0"], "--limit must be"),
        (["MODEL", "--tasks", "local_text", "--batch", "x"], '--batch must be "auto" or a number'),
        (["MODEL", "--tasks", "local_text", "--context", "1"], "--context must be"),
        (["MODEL", "--tasks", "local_text", "--text", "no"], "--text no: No such file"),
        (["MODEL", "--tasks", "local_text", "--device", "tpu"], "--device tpu is not here"),
        (["./no", "--tasks", "local_text"], "there is no folder './no'"),
    ],
)
def test_refusals(arguments: list[str], said: str, run_folder: Path, tmp_path: Path) -> None:
    given = [str(run_folder) if one == "MODEL" else one for one in arguments]
    out, told = run(*given, "--out", tmp_path, code=2)
    assert out == "" and told.startswith("recollect eval: ") and said in told
    assert told.count("\n") == 1 and "Traceback" not in told
    assert not list(tmp_path.iterdir())


def test_an_interrupt_says_what_is_kept(
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
    _, said = run(run_folder, *tasks, "--out", tmp_path, code=130)
    assert "interrupted: 1 of 3 tasks are measured and kept" in said
    monkeypatch.setattr(harness, "run_task", run_task)
    _, said = run(run_folder, *tasks, "--out", tmp_path)
    assert said.count("measured before") == 1 and "local_babi_3 (2 of 2)" in said


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


def test_numbers_stand_beside_those_of_the_same_task_and_measure() -> None:
    found = beside(evaluation("wikitext", "word_perplexity", 31.0))
    assert {one.table for one in found} == {"miras_table2", "atlas_table2", "atlas_table8"}
    small = next(one for one in found if one.group.startswith("340M") and "miras" in one.table)
    assert dict(small.rows)["Transformer++"] == 31.52 and small.measured == 31.0
    assert str(small).endswith("MIRAS table 2, 340M / 15B tokens")
    (recall,) = beside(evaluation("swde", "contains", 0.5))
    assert dict(recall.rows)["Atlas"] == 66.8 and recall.measured == 50.0, "per cent, as the table"
    ours = beside(evaluation("local_niah_single_2", "string_match", 0.25))
    assert {one.column for one in ours} == {"S-NIAH-N 2K"}
    assert all(one.note == "the same form, other words" for one in ours)
    theirs = beside(evaluation("niah_single_3", "4096", 0.25, context=8192))
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
def test_other_numbers_stand_alone(task: str, metric: str, context: int) -> None:
    assert beside(evaluation(task, metric, 0.5, context)) == ()
