"""Settings of the members of the six choices, one field at a time.

A *setting* is a member with all its fields. Every registered member is a setting with its defaults.
Further settings come from the recipes of the zoo, and differ from either in one field.
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

__all__ = ["Data", "Knobs", "canonical_json", "summary"]

Data = dict[str, Any]
"""A member, or a recipe, as plain data."""

_REQUIRED_SIZE = 4
"""Value of a size without a default that no recipe of the zoo gives."""


def canonical_json(data: object) -> str:
    """Return plain data as text; equal data give equal text."""
    return json.dumps(_as_javascript(data), sort_keys=True, ensure_ascii=False, allow_nan=False)


def _as_javascript(data: Any) -> Any:
    """Return data as JavaScript reads it: 1.0 is 1."""
    if isinstance(data, dict):
        return {name: _as_javascript(value) for name, value in data.items()}
    if isinstance(data, list | tuple):
        return [_as_javascript(value) for value in data]
    return int(data) if isinstance(data, float) and data.is_integer() else data


class Knobs:
    """Members of the six choices and the values of their fields.

    Args:
        recipes: Recipes whose numbers, sizes and nested members become values.

    Examples:
        >>> from recollect.page.knobs import Knobs
        >>> knobs = Knobs([rc.Recipe(context=rc.context.Window(size=8))])
        >>> knobs.default_member("context", "Window")
        {'member': 'Window', 'size': 8, 'gated': True}
        >>> knobs.values("Decay", "when")
        ['after', 'before']
    """

    def __init__(self, recipes: Iterable[Recipe]) -> None:
        self._recorded: dict[tuple[str, str], list[Any]] = {}
        for recipe in recipes:
            for choice in CHOICES:
                self._collect(getattr(recipe, choice))

    def _collect(self, member: Member) -> None:
        data = member.to_dict()
        for field in _fields(type(member)):
            values = self._recorded.setdefault((data["member"], field.name), [])
            if data[field.name] not in values:
                values.append(data[field.name])
        for part in member.parts():
            self._collect(part)

    def members(self, choice: str) -> list[str]:
        """Return the names of a choice's members that need no code of the user."""
        return [
            name
            for name, cls in _classes().items()
            if choice in cls.choices() and self._make_default(cls) is not None
        ]

    def default_member(self, choice: str, name: str) -> Data:
        """Return a member with its defaults, and required fields as in the zoo.

        Raises:
            RecipeError: The choice has no such member, or the member needs code.
        """
        cls = _classes().get(name)
        data = None if cls is None or choice not in cls.choices() else self._make_default(cls)
        if data is None:
            raise RecipeError(f"{choice} has no knob {name!r}; it has {self.members(choice)}")
        return data

    def _make_default(self, cls: type[Member]) -> Data | None:
        name = registered_name(cls)
        data: Data = {"member": name}
        for field in _fields(cls):
            if _is_required(field):
                rule, recorded = field_spec(field), self._recorded.get((name, field.name), [])
                if not recorded and (rule is None or rule.kind != "integer"):
                    return None  # the name of the user's code
                data[field.name] = recorded[0] if recorded else _REQUIRED_SIZE
        try:
            return decode(data).to_dict()
        except RecipeError:  # a member of the user whose sizes have a larger minimum
            return None

    def defaults(self, name: str) -> Data:
        """Return the fields of a member that have a default, with their defaults."""
        cls = _classes()[name]
        data = self._make_default(cls) or {}
        return {
            field.name: data[field.name]
            for field in _fields(cls)
            if data and not _is_required(field)
        }

    def values(self, name: str, field: str) -> list[Any]:
        """Return the values of a field of a member as plain data, the default first."""
        cls = _classes()[name]
        (declared,) = (x for x in _fields(cls) if x.name == field)
        default = self._make_default(cls) or {}
        values: list[Any] = [default[field]] if field in default else []
        rule, recorded = quantity_of(declared), self._recorded.get((name, field), [])
        if rule is not None:
            values += [*rule.sources, *recorded]
            if all(isinstance(x, str) for x in values) and rule.range.contains(rule.init):
                values.append(rule.init)  # a constant
            return _distinct(values)
        spec = field_spec(declared)
        if spec is not None:
            values += [None] * spec.optional
            values += {"option": [*spec.choices], "flag": [False, True]}.get(spec.kind, [])
        values += recorded
        if spec is not None and spec.kind == "integer":
            sizes = _distinct(values)
            if len(sizes) == 1 and sizes[0] is not None:
                values.append(max(1, 2 * sizes[0]))
        return _distinct(values)

    def one_field_variants(self, data: Data) -> Iterator[tuple[str, Data]]:
        """Yield settings of a member that differ in one field: the field's name, and the data."""
        for field, value in data.items():
            if field == "member":
                continue
            for other in self.values(data["member"], field):
                if canonical_json(other) != canonical_json(value):
                    yield field, {**data, field: other}

    def fields(self, name: str) -> list[tuple[str, list[Any]]]:
        """Return the fields of a member that have several values, with their values."""
        names = [field.name for field in _fields(_classes()[name])]
        values = [(field, self.values(name, field)) for field in names]
        return [(field, options) for field, options in values if len(options) > 1]


def _fields(cls: type[Member]) -> tuple[dataclasses.Field[Any], ...]:
    return dataclasses.fields(cls)  # type: ignore[arg-type]


def _is_required(field: dataclasses.Field[Any]) -> bool:
    missing = dataclasses.MISSING
    return field.default is missing and field.default_factory is missing


def _classes() -> dict[str, type[Member]]:
    """Return every registered member class by its name in saved data."""
    return {registered_name(cls): cls for cls in all_members()}


def _distinct(values: Iterable[Any]) -> list[Any]:
    return list({canonical_json(value): value for value in values}.values())


def summary(name: str) -> str:
    """Return the first paragraph of a member's docstring, without the markup."""
    text = inspect.getdoc(_classes()[name]) or ""
    return text.split("\n\n")[0].replace("\n", " ").replace("``", "").replace("`", "")
