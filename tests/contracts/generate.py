"""What the suites draw and run: `recollect.testing`, with the members of `outside` in its pool.

A member joins every suite that draws from here by being registered: its declared fields (options,
flags, numbers, quantities, slots) say what may be drawn. Draws depend only on their index.
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
    "drawn",
    "first_presets",
    "flatten_state",
    "gradients",
    "inputs",
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
"""The library's members, and those of `outside`; what single tests make stays out."""

draw, draw_member, drawn = POOL.recipe, POOL.member, POOL.contains
members, valid = POOL.members, POOL.valid

VARIANTS = (
    *("atlas_per_token", "atlas_plus_plus", "f_divergence", "local_quadratic_attention"),
    *("memora_per_token", "moneta_exact", "omega_net_with_base", "titans_minus"),
    "titans_with_base",
)
"""Presets that take long, each near one that does not; slow in tests of all presets."""


FIRST = {rc.zoo.get(name).family: name for name in reversed(rc.zoo.names())}.values()
"""The first preset of every family."""


def presets() -> list[Any]:
    """Names of all presets, as parameters of a test."""
    return [pytest.param(x, marks=[pytest.mark.slow] * (x in VARIANTS)) for x in rc.zoo.names()]


def first_presets() -> list[Any]:
    """Names of all presets, as parameters of a test that is fast for the first of each family."""
    return [pytest.param(x, marks=[pytest.mark.slow] * (x not in FIRST)) for x in rc.zoo.names()]
