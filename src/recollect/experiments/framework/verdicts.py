"""Verdicts, the base of rules, and rules that a function computes."""

from __future__ import annotations

import ast
import hashlib
import inspect
import json
import textwrap
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import partial
from types import FunctionType
from typing import Any, Literal

from recollect.experiments.framework.records import Results

__all__ = ["Rule", "Verdict", "not_testable", "special", "verdict"]

Status = Literal["holds", "does not hold", "not testable at this scale"]


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The outcome of a rule.

    Attributes:
        status: whether the claim holds.
        evidence: a sentence with the numbers behind the status.

    Examples:
        >>> verdict = rc.experiments.Verdict(status="holds", evidence="0.91 against 0.42")
        >>> verdict.status
        'holds'
    """

    status: Status
    evidence: str


def verdict(condition: bool, evidence: str) -> Verdict:
    """Return a verdict.

    Args:
        condition: whether the claim holds.
        evidence: a sentence with the numbers behind it.
    """
    return Verdict(status="holds" if condition else "does not hold", evidence=evidence)


def not_testable(evidence: str) -> Verdict:
    """Return the verdict for results that cannot decide the claim."""
    return Verdict(status="not testable at this scale", evidence=evidence)


@dataclass(frozen=True, kw_only=True)
class Rule(ABC):
    """A condition on results."""

    @abstractmethod
    def judge(self, results: Results) -> Verdict:
        """Return the verdict on results, or raise `NotMeasured`."""

    @property
    def text(self) -> str:
        """The condition as a sentence."""
        sentence = self.clause()
        return f"{sentence[0].upper()}{sentence[1:]}."

    @abstractmethod
    def clause(self) -> str:
        """Return the condition as a clause of a sentence."""

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-ready data that determines the verdicts."""
        data = {f.name: _to_json(getattr(self, f.name)) for f in fields(self)}
        return {"rule": type(self).__name__, **data}

    @property
    def digest(self) -> str:
        """A hash of the rule's data."""
        text = json.dumps(self.to_dict(), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def _to_json(value: Any) -> Any:
    if isinstance(value, Rule):
        return value.to_dict()
    if isinstance(value, Mapping):
        return {str(key): _to_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_to_json(item) for item in value]
    return value if isinstance(value, str | int | float | bool | None) else repr(value)


@dataclass(frozen=True, kw_only=True)
class _Special(Rule):
    sentence: str
    function: Callable[[Results], Verdict]

    def judge(self, results: Results) -> Verdict:
        return self.function(results)

    @property
    def text(self) -> str:
        return self.sentence

    def clause(self) -> str:
        return self.sentence.rstrip(".")

    def to_dict(self) -> dict[str, Any]:
        sources: dict[str, str] = {}
        _add_sources(self.function, sources)
        return {"rule": "Special", "text": self.sentence, "sources": sources}


def special(text: str, function: Callable[[Results], Verdict]) -> Rule:
    """Return a rule that a function computes.

    Args:
        text: the condition as a sentence.
        function: returns the verdict on results. The digest covers its source, and the functions
            and constants of its module that it uses.
    """
    return _Special(sentence=text, function=function)


def _add_sources(value: Any, sources: dict[str, str], name: str = "") -> None:
    """Add the source of a function and, by name, of all it uses from its module."""
    if isinstance(value, partial):
        sources[f"{name} arguments"] = repr((value.args, sorted(value.keywords.items())))
        value = value.func
    if not isinstance(value, FunctionType):
        sources[name] = repr(value)
        return
    name = f"{name}:{value.__qualname__}"
    if name in sources:
        return
    sources[name] = _normalized_source(value)
    variables = inspect.getclosurevars(value)
    for used, item in sorted({**variables.globals, **variables.nonlocals}.items()):
        if isinstance(item, FunctionType):
            if item.__module__ == value.__module__:
                _add_sources(item, sources, used)
        elif isinstance(item, str | int | float | list | tuple | Mapping):
            sources[used] = repr(item)


def _normalized_source(function: FunctionType) -> str:
    """Return the source without its formatting and comments, if it can be parsed alone."""
    source = textwrap.dedent(inspect.getsource(function))
    try:
        return ast.unparse(ast.parse(source))
    except SyntaxError:  # a lambda within an expression
        return source
