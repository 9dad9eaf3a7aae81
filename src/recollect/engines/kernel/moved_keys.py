"""Products of queries with keys that later tokens move, in blocks (`KeyTransition`).

With M_s the map of token s, the product of query t and key i ≤ t is q_t·M_t … M_(i+1) k_i.

*Decay*: M_s = Diag(α_s). With P the cumulative log decays, the product is q_t exp(P_t − P_i) k_i. A
piece of queries takes P relative to its start, so that no exponent is positive; see
`decayed_products` for the keys inside the piece.

*Reflection*: M_s = I − β_s w_s w_sᵀ. Let W contain the directions of a range of tokens and
T = (I + L)⁻¹ Diag(β), where L is the strictly lower triangle of Diag(β) W Wᵀ. Then the map of the
range is I − Wᵀ T W, and that of any part of the range has the corresponding part of T. The tokens
from the last multiple of `BLOCK` on are one range. Earlier blocks have their keys moved to the end
of the block, and queries move back across blocks: q ← H_bᵀ q.
"""

from __future__ import annotations

import torch
from torch import Tensor

from recollect.choices.context.weights import KeyTransition, Piece, VisibleAssociations
from recollect.engines.common.decayed_products import decayed_gram

__all__ = ["BLOCK", "TRANSITIONS", "moved_products"]

TRANSITIONS = ("decay", "reflection")
"""Kinds of transitions with blockwise products."""

BLOCK = 64


def moved_products(visible: VisibleAssociations, transition: KeyTransition) -> Piece:
    """Return a function of queries and keys that computes their products ``[B, H, G, C, m]``."""
    if transition.direction is None:
        return _decayed(visible, transition)
    return _reflected(visible, transition)


def _start(visible: VisibleAssociations, queries: slice) -> int:
    """Return the slot of the first query of a piece, or n if a state is only read."""
    n = visible.k.shape[1]
    return n if visible.first_slot >= n else visible.first_slot + queries.start


# -- decays ----------------------------------------------------------------------------------------


def _decayed(visible: VisibleAssociations, transition: KeyTransition) -> Piece:
    assert transition.log_decay is not None
    q, k = visible.q.transpose(1, 2), visible.k.transpose(1, 2)  # [B, H, T, G, K], [B, H, n, K]
    total = transition.log_decay.double().cumsum(1).transpose(1, 2)  # [B, H, n, K]
    G = q.shape[3]

    def products(queries: slice, keys: slice) -> Tensor:
        start, x = _start(visible, queries), q[:, :, queries]
        first = max(start - 1, 0)
        reference = total[:, :, first : first + 1] if start else torch.zeros_like(total[:, :, :1])
        past = slice(keys.start, start)
        moved = k[:, :, past] * (reference - total[:, :, past]).to(k.dtype).exp()
        if start == keys.stop:  # a state is only read
            return torch.einsum("bhcgk,bhmk->bhgcm", x, moved)
        current = slice(start, keys.stop)
        relative = total[:, :, current] - reference  # [B, H, C, K]
        decayed = x * relative.to(x.dtype).exp().unsqueeze(3)
        earlier = torch.einsum("bhcgk,bhmk->bhgcm", decayed, moved)
        rows = decayed_gram(x.flatten(2, 3), relative, k[:, :, current], relative, strict=False)
        inside = rows.unflatten(2, (-1, G)).transpose(2, 3)  # [B, H, G, C, C]
        return torch.cat([earlier, inside], dim=-1)

    return products


# -- reflections -----------------------------------------------------------------------------------


def _range_solve(w: Tensor, rate: Tensor) -> Tensor:
    """Return T ``[..., L, L]`` of a range of tokens with directions ``[..., L, K]``."""
    gram = (rate.unsqueeze(-1) * w) @ w.mT
    return torch.linalg.solve_triangular(
        gram.tril(-1), torch.diag_embed(rate), upper=False, unitriangular=True
    )


def _reflected(visible: VisibleAssociations, transition: KeyTransition) -> Piece:
    assert transition.direction is not None and transition.rate is not None
    q, k = visible.q.permute(0, 2, 3, 1, 4), visible.k.transpose(1, 2)  # [B, H, G, T, K]
    w, rate = transition.direction.transpose(1, 2), transition.rate.transpose(1, 2)
    n = k.shape[2]
    num_blocks = n // BLOCK
    # Keys at the end of their block, and the map of each block.
    blocks = [x[:, :, : num_blocks * BLOCK].unflatten(2, (num_blocks, BLOCK)) for x in (k, w, rate)]
    k_b, w_b, rate_b = blocks  # [B, H, N, BLOCK, ...]
    solved = _range_solve(w_b, rate_b)
    overlap = (w_b @ k_b.mT).tril(-1)  # w_m·k_j for m > j
    end_keys = k_b - (solved @ overlap).mT @ w_b
    eye = torch.eye(k.shape[-1], dtype=k.dtype, device=k.device)
    maps = eye - w_b.mT @ solved @ w_b  # [B, H, N, K, K]

    def products(queries: slice, keys: slice) -> Tensor:
        x, start = q[..., queries, :], _start(visible, queries)
        base = start // BLOCK * BLOCK
        inside = slice(base, keys.stop)
        k_i, w_i = (part[:, :, None, inside] for part in (k, w))  # [B, H, 1, L, K]
        slots = torch.arange(base, keys.stop, device=k.device)
        has_passed = slots <= visible.query_slots[queries, None]  # [C, L]
        passed = (x @ w_i.mT).masked_fill(~has_passed, 0.0)
        passed = passed @ _range_solve(w[:, :, inside], rate[:, :, inside]).unsqueeze(2)
        parts = [x @ k_i.mT - passed @ (w_i @ k_i.mT).tril(-1)]
        x = x - passed @ w_i
        first = keys.start // BLOCK
        for block in range(base // BLOCK - 1, first - 1, -1):
            parts.append(x @ end_keys[:, :, block : block + 1].mT)
            if block > first:
                x = x @ maps[:, :, block : block + 1]
        low = keys.start - min(first * BLOCK, base)
        return torch.cat(parts[::-1], dim=-1)[..., low:]

    return products
