"""Rules as data: their verdicts, texts and digests, and diverged runs in any order of cells."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("transformers")

from recollect.experiments import EXPERIMENTS, NotMeasured, Results, rules
from recollect.experiments.framework import Config, Lines
from recollect.experiments.framework.rules import Rule, Verdict
from recollect.experiments.papers.am import curriculum

ACCURACIES = {"a": 0.9, "b": 0.5, "c": 0.3}


def results(accuracies: dict[str, float] = ACCURACIES) -> Results:
    return Results.from_rows(
        [
            ({"model": model, "pairs": pairs}, seed, {"accuracy": x - pairs / 10, "loss": 1 - x})
            for model, x in accuracies.items()
            for pairs in (1, 2)
            for seed in (0, 1)
        ]
    )


@pytest.mark.parametrize(
    ("rule", "text", "is_true"),
    [
        (
            rules.below("loss", lower=["a"], upper=["b", "c"]),
            "The mean loss of a is below that of each of b and c.",
            True,
        ),
        (rules.below("loss", lower=["a", "c"], upper=["b"]), "each of a and c is below", False),
        (rules.above("accuracy", upper=["a"], lower=["b"], pairs=1), "with pairs 1 of a", True),
        (rules.at_least("accuracy", 0.7, statistic="min", model="a"), "smallest accuracy", True),
        (rules.at_most("accuracy", 0.1), "The mean accuracy is at most 0.1.", False),
        (rules.more_than({"loss": "cross entropy"}, 0.0), "mean cross entropy is above 0.", True),
        (rules.less_than("loss", 0.05, model="a"), "with model a is below 0.05.", False),
        (
            rules.increasing("loss", along="model", order=["a", "b", "c"]),
            "The mean loss rises in the order a, b, c.",
            True,
        ),
        (
            rules.increasing("accuracy", along="pairs"),
            "from each value to the next of pairs",
            False,
        ),
        (rules.decreasing("accuracy", along={"pairs": "load"}, ends=True), "largest of load", True),
        (rules.decreasing("loss", along="pairs", strict=False), "does not rise", True),
        (
            rules.differs("accuracy", {"model": "a"}, {"model": "b"}, by=0.3),
            "with model a is more than 0.3 above that with model b.",
            True,
        ),
        (rules.differs("loss", {"model": "a"}, {"model": "b"}, by=-0.1), "than 0.1 below", False),
        (
            rules.for_each("model", rules.at_least("accuracy", 0.2), skip=["c"], pairs=2),
            "For every value of model except c with pairs 2, the mean accuracy is at least 0.2.",
            True,
        ),
        (rules.for_each("model", rules.at_least("accuracy", 0.2)), "For every value of", False),
        (rules.for_any("model", rules.at_least("accuracy", 0.7)), "For at least one value", True),
        (rules.for_any("model", rules.at_least("accuracy", 0.9)), "For at least one value", False),
        (
            rules.all_of(rules.more_than("loss", 0.0), rules.less_than("loss", 1.0)),
            "The mean loss is above 0, and the mean loss is below 1.",
            True,
        ),
    ],
)
def test_a_rule_states_its_condition(rule: Rule, text: str, is_true: bool) -> None:
    assert text in rule.text
    verdict = rule.judge(results())
    assert verdict.status == ("holds" if is_true else "does not hold")
    assert verdict.evidence.endswith(".")


def test_a_rule_whose_condition_fails_is_not_testable() -> None:
    rule = rules.provided(rules.at_least("accuracy", 0.95), rules.less_than("loss", 9.0))
    assert rule.judge(results()) == rules.not_testable("Mean accuracy is 0.4167.")
    assert rule.text.endswith("provided that the mean accuracy is at least 0.95.")
    with pytest.raises(NotMeasured, match="perplexity was not measured"):
        rules.at_least("perplexity", 0.0).judge(results())


# -- runs that diverged ----------------------------------------------------------------------------


def shuffled(rows: list[Any], **config: Any) -> Iterator[Results]:
    return (Results.from_rows(order, config=config) for order in itertools.permutations(rows))


def test_a_diverged_run_counts_the_same_in_any_order() -> None:
    """Python's maximum of values with NaN depends on their order."""
    (claim,) = [c for c in EXPERIMENTS["am-fig4"].claims if c.name == "Transformers"]
    delta = {"model": "DeltaFormer", "heads": "1 × 12", "kernel": "exp"}
    transformer = {"model": "Transformer", "heads": "4 × 3"}
    rows = [
        (delta, 0, {"accuracy": 0.999}),
        ({**delta, "kernel": "linear"}, 0, {"accuracy": math.nan}),
        ({**transformer, "layers": 1}, 0, {"accuracy": math.nan}),
        ({**transformer, "layers": 2}, 0, {"accuracy": 0.5}),
    ]
    assert {claim.verdict(x).status for x in shuffled(rows)} == {"does not hold"}
    assert {claim.verdict(x).status for x in shuffled(rows[:2] + rows[3:])} == {"holds"}


