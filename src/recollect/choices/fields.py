"""What only a member's field may hold: quantities and other members.

A quantity is a constant, a gate or a param, see `recollect.choices.member`. Each function here
makes a dataclass field whose metadata says what it may hold, as those of `recollect.fields` do for
constants and words; `Member` checks it when it is made.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from recollect.fields import (
    DOMAIN,
    REAL,
    RULE,
    Domain,
    Range,
    domain,
    fits_float32,
    flag,
    held,
    integer,
    number,
    option,
    real,
    text,
)
from recollect.wording import shown

__all__ = [
    "DRAWS",
    "RULE",
    "Domain",
    "Gate",
    "Param",
    "Quantity",
    "Range",
    "check_quantity",
    "check_slot",
    "domain",
    "flag",
    "integer",
    "number",
    "option",
    "quantity",
    "slot",
    "text",
]


@dataclass(frozen=True, kw_only=True)
class Gate:
    """One per-token number that a recipe asks for.

    Attributes:
        name: the key in ``gates``.
        owner: the member that asks, e.g. ``"retention.Decay"``.
        axes: symbolic axes after ``[B, T, H]``, e.g. ``("F",)``; see `Recipe.axes`.
        range: the values it may take.
        init: a sensible value to start learning from.
        travels: whether it belongs to the association (moves with it through a window) rather than
            to the step.

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
    travels: bool = False


DRAWS = ("normal", "fan_in", "orthogonal", "eye")
"""Laws that a param's entries may be drawn from."""


