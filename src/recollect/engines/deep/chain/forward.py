"""Forward pass of a chain: the recurrence over inner-batch boundaries, then the reads.

Reads need the weights at every boundary, and h and δ at the keys. They do not depend on each other,
so that all inner batches are read at once. Only the recurrence is sequential. With M the stack of A
and S of one map, each inner batch computes

    z_l = A_l h_(l−1),  h_l = σ(z_l);   u_l = A_lᵀ δ_l,  δ_(l−1) = σ′(z_(l−1)) ⊙ u_l
    M_j′ = Σ_i T[j, i] M_i + Σ_r c_j[r] δ_r h_rᵀ                       (T = [[a, m], [0, s]])

The output head computes δ_L (`chain.OutputHead`). A normalized step scales the gradients of an
association by ρ (`recollect.choices.algorithm.normalized_steps`). It is one number for all maps, in
the coefficients c′ = ρ c and C′ = ρ C:

    ρ = N/Q,    N = ⟨e, g⟩,    Q = Σ_l |h_(l−1)|²|δ_l|² + ε|g|²            (0 if Q is 0)

With an erasure c, the reads and the writes of M take δ_l + c z_l instead of δ_l.

The query x of a token is read at the weights of its token, A° and S° being those at the boundary:

    z_l = a A° x_(l−1) + m S° x_(l−1) + (C ⊙ (x_(l−1) h_(l−1)ᵀ)) δ_l,    x_l = σ(z_l)

The narrower side of a map is in rows, so that coefficients scale the narrower factors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from recollect.choices.algorithm.normalized_steps import EPS, correctable_error
from recollect.choices.matmul_precision import matmul_precision
from recollect.choices.memory.maps import append_ones
from recollect.engines.deep.chain.chain import (
    ACTIVATIONS,
    Activation,
    Chain,
    ChainInputs,
    ChainSpec,
    Commits,
    ForwardTrace,
    HeadGradients,
    OutputHead,
)
from recollect.engines.deep.gradient_factors import Factors, Points
from recollect.numerics import safe_divide

__all__ = [
    "ReadCache",
    "apply_transition",
    "chain_gradient_factors",
    "forward",
    "is_cpu",
    "map_input",
    "read",
    "read_coefficients",
    "squared_norms",
]

Tensors = list[Tensor]


def is_cpu(x: Tensor) -> bool:
    """Return whether x is on the CPU, where strided writes are slow and launches are cheap."""
    return x.device.type == "cpu"


def map_input(x: Tensor, in_features: int) -> Tensor:
    """Return x, with a constant 1 if the map has a bias."""
    return append_ones(x, x.shape[-1] < in_features)


def apply_transition(T: Tensor, M: Tensor, out: Tensor | None = None) -> Tensor:
    """Return Σ_i T[j, i] M_i for ``T [P, J, J]`` and ``M [P, J, entries]``, at full precision.

    Products with decays and momentum are not rounded to fewer bits. With a base, the writes are the
    difference of two stacks, and rounding both at every boundary would cancel most digits.
    """
    if M.shape[1] == 1:
        return torch.mul(M, T, out=out)
    if is_cpu(M):
        return torch.bmm(T, M, out=out)
    with matmul_precision("float32", M.device.type):
        return torch.bmm(T, M, out=out)


# -- one inner batch -------------------------------------------------------------------------------


@dataclass(kw_only=True)  # not frozen: created for every inner batch
class _MapGradients:
    """Gradients of every map at ``[P, R]`` associations."""

    h: Tensors  # inputs
    z: Tensors  # outputs
    u: Tensors  # gradients before the activation's derivative, for every map but the last
    delta: Tensors  # gradients of the outputs, or those plus c z
    head: HeadGradients


def _map_gradients(
    activation: Activation,
    output_head: OutputHead,
    A: Sequence[Tensor],  # maps [P, in, out]
    k: Tensor,  # inputs of the first map [P, R, in]
    head_inputs: Mapping[str, Tensor],
    gates: Mapping[str, Tensor],
    params: Mapping[str, Tensor],
    *,
    erasure: float,
    create_graph: bool,
) -> _MapGradients:
    """Return the factors of every map's gradients at the associations of an inner batch."""
    h, z = [k], [torch.bmm(k, A[0])]
    for a in A[1:]:
        h.append(map_input(activation.forward(z[-1]), a.shape[1]))
        z.append(torch.bmm(h[-1], a))
    head = output_head.gradients(z[-1], head_inputs, gates, params, create_graph=create_graph)
    u, delta = [], [head.delta]
    for i in range(len(A) - 1, 0, -1):
        u.append(torch.bmm(delta[-1], A[i][:, : z[i - 1].shape[-1]].mT))  # without the bias
        delta.append(activation.vjp(u[-1], z[i - 1]))
    if erasure:
        pairs = zip(delta, reversed(z), strict=True)
        delta = [torch.add(one, output, alpha=erasure) for one, output in pairs]
    return _MapGradients(h=h, z=z, u=u[::-1], delta=delta[::-1], head=head)


