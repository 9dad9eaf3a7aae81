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

# More than 400 lines: what a member is, with an example on each public name.

from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
import math
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, dataclass_transform

from recollect.choices.fields import (
    RULE,
    Domain,
    Gate,
    Param,
    Quantity,
    Range,
    check_quantity,
    check_slot,
    domain,
    flag,
    integer,
    number,
    option,
    quantity,
    slot,
    text,
)
from recollect.fields import LARGEST
from recollect.wording import named_arguments, nearest, shown

if TYPE_CHECKING:
    from recollect.choices.questions import RecipeLike

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
    "not_too_deep",
    "number",
    "option",
    "quantity",
    "registered",
    "slot",
    "text",
]


class RecipeError(ValueError):
    """A recipe, or a member of one, that has no meaning: says what conflicts and what would fit.

    Examples:
        >>> rc.Recipe(algorithm=rc.algorithm.GradientDescent(lr=-1.0))
        Traceback (most recent call last):
            ...
        recollect.choices.member.RecipeError: algorithm.GradientDescent(lr=...) must be ...
    """


MemberError = RecipeError
"""A member that cannot be made is a recipe that cannot be made: one error to catch."""


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
            rule = field.metadata.get(RULE)
            try:
                if isinstance(rule, Quantity):
                    value = check_quantity(value, rule)
                elif isinstance(rule, Domain):
                    value = check_slot(value, rule, Member)
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

    def requires(self, recipe: RecipeLike) -> Iterator[str]:
        """Yield one sentence for each reason why this member cannot stand in ``recipe``."""
        for part in self.parts():
            yield from part.requires(recipe)

    def _handed_params(self, what: str) -> None:
        """Refuse numbers that code which is handed learned tensors alone would miss."""
        own: set[str] = set()
        for name, _, value in self._quantities():
            own |= {name, f"log_{name}"}
            if value != "static":
                raise RecipeError(
                    f"{self.title} gives the number {name!r} as {value!r}, and {what} is handed "
                    "params only: give it as 'static', or declare a constant as a plain field"
                )
        inside = {gate.name for part in self.parts() for gate in part.gates()}
        for gate in self.gates():
            if gate.name not in inside | own:
                raise RecipeError(
                    f"{self.title} asks for the gate {gate.name!r}, and {what} is handed params "
                    "only: ask for a param"
                )

    @classmethod
    @functools.cache
    def _fields(cls) -> tuple[dataclasses.Field[Any], ...]:
        if not dataclasses.is_dataclass(cls):
            raise RecipeError(f"{cls.__name__} is not a member yet: decorate it with @rc.member")
        return dataclasses.fields(cls)

    @classmethod
    def has_field(cls, name: str) -> bool:
        """Whether it is made with a field of that name, so that it can be made with another."""
        return any(field.name == name for field in cls._fields())

    def parts(self) -> Iterator[Member]:
        """Members held in this member's fields."""
        for field in self._fields():
            value = getattr(self, field.name)
            for item in value if isinstance(value, tuple) else (value,):
                if isinstance(item, Member):
                    yield item

    def _quantities(self) -> Iterator[tuple[str, Quantity, float | str]]:
        for field in self._fields():
            spec = field.metadata.get(RULE)
            if isinstance(spec, Quantity):
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
                per_token="token" in spec.kinds,
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

    @functools.cached_property
    def numbers(self) -> dict[str, tuple[str, ...]]:
        """Axes after the head of every number, by the name engines know it by (decays as logs).

        Gates with their axes, params that are quantities with theirs, constants with none. What a
        member declares stands here, whatever its field is called; what it does not is not here.
        """
        logs, statics = self.logs(), self.static_quantities()
        found: dict[str, tuple[str, ...]] = dict.fromkeys(self.constants(), ())
        for param in self.params():
            if param.name in statics:
                found[f"log_{param.name}" if param.name in logs else param.name] = param.axes
        return found | {gate.name: gate.axes for gate in self.gates()}

    def varies(self, name: str, neutral: float) -> bool:
        """Whether it declares that number, and as anything but the constant ``neutral``.

        Args:
            name: as engines know it: ``"lr"``, ``"log_decay"``.
            neutral: the constant that would change nothing.
        """
        return name in self.numbers and self.constants().get(name) != neutral

    def field_of(self, name: str) -> str | None:
        """The field of its own quantity of that name (``"decay"``, ``"lr"``), if it has one."""
        for field in self._fields():
            spec = field.metadata.get(RULE)
            if isinstance(spec, Quantity) and (spec.name or field.name) == name:
                return field.name
        return None

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

        Args:
            field: name of a quantity's field.
            at: index of the token that a gate carries.
        """
        value = getattr(self, field)
        (spec,) = (f.metadata.get(RULE) for f in self._fields() if f.name == field)
        assert isinstance(spec, Quantity)
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


def _plain(value: Any) -> Any:
    """Accept what JSON can hold, turning lists into tuples; refuse the rest."""
    if isinstance(value, list | tuple):
        return tuple(_plain(item) for item in value)
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"must be finite, not {value!r}")
    if isinstance(value, int) and abs(value) > LARGEST:
        raise ValueError(f"must be a whole number of at most 64 bits, not {shown(value)}")
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

    Annotate the fields, so that type checkers accept them as arguments: ``scale: float | str`` for
    a quantity. Without annotations a member runs all the same.

    Raises:
        RecipeError: the name is taken by another class, or the class extends no choice.

    Examples:
        >>> @rc.member
        ... class Cubic(rc.bias.Bias):
        ...     scale: float = rc.number(1.0, above=0)
        ...
        ...     def loss(self, prediction, value, gates):
        ...         return self.scale * (prediction - value).abs().pow(3).sum(-1) / 3
        ...
        >>> Cubic(scale=2).brief
        'Cubic(scale=2)'
        >>> rc.select(rc.Recipe(bias=Cubic())).engine.name
        'deep'
    """
    if not issubclass(cls, Member) or not cls.choice:
        raise RecipeError(
            f"{cls.__name__} extends no choice: derive it from rc.bias.Bias, rc.memory.Memory, "
            "rc.features.Features, rc.context.Context, rc.retention.Retention or "
            "rc.algorithm.Algorithm"
        )
    for base in cls.__mro__[1:]:
        if _REGISTRY.get(base.__name__) is base:
            raise RecipeError(
                f"{cls.__name__} extends the member {base.__name__}, whose declarations speak of "
                f"its own code and not of yours: extend what {base.__name__} extends instead"
            )
    # A field may be stated without an annotation: `scale = rc.quantity("token")`.
    annotations = inspect.get_annotations(cls)
    for name, value in list(cls.__dict__.items()):
        if isinstance(value, dataclasses.Field) and name not in annotations:
            annotations = {**annotations, name: "float | str"}
    cls.__annotations__ = annotations
    made = named_arguments(dataclass(frozen=True, kw_only=True)(cls))
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
        RecipeError: it is no name, or nobody registered it; loading a recipe never imports or runs
            code.
    """
    if not isinstance(name, str):
        raise RecipeError(
            f'a member is named by a word, such as {{"member": "L2"}}, and not by {shown(name)}'
        )
    if name not in _REGISTRY:
        near = difflib.get_close_matches(name, _REGISTRY, n=1, cutoff=0.7)
        hint = f"did you mean {near[0]!r}? For one of your own, " if near else ""
        raise RecipeError(
            f"no member named {shown(name)} is registered: {hint}import the module that defines it "
            "(its class carries @rc.member) before loading this recipe"
        )
    return _REGISTRY[name]


def all_members() -> dict[str, type[Member]]:
    """Every registered member class by name."""
    return dict(_REGISTRY)


@contextmanager
def not_too_deep(what: str) -> Generator[None, None, None]:
    """Inside, nested data are followed; deeper than Python can, one sentence says so.

    Args:
        what: is nested, in the plural.

    Raises:
        RecipeError: in place of a RecursionError.
    """
    try:
        yield
    except RecursionError:
        raise RecipeError(f"{what} are nested too deep: use fewer") from None


def decode(data: Any) -> Any:
    """Rebuild members from `Member.to_dict` data; plain values pass through.

    Raises:
        RecipeError: unknown member or field, or a value its field refuses.
    """
    if isinstance(data, list):
        return tuple(decode(item) for item in data)
    if not isinstance(data, dict):
        return data
    if "member" not in data:
        has = f"; it has {', '.join(map(shown, list(data)[:4]))}" if data else ", and is empty"
        raise RecipeError(f'a table of a recipe names its "member"{has}: add "member" = "..."')
    cls = registered(data["member"])
    names = {field.name for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    unknown = sorted(set(data) - names - {"member"}, key=str)
    if unknown:
        said = shown(unknown[0])
        hint = nearest(str(unknown[0]), sorted(names))
        raise RecipeError(f"{cls.__name__} has no field {said}; {hint}")
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]
        given = (
            field.default is not dataclasses.MISSING
            or field.default_factory is not dataclasses.MISSING
        )
        if field.init and not given and field.name not in data:
            raise RecipeError(f"{cls.__name__} needs {field.name}, which is missing")
    try:
        return cls(**{key: decode(value) for key, value in data.items() if key != "member"})
    except TypeError as error:
        said = str(error).removeprefix(f"{cls.__name__}.__init__() ")
        raise RecipeError(f"{cls.__name__}: {said}") from None
