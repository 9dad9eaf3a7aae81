"""What a field of a dataclass may hold: numbers in a range, words, flags and names.

Each maker of fields (`integer`, `number`, `option`, `flag`, `text`, `checked`) gives a field whose
metadata says what it may hold. Members of a recipe and whatever extends `Validated` check it when
they are made.
"""

# More than 400 lines: the kinds of fields, one after the other, and what they share.

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from recollect.wording import shown, word_for

__all__ = [
    "DOMAIN",
    "REAL",
    "RULE",
    "Domain",
    "Range",
    "Validated",
    "checked",
    "domain",
    "fits_float32",
    "flag",
    "held",
    "integer",
    "number",
    "option",
    "real",
    "text",
    "whole",
    "word",
]

Checked = TypeVar("Checked")


RULE = "recollect"
"""Metadata key of what a field may hold: a check, or what `recollect.choices.fields` declares."""


@dataclass(frozen=True, kw_only=True)
class Range:
    """An interval of the real line; ``None`` is no bound, ``*_open`` excludes the end."""

    low: float | None = None
    high: float | None = None
    low_open: bool = False
    high_open: bool = False

    @classmethod
    def of(
        cls,
        *,
        above: float | None = None,
        at_least: float | None = None,
        below: float | None = None,
        at_most: float | None = None,
    ) -> Range:
        """The interval between bounds that are excluded or belong to it.

        Args:
            above: an exclusive lower bound.
            at_least: an inclusive lower bound.
            below: an exclusive upper bound.
            at_most: an inclusive upper bound.
        """
        return cls(
            low=above if above is not None else at_least,
            high=below if below is not None else at_most,
            low_open=above is not None,
            high_open=below is not None,
        )

    def contains(self, value: float) -> bool:
        """Whether one finite number lies inside; an integer beyond every float does not."""
        try:
            if not math.isfinite(value):
                return False
        except OverflowError:
            return False
        above = self.low is None or value > self.low or (value == self.low and not self.low_open)
        below = (
            self.high is None or value < self.high or (value == self.high and not self.high_open)
        )
        return above and below

    def __str__(self) -> str:
        if self.low is not None and self.high is not None:
            left, right = "(" if self.low_open else "[", ")" if self.high_open else "]"
            return f"in {left}{self.low:g}, {self.high:g}{right}"
        if self.low is not None:
            return f"{'>' if self.low_open else '>='} {self.low:g}"
        if self.high is not None:
            return f"{'<' if self.high_open else '<='} {self.high:g}"
        return "any real number"


REAL = Range()
"""The real line."""

LARGEST = 2**63 - 1
"""The largest whole number that a tensor can hold, and so the largest size."""
LARGEST_FLOAT = (2 - 2**-23) * 2.0**127  # of float32


@dataclass(frozen=True, kw_only=True)
class Domain:
    """What a field that is no quantity may hold, for whoever walks the members (contract suites).

    Attributes:
        kind: ``"integer"``, ``"number"``, ``"option"``, ``"flag"``, ``"text"`` or ``"slot"``.
        range: of a number; the lower bound of an integer.
        words: of an option; the single slot kind of a slot.
        optional: whether ``None`` is allowed. many: whether it is a tuple of members.
        size: whether an integer only makes the same thing larger (a window's length), so that
            systems are known by name whatever it is.
    """

    kind: str
    range: Range = REAL
    words: tuple[str, ...] = ()
    optional: bool = False
    many: bool = False
    size: bool = False


DOMAIN = "recollect.domain"
"""Metadata key of a field's `Domain`."""


def domain(field: dataclasses.Field[Any]) -> Domain | None:
    """What a member's field may hold; ``None`` for quantities and undeclared fields."""
    return field.metadata.get(DOMAIN)


