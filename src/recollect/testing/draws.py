"""Random members and recipes, drawn from what members declare of their fields.

A member is drawn by its declared fields (options, flags, numbers, quantities, slots) alone. Draws
depend only on their seed and on the pool of members that they are taken from.
"""

from __future__ import annotations

import dataclasses
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from recollect.choices.member import Member, all_members
from recollect.choices.memory.module import module_factory
from recollect.fields import Range, field_spec, quantity_of
from recollect.messages import RecipeError
from recollect.recipe.recipe import CHOICES, Recipe

__all__ = ["FACTORY", "Pool", "hosts", "parts_of", "variants"]

FACTORY = "recollect.testing.two_layers"
"""The name drawn where a member asks for a module."""


@module_factory(FACTORY)
def two_layers(inputs: int, outputs: int) -> nn.Module:
    """What is drawn where a member asks for a module."""
    return nn.Sequential(nn.Linear(inputs, 3), nn.Tanh(), nn.Linear(3, outputs, bias=False))


def _number(rng: random.Random, span: Range, reach: float) -> float:
    """A number not far (in units of ``reach``) from an end; now and then an end that belongs."""
    low, high = span.low, span.high
    ends = [end for end, is_open in ((low, span.low_open), (high, span.high_open))
            if end is not None and not is_open]  # fmt: skip
    if ends and rng.random() < 0.15:
        return float(rng.choice(ends))
    if low is not None and high is not None:
        return low + (0.05 + 0.9 * rng.random()) * (high - low)
    if low is not None:
        return low + reach * (0.2 + rng.random() ** 2)
    if high is not None:
        return high - reach * (0.2 + rng.random() ** 2)
    return rng.gauss(0.0, 0.5)


