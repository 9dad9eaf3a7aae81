"""Rules of claims, as data: each gives its verdict, its text, its evidence and its digest.

::

    below("bits per byte", lower=("yaad", "moneta"), upper=("gla", "mamba2"))
    for_each("pairs", at_least("accuracy", 0.98, model="delta_net"))
    all_of(at_most("error", 0.5, statistic="max"), increasing("accuracy", along="width"))

A measure is a name, or a dictionary from the name to the words for it in sentences. Keyword
arguments that a rule does not name select cells of the grid. No rule holds for a run that diverged
(NaN), but if lower is better, as in `below`, the diverged run counts as above all others.

Examples:
    >>> from recollect.experiments import Results, rules
    >>> rule = rules.below("loss", lower=["atlas"], upper=["gla", "mamba2"])
    >>> rule.text
    'The mean loss of atlas is below that of each of gla and mamba2.'
    >>> losses = {"atlas": 2.1, "gla": 2.3, "mamba2": 2.2}
    >>> rows = [({"model": name}, 0, {"loss": loss}) for name, loss in losses.items()]
    >>> rule.judge(Results.from_rows(rows))
    Verdict(status='holds', evidence='Mean loss: atlas 2.1, mamba2 2.2, gla 2.3.')
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal

from recollect.experiments.framework.records import Cell, Results
from recollect.experiments.framework.verdicts import (
    Rule,
    Verdict,
    not_testable,
    special,
    verdict,
)

__all__ = [
    "Rule",
    "Verdict",
    "above",
    "all_of",
    "at_least",
    "at_most",
    "below",
    "decreasing",
    "differs",
    "for_any",
    "for_each",
    "increasing",
    "less_than",
    "more_than",
    "not_testable",
    "provided",
    "special",
    "verdict",
]

Measure = str | Mapping[str, str]
Statistic = Literal["mean", "min", "max"]
_ADJECTIVES = {"mean": "mean", "min": "smallest", "max": "largest"}


# -- bounds and comparisons ------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Bound(Rule):
    measure: str
    label: str
    relation: str
    bound: float
    statistic: Statistic
    cell: Cell

    def judge(self, results: Results) -> Verdict:
        value = getattr(results, self.statistic)(self.measure, **self.cell)
        is_true = {
            "at least": value >= self.bound,
            "at most": value <= self.bound,
            "above": value > self.bound,
            "below": value < self.bound,
        }[self.relation]
        name = _describe(self.statistic, self.label, self.cell)
        return verdict(is_true, f"{_sentence(name)} is {_format(value)}.")

    def clause(self) -> str:
        name = _describe(self.statistic, self.label, self.cell)
        return f"the {name} is {self.relation} {self.bound:g}"


def _bound(relation: str) -> Callable[..., Rule]:
    def make(measure: Measure, bound: float, *, statistic: Statistic = "mean", **cell: Any) -> Rule:
        ((name, label),) = _labels(measure)
        return _Bound(
            measure=name,
            label=label,
            relation=relation,
            bound=bound,
            statistic=statistic,
            cell=cell,
        )

    make.__doc__ = f"""Require a statistic {relation} a bound.

    Args:
        measure: a name.
        bound: a number.
        statistic: ``"mean"``, ``"min"`` or ``"max"`` over seeds and all open axes.
        cell: selects cells.
    """
    return make


at_least = _bound("at least")
at_most = _bound("at most")
more_than = _bound("above")
less_than = _bound("below")


@dataclass(frozen=True, kw_only=True)
class _Groups(Rule):
    measure: str
    label: str
    better: tuple[Any, ...]
    worse: tuple[Any, ...]
    by: str
    lower_is_better: bool
    cell: Cell

    def judge(self, results: Results) -> Verdict:
        better, worse = (
            {name: self._value(results, name) for name in names}
            for names in (self.better, self.worse)
        )
        sign = 1 if self.lower_is_better else -1
        is_true = all(sign * x < sign * y for x in better.values() for y in worse.values())
        order = sorted((better | worse).items(), key=lambda item: sign * item[1])
        numbers = ", ".join(f"{name} {_format(value)}" for name, value in order)
        return verdict(
            is_true, f"{_sentence(_describe('mean', self.label, self.cell))}: {numbers}."
        )

    def _value(self, results: Results, name: Any) -> float:
        value = results.mean(self.measure, **{self.by: name}, **self.cell)
        return _worst(value, lower_is_better=self.lower_is_better)

    def clause(self) -> str:
        name = _describe("mean", self.label, self.cell)
        relation = "below" if self.lower_is_better else "above"
        better, worse = (
            f"{'each of ' if len(names) > 1 else ''}{join_words(names)}"
            for names in (self.better, self.worse)
        )
        return f"the {name} of {better} is {relation} that of {worse}"


def _groups(
    measure: Measure,
    better: Sequence[Any],
    worse: Sequence[Any],
    by: str,
    cell: Cell,
    *,
    lower_is_better: bool,
) -> Rule:
    rules = [
        _Groups(
            measure=name,
            label=label,
            better=tuple(better),
            worse=tuple(worse),
            by=by,
            lower_is_better=lower_is_better,
            cell=cell,
        )
        for name, label in _labels(measure)
    ]
    return rules[0] if len(rules) == 1 else all_of(*rules)


def below(
    measure: Measure, *, lower: Sequence[Any], upper: Sequence[Any], by: str = "model", **cell: Any
) -> Rule:
    """Require the largest mean of ``lower`` below the smallest of ``upper``.

    Args:
        measure: a name, or names that must all satisfy the rule.
        lower, upper: values on the axis ``by``.
        by: an axis of the grid.
        **cell: selects cells.
    """
    return _groups(measure, lower, upper, by, cell, lower_is_better=True)


def above(
    measure: Measure, *, upper: Sequence[Any], lower: Sequence[Any], by: str = "model", **cell: Any
) -> Rule:
    """Require the smallest mean of ``upper`` above the largest of ``lower``.

    Args:
        measure, upper, lower, by, cell: as in `below`.
    """
    return _groups(measure, upper, lower, by, cell, lower_is_better=False)


@dataclass(frozen=True, kw_only=True)
class _Difference(Rule):
    measure: str
    label: str
    a: Cell
    b: Cell
    by: float
    cell: Cell

    def judge(self, results: Results) -> Verdict:
        a, b = (results.mean(self.measure, **one, **self.cell) for one in (self.a, self.b))
        numbers = f"{_format(a)} with {_axes(self.a)}, {_format(b)} with {_axes(self.b)}"
        name = _sentence(_describe("mean", self.label, self.cell))
        return verdict(a > b + self.by, f"{name}: {numbers}.")

    def clause(self) -> str:
        name = _describe("mean", self.label, {**self.cell, **self.a})
        if self.by < 0:
            return f"the {name} is less than {-self.by:g} below that with {_axes(self.b)}"
        margin = f"more than {self.by:g} " if self.by else ""
        return f"the {name} is {margin}above that with {_axes(self.b)}"


def differs(measure: Measure, a: Cell, b: Cell, *, by: float = 0.0, **cell: Any) -> Rule:
    """Require the mean in cells ``a`` more than ``by`` above that in cells ``b``.

    Args:
        measure: a name.
        a, b: cells.
        by: a margin; below 0, the mean in ``a`` may be lower by so much.
        cell: selects cells for both.
    """
    ((name, label),) = _labels(measure)
    return _Difference(measure=name, label=label, a=a, b=b, by=by, cell=cell)


@dataclass(frozen=True, kw_only=True)
class _Order(Rule):
    measure: str
    label: str
    along: str
    along_label: str
    order: tuple[Any, ...]
    rising: bool
    strict: bool
    ends: bool
    lower_is_better: bool | None
    cell: Cell

    def judge(self, results: Results) -> Verdict:
        places = self.order or sorted(results.axis_values(self.along, **self.cell))
        places = [places[0], places[-1]] if self.ends else places
        values = [results.mean(self.measure, **{self.along: x}, **self.cell) for x in places]
        sign = 1 if self.rising else -1
        lower = self.rising if self.lower_is_better is None else self.lower_is_better
        signed = [sign * _worst(x, lower_is_better=lower) for x in values]
        is_true = all(a < b if self.strict else a <= b for a, b in pairwise(signed))
        name = _sentence(_describe("mean", self.label, self.cell))
        numbers = ", ".join(f"{_format(x)} ({at})" for x, at in zip(values, places, strict=True))
        return verdict(is_true and len(values) > 1, f"{name} by {self.along_label}: {numbers}.")

    def clause(self) -> str:
        name = _describe("mean", self.label, self.cell)
        verb = ("rises" if self.rising else "falls") if self.strict else (
            "does not fall" if self.rising else "does not rise"
        )  # fmt: skip
        if self.order:
            return f"the {name} {verb} in the order {', '.join(map(str, self.order))}"
        ends = "the smallest to the largest" if self.ends else "each value to the next"
        return f"the {name} {verb} from {ends} of {self.along_label}"


def increasing(
    measure: Measure,
    *,
    along: Measure,
    order: Sequence[Any] = (),
    strict: bool = True,
    ends: bool = False,
    lower_is_better: bool | None = None,
    **cell: Any,
) -> _Order:
    """Require means that rise along an axis.

    Args:
        measure: a name.
        along: an axis of the grid, or a dictionary from it to the words for it.
        order: values on the axis; its sorted values if omitted.
        strict: whether equal neighbours break the rule.
        ends: whether to compare only the first value on the axis with the last.
        lower_is_better: whether a run that diverged counts as the largest value. By default, only
            if the means should rise.
        **cell: selects cells.
    """
    ((name, label),), ((axis, axis_label),) = _labels(measure), _labels(along)
    return _Order(
        measure=name,
        label=label,
        along=axis,
        along_label=axis_label,
        order=tuple(order),
        rising=True,
        strict=strict,
        ends=ends,
        lower_is_better=lower_is_better,
        cell=cell,
    )


def decreasing(measure: Measure, *, along: Measure, **options: Any) -> Rule:
    """Require means that fall along an axis.

    Args:
        measure, along, options: as in `increasing`.
    """
    return replace(increasing(measure, along=along, **options), rising=False)


# -- combinations ----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _All(Rule):
    rules: tuple[Rule, ...]

    def judge(self, results: Results) -> Verdict:
        return _combine(rule.judge(results) for rule in self.rules)

    def clause(self) -> str:
        return ", and ".join(rule.clause() for rule in self.rules)


def all_of(*rules: Rule) -> Rule:
    """Require every rule."""
    return _All(rules=rules)


@dataclass(frozen=True, kw_only=True)
class _ForEach(Rule):
    axis: str
    rule: Rule
    values: tuple[Any, ...]
    skip: tuple[Any, ...]
    one_is_enough: bool
    cell: Cell

    def judge(self, results: Results) -> Verdict:
        chosen = self.values or results.axis_values(self.axis, **self.cell)
        verdicts = {
            value: self.rule.judge(results.select(**{self.axis: value}, **self.cell))
            for value in chosen
            if value not in self.skip
        }
        return _combine(
            (
                Verdict(status=v.status, evidence=f"{self.axis} {value}: {_clause(v.evidence)}")
                for value, v in verdicts.items()
            ),
            one_is_enough=self.one_is_enough,
        )

    def clause(self) -> str:
        name = f"value of {self.axis}"
        if self.values:
            name += f" among {join_words(self.values)}"
        if self.skip:
            name += f" except {join_words(self.skip)}"
        name += _with_axes(self.cell)
        quantifier = "at least one" if self.one_is_enough else "every"
        return f"for {quantifier} {name}, {self.rule.clause()}"


def for_each(
    axis: str, rule: Rule, /, *, values: Sequence[Any] = (), skip: Sequence[Any] = (), **cell: Any
) -> _ForEach:
    """Require a rule at every value of an axis.

    Args:
        axis: an axis of the grid.
        rule: judges the results with that value.
        values: on the axis; all measured ones if omitted.
        skip: values that the rule is not applied to.
        **cell: selects cells.
    """
    return _ForEach(
        axis=axis, rule=rule, values=tuple(values), skip=tuple(skip), one_is_enough=False, cell=cell
    )


def for_any(axis: str, rule: Rule, /, **options: Any) -> Rule:
    """Require a rule at one value of an axis or more.

    Args:
        axis, rule, options: as in `for_each`.
    """
    return replace(for_each(axis, rule, **options), one_is_enough=True)


def _combine(verdicts: Iterable[Verdict], *, one_is_enough: bool = False) -> Verdict:
    """Return one verdict. Without any, the claim does not hold."""
    verdicts = list(verdicts)
    clauses = [_clause(one.evidence) for one in verdicts]
    evidence = f"{_sentence('; '.join(clauses) or 'nothing was measured')}."
    statuses = {one.status for one in verdicts}
    decisive, other = ("holds", "does not hold")[:: 1 if one_is_enough else -1]
    if decisive in statuses:
        return verdict(one_is_enough, evidence)
    if not statuses:
        return verdict(False, evidence)
    return verdict(not one_is_enough, evidence) if statuses == {other} else not_testable(evidence)


@dataclass(frozen=True, kw_only=True)
class _Provided(Rule):
    condition: Rule
    rule: Rule

    def judge(self, results: Results) -> Verdict:
        condition = self.condition.judge(results)
        if condition.status != "holds":
            return not_testable(condition.evidence)
        return self.rule.judge(results)

    def clause(self) -> str:
        return f"{self.rule.clause()}, provided that {self.condition.clause()}"


def provided(condition: Rule, rule: Rule) -> Rule:
    """Apply a rule if a condition holds. Otherwise the claim is not testable.

    Args:
        condition, rule: both are applied to the same results.
    """
    return _Provided(condition=condition, rule=rule)


# -- words -----------------------------------------------------------------------------------------


def _worst(value: float, *, lower_is_better: bool) -> float:
    """Return a number to compare. NaN compares as false with every number."""
    return math.inf if lower_is_better and math.isnan(value) else value


def _format(value: float) -> str:
    return f"{value:.4g}" if math.isfinite(value) else "diverged"


def _axes(cell: Cell) -> str:
    return join_words([f"{name} {value}" for name, value in cell.items()])


def _with_axes(cell: Cell) -> str:
    return f" with {_axes(cell)}" if cell else ""


def _describe(statistic: str, measure: str, cell: Cell) -> str:
    return f"{_ADJECTIVES[statistic]} {measure}{_with_axes(cell)}"


def _sentence(text: str) -> str:
    """Return a clause as a sentence. A symbol of one letter at its start stays as it is."""
    return text[0].upper() + text[1:] if text[1:2].isalpha() else text


def _clause(sentence: str) -> str:
    """Return a sentence as a part of another one."""
    is_word = sentence[1:2].islower()
    return (sentence[0].lower() if is_word else sentence[0]) + sentence[1:].removesuffix(".")


def _labels(measure: Measure) -> list[tuple[str, str]]:
    return [(measure, measure)] if isinstance(measure, str) else list(measure.items())


def join_words(words: Iterable[Any]) -> str:
    """Return words as a list in a sentence: ``a, b and c``."""
    *first, last = map(str, words)
    return f"{', '.join(first)} and {last}" if first else last
