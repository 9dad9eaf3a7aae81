"""Forward of the recurrence over inner-batch boundaries, and a form that autograd can follow.

Reads need the weights at every border, the inputs h and the gradients δ at the keys, and then none
waits for another: all inner batches are read at once (`engine`). What is left to do one batch after
another is small, and written out here and in `backward`, because batches of 16 tokens are bound by
the number of operations. With M the stack of A and S of one map, per inner batch

    z_l = A_l h_(l−1),  h_l = σ(z_l);   u_l = A_lᵀ δ_l,  δ_(l−1) = σ′(z_(l−1)) ⊙ u_l,  δ_L: `ending`
    M_j′ = Σ_i T[j, i] M_i + Σ_r c_j[r] δ_r h_rᵀ                       (T = [[a, m], [0, s]])

A map is kept with its narrower side in rows, so that c_j scales the narrower of h and δ and one
product moves A and S together, for all maps of the same sizes at once (`families`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from recollect.engines.deep.chain.activations import Curve
from recollect.engines.deep.chain.ends.ending import End, Ending
from recollect.engines.deep.chain.ends.norm import LayerNormEnd
from recollect.engines.deep.chain.families import (
    Stacks,
    add_product,
    apart,
    by_batch,
)
from recollect.engines.deep.chain.shares import Shares, share_of
from recollect.engines.deep.chain.trace import (
    ChainSpec,
    Commits,
    Family,
    ForwardTrace,
    Keys,
    SavedStacks,
)

__all__ = [
    "ScratchBuffers",
    "forward",
    "forward_by_autograd",
    "shares_of",
    "slopes",
]

Tensors = list[Tensor]


class ScratchBuffers:
    """Buffers that one span of batches leaves to the next; without them every span takes new ones.

    A block that the system has just given is several times slower to write than to compute.
    """

    def __init__(self, *, reused: bool) -> None:
        self.reused = reused
        self.buffers: dict[tuple[object, ...], Tensor] = {}
        self.turn = 0

    def begin(self) -> None:
        """A span begins; what the last one ended with is still to be read."""
        self.turn = 1 - self.turn

    def take(self, like: Tensor, *name: object, shape: Sequence[int]) -> Tensor:
        """Unset memory, the same for the same name and shape where it may be."""
        if not self.reused:
            return like.new_empty(shape)
        key = (*name, tuple(shape))
        if key not in self.buffers:
            self.buffers[key] = like.new_empty(shape)
        return self.buffers[key]


def forward(
    spec: ChainSpec,
    keys: Keys,
    start: Sequence[Tensor],
    commits: Commits,
    buffers: ScratchBuffers,
    shares: Shares | None,
) -> ForwardTrace:
    """A span of batches in order, without a graph.

    Args:
        spec: of the chain. keys: the span's. start: per family ``[P, L, J, narrow, wide]``.
        commits: of the span. buffers: of all spans. shares: as `shares_of` has them, of all spans.
    """
    k, c = keys.k, keys.c
    N, P, R, _ = k.shape
    L = len(spec.tall)
    count = N if spec.keep else 1
    buffers.begin()

    def new(name: str, index: int, *shape: int) -> Tensor:
        return buffers.take(k, name, index, shape=shape)

    stacks = [
        Stacks(spec, keys, i, w, (buffers.turn, not spec.normalised), new)
        for i, w in enumerate(start)
    ]
    place = {i: (f, m) for f, group in enumerate(spec.families) for m, i in enumerate(group)}
    parts = [stacks[f].of(m, spec.tall[i]) for i, (f, m) in sorted(place.items())]
    hs, deltas, ups = map(list, zip(*parts, strict=True))
    hs[0] = k
    # Without a backward pass z of all maps is needed within a batch, and nothing after it.
    zs, us = (
        [new(name, i, count, P, R, d.shape[-1]) for i, d in enumerate(deltas[:-1])]
        for name in ("z", "u")
    )
    curve = spec.curve
    affine, ends = spec.ending.affine, _ends(spec, keys)
    families = [Family(M=x.M, wide=x.wide, narrow=x.narrow, Q=x.Q) for x in stacks]
    if shares is not None:
        shares.begin([pair for one in stacks for pair in one.factors(L)], N)
    z_last, last = None, deltas[-1]
    if affine is None:
        z_last = new("last", 0, count, P, R, last.shape[-1])
    else:
        torch.mul(keys.v, -affine[1], out=last)
        if spec.ending.residual:
            last.add_(keys.raw, alpha=affine[0])
    h_, delta_ = ([x.unbind(0) for x in xs] for xs in (hs, deltas))
    z_, u_ = ([by_batch(x, N) for x in xs] for xs in (zs, us))
    A_, back_ = [a.unbind(0) for a in ups], [a.mT.unbind(0) for a in ups]
    weights = c[:, :, None, :, :, None].unbind(0)
    for n, commit in enumerate(commits):
        h = h_[0][n]
        for i in range(L - 1):
            torch.bmm(h, A_[i][n], out=z_[i][n])
            h = h_[i + 1][n]
            curve.store(z_[i][n], h)
        delta, end = delta_[-1][n], None
        if affine is None:
            assert z_last is not None
            z = torch.bmm(h, A_[-1][n], out=z_last[n if spec.keep else 0])
            end = ends(z, n)
            delta.copy_(end.delta)
        elif affine[0] != 0:
            add_product(delta, h, A_[-1][n], affine[0])
        for i in range(L - 1, 0, -1):
            u = torch.bmm(delta, back_[i][n], out=u_[i - 1][n])
            delta = delta_[i - 1][n]
            curve.pull_to(u, z_[i - 1][n], h_[i][n], delta)
        weight = weights[n] if shares is None else shares.step(n, end)
        for one in stacks:
            one.move(n, weight, commit)
    saved = None
    if spec.keep:
        saved = SavedStacks(
            families=families,
            z=zs,
            u=us,
            last=z_last,
            above=torch.stack(shares.above) if shares is not None and shares.above else None,
            size=torch.stack(shares.size) if shares is not None and shares.size else None,
        )
    return ForwardTrace(
        M=[stacks[f].M[:, :, m] for _, (f, m) in sorted(place.items())],
        ends=[one.end for one in stacks],
        delta=deltas,
        h=hs,
        saved=saved,
        rho=None if shares is None else shares.rho(),
        weights=None if shares is None else shares.weights,
    )


def shares_of(spec: ChainSpec, keys: Keys) -> Shares | None:
    """Return the shares of all batches; ``None`` without them, or if the kernels compute them.

    Args:
        spec: of the chain. keys: of all batches.
    """
    if not spec.normalised or spec.walker is not None:
        return None
    affine = spec.ending.affine
    return Shares(keys.k, keys.c, len(spec.tall), slope=None if affine is None else affine[0])


def _ends(spec: ChainSpec, keys: Keys) -> Callable[[Tensor, int], End]:
    """What follows the last map, by what it says and the batch; without a graph."""
    if spec.ending.layer_norm:
        return LayerNormEnd(spec.ending, keys.given, keys.params).of

    def of(z: Tensor, n: int) -> End:
        given, gates = ({name: x[n] for name, x in xs.items()} for xs in (keys.given, keys.gates))
        return spec.ending.of(z, given, gates, keys.params, outer=False)

    return of


def slopes(
    curve: Curve,
    ending: Ending,
    A: Sequence[Tensor],
    k: Tensor,
    given: Mapping[str, Tensor],
    gates: Mapping[str, Tensor],
    params: Mapping[str, Tensor],
    *,
    outer: bool,
) -> tuple[Tensors, Tensors, End]:
    """Inputs h and output gradients δ of every map, and what their end says.

    Args:
        curve: the activation.
        ending: what follows the last map; ``given``, ``gates``, ``params``: of `Ending.of`.
        A: the maps, ``[P, in, out]``.
        k: keys' features ``[P, R, F]``.
        outer: whether autograd is to follow them.
    """
    h, z = [k], [torch.bmm(k, A[0])]
    for a in A[1:]:
        h.append(curve.value(z[-1]))
        z.append(torch.bmm(h[-1], a))
    if ending.layer_norm and not outer:
        only = {name: x.unsqueeze(0) for name, x in given.items()}
        end = LayerNormEnd(ending, only, params).of(z[-1], 0)
    else:
        end = ending.of(z[-1], given, gates, params, outer=outer)
    delta = [end.delta]
    for i in range(len(A) - 1, 0, -1):
        delta.append(curve.pull(torch.bmm(delta[-1], A[i].mT), z[i - 1]))
    return h, delta[::-1], end


def forward_by_autograd(
    spec: ChainSpec, keys: Keys, start: Sequence[Tensor], commits: Commits
) -> ForwardTrace:
    """The same by operations that autograd follows, for second derivatives; shares are in δ."""
    L = len(spec.tall)
    M = apart(spec, start)
    Ms: list[Tensors] = [[] for _ in range(L)]
    all_h: list[Tensors] = [[] for _ in range(L)]
    all_delta: list[Tensors] = [[] for _ in range(L)]
    for n, commit in enumerate(commits):
        A = [w[:, 0] if up else w[:, 0].mT for w, up in zip(M, spec.tall, strict=True)]
        gates = {name: x[n] for name, x in keys.gates.items()}
        given = {name: x[n] for name, x in keys.given.items()}
        h, delta, end = slopes(
            spec.curve, spec.ending, A, keys.k[n], given, gates, keys.params, outer=True
        )
        if end.away is not None:
            rho = share_of(h, delta, end).unsqueeze(-1)
            delta = [rho * x for x in delta]
        for stacks, xs in ((Ms, M), (all_h, h), (all_delta, delta)):
            for stack, x in zip(stacks, xs, strict=True):
                stack.append(x)
        if commit is False:
            continue
        moved: Tensors = []
        for i, w in enumerate(M):
            narrow, wide = (h[i], delta[i]) if spec.tall[i] else (delta[i], h[i])
            Q = (narrow.unsqueeze(2) * keys.c[n].unsqueeze(-1)).flatten(2)
            old = w
            if keys.T is not None:
                old = (keys.T[n][..., None, None] * w.unsqueeze(1)).sum(2)
            new = old + torch.bmm(Q.mT, wide).view_as(w)
            moved.append(new if commit is True else torch.where(commit.unsqueeze(-1), new, w))
        M = moved

    def gathered(xs: list[Tensors]) -> Tensors:
        return [torch.stack(x) for x in xs]

    return ForwardTrace(
        M=gathered(Ms),
        ends=[torch.stack([M[i] for i in group], dim=1) for group in spec.families],
        delta=gathered(all_delta),
        h=gathered(all_h),
        saved=None,
    )
