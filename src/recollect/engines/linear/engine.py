"""Engine ``linear``: a matrix (or vector) memory, exact at every token and parallel in chunks.

This file asks a recipe the structural questions and hands the numbers to
`recollect.engines.linear.chunked`.
Value channels whose error equations differ (rates or decays per value channel under an error that
sees the prediction) are independent of each other, so each becomes a memory of its own with one
row: correct, at V times the cost of the key products, which `describes` says.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from recollect.engines.common.problem import Problem, scaled
from recollect.engines.linear.chunked import chunked
from recollect.engines.linear.inputs import Numbers, numbers_of
from recollect.engines.linear.recurrent import recurrent
from recollect.engines.linear.scan import scan
from recollect.state.state import State

if TYPE_CHECKING:
    from recollect.recipe.recipe import Recipe

__all__ = ["describes", "per_value_systems", "refuses", "run", "scans"]


def refuses(recipe: Recipe) -> list[str]:
    """Why this engine cannot run a recipe; empty when it can."""
    memory, retention, algorithm = recipe.memory, recipe.retention, recipe.algorithm
    if not memory.linear:
        return [f"{memory.title} is not linear in its parameters"]
    reasons: list[str] = []
    if not recipe.features.finite:
        reasons.append(f"{recipe.features.title} has infinitely many features")
    if recipe.bias.affine is None:
        reasons.append(f"the error of {recipe.bias.title} is not affine in the prediction")
    if recipe.context.horizon is None:
        reasons.append(f"{recipe.context.title} sees all of the past at once")
    if retention.linked or not retention.additive:
        reasons.append(f"{retention.title} puts a link between the state and the weights")
    if algorithm.momentum_of is None:
        reasons.append(f"the step of {algorithm.title} is not linear in the gradients")
    if algorithm.batch > 1:
        reasons.append(f"inner batches of {algorithm.batch} tokens, and this engine solves for one")
    if algorithm.reduce != "sum":
        reasons.append("the step is averaged over the open inner batch")
    return reasons


def scans(recipe: Recipe) -> bool:
    """Whether every entry of the memory follows a recurrence of its own.

    A decay per entry does not separate into keys and values, but where no error sees the prediction
    it need not; and the one weight of a channel sees nothing but itself.
    """
    decay, affine = recipe.retention.decay, recipe.bias.affine
    alone = recipe.context.horizon == 1 and recipe.algorithm.momentum_of == "none"
    if recipe.memory.diagonal:
        return alone
    entry = decay is not None and decay.per == "entry"
    return alone and entry and affine is not None and affine[0] == 0


def per_value_systems(recipe: Recipe) -> bool:
    """Whether value channels follow different equations under an error that sees the prediction."""
    decay, affine = recipe.retention.decay, recipe.bias.affine
    assert affine is not None
    rows = decay is not None and decay.per in ("value", "key_value", "entry")
    rates = recipe.algorithm.per_value
    if decay is not None and decay.per == "entry" and not scans(recipe):
        return True
    if affine[0] != 0:
        return rows or rates
    # The dot product's write is η ⊙ v; in a window, one η meets the values of several tokens.
    return rates and recipe.context.horizon != 1


def describes(recipe: Recipe) -> str:
    """How this engine runs a recipe, in a few words."""
    affine, decay = recipe.bias.affine, recipe.retention.decay
    if scans(recipe):
        return "scan over time, entry by entry"
    channels = decay is not None and decay.per in ("key", "value", "key_value", "entry")
    split = recipe.memory.diagonal or per_value_systems(recipe)
    # A memory per value channel has one decay of its own; what is left is a decay over keys.
    if split and decay is not None:
        channels = decay.per in ("key_value", "entry") or (
            decay.per == "key" and not recipe.memory.diagonal
        )
    if channels and recipe.algorithm.momentum_of != "none":
        return "analytic scan: decay per channel with momentum does not separate"
    if affine is not None and affine[0] == 0:
        return "masked attention"
    if split:
        return "one triangular solve per value channel"
    return "triangular solve"


def run(problem: Problem) -> tuple[Tensor, State]:
    """Outputs ``[B, T, H, G, V]`` and the final state."""
    if problem.recipe.memory.diagonal:
        return _run_diagonal(problem)
    y, A, S = _solve(problem)
    return y.to(problem.v.dtype), _after(problem, A, S)


def _after(problem: Problem, A: Tensor, S: Tensor | None) -> State:
    names = problem.recipe.algorithm.slots
    return problem.after(
        weights=(A,),
        slots={name: (S,) for name in names if S is not None},
    )


def _split_values(n: Numbers) -> Numbers:
    """Every value channel as a memory ``[1, F]`` of its own: H·V heads."""
    V = n.v.shape[-1]

    def heads(x: Tensor | None) -> Tensor | None:  # [B, T, H, ...] -> [B, T, H V, ...]
        return None if x is None else x.repeat_interleave(V, dim=2)

    def channels(x: Tensor | None) -> Tensor | None:  # [B, T, H, V] -> [B, T, H V]
        return None if x is None else x.flatten(2)

    def rows(x: Tensor | None) -> Tensor | None:  # [B, H, V, F] -> [B, H V, 1, F]
        return None if x is None else x.flatten(1, 2).unsqueeze(2)

    if n.log_decay is not None and n.decay_scale is not None:
        decay = scaled(n.log_decay.unsqueeze(-1), n.decay_scale).flatten(2, 3)
    elif n.log_decay is not None and n.log_decay.dim() == 5:
        decay = n.log_decay.flatten(2, 3)
    else:
        decay = heads(n.log_decay)
    per_value = channels(n.log_decay_value)
    if per_value is not None:
        spread = per_value if decay is None or decay.dim() == 3 else per_value.unsqueeze(-1)
        decay = spread if decay is None else decay + spread
    values = channels(n.v)
    past = channels(n.v_past)
    A0, k, q = rows(n.A0), heads(n.k), heads(n.q)
    lr = channels(n.lr) if n.lr is not None and n.lr.dim() == 4 else heads(n.lr)
    assert values is not None and A0 is not None and k is not None and q is not None
    return Numbers(
        q=q,
        k=k,
        v=values.unsqueeze(-1),
        lr=lr,
        log_decay=decay,
        momentum=heads(n.momentum),
        window=heads(n.window),
        k_past=heads(n.k_past),
        v_past=None if past is None else past.unsqueeze(-1),
        past_mask=n.past_mask,
        probe=heads(n.probe),
        erase=heads(n.erase),
        A0=A0,
        S0=rows(n.S0),
    )


def _call(problem: Problem, n: Numbers, q: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    recipe = problem.recipe
    decay, affine = recipe.retention.decay, recipe.bias.affine
    assert affine is not None
    of = recipe.algorithm.momentum_of
    if n.log_decay is not None and (n.log_decay.dim() == 5 or n.decay_scale is not None):
        return _scan_entries(problem, n, q)
    rest = {
        name: getattr(n, name)
        for name in (
            *("lr", "log_decay", "log_decay_value", "momentum", "window"),
            *("k_past", "v_past", "past_mask", "probe", "erase", "A0", "S0"),
        )
    }
    rest.update(
        affine=affine,
        before=decay is not None and decay.when == "before",
        momentum_of=of if of in ("gradient", "value") else "gradient",
        live=problem.live,
    )
    if n.k.shape[1] == 1:
        return recurrent(q, n.k, n.v, **rest)
    return chunked(q, n.k, n.v, chunk_size=problem.chunk_size, **rest)


def _idle(problem: Problem, *numbers: Tensor) -> list[Tensor]:
    """Numbers of padded tokens replaced by 0, which writes, reads and (as a log) decays nothing."""
    live = problem.live
    if live is None:
        return list(numbers)
    return [torch.where(live.view(*live.shape, *(1,) * (x.dim() - 2)), x, 0.0) for x in numbers]


def _scan_entries(problem: Problem, n: Numbers, q: Tensor) -> tuple[Tensor, Tensor, None]:
    """A matrix memory whose entries decay on their own, under a dot product."""
    affine = problem.recipe.bias.affine
    assert affine is not None and n.log_decay is not None
    u = n.v if n.lr is None else n.v * n.lr.unsqueeze(-1)
    q, k, u, decay = _idle(problem, q, n.k, affine[1] * u, n.log_decay)
    y, A = scan(q, k, u, decay, scale=n.decay_scale, A0=n.A0, chunk_size=problem.chunk_size)
    return y, A, None


def _solve(problem: Problem) -> tuple[Tensor, Tensor, Tensor | None]:
    """y, A and S of a matrix memory, by one call of the numeric core."""
    recipe = problem.recipe
    n = numbers_of(problem)
    shape = n.A0.shape
    split = per_value_systems(recipe)
    bonus = _bonus(problem, n)
    if split:
        n = _split_values(n)
    elif n.lr is not None and n.lr.dim() == 4:
        # The dot product's write is η ⊙ v: a rate per value channel is a change of value.
        n.v, n.lr = n.v * n.lr, torch.ones_like(n.lr[..., 0])
    y, A, S = _read_in_order(problem, n)
    if split:
        B, H, V, F = shape
        y = y.squeeze(-1).unflatten(2, (H, V)).transpose(-1, -2)
        A = A.reshape(B, H, V, F)
        S = None if S is None else S.reshape(B, H, V, F)
    return (y if bonus is None else y + bonus), A, S


def _read_in_order(problem: Problem, n: Numbers) -> tuple[Tensor, Tensor, Tensor | None]:
    """Read after the write; or before it, which is the next query read one token early."""
    if problem.recipe.memory.read.when == "after" or n.q.shape[1] == 0:
        return _call(problem, n, n.q)
    later = torch.cat([n.q[:, 1:], torch.zeros_like(n.q[:, :1])], dim=1)
    y, A, S = _call(problem, n, later)
    first = torch.einsum("bhvk,bhgk->bhgv", n.A0, n.q[:, 0]).unsqueeze(1)
    return torch.cat([first.to(y.dtype), y[:, :-1]], dim=1), A, S


def _bonus(problem: Problem, n: Numbers) -> Tensor | None:
    """⟨φ(q), u ⊙ φ(k)⟩ v of the current token (RWKV-6)."""
    if problem.recipe.memory.read.bonus == 0.0:
        return None
    u = problem.rates["bonus"]
    u = u if u.dim() == 4 else u.unsqueeze(-1)
    match = torch.einsum("bthgk,bthk->bthg", n.q, u * n.k)
    return match.unsqueeze(-1) * n.v.unsqueeze(3)


def _run_diagonal(problem: Problem) -> tuple[Tensor, State]:
    """A vector memory: K = V = 1 and a head per channel, or a scan over the channels."""
    n = numbers_of(problem)
    B, H, V = n.A0.shape
    if scans(problem.recipe):
        y, A = _scan_channels(problem, n)
        return y.to(problem.v.dtype), _after(problem, A, None)

    def channels(x: Tensor | None) -> Tensor | None:
        """``[B, T, H]`` or ``[B, T, H, V]`` to ``[B, T, H V]``."""
        if x is None:
            return None
        return x.flatten(2) if x.dim() == 4 else x.repeat_interleave(V, dim=2)

    def single(x: Tensor | None) -> Tensor | None:
        return None if x is None else x.flatten(2).unsqueeze(-1)

    k, v, lr = single(n.k), single(n.v), channels(n.lr)
    decay = channels(n.log_decay if n.log_decay is not None else n.log_decay_value)
    assert k is not None and v is not None
    one = Numbers(
        q=n.q.transpose(3, 4).flatten(2, 3).unsqueeze(-1),  # [B, T, H V, G, 1]
        k=k,
        v=v,
        lr=lr,
        log_decay=decay,
        momentum=channels(n.momentum),
        window=None if n.window is None else n.window.repeat_interleave(V, dim=2),
        k_past=single(n.k_past),
        v_past=single(n.v_past),
        past_mask=n.past_mask,
        A0=n.A0.reshape(B, H * V, 1, 1),
        S0=None if n.S0 is None else n.S0.reshape(B, H * V, 1, 1),
    )
    y, A, S = _read_in_order(problem, one)
    y = y.squeeze(-1).unflatten(2, (H, V)).transpose(-1, -2)
    S = None if S is None else S.reshape(B, H, V)
    return y.to(problem.v.dtype), _after(problem, A.reshape(B, H, V), S)


def _scan_channels(problem: Problem, n: Numbers) -> tuple[Tensor, Tensor]:
    """w_t = (α_t − a η_t k_t²) w_{t−1} + b η_t k_t v_t, y_t = w ⊙ q_t; α_t (1 − …) decayed before.

    With decay before, the error's own part of the factor is decayed too.
    """
    recipe, decay = problem.recipe, problem.recipe.retention.decay
    assert recipe.bias.affine is not None and n.lr is not None
    a, b = recipe.bias.affine
    eta = n.lr if n.lr.dim() == 4 else n.lr.unsqueeze(-1)
    log = n.log_decay if n.log_decay is not None else n.log_decay_value
    log = torch.zeros_like(n.v) if log is None else log if log.dim() == 4 else log.unsqueeze(-1)
    erased = None if a == 0 else a * eta * n.k.square()
    written = b * eta * n.k * n.v
    q, written, log = _idle(problem, n.q, written, log.expand_as(n.v))
    factor = log
    if erased is not None:
        (erased,) = _idle(problem, erased)
        alpha = log.exp()
        before = decay is not None and decay.when == "before"
        factor = alpha * (1 - erased) if before else alpha - erased
    one = torch.ones_like(written[..., :1])  # F = 1: every channel's only entry
    first = problem.recipe.memory.read.when == "before"
    w, A = scan(
        one.unsqueeze(3),
        one,
        written,
        factor.unsqueeze(-1),
        log=erased is None,
        A0=n.A0.unsqueeze(-1),
        chunk_size=problem.chunk_size,
    )
    if first:
        w = torch.cat([n.A0[:, None, :, None], w[:, :-1]], dim=1)
    return q * w, A.squeeze(-1)
