"""Members of a choice: frozen data with declared quantities.

A member is a frozen, keyword-only dataclass. Its fields are JSON scalars, tuples, or other members.
A number that may be learned or depend on the token is a *quantity* with one of three values:

* a float: a constant of the recipe;
* ``"input"``: a gate, one value per token, passed to ``recall`` in ``gates``;
* ``"learned"``: a param, one value per head, passed to ``recall`` in ``params``.

Members declare their tensors (`Member.gates`, `Member.params`) and their conflicts with a recipe
(`Member.requires`). Engines use declared structure, never a member's type.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, dataclass_transform

from recollect.fields import LARGEST, Gate, Param, Quantity, Range, field_spec, quantity_of
from recollect.messages import (
    RecipeError,
    UnregisteredMemberError,
    short_repr,
    suggest_arguments,
)
from recollect.serialization import fields_to_data, read_fields

if TYPE_CHECKING:
    from recollect.recipe.recipe import Recipe

__all__ = [
    "Member",
    "all_members",
    "decode",
    "get_member",
    "member",
    "registered_name",
]


class Member:
    """Base class of the members of all choices, see `recollect.choices.member`."""

    choice: str = ""

    @classmethod
    @functools.cache
    def choices(cls) -> frozenset[str]:
        """Return the choices of this class and of its bases."""
        return frozenset(b.__dict__["choice"] for b in cls.__mro__ if "choice" in b.__dict__)

    @property
    def title(self) -> str:
        """Name of this member in errors, e.g. ``retention.Decay``."""
        return f"{self.choice}.{type(self).__name__}"

    def __post_init__(self) -> None:
        for field in self._fields():
            value = getattr(self, field.name)
            spec = field_spec(field) or quantity_of(field)
            try:
                value = _to_plain_data(value) if spec is None else spec.validated(value)
            except ValueError as error:
                raise RecipeError(f"{self.title}({field.name}=...) {error}") from None
            object.__setattr__(self, field.name, value)
        self.validate()

    def validate(self) -> None:
        """Check several fields together; raises `RecipeError`. Override it in a member."""

    def requires(self, recipe: Recipe) -> Iterator[str]:
        """Yield one message per conflict of this member with ``recipe``."""
        for part in self.parts():
            yield from part.requires(recipe)

    def _require_params_only(self, method: str) -> None:
        """Raise if a quantity is not a param, for a method that receives params only."""
        names: set[str] = set()
        for name, _, value in self._quantities():
            names |= {name, f"log_{name}"}
            if value != "learned":
                raise RecipeError(
                    f"{self.title} declares the quantity {name!r} as {value!r}, and {method} "
                    "receives params only: use 'learned', or declare a constant as a plain field"
                )
        names |= {gate.name for part in self.parts() for gate in part.gates()}
        for gate in self.gates():
            if gate.name not in names:
                raise RecipeError(
                    f"{self.title} declares the gate {gate.name!r}, and {method} receives params "
                    "only: declare a param"
                )

    @classmethod
    @functools.cache
    def _fields(cls) -> tuple[dataclasses.Field[Any], ...]:
        if not dataclasses.is_dataclass(cls):
            raise RecipeError(f"{cls.__name__} is not a member yet: decorate it with @rc.member")
        return dataclasses.fields(cls)

    @classmethod
    def has_field(cls, name: str) -> bool:
        """Whether the member has a constructor field with this name."""
        return any(field.name == name for field in cls._fields())

    def parts(self) -> Iterator[Member]:
        """Yield the members in this member's fields."""
        for field in self._fields():
            value = getattr(self, field.name)
            if isinstance(value, Member):
                yield value
            elif isinstance(value, tuple):
                yield from (item for item in value if isinstance(item, Member))

    @classmethod
    @functools.cache
    def _quantity_fields(cls) -> tuple[tuple[str, Quantity, str], ...]:
        specs = [(field.name, quantity_of(field)) for field in cls._fields()]
        return tuple((spec.name or name, spec, name) for name, spec in specs if spec is not None)

    def _quantities(self) -> Iterator[tuple[str, Quantity, float | str]]:
        for name, spec, field in self._quantity_fields():
            yield name, spec, getattr(self, field)

    def gates(self) -> tuple[Gate, ...]:
        """Return the gates of this member and its parts."""
        gates = [
            Gate(
                name=f"log_{name}" if spec.log or value == "log_input" else name,
                owner=self.title,
                axes=spec.axes_of(self),
                range=Range() if value == "log_input" else spec.gate_range(),
                init=math.log(spec.init) if spec.log or value == "log_input" else spec.init,
                per_association=spec.per_association or self.choice == "bias",
                role=spec.role,
                is_log=spec.log or value == "log_input",
            )
            for name, spec, value in self._quantities()
            if value in ("input", "log_input")
        ]
        return (*gates, *(gate for part in self.parts() for gate in part.gates()))

    def params(self) -> tuple[Param, ...]:
        """Return the params of this member and its parts."""
        params = [
            Param(
                name=name,
                owner=self.title,
                axes=spec.axes_of(self),
                range=spec.range,
                init=spec.init,
                per_token="input" in spec.sources,
                role=spec.role,
                is_log=spec.log,
            )
            for name, spec, value in self._quantities()
            if value == "learned"
        ]
        return (*params, *(param for part in self.parts() for param in part.params()))

    def constants(self) -> dict[str, float]:
        """Return the constants by engine-side name (decays as logs)."""
        return {
            (f"log_{name}" if spec.log else name): math.log(value) if spec.log else value
            for name, spec, value in self._constants()
        }

    def _constants(self) -> Iterator[tuple[str, Quantity, float]]:
        for name, spec, value in self._quantities():
            if not isinstance(value, str):
                yield name, spec, value
        for part in self.parts():
            yield from part._constants()

    def quantity_names(self) -> tuple[str, ...]:
        """Return the names of all quantities of this member and its parts, without ``log_``."""
        return (
            *(gate.base_name for gate in self.gates()),
            *(param.name for param in self.params()),
            *(name for name, _, _ in self._constants()),
        )

    def role_of(self, name: str) -> str | None:
        """Return the role of a quantity; ``None`` if this member and its parts do not have it."""
        roles = {gate.base_name: gate.role for gate in self.gates()}
        roles |= {param.name: param.role for param in self.params()}
        roles |= {constant: spec.role for constant, spec, _ in self._constants()}
        return roles.get(name)

    @functools.cached_property
    def log_decays(self) -> frozenset[str]:
        """Engine-side names of the logarithms of decays."""
        constants = {f"log_{n}" for n, x, _ in self._constants() if x.log and x.role == "decay"}
        gates = {x.name for x in self.gates() if x.is_log and x.role == "decay"}
        params = {f"log_{x.name}" for x in self.params() if x.is_log and x.role == "decay"}
        return frozenset(constants | gates | params)

    @functools.cached_property
    def quantity_axes(self) -> dict[str, tuple[str, ...]]:
        """Axes after the head of every declared quantity, by engine-side name (decays as logs).

        Constants have no axes.
        """
        learned_names = self.learned_quantities()
        axes: dict[str, tuple[str, ...]] = dict.fromkeys(self.constants(), ())
        for param in self.params():
            if param.name in learned_names:
                axes[f"log_{param.name}" if param.is_log else param.name] = param.axes
        return axes | {gate.name: gate.axes for gate in self.gates()}

    def is_active(self, name: str, neutral: float) -> bool:
        """Whether the member declares a quantity other than the constant ``neutral``.

        Args:
            name: engine-side name, e.g. ``"lr"`` or ``"log_decay"``.
            neutral: constant without an effect.
        """
        return name in self.quantity_axes and self.constants().get(name) != neutral

    def quantity_field(self, name: str) -> str | None:
        """Return the field of a quantity (``"decay"``, ``"lr"``), or ``None``."""
        return next((field for n, _, field in self._quantity_fields() if n == name), None)

    def learned_quantities(self) -> frozenset[str]:
        """Return the names of the quantities with the value ``"learned"``, one per head."""
        names = {name for name, _, value in self._quantities() if value == "learned"}
        return frozenset(names).union(*(part.learned_quantities() for part in self.parts()))

    # -- text for `recollect.explain` --------------------------------------------------------------

    shown: ClassVar[tuple[str, ...]] = ()
    """Fields that `brief` contains even if they have their defaults."""

    def symbol(self, field: str, at: str = "t") -> float | str:
        """Return a quantity in an equation: the number of a constant, else its letter.

        A gate has the index of its token, ``η_t``; a param has none.

        Args:
            field: name of a quantity's field.
            at: index of the token.
        """
        value = getattr(self, field)
        (spec,) = (quantity_of(f) for f in self._fields() if f.name == field)
        assert spec is not None
        if not isinstance(value, str):
            return value
        letter = spec.letter or field
        return letter if value == "learned" else f"{letter}_{at}"

    @property
    def brief(self) -> str:
        """The member as code: ``Lq(q=4, decay=Decay())``."""
        fields: list[str] = []
        for field in self._fields():
            value = getattr(self, field.name)
            if value != field.default or field.name in self.shown:
                fields.append(f"{field.name}={_brief(value)}")
        return f"{type(self).__name__}({', '.join(fields)})"

    def notes(self) -> tuple[str, ...]:
        """Return the definitions of this member's symbols in equations."""
        return tuple(note for part in self.parts() for note in part.notes())

    def to_dict(self) -> dict[str, Any]:
        """Return plain data: the registered name under ``"member"`` and all fields."""
        return {"member": registered_name(type(self)), **fields_to_data(self)}


