"""What a report begins with: sentences that rules make of crafted numbers."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

import recollect as rc
from recollect.experiments.comparison.found import found
from recollect.experiments.comparison.results import DEFAULTS, ModelRun
from recollect.report import describe_environment

ABOUT = describe_environment("cpu")


def a_run(task: str, model: str, value: float | None, **more: Any) -> ModelRun:
    given = {"parameters": 10, "state_bytes": 8, "grows": False} | more
    return ModelRun(task=task, model=model, value=value, **given)


def made(*runs: ModelRun, tasks: tuple[str, ...] = ("text",), **more: Any) -> Any:
    sizes = {task: DEFAULTS[task] for task in tasks}
    return rc.experiments.Comparison(runs=runs, sizes=sizes, seed=0, environment=ABOUT, **more)


def recalled(model: str, few: float, many: float, **more: Any) -> ModelRun:
    return a_run("capacity", model, (few + many) / 2, by_pairs={4: few, 48: many}, **more)


BOTH = ("text", "capacity")


def test_text_and_recall() -> None:
    result = made(
        *(a_run("text", name, value) for name, value in (("a", 2.75), ("b", 2.5), ("c", 3.0))),
        recalled("a", 0.99, 0.5),
        recalled("b", 1.0, 0.25),
        recalled("c", 1.0, 0.75, grows=True),
        tasks=BOTH,
        bigram=2.9,
    )
    assert found(result) == (
        "On text, b is best with 2.500 held-out bits per byte, 0.250 ahead of a, with one seed "
        "each; 1 of 3 models is no better than the 2.900 of a byte bigram. On recall they are "
        "alike up to 4 pairs; what separates them is 48 pairs, of which c, whose state grows, has "
        "75 % right, a, the best of constant size, 50 % and b, the last, 25 %, with one seed each."
    )


def test_text_alone_says_how_far_the_last_is_behind() -> None:
    runs = [a_run("text", name, value) for name, value in (("a", 2.75), ("b", 2.5), ("c", 3.0))]
    for bigram, clause in (
        (2.9, "; 1 of 3 models is no better than the 2.900 of a byte bigram"),
        (2.75, "; 2 of 3 models are no better than the 2.750 of a byte bigram"),
        (3.5, "; all 3 models are better than the 3.500 of a byte bigram"),
        (None, ""),
    ):
        first, second = found(made(*runs, bigram=bigram)).split(". ")
        assert first.endswith(f", with one seed each{clause}")
        assert second == "c is last of 3, 0.500 behind."


def test_the_warning_of_the_bigram_does_not_depend_on_other_tasks() -> None:
    """All models are worse than the bigram, with recall tasks and without."""
    runs = [a_run("text", name, value) for name, value in (("a", 3.75), ("b", 3.5))]
    recalls = [recalled("a", 0.9, 0.5), recalled("b", 1.0, 0.25)]
    stopped = [a_run("mqar", name, 0.1, finished=False) for name in "ab"]
    warning = "; 2 of 2 models are no better than the 3.400 of a byte bigram."
    for other, tasks in (([], ("text",)), (recalls, BOTH), (stopped, ("text", "mqar"))):
        assert warning in found(made(*runs, *other, tasks=tasks, bigram=3.4))
    one = made(runs[1], recalls[1], tasks=BOTH, bigram=3.4)
    assert found(one).startswith(
        "On text, b reaches 3.500 held-out bits per byte, 0.100 above the 3.400 of a byte bigram. "
    )


def test_recall_alone() -> None:
    runs = [recalled("a", 1.0, 0.5), recalled("b", 0.75, 0.5), recalled("c", 0.5, 0.25)]
    assert found(made(*runs, tasks=("capacity",))) == (
        "On recall (capacity), a is best with 75 % of all pairs right, 12.5 points ahead of b, "
        "with one seed each and c last with 38 %. On recall what separates them is 4 pairs, of "
        "which a has 100 % right and c, the last, 50 %."
    )


def test_one_model() -> None:
    assert found(made(a_run("text", "a", 2.5), bigram=3.0)) == (
        "On text, a reaches 2.500 held-out bits per byte, 0.500 below the 3.000 of a byte bigram."
    )
    assert "0.500 above" in found(made(a_run("text", "a", 3.5), bigram=3.0))
    assert found(made(a_run("text", "a", 2.5))).endswith("no other model to compare it with.")
    assert found(made(recalled("a", 1.0, 0.5), tasks=("capacity",))) == (
        "On recall (capacity), a reaches 75 % of all pairs right. "
        "On recall, a has 100 % of 4 and 50 % of 48 pairs right, where guessing has 2 %."
    )


def test_what_did_not_end_is_named_and_has_no_place() -> None:
    stopped = a_run("text", "b", 1.0, finished=False)
    result = made(
        a_run("text", "a", 2.5),
        stopped,
        a_run("text", "d", math.nan),
        failures=(("text", "c", "it diverged"),),
    )
    assert found(result).startswith(
        "On text, a reaches 2.500 held-out bits per byte (b, d and c did not finish on text)."
    )
    nobody = made(stopped, failures=(("text", "c", "it diverged"),), interrupted=True)
    assert found(nobody) == "No model was trained to its end (b and c did not finish on text)."
    half = made(
        a_run("text", "a", 2.5),
        a_run("text", "b", 2.6),
        tasks=BOTH,
        failures=(("capacity", "a", "it diverged"),),
    )
    assert found(half).endswith("0.100 behind (a did not finish on capacity).")
    lost = made(
        recalled("a", 1.0, 0.5),
        tasks=BOTH,
        failures=(("text", "a", "it diverged"), ("text", "b", "it diverged")),
    )
    assert found(lost).endswith("(a and b did not finish on text).")


def test_a_model_some_of_whose_seeds_did_not_end_has_no_place() -> None:
    runs = [a_run("text", "a", 2.5, seed=seed) for seed in (0, 1)]
    for second in (a_run("text", "b", 1.0, seed=1, finished=False), None):
        some = [*runs, a_run("text", "b", 1.0), *([second] if second else [])]
        failures = () if second else (("text", "b, seed 1", "it diverged"),)
        said = found(made(*some, seeds=2, failures=failures))
        assert said.startswith("On text, a reaches 2.500") and "(b did not finish on text)" in said


def test_levels_are_not_ranked() -> None:
    level = [a_run("text", name, value) for name, value in (("a", 1.9996), ("b", 2.0004))]
    assert found(made(*level)).endswith(
        "a and b lead alike with 2.000 held-out bits per byte. "
        "No model is distinguished from another."
    )
    behind = [a_run("text", name, value) for name, value in (("a", 2.5), ("b", 2.7), ("c", 2.7))]
    assert found(made(*behind)).endswith("b and c are last of 3, 0.200 behind.")


def test_alike_is_said_of_what_is_alike_from_the_fewest_pairs_on() -> None:
    each = {"a": {4: 1.0, 8: 0.5, 16: 1.0, 32: 0.9}, "b": {4: 0.6, 8: 0.5, 16: 0.5, 32: 0.2}}
    runs = [a_run("capacity", name, 0.5, by_pairs=pairs) for name, pairs in each.items()]
    said = found(made(*runs, tasks=("capacity",)))
    assert "alike" not in said.partition(". On ")[2] and "what separates them is 32 pairs" in said


def test_of_several_recalls_the_one_told_is_named() -> None:
    runs = [a_run("mqar", name, x, by_pairs={4: x}) for name, x in (("a", 0.5), ("b", 0.9))]
    runs += [recalled("a", 1.0, 1.0), recalled("b", 0.2, 0.996)]
    said = found(made(a_run("text", "a", 2.0), *runs, tasks=("text", "mqar", "capacity")))
    assert "On recall (capacity) what separates them is 4 pairs" in said


def test_ties_and_memories_that_are_not_told_apart() -> None:
    result = made(
        *(a_run("text", name, 2.5) for name in "ab"),
        *(recalled(name, 0.02, 0.03) for name in "ab"),
        tasks=BOTH,
    )
    assert found(result) == (
        "On text, a and b lead alike with 2.500 held-out bits per byte. Recall does not separate "
        "the 2 memories: at every number of pairs they lie within 5 points of each other, at 4 "
        "between 2 % and 2 % as guessing does."
    )


@pytest.mark.parametrize(("other", "doubt"), [(2.56, True), (2.9, False)])
def test_a_margin_within_the_seeds_is_said_to_be(other: float, doubt: bool) -> None:
    runs = [a_run("text", "a", 2.5 + 0.1 * seed, seed=seed) for seed in (0, 1)]
    runs += [a_run("text", "b", other + 0.1 * seed, seed=seed) for seed in (0, 1)]
    said = found(made(*runs, seeds=2))
    assert ("which is no more than the 2 seeds differ" in said) is doubt
    assert "a is best with 2.550 (2.500–2.600)" in said


def test_a_saved_comparison_is_read_again_and_only_if_it_is_one(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    curve = ((10, 3.0), (20, 2.5))
    one = made(
        a_run("text", "a", 2.5, curve=curve),
        recalled("a", 1.0, 0.5),
        tasks=BOTH,
        bigram=3.0,
        text={"source": "mine", "sha256": "0" * 64},
        failures=(("text", "b", "it <diverged>"),),
        measured={"text": (5, 10)},
    )
    page = one.save(tmp_path)["report"].read_text("utf-8")
    assert page.count('<p class="summary">') == 1 and "On text, a reaches 2.500" in page
    again = rc.experiments.load_comparison(tmp_path)
    assert again == one
    assert again.save(tmp_path / "again")["report"].read_text("utf-8") == page
    path = tmp_path / "results.json"
    for text in ('{"schema": 2}', '{"schema": 1, "runs": [{}]}', "[]", "<html>"):
        path.write_text(text)
        with pytest.raises(ValueError, match="is no comparison that this version reads"):
            rc.experiments.load_comparison(path)
