"""A linear problem in an operator's own arguments, and back.

Theirs are ``[B, T, H, ·]`` too, with states ``[B, H, K, V]`` where ours are ``[B, H, V, K]``, and a
scale of the queries that is 1 here. What an operator has no argument for goes into its inputs, by
operations that autograd knows: a rate into the value (nothing erased) or into the write (a probe),
the error's a and b into rate and value, several queries of a memory into as many heads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from recollect.engines.fla.operators import Operator, function
from recollect.engines.linear.inputs import LinearProblem

__all__ = ["FLOOR", "Arguments", "arguments", "over", "scan_channels", "solve"]

FLOOR = -60.0
"""The least log decay that operators are given: −inf would be NaN in them, and e^−60 is nothing."""

Result = tuple[Tensor, Tensor | None]
Call = Callable[..., Result]


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """What operators take, every query a head.

    Attributes:
        q, k: ``[B, T, H, K]``. v: ``[B, T, H, V]``.
        decay: log decays ``[B, T, H]``, ``[B, T, H, K]``, or ``None``.
        beta: ``[B, T, H]``, where the error erases what the key reads, else ``None``.
        probe, erase: ``[B, T, H, K]``, where it erases along a direction of its own.
        bonus: ``[H, K]``, or ``None``.
        start: the memory before, ``[N, H, K, V]``.
        borders: of N documents in one row, or ``None``.
        several: associations per token, of which the last reads.
        final: whether the memory after the last token is asked for.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    decay: Tensor | None
    beta: Tensor | None
    probe: Tensor | None
    erase: Tensor | None
    bonus: Tensor | None
    start: Tensor
    borders: Tensor | None
    several: int
    final: bool

    def per_channel(self) -> Tensor:
        """Log decays ``[B, T, H, K]``."""
        if self.decay is None:
            return torch.zeros_like(self.k, dtype=torch.float32)
        if self.decay.dim() == 4:
            return self.decay
        return self.decay.unsqueeze(-1).expand(self.k.shape)

    def per_head(self) -> Tensor:
        """Log decays ``[B, T, H]``."""
        if self.decay is None:
            return torch.zeros(self.k.shape[:3], dtype=torch.float32, device=self.k.device)
        return self.decay


def arguments(
    operator: Operator,
    p: LinearProblem,
    dtype: torch.dtype,
    *,
    bonus: Tensor | None = None,
    borders: Tensor | None = None,
    several: int = 1,
    final: bool = True,
    unweighted: bool = False,
) -> Arguments:
    """What an operator takes of a problem.

    Args:
        operator: that will run.
        p: the problem.
        dtype: in which it multiplies.
        bonus: ``[H, K]``, for an operator that reads before the write.
        borders, several, final: of `Arguments`.
        unweighted: whether every rate is 1.
    """
    p, G = p.masked(), p.q.shape[3]
    (a, b), k, v, decay = p.affine, p.k, p.v, p.log_decay
    decay = None if decay is None else decay.clamp_min(FLOOR)
    beta = probe = erase = None
    if a == 0:
        v = v if unweighted and b == 1 else v * (b * p.lr).unsqueeze(-1)
    elif "probe" not in operator.erases:
        v, beta = v if a == b else (b / a) * v, p.lr if a == 1 else a * p.lr
    else:
        probe, erase = p.probe, p.erase
        if probe is None or erase is None:
            probe, erase = k, k * p.lr.unsqueeze(-1)
        if p.before and decay is not None:
            probe = probe * (decay if decay.dim() == 4 else decay.unsqueeze(-1)).exp()
        v, erase = v * (b * p.lr).unsqueeze(-1), a * erase

    def heads(x: Tensor | None, dim: int = 2) -> Tensor | None:
        return x if x is None or G == 1 else x.repeat_interleave(G, dim=dim)

    def low(x: Tensor | None) -> Tensor | None:
        return None if x is None else x.to(dtype)

    return Arguments(
        q=p.q.flatten(2, 3).to(dtype),
        k=_there(low(heads(k))),
        v=_there(low(heads(v))),
        decay=heads(decay),
        beta=heads(beta),
        probe=low(heads(probe)),
        erase=low(heads(erase)),
        bonus=heads(bonus, 0),
        start=_there(heads(p.A0, 1)).mT.contiguous(),
        borders=borders,
        several=several,
        final=final,
    )


def _there(x: Tensor | None) -> Tensor:
    assert x is not None
    return x


def solve(operator: Operator, x: Arguments, like: LinearProblem, *, few: bool) -> Result:
    """Outputs ``[B, T, H, G, V]`` and the memory after all tokens ``[N, H, V, K]``.

    Args:
        operator: that runs.
        x: its arguments.
        like: the problem that they were made of.
        few: whether tokens are few, and nobody asks for a gradient.
    """
    name = operator.token if few and operator.token is not None else operator.name
    run = function(operator.module, name)
    K, V = x.start.shape[-2:]
    x = _without_odd_sizes(x)
    more = {"scale": 1.0, "initial_state": x.start, "output_final_state": x.final}
    if x.borders is not None:
        more["cu_seqlens"] = x.borders
    y, S = _CALLS[operator.name](run, x, more)
    y, S = y[..., :V], None if S is None else S[..., :K, :V]
    H, G = like.q.shape[2:4]
    A = None if S is None else S.mT.to(like.A0.dtype)
    if A is not None and G > 1:
        A = A.unflatten(1, (H, G))[:, :, 0]  # all queries of a memory have the same
    return y.unflatten(2, (H, G)), A


