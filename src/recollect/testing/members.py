"""The contract of a member: data, true declarations, numbers that are read, recipes that run."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from recollect.choices.member import Member
from recollect.engines.select import ENGINES
from recollect.fields import Gate, Param
from recollect.messages import RecipeError
from recollect.recipe.recipe import CHOICES, Recipe
from recollect.testing.compare import error, label, require, run
from recollect.testing.declared import (
    check_data,
    check_fields,
    check_keywords,
    check_numbers,
    named,
)
from recollect.testing.draws import Pool, parts_of, variants
from recollect.testing.engines import agree, tame
from recollect.testing.inputs import Inputs, ill_posed, small_inputs
from recollect.testing.recipes import ENGINE, check_recipe
from recollect.testing.structure import check_structure

__all__ = ["Check", "MemberReport", "check_member", "check_numbers_are_read"]

Result = TypeVar("Result")

TRIES = 600
"""Draws of recipes that a member may need until enough of them are valid."""

FEW = 3
"""Recipes that must ask for a number before it is said that nothing reads it."""

ENOUGH = 6
"""Recipes in which each entry of a number is tried by itself."""


@dataclass(frozen=True, kw_only=True)
class Check:
    """One check of `check_member` that passed or was skipped.

    Attributes:
        name: the property that was checked.
        subject: the member, or the recipe with it, that was checked.
        skipped: reason for which the check does not apply; ``None`` if it passed.

    Examples:
        >>> import recollect as rc
        >>> rc.testing.Check(name="affine is true of error", subject="bias.L2()").skipped is None
        True
    """

    name: str
    subject: str
    skipped: str | None = None


@dataclass(frozen=True, kw_only=True, repr=False)
class MemberReport:
    """Result of `check_member`: the checks that passed, and those that were skipped.

    Attributes:
        member: the member's name.
        checks: every check, in the order in which they were made.

    Examples:
        >>> import recollect as rc
        >>> report = rc.testing.check_member(rc.bias.DotProduct, count=1)
        >>> report.member, report.passed[0].name[:32], len(report.skipped) > 0
        ('bias.DotProduct', 'Members are frozen, hashable dat', True)
        >>> print(str(report)[:23])
        bias.DotProduct: passed
    """

    member: str
    checks: tuple[Check, ...]

    @property
    def passed(self) -> tuple[Check, ...]:
        """Checks that passed."""
        return tuple(check for check in self.checks if check.skipped is None)

    @property
    def skipped(self) -> tuple[Check, ...]:
        """Checks that do not apply, each with the reason."""
        return tuple(check for check in self.checks if check.skipped is not None)

    def __repr__(self) -> str:
        counts = f"{len(self.passed)} passed, {len(self.skipped)} skipped"
        return f"<MemberReport of {self.member}: {counts}>"

    def __str__(self) -> str:
        passed = Counter(check.name for check in self.passed)
        lines = [f"{self.member}: passed {len(self.passed)} checks"]
        lines += [f"{count:5} × {name}" for name, count in passed.items()]
        lines.append(f"skipped {len(self.skipped)} checks")
        for name, count in Counter(check.name for check in self.skipped).items():
            reasons = Counter(check.skipped for check in self.skipped if check.name == name)
            reason, _ = reasons.most_common(1)[0]
            others = f" (and {len(reasons) - 1} more)" if len(reasons) > 1 else ""
            lines.append(f"{count:5} × {name}: {reason}{others}")
        return "\n".join(lines)


def check_member(
    cls: type[Member],
    *,
    recipes: Sequence[Recipe] = (),
    count: int = 10,
    also: Sequence[type[Member]] = (),
) -> MemberReport:
    """Hold a member of anybody's package to what the library's own are held to.

    It is data: frozen, hashable, the same after JSON, with a sentence for every value it refuses.
    What it declares is true, numerically, in float64: `affine`, `linear`, a `chain`, `has_link`,
    `recursion`, `is_positive_definite` and the rest, because engines run what is declared.
    Every number that it declares is read, each entry along its axes by itself. And ``count``
    recipes with it, drawn with the library's members in the other choices, keep every promise: the
    same split anywhere, masked and packed; gradients that are slopes; every engine that accepts it
    equal to the reference in outputs, state and all gradients. Takes seconds.

    Args:
        cls: the member's class, decorated with `recollect.member`.
        recipes: more recipes that hold it, for what random draws would not find.
        count: how many recipes are drawn.
        also: further members of yours that its slots and its recipes may be filled with.

    Returns:
        The checks that passed, and those that do not apply with the reason. Its ``str`` is a table.

    Raises:
        AssertionError: what is false, in one sentence that names the member.
        RecipeError: it is no member.

    Example:
        >>> import recollect as rc
        >>> report = rc.testing.check_member(rc.bias.L2, count=2)
        >>> {check.skipped for check in report.checks if check.name.startswith("affine")}
        {None}
    """
    if not (isinstance(cls, type) and issubclass(cls, Member)) or "__dataclass_fields__" not in (
        cls.__dict__
    ):
        raise RecipeError(
            f"check_member takes the class of a member, decorated with @rc.member, not {cls!r}"
        )
    pool, checks = Pool(also=(cls, *also)), list[Check]()

    def add(subject: str, results: Sequence[tuple[str, str | None]]) -> None:
        checks.extend(Check(name=n, subject=subject, skipped=reason) for n, reason in results)

    for check in (check_data, check_keywords, check_fields):
        _naming(named(cls), lambda check=check: check(cls, pool))
        add(named(cls), [(label(check), None)])
    for instance in variants(cls, 8, pool):
        subject = f"{cls.choice}.{instance.brief}"
        _naming(instance.title, lambda instance=instance: check_numbers(instance))
        add(subject, [(label(check_numbers), None)])
        add(subject, _naming(subject, lambda instance=instance: check_structure(instance)))
    drawn = list(itertools.islice(pool.holding(cls, TRIES), max(count, 2 * FEW)))
    for recipe in recipes:
        held = any(type(part) is cls for part in parts_of(recipe))
        require(held, f"{named(cls)} stands nowhere in the given {_brief(recipe)}")
    require(
        drawn or recipes,
        f"{named(cls)} stands in no valid recipe among {TRIES} draws: hand recipes=[...] that hold "
        "it, or refuse less in requires",
    )
    add(named(cls), check_numbers_are_read(cls, [*recipes, *drawn], pool))
    for index, recipe in enumerate([*recipes, *drawn[:count]]):
        where = f"{named(cls)} in {_brief(recipe)}"
        add(where, _naming(where, lambda recipe=recipe, i=index: check_recipe(recipe, i)))
        if not ill_posed(recipe):
            add(where, _naming(where, lambda recipe=recipe, i=index: _engines(recipe, i)))
    return MemberReport(member=named(cls), checks=tuple(checks))


def _engines(recipe: Recipe, index: int) -> list[tuple[str, str | None]]:
    """Check that every engine that accepts a recipe agrees with the reference."""
    x, checks = tame(recipe, small_inputs(recipe, index)), list[tuple[str, str | None]]()
    for engine in ENGINES:
        if engine.name != "reference":
            reasons = engine.unsupported_reasons(recipe)
            if not reasons:
                agree(recipe, x, engine.name, ENGINE, chunk_size=2 + index % 4)
            reason = "; ".join(reasons) or None
            checks.append((f"engine {engine.name} agrees with the reference", reason))
    return checks


def _brief(recipe: Recipe) -> str:
    plain = Recipe()
    said = [
        f"{name}={part.brief}"
        for name, part, usual in zip(CHOICES, recipe.members(), plain.members(), strict=True)
        if part != usual
    ]
    return f"Recipe({', '.join(said)})"


def _naming(what: str, check: Callable[[], Result]) -> Result:
    """Run a check; whatever it raises becomes an AssertionError that names the member."""
    try:
        return check()
    except Exception as problem:
        said = " ".join(str(problem).split()) or "an assertion fails"
        if not isinstance(problem, AssertionError):
            said = f"{type(problem).__name__}: {said}"
        elif what.partition("(")[0].partition(" ")[0] in said:
            raise
        raise AssertionError(f"{what}: {said}") from problem


# -- numbers are read --------------------------------------------------------------------------


@dataclass
class _Number:
    """What was seen of one number.

    Attributes:
        axes: as it declares them.
        recipes: how many asked for it.
        moves: whether an output changed with it.
        wide: axes of more than one entry, in recipes where it did.
        told: how many of those had each entry matter by itself.
    """

    axes: tuple[str, ...]
    recipes: int = 0
    moves: bool = False
    wide: int = 0
    told: int = 0

    @property
    def settled(self) -> bool:
        """Whether enough was seen."""
        return self.moves and (not self.axes or self.wide >= ENOUGH)


def check_numbers_are_read(
    cls: type[Member], recipes: Sequence[Recipe], pool: Pool | None = None
) -> list[tuple[str, str | None]]:
    """Every gate and param that a member declares matters, and along its axes each entry does.

    A number is changed, and the outputs of the reference must change, in at least one recipe. One
    with axes is then changed one entry at a time, and its entries are moved on by one place: where
    an entry does not matter, or the outputs stay, axes are declared and not used. In some recipes
    an entry may have nothing to act on, so that holds in half of them.

    Args:
        cls: the member's class.
        recipes: that hold it.
        pool: where further recipes come from while a number was asked for only a few times.

    Returns:
        One check for each number, and the reason if it was skipped.

    Raises:
        AssertionError: the number that nothing reads, or the axes that are ignored.
    """
    numbers: dict[str, _Number] = {}

    further = pool.holding(cls, TRIES) if pool is not None else iter(())
    for index, recipe in enumerate(itertools.chain(recipes, further)):
        if index >= len(recipes) and (
            all(number.settled for number in numbers.values()) or index > 4 * ENOUGH
        ):
            break
        asked = {item.name: item for item in _asked(cls, recipe)}
        if all(name in numbers and numbers[name].settled for name in asked):
            continue
        x = tame(recipe, small_inputs(recipe, index))
        y = _outputs(recipe, x)
        for name, item in asked.items():
            _try(numbers.setdefault(name, _Number(axes=item.axes)), recipe, x, y, item)
    checks: list[tuple[str, str | None]] = []
    for name, number in numbers.items():
        check = f"the quantity {name} changes outputs"
        if number.recipes < FEW and not number.moves:
            checks.append((check, f"only {number.recipes} of the recipes have it"))
            continue
        checks.append((check, None))
        require(
            number.moves,
            f"{named(cls)} declares the quantity {name!r}, and nothing reads it: no output changes "
            "with it",
        )
        require(
            2 * number.told >= number.wide,
            f"{named(cls)} declares the quantity {name!r} with axes {number.axes}, and ignores "
            "them: no output changes when its entries change places or one by one",
        )
    return checks


def _asked(cls: type[Member], recipe: Recipe) -> Iterator[Gate | Param]:
    """Gates and params that the members of a class in a recipe ask for themselves."""
    for part in parts_of(recipe):
        if type(part) is cls:
            inside = {item.name for held in part.parts() for item in _needs(held)}
            yield from (item for item in _needs(part) if item.name not in inside)


def _needs(part: Member) -> tuple[Gate | Param, ...]:
    return (*part.gates(), *part.params())


def _outputs(recipe: Recipe, x: Inputs) -> Tensor:
    with torch.no_grad():
        return run(recipe, x, engine="reference")[0]


def _try(number: _Number, recipe: Recipe, x: Inputs, y: Tensor, item: Gate | Param) -> None:
    """Change a number in one recipe, and note whether outputs follow."""
    key = f"{'gate' if isinstance(item, Gate) else 'param'} {item.name}"
    value = x.tensors()[key]
    number.recipes += 1

    def matters(changed: Tensor) -> bool:
        # The same operations on the same numbers are the same to the last bit.
        return error(_outputs(recipe, x.put({key: changed})), y) != 0.0

    # Towards where it starts to be learned: inside of its range, which is an interval. What only
    # chooses (the best blocks) may stay; then the numbers of other tokens.
    other = value + 0.3 * (torch.tensor(item.init, dtype=value.dtype) - value)
    if not matters(other) and isinstance(item, Gate):
        other = value.flip(1)
    if not matters(other):
        return
    number.moves = True
    for axis in range(value.dim() - len(item.axes), value.dim()):
        size = value.shape[axis]
        if size == 1:
            continue
        number.wide += 1
        alone = 0
        for j in range(size):
            changed = value.clone()
            changed.narrow(axis, j, 1).copy_(other.narrow(axis, j, 1))
            alone += matters(changed)
        # A mean sees every entry, and not which is which; its rounding may. A param of a map's own
        # may be symmetric.
        channels = isinstance(item, Gate) or item.name in {
            n for part in recipe.members() for n in part.learned_quantities()
        }
        rolled = x.put({key: value.roll(1, axis)}) if channels else None
        apart = rolled is None or not error(_outputs(recipe, rolled), y) < 1e-10
        number.told += alone == size and apart
