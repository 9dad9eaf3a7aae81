"""`search` at toy sizes: draws, successive halving, continuation, limits, and files."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.misuse.sentences import is_one_sentence

import recollect as rc

pytest.importorskip("transformers")
pytest.importorskip("matplotlib")
pytest.importorskip("typer")

from typer.testing import CliRunner

from recollect.blocks.compositions import load_recipe_mixer
from recollect.choices.member import all_members
from recollect.cli import build
from recollect.cli.search import parse_duration
from recollect.experiments import ModelRun, ProgressReporter, Schedule, Search, Sizes, search
from recollect.experiments.recipe_search import space
from recollect.experiments.recipe_search.halving import Trial, next_promotion, rank, rung_steps
from recollect.experiments.recipe_search.space import changes, draw_neighbour, is_toml
from recollect.recipe.toml_text import read_toml, write_toml
from recollect.testing import draws
from recollect.testing.draws import Pool

TINY = Sizes(width=8, depth=1, heads=1, head_dim=4, length=48, schedule=Schedule(steps=9, batch=1))
START = rc.blocks.as_mixer("linear_attention")


@rc.member
class SquareRoot(rc.bias.Bias):
    """Σ √(1 + e²) − 1, a member that is registered by this module alone."""

    def loss(self, prediction: torch.Tensor, value: torch.Tensor, gates: Any) -> torch.Tensor:
        return ((1 + (prediction - value) ** 2).sqrt() - 1).sum(-1)


def fits(mixer: rc.blocks.RecipeMixer) -> bool:
    rc.MemoryLayer(8, 2, mixer.recipe, mixer.options)
    return True


def run(**options: Any) -> Search:
    return search(**{"start": "linear_attention", "tasks": "mqar", "sizes": TINY, **options})


def outcome(result: Search) -> list[tuple[Any, ...]]:
    """Everything of a search except for times."""
    return [
        (trial.candidate, trial.rung, trial.failure, [run.value for run in trial.runs])
        for trial in result.trials
    ] + [(x.name, x.mixer, x.draws) for x in result.candidates]


def trial(name: str, rung: int, value: float | None, state: int = 100, **more: Any) -> Trial:
    if value is None:
        return Trial(candidate=name, rung=rung, failure="diverged")
    runs = [
        ModelRun(task=task, model=name, parameters=1, state_bytes=state, grows=False, value=x)
        for task, x in {"mqar": value, **more}.items()
    ]
    return Trial(candidate=name, rung=rung, runs=tuple(runs))


def test_the_best_third_of_a_rung_is_trained_three_times_as_long() -> None:
    assert [rung_steps(600, rung, 3) for rung in range(3)] == [67, 200, 600]
    assert rung_steps(2, 0, 3) == 1
    trials = [trial(f"r{i}", 0, value) for i, value in enumerate((0.2, None, 0.5))]
    assert next_promotion(trials[:2], ["mqar"], 3) is None
    assert next_promotion(trials, ["mqar"], 3) == ("r2", 1)
    trials += [trial("r2", 1, 0.6), *(trial(f"r{i}", 0, 0.1 * i) for i in (7, 8, 9))]
    assert next_promotion(trials, ["mqar"], 3) == ("r9", 1)  # two of six: r9 and r8
    trials.append(trial("r9", 1, None))
    assert next_promotion(trials, ["mqar"], 3) == ("r8", 1)
    trials.append(trial("r8", 1, 0.55))
    assert next_promotion(trials, ["mqar"], 3) == ("r2", 2)
    assert next_promotion([*trials, trial("r2", 2, 0.1)], ["mqar"], 3) is None


def test_ranks_combine_tasks_of_opposite_directions() -> None:
    trials = [
        trial("recalls", 0, 0.9, text=3.0),
        trial("both", 0, 0.9, text=2.0),
        trial("smaller", 0, 0.9, 50, text=2.0),
        trial("diverged", 0, math.nan, text=math.nan),
        trial("writes", 0, 0.2, text=1.9),
    ]
    names = [x.candidate for x in rank(trials, ["mqar", "text"])]
    assert names == ["smaller", "both", "recalls", "writes", "diverged"]


def test_draws_are_near_the_start_valid_and_distinct(monkeypatch: pytest.MonkeyPatch) -> None:
    draws, known = 0, {START.recipe.canonical()}
    for _ in range(8):
        neighbour = draw_neighbour(START, seed=3, draws=draws, known=known, accept=fits)
        assert neighbour is not None
        draws, mixer = neighbour
        assert 1 <= len(changes(mixer.recipe, START.recipe)) <= 2
        assert mixer.recipe.canonical() not in known
        known.add(mixer.recipe.canonical())
    repeated = draw_neighbour(START, seed=3, draws=0, known=(), accept=lambda _: True)
    assert repeated == draw_neighbour(START, seed=3, draws=0, known=(), accept=lambda _: True)
    monkeypatch.setattr(space, "MAX_DRAWS", 100)
    nothing = draw_neighbour(START, seed=3, draws=0, known=(), accept=lambda _: False)
    assert nothing is None


def test_options_keep_the_gates_and_ties_that_a_drawn_recipe_declares() -> None:
    start = rc.blocks.as_mixer("gated_delta_net_2")
    result = draw_neighbour(
        start,
        seed=0,
        draws=0,
        known=(),
        accept=lambda x: isinstance(x.recipe.bias, rc.bias.DotProduct),
    )
    assert result is not None
    options = result[1].options
    assert "probe" in dict(start.options.gate_options) and start.options.ties
    assert "probe" not in dict(options.gate_options) and not options.ties
    rc.MemoryLayer(8, 2, result[1].recipe, options)


def test_options_keep_the_gates_of_ties() -> None:
    start = rc.blocks.as_mixer("memory_mosaics")
    result = draw_neighbour(start, seed=0, draws=0, known=(), accept=lambda _: True)
    assert result is not None
    assert "log_average_decay" in dict(start.options.gate_options)
    assert result[1].options == start.options


def test_a_member_of_the_user_takes_part(monkeypatch: pytest.MonkeyPatch) -> None:
    assert SquareRoot in all_members()
    # Draws depend on all members that are registered, also on those of other tests.
    members = [x for x in all_members() if x.__module__.startswith("recollect.") or x is SquareRoot]
    monkeypatch.setattr(draws, "all_members", lambda: tuple(members))

    def has_member(seed: int) -> bool:
        actual = draw_neighbour(START, seed=seed, draws=0, known=(), accept=lambda _: True)
        return actual is not None and isinstance(actual[1].recipe.bias, SquareRoot)

    seed = next(seed for seed in range(1000) if has_member(seed))
    result = run(trials=1, seed=seed, max_time=1e6)
    assert isinstance(result.candidates[1].mixer.recipe.bias, SquareRoot)
    assert result.trials[1].failure == "" and len(result.trials[1].runs) == 1


class StopAt(ProgressReporter):
    """Interrupts at the start of a training."""

    def __init__(self, number: int) -> None:
        self.remaining = number

    def on_start(self, task: str, model: str, parameters: int, steps: int) -> None:
        self.remaining -= 1
        if self.remaining == 0:
            raise KeyboardInterrupt

    def on_step(self, *event: Any) -> None: ...
    def on_end(self, run: ModelRun) -> None: ...
    def on_failure(self, *event: Any) -> None: ...


def test_interrupted_search_equals_an_uninterrupted_one(tmp_path: Path) -> None:
    options: dict[str, Any] = {"baselines": "delta_net", "seed": 1}
    full = run(trials=3, **options)
    stopped = run(trials=3, folder=tmp_path, progress=StopAt(4), **options)
    assert stopped.interrupted and len(stopped.trials) == 3
    assert outcome(rc.experiments.load_search(tmp_path)) == outcome(stopped)
    continued = run(trials=3, folder=tmp_path, **options)
    assert not continued.interrupted
    assert outcome(continued) == outcome(full)
    assert {x.rung for x in full.trials} == {0, 1, 2}
    repeated = run(trials=3, folder=tmp_path, progress=StopAt(1), **options)
    assert outcome(repeated) == outcome(full) and not repeated.interrupted
    with pytest.raises(ValueError, match="has another seed") as error:
        run(trials=3, folder=tmp_path, baselines="delta_net", seed=2)
    is_one_sentence(str(error.value))


def test_models_are_equal_and_the_best_recipe_loads(tmp_path: Path) -> None:
    result = run(trials=3, seed=1, baselines=["gated_delta_net"], max_state=1.0)
    sizes = {run.parameters for trial in result.trials for run in trial.runs}
    assert max(sizes) - min(sizes) <= 12 * TINY.width  # half a step of the MLP's width, twice
    start = result.trials[0].runs[0]
    assert all(x.state_bytes <= start.state_bytes for t in result.trials for x in t.runs)
    assert result.best.name != "gated_delta_net"
    paths = result.save(tmp_path, command="recollect search")
    assert load_recipe_mixer(paths["best"]) == result.best.mixer
    assert rc.load_recipe(paths["best"]) == result.best.mixer.recipe  # its options are defaults
    assert Search.from_dict(result.to_dict()).to_dict() == result.to_dict()
    assert "gated_delta_net" in str(result) and "baseline" in str(result)
    lines = paths["csv"].read_text().splitlines()
    assert len(lines) == 1 + len(result.trials)
    assert (tmp_path / "front.svg").exists() and "best recipe" in paths["report"].read_text()


def test_the_front_has_no_dominated_point() -> None:
    result = run(trials=1)
    trials = [
        trial("linear_attention", 2, 0.5, 200),
        trial("recipe-1", 2, 0.9, 300),
    ]
    other = dataclasses.replace(result.candidates[1], name="recipe-2")
    more = [*trials, trial("recipe-2", 2, 0.4, 250)]
    result = dataclasses.replace(result, candidates=(*result.candidates, other), trials=tuple(more))
    assert [name for _, _, name in result.front("mqar")] == ["linear_attention", "recipe-1"]
    assert len(result.points("mqar", "time")) == 3


def test_search_without_a_finished_recipe_has_no_best(tmp_path: Path) -> None:
    result = run(trials=1, baselines="delta_net")
    trials = (trial("linear_attention", 2, None), trial("delta_net", 2, 0.5))
    result = dataclasses.replace(result, trials=trials)
    assert not result.has_best and "best" not in repr(result)
    paths = result.save(tmp_path)
    assert "best" not in paths and "Neither the start" in paths["report"].read_text()


def test_a_continued_search_stores_the_present_environment(tmp_path: Path) -> None:
    path = run(trials=1).save(tmp_path)["json"]
    data = json.loads(path.read_text())
    present, data["environment"]["torch"] = data["environment"]["torch"], "0.0"
    path.write_text(json.dumps(data))
    assert run(trials=1, folder=tmp_path).environment.torch == present


def test_toml_of_random_recipes_and_options_is_read_back() -> None:
    recipes = [recipe for _, recipe in Pool().valid(100)]
    others = [recipe for recipe in recipes if not is_toml(recipe)]
    assert len(others) < 10 and all("null" in recipe.to_json() for recipe in others)
    for name in ("rwkv7", "gated_delta_net_2", "mamba3"):
        mixer = rc.blocks.as_mixer(name)
        text = write_toml(mixer.to_dict())
        assert rc.blocks.read_mixer(read_toml(text)) == mixer
    assert read_toml(write_toml({"a b": [1, True, "x\n"], "t": {"x": None, "y": 0.5}})) == {
        "a b": [1, True, "x\n"],
        "t": {"y": 0.5},
    }


def test_a_time_budget_ends_after_the_trial_that_reaches_it() -> None:
    result = run(seconds=1e-3)
    assert [x.candidate for x in result.trials] == ["linear_attention"]
    assert result.best.name == "linear_attention"
    assert [parse_duration(x) for x in ("90s", "60m", "1.5h")] == [90, 3600, 5400]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"trials": 1, "seconds": 1.0}, "give one"),
        ({}, "give one"),
        ({"trials": 0}, "trials"),
        ({"seconds": math.inf}, "seconds"),
        ({"trials": 1, "max_state": 0.0}, "max_state"),
        ({"trials": 1, "rungs": 0}, "rungs"),
        ({"trials": 1, "start": "titans_mac"}, "composition"),
        ({"trials": 1, "baselines": ["linear_attention"]}, "twice"),
        ({"trials": 1, "tasks": "math"}, "unknown task"),
    ],
)
def test_bad_arguments_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words) as error:
        run(**options)
    is_one_sentence(str(error.value))


def test_the_command_searches_and_refuses(tmp_path: Path) -> None:
    sizes = ["--width", "8", "--steps", "9", "--batch", "1", "--heads", "1"]
    line = ["search", "--task", "mqar", "--trials", "1", *sizes, "--out", str(tmp_path / "s")]
    result = CliRunner().invoke(build(), line)
    assert result.exit_code == 0, result.output
    assert "The best recipe is linear_attention" in result.output
    assert (tmp_path / "s" / "best.toml").exists()
    failed = [*line[:-1], str(tmp_path / "failed"), "--length", "32"]  # too short for the pairs
    result = CliRunner().invoke(build(), failed)
    assert result.exit_code == 1 and "Neither the start" in result.output
    for arguments in (
        ["--budget", "soon"],
        ["--budget", "1m", "--trials", "2"],
        ["--task", "sums", "--trials", "1"],
        ["--start", "nothing", "--trials", "1"],
        ["--trials", "1", "--max-time", "-1"],
        ["--trials", "1", "--seed", "7", *sizes, "--out", str(tmp_path / "s")],
    ):
        refused = CliRunner().invoke(build(), ["search", *arguments])
        assert refused.exit_code == 2
        is_one_sentence(refused.stderr.strip().removeprefix("recollect search: "))
