"""Fields of dataclasses with declared, checked values: numbers, words, flags, members, quantities.

Each function returns a dataclass field with a specification in its metadata. Members of a recipe
and subclasses of `Validated` check their fields by it during initialisation. A quantity is a number
that is a constant, a gate or a param, see `recollect.choices.member`.

Examples:
    >>> @rc.member
    ... class Absolute(rc.bias.Bias):
    ...     scale: float = rc.fields.number(1.0, above=0)
    ...
    ...     def loss(self, prediction, value, gates):
    ...         return self.scale * (prediction - value).abs().sum(-1)
    ...
    >>> Absolute(scale=2).brief
    'Absolute(scale=2)'
"""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from recollect.messages import argument_name, short_repr

__all__ = ["flag", "integer", "number", "option", "slot"]

T = TypeVar("T")

SPEC = "recollect"
"""Metadata key of a field's `FieldSpec` or `Quantity`."""


@dataclass(frozen=True, kw_only=True)
class Range:
    """An interval of the real line; ``None`` means no bound, ``*_open`` excludes the end."""

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
        """Return the interval between exclusive (above, below) or inclusive bounds."""
        return cls(
            low=above if above is not None else at_least,
            high=below if below is not None else at_most,
            low_open=above is not None,
            high_open=below is not None,
        )

    def contains(self, value: float) -> bool:
        """Whether a finite number lies inside."""
        try:
            if not math.isfinite(value):
                return False
        except OverflowError:
            return False
        above = self.low is None or value > self.low or (value == self.low and not self.low_open)
        below = self.high is None or (value < self.high if self.high_open else value <= self.high)
        return above and below

    def __str__(self) -> str:
        if self.low is not None and self.high is not None:
            start, end = "(" if self.low_open else "[", ")" if self.high_open else "]"
            return f"in {start}{self.low:g}, {self.high:g}{end}"
        if self.low is not None:
            return f"{'>' if self.low_open else '>='} {self.low:g}"
        if self.high is not None:
            return f"{'<' if self.high_open else '<='} {self.high:g}"
        return "any real number"


REAL = Range()
"""The real line."""

LARGEST = 2**63 - 1
"""The largest integer that a tensor can hold, and so the largest size."""
LARGEST_FLOAT = (2 - 2**-23) * 2.0**127  # of float32


@dataclass(frozen=True, kw_only=True)
class FieldSpec:
    """Allowed values of a field.

    Attributes:
        kind: ``"integer"``, ``"number"``, ``"option"``, ``"flag"``, ``"text"``, ``"slot"``, or
            ``"other"`` for a custom check function.
        check: returns the stored value, or raises a ValueError.
        range: of a number; the lower bound of an integer.
        choices: of an option; the one choice of a slot.
        optional: whether ``None`` is allowed.
        is_tuple: whether a slot holds a tuple of members.
        is_size: whether an integer is a size such as a window's length, which does not change the
            name of a system.
    """

    kind: str
    check: Callable[[Any], Any]
    range: Range = REAL
    choices: tuple[str, ...] = ()
    optional: bool = False
    is_tuple: bool = False
    is_size: bool = False

    def validated(self, value: Any) -> Any:
        """Return the stored value; raises ValueError."""
        return None if self.optional and value is None else self.check(value)


def field_spec(field: dataclasses.Field[Any]) -> FieldSpec | None:
    """Return the specification of a field that is not a quantity; ``None`` if it has none."""
    spec = field.metadata.get(SPEC)
    return spec if isinstance(spec, FieldSpec) else None


def quantity_of(field: dataclasses.Field[Any]) -> Quantity | None:
    """Return the quantity that a field declares, if any."""
    spec = field.metadata.get(SPEC)
    return spec if isinstance(spec, Quantity) else None


def as_int(value: object) -> int | None:
    """Return the int of any integral type, also numpy's; ``None`` for other types and booleans."""
    if type(value) is int:
        return value
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        return None
    return int(value)


def int_check(at_least: int = 0, at_most: int | None = None) -> Callable[[Any], int]:
    """Return a check for integers between bounds."""
    bounds = f">= {at_least}" if at_most is None else f"from {at_least} to {at_most}"

    def check(value: Any) -> int:
        number = as_int(value)
        if number is None or number < at_least or (at_most is not None and number > at_most):
            raise ValueError(f"must be a whole number {bounds}, not {short_repr(value)}")
        if number > LARGEST:
            raise ValueError(f"must be a whole number of at most 64 bits, not {short_repr(value)}")
        return number

    return check


def float_check(range_: Range) -> Callable[[Any], float]:
    """Return a check for finite numbers in a range."""
    bounds = "" if range_ == REAL else f" {range_}"

    def check(value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"must be a number{bounds}, not {short_repr(value)}")
        if not range_.contains(value):
            raise ValueError(f"must be a finite number{bounds}, not {short_repr(value)}")
        return check_float32(value)

    return check


