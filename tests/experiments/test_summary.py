"""The first sentences of a report, from crafted numbers, and a stored comparison."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

import recollect as rc
from recollect.experiments.comparison.comparison import Comparison
from recollect.experiments.comparison.report import summarize
from recollect.experiments.comparison.results import DEFAULTS, ModelRun
from recollect.report import describe_environment


def a_run(task: str, model: str, value: float | None, **more: Any) -> ModelRun:
    values = {"parameters": 10, "state_bytes": 8, "grows": False} | more
    return ModelRun(task=task, model=model, value=value, **values)


def make_comparison(*runs: ModelRun, tasks: tuple[str, ...] = ("text",), **more: Any) -> Comparison:
    sizes = {task: DEFAULTS[task] for task in tasks}
    return Comparison(
        runs=runs, sizes=sizes, seed=0, environment=describe_environment("cpu"), **more
    )


TEXT = [a_run("text", name, value) for name, value in (("a", 2.75), ("b", 2.5), ("c", 3.0))]


def test_each_task_has_a_sentence_with_the_best_model_and_its_margin() -> None:
    recalled = [a_run("capacity", name, value) for name, value in (("a", 0.5), ("c", 0.875))]
    assert summarize(make_comparison(*TEXT, *recalled, tasks=("text", "capacity"))) == (
        "On text, b is best with 2.500 held-out bits per byte, 0.250 ahead of a (one seed each). "
        "On capacity, c is best with 0.875 accuracy, 0.375 ahead of a (one seed each)."
    )
    assert summarize(make_comparison(TEXT[0])) == "On text, a reaches 2.750 held-out bits per byte."


@pytest.mark.parametrize(("bigram", "worse"), [(2.9, 1), (2.75, 2), (3.5, 0)])
def test_models_no_better_than_a_bigram_are_counted(bigram: float, worse: int) -> None:
    """Also if other tasks are compared."""
    recalled = a_run("mqar", "a", 0.5)
    for comparison in (
        make_comparison(*TEXT, bigram=bigram),
        make_comparison(*TEXT, recalled, tasks=("text", "mqar"), bigram=bigram),
    ):
        clause = f"; no better than a byte bigram: {worse} of 3 models."
        assert clause in summarize(comparison)
    assert "bigram" not in summarize(make_comparison(*TEXT))


@pytest.mark.parametrize(("other", "seeds"), [(2.56, "as much or more"), (2.9, "less")])
def test_a_margin_is_compared_with_the_spread_of_the_seeds(other: float, seeds: str) -> None:
    runs = [a_run("text", "a", 2.5 + 0.1 * seed, seed=seed) for seed in (0, 1)]
    runs += [a_run("text", "b", other + 0.1 * seed, seed=seed) for seed in (0, 1)]
    sentence = summarize(make_comparison(*runs, seeds=2))
    assert sentence.startswith("On text, a is best with 2.550 (2.500–2.600) held-out bits")
    assert sentence.endswith(f"ahead of b (the seeds differ by {seeds}).")


def test_a_model_that_did_not_finish_is_not_ranked() -> None:
    stopped = a_run("text", "b", 1.0, finished=False)
    failures = (("text", "c", "it diverged"),)
    result = make_comparison(TEXT[0], stopped, a_run("text", "d", math.nan), failures=failures)
    assert summarize(result) == (
        "On text, a reaches 2.750 held-out bits per byte; not finished: b, d, c."
    )
    assert (
        summarize(make_comparison(stopped, interrupted=True)) == "No model was trained to its end."
    )
    runs = [a_run("text", "a", 2.5, seed=seed) for seed in (0, 1)]
    for second in ([a_run("text", "b", 1.0, seed=1, finished=False)], []):
        incomplete = [*runs, a_run("text", "b", 1.0, seed=0), *second]
        assert summarize(make_comparison(*incomplete, seeds=2)).startswith(
            "On text, a reaches 2.500"
        )


def test_a_run_without_a_number_is_not_ranked_and_has_no_deviation() -> None:
    """A stored NaN is null."""
    runs = [a_run("text", "a", value, seed=seed) for seed, value in enumerate((2.5, math.nan, 2.6))]
    runs += [a_run("text", "b", 2.9, seed=seed) for seed in range(3)]
    comparison = make_comparison(*runs, seeds=3)
    assert comparison.summaries("text")[0].sd is None
    for each in (comparison, Comparison.from_dict(json.loads(json.dumps(comparison.to_dict())))):
        assert summarize(each).startswith("On text, b reaches 2.900")
        assert summarize(each).endswith("; not finished: a.")


def test_a_saved_comparison_is_read_again_and_only_if_it_is_one(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    comparison = make_comparison(
        a_run("text", "a", 2.5, curve=((10, 3.0), (20, 2.5))),
        a_run("capacity", "a", 0.75, by_pairs={4: 1.0, 48: 0.5}),
        tasks=("text", "capacity"),
        bigram=3.0,
        text={"source": "mine", "sha256": "0" * 64},
        failures=(("text", "b", "it <diverged>"),),
        eval_sizes={"text": (5, 10)},
    )
    page = comparison.save(tmp_path)["report"].read_text("utf-8")
    assert page.count('<p class="summary">') == 1 and "On text, a reaches 2.500" in page
    repeated = rc.experiments.load_comparison(tmp_path)
    assert repeated == comparison
    assert repeated.save(tmp_path / "again")["report"].read_text("utf-8") == page
    path = tmp_path / "results.json"
    unknown = json.dumps({**comparison.to_dict(), "colour": "red"})
    for text in (unknown, '{"schema": 2}', '{"schema": 1, "runs": [{}]}', "[]", "<html>"):
        path.write_text(text)
        with pytest.raises(ValueError, match="is no comparison that this version reads"):
            rc.experiments.load_comparison(path)


RESULTS = Path(__file__).parents[2] / "results"


def test_stored_results_are_read(tmp_path: Path) -> None:
    """The comparison of the demo, and the rows of language models, of older versions."""
    demo = rc.experiments.load_comparison(RESULTS / "demo")
    assert len(demo.runs) == 12 and "On text, " in summarize(demo)
    rows = [*(RESULTS / "language_models").glob("*.json")]
    for path in rows:
        (tmp_path / path.name).write_bytes(path.read_bytes())
    page = rc.experiments.write_rows_table(tmp_path).read_text("utf-8")
    assert sum(line.startswith("| `") for line in page.splitlines()) == len(rows) > 30
