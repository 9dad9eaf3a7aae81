"""Conversion of a linear problem to the arguments of an operator, and of its results back.

Operators have inputs ``[B, T, H, ·]`` and states ``[B, H, K, V]``, but states of this library are
``[B, H, V, K]``. The scale of the queries is 1. Quantities without an argument are absorbed into
the inputs by differentiable operations:

- the rate, into the value (no erase) or the write (a probe),
- a and b of the error, into rate and value,
- several queries per memory, into as many heads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad, threshold

from recollect.engines.fla.operators import Operator, function
from recollect.engines.linear.inputs import LinearProblem

__all__ = ["MIN_LOG_DECAY", "Arguments", "arguments", "scan_channels", "solve", "with_tensors"]

MIN_LOG_DECAY = -60.0
"""Smallest log decay of an operator's inputs: −inf gives NaN in the kernels, and e^−60 ≈ 0."""

Result = tuple[Tensor, Tensor | None]
Call = Callable[..., Result]


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Inputs of an operator with one head per query."""

    q: Tensor  # queries [B, T, H, K]
    k: Tensor  # keys [B, T, H, K]
    v: Tensor  # values [B, T, H, V]
    decay: Tensor | None  # log decays [B, T, H] or [B, T, H, K], or None
    beta: Tensor | None  # rates [B, T, H] of a write that erases the read of the key, or None
    probe: Tensor | None  # probe [B, T, H, K], or None
    erase: Tensor | None  # erase direction [B, T, H, K], or None
    bonus: Tensor | None  # bonus [H, K], or None
    initial_state: Tensor  # memory before the first token [N, H, K, V]
    cu_seqlens: Tensor | None  # boundaries of N documents in one sequence, or None
    num_associations: int  # number of associations per token, of which the last reads
    output_final_state: bool  # whether to return the memory after the last token

    def per_channel(self) -> Tensor:
        """Return the log decays ``[B, T, H, K]``."""
        if self.decay is None:
            return torch.zeros_like(self.k, dtype=torch.float32)
        if self.decay.dim() == 4:
            return self.decay
        return self.decay.unsqueeze(-1).expand(self.k.shape)

    def per_head(self) -> Tensor:
        """Return the log decays ``[B, T, H]``."""
        if self.decay is None:
            return torch.zeros(self.k.shape[:3], dtype=torch.float32, device=self.k.device)
        return self.decay


def arguments(
    operator: Operator,
    p: LinearProblem,
    dtype: torch.dtype,
    *,
    bonus: Tensor | None = None,  # [H, K]
    cu_seqlens: Tensor | None = None,
    num_associations: int = 1,
    output_final_state: bool = True,
    unweighted: bool = False,  # whether every rate is 1
) -> Arguments:
    """Return the inputs of an operator for a problem, with products in ``dtype``."""
    p, G = p.masked(), p.q.shape[3]
    (a, b), k, v, decay = p.affine, p.k, p.v, p.log_decay
    if decay is not None:  # the gradient of a threshold takes fewer launches than that of a clamp
        decay = threshold(decay, MIN_LOG_DECAY, MIN_LOG_DECAY)
    beta = probe = erase = None
    if a == 0:
        v = v if unweighted and b == 1 else v * (b * p.lr).unsqueeze(-1)
    elif "probe" not in operator.erases:
        v, beta = v if a == b else (b / a) * v, p.lr if a == 1 else a * p.lr
    else:
        probe, erase = p.probe, p.erase
        if probe is None or erase is None:
            probe, erase = k, k * p.lr.unsqueeze(-1)
        if p.decays_first and decay is not None:
            probe = probe * (decay if decay.dim() == 4 else decay.unsqueeze(-1)).exp()
        v, erase = v * (b * p.lr).unsqueeze(-1), a * erase

    def heads(x: Tensor | None, dim: int = 2) -> Tensor | None:
        return x if x is None or G == 1 else x.repeat_interleave(G, dim=dim)

    def cast(x: Tensor | None) -> Tensor | None:
        return None if x is None else x.to(dtype)

    return Arguments(
        q=p.q.flatten(2, 3).to(dtype),
        k=_not_none(cast(heads(k))),
        v=_not_none(cast(heads(v))),
        decay=heads(decay),
        beta=heads(beta),
        probe=cast(heads(probe)),
        erase=cast(heads(erase)),
        bonus=heads(bonus, 0),
        initial_state=_not_none(heads(p.A0, 1)).mT.contiguous(),
        cu_seqlens=cu_seqlens,
        num_associations=num_associations,
        output_final_state=output_final_state,
    )


def _not_none(x: Tensor | None) -> Tensor:
    assert x is not None
    return x


def solve(operator: Operator, x: Arguments, like: LinearProblem, *, is_recurrent: bool) -> Result:
    """Return the outputs ``[B, T, H, G, V]`` and the final memory ``[N, H, V, K]``.

    The recurrent function of an operator has no gradient.
    """
    name = operator.token if is_recurrent and operator.token is not None else operator.name
    run = function(operator.module, name)
    K, V = x.initial_state.shape[-2:]
    x = _pad_odd_channels(x)
    kwargs = {
        "scale": 1.0,
        "initial_state": x.initial_state,
        "output_final_state": x.output_final_state,
    }
    if x.cu_seqlens is not None:
        kwargs["cu_seqlens"] = x.cu_seqlens
    y, S = _CALLS[operator.name](run, x, kwargs)
    y, S = y[..., :V], None if S is None else S[..., :K, :V]
    H, G = like.q.shape[2:4]
    A = None if S is None else S.mT.to(like.A0.dtype)
    if A is not None and G > 1:
        A = A.unflatten(1, (H, G))[:, :, 0]  # equal for all queries of a memory
    return y.unflatten(2, (H, G)), A


def _pad_odd_channels(x: Arguments) -> Arguments:
    """Pad odd numbers of 16-bit channels with zeros to a multiple of 16.

    Kernels read 16-bit channels in pairs. For an odd number, Triton may read past the last channel,
    and some kernels raise an error. The usual cause is a value channel of ones.
    """
    K, V = x.initial_state.shape[-2:]
    if x.q.dtype.itemsize != 2 or not (K % 2 or V % 2):
        return x
    keys, values = (-size % 16 if size % 2 else 0 for size in (K, V))

    def pad_keys(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else pad(tensor, (0, keys))

    return replace(
        x,
        q=pad(x.q, (0, keys)),
        k=pad(x.k, (0, keys)),
        v=pad(x.v, (0, values)),
        decay=pad_keys(x.decay) if x.decay is not None and x.decay.dim() == 4 else x.decay,
        probe=pad_keys(x.probe),
        erase=pad_keys(x.erase),
        bonus=pad_keys(x.bonus),
        initial_state=pad(x.initial_state, (0, values, 0, keys)),
    )


# -- one function per operator, for the names of its arguments -------------------------------------


def _gla(run: Call, x: Arguments, kwargs: Mapping[str, Any]) -> Result:
    # The chunked and the recurrent function have different names for the gate.
    gate = "gk" if run.__name__.startswith("fused_recurrent") else "g"
    return run(x.q, x.k, x.v, **{gate: x.per_channel()}, **kwargs)


def _dplr(run: Call, x: Arguments, kwargs: Mapping[str, Any]) -> Result:
    assert x.erase is not None
    return run(x.q, x.k, x.v, x.probe, -x.erase, x.per_channel(), **kwargs)


def _gated_delta_product(run: Call, x: Arguments, kwargs: Mapping[str, Any]) -> Result:
    n = x.num_associations
    decay = None if x.decay is None else x.decay[:, ::n]
    if x.cu_seqlens is not None:
        kwargs = {**kwargs, "cu_seqlens": x.cu_seqlens // n}
    y, S = run(x.q[:, n - 1 :: n], x.k, x.v, decay, x.beta, n, **kwargs)
    unread = torch.zeros_like(y).unsqueeze(2).expand(-1, -1, n - 1, -1, -1)
    return torch.cat([unread, y.unsqueeze(2)], dim=2).flatten(1, 2), S


_CALLS: Mapping[str, Callable[[Call, Arguments, Mapping[str, Any]], Result]] = {
    "chunk_simple_gla": lambda run, x, kw: run(x.q, x.k, x.v, g=x.decay, **kw),
    "chunk_rwkv6": lambda run, x, kw: run(x.q, x.k, x.v, x.per_channel(), x.bonus, **kw),
    "chunk_gla": _gla,
    "chunk_gated_delta_product": _gated_delta_product,
    "chunk_delta_rule": lambda run, x, kw: run(x.q, x.k, x.v, x.beta, **kw),
    "chunk_gated_delta_rule": lambda run, x, kw: run(
        x.q, x.k, x.v, g=x.per_head(), beta=x.beta, **kw
    ),
    "chunk_kda": lambda run, x, kw: run(
        x.q, x.k, x.v, g=x.per_channel().contiguous(), beta=x.beta, **kw
    ),
    "chunk_dplr_delta_rule": _dplr,
}


def scan_channels(
    operator: Operator, p: LinearProblem, read_when: str, *, output_final_state: bool
) -> Result:
    """Run a vector memory h_t = α_t ⊙ h_(t−1) + b η k v, y = h ⊙ q, in parallel over channels.

    ``read_when="before"`` reads h_(t−1).
    """
    p = p.masked()
    rate = p.lr if p.lr.dim() == 4 else p.lr.unsqueeze(-1)
    log = p.log_decay if p.log_decay is not None else p.log_decay_value
    log = torch.zeros_like(p.v) if log is None else log if log.dim() == 4 else log.unsqueeze(-1)
    write = p.affine[1] * rate * p.k * p.v
    h, end = function(operator.module, operator.name)(
        write.flatten(2),
        log.expand_as(write).clamp_min(MIN_LOG_DECAY).flatten(2),
        initial_state=p.A0.flatten(1),
        output_final_state=output_final_state,
    )
    h = h.unflatten(2, p.v.shape[2:])
    if read_when == "before":
        h = torch.cat([p.A0.unsqueeze(1), h[:, :-1]], dim=1)
    y = p.q * h.unsqueeze(3)
    return y, None if end is None else end.unflatten(1, p.v.shape[2:]).to(p.A0.dtype)


def with_tensors(p: LinearProblem, inputs: Mapping[str, Tensor]) -> LinearProblem:
    """Return the problem with other tensors by name. Names that are not fields are ignored."""
    return replace(p, **{name: x for name, x in inputs.items() if hasattr(p, name)})
