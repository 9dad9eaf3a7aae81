"""The chain path: memories of maps in sequence, with the same coefficients for all maps.

What `general` does for any program, written out for W_L σ(… σ(W_1 x)) with scalar decays, momentum
and windows. The keys go from border to border (`autograd`); after that no read waits, so
the queries of all inner batches go through together, map by map:

    z_t = a_t A° x_t + m_t S° x_t + Σ_i (C ⊙ (x hᵀ))[t, i] δ_i

`tests/engines/test_deep.py` holds this path to the general one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from recollect.choices.bias.base import Bias
from recollect.engines.deep.chain.activations import CURVES
from recollect.engines.deep.chain.autograd import walk_borders
from recollect.engines.deep.chain.forward import Keys, Path, slopes
from recollect.engines.deep.chain.reads import Asked
from recollect.engines.deep.gradient_factors import Factors, Points
from recollect.engines.deep.step_coefficients import Table

__all__ = ["Chain", "chain_slopes", "run_chain", "slope_of"]

Weights = list[Tensor]


def slope_of(activation: str) -> bool:
    """Whether this path knows the derivatives of an activation."""
    return activation in CURVES


@dataclass(frozen=True, kw_only=True)
class Chain:
    """A chain of maps: the activation between them, a residual around them, a bias at the end."""

    activation: str
    residual: bool
    bias: Bias


def run_chain(
    chain: Chain,
    table: Table,
    keys: Mapping[str, Tensor],
    queries: tuple[Tensor, Tensor | None],
    commits: Sequence[bool | Tensor],
    memory: tuple[Weights, Weights | None],
    *,
    outer: bool,
) -> tuple[Tensor, Weights, Weights | None]:
    """Outputs ``[N, P, b G, V]``, and A and S after the last batch.

    Args:
        keys: ``[N, B, H, R, ·]`` by name. queries: features and, where they differ, raw queries,
            ``[N, B, H, b G, ·]``. memory: A and S, ``[P, out, in]``.
        outer: whether gradients will be asked for.
    """
    flat = {name: x.flatten(1, 2) for name, x in keys.items()}
    k, v = flat.pop("phi"), flat.pop("v")
    raw = flat.pop("raw", k)
    A, S = memory
    tall = tuple(w.shape[-1] <= w.shape[-2] for w in A)
    pairs: list[tuple[Tensor, ...]] = (
        [(a,) for a in A] if S is None else list(zip(A, S, strict=True))
    )
    start = [
        torch.stack([w.mT for w in pair] if up else pair, dim=1)
        for pair, up in zip(pairs, tall, strict=True)
    ]
    path = Path(
        curve=CURVES[chain.activation],
        residual=chain.residual,
        bias=chain.bias,
        gates=tuple(flat),
        tall=tall,
        keep=outer,
    )
    T, c = _transitions(table)
    x, asked = (None if q is None else q.flatten(1, 2) for q in queries)
    assert x is not None
    y, memories = walk_borders(
        path, Keys(k=k, v=v, raw=raw, T=T, c=c, gates=flat), _asked(table, x), commits, start
    )
    if chain.residual:
        y = y + (x if asked is None else asked)
    ends = [
        [w.mT.contiguous() if up else w.contiguous() for w in end.unbind(1)]
        for end, up in zip(memories, tall, strict=True)
    ]
    return y, [end[0] for end in ends], None if S is None else [end[1] for end in ends]


def chain_slopes(chain: Chain, A: Sequence[Tensor], points: Points) -> list[Factors]:
    """h and δ of every map at weights ``A [P, out, in]``, without a graph.

    Args:
        chain: the memory.
        A: its maps.
        points: where gradients are taken.
    """
    flat: dict[str, Tensor] = {}
    for name, x in points.gates.items():
        flat[name] = x.flatten(0, 1)
    h, delta = slopes(
        CURVES[chain.activation],
        chain.bias,
        [w.mT for w in A],
        points.phi.flatten(0, 1),
        points.raw.flatten(0, 1) if chain.residual else None,
        points.v.flatten(0, 1),
        flat,
    )
    return list(map(Factors, h, delta))


def _transitions(table: Table) -> tuple[Tensor | None, Tensor]:
    """T ``[N, P, J, J]`` and c ``[N, P, R, J]`` of the borders."""
    C = table.C[:, :, -1]
    if table.m is None or table.s is None or table.D is None:
        T = None if table.a is None else table.a[:, :, -1, None, None]
        return T, C.unsqueeze(-1)
    m, s = table.m[:, :, -1], table.s
    a = torch.ones_like(m) if table.a is None else table.a[:, :, -1]
    T = torch.stack([a, m, torch.zeros_like(m), s], dim=-1).unflatten(-1, (2, 2))
    return T, torch.stack([C, table.D], dim=-1)


def _asked(table: Table, q: Tensor) -> Asked:
    """Queries ``[N, P, b G, F]`` and their rows of the coefficients."""
    G = q.shape[2] // table.C.shape[2]

    def rows(x: Tensor) -> Tensor:
        return x if G == 1 else x.repeat_interleave(G, dim=2)

    scale = None
    if table.m is not None:
        a = torch.ones_like(table.m) if table.a is None else table.a
        scale = rows(torch.stack([a, table.m], dim=-1))
    elif table.a is not None:
        scale = rows(table.a.unsqueeze(-1))
    return Asked(q=q, C=rows(table.C), scale=scale)
