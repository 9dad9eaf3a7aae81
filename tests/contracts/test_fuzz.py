"""Random recipes that validate run, split, serialise, differentiate, and agree with the reference.

A draw raises `RecipeError` at construction or passes `check_recipe`.
"""

from __future__ import annotations

import math

import pytest
import torch
from tests.contracts import generate

import recollect as rc
from recollect.choices.member import all_members
from recollect.recipe.recipe import CHOICES
from recollect.testing.recipes import check_recipe

CI, ALL = 25, 1000


def sweep(count: int) -> None:
    """Check ``count`` valid recipes, and that every refusal has a reason."""
    done, index, refused = 0, 0, 0
    failures: list[str] = []
    while done < count:
        try:
            recipe = generate.draw(index)
        except rc.RecipeError as error:
            refused, index = refused + 1, index + 1
            if not any(choice in str(error) for choice in (*CHOICES, "read", "probe")):
                failures.append(f"draw {index - 1} is refused without naming a choice: {error}")
            continue
        try:
            check_recipe(recipe, index)
        except Exception as error:
            failures.append(f"draw {index}: {type(error).__name__}: {error}\n    {recipe}")
        done, index = done + 1, index + 1
    print(f"{count} valid of {index} draws ({count / index:.0%}); {refused} refused with a reason")
    assert not failures, f"{len(failures)} of {count} fail:\n" + "\n".join(failures[:20])
    # Fewer would mean that validation refuses almost all draws.
    assert count / index > 0.1


def test_random_recipes() -> None:
    sweep(CI)


@pytest.mark.slow
def test_many_random_recipes() -> None:
    sweep(ALL)


def test_every_member_is_drawn() -> None:
    """Every registered member is part of a valid recipe of the slow sweep."""
    names = {cls.__name__ for cls in all_members() if generate.is_drawn(cls)}
    recorded: set[str] = set()
    for _, recipe in generate.valid(ALL):
        waiting = list(recipe.members())
        while waiting:
            part = waiting.pop()
            recorded.add(type(part).__name__)
            waiting.extend(part.parts())
        if names <= recorded:
            break
    assert names - recorded == set()


def test_draws_are_reproducible() -> None:
    (index, recipe), *_ = generate.valid(1)
    assert generate.draw(index) == recipe
    one, two = generate.small_inputs(recipe, index), generate.small_inputs(recipe, index)
    assert all(torch.equal(a, two.tensors()[name]) for name, a in one.tensors().items())
    assert math.isfinite(float(generate.run_recall(recipe, one)[0].sum()))
