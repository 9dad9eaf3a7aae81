"""FLOPs of the reference engine."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from recollect.choices.algorithm.muon import newton_schulz_flops
from recollect.choices.memory.base import Stack
from recollect.engines.common.kernel_rows_cost import kernel_rows_flops, reading_of_rows
from recollect.engines.common.sizes import Counted, Sizes, numel_of, reading_of_weights
from recollect.report.units import readable

if TYPE_CHECKING:
    from recollect.recipe.recipe import Recipe

STEP_SECONDS = 1.2e-3
"""As `Counted.step_seconds`: a token with its inner gradient by autograd."""


def flops(recipe: Recipe, s: Sizes) -> Counted:
    """Operations of one call, token by token."""
    if recipe.uses_kernel_rows:
        return replace(kernel_rows_flops(recipe, s), step_seconds=STEP_SECONDS)

    def counted(
        forward: dict[str, int], decode: int, *notes: str, states: int = s.T, steps: int = s.T * s.n
    ) -> Counted:
        return Counted(
            forward=forward,
            decode=decode,
            steps=steps,
            step_seconds=STEP_SECONDS,
            states=states,
            notes=notes,
        )

    if recipe.nonparametric or recipe.solves_from_gram:
        each = 2 * (s.K + s.V) * s.H * s.G
        horizon = recipe.context.horizon
        pairs = sum(min(t, horizon or t) for t in range(1, s.T + 1))
        decode = each * min(s.T + 1, horizon or s.T + 1)
        return counted({"attention": each * pairs}, decode, states=0)
    first = sum(numel_of(shape) for shape in _firsts(recipe, s))
    fixed = 1 + (isinstance(recipe.memory, Stack) and recipe.memory.has_base_matmuls)
    forward, pulled = fixed * 2 * s.weights, fixed * 2 * (s.weights - first)
    backward, read = pulled + 2 * s.weights, s.G * forward
    if recipe.algorithm.inverse is not None:
        F, V = s.F, s.V
        each = {"statistics": 2 * F * (F + V), "solve": 2 * F**3 // 3 + 2 * F * F * V}
        token = sum(each.values()) + s.G * 2 * F * V
        parts = {name: n * s.T * s.H for name, n in each.items()}
        parts["read"] = s.G * 2 * F * V * s.T * s.H
        return counted(parts, token * s.H, "every token solves a dense system")
    if recipe.context.horizon is None:
        steps = recipe.algorithm.updates_per_token
        past = (forward + backward) * steps * s.H
        pairs = s.T * (s.T + 1) // 2
        parts = {"write": past * pairs, "read": read * s.T * s.H}
        decode = past * (s.T + 1) + read * s.H
        note = "every token solves from the origin"
        return counted(parts, decode, note, steps=s.T * steps)
    passes = 2 if recipe.algorithm.needs_split_error else 1
    write = s.c * (forward + backward) * passes * s.n
    if recipe.algorithm.uses_line_search:
        write += 2 * s.c * (forward + backward) * s.n
    orthogonal = sum(_newton_schulz(shape, recipe) for shape in s.shapes)
    notes: list[str] = []
    if orthogonal:
        ratio = f"{orthogonal / max(write, 1):.0f} times the gradient's {readable(write, 'FLOP')}"
        price = f"orthogonalising takes {readable(orthogonal, 'FLOP')} per token and head, {ratio}"
        if recipe.algorithm.update_every == "batch":
            # The reference settles every token, to keep what it needs at the border.
            orthogonal *= 2
            price += (
                "; the recipe needs it once per inner batch, this engine takes it at every token"
            )
        notes.append(price)
    parts = {"write": write, "Newton–Schulz": orthogonal, "read": read}
    token = (write + orthogonal + read) * s.H
    # A decoded token replays its open inner batch, half of it on average.
    replayed = token - read * s.H
    decode = token + replayed * (recipe.algorithm.batch_size - 1) // 2
    if recipe.algorithm.batch_size > 1:
        notes.append("decoding replays the open inner batch, half of it on average")
    return counted({name: n * s.T * s.H for name, n in parts.items()}, decode, *notes)


def reading(recipe: Recipe, s: Sizes, queries: int) -> int:
    """FLOPs of queries that read and write nothing.

    Args:
        recipe: any.
        s: sizes.
        queries: per row and query head.
    """
    if recipe.uses_kernel_rows:
        return reading_of_rows(recipe, s, queries)
    if recipe.nonparametric or recipe.solves_from_gram:
        num_visible = min(s.T, recipe.context.num_kept or s.T)
        return 2 * (s.K + s.V) * s.H * s.G * num_visible * queries
    return reading_of_weights(recipe, s, queries)


def _firsts(recipe: Recipe, s: Sizes) -> tuple[tuple[int, ...], ...]:
    """Shapes of the maps that read the key itself: nothing is propagated through them."""
    memory = recipe.memory
    if isinstance(memory, Stack):
        return tuple(
            (m.out_features, m.in_features) for m in memory.maps(s.F, s.V) if m.reads_features
        )
    return s.shapes[:1]


def _newton_schulz(shape: tuple[int, ...], recipe: Recipe) -> int:
    steps = recipe.algorithm.ns_steps
    if steps == 0 or len(shape) < 2:
        return 0
    rows, columns = shape[0], numel_of(shape[1:])
    return newton_schulz_flops(rows, columns, steps)
