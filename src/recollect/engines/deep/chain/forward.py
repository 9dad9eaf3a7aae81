"""Forward of the recurrence over inner-batch boundaries, and a form that autograd can follow.

Reads need the weights at every boundary, and h and δ at the keys. They do not depend on each other,
so that all inner batches are read at once (`engine`). Only the recurrence here and its `backward`
are sequential. Batches of 16 tokens are bound by the number of operations. With M the stack of A
and S of one map, each inner batch computes

    z_l = A_l h_(l−1),  h_l = σ(z_l);   u_l = A_lᵀ δ_l,  δ_(l−1) = σ′(z_(l−1)) ⊙ u_l
    M_j′ = Σ_i T[j, i] M_i + Σ_r c_j[r] δ_r h_rᵀ                       (T = [[a, m], [0, s]])

The output head computes δ_L (`output_head`). The narrower side of a map is in rows, so that c_j
scales the narrower of h and δ. One product then updates A and S of all maps of equal
sizes (`map_groups`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from recollect.engines.deep.chain.activations import Activation
from recollect.engines.deep.chain.map_groups import (
    ForwardStacks,
    add_matmul,
    split_groups,
    unbind_batches,
)
from recollect.engines.deep.chain.output_head.head import HeadGradients, OutputHead
from recollect.engines.deep.chain.output_head.layer_norm import LayerNormHead
from recollect.engines.deep.chain.step_scales import StepScales, differentiable_step_scales
from recollect.engines.deep.chain.trace import (
    ChainInputs,
    ChainSpec,
    Commits,
    ForwardTrace,
    MapStack,
    SavedStacks,
)

__all__ = [
    "ScratchBuffers",
    "forward",
    "forward_differentiable",
    "make_step_scales",
    "map_gradients",
]

Tensors = list[Tensor]


class ScratchBuffers:
    """Buffers of a span of batches, which the next span reuses if ``reused``.

    Writing to newly allocated pages takes longer than computing the values.
    """

    def __init__(self, *, reused: bool) -> None:
        self.reused = reused
        self.buffers: dict[tuple[object, ...], Tensor] = {}
        self.buffer_index = 0

    def begin_span(self) -> None:
        """Begin a span. The final maps of the previous span remain readable."""
        self.buffer_index = 1 - self.buffer_index

    def take(self, like: Tensor, *name: object, shape: Sequence[int]) -> Tensor:
        """Return uninitialized memory, shared by calls of equal name and shape if ``reused``."""
        if not self.reused:
            return like.new_empty(shape)
        key = (*name, tuple(shape))
        if key not in self.buffers:
            self.buffers[key] = like.new_empty(shape)
        return self.buffers[key]


def forward(
    spec: ChainSpec,
    inputs: ChainInputs,
    start: Sequence[Tensor],
    commits: Commits,
    buffers: ScratchBuffers,
    step_scales: StepScales | None,
) -> ForwardTrace:
    """Run a span of batches in order, without a graph.

    Args:
        spec: Properties of the chain.
        inputs: Inputs of the span.
        start: M before the span, per group ``[P, L, J, narrow, wide]``.
        commits: Commits of the span.
        buffers: Buffers of all spans.
        step_scales: Step scales of all spans (`make_step_scales`).
    """
    k, c = inputs.k, inputs.c
    N, P, R, _ = k.shape
    L = len(spec.transposed)
    count = N if spec.save_for_backward else 1
    buffers.begin_span()

    def allocate(name: str, index: int, *shape: int) -> Tensor:
        return buffers.take(k, name, index, shape=shape)

    stacks = [
        ForwardStacks(
            spec, inputs, i, w, (buffers.buffer_index, not spec.uses_step_scales), allocate
        )
        for i, w in enumerate(start)
    ]
    group_of = {i: (f, m) for f, group in enumerate(spec.map_groups) for m, i in enumerate(group)}
    parts = [stacks[f].map_views(m, spec.transposed[i]) for i, (f, m) in sorted(group_of.items())]
    hs, deltas, maps = map(list, zip(*parts, strict=True))
    hs[0] = k
    # Without a backward pass, z and u are needed only within a batch.
    zs, us = (
        [allocate(name, i, count, P, R, d.shape[-1]) for i, d in enumerate(deltas[:-1])]
        for name in ("z", "u")
    )
    activation = spec.activation
    affine, head_gradients = spec.output_head.affine, _head_gradient_fn(spec, inputs)
    map_groups = [MapStack(M=x.M, wide=x.wide, narrow=x.narrow, Q=x.Q) for x in stacks]
    if step_scales is not None:
        step_scales.begin_span([pair for stack in stacks for pair in stack.factors(L)], N)
    z_last, last = None, deltas[-1]
    if affine is None:
        z_last = allocate("last", 0, count, P, R, last.shape[-1])
    else:
        torch.mul(inputs.v, -affine[1], out=last)
        if spec.output_head.residual:
            last.add_(inputs.raw, alpha=affine[0])
    h_, delta_ = ([x.unbind(0) for x in xs] for xs in (hs, deltas))
    z_, u_ = ([unbind_batches(x, N) for x in xs] for xs in (zs, us))
    A_, A_mT = [a.unbind(0) for a in maps], [a.mT.unbind(0) for a in maps]
    weights = c[:, :, None, :, :, None].unbind(0)
    for n, commit in enumerate(commits):
        h = h_[0][n]
        for i in range(L - 1):
            torch.bmm(h, A_[i][n], out=z_[i][n])
            h = h_[i + 1][n]
            activation.forward_out(z_[i][n], h)
        delta, head = delta_[-1][n], None
        if affine is None:
            assert z_last is not None
            z = torch.bmm(h, A_[-1][n], out=z_last[n if spec.save_for_backward else 0])
            head = head_gradients(z, n)
            delta.copy_(head.delta)
        elif affine[0] != 0:
            add_matmul(delta, h, A_[-1][n], affine[0])
        for i in range(L - 1, 0, -1):
            u = torch.bmm(delta, A_mT[i][n], out=u_[i - 1][n])
            delta = delta_[i - 1][n]
            activation.vjp_out(u, z_[i - 1][n], h_[i][n], delta)
        weight = weights[n] if step_scales is None else step_scales.update(n, head)
        for stack in stacks:
            stack.cross_boundary(n, weight, commit)
    saved = None
    if spec.save_for_backward:
        saved = SavedStacks(
            map_groups=map_groups,
            z=zs,
            u=us,
            z_last=z_last,
            alignment=_stack_or_none(step_scales and step_scales.alignment),
            error_norm_sq=_stack_or_none(step_scales and step_scales.error_norm_sq),
        )
    return ForwardTrace(
        M=[stacks[f].M[:, :, m] for _, (f, m) in sorted(group_of.items())],
        final_maps=[stack.end for stack in stacks],
        delta=deltas,
        h=hs,
        saved=saved,
        rho=None if step_scales is None else step_scales.rho(),
        weights=None if step_scales is None else step_scales.weights,
    )


def _stack_or_none(xs: Tensors | None) -> Tensor | None:
    """Stack tensors; return ``None`` if there are none."""
    return torch.stack(xs) if xs else None


def make_step_scales(spec: ChainSpec, inputs: ChainInputs) -> StepScales | None:
    """Return the step scales of all batches.

    The result is ``None`` without step scales, and if the kernels compute them.

    Args:
        spec: Properties of the chain.
        inputs: Inputs of all batches.
    """
    if not spec.uses_step_scales or spec.runner is not None:
        return None
    affine = spec.output_head.affine
    return StepScales(
        inputs.k, inputs.c, len(spec.transposed), slope=None if affine is None else affine[0]
    )


def _head_gradient_fn(
    spec: ChainSpec, inputs: ChainInputs
) -> Callable[[Tensor, int], HeadGradients]:
    """Return a function from the last map's outputs and a batch to the head's gradients."""
    if spec.output_head.layer_norm:
        return LayerNormHead(spec.output_head, inputs.head_inputs, inputs.params).gradients

    def gradients(z: Tensor, n: int) -> HeadGradients:
        head_inputs, gates = (
            {name: x[n] for name, x in xs.items()} for xs in (inputs.head_inputs, inputs.gates)
        )
        return spec.output_head.gradients(z, head_inputs, gates, inputs.params, create_graph=False)

    return gradients


def map_gradients(
    activation: Activation,
    output_head: OutputHead,
    A: Sequence[Tensor],
    k: Tensor,
    head_inputs: Mapping[str, Tensor],
    gates: Mapping[str, Tensor],
    params: Mapping[str, Tensor],
    *,
    create_graph: bool,
) -> tuple[Tensors, Tensors, HeadGradients]:
    """Return the inputs h and output gradients δ of every map, and the head's gradients.

    Args:
        activation: Activation between the maps.
        output_head: Function after the last map.
        A: Maps, ``[P, in, out]``.
        k: Features of keys, ``[P, R, F]``.
        head_inputs: As in `OutputHead.gradients`.
        gates: As in `OutputHead.gradients`.
        params: As in `OutputHead.gradients`.
        create_graph: Whether autograd follows the operations.
    """
    h, z = [k], [torch.bmm(k, A[0])]
    for a in A[1:]:
        h.append(activation.forward(z[-1]))
        z.append(torch.bmm(h[-1], a))
    if output_head.layer_norm and not create_graph:
        batch_inputs = {name: x.unsqueeze(0) for name, x in head_inputs.items()}
        head = LayerNormHead(output_head, batch_inputs, params).gradients(z[-1], 0)
    else:
        head = output_head.gradients(z[-1], head_inputs, gates, params, create_graph=create_graph)
    delta = [head.delta]
    for i in range(len(A) - 1, 0, -1):
        delta.append(activation.vjp(torch.bmm(delta[-1], A[i].mT), z[i - 1]))
    return h, delta[::-1], head


def forward_differentiable(
    spec: ChainSpec, inputs: ChainInputs, start: Sequence[Tensor], commits: Commits
) -> ForwardTrace:
    """Run all batches by operations that autograd follows; δ includes the step scales."""
    L = len(spec.transposed)
    M = split_groups(spec, start)
    Ms: list[Tensors] = [[] for _ in range(L)]
    all_h: list[Tensors] = [[] for _ in range(L)]
    all_delta: list[Tensors] = [[] for _ in range(L)]
    for n, commit in enumerate(commits):
        A = [
            w[:, 0] if is_transposed else w[:, 0].mT
            for w, is_transposed in zip(M, spec.transposed, strict=True)
        ]
        gates = {name: x[n] for name, x in inputs.gates.items()}
        head_inputs = {name: x[n] for name, x in inputs.head_inputs.items()}
        h, delta, head = map_gradients(
            spec.activation,
            spec.output_head,
            A,
            inputs.k[n],
            head_inputs,
            gates,
            inputs.params,
            create_graph=True,
        )
        if head.target_error is not None:
            rho = differentiable_step_scales(h, delta, head).unsqueeze(-1)
            delta = [rho * x for x in delta]
        for stacks, xs in ((Ms, M), (all_h, h), (all_delta, delta)):
            for stack, x in zip(stacks, xs, strict=True):
                stack.append(x)
        if commit is False:
            continue
        next_M: Tensors = []
        for i, w in enumerate(M):
            narrow, wide = (h[i], delta[i]) if spec.transposed[i] else (delta[i], h[i])
            Q = (narrow.unsqueeze(2) * inputs.c[n].unsqueeze(-1)).flatten(2)
            old = w
            if inputs.T is not None:
                old = (inputs.T[n][..., None, None] * w.unsqueeze(1)).sum(2)
            allocate = old + torch.bmm(Q.mT, wide).view_as(w)
            next_M.append(
                allocate if commit is True else torch.where(commit.unsqueeze(-1), allocate, w)
            )
        M = next_M

    def stack_batches(xs: list[Tensors]) -> Tensors:
        return [torch.stack(x) for x in xs]

    return ForwardTrace(
        M=stack_batches(Ms),
        final_maps=[torch.stack([M[i] for i in group], dim=1) for group in spec.map_groups],
        delta=stack_batches(all_delta),
        h=stack_batches(all_h),
        saved=None,
    )
