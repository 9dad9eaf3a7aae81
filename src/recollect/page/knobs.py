"""The six choices as knobs: the settings that each member can be turned to, one field at a time.

A *setting* is one member with all its fields. Every registered member is a setting with its
defaults; the others are those that the zoo's recipes hold, and what is one field away from either.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
from collections.abc import Iterable, Iterator
from typing import Any

from recollect.choices.member import Member, all_members, decode, registered_name
from recollect.fields import field_spec, quantity_of
from recollect.messages import RecipeError
from recollect.recipe.recipe import CHOICES, Recipe

__all__ = ["Data", "Knobs", "key_of", "summary"]

Data = dict[str, Any]
"""A member, or a recipe, as plain data."""

_REQUIRED_SIZE = 4
"""What a size begins at that has no default and that no recipe of the zoo gives."""


def key_of(data: object) -> str:
    """Plain data as one text, the same for the same data.

    Args:
        data: of a member or a recipe.
    """
    return json.dumps(_as_read(data), sort_keys=True, ensure_ascii=False, allow_nan=False)


def _as_read(data: Any) -> Any:
    """As JavaScript reads it, to which 1.0 is 1."""
    if isinstance(data, dict):
        return {name: _as_read(value) for name, value in data.items()}
    if isinstance(data, list | tuple):
        return [_as_read(value) for value in data]
    return int(data) if isinstance(data, float) and data.is_integer() else data


class Knobs:
    """Members of the six choices and the values of their fields.

    Args:
        recipes: their members say which values of numbers, sizes and nested members are of use.

    Examples:
        >>> from recollect.page.knobs import Knobs
        >>> knobs = Knobs([rc.Recipe(context=rc.context.Window(size=8))])
        >>> knobs.first("context", "Window")
        {'member': 'Window', 'size': 8, 'gated': True}
        >>> knobs.values("Decay", "when")
        ['after', 'before']
    """

    def __init__(self, recipes: Iterable[Recipe]) -> None:
        self._seen: dict[tuple[str, str], list[Any]] = {}
        for recipe in recipes:
            for choice in CHOICES:
                self._look(getattr(recipe, choice))

    def _look(self, member: Member) -> None:
        data = member.to_dict()
        for field in dataclasses.fields(type(member)):  # type: ignore[arg-type]
            values = self._seen.setdefault((data["member"], field.name), [])
            if data[field.name] not in values:
                values.append(data[field.name])
        for part in member.parts():
            self._look(part)

    def members(self, choice: str) -> list[str]:
        """Names of the members of a choice that can be made without code of the user's.

        Args:
            choice: one of the six.
        """
        return [
            name
            for name, cls in _classes().items()
            if choice in cls.choices() and self._first(cls) is not None
        ]

    def first(self, choice: str, name: str) -> Data:
        """The member with its defaults, and what it requires as the zoo has it.

        Args:
            choice: one of the six.
            name: of the member.

        Raises:
            RecipeError: the choice has no such member, or it cannot be made without code.
        """
        cls = _classes().get(name)
        data = None if cls is None or choice not in cls.choices() else self._first(cls)
        if data is None:
            raise RecipeError(f"{choice} has no knob {name!r}; it has {self.members(choice)}")
        return data

    def _first(self, cls: type[Member]) -> Data | None:
        data: Data = {"member": registered_name(cls)}
        for field in dataclasses.fields(cls):  # type: ignore[arg-type]
            missing = dataclasses.MISSING
            if field.default is missing and field.default_factory is missing:
                rule = field_spec(field)
                recorded = self._seen.get((registered_name(cls), field.name), [])
                if not recorded and (rule is None or rule.kind != "integer"):
                    return None  # the name of code of the user's
                data[field.name] = recorded[0] if recorded else _REQUIRED_SIZE
        try:
            return decode(data).to_dict()
        except RecipeError:  # a member of the user's whose sizes begin elsewhere
            return None

    def defaults(self, name: str) -> Data:
        """Fields of a member that need not be given, with what they then hold.

        Args:
            name: of the member.
        """
        cls = _classes()[name]
        data, missing = self._first(cls) or {}, dataclasses.MISSING
        return {
            field.name: data[field.name]
            for field in dataclasses.fields(cls)  # type: ignore[arg-type]
            if (field.default, field.default_factory) != (missing, missing) and data
        }

    def values(self, name: str, field: str) -> list[Any]:
        """What a field of a member may be turned to, as plain data; at least its default.

        Args:
            name: of the member. field: of the member.
        """
        cls = _classes()[name]
        (declared,) = (x for x in dataclasses.fields(cls) if x.name == field)  # type: ignore[arg-type]
        first = self._first(cls) or {}
        settings: list[Any] = [first[field]] if field in first else []
        rule, recorded = quantity_of(declared), self._seen.get((name, field), [])
        if rule is not None:
            settings += [*rule.sources, *recorded]
            if all(isinstance(x, str) for x in settings) and rule.range.contains(rule.init):
                settings.append(rule.init)  # a constant, too
        else:
            spec = field_spec(declared)
            if spec is not None:
                settings += [None] * spec.optional
                settings += {"option": [*spec.choices], "flag": [False, True]}.get(spec.kind, [])
            settings += recorded
            sizes = [] if spec is None or spec.kind != "integer" else _distinct(settings)
            if len(sizes) == 1 and sizes[0] is not None:
                settings.append(max(1, 2 * sizes[0]))
        return _distinct(settings)

    def near(self, data: Data) -> Iterator[tuple[str, Data]]:
        """Settings of the same member that differ in one field: the field's name, and the data.

        Args:
            data: of a member.
        """
        for field, value in data.items():
            if field == "member":
                continue
            for other in self.values(data["member"], field):
                if key_of(other) != key_of(value):
                    yield field, {**data, field: other}

    def fields(self, name: str) -> list[tuple[str, list[Any]]]:
        """Fields of a member that can be turned, with their values.

        Args:
            name: of the member.
        """
        cls = _classes()[name]
        found = [(x.name, self.values(name, x.name)) for x in dataclasses.fields(cls)]  # type: ignore[arg-type]
        return [(field, values) for field, values in found if len(values) > 1]


def _classes() -> dict[str, type[Member]]:
    """Every registered member class by its name in saved data."""
    return {registered_name(cls): cls for cls in all_members()}


def _distinct(values: Iterable[Any]) -> list[Any]:
    """Without repetitions, in order."""
    return list({key_of(value): value for value in values}.values())


def summary(name: str) -> str:
    """The first sentence of a member's docstring, without the markup.

    Args:
        name: of the member.
    """
    text = inspect.getdoc(_classes()[name]) or ""
    return text.split("\n\n")[0].replace("\n", " ").replace("``", "").replace("`", "")
