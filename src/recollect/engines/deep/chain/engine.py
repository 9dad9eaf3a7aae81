"""The chain path: memories of maps in sequence, with the same coefficients for all maps.

What `general` does for any program, written out for W_L σ(… σ(W_1 x)) with scalar decays, momentum
and windows. Only the recurrence over inner-batch boundaries, driven by keys, is
sequential (`forward`); after it the queries of all inner batches are read together, map by map:

    z_t = a_t A° x_t + m_t S° x_t + Σ_i (C ⊙ (x hᵀ))[t, i] δ_i

Beside a base W̄ that is A = W̄ + W, which forgets towards W̄, with (1 − a_t) W̄ x_t more: W̄ is one
more stack, which nothing moves. `tests/engines/test_deep.py` holds this path to the general one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from recollect.choices.autograd import CustomFunction, differentiable_backward
from recollect.engines.deep.chain.activations import CURVES
from recollect.engines.deep.chain.backward import backward
from recollect.engines.deep.chain.chain import Chain
from recollect.engines.deep.chain.ends.ending import Ending
from recollect.engines.deep.chain.families import apart, families_of, hosted
from recollect.engines.deep.chain.forward import (
    ScratchBuffers,
    forward,
    forward_by_autograd,
    shares_of,
)
from recollect.engines.deep.chain.reads import (
    QueryBatch,
    ReadCache,
    backward_read,
    query_batch,
    read,
    read_by_autograd,
)
from recollect.engines.deep.chain.shares import Shares
from recollect.engines.deep.chain.trace import ChainSpec, Commits, ForwardTrace, Keys
from recollect.engines.deep.recurrence import RecurrenceRunner, agrees, runner_of
from recollect.engines.deep.recurrence.launch import launch as launch_recurrence
from recollect.engines.deep.step_coefficients import Table

__all__ = ["run_chain"]

Weights = Tensors = list[Tensor]

TOGETHER = 2**23
"""Bytes of weights at borders that a CPU reads at once: few enough to stay near the processor."""

BESIDE = 2**20
"""Bytes of A and S up to which maps of the same sizes are one operation on a CPU too: beyond them
each is moved and written while it is near the processor."""

FEW = 4
"""Batches below which it is better to read them one by one than to gather their weights."""


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
    """Outputs ``[N, P, b G, V]``, and W and S after the last batch.

    Args:
        keys: ``[N, B, H, R, ·]`` by name. queries: features and, where they differ, raw queries,
            ``[N, B, H, b G, ·]``. memory: W and S, ``[P, out, in]``. params: what it has learned.
        outer: whether gradients will be asked for.
        kernels: whether Triton kernels may run the recurrence.
    """
    flat = {name: x.flatten(1, 2) for name, x in keys.items()}
    k, v = flat.pop("phi"), flat.pop("v")
    raw = flat.pop("raw", k)
    ending, bases = chain.ending(keys["v"].shape[2]), chain.bases_of(memory[0], params)
    (W, S), pulled = memory, bool(bases) and table.a is not None
    params = {name: params[name] for name in chain.params}
    A = [w + base for w, base in zip(W, bases, strict=True)] if bases else W
    tall = tuple(w.shape[-1] <= w.shape[-2] for w in A)
    sizes = [(min(w.shape[-2:]), max(w.shape[-2:])) for w in A]
    families = families_of(sizes)
    stacks = [A, *([] if S is None else [S]), *([bases] if pulled else [])]
    if hosted(k) and sum(w.numel() * w.element_size() for one in stacks for w in one) > BESIDE:
        families = tuple((i,) for i in range(len(A)))
    walker = None
    if kernels and not hosted(k) and not bases:
        walker = _runner(chain, A, ending, k, (queries[0].shape[3], len(stacks)), outer=outer)
    if walker is not None:
        tall, families = (True, False), ((0,), (1,))  # square maps too
    start = [
        torch.stack(
            [one[i].mT if tall[i] else one[i] for i in some for one in stacks], dim=1
        ).unflatten(1, (len(some), -1))
        for some in families
    ]
    spec = ChainSpec(
        curve=CURVES[chain.activation],
        ending=ending,
        gates=tuple(flat),
        params=tuple(params),
        tall=tall,
        families=families,
        keep=outer,
        walker=walker,
    )
    T, c = _transitions(table, pulled=pulled)
    features, raw_queries = (None if q is None else q.flatten(1, 2) for q in queries)
    assert features is not None
    said = ending.said(v, raw, params)
    associations = Keys(k=k, v=v, raw=raw, T=T, c=c, gates=flat, said=said, params=params)
    asked = query_batch(table, features, pulled=pulled)
    y, memories = _run_batches(spec, associations, asked, commits, start)
    y = ending.finish(y, features if raw_queries is None else raw_queries, params)
    ends = [
        [w.mT.contiguous() if up else w.contiguous() for w in end.unbind(1)]
        for end, up in zip(apart(spec, memories), tall, strict=True)
    ]
    after = [end[0] for end in ends]
    if bases:
        after = [w - base for w, base in zip(after, bases, strict=True)]
        after = _where_moved(commits, after, W)
    return y, after, None if S is None else [end[1] for end in ends]


def _runner(
    chain: Chain, A: Weights, ending: Ending, k: Tensor, sizes: tuple[int, int], *, outer: bool
) -> RecurrenceRunner | None:
    """The runner of the recurrence's kernels, if there are any for a call and their trial succeeds.

    Args:
        sizes: queries of an inner batch, and stacks.
    """
    Q, J = sizes
    runner = runner_of(A, ending, k, Q)
    if runner is None or runner.launch is not launch_recurrence:
        return runner  # a registered launcher has no trial
    spec = ChainSpec(
        curve=CURVES[chain.activation],
        ending=ending,
        gates=(),
        params=chain.params,
        tall=(True, False),
        families=((0,), (1,)),
        keep=outer,
        walker=runner,
    )
    R, (W, D) = k.shape[2], A[0].shape[-2:]
    return runner if agrees(_run_flat, spec, (R, Q, D, W, J), k.device) else None


def _where_moved(commits: Commits, after: Weights, before: Weights) -> Weights:
    """What stands after the batches, and to the last bit what stood before where none was kept."""
    if any(commit is True for commit in commits):
        return after
    rows = [commit for commit in commits if isinstance(commit, Tensor)]
    if not rows:
        return [*before]
    moved = torch.stack(rows).any(0)
    return [torch.where(moved, w, old) for w, old in zip(after, before, strict=True)]


def _run_flat(spec: ChainSpec, flat: Sequence[Any]) -> tuple[Tensor, ...]:
    """All batches, each to its end, from inputs as `_ChainFunction` takes them."""
    keys, queries, memory = _named(spec, flat)
    y, ends = _run_batches(spec, keys, queries, [True] * keys.k.shape[0], memory)
    return y, *ends


def _transitions(table: Table, *, pulled: bool) -> tuple[Tensor | None, Tensor]:
    """T ``[N, P, J, J]`` of the borders, or ``None`` where A stays, and c ``[N, P, R, J]``.

    The stacks are A, then S with momentum, then W̄ where A is ``pulled`` towards a base.
    """
    C = table.C[:, :, -1]
    if table.m is None or table.s is None or table.D is None:
        if table.a is None:
            return None, C.unsqueeze(-1)
        a = table.a[:, :, -1]
        if not pulled:
            return a[..., None, None], C.unsqueeze(-1)
        no, one = torch.zeros_like(a), torch.ones_like(a)
        T = torch.stack([a, 1 - a, no, one], dim=-1).unflatten(-1, (2, 2))
        return T, torch.stack([C, torch.zeros_like(C)], dim=-1)
    m, s = table.m[:, :, -1], table.s
    a = torch.ones_like(m) if table.a is None else table.a[:, :, -1]
    no = torch.zeros_like(m)
    if not pulled:
        T = torch.stack([a, m, no, s], dim=-1).unflatten(-1, (2, 2))
        return T, torch.stack([C, table.D], dim=-1)
    one = torch.ones_like(m)
    T = torch.stack([a, m, 1 - a, no, s, no, no, no, one], dim=-1).unflatten(-1, (3, 3))
    return T, torch.stack([C, table.D, torch.zeros_like(C)], dim=-1)


# -- all inner batches -----------------------------------------------------------------------------


def _run_batches(
    spec: ChainSpec, keys: Keys, queries: QueryBatch, commits: Commits, start: Sequence[Tensor]
) -> tuple[Tensor, Tensors]:
    """Outputs ``[N, P, rows, V]``, and A and S per family after all batches.

    Args:
        start: A and S per family ``[P, L, J, narrow, wide]`` before the first.
    """
    if not spec.keep:
        parts: Tensors = []
        buffers = ScratchBuffers(reused=True)
        memory, shares = list(start), shares_of(spec, keys)
        for here in _spans(keys, start):
            cut = keys.cut(*here)
            trace = _walked(spec, cut, memory, commits[slice(*here)], buffers, shares)
            parts.append(read(spec, trace, queries.cut(*here))[0])
            memory = trace.ends
        return torch.cat(parts), memory
    tokens = [keys.k, keys.v, keys.raw, keys.c, queries.q, queries.C, *keys.gates.values()]
    flat = [keys.T, queries.scale, keys.said, *tokens, *keys.params.values(), *start]
    y, *ends = _ChainFunction.apply(spec, commits, *flat)
    return y, ends


def _spans(keys: Keys, start: Sequence[Tensor]) -> list[tuple[int, int]]:
    """First and last batch of those that are read at once; on a device all of a group."""
    N = keys.k.shape[0]
    if not hosted(keys.k):
        return [(0, N)]
    each = sum(w.numel() * w.element_size() for w in start)
    some = min(N, TOGETHER // max(each, 1))
    some = 1 if some < FEW else some
    return [(s, min(s + some, N)) for s in range(0, N, some)]


_FIXED = ("T", "scale", "said", "k", "v", "raw", "c", "q", "C")


class _ChainFunction(CustomFunction):
    """All inner batches with their backward; from a flat list to y and the memory after.

    Flat: `_FIXED`, the bias's numbers, the memory's params, then its maps per family.
    """

    @staticmethod
    def forward(ctx: Any, spec: ChainSpec, commits: Commits, *flat: Any) -> tuple[Tensor, ...]:
        keys, queries, memory = _named(spec, flat)
        ctx.spec, ctx.commits = spec, commits
        ctx.spans = _spans(keys, memory) if spec.walker is None else [(0, keys.k.shape[0])]
        outputs: Tensors = []
        ctx.traces, buffers = [], ScratchBuffers(reused=False)
        shares = shares_of(spec, keys)
        for here in ctx.spans:
            cut = keys.cut(*here)
            trace = _walked(spec, cut, memory, commits[slice(*here)], buffers, shares)
            y, caches = read(spec, trace, queries.cut(*here))
            outputs.append(y)
            ctx.traces.append((trace, caches))
            memory = trace.ends
        ctx.save_for_backward(*flat)
        # What leaves is not what the backward pass will take.
        return torch.cat(outputs), *(w.clone() for w in memory)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        spec: ChainSpec = ctx.spec
        flat = ctx.saved_tensors
        needs = ctx.needs_input_grad[2:]
        if torch.is_grad_enabled():
            return None, None, *_differentiable_gradient(spec, ctx.commits, flat, needs, grads)
        return None, None, *_gradient(spec, ctx, flat, needs, grads)


def _walked(
    spec: ChainSpec,
    keys: Keys,
    memory: Tensors,
    commits: Commits,
    buffers: ScratchBuffers,
    shares: Shares | None,
) -> ForwardTrace:
    """From border to border, by the spec's walker where it has one."""
    if spec.walker is None:
        return forward(spec, keys, memory, commits, buffers, shares)
    trace = spec.walker.forward(spec, keys, apart(spec, memory), commits)
    return replace(trace, ends=[w.unsqueeze(1) for w in trace.ends])


