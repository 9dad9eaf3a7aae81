"""Engine ``deep``: any memory of linear maps, exact and parallel inside inner batches.

Inside an inner batch all gradients are taken at the weights W°, so they are factors δ hᵀ of one
batched pass. Decay, momentum, step and window act on them through one small matrix of coefficients
per map (`step_coefficients`). Reads are masked attention with this matrix as the mask:

    z_t = a_t W° x_t + m_t S° x_t + Σ_i (C ⊙ (x hᵀ))[t, i] δ_i

No weight of a single token is built. Links, elementwise optimizers and decays per channel under
momentum are exceptions: their weights are built token by token from the factors (`token_weights`).
See `docs/design/deep-engine.md`.
"""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from recollect.choices.memory.base import Read, Stack
from recollect.choices.runtime import intermediate_budget
from recollect.engines.base import Engine
from recollect.engines.common.problem import Problem, requires_grad
from recollect.engines.common.sizes import FlopCount, Sizes
from recollect.engines.deep.chain.engine import run_chain
from recollect.engines.deep.cost import batch_flops, orthogonal
from recollect.engines.deep.decode import Stepped, follow, step, unflatten_heads
from recollect.engines.deep.general import run_inner_batches
from recollect.engines.deep.layout import DeepPlan, Grid, Layout, Memory, lay_out
from recollect.engines.deep.recompute import Part
from recollect.engines.deep.recompute import run as run_groups
from recollect.engines.deep.share import normalizer_of
from recollect.engines.deep.step_coefficients import tables
from recollect.engines.deep.structure import chain_of, execution_mode, rule_of
from recollect.report.formatting import format_si
from recollect.state.state import State

if TYPE_CHECKING:
    from recollect.recipe.bound import BoundRecipe
    from recollect.recipe.recipe import Recipe

__all__ = ["DeepEngine"]

GROUP_BYTES = 2**26
"""Budget of a group of inner batches for intermediates in the backward pass, on a CPU.

Groups are larger if the states at the boundaries of small groups take more (`_least_memory`).
"""

WHOLE_BYTES = 2**29
"""Limit of the intermediates of all batches of a chain as one group, without recomputation.

One group saves time, but every layer of a model holds this memory simultaneously.
"""

STEP_SECONDS, CHAIN_SECONDS = 5e-4, 1.2e-4
"""`FlopCount.step_seconds` of an inner batch or a token, and of an inner batch of a chain."""