def as_whole(value: object) -> int | None:
    """The int that a value is, of whatever kind of whole number; ``None`` for others and booleans.

    Numbers of numpy are of kinds of their own, which JSON and torch's sizes do not take.

    Args:
        value: of any kind.
    """
    if type(value) is int:
        return value
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        return None
    return int(value)


def whole(at_least: int = 0, at_most: int | None = None) -> Callable[[Any], int]:
    """What checks whole numbers.

    Args:
        at_least: the least value allowed.
        at_most: the largest value allowed.
    """
    bounds = f">= {at_least}" if at_most is None else f"from {at_least} to {at_most}"

    def check(value: Any) -> int:
        number = as_whole(value)
        if number is None or number < at_least or (at_most is not None and number > at_most):
            raise ValueError(f"must be a whole number {bounds}, not {shown(value)}")
        if number > LARGEST:
            raise ValueError(f"must be a whole number of at most 64 bits, not {shown(value)}")
        return number

    return check


def real(span: Range) -> Callable[[Any], float]:
    """What checks finite numbers."""
    bounds = "" if span == REAL else f" {span}"

    def check(value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"must be a number{bounds}, not {shown(value)}")
        if not span.contains(value):
            raise ValueError(f"must be a finite number{bounds}, not {shown(value)}")
        return fits_float32(value)

    return check


def fits_float32(value: float) -> float:
    """A finite number; a ValueError refuses what float32 makes infinite, or a float another one."""
    if abs(value) > LARGEST_FLOAT:
        most = f"{LARGEST_FLOAT:.2g}, float32's largest number"
        raise ValueError(f"must be a number of at most {most}, not {shown(value)}")
    if float(value) != value:
        raise ValueError(f"must be a number that a float holds exactly, not {shown(value)}")
    return float(value)


def word(*words: str) -> Callable[[Any], str]:
    """What checks that one of these is given."""

    def check(value: Any) -> str:
        if not isinstance(value, str) or value not in words:
            raise ValueError(f"must be one of {', '.join(map(repr, words))}, not {shown(value)}")
        return value

    return check


def held(where: str, check: Callable[[Any], Checked], value: Any) -> Checked:
    """What a check makes of a value.

    Args:
        where: whose value it is, and its name: an error begins with it.
        check: says in a ValueError what must be.
        value: to be checked.

    Raises:
        ValueError: the check refuses the value.
    """
    try:
        return check(value)
    except ValueError as error:
        raise ValueError(f"{where} {error}") from None


