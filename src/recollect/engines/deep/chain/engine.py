"""Chain path: memories that are sequences of maps, with the same coefficients for all maps.

This path has explicit equations for W_L σ(… σ(W_1 x)) with scalar decays, momentum and windows.
`general` runs any other program. Only the recurrence over inner-batch boundaries is sequential
(`forward`), and it depends on keys. After it, the queries of all inner batches are read together,
map by map:

    z_t = a_t A° x_t + m_t S° x_t + Σ_i (C ⊙ (x hᵀ))[t, i] δ_i

With a base W̄, A = W̄ + W decays towards W̄ and z_t has the term (1 − a_t) W̄ x_t. W̄ is then a third
stack, which is constant. `tests/engines/test_deep.py` compares this path with the general one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from recollect.choices.autograd import CustomFunction, differentiable_backward
from recollect.engines.deep.chain.activations import ACTIVATIONS
from recollect.engines.deep.chain.backward import backward
from recollect.engines.deep.chain.chain import Chain
from recollect.engines.deep.chain.forward import (
    ScratchBuffers,
    forward,
    forward_differentiable,
    make_step_scales,
)
from recollect.engines.deep.chain.map_groups import group_by_size, is_cpu, split_groups
from recollect.engines.deep.chain.output_head.head import OutputHead
from recollect.engines.deep.chain.reads import (
    QueryBatch,
    ReadCache,
    backward_read,
    make_query_batch,
    read,
    read_differentiable,
)
from recollect.engines.deep.chain.step_scales import StepScales
from recollect.engines.deep.chain.trace import ChainInputs, ChainSpec, Commits, ForwardTrace
from recollect.engines.deep.recurrence import RecurrenceRunner, agrees, select_runner
from recollect.engines.deep.recurrence.launch import launch as launch_recurrence
from recollect.engines.deep.step_coefficients import Table

__all__ = ["run_chain"]

Weights = Tensors = list[Tensor]

MAX_SPAN_BYTES = 2**23
"""Largest size of the weights that a CPU reads at once, in bytes, so that they fit its cache."""

MAX_GROUPED_BYTES = 2**20
"""Largest size of A and S, in bytes, at which a CPU groups maps of equal sizes. Larger maps are
updated one at a time, so that each fits the cache."""

MIN_SPAN_BATCHES = 4
"""Smallest number of batches in a span with several batches."""


def run_chain(
    chain: Chain,
    table: Table,
    keys: Mapping[str, Tensor],
    queries: tuple[Tensor, Tensor | None],
    commits: Sequence[bool | Tensor],
    memory: tuple[Weights, Weights | None],
    params: Mapping[str, Tensor],
    *,
    outer: bool,
    kernels: bool = True,
) -> tuple[Tensor, Weights, Weights | None]:
    """Return outputs ``[N, P, b G, V]``, and W and S after the last batch.

    Args:
        chain: Chain of the memory.
        table: Coefficients of every token.
        keys: Inputs of associations, ``[N, B, H, R, ·]`` by name.
        queries: Features and, if they differ, raw queries, ``[N, B, H, b G, ·]``.
        commits: Whether a batch commits its update, per batch.
        memory: W and S, ``[P, out, in]``.
        params: Learned parameters of the memory.
        outer: Whether a backward pass follows.
        kernels: Whether Triton kernels may run the recurrence.
    """
    flat = {name: x.flatten(1, 2) for name, x in keys.items()}
    k, v = flat.pop("phi"), flat.pop("v")
    raw = flat.pop("raw", k)
    output_head, bases = (
        chain.output_head(keys["v"].shape[2]),
        chain.base_weights(memory[0], params),
    )
    (W, S), decays_to_base = memory, bool(bases) and table.a is not None
    params = {name: params[name] for name in chain.params}
    A = [w + base for w, base in zip(W, bases, strict=True)] if bases else W
    transposed = tuple(w.shape[-1] <= w.shape[-2] for w in A)
    sizes = [(min(w.shape[-2:]), max(w.shape[-2:])) for w in A]
    map_groups = group_by_size(sizes)
    stacks = [A, *([] if S is None else [S]), *([bases] if decays_to_base else [])]
    if (
        is_cpu(k)
        and sum(w.numel() * w.element_size() for stack in stacks for w in stack) > MAX_GROUPED_BYTES
    ):
        map_groups = tuple((i,) for i in range(len(A)))
    runner = None
    if kernels and not is_cpu(k) and not bases:
        runner = _runner(
            chain, A, output_head, k, (queries[0].shape[3], len(stacks)), create_graph=outer
        )
    if runner is not None:
        transposed, map_groups = (True, False), ((0,), (1,))  # square maps too
    start = [
        torch.stack(
            [stack[i].mT if transposed[i] else stack[i] for i in group for stack in stacks], dim=1
        ).unflatten(1, (len(group), -1))
        for group in map_groups
    ]
    spec = ChainSpec(
        activation=ACTIVATIONS[chain.activation],
        output_head=output_head,
        gates=tuple(flat),
        params=tuple(params),
        transposed=transposed,
        map_groups=map_groups,
        save_for_backward=outer,
        runner=runner,
    )
    T, c = _transitions(table, decays_to_base=decays_to_base)
    features, raw_queries = (None if q is None else q.flatten(1, 2) for q in queries)
    assert features is not None
    nearest_value = output_head.nearest_value(v, raw, params)
    associations = ChainInputs(
        k=k, v=v, raw=raw, T=T, c=c, gates=flat, nearest_value=nearest_value, params=params
    )
    query_batch = make_query_batch(table, features, decays_to_base=decays_to_base)
    y, memories = _run_batches(spec, associations, query_batch, commits, start)
    y = output_head.finish(y, features if raw_queries is None else raw_queries, params)
    stacks_per_map = [
        [w.mT.contiguous() if is_transposed else w.contiguous() for w in end.unbind(1)]
        for end, is_transposed in zip(split_groups(spec, memories), transposed, strict=True)
    ]
    end_maps = [end[0] for end in stacks_per_map]
    if bases:
        end_maps = [w - base for w, base in zip(end_maps, bases, strict=True)]
        end_maps = _keep_uncommitted(commits, end_maps, W)
    return y, end_maps, None if S is None else [end[1] for end in stacks_per_map]


def _runner(
    chain: Chain,
    A: Weights,
    output_head: OutputHead,
    k: Tensor,
    sizes: tuple[int, int],
    *,
    create_graph: bool,
) -> RecurrenceRunner | None:
    """Return the runner of the kernels if they support the call and pass their trial."""
    Q, J = sizes  # queries of an inner batch, stacks
    runner = select_runner(A, output_head, k, Q)
    if runner is None or runner.launch is not launch_recurrence:
        return runner  # a registered launcher has no trial
    spec = ChainSpec(
        activation=ACTIVATIONS[chain.activation],
        output_head=output_head,
        gates=(),
        params=chain.params,
        transposed=(True, False),
        map_groups=((0,), (1,)),
        save_for_backward=create_graph,
        runner=runner,
    )
    R, (W, D) = k.shape[2], A[0].shape[-2:]
    return runner if agrees(_run_flat, spec, (R, Q, D, W, J), k.device) else None


def _keep_uncommitted(commits: Commits, end_maps: Weights, start_maps: Weights) -> Weights:
    """Return the final maps, with the exact initial values of elements that commit nothing."""
    if any(commit is True for commit in commits):
        return end_maps
    rows = [commit for commit in commits if isinstance(commit, Tensor)]
    if not rows:
        return [*start_maps]
    is_committed = torch.stack(rows).any(0)
    return [torch.where(is_committed, w, old) for w, old in zip(end_maps, start_maps, strict=True)]


def _run_flat(spec: ChainSpec, flat: Sequence[Any]) -> tuple[Tensor, ...]:
    """Run all batches, and commit each, from the inputs of `_ChainFunction`."""
    inputs, queries, memory = _unflatten_inputs(spec, flat)
    y, final_maps = _run_batches(spec, inputs, queries, [True] * inputs.k.shape[0], memory)
    return y, *final_maps


def _transitions(table: Table, *, decays_to_base: bool) -> tuple[Tensor | None, Tensor]:
    """Return T ``[N, P, J, J]``, or ``None`` if A is not scaled, and c ``[N, P, R, J]``.

    The stacks are A, S with momentum, and W̄ if A decays to a base.
    """
    C = table.C[:, :, -1]
    if table.m is None or table.s is None or table.D is None:
        if table.a is None:
            return None, C.unsqueeze(-1)
        a = table.a[:, :, -1]
        if not decays_to_base:
            return a[..., None, None], C.unsqueeze(-1)
        zero, one = torch.zeros_like(a), torch.ones_like(a)
        T = torch.stack([a, 1 - a, zero, one], dim=-1).unflatten(-1, (2, 2))
        return T, torch.stack([C, torch.zeros_like(C)], dim=-1)
    m, s = table.m[:, :, -1], table.s
    a = torch.ones_like(m) if table.a is None else table.a[:, :, -1]
    zero = torch.zeros_like(m)
    if not decays_to_base:
        T = torch.stack([a, m, zero, s], dim=-1).unflatten(-1, (2, 2))
        return T, torch.stack([C, table.D], dim=-1)
    one = torch.ones_like(m)
    T = torch.stack([a, m, 1 - a, zero, s, zero, zero, zero, one], dim=-1).unflatten(-1, (3, 3))
    return T, torch.stack([C, table.D, torch.zeros_like(C)], dim=-1)


# -- all inner batches -----------------------------------------------------------------------------


def _run_batches(
    spec: ChainSpec,
    inputs: ChainInputs,
    queries: QueryBatch,
    commits: Commits,
    start: Sequence[Tensor],
) -> tuple[Tensor, Tensors]:
    """Return outputs ``[N, P, rows, V]``, and A and S per group after all batches.

    Args:
        spec: Properties of the chain.
        inputs: Inputs of all batches.
        queries: Queries of all batches.
        commits: Whether a batch commits its update, per batch.
        start: A and S before the first batch, per group ``[P, L, J, narrow, wide]``.
    """
    if not spec.save_for_backward:
        parts: Tensors = []
        buffers = ScratchBuffers(reused=True)
        memory, step_scales = list(start), make_step_scales(spec, inputs)
        for bounds in _spans(inputs, start):
            part = inputs.slice_batches(*bounds)
            trace = _run_span(spec, part, memory, commits[slice(*bounds)], buffers, step_scales)
            parts.append(read(spec, trace, queries.slice_batches(*bounds))[0])
            memory = trace.final_maps
        return torch.cat(parts), memory
    tokens = [
        inputs.k,
        inputs.v,
        inputs.raw,
        inputs.c,
        queries.q,
        queries.C,
        *inputs.gates.values(),
    ]
    flat = [inputs.T, queries.scale, inputs.nearest_value, *tokens, *inputs.params.values(), *start]
    y, *final_maps = _ChainFunction.apply(spec, commits, *flat)
    return y, final_maps


def _spans(inputs: ChainInputs, start: Sequence[Tensor]) -> list[tuple[int, int]]:
    """Return the first and last batch of every span; a GPU has one span."""
    N = inputs.k.shape[0]
    if not is_cpu(inputs.k):
        return [(0, N)]
    batch_bytes = sum(w.numel() * w.element_size() for w in start)
    count = min(N, MAX_SPAN_BYTES // max(batch_bytes, 1))
    count = 1 if count < MIN_SPAN_BATCHES else count
    return [(s, min(s + count, N)) for s in range(0, N, count)]


_FIXED = ("T", "scale", "nearest_value", "k", "v", "raw", "c", "q", "C")


class _ChainFunction(CustomFunction):
    """All inner batches and their backward pass, from a flat list of tensors.

    The list contains `_FIXED`, the loss's hyperparameters, the memory's parameters, and its maps
    per group. The outputs are y and the maps after the last batch.
    """

    @staticmethod
    def forward(ctx: Any, spec: ChainSpec, commits: Commits, *flat: Any) -> tuple[Tensor, ...]:
        inputs, queries, memory = _unflatten_inputs(spec, flat)
        ctx.spec, ctx.commits = spec, commits
        ctx.spans = _spans(inputs, memory) if spec.runner is None else [(0, inputs.k.shape[0])]
        outputs: Tensors = []
        ctx.traces, buffers = [], ScratchBuffers(reused=False)
        step_scales = make_step_scales(spec, inputs)
        for bounds in ctx.spans:
            part = inputs.slice_batches(*bounds)
            trace = _run_span(spec, part, memory, commits[slice(*bounds)], buffers, step_scales)
            y, caches = read(spec, trace, queries.slice_batches(*bounds))
            outputs.append(y)
            ctx.traces.append((trace, caches))
            memory = trace.final_maps
        ctx.save_for_backward(*flat)
        # The outputs do not alias tensors of the backward pass.
        return torch.cat(outputs), *(w.clone() for w in memory)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        spec: ChainSpec = ctx.spec
        flat = ctx.saved_tensors
        needs = ctx.needs_input_grad[2:]
        if torch.is_grad_enabled():
            return None, None, *_differentiable_gradient(spec, ctx.commits, flat, needs, grads)
        return None, None, *_gradient(spec, ctx, flat, needs, grads)


def _run_span(
    spec: ChainSpec,
    inputs: ChainInputs,
    memory: Tensors,
    commits: Commits,
    buffers: ScratchBuffers,
    step_scales: StepScales | None,
) -> ForwardTrace:
    """Run a span of batches, by the runner if there is one."""
    if spec.runner is None:
        return forward(spec, inputs, memory, commits, buffers, step_scales)
    trace = spec.runner.forward(spec, inputs, split_groups(spec, memory), commits)
    return replace(trace, final_maps=[w.unsqueeze(1) for w in trace.final_maps])


def _unflatten_inputs(
    spec: ChainSpec, flat: Sequence[Any]
) -> tuple[ChainInputs, QueryBatch, Tensors]:
    """Return the inputs of the chain, its queries and its maps from the flat list."""
    fixed = dict(zip(_FIXED, flat, strict=False))
    rest = flat[len(_FIXED) :]
    first, last = len(spec.gates), len(spec.gates) + len(spec.params)
    gates = dict(zip(spec.gates, rest[:first], strict=True))
    params = dict(zip(spec.params, rest[first:last], strict=True))
    fixed_inputs = {name: fixed[name] for name in ("k", "v", "raw", "T", "c", "nearest_value")}
    inputs = ChainInputs(**fixed_inputs, gates=gates, params=params)
    return inputs, QueryBatch(q=fixed["q"], C=fixed["C"], scale=fixed["scale"]), list(rest[last:])


def _gradient(
    spec: ChainSpec,
    ctx: Any,
    flat: Sequence[Any],
    needs: Sequence[bool],
    grads: Sequence[Tensor],
) -> list[Tensor | None]:
    """Return the gradients of the flat inputs, span by span from the last."""
    inputs, queries, _ = _unflatten_inputs(spec, flat)
    names = [*_FIXED, *(f"gate {name}" for name in spec.gates)]
    param_names = [f"param {name}" for name in spec.params]
    names += param_names
    needs_grad = dict(zip(names, needs, strict=False))
    tensors = dict(zip(names, flat, strict=False))
    total = {
        name: torch.empty_like(tensors[name], memory_format=torch.contiguous_format)
        for name, need in needs_grad.items()
        if need
    }
    for name in param_names:  # sums over all batches
        if name in total:
            total[name].zero_()
    grad_maps = [g.clone(memory_format=torch.contiguous_format) for g in grads[1:]]
    traces: list[tuple[ForwardTrace, list[ReadCache]]] = ctx.traces
    for bounds, (trace, caches) in zip(reversed(ctx.spans), reversed(traces), strict=True):
        span = slice(*bounds)
        read_grads = backward_read(
            spec, trace, queries.slice_batches(*bounds), caches, grads[0][span]
        )
        if spec.runner is None:
            part = inputs.slice_batches(*bounds)
            input_grads = backward(
                spec, part, trace, ctx.commits[span], needs_grad, read_grads, grad_maps
            )
        else:
            flat_grads = [w[:, 0].flatten(2) for w in grad_maps]
            input_grads = spec.runner.backward(
                spec, inputs, trace, needs_grad, read_grads, flat_grads
            )
            input_grads = replace(input_grads, start=[w.unsqueeze(1) for w in input_grads.start])
        grads_by_name = {
            "T": input_grads.T,
            "k": input_grads.k,
            "v": input_grads.v,
            "raw": input_grads.raw,
        }
        grads_by_name |= {
            "c": input_grads.c,
            "q": read_grads.q,
            "C": read_grads.C,
            "scale": read_grads.scale,
        }
        grads_by_name |= input_grads.named
        for name, x in total.items():
            if name in param_names:
                x += input_grads.named.get(name, 0.0)
            else:
                x[span] = 0.0 if (grad := grads_by_name.get(name)) is None else grad
        grad_maps = input_grads.start
    needs_first = needs[len(names) :]
    return [
        *(total.get(name) for name in names),
        *(w if need else None for w, need in zip(grad_maps, needs_first, strict=True)),
    ]


def _differentiable_gradient(
    spec: ChainSpec,
    commits: Commits,
    flat: Sequence[Any],
    needs: Sequence[bool],
    grads: Sequence[Tensor],
) -> list[Tensor | None]:
    """Return the gradients of the flat inputs as differentiable functions of them."""

    def outputs(tensors: Sequence[Any]) -> Tensors:
        inputs, queries, memory = _unflatten_inputs(spec, tensors)
        trace = forward_differentiable(spec, inputs, memory, commits)
        return [
            read_differentiable(spec, trace.M, trace.h, trace.delta, queries),
            *trace.final_maps,
        ]

    return differentiable_backward(outputs, flat, needs, grads)