def _named(spec: ChainSpec, flat: Sequence[Any]) -> tuple[Keys, QueryBatch, Tensors]:
    fixed = dict(zip(_FIXED, flat, strict=False))
    rest = flat[len(_FIXED) :]
    first, last = len(spec.gates), len(spec.gates) + len(spec.params)
    gates = dict(zip(spec.gates, rest[:first], strict=True))
    params = dict(zip(spec.params, rest[first:last], strict=True))
    own = {name: fixed[name] for name in ("k", "v", "raw", "T", "c", "said")}
    keys = Keys(**own, gates=gates, params=params)
    return keys, QueryBatch(q=fixed["q"], C=fixed["C"], scale=fixed["scale"]), list(rest[last:])


def _gradient(
    spec: ChainSpec,
    ctx: Any,
    flat: Sequence[Any],
    needs: Sequence[bool],
    grads: Sequence[Tensor],
) -> list[Tensor | None]:
    """The gradient, span by span from the last."""
    keys, queries, _ = _named(spec, flat)
    names = [*_FIXED, *(f"gate {name}" for name in spec.gates)]
    learned = [f"param {name}" for name in spec.params]
    names += learned
    asks = dict(zip(names, needs, strict=False))
    given = dict(zip(names, flat, strict=False))
    total = {
        name: torch.empty_like(given[name], memory_format=torch.contiguous_format)
        for name, need in asks.items()
        if need
    }
    for name in learned:  # of all batches together
        if name in total:
            total[name].zero_()
    ends = [g.clone(memory_format=torch.contiguous_format) for g in grads[1:]]
    traces: list[tuple[ForwardTrace, list[ReadCache]]] = ctx.traces
    for here, (trace, caches) in zip(reversed(ctx.spans), reversed(traces), strict=True):
        span = slice(*here)
        part = queries.cut(*here)
        of_reads = backward_read(spec, trace, part, caches, grads[0][span])
        if spec.walker is None:
            cut = keys.cut(*here)
            of_keys = backward(spec, cut, trace, ctx.commits[span], asks, of_reads, ends)
        else:
            after = [w[:, 0].flatten(2) for w in ends]
            of_keys = spec.walker.backward(spec, keys, trace, asks, of_reads, after)
            of_keys = replace(of_keys, start=[w.unsqueeze(1) for w in of_keys.start])
        gradient_of = {"T": of_keys.T, "k": of_keys.k, "v": of_keys.v, "raw": of_keys.raw}
        gradient_of |= {"c": of_keys.c, "q": of_reads.q, "C": of_reads.C, "scale": of_reads.scale}
        gradient_of |= of_keys.named
        for name, x in total.items():
            if name in learned:
                x += of_keys.named.get(name, 0.0)
            else:
                x[span] = 0.0 if (one := gradient_of.get(name)) is None else one
        ends = of_keys.start
    needs_first = needs[len(names) :]
    return [
        *(total.get(name) for name in names),
        *(w if need else None for w, need in zip(ends, needs_first, strict=True)),
    ]


def _differentiable_gradient(
    spec: ChainSpec,
    commits: Commits,
    flat: Sequence[Any],
    needs: Sequence[bool],
    grads: Sequence[Tensor],
) -> list[Tensor | None]:
    """The gradient as something to differentiate again."""

    def outputs(given: Sequence[Any]) -> Tensors:
        keys, queries, memory = _named(spec, given)
        trace = forward_by_autograd(spec, keys, memory, commits)
        return [read_by_autograd(spec, trace.M, trace.h, trace.delta, queries), *trace.ends]

    return differentiable_backward(outputs, flat, needs, grads)