@dataclass(frozen=True, kw_only=True)
class Param:
    """One learned tensor ``[H, *axes]`` that belongs to a member.

    ``init`` is the value of every entry, or a tuple of values along the last axis.

    Attributes:
        draw: the law of entries that are drawn instead: `recollect.recipe.initial_params.start`.
        fan: the axis whose size is ``in`` of the law ``"fan_in"``; the last one when empty.
        learned: whether a layer trains it unless its options say otherwise.
        beside_key: whether it scales V channels of unit root mean square that are added to the key:
            a layer whose keys have a length begins it at |k|/√V, where both are equally long.
        per_token: whether its member takes ``"token"`` in its place, for one value per token.

    Examples:
        >>> recipe = rc.Recipe(algorithm=rc.algorithm.GradientDescent(lr="static"))
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

    def __post_init__(self) -> None:
        if self.fan and self.draw != "fan_in":
            raise ValueError(
                f"param {self.name!r} of {self.owner}: fan={self.fan!r} is of draw='fan_in' alone: "
                "leave it out, or say that draw"
            )
        if self.draw is not None and self.draw not in DRAWS:
            raise ValueError(
                f"param {self.name!r} of {self.owner}: draw must be one of {', '.join(DRAWS)}, not "
                f"{self.draw!r}"
            )


@dataclass(frozen=True, kw_only=True)
class Quantity:
    """What `quantity` declares; the arguments are documented there."""

    name: str | None
    range: Range
    init: float
    travels: bool
    axes: tuple[str, ...] | Callable[[Any], tuple[str, ...]]
    log: bool
    kinds: tuple[str, ...]
    letter: str | None

    def axes_of(self, owner: object) -> tuple[str, ...]:
        """Symbolic axes after the head, of this member."""
        return self.axes(owner) if callable(self.axes) else self.axes

    def gate_range(self) -> Range:
        """The range of the gate: of the logarithm where the gate is one."""
        if not self.log:
            return self.range
        return Range(
            low=None if not self.range.low else math.log(self.range.low),
            high=None if self.range.high is None else math.log(self.range.high),
        )


def quantity(
    default: float | str = "token",
    *,
    name: str | None = None,
    above: float | None = None,
    at_least: float | None = None,
    below: float | None = None,
    at_most: float | None = None,
    init: float = 1.0,
    travels: bool = False,
    axes: tuple[str, ...] | Callable[[Any], tuple[str, ...]] = (),
    log: bool = False,
    kinds: tuple[str, ...] = ("token", "static"),
    letter: str | None = None,
) -> Any:
    """Field for a number that is a constant, a gate, or a param.

    Args:
        default: a float, ``"token"`` or ``"static"``.
        name: gate and param name; the field's own name when omitted.
        above, below: exclusive bounds.
        at_least, at_most: inclusive bounds.
        init: where a learned value starts.
        travels: the gate belongs to the association (always true for a bias's gates).
        axes: symbolic axes after the head, or a function of the member that gives them.
        log: the constant is α and the gate is its logarithm, named ``log_<name>``.
        kinds: which words are allowed beside a number; ``"log_token"`` asks for ``log_<name>``.
        letter: how an equation writes it; the field's name when omitted.

    Raises:
        ValueError: bounds that leave no number, or a default or an ``init`` that
            the bounds or the kinds exclude.

    Examples:
        >>> @rc.member
        ... class LogCosh(rc.bias.Bias):
        ...     scale: float | str = rc.quantity("token", above=0)
        ...
        ...     def loss(self, prediction, value, gates):
        ...         s = gates["scale"]
        ...         return (s**2 * torch.cosh((prediction - value) / s).log()).sum(-1)
        ...
        >>> [gate.name for gate in LogCosh().gates()], LogCosh(scale=2.0).gates()
        (['scale'], ())
    """
    span = Range.of(above=above, at_least=at_least, below=below, at_most=at_most)
    spec = Quantity(
        name=name,
        range=span,
        init=init,
        travels=travels,
        axes=axes,
        log=log,
        kinds=kinds,
        letter=letter,
    )
    _check_declared(default, spec)
    return dataclasses.field(default=default, metadata={RULE: spec})


def _check_declared(default: object, spec: Quantity) -> None:
    """That a declaration does not contradict itself, before anybody makes a member of it."""
    span = spec.range
    if span.low is not None and span.high is not None:
        ends = span.contains(span.low) and span.contains(span.high)
        if span.low > span.high or (span.low == span.high and not ends):
            raise ValueError(f"quantity: no number is {span}; give bounds that leave one")
    held("quantity(default=...)", lambda value: check_quantity(value, spec), default)
    held("quantity(init=...)", real(spec.range), spec.init)


def slot(default: Any, kind: str, *, optional: bool = False, many: bool = False) -> Any:
    """Field for another member (or a tuple of members) of the given kind.

    Args:
        default: the member it holds when none is given; ``None`` with ``optional``.
        kind: the choice it belongs to: ``"retention"``, ``"features"``, ``"context"``, ...
        optional: whether ``None`` is allowed.
        many: whether it holds a tuple of members.

    Examples:
        >>> @rc.member
        ... class Twice(rc.features.Features):
        ...     inner: rc.features.Features = rc.slot(rc.features.Relu(), "features")
        ...
        ...     def dim(self, K):
        ...         return 2 * self.inner.dim(K)
        ...
        ...     def phi(self, x, params, side, position):
        ...         return self.inner.phi(x, params, side, position).repeat(1, 1, 1, 1, 2)
        ...
        >>> Twice(inner=rc.features.Silu()).dim(4)
        8
    """
    rule = Domain(kind="slot", words=(kind,), optional=optional, many=many)
    return dataclasses.field(default=default, metadata={RULE: rule, DOMAIN: rule})


def check_slot(value: Any, rule: Domain, member: type) -> Any:
    """What a slot's field keeps; raises ValueError where it is no ``member`` of the slot's kind."""
    if rule.optional and value is None:
        return None
    if rule.many and not isinstance(value, tuple | list):
        raise ValueError(f"must be a tuple of members of {rule.words[0]}, not {shown(value)}")
    items: tuple[Any, ...] = tuple(value) if rule.many else (value,)
    for item in items:
        if not isinstance(item, member) or rule.words[0] not in item.choices():
            raise ValueError(f"must be a member of {rule.words[0]}, not {shown(item)}")
    return items if rule.many else value


def check_quantity(value: Any, spec: Quantity) -> float | str:
    """The value a quantity's field keeps; raises ValueError with the reason it refuses one."""
    words = " or ".join(repr(word) for word in spec.kinds)
    if isinstance(value, str):
        if value not in spec.kinds:
            raise ValueError(f"must be a number {spec.range}, {words}, not {shown(value)}")
        return value
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"must be a number {spec.range}, {words}, not {shown(value)}")
    if not spec.range.contains(value):
        raise ValueError(f"must be a finite number {spec.range}, {words}, not {shown(value)}")
    return fits_float32(value)
