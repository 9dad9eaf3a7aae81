"""Checks that members are data, and that the declarations of their fields are true.

Each check raises AssertionError with one sentence that names the member and the false claim.
"""

from __future__ import annotations

import dataclasses
import json
import math

import torch
from torch import Tensor

from recollect.choices.member import Member, decode, get_member, registered_name
from recollect.fields import Gate, Range, field_spec, quantity_of
from recollect.messages import RecipeError
from recollect.recipe.recipe import CHOICES
from recollect.testing.compare import require
from recollect.testing.draws import Pool, variants

__all__ = [
    "MEMBER_KINDS",
    "ROUNDING",
    "check_data",
    "check_fields",
    "check_keywords",
    "check_numbers",
    "normal",
    "qualified_name",
    "require_equal",
]

ROUNDING = 1e-12
"""Bound of errors of one formula in float64."""

MEMBER_KINDS = (*CHOICES, "read", "probe")


def normal(*shape: int, seed: int = 0) -> Tensor:
    """Return standard normal numbers in float64 by a seed."""
    g = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=g, dtype=torch.float64)


def require_equal(
    result: Tensor, expected: Tensor, sentence: str, tolerance: float = ROUNDING
) -> None:
    """Raise AssertionError if entries differ by more than ``tolerance`` (1 + abs(expected)).

    ``{error}`` in the sentence is replaced by the largest difference.
    """
    error = math.inf
    if result.shape == expected.shape:
        difference = (result.detach() - expected.detach()).abs()
        bad = ~(difference <= tolerance * (1 + expected.detach().abs()))
        if not bad.any():
            return
        error = float(torch.where(difference.isnan(), math.inf, difference)[bad].max())
    raise AssertionError(sentence.replace("{error}", f"{error:.1e}"))


def qualified_name(cls: type[Member]) -> str:
    """Return the name of a member's class in messages, such as ``bias.L2``."""
    return f"{cls.choice}.{cls.__name__}"


def check_data(cls: type[Member], pool: Pool | None = None) -> None:
    """Members are frozen, hashable data that JSON gives back, registered, with a docstring."""
    name = qualified_name(cls)
    is_registered = get_member(registered_name(cls), cls.choice) is cls
    require(is_registered, f"{name} is not the member registered by its name")
    require(cls.__doc__, f"{name} has no docstring that says what it computes")
    for member in variants(cls, 8, pool):
        text = json.dumps(member.to_dict(), allow_nan=False)
        loaded = decode(json.loads(text))
        is_equal = loaded == member and type(loaded) is cls and hash(loaded) == hash(member)
        is_equal = is_equal and json.dumps(loaded.to_dict()) == text
        require(is_equal, f"{name}: JSON gives back another member")
        for field in dataclasses.fields(member):  # type: ignore[arg-type]
            require(field.name in member.to_dict(), f"{name}: to_dict leaves {field.name} out")
            try:
                setattr(member, field.name, None)
            except dataclasses.FrozenInstanceError:
                continue
            raise AssertionError(f"{name} is not frozen: {field.name} can be set")


def check_keywords(cls: type[Member], pool: Pool | None = None) -> None:
    """Members take keyword arguments only, and refuse unknown ones."""
    for arguments, options in (((1.0,), {}), ((), {"typo": 1.0})):
        try:
            cls(*arguments, **options)
        except TypeError:
            continue
        raise AssertionError(f"{qualified_name(cls)} takes arguments that it does not declare")
    try:
        decode({**variants(cls, 1, pool)[0].to_dict(), "typo": 1})
    except RecipeError as error:
        require(
            "typo" in str(error),
            f"{qualified_name(cls)} refuses an unknown field without naming it",
        )
        return
    raise AssertionError(
        f"{qualified_name(cls)} is loaded from data with a field that it does not have"
    )


def _invalid_values(field: dataclasses.Field[object]) -> list[object]:
    """Return values that a declared field must refuse."""
    rule = field_spec(field)
    if rule is None:
        quantity = quantity_of(field)
        if quantity is None:
            return []
        invalid: list[object] = ["word", True, math.nan, math.inf, [1.0], torch.ones(())]
        high, high_open = quantity.range.high, quantity.range.high_open
        invalid += [high] if high is not None and high_open else []
        return [*invalid, *_outside(quantity.range)]
    invalid = [object(), torch.ones(()), *([] if rule.optional else [None])]
    if rule.kind == "integer":
        return [*invalid, 1.5, True, "2", int(rule.range.low or 0) - 1]
    if rule.kind == "number":
        return [*invalid, math.nan, math.inf, "2", True, *_outside(rule.range)]
    if rule.kind == "slot":
        kinds = (kind for kind in ("bias", "algorithm") if kind not in rule.choices)
        other = next(cls() for kind in kinds for cls in Pool().members(kind))
        return [*invalid, "L2", 1, type(other), other]
    return [*invalid, *(["", 1] if rule.kind == "text" else ["no such word", 2])]


def _outside(interval: Range) -> list[float]:
    low, high = interval.low, interval.high
    values = [] if low is None else [low - 0.5, *([low] if interval.low_open else [])]
    return values + ([] if high is None else [high + 0.5])


def check_fields(cls: type[Member], pool: Pool | None = None) -> None:
    """A value that a field does not accept is refused in one sentence that names both."""
    good, name = variants(cls, 1, pool)[0], qualified_name(cls)
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]
        for value in _invalid_values(field):
            try:
                dataclasses.replace(good, **{field.name: value})  # type: ignore[type-var]
            except RecipeError as error:
                text = str(error)
                has_names = cls.__name__ in text and field.name in text and "\n" not in text
                require(has_names, f"{name}({field.name}={value!r}) is refused without naming it")
                continue
            raise AssertionError(f"{name} takes {field.name}={value!r}, which it does not declare")


def check_numbers(member: Member) -> None:
    """Each quantity is a constant, or a gate, or a param, and its start lies in its range."""
    values = (getattr(member, field.name) for field in dataclasses.fields(member))  # type: ignore[arg-type]
    if any(isinstance(value, tuple) for value in values):
        return  # a tuple may contain one member twice, which recipes refuse
    names = member.quantity_names()
    for name in sorted({name for name in names if names.count(name) > 1}):
        raise AssertionError(f"{member.title} asks for the quantity {name!r} more than once")
    for item in (*member.gates(), *member.params()):
        kind = "gate" if isinstance(item, Gate) else "param"
        starts = item.init if isinstance(item.init, tuple) else (item.init,)
        is_inside = all(item.range.contains(start) for start in starts)
        subject = f"{member.title}: the {kind} {item.name!r}"
        require(is_inside, f"{subject} starts outside of its range")
        if isinstance(item, Gate):
            has_owner = item.owner.split(".")[0] in MEMBER_KINDS
            require(has_owner, f"{subject} has no choice as its owner")
