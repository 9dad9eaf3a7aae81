"""Plans are checked before anything is loaded, and errors state the remedy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

from recollect.lm.training.plan import TrainPlan, load_plan

MINIMAL: dict[str, dict[str, Any]] = {"data": {"train": "a.txt"}, "optimizer": {"steps": 2}}


def plan(**changes: dict[str, Any]) -> TrainPlan:
    tables = {name: dict(values) for name, values in MINIMAL.items()}
    for table, values in changes.items():
        tables[table] = {**tables.get(table, {}), **values}
    return TrainPlan.from_dict(tables)


def test_plan_has_defaults_and_serialises() -> None:
    first = plan(model={"recipe": "gla", "layers": ["gla"]}, optimizer={"betas": [0.8, 0.9]})
    assert first.data.train == ("a.txt",)  # a name is a list of one
    assert first.lr == 3e-3
    assert first.steps == 2
    assert TrainPlan.from_dict(first.to_dict()) == first


def test_tokens_set_the_steps_and_a_size_sets_the_rate() -> None:
    by_tokens = TrainPlan.from_dict(
        {
            "data": {"train": "a.txt", "context": 64},
            "optimizer": {"tokens": 1000, "batch": 2, "accumulate": 3},
        }
    )
    assert by_tokens.steps == 3  # 384 tokens per step
    sized = TrainPlan.from_dict(
        {"model": {"size": "760M"}, "data": {"train": "a", "context": 4096}}
    )
    assert sized.lr == 1.25e-3
    assert sized.steps == -(-30 * 10**9 // (8 * 4096))
    assert plan(model={"size": "760M"}, optimizer={"lr": 1e-3}).lr == 1e-3


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"optimizer": {"warm_up": 3}},
            r"has no key 'warm_up'; did you mean 'warmup'",
        ),
        ({"modle": {}}, r"no table \[modle\]; did you mean 'model'"),
        ({"model": {"width": "wide"}}, r"\[model\] width must be a whole number >= 1, not 'wide'"),
        ({"model": {"width": True}}, r"\[model\] width must be a whole number >= 1, not True"),
        ({"model": {"width": 0}}, r"\[model\] width must be a whole number >= 1, not 0"),
        ({"model": {"size": "350M"}}, "did you mean '340M'"),
        ({"model": {"mlp": 8, "parameters": 10}}, "mlp and parameters exclude each other"),
        ({"model": {"start": "x", "width": 3}}, r"start uses the saved model.*leave out width"),
        ({"data": {"dataset": "x/y"}}, "either train.*or dataset"),
        ({"data": {"packing": "tight"}}, "must be one of 'documents', 'stream', not 'tight'"),
        ({"data": {"train": [1]}}, r"train must be a list of strings, not \[1\]"),
        (
            {"data": {"heldout_share": 0.7}},
            r"must be a finite number in \[0, 0.5\), not 0.7",
        ),
        ({"data": {"heldout_share": 0.1, "stream": True}}, "this run streams"),
        ({"data": {"heldout_share": 0.1, "heldout": ["b"]}}, "heldout_share excludes heldout"),
        ({"data": {"heldout_split": "test"}}, "use heldout"),
        ({"data": {"vocab": 10}}, "vocab must be a whole number >= 257, not 10"),
        ({"optimizer": {"tokens": 5}}, "steps and tokens exclude each other"),
        (
            {"optimizer": {"lr": float("nan")}},
            "lr must be a finite number in \\(0, 100\\], not nan",
        ),
        ({"optimizer": {"betas": [0.9]}}, r"betas must be two numbers in \[0, 1\), not \[0.9\]"),
        ({"optimizer": {"betas": [0.9, 1]}}, r"betas must be a finite number in \[0, 1\), not 1"),
        ({"model": {"recipe": 3}}, "recipe must be a string or a table, not 3"),
        ({"model": {"options": "none"}}, "options must be a table, not 'none'"),
        ({"run": {"out": 3}}, r"\[run\] out must be a string, not 3"),
        ({"run": {"eval_every": 5}}, "eval_every needs held-out text.*names none"),
        (
            {"run": {"seed": 2**32}},
            "seed must be .* from 0 to 4294967295, not 4294967296",
        ),
        ({"run": {"keep": 0}}, "keep must be a whole number >= 1, not 0"),
        ({"run": {"bf16": "yes"}}, "bf16 must be true or false"),
    ],
)
def test_refusals(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        plan(**changes)


def test_length_is_required() -> None:
    with pytest.raises(ValueError, match="needs steps or tokens"):
        TrainPlan.from_dict({"data": {"train": "a.txt"}})


def test_files(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    with pytest.raises(ValueError, match="there is no file"):
        load_plan(path)
    path.write_text("[data\n")
    with pytest.raises(ValueError, match=r"run.toml is not TOML"):
        load_plan(path)
    path.write_text("[data]\ntrian = 'a'\n")
    with pytest.raises(ValueError, match=r"run.toml: \[data\] has no key 'trian'.*'train'"):
        load_plan(path)
    path.write_text("[data]\ntrain = 'a'\n[optimizer]\nsteps = 3\nlr = 1\n")
    assert load_plan(path).lr == 1.0
