"""Chain path: memories that are sequences of maps, with the same coefficients for all maps.

This path has explicit equations for W_L σ(… σ(W_1 x)) with scalar decays, momentum and windows
(`forward`, `backward`). `general` runs any other program.

With a base W̄, A = W̄ + W decays towards W̄ and z_t has the term (1 − a_t) W̄ x_t. W̄ is then a third
stack, which is constant. `tests/engines/test_deep.py` compares this path with the general one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from recollect.choices.autograd import CustomFunction, differentiable_backward
from recollect.engines.deep.chain.backward import backward, backward_read
from recollect.engines.deep.chain.chain import (
    ACTIVATIONS,
    Chain,
    ChainInputs,
    ChainSpec,
    Commits,
    ForwardTrace,
    OutputHead,
)
from recollect.engines.deep.chain.forward import ReadCache, forward, is_cpu, map_input, read
from recollect.engines.deep.recurrence import RecurrenceRunner, agrees, select_runner
from recollect.engines.deep.recurrence.launch import launch as launch_recurrence
from recollect.engines.deep.step_coefficients import Table

__all__ = ["run_chain"]

Weights = Tensors = list[Tensor]

MAX_SPAN_BYTES = 2**23
"""Largest size of the weights that a CPU reads at once, in bytes, so that they fit its cache."""

MIN_SPAN_BATCHES = 4
"""Smallest number of batches in a span with several batches."""


def run_chain(
    chain: Chain,
    table: Table,  # coefficients of every token
    keys: Mapping[str, Tensor],  # inputs of associations [N, B, H, R, ·]
    queries: tuple[Tensor, Tensor | None],  # features, and raw queries if they differ
    commits: Commits,
    memory: tuple[Weights, Weights | None],  # W and S [P, out, in]
    params: Mapping[str, Tensor],  # learned parameters of the memory
    *,
    group_size: int,  # batches whose intermediates are stored at once
    outer: bool,  # whether a backward pass follows
    uses_end: bool,  # whether the memory after the last batch is used
    kernels: bool = True,  # whether Triton kernels may run the recurrence
) -> tuple[Tensor, Weights, Weights | None]:
    """Return outputs ``[N, P, b G, V]``, and W and S after the last batch.

    W and S are the initial ones if ``uses_end`` is false.
    """
    gates = {name: x.flatten(1, 2) for name, x in keys.items()}
    k, v = gates.pop("phi"), gates.pop("v")
    raw = gates.pop("raw", k)
    q = queries[0].flatten(1, 2)
    raw_queries = q if queries[1] is None else queries[1].flatten(1, 2)
    output_head, (W, S) = chain.output_head(keys["v"].shape[2]), memory
    k, q = (map_input(x, W[0].shape[-1]) for x in (k, q))
    bases = chain.base_weights(W, params)
    decays_to_base = bool(bases) and table.a is not None
    params = {name: params[name] for name in chain.params}
    A = [w + base for w, base in zip(W, bases, strict=True)] if bases else W
    stacks = [A, *([] if S is None else [S]), *([bases] if decays_to_base else [])]
    runner = None
    if kernels and not is_cpu(k) and not (bases or chain.erasure):
        sizes = queries[0].shape[3], len(stacks)
        runner = _runner(chain, A, output_head, k, sizes, create_graph=outer)
    spec = ChainSpec(
        activation=ACTIVATIONS[chain.activation],
        output_head=output_head,
        # The kernels have one layout, which square maps share.
        transposed=(True, False) if runner else tuple(w.shape[-1] <= w.shape[-2] for w in A),
        save_for_backward=outer,
        erasure=chain.erasure,
        group_size=group_size,
        runner=runner,
    )
    start = [
        torch.stack([w.mT if is_in_out else w for w in of_map], dim=1)
        for of_map, is_in_out in zip(zip(*stacks, strict=True), spec.transposed, strict=True)
    ]
    T, c = _transitions(table, decays_to_base=decays_to_base)
    C, scale = _read_coefficients(table, q, decays_to_base=decays_to_base)
    inputs = ChainInputs(
        k=k,
        head=output_head.inputs(v, raw, params),
        T=T,
        c=c,
        q=q,
        C=C,
        scale=scale,
        gates=gates,
        params=params,
    )
    y, ends = _run_batches(spec, inputs, commits, start)
    y = output_head.finish(y, raw_queries, params)
    if not uses_end:
        return y, W, S
    ends = [
        x.mT if is_in_out else x for x, is_in_out in zip(ends, spec.transposed, strict=True)
    ]  # [P, J, out, in]
    end_W = [x[:, 0].contiguous() for x in ends]
    if bases:
        end_W = [w - base for w, base in zip(end_W, bases, strict=True)]
        end_W = _keep_uncommitted(commits, end_W, W)
    return y, end_W, None if S is None else [x[:, 1].contiguous() for x in ends]


def _runner(
    chain: Chain,
    A: Weights,
    output_head: OutputHead,
    k: Tensor,
    sizes: tuple[int, int],  # queries of an inner batch, stacks
    *,
    create_graph: bool,
) -> RecurrenceRunner | None:
    """Return the runner of the kernels if they support the call and pass their trial."""
    Q, J = sizes
    runner = select_runner(A, output_head, k, Q)
    if runner is None or runner.launch is not launch_recurrence:
        return runner  # a registered launcher has no trial
    spec = ChainSpec(
        activation=ACTIVATIONS[chain.activation],
        output_head=output_head,
        transposed=(True, False),
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


def _read_coefficients(
    table: Table, q: Tensor, *, decays_to_base: bool
) -> tuple[Tensor, Tensor | None]:
    """Return `ChainInputs.C` and `ChainInputs.scale` for features of queries ``[N, P, b G, F]``."""
    G = q.shape[2] // table.C.shape[2]

    def per_query(x: Tensor) -> Tensor:
        return x if G == 1 else x.repeat_interleave(G, dim=2)

    parts: Tensors = []
    if table.a is not None:
        parts = [table.a]
    elif table.m is not None:
        parts = [torch.ones_like(table.m)]
    if table.m is not None:
        parts.append(table.m)
    if decays_to_base:
        parts.append(1 - parts[0])
    return per_query(table.C), per_query(torch.stack(parts, dim=-1)) if parts else None


# -- all inner batches -----------------------------------------------------------------------------


def _run_batches(
    spec: ChainSpec,
    inputs: ChainInputs,
    commits: Commits,
    start: Sequence[Tensor],  # M before the first batch per map [P, J, narrow, wide]
) -> tuple[Tensor, Tensors]:
    """Return outputs ``[N, P, Q, V]``, and M per map after all batches."""
    if not spec.save_for_backward:
        outputs, memory, spare = Tensors(), [*start], None
        for group in _groups(spec, inputs):
            for bounds in _spans(spec, group, start):
                y, trace, caches = _run_span(spec, inputs, memory, commits, bounds, spare)
                outputs.append(y)
                memory, spare = trace.final_maps, memory
                del trace, caches  # the next span reuses their memory
        return _joined(outputs), memory
    tensors = _flatten(inputs)
    y, *memory = _ChainFunction.apply(spec, commits, (*tensors,), *tensors.values(), *start)
    return y, memory


def _joined(outputs: Tensors) -> Tensor:
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _run_span(
    spec: ChainSpec,
    inputs: ChainInputs,  # inputs of all batches
    memory: Sequence[Tensor],
    commits: Commits,
    bounds: tuple[int, int],
    end: Tensors | None = None,  # memory for M after the span; new pages cost more than products
) -> tuple[Tensor, ForwardTrace, list[ReadCache]]:
    """Run a span of batches, by the runner if there is one, and read them."""
    part, commits = inputs.slice_batches(*bounds), commits[slice(*bounds)]
    if spec.runner is None:
        trace = forward(spec, part, memory, commits, end=end)
    else:
        trace = spec.runner.forward(spec, part, memory, commits)
    y, caches = read(spec, trace, part)
    return y, trace, caches


def _run_flat(
    spec: ChainSpec, tensors: Mapping[str, Tensor], start: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """Run all batches, and commit each, from the inputs of `_ChainFunction`."""
    inputs = _unflatten(tensors)
    y, final_maps = _run_batches(spec, inputs, [True] * inputs.k.shape[0], start)
    return y, *final_maps


def _groups(spec: ChainSpec, inputs: ChainInputs) -> list[tuple[int, int]]:
    """Return the first and last batch of every group."""
    N = inputs.k.shape[0]
    g = spec.group_size or N
    return [(s, min(s + g, N)) for s in range(0, N, g)]


def _spans(
    spec: ChainSpec, group: tuple[int, int], start: Sequence[Tensor]
) -> list[tuple[int, int]]:
    """Return the first and last batch of every span of a group; a GPU has one span."""
    if spec.runner is not None or not is_cpu(start[0]):
        return [group]
    first, stop = group
    batch_bytes = sum(w.numel() * w.element_size() for w in start)
    count = min(stop - first, MAX_SPAN_BYTES // max(batch_bytes, 1))
    count = 1 if count < MIN_SPAN_BATCHES else count
    return [(s, min(s + count, stop)) for s in range(first, stop, count)]


_KINDS = ("head", "gate", "param")
"""Kinds of named tensors, the first word of their names in a flat mapping."""


def _flatten(inputs: ChainInputs) -> dict[str, Tensor]:
    """Return the tensors of the inputs by name, such as ``"k"`` and ``"head raw"``."""
    fields = ("k", "c", "q", "C", "T", "scale")
    tensors = {name: x for name in fields if (x := getattr(inputs, name)) is not None}
    for kind, xs in zip(_KINDS, (inputs.head, inputs.gates, inputs.params), strict=True):
        tensors |= {f"{kind} {name}": x for name, x in xs.items()}
    return tensors


def _unflatten(tensors: Mapping[str, Tensor]) -> ChainInputs:
    """Return the inputs from their tensors by name."""
    fields: dict[str, Any] = {"T": None, "scale": None}
    named: dict[str, dict[str, Tensor]] = {kind: {} for kind in _KINDS}
    for key, x in tensors.items():
        kind, _, name = key.partition(" ")
        if kind in named:
            named[kind][name] = x
        else:
            fields[key] = x
    return ChainInputs(**fields, head=named["head"], gates=named["gate"], params=named["param"])


class _ChainFunction(CustomFunction):
    """All inner batches and their backward pass, which runs groups again if there are several.

    The inputs are the tensors of `_flatten`, whose names are an argument, and M per map. The
    outputs are y and M after the last batch.
    """

    @staticmethod
    def forward(
        ctx: Any, spec: ChainSpec, commits: Commits, names: tuple[str, ...], *flat: Any
    ) -> tuple[Tensor, ...]:
        inputs = _unflatten(dict(zip(names, flat, strict=False)))
        memory: Sequence[Tensor] = flat[len(names) :]
        ctx.spec, ctx.commits, ctx.names, ctx.groups = spec, commits, names, []
        outputs, groups = Tensors(), _groups(spec, inputs)
        for group in groups:
            start = memory
            y, memory, spans = _run_group(spec, inputs, start, commits, group)
            outputs += y
            ctx.groups.append((group, start, spans if len(groups) == 1 else None))
        ctx.save_for_backward(*flat)
        ctx.set_materialize_grads(False)  # often nothing reads the last memory
        return _joined(outputs), *memory

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        run = _differentiable_gradient if torch.is_grad_enabled() else _gradient
        return None, None, None, *run(ctx, ctx.saved_tensors, ctx.needs_input_grad[3:], grads)


_Span = tuple[tuple[int, int], ForwardTrace, list[ReadCache]]
"""First and last batch of a span, and its tensors for the backward pass."""


def _run_group(
    spec: ChainSpec,
    inputs: ChainInputs,  # inputs of all batches
    memory: Sequence[Tensor],
    commits: Commits,
    group: tuple[int, int],
) -> tuple[Tensors, Sequence[Tensor], list[_Span]]:
    """Return the outputs of every span of a group, M after the group, and the spans."""
    outputs, spans = Tensors(), list[_Span]()
    for bounds in _spans(spec, group, memory):
        y, trace, caches = _run_span(spec, inputs, memory, commits, bounds)
        outputs.append(y)
        memory = trace.final_maps
        # Outputs of a function of autograd must not alias tensors of its backward pass.
        spans.append((bounds, replace(trace, final_maps=[]), caches))
    return outputs, memory, spans


def _reversed_spans(ctx: Any, inputs: ChainInputs) -> Iterator[_Span]:
    """Yield all spans from the last; a group that was not stored runs again."""
    for group, memory, spans in reversed(ctx.groups):
        if spans is None:
            spans = _run_group(ctx.spec, inputs, memory, ctx.commits, group)[2]
        yield from reversed(spans)
        del spans


def _gradient(
    ctx: Any, flat: Sequence[Tensor], needs: Sequence[bool], grads: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """Return the gradients of the inputs of `_ChainFunction`, span by span from the last."""
    spec: ChainSpec = ctx.spec
    tensors = dict(zip(ctx.names, flat, strict=False))
    inputs, needed = _unflatten(tensors), dict(zip(ctx.names, needs, strict=False))
    total: dict[str, Tensor] = {}
    grad_y, *end_grads = grads
    if grad_y is None:
        grad_y = torch.zeros(*inputs.q.shape[:3], inputs.head["v"].shape[-1]).to(inputs.q)
    maps = [
        torch.zeros_like(w) if g is None else g.clone(memory_format=torch.contiguous_format)
        for g, w in zip(end_grads, flat[len(ctx.names) :], strict=True)
    ]
    for (start, stop), trace, caches in _reversed_spans(ctx, inputs):
        part = inputs.slice_batches(start, stop)
        reads = backward_read(spec, trace, part, caches, grad_y[start:stop])
        run = backward if spec.runner is None else spec.runner.backward
        commits = ctx.commits[start:stop]
        by_name, maps = run(spec, part, trace, commits, needed, reads, maps)
        for name, x in {**reads.inputs, **by_name}.items():
            if not needed.get(name):
                continue
            if name.startswith("param "):  # a sum over all batches
                total[name] = total[name] + x if name in total else x
            elif stop - start == len(ctx.commits):
                total[name] = x
            else:
                if name not in total:
                    total[name] = torch.empty_like(
                        tensors[name], memory_format=torch.contiguous_format
                    )
                total[name][start:stop] = x
        del trace, caches, part, reads, by_name  # the next group reuses their memory
    return [
        *(total.get(name) for name in ctx.names),
        *(w if need else None for w, need in zip(maps, needs[len(ctx.names) :], strict=True)),
    ]


def _differentiable_gradient(
    ctx: Any, flat: Sequence[Tensor], needs: Sequence[bool], grads: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """Return the gradients of the inputs of `_ChainFunction` as differentiable functions."""
    spec: ChainSpec = ctx.spec

    def outputs(tensors: Sequence[Any]) -> Tensors:
        inputs = _unflatten(dict(zip(ctx.names, tensors, strict=False)))
        memory = tensors[len(ctx.names) :]
        trace = forward(spec, inputs, memory, ctx.commits, create_graph=True)
        return [read(spec, trace, inputs)[0], *trace.final_maps]

    return differentiable_backward(outputs, flat, needs, grads)
