"""The linear recurrence token by token, for decoding and for memories that do not separate.

Its inner gradient is explicit, in contrast to the reference engine. Tests compare the two.
"""

from __future__ import annotations

import torch
from torch import Tensor

from recollect.engines.linear.inputs import LinearProblem

__all__ = ["recurrent"]


def recurrent(p: LinearProblem) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return outputs ``[B, T, H, G, V]``, A and S after all tokens."""
    p = p.masked()
    B, T, H, G, _ = p.q.shape
    (a, b), k, v, A, S = p.affine, p.k, p.v, p.A0, p.S0
    c, n = (1 if p.window is None else p.window.shape[-1]), p.steps_per_token
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
        start = stop - 1 - (c - 1) * n
        window = slice(start if start >= 0 else (stop - 1) % n, stop, n)
        keys, values = k[:, window].transpose(1, 2), v[:, window].transpose(1, 2)
        weight = p.lr[:, t][..., None, None]  # [B, H, m, 1] or [B, H, 1, 1]
        if p.window is not None:
            gamma = p.window[:, t, :, : keys.shape[2]].flip(-1)
            if present is not None:
                gamma = gamma * present[:, None, window]
            weight = weight * gamma.unsqueeze(-1)
        decayed = A
        if p.log_decay is not None:
            decay = p.log_decay[:, t].exp()
            decayed = A * (decay[..., None, None] if decay.dim() == 2 else decay.unsqueeze(-2))
        if p.log_decay_value is not None:
            decayed = decayed * p.log_decay_value[:, t].exp().unsqueeze(-1)
        predictor = decayed if p.decays_first else A
        error = values if b == 1 else b * values  # b v − a P k, without separate erasure
        erase, erase_keys, momentum = None, keys, None
        if p.probe is not None and p.erase is not None:
            erase = -a * (p.probe[:, t].unsqueeze(-2) @ predictor.mT)  # [B, H, 1, V]
            erase_keys = p.erase[:, t].unsqueeze(-2)
        elif a != 0:
            probes = keys if p.probe is None else p.probe[:, t].unsqueeze(-2)
            predicted = probes @ predictor.mT  # [B, H, m, V]
            if S is not None and p.momentum_on == "value":
                erase = -a * (weight * predicted)
            else:
                error = error - predicted if a == 1 else error - a * predicted
        writes = weight * error
        if S is None or p.momentum is None:
            updated = _add_outer(decayed, writes, keys)
            updated = updated if erase is None else _add_outer(updated, erase, erase_keys)
        else:
            decayed_momentum = p.momentum[:, t][..., None, None] * S
            if erase is not None and p.momentum_on != "value":
                decayed_momentum = _add_outer(decayed_momentum, erase, erase_keys)
            momentum = _add_outer(decayed_momentum, writes, keys)
            moved = momentum
            if p.outer_lr is not None:
                moved = p.outer_lr[:, t][..., None, None] * momentum
            updated = decayed + moved
            if erase is not None and p.momentum_on == "value":
                updated = _add_outer(updated, erase, erase_keys)
        if p.token_mask is not None:
            mask = p.token_mask[:, t].view(-1, 1, 1, 1)
            updated = torch.where(mask, updated, A)
            if S is not None and momentum is not None:
                momentum = torch.where(mask, momentum, S)
        A, S = updated, momentum
        outputs.append(p.q[:, t] @ A.transpose(-1, -2))
    if T == 1:
        return outputs[0].unsqueeze(1), A, S
    y = torch.stack(outputs, dim=1) if outputs else v.new_zeros(B, 0, H, G, v.shape[-1])
    return y, A, S


def _add_outer(A: Tensor, u: Tensor, k: Tensor) -> Tensor:  # u [B, H, m, V], k [B, H, m, F]
    """Return A + Σ_i u_i k_iᵀ; m > 1 only in windows."""
    return torch.addcmul(A, u.mT, k) if u.shape[-2] == 1 else A + u.mT @ k