def checked(
    default: Any,
    check: Callable[[Any], Any],
    *,
    optional: bool = False,
    domain: Domain | None = None,
) -> Any:
    """Field for what a check lets through.

    Args:
        default: its value when it is not given, or what makes it; `dataclasses.MISSING` where it
            is required.
        check: raises a ValueError that says what must be, or returns what the field keeps.
        optional: whether ``None`` is allowed.
        domain: what a member's field may hold.

    Raises:
        ValueError: a default that the check refuses.
    """

    def convert(value: Any) -> Any:
        return None if optional and value is None else check(value)

    if default is not dataclasses.MISSING and not callable(default):
        held("the default", convert, default)
    metadata = {RULE: convert, DOMAIN: domain}
    if callable(default):
        return dataclasses.field(default_factory=default, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


class Validated:
    """Base of dataclasses whose fields say what they may hold, by the functions of this file."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            if (rule := field.metadata.get(RULE)) is not None:
                kept = held(self.said(field.name), rule, getattr(self, field.name))
                object.__setattr__(self, field.name, kept)
        self.validate()

    @classmethod
    def said(cls, field: str) -> str:
        """How a sentence names a field."""
        return word_for(field, f"{cls.__name__}: {field}")

    def validate(self) -> None:
        """Hook: checks that involve several fields; raises ValueError."""


def integer(
    default: Any = dataclasses.MISSING,
    *,
    at_least: int = 0,
    optional: bool = False,
    size: bool = False,
) -> Any:
    """Field for a whole number with a lower bound; ``size`` as in `Domain`.

    Args:
        default: its value when it is not given; required when omitted.
        at_least: the least value allowed.
        optional: whether ``None`` is allowed.
        size: whether it only makes the same thing larger (a window's length), so that systems are
            known by name whatever it is.

    Examples:
        >>> @rc.member
        ... class Repeated(rc.features.Features):
        ...     times: int = rc.integer(2, at_least=1)
        ...
        ...     def dim(self, K):
        ...         return self.times * K
        ...
        ...     def phi(self, x, params, side, position):
        ...         return x.repeat(1, 1, 1, 1, self.times)
        ...
        >>> Repeated(times=3).dim(4)
        12
    """
    return checked(
        default,
        whole(at_least),
        optional=optional,
        domain=Domain(kind="integer", range=Range(low=at_least), optional=optional, size=size),
    )


def number(
    default: Any = dataclasses.MISSING,
    *,
    above: float | None = None,
    at_least: float | None = None,
    below: float | None = None,
    at_most: float | None = None,
    optional: bool = False,
) -> Any:
    """Field for a finite real constant (never a gate) with bounds.

    Args:
        default: its value when it is not given; required when omitted.
        above: an exclusive lower bound.
        at_least: an inclusive lower bound.
        below: an exclusive upper bound.
        at_most: an inclusive upper bound.
        optional: whether ``None`` is allowed.

    Examples:
        >>> @rc.member
        ... class Scaled(rc.features.Features):
        ...     factor: float = rc.number(1.0, above=0)
        ...
        ...     def dim(self, K):
        ...         return K
        ...
        ...     def phi(self, x, params, side, position):
        ...         return self.factor * x
        ...
        >>> Scaled(factor=2).factor
        2.0
    """
    span = Range.of(above=above, at_least=at_least, below=below, at_most=at_most)
    rule = Domain(kind="number", range=span, optional=optional)
    return checked(default, real(span), optional=optional, domain=rule)


def option(default: Any, *options: str, optional: bool = False) -> Any:
    """Field for one word out of several; ``default`` is among them.

    Args:
        default: the word it holds when none is given; `dataclasses.MISSING` where it is required.
        *options: the words allowed beside the default.
        optional: whether ``None`` is allowed.

    Examples:
        >>> @rc.member
        ... class Periodic(rc.features.Features):
        ...     wave: str = rc.option("sin", "cos")
        ...
        ...     def dim(self, K):
        ...         return K
        ...
        ...     def phi(self, x, params, side, position):
        ...         return x.sin() if self.wave == "sin" else x.cos()
        ...
        >>> Periodic(wave="cos").brief
        'Periodic(wave="cos")'
    """
    words = tuple(x for x in dict.fromkeys((default, *options)) if isinstance(x, str))
    rule = Domain(kind="option", words=words, optional=optional)
    return checked(default, word(*words), optional=optional, domain=rule)


def flag(default: bool) -> Any:
    """Field for true or false.

    Examples:
        >>> @rc.member
        ... class Signs(rc.features.Features):
        ...     zeros: bool = rc.flag(False)
        ...
        ...     def dim(self, K):
        ...         return K
        ...
        ...     def phi(self, x, params, side, position):
        ...         return x.sign() if self.zeros else torch.where(x < 0, -1.0, 1.0).to(x.dtype)
        ...
        >>> Signs().zeros
        False
    """

    def check(value: Any) -> bool:
        if not isinstance(value, bool):
            raise ValueError(f"must be true or false, not {shown(value)}")
        return value

    return checked(default, check, domain=Domain(kind="flag"))


def text(default: Any = dataclasses.MISSING) -> Any:
    """Field for a name."""

    def check(value: Any) -> str:
        if not isinstance(value, str) or not value:
            raise ValueError(f"must be a non-empty name, not {shown(value)}")
        return value

    return checked(default, check, domain=Domain(kind="text"))
