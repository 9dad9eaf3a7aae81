"""Reference engine: the definition, one token at a time.

All other engines are tested against this engine. It follows `docs/design/meaning.md` literally,
computes the inner gradient by autograd, imports no fast path, and runs in any dtype. The letters
match the equations::

    g_t = Σ_m γ_(t,m) ∇_W ℓ(M(W°; φ(k_(t−m))), v_(t−m))
    S_t, step_t = algorithm(S_(t−1), g_t)
    A_t = retention.advance(A_(t−1), step_t)          α_t A_(t−1) + step_t unless rebuilt from W
    W_t = link(A_t),    y_t = M(W_t; φ(q_t))

Batch elements differ in position because of padding and packing. Therefore ``torch.where`` selects
all quantities that depend on the position in the inner batch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from recollect.choices.algorithm.muon import newton_schulz_flops
from recollect.choices.memory.base import Stack
from recollect.engines.base import Engine
from recollect.engines.common.kernel_rows_flops import kernel_rows_flops, row_read_flops
from recollect.engines.common.problem import Problem, join_buffer, memory_read
from recollect.engines.common.sizes import FlopCount, Sizes, weight_read_flops
from recollect.engines.reference import kernel_token_loop, local_regression
from recollect.engines.reference.full_batch import full_batch, full_batch_weights
from recollect.engines.reference.least_squares import least_squares, read_least_squares
from recollect.engines.reference.token_loop import TokenLoop
from recollect.report.formatting import format_si
from recollect.state.state import State

if TYPE_CHECKING:
    from recollect.recipe.recipe import Recipe

__all__ = ["ReferenceEngine"]

STEP_SECONDS = 1.2e-3
"""`FlopCount.step_seconds` of one token with its inner gradient by autograd."""


class ReferenceEngine(Engine):
    """The definition, one token at a time, for every recipe."""

    name = "reference"

    def unsupported_reasons(self, recipe: Recipe) -> list[str]:
        return []

    def describe(self, recipe: Recipe) -> str:
        return "token by token, inner gradient by autograd"

    def run(self, problem: Problem) -> tuple[Tensor, State]:
        if problem.recipe.nonparametric:
            return local_regression.local(problem)
        if problem.recipe.algorithm.inverse is not None:
            return least_squares(problem)
        if problem.recipe.solves_from_gram:
            return local_regression.regression(problem)
        if problem.recipe.context.horizon is None:
            return full_batch(problem)
        if problem.recipe.uses_kernel_rows:
            return kernel_token_loop.run(problem)
        loop = TokenLoop(problem)
        y = loop.run(problem)
        return y.to(problem.v.dtype), loop.state(problem)

    def read_state(self, problem: Problem, query_rates: Mapping[str, Tensor]) -> Tensor:
        # A link with gates (a radius, a threshold) uses the gates of the query.
        recipe = problem.recipe
        if recipe.nonparametric:
            return local_regression.attend(problem, query_rates)
        if recipe.solves_from_gram:
            return local_regression.regress(problem, query_rates)
        if recipe.uses_kernel_rows:
            return kernel_token_loop.read(problem)
        T = problem.q.shape[1]
        position = (problem.state.position - 1).clamp_min(0)[:, None].expand(-1, T)
        phi = problem.phi(problem.q, "query", position)
        if recipe.algorithm.inverse is not None:
            return read_least_squares(problem, phi, query_rates).to(problem.v.dtype)
        raw, forward = problem.q.to(phi.dtype), memory_read(problem)
        if recipe.context.horizon is None:
            tokens = join_buffer(problem)
            W = [full_batch_weights(problem, tokens, len(tokens) - 1)] * T
        else:
            loop = TokenLoop(problem)
            loop.run(problem)
            if not recipe.read_gates and T > 1:  # all queries read equal weights
                W = loop.weights_for_read(query_rates, 0)
                phi, raw = (x.transpose(1, 2) for x in (phi, raw))  # [B, H, T, G, ·]
                y = forward(W, phi.flatten(2, 3), raw.flatten(2, 3), problem.params)
                return y.unflatten(2, phi.shape[2:4]).transpose(1, 2).to(problem.v.dtype)
            W = [loop.weights_for_read(query_rates, t) for t in range(T)]
        outputs = [forward(W[t], phi[:, t], raw[:, t], problem.params) for t in range(T)]
        B, _, H, G, _ = phi.shape
        empty = problem.v.new_zeros(B, 0, H, G, problem.v.shape[-1])
        return torch.stack(outputs, dim=1).to(problem.v.dtype) if outputs else empty

    def float32_reason(self, recipe: Recipe) -> str:
        return "all other engines are compared with the reference"

    def count_flops(self, recipe: Recipe, sizes: Sizes) -> FlopCount:
        if recipe.uses_kernel_rows:
            return replace(kernel_rows_flops(recipe, sizes), step_seconds=STEP_SECONDS)

        def counted(
            forward: dict[str, int],
            decode: int,
            *notes: str,
            states: int = sizes.T,
            steps: int = sizes.T * sizes.n,
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
            per_token = 2 * (sizes.K + sizes.V) * sizes.H * sizes.G
            horizon = recipe.context.horizon
            pairs = sum(min(t, horizon or t) for t in range(1, sizes.T + 1))
            decode = per_token * min(sizes.T + 1, horizon or sizes.T + 1)
            return counted({"attention": per_token * pairs}, decode, states=0)
        first = sum(map(math.prod, _firsts(recipe, sizes)))
        fixed = 1 + (isinstance(recipe.memory, Stack) and recipe.memory.has_base_matmuls)
        forward, input_gradient = fixed * 2 * sizes.weights, fixed * 2 * (sizes.weights - first)
        backward, read = input_gradient + 2 * sizes.weights, sizes.G * forward
        if recipe.algorithm.inverse is not None:
            F, V = sizes.F, sizes.V
            per_token = {"statistics": 2 * F * (F + V), "solve": 2 * F**3 // 3 + 2 * F * F * V}
            token_flops = sum(per_token.values()) + sizes.G * 2 * F * V
            parts = {name: n * sizes.T * sizes.H for name, n in per_token.items()}
            parts["read"] = sizes.G * 2 * F * V * sizes.T * sizes.H
            return counted(parts, token_flops * sizes.H, "every token solves a dense system")
        if recipe.context.horizon is None:
            steps = recipe.algorithm.updates_per_token
            past = (forward + backward) * steps * sizes.H
            pairs = sizes.T * (sizes.T + 1) // 2
            parts = {"write": past * pairs, "read": read * sizes.T * sizes.H}
            decode = past * (sizes.T + 1) + read * sizes.H
            note = "every token solves from the origin"
            return counted(parts, decode, note, steps=sizes.T * steps)
        passes = 2 if recipe.algorithm.needs_split_error else 1
        write = sizes.c * (forward + backward) * passes * sizes.n
        if recipe.algorithm.uses_line_search:
            write += 2 * sizes.c * (forward + backward) * sizes.n
        orthogonal = sum(_newton_schulz(shape, recipe) for shape in sizes.shapes)
        notes: list[str] = []
        if orthogonal:
            ratio = (
                f"{orthogonal / max(write, 1):.0f} times the gradient's {format_si(write, 'FLOP')}"
            )
            note_text = (
                f"orthogonalising takes {format_si(orthogonal, 'FLOP')} per token and head, {ratio}"
            )
            if recipe.algorithm.update_every == "batch":
                # The reference also computes the batch step at every token.
                orthogonal *= 2
                note_text += (
                    "; the recipe needs it once per inner batch, this engine computes it at every "
                    "token"
                )
            notes.append(note_text)
        parts = {"write": write, "Newton–Schulz": orthogonal, "read": read}
        token_flops = (write + orthogonal + read) * sizes.H
        # A decoded token replays half of an inner batch on average.
        replayed = token_flops - read * sizes.H
        decode = token_flops + replayed * (recipe.algorithm.batch_size - 1) // 2
        if recipe.algorithm.batch_size > 1:
            notes.append("decoding replays the open inner batch, half of it on average")
        return counted({name: n * sizes.T * sizes.H for name, n in parts.items()}, decode, *notes)

    def count_read_flops(self, recipe: Recipe, sizes: Sizes, queries: int) -> int:
        if recipe.uses_kernel_rows:
            return row_read_flops(recipe, sizes, queries)
        if recipe.nonparametric or recipe.solves_from_gram:
            num_visible = min(sizes.T, recipe.context.num_kept or sizes.T)
            return 2 * (sizes.K + sizes.V) * sizes.H * sizes.G * num_visible * queries
        return weight_read_flops(recipe, sizes, queries)


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
    rows, columns = shape[0], math.prod(shape[1:])
    return newton_schulz_flops(rows, columns, steps)
