"""The linear engine one token at a time: the decode step, and the scan for what does not separate.

Unlike the reference it writes the inner gradient out; it is tested against the reference.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["recurrent"]


def _rows(log_decay: Tensor | None, t: int) -> Tensor | None:
    """exp(log decay) of token t as a factor of A ``[B, H, V, K]``."""
    if log_decay is None:
        return None
    now = log_decay[:, t].exp()
    return now[..., None, None] if now.dim() == 2 else now.unsqueeze(-2)


def _zero(x: Tensor, live: Tensor) -> Tensor:
    """Numbers of padded tokens replaced by 0."""
    return x.masked_fill(~live.view(*live.shape, *(1,) * (x.dim() - 2)), 0.0)


def recurrent(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    lr: Tensor | None,
    affine: tuple[float, float] = (1.0, 1.0),
    log_decay: Tensor | None = None,
    log_decay_value: Tensor | None = None,
    before: bool = False,
    momentum: Tensor | None = None,
    momentum_of: str = "gradient",
    window: Tensor | None = None,
    k_past: Tensor | None = None,
    v_past: Tensor | None = None,
    past_mask: Tensor | None = None,
    probe: Tensor | None = None,
    erase: Tensor | None = None,
    A0: Tensor | None = None,
    S0: Tensor | None = None,
    live: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """y, A and S after all tokens; arguments and meaning as `chunked.chunked`."""
    dtype = v.dtype
    if live is not None:
        # Padding may hold anything: NaN times zero would reach the gradients of its neighbours.
        q, k, v = (_zero(x, live) for x in (q, k, v))
        lr, momentum, probe, erase = (
            None if x is None else _zero(x, live) for x in (lr, momentum, probe, erase)
        )
        log_decay, log_decay_value, window = (
            None if x is None else _zero(x, live) for x in (log_decay, log_decay_value, window)
        )
    B, T, H, G, K = q.shape
    V, (a, b) = v.shape[-1], affine
    work = torch.float64 if v.dtype == torch.float64 else torch.float32
    q, k, v = q.to(work), k.to(work), v.to(work)
    A = k.new_zeros(B, H, V, K) if A0 is None else A0.to(work)
    S = None if momentum is None else (torch.zeros_like(A) if S0 is None else S0.to(work))
    c = 1 if window is None else window.shape[-1]
    if c > 1:
        held = 0 if k_past is None else k_past.shape[1]
        present = torch.ones(B, T, device=k.device, dtype=work)
        if k_past is not None and v_past is not None:
            k, v = torch.cat([k_past.to(work), k], 1), torch.cat([v_past.to(work), v], 1)
            past = torch.ones(B, held, device=k.device) if past_mask is None else past_mask
            present = torch.cat([past.to(work), present], 1)
    else:
        held, present = 0, None
    outputs: list[Tensor] = []
    for t in range(T):
        j = held + t
        low = max(j - c + 1, 0)
        keys, values = k[:, low : j + 1].transpose(1, 2), v[:, low : j + 1].transpose(1, 2)
        eta = 1.0 if lr is None else lr[:, t].to(work)[..., None, None]
        weight = eta  # [B, H, m, 1] or [B, H, 1, 1]
        if window is not None:
            gamma = window[:, t, :, : j + 1 - low].to(work).flip(-1)
            if present is not None:
                gamma = gamma * present[:, None, low : j + 1]
            weight = eta * gamma.unsqueeze(-1)
        decay, decay_value = _rows(log_decay, t), None
        if log_decay_value is not None:
            decay_value = log_decay_value[:, t].exp().unsqueeze(-1)
        kept = A if decay is None else A * decay.to(work)
        kept = kept if decay_value is None else kept * decay_value.to(work)
        point = kept if before else A
        write = b * (weight * values).transpose(-1, -2) @ keys
        if probe is not None and erase is not None:
            predicted = point @ probe[:, t].to(work).unsqueeze(-1)  # [B, H, V, 1]
            drop = -a * predicted @ erase[:, t].to(work).unsqueeze(-2)
        elif a != 0:
            predicted = keys @ point.transpose(-1, -2)  # [B, H, m, V]
            drop = -a * (weight * predicted).transpose(-1, -2) @ keys
        else:
            drop = None
        step = write if drop is None else write + drop
        if S is None:
            new, moved = kept + step, None
        else:
            assert momentum is not None
            theta = momentum[:, t].to(work)[..., None, None]
            moved = theta * S + (write if momentum_of == "value" else step)
            new = kept + moved
            if momentum_of == "value" and drop is not None:
                new = new + drop
        if live is not None:
            rows = live[:, t].view(-1, 1, 1, 1)
            new = torch.where(rows, new, A)
            moved = None if moved is None or S is None else torch.where(rows, moved, S)
        A, S = new, moved
        outputs.append(q[:, t] @ A.transpose(-1, -2))
    y = torch.stack(outputs, dim=1) if outputs else v.new_zeros(B, 0, H, G, V)
    return y.to(dtype), A, S
