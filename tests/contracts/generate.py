"""What the suites draw and run: `recollect.testing`, with the members of `outside` in its pool.

A member joins every suite that draws from here by being registered: its declared fields (options,
flags, numbers, quantities, slots) say what may be drawn. Draws depend only on their index.
"""

from __future__ import annotations

from tests.contracts import outside

from recollect.choices.member import all_members
from recollect.testing.compare import error, gradients, loss, parts, random_cuts, run, split, worst
from recollect.testing.draws import FACTORY, Pool, parts_of
from recollect.testing.inputs import Inputs, ill_posed, inputs, sizes, small_inputs, smaller

__all__ = [
    "FACTORY",
    "POOL",
    "Inputs",
    "draw",
    "draw_member",
    "drawn",
    "error",
    "gradients",
    "ill_posed",
    "inputs",
    "loss",
    "members",
    "parts",
    "parts_of",
    "random_cuts",
    "run",
    "sizes",
    "small_inputs",
    "smaller",
    "split",
    "valid",
    "worst",
]

POOL = Pool(also=tuple(c for c in all_members() if c.__module__ == outside.__name__))
"""The library's members, and those of `outside`; what single tests make stays out."""

draw, draw_member, drawn = POOL.recipe, POOL.member, POOL.holds
members, valid = POOL.members, POOL.valid
