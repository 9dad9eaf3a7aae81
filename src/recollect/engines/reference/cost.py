"""FLOPs of the reference engine."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from recollect.choices.algorithm.muon import newton_schulz_flops
from recollect.choices.memory.base import Stack
from recollect.engines.common.kernel_rows_flops import kernel_rows_flops, row_read_flops
from recollect.engines.common.sizes import FlopCount, Sizes, numel_of, weight_read_flops
from recollect.report.units import readable

if TYPE_CHECKING:
    from recollect.recipe.recipe import Recipe

STEP_SECONDS = 1.2e-3
"""`Counted.step_seconds` of one token with its inner gradient by autograd."""


def flops(recipe: Recipe, s: Sizes) -> FlopCount:
    """Return the operations of one call."""
    if recipe.uses_kernel_rows:
        return replace(kernel_rows_flops(recipe, s), step_seconds=STEP_SECONDS)

    def counted(
        forward: dict[str, int], decode: int, *notes: str, states: int = s.T, steps: int = s.T * s.n
    ) -> FlopCount:
        return FlopCount(
            forward=forward,
            decode=decode,
            steps=steps,
            step_seconds=STEP_SECONDS,
            states=states,
            notes=notes,
        )

    if recipe.nonparametric or recipe.solves_from_gram:
        per_token = 2 * (s.K + s.V) * s.H * s.G
        horizon = recipe.context.horizon
        pairs = sum(min(t, horizon or t) for t in range(1, s.T + 1))
        decode = per_token * min(s.T + 1, horizon or s.T + 1)
        return counted({"attention": per_token * pairs}, decode, states=0)
    first = sum(numel_of(shape) for shape in _firsts(recipe, s))
    fixed = 1 + (isinstance(recipe.memory, Stack) and recipe.memory.has_base_matmuls)
    forward, input_gradient = fixed * 2 * s.weights, fixed * 2 * (s.weights - first)
    backward, read = input_gradient + 2 * s.weights, s.G * forward
    if recipe.algorithm.inverse is not None:
        F, V = s.F, s.V
        per_token = {"statistics": 2 * F * (F + V), "solve": 2 * F**3 // 3 + 2 * F * F * V}
        token_flops = sum(per_token.values()) + s.G * 2 * F * V
        parts = {name: n * s.T * s.H for name, n in per_token.items()}
        parts["read"] = s.G * 2 * F * V * s.T * s.H
        return counted(parts, token_flops * s.H, "every token solves a dense system")
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
        note_text = (
            f"orthogonalising takes {readable(orthogonal, 'FLOP')} per token and head, {ratio}"
        )
        if recipe.algorithm.update_every == "batch":
            # The reference also computes the batch step at every token.
            orthogonal *= 2
            note_text += (
                "; the recipe needs it once per inner batch, this engine computes it at every token"
            )
        notes.append(note_text)
    parts = {"write": write, "Newton–Schulz": orthogonal, "read": read}
    token_flops = (write + orthogonal + read) * s.H
    # A decoded token replays half of an inner batch on average.
    replayed = token_flops - read * s.H
    decode = token_flops + replayed * (recipe.algorithm.batch_size - 1) // 2
    if recipe.algorithm.batch_size > 1:
        notes.append("decoding replays the open inner batch, half of it on average")
    return counted({name: n * s.T * s.H for name, n in parts.items()}, decode, *notes)


def reading(recipe: Recipe, s: Sizes, queries: int) -> int:
    """Return the FLOPs of read-only queries.

    Args:
        recipe: Any recipe.
        s: Sizes.
        queries: Number of queries per batch element and query head.
    """
    if recipe.uses_kernel_rows:
        return row_read_flops(recipe, s, queries)
    if recipe.nonparametric or recipe.solves_from_gram:
        num_visible = min(s.T, recipe.context.num_kept or s.T)
        return 2 * (s.K + s.V) * s.H * s.G * num_visible * queries
    return weight_read_flops(recipe, s, queries)


def _firsts(recipe: Recipe, s: Sizes) -> tuple[tuple[int, ...], ...]:
    """Return the shapes of the maps that read the key; their inputs need no gradient."""
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