def _without_odd_sizes(x: Arguments) -> Arguments:
    """The same with channels of zeros, where there is an odd number of them in 16 bits.

    Kernels read such channels in pairs, and Triton may read beyond the last one; some refuse them.
    A value channel of ones beside an even number of others is the common case.
    """
    K, V = x.start.shape[-2:]
    if x.q.dtype.itemsize != 2 or not (K % 2 or V % 2):
        return x
    keys, values = (-size % 16 if size % 2 else 0 for size in (K, V))

    def wider(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else pad(tensor, (0, keys))

    return replace(
        x,
        q=pad(x.q, (0, keys)),
        k=pad(x.k, (0, keys)),
        v=pad(x.v, (0, values)),
        decay=wider(x.decay) if x.decay is not None and x.decay.dim() == 4 else x.decay,
        probe=wider(x.probe),
        erase=wider(x.erase),
        bonus=wider(x.bonus),
        start=pad(x.start, (0, values, 0, keys)),
    )


# -- one function per operator: how its arguments are called ---------------------------------------


def _simple_gla(run: Call, x: Arguments, more: Mapping[str, Any]) -> Result:
    return run(x.q, x.k, x.v, g=x.decay, **more)


def _gla(run: Call, x: Arguments, more: Mapping[str, Any]) -> Result:
    # The gate has one name in chunks and another token by token.
    gate = "gk" if run.__name__.startswith("fused_recurrent") else "g"
    return run(x.q, x.k, x.v, **{gate: x.per_channel()}, **more)


def _rwkv6(run: Call, x: Arguments, more: Mapping[str, Any]) -> Result:
    return run(x.q, x.k, x.v, x.per_channel(), x.bonus, **more)


def _delta_rule(run: Call, x: Arguments, more: Mapping[str, Any]) -> Result:
    return run(x.q, x.k, x.v, x.beta, **more)


def _gated_delta_rule(run: Call, x: Arguments, more: Mapping[str, Any]) -> Result:
    return run(x.q, x.k, x.v, g=x.per_head(), beta=x.beta, **more)


def _kda(run: Call, x: Arguments, more: Mapping[str, Any]) -> Result:
    return run(x.q, x.k, x.v, g=x.per_channel().contiguous(), beta=x.beta, **more)


def _dplr(run: Call, x: Arguments, more: Mapping[str, Any]) -> Result:
    assert x.erase is not None
    return run(x.q, x.k, x.v, x.probe, -x.erase, x.per_channel(), **more)


def _gated_delta_product(run: Call, x: Arguments, more: Mapping[str, Any]) -> Result:
    n = x.several
    decay = None if x.decay is None else x.decay[:, ::n]
    if x.borders is not None:
        more = {**more, "cu_seqlens": x.borders // n}
    y, S = run(x.q[:, n - 1 :: n], x.k, x.v, decay, x.beta, n, **more)
    idle = torch.zeros_like(y).unsqueeze(2).expand(-1, -1, n - 1, -1, -1)
    return torch.cat([idle, y.unsqueeze(2)], dim=2).flatten(1, 2), S


_CALLS: Mapping[str, Callable[[Call, Arguments, Mapping[str, Any]], Result]] = {
    "chunk_simple_gla": _simple_gla,
    "chunk_rwkv6": _rwkv6,
    "chunk_gla": _gla,
    "chunk_gated_delta_product": _gated_delta_product,
    "chunk_delta_rule": _delta_rule,
    "chunk_gated_delta_rule": _gated_delta_rule,
    "chunk_kda": _kda,
    "chunk_dplr_delta_rule": _dplr,
}


def scan_channels(operator: Operator, p: LinearProblem, when: str, *, final: bool) -> Result:
    """A vector memory h_t = α_t ⊙ h_(t−1) + b η k v, y = h ⊙ q, its channels side by side.

    Args:
        operator: that runs.
        p: the problem, of an error that does not see the prediction.
        when: whether h_t is read, or ``"before"`` the write h_(t−1).
        final: whether the memory after the last token is asked for.
    """
    p = p.masked()
    rate = p.lr if p.lr.dim() == 4 else p.lr.unsqueeze(-1)
    log = p.log_decay if p.log_decay is not None else p.log_decay_value
    log = torch.zeros_like(p.v) if log is None else log if log.dim() == 4 else log.unsqueeze(-1)
    written = p.affine[1] * rate * p.k * p.v
    h, end = function(operator.module, operator.name)(
        written.flatten(2),
        log.expand_as(written).clamp_min(FLOOR).flatten(2),
        initial_state=p.A0.flatten(1),
        output_final_state=final,
    )
    h = h.unflatten(2, p.v.shape[2:])
    if when == "before":
        h = torch.cat([p.A0.unsqueeze(1), h[:, :-1]], dim=1)
    y = p.q * h.unsqueeze(3)
    return y, None if end is None else end.unflatten(1, p.v.shape[2:]).to(p.A0.dtype)


def over(p: LinearProblem, inputs: Mapping[str, Tensor]) -> LinearProblem:
    """The problem with other tensors, by the names of its fields.

    Args:
        p: the problem.
        inputs: tensors, some of which may be no field of it.
    """
    return replace(p, **{name: x for name, x in inputs.items() if hasattr(p, name)})
