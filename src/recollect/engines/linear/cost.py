"""FLOPs of the linear engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from recollect.engines.common.sizes import Counted, Sizes, reading_of_weights
from recollect.engines.linear.chunked import chunk_length
from recollect.engines.linear.decode import decodes_in_one_step, per_value_systems, scans
from recollect.engines.linear.scan import Cut

if TYPE_CHECKING:
    from recollect.recipe.recipe import Recipe

STEP_SECONDS, SOLVE_SECONDS = 1e-5, 2.5e-5
"""As `Counted.step_seconds`: a few products of a chunk, without and with a triangular solve."""
SCAN_SECONDS, ENTRY_SECONDS = 4.3e-6, 2e-9
"""As `Counted.step_seconds`: a step of a scan, and each entry of all memories in it."""
TOKEN_SECONDS = 6e-5
"""As `Counted.step_seconds`: a token of `recollect.engines.linear.recurrent`."""


def flops(recipe: Recipe, s: Sizes) -> Counted:
    """Operations of one call, in chunks, as a scan, or token by token; see `recollect.cost`."""
    decay, algorithm = recipe.retention.decay, recipe.algorithm
    if scans(recipe):
        return _scan(recipe, s)
    per = decay.per if decay is not None else "head"
    V = s.V + (recipe.memory.read.normalize != "none")
    heads, F = s.H, s.F
    notes: list[str] = []
    moving = algorithm.recursion != "none"
    sees = recipe.bias.sees_prediction
    # Value channels with equations of their own become heads of one row.
    if recipe.memory.is_elementwise:
        heads, F, V, per = s.H * V, 1, 1, "head"
    elif per_value_systems(recipe):
        notes.append(f"one triangular system per value channel: {V} of them in place of one")
        heads, V, per = s.H * V, 1, "key" if per in ("key_value", "entry") else "head"
    T, c = s.T * s.n, s.c
    probe = recipe.bias.probe is not None
    has_value_momentum = sees and algorithm.recursion == "value"
    token = _token(F, V, c, s.G, sees=sees, probe=probe, apart=has_value_momentum) * heads
    if moving and per != "head":
        notes.append("decay per channel with momentum runs token by token")
        return Counted(
            forward={"tokens": token * s.T},
            decode=token,
            steps=T,
            step_seconds=TOKEN_SECONDS,
            states=T,
            notes=tuple(notes),
        )
    over_values = per in ("value", "key_value") and not sees
    simple = not (moving or probe or c > 1 or over_values)

    def chunk(C: int) -> dict[str, int]:
        parts = simple_chunk_flops if simple else _general_chunk_flops
        of = algorithm.recursion
        counted = parts(F, V, C * c, C * s.G, sees=sees, probe=probe, moving=moving, of=of)
        return {**counted, "coefficients": 2 * C**3 if moving else 0}

    if s.n > 1:  # the sub-steps of a decoded token are a chunk of their own
        token = sum(chunk(s.n).values()) * heads
    C = min(chunk_length(solves=sees), T)
    N = -(-T // C) if T else 0
    forward = {name: n * N * heads for name, n in chunk(C).items()}
    bonus, first = _read_extras(recipe, s)
    forward["read"] += bonus * s.T + first
    return Counted(
        forward=forward,
        decode=token + bonus + first,
        steps=N,
        step_seconds=SOLVE_SECONDS if sees else STEP_SECONDS,
        states=N,
        notes=tuple(notes),
    )


def _read_extras(recipe: Recipe, s: Sizes) -> tuple[int, int]:
    """FLOPs of the bonus, per token, and of reading before the first write, per call."""
    read = recipe.memory.read
    bonus = 2 * s.G * s.F * s.H if read.bonus != 0.0 else 0
    return bonus, 2 * s.G * s.F * s.V * s.H if read.when == "before" and s.T else 0


def _scan(recipe: Recipe, s: Sizes) -> Counted:
    """Count a scan: only the read of a matrix is a product, and the write of a decoded token."""
    bonus, first = _read_extras(recipe, s)
    token = 0 if recipe.memory.is_elementwise else 2 * s.G * s.F * s.V * s.H + bonus
    first = 0 if recipe.memory.is_elementwise else first
    notes = ("the scan is elementwise, about 6 operations per entry and token, not counted here",)
    cut = Cut.of(s.B * s.H * s.weights, s.T, None, cpu=True)
    write = 2 * s.F * s.V * s.H if decodes_in_one_step(recipe) else 0
    return Counted(
        forward={"read": token * s.T + first},
        decode=token + write + first,
        steps=cut.steps,
        step_seconds=SCAN_SECONDS + ENTRY_SECONDS * s.B * s.H * s.weights,
        states=len(cut.groups()),
        notes=notes,
    )


def _token(F: int, V: int, c: int, G: int, *, sees: bool, probe: bool, apart: bool) -> int:
    """One token of one head: predict, write the error (c associations each), read.

    A probe erases in a direction of its own, and momentum of values moves what is written alone.
    """
    if probe:
        return 2 * F * V * (3 + G)
    return 2 * F * V * ((1 + sees + apart) * c + G)


def simple_chunk_flops(
    F: int, V: int, R: int, J: int, *, sees: bool, **_: object
) -> dict[str, int]:
    """`recollect.engines.linear.chunked`: R rows written and J read in one chunk."""
    return {
        "gram": 2 * R * R * F if sees else 0,
        "inverse": R**3 if sees else 0,
        "solve": 2 * R * R * V if sees else 0,
        "state": (4 if sees else 2) * R * F * V,
        "read": 2 * J * F * V + 2 * J * R * (F + V),
    }


def _general_chunk_flops(
    F: int, V: int, R: int, J: int, *, sees: bool, probe: bool, moving: bool, of: str | None
) -> dict[str, int]:
    """`recollect.engines.linear.chunk_general.solve`: known rows, unknown rows, or both."""
    both = sees and (probe or (moving and of == "value"))
    known = both or not sees
    gram = inverse = solve = 0
    state = 2 * R * F * V * (2 if moving else 1) if known else 0
    read = 2 * J * F * V * (2 if moving else 1)
    # One map per chunk; where momentum would make it 2F × 2F, thin products take its place.
    scan = 0 if sees == moving else 2 * F * F * V * (4 if moving else 1)
    if known:
        read += 2 * J * R * (F + V)
    if sees:
        gram = 2 * R * R * F * (2 if both else 1)
        inverse = R**3
        solve = 2 * R * R * V * (2 if both else 1) + 2 * R * R * F * (2 if moving else 1)
        maps = 0 if moving else 1
        writes = 2 if moving and not both else 1
        state += 2 * R * F * F * maps + 2 * R * F * V * (writes + (2 if moving else 1))
        read += 2 * J * R * (F + V)
    parts = {"gram": gram, "inverse": inverse, "solve": solve}
    return {**parts, "state": state, "scan": scan, "read": read}


reading = reading_of_weights
