"""Fields with declared ranges, for any dataclass."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, replace
from typing import Any

import pytest
from torch import Tensor

import recollect as rc
from recollect.fields import (
    Validated,
    flag,
    int_check,
    integer,
    number,
    option,
    text,
    validate,
    validated_field,
)


@dataclass(frozen=True, kw_only=True)
class Shelf(Validated):
    """A dataclass with one field of each kind."""

    boards: int = integer(at_least=1)
    wood: str = option(MISSING, "oak", "pine")
    height: float = number(1, above=0, at_most=2.5)
    depth: float | None = number(None, at_least=0, optional=True)
    painted: bool = flag(False)
    owner: str = text("nobody")
    place: int = validated_field(1, int_check(1, 3))
    books: tuple[str, ...] = validated_field(list, tuple)
    note: Any = None

    def validate(self) -> None:
        if len(self.books) > self.boards:
            raise ValueError(f"Shelf: {len(self.books)} books need as many boards")


SHELF = Shelf(boards=1, wood="oak")


def test_values_are_stored_as_checked() -> None:
    assert type(SHELF.height) is float
    assert SHELF.depth is None
    assert replace(SHELF, books=["a"]).books == ("a",)
    assert Shelf(boards=1, wood="oak").books == ()
    with pytest.raises(TypeError, match=r"boards.*wood"):
        Shelf()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"boards": 0}, "Shelf: boards must be a whole number >= 1, not 0"),
        ({"boards": True}, "Shelf: boards must be a whole number >= 1, not True"),
        ({"boards": None}, "Shelf: boards must be a whole number >= 1, not None"),
        ({"wood": "ash"}, "Shelf: wood must be one of 'oak', 'pine', not 'ash'"),
        ({"height": 0}, "Shelf: height must be a finite number in (0, 2.5], not 0"),
        ({"height": "1"}, "Shelf: height must be a number in (0, 2.5], not '1'"),
        ({"depth": float("nan")}, "Shelf: depth must be a finite number >= 0, not nan"),
        ({"painted": 1}, "Shelf: painted must be true or false, not 1"),
        ({"owner": ""}, "Shelf: owner must be a non-empty name, not ''"),
        ({"place": 4}, "Shelf: place must be a whole number from 1 to 3, not 4"),
        ({"books": ["a", "b"]}, "Shelf: 2 books need as many boards"),
    ],
)
def test_message_names_owner_field_range_and_value(change: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match="Shelf") as refused:
        replace(SHELF, **change)
    assert str(refused.value) == says


def test_arguments_of_functions_are_checked() -> None:
    assert validate("f: n", int_check(), 0) == 0
    with pytest.raises(ValueError, match=r"^f: n must be a whole number >= 10000000, not -1$"):
        validate("f: n", int_check(10_000_000), -1)


def test_a_logarithm_keeps_open_bounds() -> None:
    @rc.member
    class Bounded(rc.bias.Bias):
        share: float | str = rc.quantity("input", above=0, below=1, init=0.5, log=True)

        def loss(self, prediction: Tensor, value: Tensor, gates: Mapping[str, Tensor]) -> Tensor:
            return gates["log_share"].exp().squeeze(-1) * (prediction - value).square().sum(-1)

    (gate,) = Bounded().gates()
    assert gate.is_log and str(gate.range) == "< 0" and not gate.range.contains(0.0)
    above = rc.quantity(2.0, above=1, init=2.0, log=True).metadata["recollect"]
    assert str(above.gate_range()) == "> 0"  # log 1