def _step_scales(output_head: OutputHead, gradients: _MapGradients) -> tuple[Tensor, Tensor] | None:
    """Return ρ and N ``[P, R]``, or ``None`` without step scales."""
    head, L = gradients.head, len(gradients.h)
    if head.target_error is None:
        return None
    sizes = squared_norms((*gradients.h, *gradients.delta, head.error))
    Q = torch.add((sizes[:L] * sizes[L:-1]).sum(0), sizes[-1], alpha=EPS)
    N = correctable_error(output_head.memory, head.target_error, head.error)
    if torch.is_grad_enabled():
        return safe_divide(N, Q), N
    return N / Q.clamp_min_(torch.finfo(Q.dtype).tiny), N  # N is 0 if Q is 0


def squared_norms(xs: Sequence[Tensor]) -> Tensor:
    """Return |x|² over the last axis of every x, ``[len(xs), ...]``.

    The square of a norm takes fewer operations, and has a wrong second derivative at 0.
    """
    if torch.is_grad_enabled():
        return torch.stack([x.square().sum(-1) for x in xs])
    return torch.stack([torch.linalg.vector_norm(x, dim=-1) for x in xs]).square_()


def chain_gradient_factors(
    chain: Chain, W: Sequence[Tensor], points: Points, params: Mapping[str, Tensor]
) -> list[Factors]:
    """Return h and ρ δ of every map at weights ``W [P, out, in]``, without a graph."""
    bases = chain.base_weights(W, params)
    A = [w + base for w, base in zip(W, bases, strict=True)] if bases else W
    output_head = chain.output_head(points.v.shape[1])
    params = {name: params[name] for name in chain.params}
    gradients = _map_gradients(
        ACTIVATIONS[chain.activation],
        output_head,
        [w.mT for w in A],
        map_input(points.phi.flatten(0, 1), W[0].shape[-1]),
        output_head.inputs(points.v.flatten(0, 1), points.raw.flatten(0, 1), params),
        {name: x.flatten(0, 1) for name, x in points.gates.items()},
        params,
        erasure=chain.erasure,
        create_graph=False,
    )
    delta, scales = gradients.delta, _step_scales(output_head, gradients)
    if scales is not None:
        delta = [scales[0].unsqueeze(-1) * x for x in delta]
    return list(map(Factors, gradients.h, delta))


# -- the recurrence --------------------------------------------------------------------------------


def forward(
    spec: ChainSpec,
    inputs: ChainInputs,
    start: Sequence[Tensor],  # M before the first batch per map [P, J, narrow, wide]
    commits: Commits,
    *,
    end: Sequence[Tensor] | None = None,  # memory for M after the last batch
    create_graph: bool = False,
) -> ForwardTrace:
    """Run the recurrence over batches in order."""
    N = len(commits)
    if create_graph or N == 1:
        M = [w.unsqueeze(0) for w in start]
    else:
        M = [w.new_empty(N, *w.shape) for w in start]
        for stacks, w in zip(M, start, strict=True):
            stacks[0].copy_(w)
    boundaries, batches = [[*start]], list[_MapGradients]()
    rhos, alignments, weights = Tensors(), Tensors(), Tensors()
    for n, commit in enumerate(commits):
        W = boundaries[-1]
        each = _map_gradients(
            spec.activation,
            spec.output_head,
            [
                w[:, 0] if is_in_out else w[:, 0].mT
                for w, is_in_out in zip(W, spec.transposed, strict=True)
            ],
            inputs.k[n],
            {name: x[n] for name, x in inputs.head.items()},
            {name: x[n] for name, x in inputs.gates.items()},
            inputs.params,
            erasure=spec.erasure,
            create_graph=create_graph,
        )
        batches.append(each)
        weight, scales = inputs.c[n], _step_scales(spec.output_head, each)
        if scales is not None:
            weight = weight * scales[0].unsqueeze(-1)
            rhos.append(scales[0])
            alignments.append(scales[1])
            weights.append(weight)
        T = None if inputs.T is None else inputs.T[n]
        moved: Tensors = []
        for i, w in enumerate(W):
            out = None if end is None else end[i]
            if n + 1 < N and not create_graph:
                out = M[i][n + 1]
            factors = each.h[i], each.delta[i]
            narrow, wide = factors if spec.transposed[i] else factors[::-1]
            moved.append(_cross_boundary(w, T, weight, narrow, wide, commit, out))
        boundaries.append(moved)

    def stack(xs: Sequence[Tensors]) -> Tensors:
        return [torch.stack(x) for x in zip(*xs, strict=True)]

    saves = spec.save_for_backward and not create_graph
    return ForwardTrace(
        M=stack(boundaries[:-1]) if create_graph else M,
        final_maps=boundaries[-1],
        h=[inputs.k, *stack([each.h[1:] for each in batches])],
        delta=stack([each.delta for each in batches]),
        z=stack([each.z for each in batches]) if saves else [],
        u=stack([each.u for each in batches]) if saves else [],
        rho=torch.stack(rhos) if rhos else None,
        alignment=torch.stack(alignments) if saves and alignments else None,
        weights=torch.stack(weights) if weights else inputs.c,
    )


