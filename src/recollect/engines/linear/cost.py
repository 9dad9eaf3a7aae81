"""FLOPs of the linear engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from recollect.engines.common.sizes import FlopCount, Sizes
from recollect.engines.linear.chunked import chunk_length
from recollect.engines.linear.decode import decodes_in_one_step
from recollect.engines.linear.scan import ScanLayout

if TYPE_CHECKING:
    from recollect.recipe.recipe import Recipe

STEP_SECONDS, SOLVE_SECONDS = 1e-5, 2.5e-5
"""`FlopCount.step_seconds` of a chunk without and with a triangular solve."""
SCAN_SECONDS, ENTRY_SECONDS = 4.3e-6, 2e-9
"""`FlopCount.step_seconds` of a step of a scan, and of each entry of all memories in it."""
TOKEN_SECONDS = 6e-5
"""`FlopCount.step_seconds` of a token of `recollect.engines.linear.recurrent`."""


def read_extras(recipe: Recipe, s: Sizes) -> tuple[int, int]:
    """Return FLOPs of the bonus per token, and of the read before the first write per call."""
    read = recipe.memory.read
    bonus = 2 * s.G * s.F * s.H if read.bonus != 0.0 else 0
    return bonus, 2 * s.G * s.F * s.V * s.H if read.when == "before" and s.T else 0


def scan_flops(recipe: Recipe, s: Sizes) -> FlopCount:
    """Count a scan: products are the read of a matrix and the write of a decoded token."""
    bonus, first = read_extras(recipe, s)
    token = 0 if recipe.memory.is_elementwise else 2 * s.G * s.F * s.V * s.H + bonus
    first = 0 if recipe.memory.is_elementwise else first
    notes = ("the scan is elementwise, about 6 operations per entry and token, not counted here",)
    layout = ScanLayout.of(s.B * s.H * s.weights, s.T, None, cpu=True)
    write = 2 * s.F * s.V * s.H if decodes_in_one_step(recipe) else 0
    return FlopCount(
        forward={"read": token * s.T + first},
        decode=token + write + first,
        steps=layout.steps,
        step_seconds=SCAN_SECONDS + ENTRY_SECONDS * s.B * s.H * s.weights,
        states=len(layout.groups()),
        notes=notes,
    )


def token_flops(
    F: int, V: int, c: int, G: int, *, has_error: bool, probe: bool, separate_erase: bool
) -> int:
    """Count the operations of one token and head: predict, write c associations, read."""
    if probe:
        return 2 * F * V * (3 + G)
    return 2 * F * V * ((1 + has_error + separate_erase) * c + G)


def chunk_flops(
    F: int,
    V: int,
    R: int,  # written rows
    J: int,  # read rows
    *,
    has_error: bool,
    separate: bool = False,  # whether erasure and writes differ
    momentum: bool = False,
) -> dict[str, int]:
    """Count the operations of one chunk of `chunked`."""
    directions = 2 if separate else 1
    states = 2 * F if momentum else F
    return {
        "gram": 2 * R * R * F * directions if has_error else 0,
        "inverse": R**3 if has_error else 0,
        "solve": 2 * R * R * (V * directions + states) if has_error else 0,
        "state": 2 * R * states * V * (directions + has_error),
        "read": 2 * J * states * V + 2 * J * R * (F + V) * directions,
    }


def transposed_flops(recipe: Recipe, s: Sizes) -> dict[str, int]:
    """Count a transposed read: a pass that predicts, and one that reads."""
    counts: dict[str, int] = {}

    def add(F: int, V: int, reads: int, *, has_error: bool) -> None:
        # Without an error, a token writes all of its associations at once.
        rows = 1 if has_error else s.n
        T = s.T * s.n // rows
        C = max(1, min(chunk_length(solves=has_error, associations=rows), T))
        for name, n in chunk_flops(F, V, C * rows, C * reads, has_error=has_error).items():
            counts[name] = counts.get(name, 0) + n * -(-T // C) * s.H

    add(s.V, s.F, s.G, has_error=False)
    if recipe.bias.sees_prediction:
        add(s.F, s.V, 1, has_error=True)
        counts["read"] += 2 * s.F * s.V * s.H if s.T else 0  # the first prediction
    return counts
