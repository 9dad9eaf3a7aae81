"""What a comparison found, in two sentences that rules make of its numbers.

The first names the best model on the first task and its margin, and on text how many models are no
better than a byte bigram. The second names what separates the memories on recall; without recall,
how far the others are behind. Models that did not come to their end are named.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import takewhile

from recollect.experiments.comparison.results import Outcomes, Summary
from recollect.experiments.comparison.tasks import RECALLS

__all__ = ["ALIKE", "found"]

ALIKE = 0.05
"""Accuracies that differ by less are not told apart."""

Pairs = dict[int, tuple[float, float, float]]


def found(comparison: Outcomes) -> str:
    """Return two sentences, or one if there is nothing to compare.

    Args:
        comparison: complete or interrupted.

    Examples:
        >>> from recollect.experiments.comparison.found import found
        >>> from recollect.experiments.comparison.results import Outcomes
        >>> from recollect.report import describe_environment
        >>> found(Outcomes(runs=(), sizes={}, seed=0, environment=describe_environment("cpu")))
        'No model was trained to its end.'
    """
    tasks = [task for task in ("text", *RECALLS) if _ended(comparison, task)]
    if not tasks:
        return f"No model was trained to its end{_lost(comparison, 'text', *RECALLS)}."
    recalls = [task for task in tasks if task in RECALLS]
    apart = max(recalls, key=lambda task: _widest(comparison, task)[1], default=None)
    if tasks[0] == "text":
        first = f"{_best(comparison, 'text', with_last=False)[:-1]}{_beside_bigram(comparison)}."
        second = _behind(comparison) if apart is None else _separates(comparison, apart)
    else:
        assert apart is not None
        first = _best(comparison, apart, with_last=True)
        second = _separates(comparison, apart)
    told = {tasks[0], apart}
    others = [task for task in comparison.sizes if task not in told]
    sentences = f"{first} {second}".strip()
    return f"{sentences[:-1]}{_lost(comparison, *others)}."


def _ended(comparison: Outcomes, task: str) -> list[Summary]:
    """Models all of whose runs came to their end with a number, the best first."""
    some = [
        one
        for one in comparison.summaries(task)
        if len(one.values) == comparison.seeds and all(run.finished for run in one.runs)
    ]
    some = [one for one in some if math.isfinite(_value(one))]
    return sorted(some, key=_value, reverse=task in RECALLS)


def _value(one: Summary) -> float:
    return math.nan if one.value is None else one.value


def _lost(comparison: Outcomes, *tasks: str) -> str:
    """A clause of the models that have no number on these tasks, or nothing."""
    lost: dict[str, list[str]] = {}
    for task in tasks:
        ended = {one.model for one in _ended(comparison, task)}
        names = [one.model for one in comparison.summaries(task) if one.model not in ended]
        failed = [model for where, model, _ in comparison.failures if where == task]
        names += [model.partition(", seed ")[0] for model in failed]
        if names := [name for name in dict.fromkeys(names) if name not in ended]:
            lost[task] = names
    said = [f"{_listed(names)} did not finish on {task}" for task, names in lost.items()]
    return f" ({'; '.join(said)})" if said else ""


def _listed(names: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def _best(comparison: Outcomes, task: str, *, with_last: bool) -> str:
    """The best model of a task, and its margin over the next."""
    models = _ended(comparison, task)
    top = models[0]
    what = "held-out bits per byte" if task == "text" else "of all pairs right"
    value = f"{top.told()} {what}" if task == "text" else f"{_share(_value(top))} {what}"
    where = "text" if task == "text" else f"recall ({task})"
    lost = _lost(comparison, task)
    if len(models) == 1:
        return f"On {where}, {top.model} reaches {value}{lost}."
    level = [one for one in models if f"{_value(one):.3f}" == f"{_value(top):.3f}"]
    if len(level) > 1:
        return f"On {where}, {_listed([one.model for one in level])} lead alike with {value}{lost}."
    after = models[1]
    margin = abs(_value(after) - _value(top))
    ahead = f"{margin:.3f}" if task == "text" else f"{100 * margin:.1f} points"
    last = f" and {models[-1].model} last with {_share(_value(models[-1]))}"
    last = last if with_last and len(models) > 2 else ""
    return (
        f"On {where}, {top.model} is best with {value}, {ahead} ahead of {after.model}"
        f"{_doubt(comparison, top, after, margin)}{last}{lost}."
    )


def _doubt(comparison: Outcomes, top: Summary, after: Summary, margin: float) -> str:
    """Whether a margin is one of the seeds."""
    spread = max((max(one.values) - min(one.values) for one in (top, after)), default=0.0)
    if comparison.seeds == 1:
        return ", with one seed each"
    if margin > spread:
        return ""
    return f", which is no more than the {comparison.seeds} seeds differ"


def _beside_bigram(comparison: Outcomes) -> str:
    """Return a clause that compares the models on text with the byte bigram, or nothing."""
    models, bigram = _ended(comparison, "text"), comparison.bigram
    if bigram is None:
        return ""
    baseline = f"the {bigram:.3f} of a byte bigram"
    if len(models) == 1:
        margin = _value(models[0]) - bigram
        return f", {abs(margin):.3f} {'above' if margin >= 0 else 'below'} {baseline}"
    worse = sum(_value(one) >= bigram for one in models)
    if not worse:
        return f"; all {len(models)} models are better than {baseline}"
    verb = "is" if worse == 1 else "are"
    return f"; {worse} of {len(models)} models {verb} no better than {baseline}"


def _behind(comparison: Outcomes) -> str:
    """Return how far the last model is behind the best on text."""
    models = _ended(comparison, "text")
    if len(models) == 1:
        return (
            "" if comparison.bigram is not None else "There is no other model to compare it with."
        )
    last, top = f"{_value(models[-1]):.3f}", f"{_value(models[0]):.3f}"
    names = [one.model for one in models if f"{_value(one):.3f}" == last]
    verb = "is" if len(names) == 1 else "are"
    away = _value(models[-1]) - _value(models[0])
    if last == top:
        return "No model is distinguished from another."
    return f"{_listed(names)} {verb} last of {len(models)}, {away:.3f} behind."


def _by_pairs(comparison: Outcomes, task: str) -> dict[str, Pairs]:
    return {one.model: one.by_pairs for one in _ended(comparison, task) if one.by_pairs}


def _widest(comparison: Outcomes, task: str) -> tuple[int, float]:
    """The number of pairs at which the models differ most, and by how much."""
    models = _by_pairs(comparison, task)
    counts = set.intersection(*(set(pairs) for pairs in models.values())) if models else set[int]()
    apart = {n: _apart([pairs[n][0] for pairs in models.values()]) for n in sorted(counts)}
    return max(apart.items(), key=lambda item: item[1], default=(0, -1.0))


def _apart(values: Sequence[float]) -> float:
    return max(values) - min(values)


def _separates(comparison: Outcomes, task: str) -> str:
    """What separates the memories on recall."""
    models, lost = _by_pairs(comparison, task), _lost(comparison, task)
    count, apart = _widest(comparison, task)
    several = sum(bool(_ended(comparison, one)) for one in RECALLS) > 1
    recall = f"recall ({task})" if several else "recall"
    if not count:
        return f"On {recall} nothing was measured by the number of pairs{lost}."
    at = {name: pairs[count][0] for name, pairs in models.items()}
    order = sorted(at, key=lambda name: at[name], reverse=True)
    top, last = order[0], order[-1]
    chance = RECALLS[task].chance
    if len(order) == 1:
        ends = sorted({min(models[top]), max(models[top])})
        each = " and ".join(f"{_share(models[top][n][0])} of {n}" for n in ends)
        return (
            f"On {recall}, {top} has {each} pairs right, where guessing has {_share(chance)}{lost}."
        )
    if apart < ALIKE:
        near = " as guessing does" if at[top] < chance + ALIKE else ""
        return (
            f"{recall.capitalize()} does not separate the {len(order)} memories: at every number "
            f"of pairs they lie within {100 * ALIKE:.0f} points of each other, at {count} between "
            f"{_share(at[last])} and {_share(at[top])}{near}{lost}."
        )
    shared = set.intersection(*(set(pairs) for pairs in models.values()))
    alike = [
        *takewhile(
            lambda n: n < count and _apart([pairs[n][0] for pairs in models.values()]) < ALIKE,
            sorted(shared),
        )
    ]
    upto = f"they are alike up to {alike[-1]} pairs; " if alike else ""
    grows = {one.model: one.runs[0].grows for one in comparison.summaries(task)}
    said = [f"{_named(top, grows)} has {_share(at[top])} right"]
    # What the state costs is the other half of the answer: the best of the other kind.
    other = next((name for name in order if grows[name] != grows[top]), None)
    if other not in (None, last):
        kind = "those that grow" if grows[other] else "constant size"
        said.append(f"{other}, the best of {kind}, {_share(at[other])}")
    said.append(f"{last}, the last, {_share(at[last])}")
    ended = ", ".join(said[:-1]) + f" and {said[-1]}"
    doubt = ", with one seed each" if "text" in comparison.sizes else ""  # or said already
    if comparison.seeds > 1:
        widest = max(pairs[count][2] - pairs[count][1] for pairs in models.values())
        doubt = f", where seeds differ by up to {100 * widest:.0f} points" if widest > ALIKE else ""
    return f"On {recall} {upto}what separates them is {count} pairs, of which {ended}{doubt}{lost}."


def _named(name: str, grows: dict[str, bool]) -> str:
    """A model, with its kind of state where the models have both kinds."""
    if len(set(grows.values())) < 2:
        return name
    return f"{name}, whose state {'grows' if grows[name] else 'has constant size'},"


def _share(value: float) -> str:
    whole = f"{100 * value:.0f}"
    few = whole in ("0", "100") and f"{100 * value:.1f}" not in ("0.0", "100.0")
    return f"{100 * value:.1f} %" if few else f"{whole} %"
