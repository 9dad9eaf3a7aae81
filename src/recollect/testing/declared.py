"""Whether members are data, and whether what they declare of themselves is true, numerically.

Each check takes a member, asks its code at random points in float64, and raises AssertionError with
one sentence that names the member and the false claim.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from recollect.choices.member import Member, decode, get_member, registered_name
from recollect.fields import field_spec, quantity_of
from recollect.messages import RecipeError
from recollect.recipe.recipe import CHOICES
from recollect.testing.compare import require
from recollect.testing.draws import Pool, variants

__all__ = [
    "EXACT",
    "KINDS",
    "check_data",
    "check_fields",
    "check_keywords",
    "check_numbers",
    "named",
    "normal",
    "off",
]

EXACT = 1e-12
"""The same formula, rounded differently."""

KINDS = (*CHOICES, "read", "probe")


def normal(*shape: int, seed: int = 0) -> Tensor:
    """Standard normal numbers in float64, the same ones for a seed."""
    g = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=g, dtype=torch.float64)


def off(found: Tensor, expected: Tensor, tolerance: float = EXACT) -> float:
    """The largest difference beyond ``tolerance`` (1 + abs(expected)); 0 where there is none."""
    if found.shape != expected.shape:
        return math.inf
    found, expected = found.detach(), expected.detach()
    wrong = (found - expected).abs()
    bad = ~(wrong <= tolerance * (1 + expected.abs()))
    if not bad.any():
        return 0.0
    return float(torch.where(wrong.isnan(), math.inf, wrong)[bad].max())


def named(cls: type[Member]) -> str:
    """How sentences name a member's class, e.g. ``bias.L2``."""
    return f"{cls.choice}.{cls.__name__}"


def check_data(cls: type[Member], pool: Pool | None = None) -> None:
    """Members are frozen, hashable data that JSON gives back, registered, with a docstring.

    Args:
        cls: the member's class.
        pool: what its slots are filled from.
    """
    name = named(cls)
    is_registered = get_member(registered_name(cls), cls.choice) is cls
    require(is_registered, f"{name} is not the member registered by its name")
    require(cls.__doc__, f"{name} has no docstring that says what it computes")
    for made in variants(cls, 8, pool):
        text = json.dumps(made.to_dict(), allow_nan=False)
        again = decode(json.loads(text))
        alike = again == made and type(again) is cls and hash(again) == hash(made)
        require(
            alike and json.dumps(again.to_dict()) == text, f"{name}: JSON gives back another member"
        )
        for field in dataclasses.fields(made):  # type: ignore[arg-type]
            require(field.name in made.to_dict(), f"{name}: to_dict leaves {field.name} out")
            try:
                setattr(made, field.name, None)
            except dataclasses.FrozenInstanceError:
                continue
            raise AssertionError(f"{name} is not frozen: {field.name} can be set")


def check_keywords(cls: type[Member], pool: Pool | None = None) -> None:
    """Members take keywords alone, and refuse those that they do not know.

    Args:
        cls: the member's class.
        pool: what its slots are filled from.
    """
    for arguments, options in (((1.0,), {}), ((), {"typo": 1.0})):
        try:
            cls(*arguments, **options)
        except TypeError:
            continue
        raise AssertionError(f"{named(cls)} takes arguments that it does not declare")
    try:
        decode({**variants(cls, 1, pool)[0].to_dict(), "typo": 1})
    except RecipeError as error:
        require("typo" in str(error), f"{named(cls)} refuses an unknown field without naming it")
        return
    raise AssertionError(f"{named(cls)} is loaded from data with a field that it does not have")


def _bad(field: dataclasses.Field[object]) -> list[object]:
    """Values that a declared field must refuse."""
    rule = field_spec(field)
    if rule is None:
        spec = quantity_of(field)
        if spec is None:
            return []
        bad: list[object] = ["word", True, math.nan, math.inf, [1.0], torch.ones(())]
        low, high = spec.range.low, spec.range.high
        bad += [] if low is None else [low - 0.5, *([low] if spec.range.low_open else [])]
        return bad + (
            [] if high is None else [high + 0.5, *([high] if spec.range.high_open else [])]
        )
    never: list[object] = [object(), torch.ones(()), *([] if rule.optional else [None])]
    if rule.kind == "integer":
        return [*never, 1.5, True, "2", int(rule.range.low or 0) - 1]
    if rule.kind == "number":
        low, high = rule.range.low, rule.range.high
        never += [math.nan, math.inf, "2", True]
        never += [] if low is None else [low - 0.5, *([low] if rule.range.low_open else [])]
        return never + ([] if high is None else [high + 0.5])
    if rule.kind == "slot":
        other = next(
            cls() for kind in ("bias", "algorithm") if kind not in rule.choices
            for cls in Pool().members(kind)
        )  # fmt: skip
        return [*never, "L2", 1, type(other), other]
    if rule.kind == "text":
        return [*never, "", 1]
    return [*never, "no such word", 2]


def check_fields(cls: type[Member], pool: Pool | None = None) -> None:
    """A value that a field does not take is refused in one sentence that names both.

    Args:
        cls: the member's class.
        pool: what its slots are filled from.
    """
    good, name = variants(cls, 1, pool)[0], named(cls)
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]
        for value in _bad(field):
            try:
                dataclasses.replace(good, **{field.name: value})  # type: ignore[type-var]
            except RecipeError as error:
                said = str(error)
                names = cls.__name__ in said and field.name in said and "\n" not in said
                require(names, f"{name}({field.name}={value!r}) is refused without naming it")
                continue
            raise AssertionError(f"{name} takes {field.name}={value!r}, which it does not declare")


def check_numbers(made: Member) -> None:
    """Each quantity is a constant, or a gate, or a param, and its start lies in its range."""
    if any(isinstance(value, tuple) for value in _values(made)):
        return  # a tuple may name one member twice; recipes refuse that
    gates, params, names = made.gates(), made.params(), made.quantity_names()
    twice = sorted({name for name in names if names.count(name) > 1})
    for name in twice:
        raise AssertionError(f"{made.title} asks for the quantity {name!r} more than once")
    for gate in gates:
        inside = gate.range.contains(gate.init)
        require(inside, f"{made.title}: the gate {gate.name!r} starts outside of its range")
        known = gate.owner.split(".")[0] in KINDS
        require(known, f"{made.title}: the gate {gate.name!r} has no choice as its owner")
    for param in params:
        starts = param.init if isinstance(param.init, tuple) else (param.init,)
        inside = all(param.range.contains(start) for start in starts)
        require(inside, f"{made.title}: the param {param.name!r} starts outside of its range")


def _values(made: Member) -> Iterator[Any]:
    for field in dataclasses.fields(made):  # type: ignore[arg-type]
        yield getattr(made, field.name)