def _cross_boundary(
    M: Tensor,  # [P, J, narrow, wide]
    T: Tensor | None,  # [P, J, J]
    c: Tensor,  # [P, R, J]
    narrow: Tensor,  # [P, R, narrow]
    wide: Tensor,  # [P, R, wide]
    commit: bool | Tensor,
    out: Tensor | None,
) -> Tensor:
    """Return M at the next boundary, in ``out`` or in new memory."""
    if commit is False:
        return M.clone() if out is None else out.copy_(M)
    Q = (narrow.unsqueeze(2) * c.unsqueeze(3)).flatten(2)
    target = None if out is None else out.flatten(1, 2)
    if T is None:
        moved = torch.baddbmm(M.flatten(1, 2), Q.mT, wide, out=target)
    else:
        flat = apply_transition(T, M.flatten(2), None if out is None else out.flatten(2))
        moved = flat.view_as(M).flatten(1, 2).baddbmm_(Q.mT, wide)
    moved = moved.view_as(M)
    if commit is True:
        return moved
    committed = torch.where(commit.unsqueeze(-1), moved, M)
    return committed if out is None else out.copy_(committed)


# -- reads -----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ReadCache:
    """Tensors of one map's reads for the backward pass, ``[N P, Q, ·]``."""

    x: Tensor  # inputs of the map
    z: Tensor | None  # outputs of the map before, with x = σ(z)
    scores: Tensor  # x hᵀ
    # x times the coefficients [N P, Q, J in] if inputs are narrower than outputs, else the products
    # with A and S [N P, Q, J, out]; None without coefficients
    scaled: Tensor | None


def read(
    spec: ChainSpec, trace: ForwardTrace, inputs: ChainInputs
) -> tuple[Tensor, list[ReadCache]]:
    """Return outputs ``[N, P, Q, V]``, and the caches of all maps."""
    C = read_coefficients(trace, inputs)
    scale = None if inputs.scale is None else inputs.scale.flatten(0, 1).unsqueeze(-1)
    x, z, caches = inputs.q.flatten(0, 1), None, list[ReadCache]()
    for i, is_in_out in enumerate(spec.transposed):
        M, h, delta = (part[i].flatten(0, 1) for part in (trace.M, trace.h, trace.delta))
        stack, scaled, preactivation = M.flatten(1, 2), None, z
        if z is not None:
            x = map_input(spec.activation.forward(z), h.shape[-1])
        if scale is None:
            z = torch.bmm(x, stack if is_in_out else stack.mT)
        elif is_in_out:
            scaled = (x.unsqueeze(2) * scale).flatten(2)
            z = torch.bmm(scaled, stack)
        else:
            scaled = torch.bmm(x, stack.mT).unflatten(2, (M.shape[1], -1))
            z = (scaled * scale).sum(2)
        scores = torch.bmm(x, h.mT)
        z = z.baddbmm_(scores * C if spec.save_for_backward else scores.mul_(C), delta)
        if spec.save_for_backward:
            caches.append(ReadCache(x=x, z=preactivation, scores=scores, scaled=scaled))
    assert z is not None  # a chain has a map
    return z.unflatten(0, inputs.q.shape[:2]), caches


def read_coefficients(trace: ForwardTrace, inputs: ChainInputs) -> Tensor:
    """Return C, or C′ = ρ C, ``[N P, Q, R]``."""
    C = inputs.C.flatten(0, 1)
    return C if trace.rho is None else C * trace.rho.flatten(0, 1).unsqueeze(1)