class DeepEngine(Engine):
    """Memories made of linear maps, by coefficient matrices."""

    name = "deep"

    def unsupported_reasons(self, recipe: Recipe) -> list[str]:
        memory, algorithm = recipe.memory, recipe.algorithm
        if not isinstance(memory, Stack):
            return [f"{memory.title} is not made of linear maps"]
        reasons: list[str] = []
        if not recipe.features.finite:
            reasons.append(f"{recipe.features.title} has infinitely many features")
        if recipe.context.horizon is None:
            reasons.append(f"{recipe.context.title} sees all of the past at once")
        elif recipe.spaced_window:
            reasons.append(f"{recipe.context.title} skips the other associations of a token")
        if recipe.bias.probe is not None:
            reasons.append("a probe writes and erases separately, as in the linear engine")
        read = memory.read
        if read.when != "after" or read.bonus != Read().bonus or read.transposed:
            reasons.append(f"{memory.title} has a read that is not a plain read after the write")
        decay = recipe.retention.decay
        if decay is not None and decay.per == "entry" and decay.is_input_scaled:
            reasons.append(f"{recipe.retention.title} has separate factors of a decay per entry")
        if algorithm.has_outer_lr:
            reasons.append(f"{algorithm.title} has a rate between its momentum and the memory")
        if algorithm.update_every == "batch" and algorithm.accumulator is None:
            reasons.append(f"{algorithm.title} declares no accumulator for a batch")
        return reasons

    def describe(self, recipe: Recipe) -> str:
        how = execution_mode(recipe)
        if how == "table":
            return "coefficient matrix"
        if how == "border":
            return "coefficient matrix, one step per inner batch"
        if recipe.algorithm.batch_size == 1:
            return "factored gradients, token by token"
        return "factored gradients, weights of every token built"

    def make_plan(self, bound: BoundRecipe) -> DeepPlan:
        recipe, how, rule = bound.recipe, execution_mode(bound.recipe), rule_of(bound.recipe)
        memory, retention, algorithm, bias = (
            recipe.memory,
            recipe.retention,
            recipe.algorithm,
            recipe.bias,
        )
        assert isinstance(memory, Stack)
        decay = retention.decay
        plain = decay is None or (decay.per == "head" and decay.when == "after")
        plain &= not (algorithm.per_value or retention.has_link or rule.splits or rule.pairs)
        maps = memory.maps(bound.num_features, bound.engine_value_dim)
        # Batches of one token have no factors to cache.
        decodes = how == "table" and plain and algorithm.batch_size > 1
        return DeepPlan(
            recipe=recipe,
            memory=memory,
            maps=maps,
            execution_mode=how,
            rule=rule,
            # Tokens of a batch with one step at its boundary read W° in every mode of the link.
            settled=retention.has_link and not recipe.links_at_batch_end and how != "border",
            split=recipe.links_at_batch_end
            and retention.links_after_first_token
            and how != "border",
            chain=chain_of(recipe),
            b=algorithm.batch_size,
            c=recipe.context.horizon or 1,
            slope=bias.affine[0]
            if algorithm.rate_depends_on_key and bias.affine is not None
            else None,
            numbers=tuple(sorted(bias.quantity_axes)),
            params=tuple(param.name for param in memory.params()),
            param_names=tuple(
                param.name for param in (*memory.params(), *recipe.features.params())
            ),
            decodes=decodes,
            normalizer=normalizer_of(recipe),
            kernels=bound.requested_engine != "torch",
            widths=tuple(size for one in maps for size in (one.in_features, one.out_features)),
        )

    def run(self, problem: Problem) -> tuple[Tensor, State]:
        B, T, H, G, _ = problem.q.shape
        state = problem.state
        if T == 0 or B == 0 or H == 0:
            y = problem.v.new_zeros(B, T, H, G, problem.v.shape[-1])
            return y, problem.final_state(
                weights=state.weights, algorithm_state=dict(state.algorithm_state)
            )
        if problem.q.device.type == "cpu":
            _raise_malloc_threshold()
        method: DeepPlan = problem.bound.plan
        memory = Memory(
            A=[w.flatten(0, 1) for w in state.weights],
            slots={
                name: [w.flatten(0, 1) for w in slot]
                for name, slot in state.algorithm_state.items()
            },
        )
        params = {name: problem.params[name] for name in method.params}
        outer = requires_grad(problem)
        decodes = T == 1 and problem.lengths is None and not outer and method.decodes
        if decodes:
            with torch.no_grad():
                stepped = follow(problem, memory, params)
            if stepped is not None:
                return _stepped(problem, stepped)
        grid = lay_out(problem)
        columns = grid.tensors()
        if decodes and grid.N == 1 and len(set(grid.start)) == 1:
            with torch.no_grad():
                layout = _layout(grid, (0, grid.b), params, (B, H, G), outer=False)
                stepped = step(problem, layout, memory, params)
            if stepped is not None:
                return _stepped(problem, stepped)
        g = _batches_a_group(problem, method, grid, outer=outer)
        # A chain forms groups of its own, after the coefficients of all batches. The inputs of
        # windows are copies, which only one group at a time should have.
        forms_groups = method.chain is not None and grid.c == 1
        size = grid.b * (grid.N if forms_groups else g)
        total, lead = grid.N * grid.b, len(grid.keys) + 1
        groups = [(s, min(s + size, total)) for s in range(0, total, size)]
        parts = [Part(x, grid.c - 1 if i < lead else 0) for i, x in enumerate(columns)]

        def call(
            group: int,
            memories: list[Tensor],
            tokens: list[Tensor],
            rest: list[Tensor],
            outer: bool,
            ends: bool = True,
        ) -> tuple[Tensor, list[Tensor]]:
            layout = _layout(
                grid.like(iter(tokens)),
                groups[group],
                dict(zip(params, rest, strict=True)),
                (B, H, G),
                outer=outer,
            )
            if not ends:
                # The memory after the last inner batch is not needed.
                layout = replace(layout, commits=[*layout.commits[:-1], False])
            if method.chain is not None:
                uses_end = problem.uses_final_state or (ends and len(groups) > 1)
                y, end = _run_chain(method, layout, memory.like(memories), g, uses_end=uses_end)
            else:
                y, end = run_inner_batches(method, layout, memory.like(memories))
            y = y.unflatten(3, (grid.b, G)).permute(1, 0, 3, 2, 4, 5).flatten(1, 2)
            return y, end.tensors()

        if len(groups) == 1:
            with torch.set_grad_enabled(outer):
                y, final = call(0, memory.tensors(), columns, list(params.values()), outer)
        else:
            y, final = run_groups(call, groups, memory.tensors(), parts, params)
        y = grid.outputs(y, T)
        if problem.token_mask is not None:
            y = torch.where(problem.token_mask[..., None, None, None], y, 0.0)
        end = memory.like([w.unflatten(0, (B, H)) for w in final])
        state_after = problem.final_state(
            weights=tuple(end.A),
            algorithm_state={name: tuple(slot) for name, slot in end.slots.items()},
        )
        return y.to(problem.v.dtype), state_after

    def count_flops(self, recipe: Recipe, sizes: Sizes) -> FlopCount:
        memory = recipe.memory
        assert isinstance(memory, Stack)  # unsupported_reasons
        V = sizes.V + (memory.read.normalize != "none")
        maps, b, T = memory.maps(sizes.F, V), recipe.algorithm.batch_size, sizes.T * sizes.n
        num_full, rest = divmod(T, b)
        if num_full and rest:
            num_full, rest = num_full + 1, 0  # the last inner batch is padded to full length
        one = batch_flops(recipe, maps, b, sizes.G)
        last = (
            batch_flops(recipe, maps, rest, sizes.G, ends=False) if rest else dict.fromkeys(one, 0)
        )
        parts = {name: sizes.H * (num_full * one[name] + last[name]) for name in one}
        # A decoded token replays half of its open inner batch on average, and reads by the program.
        open_batch = batch_flops(recipe, maps, (b + 1) // 2, sizes.G, ends=b == 1)
        decode = sizes.H * sizes.n * sum(open_batch.values())
        if memory.base_params and chain_of(recipe) is not None and recipe.retention.decay is None:
            weights = sum(m.out_features * m.in_features for m in maps)
            decode += (
                sizes.H * sizes.n * 2 * ((b + 1) // 2) * sizes.G * weights
            )  # a chain reads their sum
        notes: list[str] = []
        price = orthogonal(recipe, maps)
        if price:
            plain = (sum(one.values()) - one["Newton–Schulz"]) / b
            token = price if recipe.algorithm.update_every == "token" else price / b
            notes.append(
                f"orthogonalising takes {format_si(token, 'FLOP')} per token and head, "
                f"{token / plain:.0f} times plain descent's {format_si(plain, 'FLOP')}"
            )
        if b > 1:
            notes.append("decoding replays the open inner batch, half of it on average")
        batches, built = -(-T // b), execution_mode(recipe) == "tokens"
        # The link after the first token of a batch is a separate step.
        split = recipe.links_at_batch_end and recipe.retention.links_after_first_token and b > 1
        return FlopCount(
            forward=parts,
            decode=decode,
            steps=T if built else batches * (1 + split),
            step_seconds=STEP_SECONDS if chain_of(recipe) is None else CHAIN_SECONDS,
            states=T if built else batches,
            notes=tuple(notes),
        )


def _run_chain(
    method: DeepPlan, layout: Layout, memory: Memory, group_size: int, *, uses_end: bool
) -> tuple[Tensor, Memory]:
    """Run `run_inner_batches` of a chain."""
    assert method.chain is not None
    table, *_ = tables(method.rule, method.maps, layout.steps, layout.gamma, start=0)
    y, A, S = run_chain(
        method.chain,
        table,
        layout.keys,
        (layout.x, layout.raw),
        layout.commits,
        (memory.A, memory.slots.get("momentum")),
        layout.params,
        group_size=group_size,
        outer=layout.outer,
        uses_end=uses_end,
        kernels=method.kernels,
    )
    y = y.unflatten(1, layout.x.shape[1:3])
    return y, Memory(A=A, slots={} if S is None else {"momentum": S})


def _stepped(problem: Problem, stepped: Stepped) -> tuple[Tensor, State]:
    """Return the result of `run` for one decoded token."""
    B, _, H, _, _ = problem.q.shape
    weights, slots, end = None, None, stepped.memory
    if end is not None:
        weights = tuple([unflatten_heads(w, B) for w in end.A])
        slots = {name: tuple([unflatten_heads(w, B) for w in x]) for name, x in end.slots.items()}
    state_after = problem.final_state(weights=weights, algorithm_state=slots, cache=stepped.cache)
    y = stepped.y.reshape(B, 1, H, *stepped.y.shape[1:])
    return y.to(problem.v.dtype), state_after


@functools.cache
def _raise_malloc_threshold() -> None:
    """Raise glibc's limit of freed memory that the process retains, once per process.

    glibc returns freed memory to the system beyond twice the largest block ever freed (32 MB at
    most), and new pages cost more than the arithmetic on them. One unused block raises the limit.
    """
    torch.empty(31 * 2**20, dtype=torch.uint8)


def _room(x: Tensor, host: int) -> int:
    """Return the memory budget of a group's intermediates in bytes: ``host`` on a CPU."""
    return host if x.device.type == "cpu" else intermediate_budget(x)


def _batches_a_group(problem: Problem, method: DeepPlan, grid: Grid, *, outer: bool) -> int:
    """Return the number of inner batches per group, from the chunk size or the memory budget.

    Training uses at least `_least_memory` batches, because states at group boundaries are saved.
    """
    if problem.chunk_size is not None:
        return max(1, problem.chunk_size // grid.b)
    B, _, H, G, _ = problem.q.shape
    weights = sum(m.out_features * m.in_features for m in method.maps)
    state_numbers = weights * (1 + len(problem.state.algorithm_state))
    widths = sum(m.out_features + m.in_features for m in method.maps)
    copies = 2 * grid.b if method.execution_mode == "tokens" else 3
    if method.normalizer is not None and method.normalizer.builds:
        copies += 4 * (grid.b + grid.c)
    rows = grid.b * (1 + G) + grid.c
    budget = _room(problem.q, GROUP_BYTES)
    if method.chain is None:
        numbers = state_numbers * copies + 4 * rows * widths
    else:
        # M at the boundary; z, σ(z), σ′(z), u and δ at keys; x, σ′ and scores at queries.
        numbers = state_numbers + weights * bool(method.chain.bases)
        numbers += rows * (3 * widths + 2 * (grid.b + grid.c))
        if method.memory.has_output_map and not method.chain.output_head(H).layer_norm:
            numbers += 12 * rows * method.maps[-1].out_features  # of autograd
    each = B * H * numbers * problem.state.weights[0].element_size()
    if method.chain is not None:
        single_group = _room(problem.q, WHOLE_BYTES)
        if grid.N * each <= single_group:
            return grid.N
        if not outer:
            budget = single_group  # almost none of this is saved
    fit = max(1, budget // max(each, 1))
    return max(fit, _least_memory(grid.N, state_numbers / numbers)) if outer else fit


def _least_memory(N: int, share: float) -> int:
    """Return the group size g with the least memory for boundaries and one group's intermediates.

    With w bytes at a boundary and i = w/``share`` inside a batch, g minimises (N/g) w + g i.
    """
    return math.isqrt(math.ceil(N * share))


def _layout(
    grid: Grid,
    group: tuple[int, int],
    params: dict[str, Tensor],
    sizes: tuple[int, int, int],
    *,
    outer: bool,
) -> Layout:
    """Split the tokens of a group, the only tokens of the grid, into inner batches."""
    _, H, G = sizes
    b, c = grid.b, grid.c
    start, stop = group
    N = (stop - start) // b

    keys: dict[str, Tensor] = {}
    for name, x in grid.keys.items():  # [B, N b + c − 1, H, ...] -> [N, B, H, b + c − 1, ...]
        if c == 1:
            cut = x.unflatten(1, (N, b))
        else:
            cut = x.unfold(1, b + c - 1, b).movedim(-1, 2)
        cut = cut.permute(1, 0, 3, 2, *range(4, cut.dim()))
        if name in ("raw", "phi", "v"):
            keys[name] = cut.contiguous()
        else:
            keys[name] = cut.unsqueeze(-1) if cut.dim() == 4 else cut
    steps: dict[str, Tensor] = {}
    for name, x in grid.steps.items():  # [B, N b, H, ...] -> [N, P, b, ...]
        cut = x.unflatten(1, (N, b))
        steps[name] = cut.permute(1, 0, 3, 2, *range(4, cut.dim())).flatten(1, 2)

    def per_query(x: Tensor) -> Tensor:  # [B, N b, H, G, D] -> [N, B, H, b G, D]
        return x.unflatten(1, (N, b)).permute(1, 0, 3, 2, 4, 5).flatten(3, 4)

    gamma = _gamma(grid.valid, steps, N, b, c, H)
    return Layout(
        b=b,
        c=c,
        G=G,
        keys=keys,
        steps=steps,
        gamma=gamma,
        x=per_query(grid.queries["x"]).contiguous(),
        raw=per_query(grid.queries["raw"]).contiguous() if "raw" in grid.queries else None,
        count=grid.count.unflatten(1, (N, b)).transpose(0, 1),
        commits=[_commit(grid, start // b + n, H, gamma) for n in range(N)],
        params=params,
        outer=outer,
    )


def _gamma(valid: Tensor, steps: dict[str, Tensor], N: int, b: int, c: int, H: int) -> Tensor:
    """Return the window weights ``[N, P, b, c]``: entry m of row t weights association t − m."""
    mask = valid.unfold(1, b + c - 1, b).transpose(0, 1)  # [N, B, b + c − 1]
    mask = mask.unfold(2, c, 1)  # [N, B, b, c]
    mask = mask if c == 1 else mask.flip(-1)
    mask = mask.repeat_interleave(H, dim=1)
    return mask * steps["window"] if "window" in steps else mask


def _commit(grid: Grid, n: int, H: int, like: Tensor) -> bool | Tensor:
    if grid.full is None or n < min(grid.full):
        return True
    if n >= max(grid.full):
        return False
    rows = torch.tensor([n < full for full in grid.full], device=like.device)
    return rows.repeat_interleave(H).view(-1, 1, 1)