def _brief(value: Any) -> str:
    if isinstance(value, Member):
        return value.brief
    if isinstance(value, tuple):
        items = ", ".join(_brief(item) for item in value)
        return f"({items},)" if len(value) == 1 else f"({items})"
    if isinstance(value, float):
        return f"{value:g}"
    return f'"{value}"' if isinstance(value, str) else repr(value)


def _to_plain_data(value: Any) -> Any:
    """Return a JSON value or member, with lists as tuples; raise a ValueError for other types."""
    if isinstance(value, list | tuple):
        return tuple(_to_plain_data(item) for item in value)
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"must be finite, not {value!r}")
    if isinstance(value, int) and abs(value) > LARGEST:
        raise ValueError(f"must be a whole number of at most 64 bits, not {short_repr(value)}")
    if value is None or isinstance(value, bool | int | float | str | Member):
        return value
    raise ValueError(
        f"must be a number, word, tuple or member, not {type(value).__name__} "
        "(a recipe is plain data: register functions and classes by name)"
    )


_REGISTRY: dict[tuple[str, str, str], type[Member]] = {}
"""Member classes by package (the module for a user's class), choice and class name."""


def _is_builtin(cls: type[Member]) -> bool:
    return cls.__module__.partition(".")[0] == "recollect"


def registered_name(cls: type[Member]) -> str:
    """Return the name of a member class in saved data, with the module of a user's class."""
    return cls.__name__ if _is_builtin(cls) else f"{cls.__module__}:{cls.__name__}"


