"""Recipes and inputs for the suites: `recollect.testing` with the members of `outside`.

Registration adds a member to every suite that draws from this module, because its declared fields
(options, flags, numbers, quantities, slots) define the draws. A draw depends only on its index.
"""

from __future__ import annotations

from typing import Any

import pytest
from tests.contracts import outside

import recollect as rc
from recollect.choices.member import all_members
from recollect.testing.compare import (
    flatten_state,
    gradients,
    largest_error,
    random_cuts,
    random_projection,
    relative_error,
    run_in_pieces,
    run_recall,
)
from recollect.testing.draws import FACTORY, Pool, parts_of
from recollect.testing.inputs import Inputs, inputs, is_ill_posed, scaled_down, sizes, small_inputs

__all__ = [
    "FACTORY",
    "FIRST",
    "POOL",
    "VARIANTS",
    "Inputs",
    "draw",
    "draw_member",
    "first_presets",
    "flatten_state",
    "gradients",
    "inputs",
    "is_drawn",
    "is_ill_posed",
    "largest_error",
    "members",
    "parts_of",
    "presets",
    "random_cuts",
    "random_projection",
    "relative_error",
    "run_in_pieces",
    "run_recall",
    "scaled_down",
    "sizes",
    "small_inputs",
    "valid",
]

POOL = Pool(extra_members=tuple(c for c in all_members() if c.__module__ == outside.__name__))
"""The members of the library and of `outside`, without those that single tests define."""

draw, draw_member, is_drawn = POOL.recipe, POOL.member, POOL.contains
members, valid = POOL.members, POOL.valid

VARIANTS = (
    *("atlas_per_token", "atlas_plus_plus", "f_divergence", "local_quadratic_attention"),
    *("memora_per_token", "moneta_exact", "omega_net_with_base", "titans_minus"),
    "titans_with_base",
)
"""Slow presets that differ little from a fast one; slow in tests of all presets."""


FIRST = {rc.zoo.get(name).family: name for name in reversed(rc.zoo.names())}.values()
"""The first preset of every family."""


def presets() -> list[Any]:
    """Return the names of all presets as test parameters."""
    return [pytest.param(x, marks=[pytest.mark.slow] * (x in VARIANTS)) for x in rc.zoo.names()]


def first_presets() -> list[Any]:
    """Return the names of all presets as test parameters; only the first of each family is fast."""
    return [pytest.param(x, marks=[pytest.mark.slow] * (x not in FIRST)) for x in rc.zoo.names()]
