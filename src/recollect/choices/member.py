"""Members of a choice: frozen data that states its numbers, and nothing else.

A member is a frozen, keyword-only dataclass whose fields are JSON scalars, tuples, or other
members. A number that may be learned or depend on the token is a *quantity* and is given in one of
three ways:

* a float: a constant of the recipe;
* ``"token"``: a gate, one value per token, handed to ``recall`` in ``gates``;
* ``"static"``: a param, one value per head, handed to ``recall`` in ``params``.

Members declare what they need (`Member.gates`, `Member.params`) and why they may not fit a recipe
(`Member.requires`); engines ask for structure and never for a member's type.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, dataclass_transform

if TYPE_CHECKING:
    from recollect.recipe import Recipe

__all__ = [
    "Domain",
    "Gate",
    "Member",
    "MemberError",
    "Param",
    "Range",
    "RecipeError",
    "domain",
    "flag",
    "integer",
    "member",
    "number",
    "option",
    "quantity",
    "registered",
    "slot",
    "text",
]


class RecipeError(ValueError):
    """A recipe, or a member of one, that has no meaning: says what conflicts and what would fit."""


MemberError = RecipeError
"""A member that cannot be made is a recipe that cannot be made: one error to catch."""


@dataclass(frozen=True, kw_only=True)
class Range:
    """An interval of the real line; ``None`` is no bound, ``*_open`` excludes the end."""

    low: float | None = None
    high: float | None = None
    low_open: bool = False
    high_open: bool = False

    def contains(self, value: float) -> bool:
        """Whether one finite number lies inside."""
        if not math.isfinite(value):
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
    """

    name: str
    owner: str
    axes: tuple[str, ...] = ()
    range: Range = Range()
    init: float = 1.0
    travels: bool = False


@dataclass(frozen=True, kw_only=True)
class Param:
    """One learned tensor ``[H, *axes]`` that belongs to a member.

    ``init`` is the value of every entry, or a tuple of values along the last axis.
    """

    name: str
    owner: str
    axes: tuple[str, ...] = ()
    range: Range = Range()
    init: float | tuple[float, ...] = 0.0


@dataclass(frozen=True, kw_only=True)
class _QuantitySpec:
    name: str | None
    range: Range
    init: float
    travels: bool
    axes: tuple[str, ...] | Callable[[Any], tuple[str, ...]]
    log: bool
    kinds: tuple[str, ...]
    letter: str | None

    def axes_of(self, owner: Member) -> tuple[str, ...]:
        return self.axes(owner) if callable(self.axes) else self.axes

    def gate_range(self) -> Range:
        if not self.log:
            return self.range
        return Range(
            low=None if not self.range.low else math.log(self.range.low),
            high=None if self.range.high is None else math.log(self.range.high),
        )


_KEY = "recollect"


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
    """
    span = Range(
        low=above if above is not None else at_least,
        high=below if below is not None else at_most,
        low_open=above is not None,
        high_open=below is not None,
    )
    spec = _QuantitySpec(
        name=name,
        range=span,
        init=init,
        travels=travels,
        axes=axes,
        log=log,
        kinds=kinds,
        letter=letter,
    )
    return dataclasses.field(default=default, metadata={_KEY: spec})


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
    range: Range = Range()
    words: tuple[str, ...] = ()
    optional: bool = False
    many: bool = False
    size: bool = False


_DOMAIN = "recollect.domain"


def domain(field: dataclasses.Field[Any]) -> Domain | None:
    """What a member's field may hold; ``None`` for quantities and undeclared fields."""
    return field.metadata.get(_DOMAIN)