M = TypeVar("M", bound=type[Member])


# No field_specifiers: type checkers then read the assigned value as the default of a field.
@dataclass_transform(kw_only_default=True, frozen_default=True)
def member(cls: M) -> M:
    """Freeze a member, make it keyword-only, and register it by its choice and class name.

    Annotate the fields, so that type checkers accept them as arguments: ``scale: float | str`` for
    a quantity. A member works without annotations too.

    Raises:
        RecipeError: the choice and module have another class of this name, or the class extends
            no choice.

    Examples:
        >>> @rc.member
        ... class Cubic(rc.bias.Bias):
        ...     scale: float = rc.fields.number(1.0, above=0)
        ...
        ...     def loss(self, prediction, value, gates):
        ...         return self.scale * (prediction - value).abs().pow(3).sum(-1) / 3
        ...
        >>> Cubic(scale=2).brief
        'Cubic(scale=2)'
        >>> rc.select_engine(rc.Recipe(bias=Cubic())).engine.name
        'deep'
    """
    if not issubclass(cls, Member) or not cls.choice:
        raise RecipeError(
            f"{cls.__name__} extends no choice: derive it from rc.bias.Bias, rc.memory.Memory, "
            "rc.features.Features, rc.context.Context, rc.retention.Retention or "
            "rc.algorithm.Algorithm"
        )
    for base in cls.__mro__[1:]:
        if base in _REGISTRY.values():
            raise RecipeError(
                f"{cls.__name__} extends the member {base.__name__}, whose declarations describe "
                f"its own code: extend a base class of {base.__name__} instead"
            )
    # Fields without annotations are allowed: `scale = rc.quantity("input")`.
    annotations = inspect.get_annotations(cls)
    for name, value in list(cls.__dict__.items()):
        if isinstance(value, dataclasses.Field) and name not in annotations:
            annotations = {**annotations, name: "float | str"}
    cls.__annotations__ = annotations
    frozen = suggest_arguments(dataclass(frozen=True, kw_only=True)(cls))
    package = "recollect" if _is_builtin(frozen) else frozen.__module__
    key = (package, frozen.choice, frozen.__name__)
    existing = _REGISTRY.get(key, frozen)
    if (existing.__module__, existing.__qualname__) != (frozen.__module__, frozen.__qualname__):
        raise RecipeError(
            f"a member named {frozen.__name__} exists already in {existing.__module__}; "
            "choose another class name"
        )
    _REGISTRY[key] = frozen
    return frozen