@dataclass(frozen=True, kw_only=True)
class Pool:
    """Members that recipes are drawn from: the library's own, and those of ``also``.

    Other registered members stay out, so that a draw does not depend on what else was imported.
    """

    also: tuple[type[Member], ...] = ()

    def holds(self, cls: type[Member]) -> bool:
        """Whether a member is drawn."""
        return cls.__module__.startswith("recollect.") or cls in self.also

    def members(self, choice: str) -> list[type[Member]]:
        """Members that fit a choice (or ``"read"``, ``"probe"``), by name."""
        fitting = [c for c in all_members() if self.holds(c) and choice in c.choices()]
        return sorted(fitting, key=lambda c: c.__name__)

    def _value(self, rng: random.Random, field: dataclasses.Field[Any], depth: int) -> Any:
        """A value that the field declares it would take."""
        rule = field_spec(field)
        if rule is None or rule.kind == "other":
            spec = quantity_of(field)
            if spec is None:
                return field.default
            if rng.random() < 0.3:
                return _number(rng, spec.range, 0.5)  # rates: a step of 2 diverges
            return rng.choice(spec.sources)
        if rule.optional and rng.random() < 0.4:
            return None
        if rule.kind == "integer":
            assert rule.range.low is not None
            return int(rule.range.low) + rng.choice((0, 0, 1, 1, 2, 3))
        if rule.kind == "number":
            return _number(rng, rule.range, 1.3)
        if rule.kind == "option":
            return rng.choice(rule.choices)
        if rule.kind == "flag":
            return rng.random() < 0.5
        if rule.kind == "text":
            return FACTORY if field.default is dataclasses.MISSING else field.default
        choices = self.members(rule.choices[0])
        if rule.is_tuple:
            return tuple(
                self.member(rng, rng.choice(choices), depth + 1)
                for _ in range(rng.choice((0, 1, 2)))
            )
        for _ in range(4):
            # A slot takes members of its kind that its owner may still refuse: try a few.
            try:
                return self.member(rng, rng.choice(choices), depth + 1)
            except RecipeError:
                continue
        return field.default

    def member(self, rng: random.Random, cls: type[Member], depth: int = 0) -> Member:
        """A member with random fields.

        Args:
            rng: where the numbers come from.
            cls: the member's class.
            depth: of members around it; deep ones keep their defaults.

        Raises:
            RecipeError: fields that contradict each other.
        """
        values: dict[str, Any] = {}
        for field in dataclasses.fields(cls):  # type: ignore[arg-type]
            required = field.default is dataclasses.MISSING
            if required or (depth < 3 and rng.random() < 0.6):
                values[field.name] = self._value(rng, field, depth)
        return cls(**values)

    def recipe(self, index: int, seed: int = 0) -> Recipe:
        """The recipe of that index.

        Raises:
            RecipeError: its choices contradict each other.
        """
        rng = random.Random(1_000_003 * seed + index)
        chosen: dict[str, Any] = {}
        for name in CHOICES:
            if rng.random() < 0.6:
                chosen[name] = self.member(rng, rng.choice(self.members(name)))
        if rng.random() < 0.5:
            chosen = self._advised(rng, chosen)
        return Recipe(**chosen)

    def valid(self, count: int, seed: int = 0) -> Iterator[tuple[int, Recipe]]:
        """The first ``count`` indices whose recipes are valid, with the recipes."""
        index = 0
        while count:
            try:
                recipe = self.recipe(index, seed)
            except RecipeError:
                pass
            else:
                count -= 1
                yield index, recipe
            index += 1

    def holding(self, cls: type[Member], tries: int) -> Iterator[Recipe]:
        """Different valid recipes that hold a member of ``cls``, itself or in another's slot.

        Args:
            cls: the member's class.
            tries: how many draws to make.
        """
        rng = random.Random(f"recipes with {cls.__name__}")
        seen: set[Recipe] = set()
        places: list[tuple[type[Member], str] | None] = [
            *hosts(cls),
            *[None] * (2 if cls.choices() & set(CHOICES) else 0),
        ]
        for _ in range(tries):
            try:
                recipe = self._around(rng, cls, rng.choice(places))
            except RecipeError:
                continue
            if recipe not in seen and any(type(part) is cls for part in parts_of(recipe)):
                seen.add(recipe)
                yield recipe

    def _around(
        self, rng: random.Random, cls: type[Member], host: tuple[type[Member], str] | None
    ) -> Recipe:
        current = self.member(rng, cls)
        if host is not None:
            owner, slot = host
            (field,) = (f for f in dataclasses.fields(owner) if f.name == slot)  # type: ignore[arg-type]
            rule = field_spec(field)
            members = (current,) if rule is not None and rule.is_tuple else current
            current = dataclasses.replace(self.member(rng, owner), **{slot: members})  # type: ignore[type-var]
        (place,) = current.choices() & set(CHOICES)
        chosen: dict[str, Any] = {place: current}
        for name in CHOICES:
            if name != place and rng.random() < 0.35:
                chosen[name] = self.member(rng, rng.choice(self.members(name)))
        return Recipe(**self._advised(rng, chosen, keep=place))

    def _advised(
        self, rng: random.Random, chosen: dict[str, Any], *, keep: str = ""
    ) -> dict[str, Any]:
        """Follow what refusals say would fit, a few times: some choices only stand together."""
        for _ in range(5):
            try:
                Recipe(**chosen)
            except RecipeError as error:
                advice = re.findall(rf"({'|'.join(CHOICES)})\.([A-Z]\w*)\(", str(error))
                for choice, name in advice:
                    cls = next((c for c in self.members(choice) if c.__name__ == name), None)
                    if cls is not None and choice != keep and rng.random() < 0.7:
                        chosen = {**chosen, choice: self.member(rng, cls)}
            else:
                break
        return chosen


def hosts(cls: type[Member]) -> list[tuple[type[Member], str]]:
    """The library's members of a choice with a slot that may hold ``cls``, and the slot's field."""
    library = Pool()
    return [
        (owner, field.name)
        for choice in CHOICES
        for owner in library.members(choice)
        for field in dataclasses.fields(owner)  # type: ignore[arg-type]
        if (rule := field_spec(field)) is not None
        and rule.kind == "slot"
        and rule.choices[0] in cls.choices()
    ]


def variants(cls: type[Member], count: int, pool: Pool | None = None) -> list[Member]:
    """Up to ``count`` different valid members of a class, always the same ones.

    Args:
        cls: the member's class.
        count: how many.
        pool: what its slots are filled from; the library's members when omitted.

    Raises:
        AssertionError: no draw is valid.
    """
    rng, pool = random.Random(cls.__name__), pool or Pool()
    made: list[Member] = []
    why = ""
    for _ in range(50 * count):
        if len(made) == count:
            break
        try:
            one = pool.member(rng, cls)
        except RecipeError as error:
            why = str(error)
            continue
        if one not in made:
            made.append(one)
    if not made:
        raise AssertionError(
            f"{cls.choice}.{cls.__name__} refuses every draw of values that its fields declare, "
            f"the last with: {why}"
        )
    return made


def parts_of(recipe: Recipe) -> Iterator[Member]:
    """The members of a recipe, and their members."""
    pending: list[Member] = list(recipe.members())
    while pending:
        part = pending.pop()
        yield part
        pending += part.parts()
