"""The linear engine in chunks: exact at every token, and parallel in time.

The common memories go to `plain`; momentum, windows, probes and decays over values to `flow`; what
does not separate, to the scan of `recurrent`. This file checks, pads and lays out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import overload

import torch
from torch import Tensor

from recollect.engines.common.coefficients import coefficients, cumulated
from recollect.engines.common.decayed_products import absorbable
from recollect.engines.linear.chunk_general import Flow, Streams, solve
from recollect.engines.linear.chunk_simple import GROUP, plain
from recollect.engines.linear.recurrent import recurrent

__all__ = ["chunk_length", "chunked"]


def chunk_length(*, solves: bool, cpu: bool = True) -> int:
    """Tokens per chunk when nobody asks for a number: measured, and without influence on results.

    On a CPU a triangular system of 32 rows costs less than what the extra chunks do; without a
    system, and on a GPU, fewer and larger operations win.
    """
    return 32 if solves and cpu else 64


def chunked(
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
    chunk_size: int | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Run a matrix memory under an error a·prediction − b·value.

    Per head and token, with D_t the decay, P_t = A_{t−1} (``before``: D_t A_{t−1}) and i the
    associations of the window::

        g_t = Σ_i γ_(t,i) (a P_t k_i − b v_i) k_iᵀ
        S_t = θ_t S_{t−1} − η_t g_t           (momentum_of="value": on the part −b v kᵀ only)
        A_t = D_t A_{t−1} + S_t               (no momentum: D_t A_{t−1} − η_t g_t)
        A_t = D_t A_{t−1} − a (P_t w_t) e_tᵀ + η_t b v_t k_tᵀ       with a probe w and direction e

    Args:
        q: ``[B, T, H, G, K]``. k: ``[B, T, H, K]``. v: ``[B, T, H, V]``.
        lr: η ``[B, T, H]``, or ``None`` where it is 1.
        log_decay: ``[B, T, H]``, or ``[B, T, H, K]`` over columns of A; ≤ 0, −inf forgets all.
        log_decay_value: ``[B, T, H, V]`` over rows of A; needs a = 0.
        momentum: θ in [0, 1), ``[B, T, H]``.
        window: γ ``[B, T, H, c]``, entry m for association t − m; absent associations come in
            ``k_past, v_past [B, c − 1, H, ·]`` where ``past_mask``.
        probe, erase: w and e, ``[B, T, H, K]``.
        A0, S0: ``[B, H, V, K]``, zeros when omitted.
        live: ``[B, T]``; False only on the right. Dead tokens move nothing.
        chunk_size: tokens per chunk; no influence on results.

    Returns:
        y ``[B, T, H, G, V]``, A and S (``None`` without momentum) in float32 (float64 for float64
        inputs).

    Raises:
        ValueError: a decay over value channels with an error that sees the prediction.
    """
    if log_decay_value is not None and affine[0] != 0:
        raise ValueError("a decay over value channels needs a = 0: give each channel its own head")
    channels = log_decay is not None and log_decay.dim() == 4
    separable = momentum is None or not (channels or log_decay_value is not None)
    if q.shape[0] == 0 or q.shape[1] == 0 or not separable:
        # Momentum under a decay per channel is a difference of two separable terms that cancel.
        return recurrent(
            *(q, k, v),
            lr=lr,
            affine=affine,
            log_decay=log_decay,
            log_decay_value=log_decay_value,
            before=before,
            momentum=momentum,
            momentum_of=momentum_of,
            window=window,
            k_past=k_past,
            v_past=v_past,
            past_mask=past_mask,
            probe=probe,
            erase=erase,
            A0=A0,
            S0=S0,
            live=live,
        )
    T = q.shape[1]
    work = torch.float64 if v.dtype == torch.float64 else torch.float32
    length = chunk_length(solves=affine[0] != 0, cpu=q.device.type == "cpu")
    cut = _Cut(T=T, C=min(chunk_size or length, T))
    gamma = None if window is None else window.to(work)
    step = None if lr is None else lr.to(work)
    alive = None if live is None else live.to(work)
    if alive is None and momentum is not None and T % cut.C:
        # The last chunk's own padding must not move A by S.
        alive = torch.ones(k.shape[:2], dtype=work, device=k.device)
    if live is not None:
        # Padding may hold anything: NaN times zero would reach its neighbours.
        q, k, v = (_idle(x, live, 0.0) for x in (q, k, v))
        probe, erase = _idle(probe, live, 0.0), _idle(erase, live, 0.0)
        step, gamma = _idle(step, live, 0.0), _idle(gamma, live, 0.0)
    if alive is not None:
        if step is None:
            step = alive.unsqueeze(-1).expand(k.shape[:3])
        log_decay = _idle(log_decay, alive, 0.0)
        log_decay_value = _idle(log_decay_value, alive, 0.0)
        momentum = _idle(momentum, alive, 1.0)
    if window is None and probe is None and momentum is None and log_decay_value is None:
        y, A = plain(
            *(q.to(work), k.to(work), v.to(work)),
            lr=step,
            affine=affine,
            log_decay=log_decay,
            before=before,
            A0=A0,
            chunk=cut.C,
        )
        return y.to(v.dtype), A, None
    span = cut.C * max(1, GROUP // (q.shape[0] * q.shape[2] * cut.C))
    if window is None and q.device.type == "cpu" and span < T:
        # Groups of chunks that fit the cache, one after the other.
        whole = {"q": q, "k": k, "v": v, "lr": step, "log_decay": log_decay}
        whole |= {"log_decay_value": log_decay_value, "momentum": momentum, "live": live}
        whole |= {"probe": probe, "erase": erase}
        # Split at once: the gradient of a slice is as long as the sequence.
        pieces = {name: x.split(span, dim=1) for name, x in whole.items() if x is not None}
        outputs: list[Tensor] = []
        for index in range(len(pieces["q"])):
            part = {name: pieces[name][index] if name in pieces else None for name in whole}
            y, A0, S0 = chunked(
                **part,  # type: ignore[arg-type]
                affine=affine,
                before=before,
                momentum_of=momentum_of,
                A0=A0,
                S0=S0,
                chunk_size=cut.C,
            )
            outputs.append(y)
        assert A0 is not None  # every piece leaves one
        return torch.cat(outputs, dim=1), A0, S0
    keys, values, weights = _rows(
        k.to(work), v.to(work), step, gamma, k_past, v_past, past_mask, cut
    )
    like = cut.scalars(k.new_zeros(1, 1, 1, dtype=work).expand(k.shape[:3]))
    total = None
    if log_decay is not None and momentum is None:
        total = cumulated(cut.split(log_decay if channels else log_decay.unsqueeze(-1)), -2)
        if not channels and not absorbable(total):
            total = None  # one decay per head has its coefficients in a matrix, exact at any depth
    table = None
    if total is None and (log_decay is not None or momentum is not None):
        table = coefficients(
            None if log_decay is None else cut.scalars(log_decay),
            None if momentum is None else cut.scalars(momentum.to(work), fill=1.0),
            None if alive is None or momentum is None else cut.scalars(alive.unsqueeze(-1)),
            like,
        )
    total_v = None if log_decay_value is None else cumulated(cut.split(log_decay_value), -2)
    queries = cut.split(q.to(work).flatten(2, 3)).unflatten(2, (q.shape[2], q.shape[3]))
    queries = queries.transpose(3, 4).flatten(3, 4)  # [N, B, H, C G, K]
    flow = Flow(
        table=table,
        total=total,
        total_v=total_v,
        before=before,
        tokens=cut.C,
        # Absorbing a decay needs the whole chunk within range; then it needs no matrix at all.
        absorbed=total is None or absorbable(total),
    )
    slope, values = affine[0], values if affine[1] == 1 else affine[1] * values
    measured = keys if slope == 1 else slope * keys
    written = keys if weights is None else keys * weights
    if slope == 0:
        streams = Streams(known=(written, values))
    elif probe is not None and erase is not None:
        drop = cut.split(erase.to(work))
        streams = Streams(
            measured=cut.split(probe.to(work)),
            direction=drop if slope == 1 else slope * drop,
            known=(written, values),
        )
    elif momentum_of == "value" and momentum is not None:
        streams = Streams(
            measured=keys,
            direction=written if slope == 1 else slope * written,
            known=(written, values),
            erases_at_once=True,
        )
    else:
        # Erase and write share keys and coefficients: solve for the error itself.
        streams = Streams(measured=measured, direction=written, target=values)
    Z = _start(A0, like, k.shape[-1], v.shape[-1])
    Zs = _start(S0, like, k.shape[-1], v.shape[-1]) if momentum is not None else None
    y, Z, Zs = solve(flow, streams, queries, Z, Zs)
    y = cut.join(y.unflatten(3, (cut.C, q.shape[3])).transpose(3, 4).flatten(2, 3))
    y = y.unflatten(2, (q.shape[2], q.shape[3])).to(v.dtype)
    return y, Z.transpose(-1, -2), None if Zs is None else Zs.transpose(-1, -2)


@dataclass(frozen=True, kw_only=True)
class _Cut:
    """T tokens in N chunks of C, padded at the end with zeros."""

    T: int
    C: int

    @property
    def N(self) -> int:
        return -(-self.T // self.C)

    def split(self, x: Tensor, fill: float = 0.0) -> Tensor:
        """``[B, T, H, D] -> [N, B, H, C, D]``."""
        missing = self.N * self.C - self.T
        if missing:
            x = torch.cat([x, x.new_full((x.shape[0], missing, *x.shape[2:]), fill)], dim=1)
        return x.unflatten(1, (self.N, self.C)).permute(1, 0, 3, 2, 4).contiguous()

    def scalars(self, x: Tensor, fill: float = 0.0) -> Tensor:
        """``[B, T, H] -> [N, B, H, C]``."""
        return self.split(x.unsqueeze(-1), fill).squeeze(-1)

    def join(self, x: Tensor) -> Tensor:
        """``[N, B, H, C, D] -> [B, T, H, D]``."""
        return x.permute(1, 0, 3, 2, 4).flatten(1, 2)[:, : self.T]


@overload
def _idle(x: Tensor, alive: Tensor, value: float) -> Tensor: ...
@overload
def _idle(x: None, alive: Tensor, value: float) -> None: ...
@overload
def _idle(x: Tensor | None, alive: Tensor, value: float) -> Tensor | None: ...
def _idle(x: Tensor | None, alive: Tensor, value: float) -> Tensor | None:
    """Numbers of padded tokens replaced by the one that does nothing."""
    if x is None:
        return None
    return torch.where(alive.bool().view(*alive.shape, *(1,) * (x.dim() - 2)), x, value)


def _start(state: Tensor | None, like: Tensor, K: int, V: int) -> Tensor:
    if state is None:
        return like.new_zeros(*like.shape[1:3], K, V)
    return state.to(like.dtype).transpose(-1, -2)


def _rows(
    k: Tensor,
    v: Tensor,
    step: Tensor | None,
    gamma: Tensor | None,
    k_past: Tensor | None,
    v_past: Tensor | None,
    past_mask: Tensor | None,
    cut: _Cut,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Keys, values and η γ of every row ``[N, B, H, C c, ·]``: c rows per token under a window."""
    if gamma is None:
        weights = None if step is None else cut.scalars(step).unsqueeze(-1)
        return cut.split(k), cut.split(v), weights
    if step is None:
        step = torch.ones_like(gamma[..., 0])
    B, T = k.shape[:2]
    c = gamma.shape[-1]
    past = k.new_zeros(B, c - 1)
    if k_past is None or v_past is None:
        k_past, v_past = k.new_zeros(B, c - 1, *k.shape[2:]), v.new_zeros(B, c - 1, *v.shape[2:])
    else:
        past = past + 1 if past_mask is None else past_mask.to(k.dtype)
    # Row (t, m) is association t − m: the joined run seen from c − 1 − m tokens in.
    joined = [torch.cat([a.to(k.dtype), x], dim=1) for a, x in ((k_past, k), (v_past, v))]
    present = torch.cat([past, k.new_ones(B, T)], dim=1)

    def seen(x: Tensor) -> Tensor:
        return torch.stack([x[:, c - 1 - m : c - 1 - m + T] for m in range(c)], dim=3)

    def flat(x: Tensor) -> Tensor:  # [B, T, H, c, D] -> [N, B, H, C c, D]
        D = x.shape[-1]
        return cut.split(x.flatten(3)).unflatten(-1, (c, D)).flatten(3, 4)

    there = torch.stack([present[:, c - 1 - m : c - 1 - m + T] for m in range(c)], dim=-1)
    weights = step.unsqueeze(-1) * gamma * there.unsqueeze(2)  # [B, T, H, c]
    return flat(seen(joined[0])), flat(seen(joined[1])), flat(weights.unsqueeze(-1))