def test_a_diverged_width_is_decisive_in_any_order() -> None:
    (claim,) = [c for c in EXPERIMENTS["mqar"].claims if c.name == "delta rule above Hebbian"]
    rows = [
        ({"architecture": name, "width": width}, 0, {"accuracy": accuracy})
        for width, pair in {8: (0.5, 0.2), 16: (math.nan, 0.3)}.items()
        for name, accuracy in zip(("delta_net", "linear_attention"), pair, strict=True)
    ]
    assert {claim.verdict(x).status for x in shuffled(rows)} == {"does not hold"}


def test_a_diverged_loss_is_above_all_others() -> None:
    rows = [({"model": "a"}, 0, {"loss": math.nan}), ({"model": "b"}, 0, {"loss": 0.5})]
    for x in shuffled(rows):
        assert rules.below("loss", lower=["b"], upper=["a"]).judge(x).status == "holds"
        assert rules.below("loss", lower=["a"], upper=["b"]).judge(x).status == "does not hold"
        for bound in (rules.at_most("loss", 9.0), rules.at_least("loss", 0.0)):
            assert bound.judge(x).status == "does not hold"
        assert "a diverged" in rules.below("loss", lower=["b"], upper=["a"]).judge(x).evidence


# -- digests ---------------------------------------------------------------------------------------

LIMIT = 0.5


def _is_high(value: float) -> bool:
    return value > LIMIT


def _judge(measured: Results) -> Verdict:
    return rules.verdict(_is_high(measured.mean("accuracy")), "numbers")


def test_a_digest_covers_all_that_a_special_rule_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    """A digest covers helpers and constants of a function."""
    rule = rules.special("Accuracy is high.", _judge)
    initial = rule.digest
    assert initial == rules.special("Accuracy is high.", _judge).digest
    assert initial != rules.special("Accuracy is low.", _judge).digest
    with monkeypatch.context() as patch:
        patch.setitem(globals(), "LIMIT", 0.6)
        assert rule.digest != initial
    with monkeypatch.context() as patch:
        patch.setitem(globals(), "_is_high", lambda value: True)
        assert rule.digest != initial
    assert rule.digest == initial
    experiment = EXPERIMENTS["am-fig6"]
    digest = experiment.rules_digest
    assert digest.startswith("2-")
    monkeypatch.setattr(curriculum, "verdict", lambda condition, evidence: None)
    assert experiment.rules_digest == digest, "functions of the framework are no part of a rule"


def test_a_digest_covers_the_data_of_a_rule() -> None:
    result = [
        rules.at_least("accuracy", 0.5),
        rules.at_least("accuracy", 0.6),
        rules.at_least("accuracy", 0.5, statistic="min"),
        rules.at_least("accuracy", 0.5, model="a"),
        rules.for_each("model", rules.at_least("accuracy", 0.5)),
        rules.for_any("model", rules.at_least("accuracy", 0.5)),
    ]
    assert len({rule.digest for rule in result}) == len(result)


# -- figures ---------------------------------------------------------------------------------------


def test_lines_are_means_with_bands_by_axis_and_panel() -> None:
    figure = Lines(
        y="accuracy",
        x="pairs",
        by={"model": ("b", "a")},
        panels="seeded",
        panel_title="{seeded} {task}",
        baselines={"chance": 0.1, "bigram": "bigram"},
    )
    rows = [
        ({"seeded": place, "model": model, "pairs": pairs}, seed, {"accuracy": pairs + seed})
        for place in ("first", "second")
        for model in ("a", "b")
        for pairs in (2, 1)
        for seed in (0, 1)
    ]
    panels = figure.make_panels(Results.from_rows(rows, config={"task": "recall"}))
    assert [panel.title for panel in panels] == ["first recall", "second recall"]
    assert panels[0].baselines == {"chance": 0.1}, "a bigram was not measured"
    assert [line.name for line in panels[0].series] == ["b", "a"]
    line = panels[0].series[0]
    assert (line.x, line.y, line.low, line.high) == ([1, 2], [1.5, 2.5], [1, 2], [2, 3])
    with pytest.raises(NotMeasured):
        figure.make_panels(Results.from_rows([]))


def test_points_of_a_curve_have_their_places() -> None:
    def steps(config: Config, count: int) -> list[int]:
        return [config["interval"] * (i + 1) for i in range(count)]

    result = Results.from_rows(
        [({"model": "a"}, seed, {"curve": [0.0, float(seed), math.nan]}) for seed in (0, 1)],
        config={"interval": 5},
    )
    (panel,) = Lines(y="curve", x=steps, by="model", name="model {model}").make_panels(result)
    (line,) = panel.series
    assert (line.name, list(line.x)) == ("model a", [5, 10, 15])
    assert (line.y[:2], line.low[:2], line.high[:2]) == ([0.0, 0.5], [0.0, 0.0], [0.0, 1.0])  # type: ignore[index]
    assert math.isnan(line.low[2])  # type: ignore[index]