def _checked(default: Any, check: Callable[[Any], Any], domain: Domain) -> Any:
    def convert(value: Any) -> Any:
        return None if domain.optional and value is None else check(value)

    metadata = {_KEY: convert, _DOMAIN: domain}
    if default is dataclasses.MISSING:
        return dataclasses.field(metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def integer(
    default: Any = dataclasses.MISSING,
    *,
    at_least: int = 0,
    optional: bool = False,
    size: bool = False,
) -> Any:
    """Field for a whole number with a lower bound; ``size`` as in `Domain`."""

    def check(value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
            raise ValueError(f"must be a whole number >= {at_least}, not {value!r}")
        return value

    return _checked(
        default,
        check,
        Domain(kind="integer", range=Range(low=at_least), optional=optional, size=size),
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
    """Field for a finite real constant (never a gate) with bounds."""
    span = Range(
        low=above if above is not None else at_least,
        high=below if below is not None else at_most,
        low_open=above is not None,
        high_open=below is not None,
    )

    def check(value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"must be a number {span}, not {value!r}")
        if not span.contains(float(value)):
            raise ValueError(f"must be a finite number {span}, not {value!r}")
        return float(value)

    return _checked(default, check, Domain(kind="number", range=span, optional=optional))


def option(default: Any, *options: str, optional: bool = False) -> Any:
    """Field for one word out of several; ``default`` is among them."""
    words = tuple(word for word in dict.fromkeys((default, *options)) if word is not None)

    def check(value: Any) -> str:
        if not isinstance(value, str) or value not in words:
            raise ValueError(f"must be one of {', '.join(map(repr, words))}, not {value!r}")
        return value

    return _checked(default, check, Domain(kind="option", words=words, optional=optional))


def flag(default: bool) -> Any:
    """Field for true or false."""

    def check(value: Any) -> bool:
        if not isinstance(value, bool):
            raise ValueError(f"must be True or False, not {value!r}")
        return value

    return _checked(default, check, Domain(kind="flag"))


def text(default: Any = dataclasses.MISSING) -> Any:
    """Field for a name."""

    def check(value: Any) -> str:
        if not isinstance(value, str) or not value:
            raise ValueError(f"must be a non-empty name, not {value!r}")
        return value

    return _checked(default, check, Domain(kind="text"))


def slot(default: Any, kind: str, *, optional: bool = False, many: bool = False) -> Any:
    """Field for another member (or a tuple of members) of the given kind."""

    def one(value: Any) -> Member:
        if not isinstance(value, Member) or kind not in value.choices():
            raise ValueError(f"must be a member of {kind}, not {value!r}")
        return value

    def check(value: Any) -> Any:
        if not many:
            return one(value)
        if not isinstance(value, tuple | list):
            raise ValueError(f"must be a tuple of members of {kind}, not {value!r}")
        return tuple(one(item) for item in value)

    return _checked(
        default, check, Domain(kind="slot", words=(kind,), optional=optional, many=many)
    )


class Member:
    """Base of every member of every choice; see the module's docstring."""

    choice: str = ""

    @classmethod
    def choices(cls) -> frozenset[str]:
        """The slots this member fits: its own kind and those of its bases."""
        return frozenset(b.__dict__["choice"] for b in cls.__mro__ if "choice" in b.__dict__)

    @property
    def title(self) -> str:
        """How errors name this member, e.g. ``retention.Decay``."""
        return f"{self.choice}.{type(self).__name__}"

    def __post_init__(self) -> None:
        for field in self._fields():
            value = getattr(self, field.name)
            rule = field.metadata.get(_KEY)
            try:
                if isinstance(rule, _QuantitySpec):
                    value = _check_quantity(value, rule)
                elif rule is not None:
                    value = rule(value)
                else:
                    value = _plain(value)
            except ValueError as error:
                raise RecipeError(f"{self.title}({field.name}=...) {error}") from None
            object.__setattr__(self, field.name, value)
        self.validate()

    def validate(self) -> None:
        """Hook: checks that involve several fields of this member; raises `RecipeError`."""

    def requires(self, recipe: Recipe) -> Iterator[str]:
        """Yield one sentence for each reason why this member cannot stand in ``recipe``."""
        for part in self.parts():
            yield from part.requires(recipe)

    @classmethod
    def _fields(cls) -> tuple[dataclasses.Field[Any], ...]:
        if not dataclasses.is_dataclass(cls):
            raise RecipeError(f"{cls.__name__} is not a member yet: decorate it with @rc.member")
        return dataclasses.fields(cls)

    def parts(self) -> Iterator[Member]:
        """Members held in this member's fields."""
        for field in self._fields():
            value = getattr(self, field.name)
            for item in value if isinstance(value, tuple) else (value,):
                if isinstance(item, Member):
                    yield item

    def _quantities(self) -> Iterator[tuple[str, _QuantitySpec, float | str]]:
        for field in self._fields():
            spec = field.metadata.get(_KEY)
            if isinstance(spec, _QuantitySpec):
                yield spec.name or field.name, spec, getattr(self, field.name)

    def gates(self) -> tuple[Gate, ...]:
        """The per-token numbers that this member and its parts ask for."""
        own = [
            Gate(
                name=f"log_{name}" if spec.log or value == "log_token" else name,
                owner=self.title,
                axes=spec.axes_of(self),
                range=Range() if value == "log_token" else spec.gate_range(),
                init=math.log(spec.init) if spec.log or value == "log_token" else spec.init,
                travels=spec.travels or self.choice == "bias",
            )
            for name, spec, value in self._quantities()
            if value in ("token", "log_token")
        ]
        return (*own, *(gate for part in self.parts() for gate in part.gates()))

    def params(self) -> tuple[Param, ...]:
        """The learned tensors that this member and its parts ask for."""
        own = [
            Param(
                name=name,
                owner=self.title,
                axes=spec.axes_of(self),
                range=spec.range,
                init=spec.init,
            )
            for name, spec, value in self._quantities()
            if value == "static"
        ]
        return (*own, *(param for part in self.parts() for param in part.params()))

    def constants(self) -> dict[str, float]:
        """Resolved constants by the name an engine asks for (decays as logs)."""
        own = {
            (f"log_{name}" if spec.log else name): math.log(value) if spec.log else value
            for name, spec, value in self._quantities()
            if not isinstance(value, str)
        }
        for part in self.parts():
            own.update(part.constants())
        return own

    def static_quantities(self) -> frozenset[str]:
        """Names of the params that are numbers given as ``"static"``, one per head."""
        own = {name for name, _, value in self._quantities() if value == "static"}
        for part in self.parts():
            own |= part.static_quantities()
        return frozenset(own)

    def logs(self) -> frozenset[str]:
        """Names of params whose engine-side value is the logarithm (``log_<name>``)."""
        own = {name for name, spec, value in self._quantities() if spec.log and value == "static"}
        for part in self.parts():
            own |= part.logs()
        return frozenset(own)

    # -- in words and equations, for `recollect.explain` ------------------------------------------

    shown: ClassVar[tuple[str, ...]] = ()
    """Fields that `brief` always writes, because the member says little without them."""

    def symbol(self, field: str, at: str = "t") -> float | str:
        """How a quantity stands in an equation: its number, or its letter.

        A gate carries the index of its token, ``η_t``; a param does not.
        """
        value = getattr(self, field)
        (spec,) = (f.metadata.get(_KEY) for f in self._fields() if f.name == field)
        assert isinstance(spec, _QuantitySpec)
        if not isinstance(value, str):
            return value
        letter = spec.letter or field
        return letter if value == "static" else f"{letter}_{at}"

    @property
    def brief(self) -> str:
        """The member as one would type it: ``Lq(q=4, decay=Decay())``."""
        said = []
        for field in self._fields():
            value = getattr(self, field.name)
            if value != field.default or field.name in self.shown:
                said.append(f"{field.name}={_brief(value)}")
        return f"{type(self).__name__}({', '.join(said)})"

    def notes(self) -> tuple[str, ...]:
        """What the symbols that this member puts into an equation mean."""
        return tuple(note for part in self.parts() for note in part.notes())

    def to_dict(self) -> dict[str, Any]:
        """Plain data: the registered name under ``"member"`` and every field, defaults too."""
        return {
            "member": type(self).__name__,
            **{field.name: _encode(getattr(self, field.name)) for field in self._fields()},
        }


def _brief(value: Any) -> str:
    if isinstance(value, Member):
        return value.brief
    if isinstance(value, tuple):
        items = ", ".join(_brief(item) for item in value)
        return f"({items},)" if len(value) == 1 else f"({items})"
    if isinstance(value, float):
        return f"{value:g}"
    return f'"{value}"' if isinstance(value, str) else repr(value)


def _check_quantity(value: Any, spec: _QuantitySpec) -> float | str:
    words = " or ".join(repr(word) for word in spec.kinds)
    if isinstance(value, str):
        if value not in spec.kinds:
            raise ValueError(f"must be a number {spec.range}, {words}, not {value!r}")
        return value
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"must be a number {spec.range}, {words}, not {value!r}")
    if not spec.range.contains(float(value)):
        raise ValueError(f"must be a finite number {spec.range}, {words}, not {value!r}")
    return float(value)


def _plain(value: Any) -> Any:
    """Accept what JSON can hold, turning lists into tuples; refuse the rest."""
    if isinstance(value, list | tuple):
        return tuple(_plain(item) for item in value)
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"must be finite, not {value!r}")
    if value is None or isinstance(value, bool | int | float | str | Member):
        return value
    raise ValueError(
        f"must be a number, word, tuple or member, not {type(value).__name__} "
        "(a recipe is plain data: register functions and classes by name)"
    )


def _encode(value: Any) -> Any:
    if isinstance(value, Member):
        return value.to_dict()
    if isinstance(value, tuple):
        return [_encode(item) for item in value]
    return value


_REGISTRY: dict[str, type[Member]] = {}

M = TypeVar("M", bound=type[Member])


# No field_specifiers: to a type checker, what a field is assigned is its default, as to a reader.
@dataclass_transform(kw_only_default=True, frozen_default=True)
def member(cls: M) -> M:
    """Class decorator: freeze a member, make it keyword-only, and register it by its class name.

    Raises:
        RecipeError: the name is taken by another class, or the class extends no choice.
    """
    if not issubclass(cls, Member) or not cls.choice:
        raise RecipeError(
            f"{cls.__name__} extends no choice: derive it from rc.bias.Bias, rc.memory.Memory, "
            "rc.features.Features, rc.context.Context, rc.retention.Retention or "
            "rc.algorithm.Algorithm"
        )
    # A field may be stated without an annotation: `scale = rc.quantity("token")`.
    annotations = cls.__dict__.get("__annotations__", {})
    for name, value in list(cls.__dict__.items()):
        if isinstance(value, dataclasses.Field) and name not in annotations:
            annotations = {**annotations, name: "float | str"}
    cls.__annotations__ = annotations
    made = dataclass(frozen=True, kw_only=True)(cls)
    known = _REGISTRY.get(made.__name__)
    if known is not None and (known.__module__, known.__qualname__) != (
        made.__module__,
        made.__qualname__,
    ):
        raise RecipeError(
            f"a member named {made.__name__} exists already in {known.__module__}; "
            "choose another class name"
        )
    _REGISTRY[made.__name__] = made
    return made


def registered(name: object) -> type[Member]:
    """The member class of that name.

    Raises:
        RecipeError: nobody registered it; loading a recipe never imports or runs code.
    """
    if not isinstance(name, str) or name not in _REGISTRY:
        raise RecipeError(
            f"no member named {name!r} is registered: import the module that defines it "
            "(its class carries @rc.member) before loading this recipe"
        )
    return _REGISTRY[name]


def all_members() -> dict[str, type[Member]]:
    """Every registered member class by name."""
    return dict(_REGISTRY)


def decode(data: Any) -> Any:
    """Rebuild members from `Member.to_dict` data; plain values pass through.

    Raises:
        RecipeError: unknown member or field, or a value its field refuses.
    """
    if isinstance(data, list):
        return tuple(decode(item) for item in data)
    if not isinstance(data, dict):
        return data
    cls = registered(data.get("member"))
    names = {field.name for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    unknown = sorted(set(data) - names - {"member"})
    if unknown:
        raise RecipeError(f"{cls.__name__} has no field {unknown[0]!r}; it has {sorted(names)}")
    try:
        return cls(**{key: decode(value) for key, value in data.items() if key != "member"})
    except TypeError as error:
        raise RecipeError(f"{cls.__name__}: {error}") from None
