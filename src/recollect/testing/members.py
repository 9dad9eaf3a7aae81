"""The contract of a member: data, true declarations, quantities that are used, valid recipes."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from recollect.choices.member import Member
from recollect.fields import Gate, Param
from recollect.messages import RecipeError
from recollect.recipe.recipe import CHOICES, Recipe
from recollect.testing.compare import (
    describe_check,
    describe_failure,
    relative_error,
    require,
    run_recall,
)
from recollect.testing.declared import (
    check_data,
    check_fields,
    check_keywords,
    check_numbers,
    qualified_name,
)
from recollect.testing.draws import Pool, parts_of, variants
from recollect.testing.engines import check_agrees, scale_if_divergent, supported_engines
from recollect.testing.inputs import Inputs, is_ill_posed, small_inputs
from recollect.testing.recipes import ENGINE_TOLERANCE, Result, check_recipe
from recollect.testing.structure import check_structure

__all__ = ["Check", "MemberReport", "check_member", "check_numbers_are_read"]

MAX_DRAWS = 600
"""Number of random recipes with a member."""

MIN_RECIPES = 3
"""Number of recipes with a quantity after which it counts as unused."""

MAX_RECIPES = 6
"""Number of recipes in which each entry of a quantity is changed separately."""


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
    """Check a member like those of the library.

    The member is data: frozen, hashable, equal after JSON, with a sentence for each value that it
    refuses. Its declarations (`affine`, `linear`, `has_link`, `recursion`, ...) are true in
    float64, because engines rely on them. Each of its quantities is used, with each entry along
    its axes. Random recipes with the member pass all checks of recipes, and each engine that
    accepts one equals the reference in outputs, state and all gradients. Takes seconds.

    Args:
        cls: class of the member, decorated with `recollect.member`.
        recipes: further recipes with the member, if random ones are not enough.
        count: number of random recipes.
        also: further members of yours for its slots and its recipes.

    Returns:
        The checks that passed, and those that do not apply with the reason. Its ``str`` is a table.

    Raises:
        AssertionError: a check fails; one sentence that names the member.
        RecipeError: it is no member.

    Example:
        >>> import recollect as rc
        >>> report = rc.testing.check_member(rc.bias.L2, count=2)
        >>> {check.skipped for check in report.checks if check.name.startswith("affine")}
        {None}
    """
    is_member = isinstance(cls, type) and issubclass(cls, Member)
    if not is_member or "__dataclass_fields__" not in cls.__dict__:
        raise RecipeError(
            f"check_member takes the class of a member, decorated with @rc.member, not {cls!r}"
        )
    name, pool, checks = qualified_name(cls), Pool(extra_members=(cls, *also)), list[Check]()

    def add(subject: str, results: Sequence[Result]) -> None:
        checks.extend(Check(name=x, subject=subject, skipped=reason) for x, reason in results)

    for check in (check_data, check_keywords, check_fields):
        with describe_failure(name, name):
            check(cls, pool)
        add(name, [(describe_check(check), None)])
    for instance in variants(cls, 8, pool):
        subject = f"{cls.choice}.{instance.brief}"
        with describe_failure(subject, name):
            check_numbers(instance)
            add(subject, [(describe_check(check_numbers), None), *check_structure(instance)])
    draws = [*itertools.islice(pool.recipes_with(cls, MAX_DRAWS), max(count, 2 * MIN_RECIPES))]
    for recipe in recipes:
        has_member = any(type(part) is cls for part in parts_of(recipe))
        require(has_member, f"{name} stands nowhere in the given {_brief(recipe)}")
    require(
        draws or recipes,
        f"{name} stands in no valid recipe among {MAX_DRAWS} draws: hand recipes=[...] that hold "
        "it, or refuse less in requires",
    )
    add(name, check_numbers_are_read(cls, [*recipes, *draws], pool))
    for index, recipe in enumerate([*recipes, *draws[:count]]):
        subject = f"{name} in {_brief(recipe)}"
        with describe_failure(subject, name):
            add(subject, check_recipe(recipe, index))
            if not is_ill_posed(recipe):
                add(subject, _check_engines(recipe, index))
    return MemberReport(member=name, checks=tuple(checks))


def _check_engines(recipe: Recipe, index: int) -> list[Result]:
    """Check that every engine that accepts a recipe agrees with the reference."""
    x, checks = scale_if_divergent(recipe, small_inputs(recipe, index)), list[Result]()
    for engine, reason in supported_engines(recipe):
        if reason is None:
            check_agrees(recipe, x, engine, ENGINE_TOLERANCE, chunk_size=2 + index % 4)
        checks.append((f"engine {engine} agrees with the reference", reason))
    return checks


def _brief(recipe: Recipe) -> str:
    """Return the members of a recipe that differ from the defaults."""
    members = zip(CHOICES, recipe.members(), Recipe().members(), strict=True)
    texts = [f"{name}={part.brief}" for name, part, default in members if part != default]
    return f"Recipe({', '.join(texts)})"


@dataclass
class _Quantity:
    """Observations of one gate or param."""

    axes: tuple[str, ...]  # declared axes
    num_recipes: int = 0  # number of recipes with it
    affects_output: bool = False  # whether an output changed with it
    num_axes: int = 0  # number of axes with several entries that were tried
    num_distinct: int = 0  # number of them along which each entry matters

    @property
    def is_decided(self) -> bool:
        """Whether there are enough observations."""
        return self.affects_output and (not self.axes or self.num_axes >= MAX_RECIPES)


def check_numbers_are_read(
    cls: type[Member], recipes: Sequence[Recipe], pool: Pool | None = None
) -> list[Result]:
    """Check that each gate and param of a member is used, with each entry along its axes.

    If the quantity changes, the outputs of the reference must change in at least one recipe. If it
    has axes, its entries are then changed one by one and rolled. Outputs must change in at least
    half of the recipes; in some recipes an entry may have no effect.

    Args:
        cls: class of the member.
        recipes: recipes with the member.
        pool: source of further recipes while a quantity occurs in few recipes.

    Returns:
        One check for each quantity, and the reason if it was skipped.

    Raises:
        AssertionError: a quantity that is unused, or whose axes are ignored.
    """
    quantities: dict[str, _Quantity] = {}
    more = pool.recipes_with(cls, MAX_DRAWS) if pool is not None else iter(())
    for index, recipe in enumerate(itertools.chain(recipes, more)):
        is_decided = all(quantity.is_decided for quantity in quantities.values())
        if index >= len(recipes) and (is_decided or index > 4 * MAX_RECIPES):
            break
        items = {item.name: item for item in _declared_quantities(cls, recipe)}
        if all(name in quantities and quantities[name].is_decided for name in items):
            continue
        x = scale_if_divergent(recipe, small_inputs(recipe, index))
        y = _outputs(recipe, x)
        for name, item in items.items():
            _observe(quantities.setdefault(name, _Quantity(axes=item.axes)), recipe, x, y, item)
    checks: list[Result] = []
    for name, quantity in quantities.items():
        check, declares = f"the quantity {name} changes outputs", f"{qualified_name(cls)} declares"
        if quantity.num_recipes < MIN_RECIPES and not quantity.affects_output:
            checks.append((check, f"only {quantity.num_recipes} of the recipes have it"))
            continue
        checks.append((check, None))
        require(
            quantity.affects_output,
            f"{declares} the quantity {name!r}, and nothing reads it: no output changes with it",
        )
        require(
            2 * quantity.num_distinct >= quantity.num_axes,
            f"{declares} the quantity {name!r} with axes {quantity.axes}, and ignores them: no "
            "output changes when its entries change places or one by one",
        )
    return checks


def _declared_quantities(cls: type[Member], recipe: Recipe) -> Iterator[Gate | Param]:
    """Iterate over gates and params of the members of a class, without those of their parts."""
    for part in parts_of(recipe):
        if type(part) is cls:
            of_parts = {item.name for x in part.parts() for item in (*x.gates(), *x.params())}
            items = (*part.gates(), *part.params())
            yield from (item for item in items if item.name not in of_parts)


def _outputs(recipe: Recipe, x: Inputs) -> Tensor:
    with torch.no_grad():
        return run_recall(recipe, x, engine="reference")[0]


def _observe(quantity: _Quantity, recipe: Recipe, x: Inputs, y: Tensor, item: Gate | Param) -> None:
    """Change a quantity in one recipe, and record whether outputs change."""
    key = f"{'gate' if isinstance(item, Gate) else 'param'} {item.name}"
    value = x.tensors()[key]
    quantity.num_recipes += 1

    def output_error(changed: Tensor) -> float:
        # Equal operations on equal numbers are equal to the last bit.
        return relative_error(_outputs(recipe, x.replace_tensors({key: changed})), y)

    # Move towards the initial value, which stays in the range. A quantity that only selects (the
    # best blocks) may then have no effect, so use the values of other tokens.
    other = value + 0.3 * (torch.tensor(item.init, dtype=value.dtype) - value)
    if output_error(other) == 0.0 and isinstance(item, Gate):
        other = value.flip(1)
    if output_error(other) == 0.0:
        return
    quantity.affects_output = True
    learned = {name for part in recipe.members() for name in part.learned_quantities()}
    for axis in range(value.dim() - len(item.axes), value.dim()):
        size = value.shape[axis]
        if size == 1:
            continue
        quantity.num_axes += 1
        num_affecting = 0
        for j in range(size):
            changed = value.clone()
            changed.narrow(axis, j, 1).copy_(other.narrow(axis, j, 1))
            num_affecting += output_error(changed) != 0.0
        # Permuting entries must change the output: a mean over the axis would not notice, except
        # by rounding. Params of a map are skipped, since they may be symmetric.
        differs = True
        if isinstance(item, Gate) or item.name in learned:
            differs = not output_error(value.roll(1, axis)) < 1e-10
        quantity.num_distinct += num_affecting == size and differs
