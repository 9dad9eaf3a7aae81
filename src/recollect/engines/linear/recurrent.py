"""The linear recurrence one token at a time: for decoding, and for what does not separate.

Unlike the reference it writes the inner gradient out; it is tested against the reference.
"""

from __future__ import annotations

import torch
from torch import Tensor

from recollect.engines.linear.inputs import LinearProblem

__all__ = ["recurrent"]


def recurrent(p: LinearProblem) -> tuple[Tensor, Tensor, Tensor | None]:
    """Outputs ``[B, T, H, G, V]``, A and S after all tokens."""
    p = p.masked()
    B, T, H, G, _ = p.q.shape
    (a, b), k, v, A, S = p.affine, p.k, p.v, p.A0, p.S0
    c = 1 if p.window is None else p.window.shape[-1]
    buffered, present = 0, None
    if c > 1:
        present = v.new_ones(B, T)
        if p.past is not None:
            buffered = p.past.k.shape[1]
            k, v = torch.cat([p.past.k, k], 1), torch.cat([p.past.v, v], 1)
            present = torch.cat([p.past.mask.to(v.dtype), present], 1)
    outputs: list[Tensor] = []
    for t in range(T):
        stop = buffered + t + 1
        start = max(stop - c, 0)
        keys, values = k[:, start:stop].transpose(1, 2), v[:, start:stop].transpose(1, 2)
        weight = p.lr[:, t][..., None, None]  # [B, H, m, 1] or [B, H, 1, 1]
        if p.window is not None:
            gamma = p.window[:, t, :, : stop - start].flip(-1)
            if present is not None:
                gamma = gamma * present[:, None, start:stop]
            weight = weight * gamma.unsqueeze(-1)
        decayed = A
        if p.log_decay is not None:
            decay = p.log_decay[:, t].exp()
            decayed = A * (decay[..., None, None] if decay.dim() == 2 else decay.unsqueeze(-2))
        if p.log_decay_value is not None:
            decayed = decayed * p.log_decay_value[:, t].exp().unsqueeze(-1)
        point = decayed if p.before else A
        error = values if b == 1 else b * values  # b v − a P k, and what of it is erased apart
        erased, along, momentum = None, keys, None
        if p.probe is not None and p.erase is not None:
            erased = -a * (p.probe[:, t].unsqueeze(-2) @ point.mT)  # [B, H, 1, V]
            along = p.erase[:, t].unsqueeze(-2)
        elif a != 0:
            predicted = keys @ point.mT  # [B, H, m, V]
            if S is not None and p.momentum_on == "value":
                erased = -a * (weight * predicted)
            else:
                error = error - predicted if a == 1 else error - a * predicted
        written = weight * error
        if S is None or p.momentum is None:
            after = _plus_outer(decayed, written, keys)
            after = after if erased is None else _plus_outer(after, erased, along)
        else:
            kept = p.momentum[:, t][..., None, None] * S
            if erased is not None and p.momentum_on != "value":
                kept = _plus_outer(kept, erased, along)
            momentum = _plus_outer(kept, written, keys)
            after = decayed + momentum
            if erased is not None and p.momentum_on == "value":
                after = _plus_outer(after, erased, along)
        if p.live is not None:
            rows = p.live[:, t].view(-1, 1, 1, 1)
            after = torch.where(rows, after, A)
            if S is not None and momentum is not None:
                momentum = torch.where(rows, momentum, S)
        A, S = after, momentum
        outputs.append(p.q[:, t] @ A.transpose(-1, -2))
    if T == 1:
        return outputs[0].unsqueeze(1), A, S
    y = torch.stack(outputs, dim=1) if outputs else v.new_zeros(B, 0, H, G, v.shape[-1])
    return y, A, S


def _plus_outer(A: Tensor, u: Tensor, k: Tensor) -> Tensor:
    """A + Σ_i u_i k_iᵀ for ``u [B, H, m, V]`` and ``k [B, H, m, F]``; m is 1 but in windows."""
    return torch.addcmul(A, u.mT, k) if u.shape[-2] == 1 else A + u.mT @ k
