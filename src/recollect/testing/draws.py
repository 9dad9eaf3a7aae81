"""Random members and recipes, drawn from the declarations of fields.

A member is drawn by its declared fields (options, flags, numbers, quantities, slots) only. Draws
depend only on their seed and on the pool of members.
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

__all__ = ["FACTORY", "Pool", "parts_of", "slots_accepting", "variants"]

FACTORY = "recollect.testing.two_layers"
"""Name of the module in draws of members that need one."""


@module_factory(FACTORY)
def two_layers(inputs: int, outputs: int) -> nn.Module:
    """Return the module in draws of members that need one."""
    return nn.Sequential(nn.Linear(inputs, 3), nn.Tanh(), nn.Linear(3, outputs, bias=False))


def _number(rng: random.Random, interval: Range, scale: float) -> float:
    """Return a number at a distance of about ``scale`` from an end, or sometimes a closed end."""
    low, high = interval.low, interval.high
    ends = [end for end, is_open in ((low, interval.low_open), (high, interval.high_open))
            if end is not None and not is_open]  # fmt: skip
    if ends and rng.random() < 0.15:
        return float(rng.choice(ends))
    if low is not None and high is not None:
        return low + (0.05 + 0.9 * rng.random()) * (high - low)
    if low is not None:
        return low + scale * (0.2 + rng.random() ** 2)
    if high is not None:
        return high - scale * (0.2 + rng.random() ** 2)
    return rng.gauss(0.0, 0.5)


@dataclass(frozen=True, kw_only=True)
class Pool:
    """Members of which recipes are drawn: those of the library, and ``extra_members``.

    Other registered members are left out unless ``all_registered`` is true, so that draws do not
    depend on imported modules.
    """

    extra_members: tuple[type[Member], ...] = ()
    all_registered: bool = False

    def contains(self, cls: type[Member]) -> bool:
        """Whether a member may be drawn."""
        is_library = cls.__module__.startswith("recollect.")
        return self.all_registered or is_library or cls in self.extra_members

    def members(self, choice: str) -> list[type[Member]]:
        """Return the members of a choice (or ``"read"``, ``"probe"``), by name."""
        members = [c for c in all_members() if self.contains(c) and choice in c.choices()]
        return sorted(members, key=lambda c: c.__name__)

    def _value(self, rng: random.Random, field: dataclasses.Field[Any], depth: int) -> Any:
        """Return a value that the field accepts by its declaration."""
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
            # The owner may refuse members of the kind of its slot.
            try:
                return self.member(rng, rng.choice(choices), depth + 1)
            except RecipeError:
                continue
        return field.default

    def member(self, rng: random.Random, cls: type[Member], depth: int = 0) -> Member:
        """Return a member with random fields.

        Args:
            rng: source of randomness.
            cls: class of the member.
            depth: number of members around it; deep members keep their defaults.

        Raises:
            RecipeError: the fields contradict each other.
        """
        values: dict[str, Any] = {}
        for field in dataclasses.fields(cls):  # type: ignore[arg-type]
            required = field.default is dataclasses.MISSING
            if required or (depth < 3 and rng.random() < 0.6):
                values[field.name] = self._value(rng, field, depth)
        return cls(**values)

    def recipe(self, index: int, seed: int = 0) -> Recipe:
        """Return the recipe with an index.

        Raises:
            RecipeError: its choices contradict each other.
        """
        rng = random.Random(1_000_003 * seed + index)
        choices = self._random_choices(rng, 0.6)
        if rng.random() < 0.5:
            choices = self.repair_by_hints(rng, choices)
        return Recipe(**choices)

    def _random_choices(
        self, rng: random.Random, share: float, fixed: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Return a share of the choices with random members, besides fixed ones."""
        choices = dict(fixed or {})
        for name in CHOICES:
            if name not in choices and rng.random() < share:
                choices[name] = self.member(rng, rng.choice(self.members(name)))
        return choices

    def valid(self, count: int, seed: int = 0) -> Iterator[tuple[int, Recipe]]:
        """Iterate over the first ``count`` valid recipes, with their indices."""
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

    def recipes_with(self, cls: type[Member], tries: int) -> Iterator[Recipe]:
        """Iterate over different valid recipes with a member, also in a slot of another member."""
        rng = random.Random(f"recipes with {cls.__name__}")
        recipes: set[Recipe] = set()
        slots: list[tuple[type[Member], str] | None] = [
            *slots_accepting(cls),
            *[None] * (2 if cls.choices() & set(CHOICES) else 0),
        ]
        for _ in range(tries):
            try:
                recipe = self._recipe_with(rng, cls, rng.choice(slots))
            except RecipeError:
                continue
            if recipe not in recipes and any(type(part) is cls for part in parts_of(recipe)):
                recipes.add(recipe)
                yield recipe

    def _recipe_with(
        self, rng: random.Random, cls: type[Member], slot: tuple[type[Member], str] | None
    ) -> Recipe:
        member = self.member(rng, cls)
        if slot is not None:
            owner, name = slot
            (field,) = (f for f in dataclasses.fields(owner) if f.name == name)  # type: ignore[arg-type]
            rule = field_spec(field)
            value = (member,) if rule is not None and rule.is_tuple else member
            member = dataclasses.replace(self.member(rng, owner), **{name: value})  # type: ignore[type-var]
        (choice,) = member.choices() & set(CHOICES)
        choices = self._random_choices(rng, 0.35, {choice: member})
        return Recipe(**self.repair_by_hints(rng, choices, fixed=choice))

    def repair_by_hints(
        self, rng: random.Random, choices: dict[str, Any], *, fixed: str = ""
    ) -> dict[str, Any]:
        """Return the choices with members that error messages suggest: some need each other.

        The choice ``fixed`` is not replaced.
        """
        for _ in range(5):
            try:
                Recipe(**choices)
            except RecipeError as error:
                hints = re.findall(rf"({'|'.join(CHOICES)})\.([A-Z]\w*)\(", str(error))
                for choice, name in hints:
                    cls = next((c for c in self.members(choice) if c.__name__ == name), None)
                    if cls is not None and choice != fixed and rng.random() < 0.7:
                        choices = {**choices, choice: self.member(rng, cls)}
            else:
                break
        return choices


def slots_accepting(cls: type[Member]) -> list[tuple[type[Member], str]]:
    """Return the members of the library with a slot for a member, and the names of the slots."""
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
    """Return up to ``count`` different valid members of a class, equal in each call.

    Args:
        cls: class of the members.
        count: maximum number of members.
        pool: members for its slots; those of the library by default.

    Raises:
        AssertionError: no draw is valid.
    """
    rng, pool = random.Random(cls.__name__), pool or Pool()
    members: list[Member] = []
    reason = ""
    for _ in range(50 * count):
        if len(members) == count:
            break
        try:
            member = pool.member(rng, cls)
        except RecipeError as error:
            reason = str(error)
            continue
        if member not in members:
            members.append(member)
    if not members:
        raise AssertionError(
            f"{cls.choice}.{cls.__name__} refuses every draw of values that its fields declare, "
            f"the last with: {reason}"
        )
    return members


def parts_of(recipe: Recipe) -> Iterator[Member]:
    """Iterate over the members of a recipe, and over their parts."""
    pending: list[Member] = list(recipe.members())
    while pending:
        part = pending.pop()
        yield part
        pending += part.parts()
