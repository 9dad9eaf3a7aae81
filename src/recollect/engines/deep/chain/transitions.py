"""What a table of coefficients says of a chain's stacks, at borders and at queries.

The stacks are A, then S with momentum, then W̄ where A forgets towards a base:

    A_t = a_t A° + m_t S° + (1 − a_t) W̄ + Σ_i C[t, i] δ_i h_iᵀ
    S_t = s_t S° + Σ_i D[t, i] δ_i h_iᵀ
"""

from __future__ import annotations

import torch
from torch import Tensor

from recollect.engines.deep.chain.reads import QueryBatch
from recollect.engines.deep.step_coefficients import Table

__all__ = ["query_batch", "transitions"]


def transitions(table: Table, *, pulled: bool) -> tuple[Tensor | None, Tensor]:
    """T ``[N, P, J, J]`` of the borders, or ``None`` where A stays, and c ``[N, P, R, J]``.

    Args:
        table: of the coefficients of every token.
        pulled: whether A forgets towards a base.
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


def query_batch(table: Table, q: Tensor, *, pulled: bool) -> QueryBatch:
    """Queries and their rows of the coefficients.

    Args:
        table: of the coefficients of every token.
        q: features ``[N, P, b G, F]``.
        pulled: whether A forgets towards a base.
    """
    G = q.shape[2] // table.C.shape[2]

    def rows(x: Tensor) -> Tensor:
        return x if G == 1 else x.repeat_interleave(G, dim=2)

    parts: list[Tensor] = []
    if table.a is not None:
        parts = [table.a]
    elif table.m is not None:
        parts = [torch.ones_like(table.m)]
    if table.m is not None:
        parts.append(table.m)
    if pulled:
        parts.append(1 - parts[0])
    scale = None
    if parts:  # of one, a view
        scale = rows(torch.stack(parts, dim=-1) if parts[1:] else parts[0].unsqueeze(-1))
    return QueryBatch(q=q, C=rows(table.C), scale=scale)