def get_member(name: object, choice: str | None = None) -> type[Member]:
    """Return the registered member class of a name, without importing a module.

    A bare name means the library's class if there is one. A name with a module means a user's
    class, from that module if several have it.

    Args:
        name: result of `registered_name`, or the class name.
        choice: preferred choice if members of several choices have the name.

    Raises:
        RecipeError: the name is not a string, no class has it, or several have it.
    """
    if not isinstance(name, str):
        raise RecipeError(
            f'the name of a member must be text, such as {{"member": "L2"}}, not {short_repr(name)}'
        )
    module, _, word = name.rpartition(":")
    allowed = [cls for cls in all_members() if not (module and _is_builtin(cls))]
    matches = [cls for cls in allowed if cls.__name__ == word]
    matches = [cls for cls in matches if choice in cls.choices()] or matches
    if module:
        matches = [cls for cls in matches if cls.__module__ == module] or matches
    else:
        matches = [cls for cls in matches if _is_builtin(cls)] or matches
    if len(matches) > 1:
        names = " or ".join(sorted(registered_name(cls) for cls in matches))
        raise RecipeError(f"several members are named {short_repr(word)}: write {names}")
    if not matches:
        near = difflib.get_close_matches(word, [cls.__name__ for cls in allowed], n=1, cutoff=0.7)
        hint = f"did you mean {near[0]!r}? For one of your own, " if near else ""
        origin = f" (it was saved from the module {short_repr(module)})" if module else ""
        raise UnregisteredMemberError(
            f"no member named {short_repr(word)} is registered: {hint}import the module that "
            f"defines it (its class has @rc.member) before loading this recipe{origin}"
        )
    return matches[0]


def all_members() -> tuple[type[Member], ...]:
    """Return all registered member classes, in order of definition."""
    return tuple(_REGISTRY.values())


def decode(data: Any, choice: str | None = None) -> Any:
    """Rebuild members from `Member.to_dict` data; plain values are returned unchanged.

    Args:
        data: plain data.
        choice: preferred choice of a member.

    Raises:
        RecipeError: an unknown member or field, or an invalid value.
    """
    if isinstance(data, list):
        return tuple(decode(item, choice) for item in data)
    if not isinstance(data, dict):
        return data
    if "member" not in data:
        keys = f"it has {', '.join(map(short_repr, list(data)[:4]))}" if data else "it is empty"
        raise RecipeError(f'a table of a recipe names its "member"; {keys}: add "member" = "..."')
    cls = get_member(data["member"], choice)
    fields = read_fields(cls, data, tag="member")
    choices = {field.name: _slot_choice(field) for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    arguments = {name: decode(value, choices[name]) for name, value in fields.items()}
    try:
        return cls(**arguments)
    except TypeError as error:  # a value of another type in the checks of a user's member
        raise RecipeError(f"{cls.__name__}: {error}") from None


def _slot_choice(field: dataclasses.Field[Any]) -> str | None:
    spec = field_spec(field)
    return spec.choices[0] if spec is not None and spec.kind == "slot" else None