def check_float32(value: float) -> float:
    """Return the float of a number that float32 holds as finite; raises ValueError."""
    if abs(value) > LARGEST_FLOAT:
        limit = f"{LARGEST_FLOAT:.2g}, float32's largest number"
        raise ValueError(f"must be a number of at most {limit}, not {short_repr(value)}")
    if float(value) != value:
        raise ValueError(f"must be a number that a float holds exactly, not {short_repr(value)}")
    return float(value)


def choice_check(*choices: str) -> Callable[[Any], str]:
    """Return a check for one of these words."""

    def check(value: Any) -> str:
        if not isinstance(value, str) or value not in choices:
            words = ", ".join(map(repr, choices))
            raise ValueError(f"must be one of {words}, not {short_repr(value)}")
        return value

    return check


def _flag_check(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"must be true or false, not {short_repr(value)}")
    return value


def _text_check(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError(f"must be a non-empty name, not {short_repr(value)}")
    return value


def _slot_check(kind: str, *, many: bool) -> Callable[[Any], Any]:
    def check(value: Any) -> Any:
        if many and not isinstance(value, tuple | list):
            raise ValueError(f"must be a tuple of members of {kind}, not {short_repr(value)}")
        items: tuple[Any, ...] = tuple(value) if many else (value,)
        for item in items:
            choices: Callable[[], tuple[str, ...]] | None
            choices = None if isinstance(item, type) else getattr(item, "choices", None)
            if choices is None or kind not in choices():
                raise ValueError(f"must be a member of {kind}, not {short_repr(item)}")
        return items if many else value

    return check


def validate(name: str, check: Callable[[Any], T], value: Any) -> T:
    """Return the checked value, or raise a ValueError that begins with the name."""
    try:
        return check(value)
    except ValueError as error:
        raise ValueError(f"{name} {error}") from None


class Validated:
    """Base of dataclasses with validated fields."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            if (spec := field_spec(field)) is not None:
                label = self.field_label(field.name)
                value = validate(label, spec.validated, getattr(self, field.name))
                object.__setattr__(self, field.name, value)
        self.validate()

    @classmethod
    def field_label(cls, field: str) -> str:
        """Name of a field in messages."""
        return argument_name(field, f"{cls.__name__}: {field}")

    def validate(self) -> None:
        """Check several fields together; raises ValueError. Override it in a subclass."""


def _field(default: Any, spec: FieldSpec) -> Any:
    if callable(default):
        return dataclasses.field(default_factory=default, metadata={SPEC: spec})
    if default is not dataclasses.MISSING and spec.kind != "slot":
        validate("the default", spec.validated, default)
    return dataclasses.field(default=default, metadata={SPEC: spec})


def validated_field(default: Any, check: Callable[[Any], Any], *, optional: bool = False) -> Any:
    """Return a field with a check function.

    Args:
        default: its default, or a factory of it; `dataclasses.MISSING` if required.
        check: raises a ValueError, or returns the stored value.
        optional: whether ``None`` is allowed.

    Raises:
        ValueError: the default is not valid.
    """
    return _field(default, FieldSpec(kind="other", check=check, optional=optional))


def integer(
    default: Any = dataclasses.MISSING,
    *,
    at_least: int = 0,
    optional: bool = False,
    size: bool = False,
) -> Any:
    """Return a field for an integer with a lower bound.

    Args:
        default: its default; required if omitted.
        at_least: the minimum.
        optional: whether ``None`` is allowed.
        size: whether it is a size such as a window's length, which does not change the name of a
            system.

    Examples:
        >>> rc.context.Window(size=4).size  # an integer(at_least=1, size=True)
        4
    """
    spec = FieldSpec(
        kind="integer",
        check=int_check(at_least),
        range=Range(low=at_least),
        optional=optional,
        is_size=size,
    )
    return _field(default, spec)


def number(
    default: Any = dataclasses.MISSING,
    *,
    above: float | None = None,
    at_least: float | None = None,
    below: float | None = None,
    at_most: float | None = None,
    optional: bool = False,
) -> Any:
    """Return a field for a finite real constant (never a gate) with bounds.

    Args:
        default: its default; required if omitted.
        above, below: exclusive bounds.
        at_least, at_most: inclusive bounds.
        optional: whether ``None`` is allowed.

    Examples:
        >>> rc.bias.Lp(p=3).p  # a number
        3.0
    """
    range_ = Range.of(above=above, at_least=at_least, below=below, at_most=at_most)
    check = float_check(range_)
    return _field(default, FieldSpec(kind="number", check=check, range=range_, optional=optional))


def option(default: Any, *options: str, optional: bool = False) -> Any:
    """Return a field for one of several words; ``default`` is one of them.

    Args:
        default: its default; `dataclasses.MISSING` if required.
        *options: the other words.
        optional: whether ``None`` is allowed.

    Examples:
        >>> rc.retention.Decay(alpha=0.5, per="head").per  # an option of five words
        'head'
    """
    words = tuple(x for x in dict.fromkeys((default, *options)) if isinstance(x, str))
    check = choice_check(*words)
    return _field(default, FieldSpec(kind="option", check=check, choices=words, optional=optional))


def flag(default: bool) -> Any:
    """Return a field for true or false.

    Examples:
        >>> rc.context.Window(size=4, gated=False).gated
        False
    """
    return _field(default, FieldSpec(kind="flag", check=_flag_check))


def text(default: Any = dataclasses.MISSING) -> Any:
    """Return a field for a name."""
    return _field(default, FieldSpec(kind="text", check=_text_check))


def slot(default: Any, kind: str, *, optional: bool = False, many: bool = False) -> Any:
    """Return a field for another member, or a tuple of members.

    Args:
        default: its default; ``None`` with ``optional``.
        kind: choice of the member: ``"retention"``, ``"features"``, ``"context"``, ...
        optional: whether ``None`` is allowed.
        many: whether it holds a tuple of members.

    Examples:
        >>> rc.retention.Lq(decay=rc.retention.Decay(alpha=0.5)).decay.brief
        'Decay(alpha=0.5)'
    """
    check = _slot_check(kind, many=many)
    spec = FieldSpec(kind="slot", check=check, choices=(kind,), optional=optional, is_tuple=many)
    return _field(default, spec)


ROLES = ("decay", "rate", "momentum", "weight", "ridge", "key", "other")
"""Roles of a quantity in layers and engines.

A ``"decay"`` scales the past. A ``"rate"`` scales a write, an erasure or a gradient. A
``"weight"`` weighs an association. A ``"key"`` is compared with keys.
"""


def _check_role(name: str, role: object) -> None:
    if role not in ROLES:
        raise ValueError(f"{name}: role must be one of {', '.join(ROLES)}, not {short_repr(role)}")


@dataclass(frozen=True, kw_only=True)
class Gate:
    """Per-token quantity of a recipe.

    Attributes:
        name: the key in ``gates``.
        owner: the member that declares it, e.g. ``"retention.Decay"``.
        axes: symbolic axes after ``[B, T, H]``, e.g. ``("F",)``; see `Recipe.axes`.
        range: allowed values.
        init: initial value in a layer.
        per_association: whether it belongs to the association (moves with it through a window)
            rather than to the step.
        role: role of the quantity, one of `ROLES`.
        is_log: whether the gate is a logarithm, named ``log_<name>``.

    Examples:
        >>> decay, lr = rc.Recipe(retention=rc.retention.Decay()).gates()
        >>> decay.name, str(decay.range)
        ('log_decay', '<= 0')
        >>> lr.name, str(lr.range)
        ('lr', '>= 0')
    """

    name: str
    owner: str
    axes: tuple[str, ...] = ()
    range: Range = REAL
    init: float = 1.0
    per_association: bool = False
    role: str = "other"
    is_log: bool = False

    def __post_init__(self) -> None:
        _check_role(f"gate {self.name!r} of {self.owner}", self.role)

    @property
    def base_name(self) -> str:
        """Name of the number, without the prefix of a logarithm."""
        return self.name.removeprefix("log_") if self.is_log else self.name


INIT_LAWS = ("normal", "fan_in", "orthogonal", "eye")
"""Distributions of randomly initialised params."""


@dataclass(frozen=True, kw_only=True)
class Param:
    """Learned tensor ``[H, *axes]`` of a member.

    ``init`` is the value of every entry, or a tuple of values along the last axis.

    Attributes:
        draw: distribution of random entries, see `recollect.recipe.initial_params`; ``None`` for
            ``init``.
        fan: axis of the size ``in`` of the distribution ``"fan_in"``; the last one if empty.
        learned: whether a layer trains it by default.
        beside_key: whether it scales V channels of unit root mean square that are added to the key.
            A layer with keys of fixed length initialises it to |k|/√V, for equal lengths of both.
        per_token: whether the member accepts ``"input"`` for one value per token.
        role: role of the quantity, one of `ROLES`.
        is_log: whether engines receive its logarithm, as ``log_<name>``.

    Examples:
        >>> recipe = rc.Recipe(algorithm=rc.algorithm.GradientDescent(lr="learned"))
        >>> recipe.params()[0].name, recipe.params()[0].init
        ('lr', 0.5)
    """

    name: str
    owner: str
    axes: tuple[str, ...] = ()
    range: Range = REAL
    init: float | tuple[float, ...] = 0.0
    draw: str | None = None
    fan: str = ""
    learned: bool = True
    beside_key: bool = False
    per_token: bool = False
    role: str = "other"
    is_log: bool = False

    def __post_init__(self) -> None:
        _check_role(f"param {self.name!r} of {self.owner}", self.role)
        if self.fan and self.draw != "fan_in":
            raise ValueError(
                f"param {self.name!r} of {self.owner}: fan={self.fan!r} needs draw='fan_in': "
                "omit fan, or set draw='fan_in'"
            )
        if self.draw is not None and self.draw not in INIT_LAWS:
            raise ValueError(
                f"param {self.name!r} of {self.owner}: draw must be one of {', '.join(INIT_LAWS)}, "
                f"not {self.draw!r}"
            )


@dataclass(frozen=True, kw_only=True)
class Quantity:
    """Declaration of a number; the attributes are the arguments of `quantity`."""

    name: str | None
    range: Range
    init: float
    per_association: bool
    axes: tuple[str, ...] | Callable[[Any], tuple[str, ...]]
    log: bool
    sources: tuple[str, ...]
    letter: str | None
    role: str

    def __post_init__(self) -> None:
        _check_role("quantity", self.role)
        low, high = self.range.low, self.range.high
        if low is not None and high is not None:
            closed = self.range.contains(low) and self.range.contains(high)
            if low > high or (low == high and not closed):
                raise ValueError(f"quantity: no number is {self.range}; use other bounds")
        validate("quantity(init=...)", float_check(self.range), self.init)

    def axes_of(self, owner: object) -> tuple[str, ...]:
        """Return the symbolic axes after the head."""
        return self.axes(owner) if callable(self.axes) else self.axes

    def gate_range(self) -> Range:
        """Return the range of the gate, which is a logarithm with ``log``."""
        if not self.log:
            return self.range
        low, high = self.range.low, self.range.high
        return Range(
            low=math.log(low) if low else None,
            high=None if high is None else math.log(high),
            low_open=self.range.low_open and bool(low),
            high_open=self.range.high_open,
        )

    def validated(self, value: Any) -> float | str:
        """Return the stored value; raises ValueError."""
        if isinstance(value, str) and value in self.sources:
            return value
        number = "number" if self.range == REAL else f"number {self.range}"
        *others, last = number, *map(repr, self.sources)
        allowed = f"{', '.join(others)} or {last}" if others else last
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"must be a {allowed}, not {short_repr(value)}")
        if not self.range.contains(value):
            raise ValueError(f"must be a finite {allowed}, not {short_repr(value)}")
        return check_float32(value)


def quantity(
    default: float | str = "input",
    *,
    name: str | None = None,
    above: float | None = None,
    at_least: float | None = None,
    below: float | None = None,
    at_most: float | None = None,
    init: float = 1.0,
    per_association: bool = False,
    axes: tuple[str, ...] | Callable[[Any], tuple[str, ...]] = (),
    log: bool = False,
    sources: tuple[str, ...] = ("input", "learned"),
    letter: str | None = None,
    role: str = "other",
) -> Any:
    """Return a field for a number that is a constant, a gate, or a param.

    Args:
        default: a float, ``"input"`` or ``"learned"``.
        name: gate and param name; the field's own name if omitted.
        above, below: exclusive bounds.
        at_least, at_most: inclusive bounds.
        init: initial value of a learned number.
        per_association: whether the gate belongs to the association (always for a bias's gates).
        axes: symbolic axes after the head, or a function of the member that returns them.
        log: whether the gate is the logarithm of the constant, named ``log_<name>``.
        sources: words allowed instead of a number; ``"log_input"`` declares a gate ``log_<name>``.
        letter: symbol in equations; the field's name if omitted.
        role: ``"decay"``, ``"rate"``, ``"momentum"``, ``"weight"``, ``"ridge"``, ``"key"`` or
            ``"other"``. A layer initialises rates and decays as such, and a read needs no decay.

    Raises:
        ValueError: empty bounds, an unknown role, or a default or ``init`` outside the bounds and
            sources.

    Examples:
        >>> @rc.member
        ... class LogCosh(rc.bias.Bias):
        ...     scale: float | str = rc.quantity("input", above=0)
        ...
        ...     def loss(self, prediction, value, gates):
        ...         s = gates["scale"]
        ...         return (s**2 * torch.cosh((prediction - value) / s).log()).sum(-1)
        ...
        >>> [gate.name for gate in LogCosh().gates()], LogCosh(scale=2.0).gates()
        (['scale'], ())
    """
    spec = Quantity(
        name=name,
        range=Range.of(above=above, at_least=at_least, below=below, at_most=at_most),
        init=init,
        per_association=per_association,
        axes=axes,
        log=log,
        sources=sources,
        letter=letter,
        role=role,
    )
    validate("quantity(default=...)", spec.validated, default)
    return dataclasses.field(default=default, metadata={SPEC: spec})
