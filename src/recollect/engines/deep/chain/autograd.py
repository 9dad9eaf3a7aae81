"""The sequential part of the chain path: inner-batch boundaries, driven by keys only.

Reads need the weights at every border, the inputs h and the gradients δ at the keys, and then none
waits for another: all inner batches are read at once (`engine`). What is left to do one batch after
another is small, and written out here with its gradient, because batches of 16 tokens are bound by
the number of operations. With M the stack of A and S of one map, per inner batch

    z_l = A_l h_(l−1),  h_l = σ(z_l);   δ_L = error,  u_l = A_lᵀ δ_l,  δ_(l−1) = σ′(z_(l−1)) ⊙ u_l
    M_j′ = Σ_i T[j, i] M_i + Σ_r c_j[r] δ_r h_rᵀ                       (T = [[a, m], [0, s]])

and backwards, given the gradients M̄′ of what stands at the border after, and h̄, δ̄ of the reads,

    M̄_i = Σ_j T[j, i] M̄_j′,    δ̄ += Σ_j c_j M̄_j′ h,    h̄ += Σ_j c_j M̄_j′ᵀ δ
    ū_l = σ′(z_(l−1)) ⊙ δ̄_(l−1),    δ̄_l += A_l ū_l,    z̄_L = (∂ error / ∂ z_L)ᵀ δ̄_L
    h̄_(l−1) += A_lᵀ z̄_l,    z̄_(l−1) = σ′ ⊙ h̄_(l−1) + σ″ ⊙ u_l ⊙ δ̄_(l−1)
    Ā_l += δ_l ū_lᵀ + z̄_l h_(l−1)ᵀ

A map is kept with its narrower side in rows, so that c_j scales the narrower of h and δ and one
product moves A and S together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from recollect.choices.gradients import again
from recollect.engines.deep.chain.backward import backward
from recollect.engines.deep.chain.forward import Commits, Keys, Made, Path, Room, forward, plain
from recollect.engines.deep.chain.reads import Asked, Seen, plain_read, pull_read, read

__all__ = ["walk_borders"]

Tensors = list[Tensor]

TOGETHER = 2**23
"""Bytes of weights at borders that are read at once: few enough to stay near the processor."""

FEW = 4
"""Batches below which it is better to read them one by one than to gather their weights."""


def walk_borders(
    path: Path, keys: Keys, asked: Asked, commits: Commits, start: Sequence[Tensor]
) -> tuple[Tensor, Tensors]:
    """Outputs ``[N, P, rows, V]``, and A and S ``[P, J, narrow, wide]`` per map after all batches.

    Args:
        start: A and S per map before the first.
    """
    if not path.keep:
        parts: Tensors = []
        room = Room(reused=True)
        memory = list(start)
        for here in _spans(keys, start):
            made = forward(path, keys.cut(*here), memory, commits[slice(*here)], room)
            parts.append(read(path, made, asked.cut(*here))[0])
            memory = made.ends
        return torch.cat(parts), memory
    flat = [keys.k, keys.v, keys.raw, keys.c, asked.q, asked.C, *keys.gates.values(), *start]
    y, *ends = _Walk.apply(path, commits, keys.T, asked.scale, *flat)
    return y, ends


def _spans(keys: Keys, start: Sequence[Tensor]) -> list[tuple[int, int]]:
    """First and last batch of those that are read at once."""
    N = keys.k.shape[0]
    each = sum(w.numel() * w.element_size() for w in start)
    some = min(N, TOGETHER // max(each, 1))
    some = 1 if some < FEW else some
    return [(s, min(s + some, N)) for s in range(0, N, some)]


_FIXED = ("T", "scale", "k", "v", "raw", "c", "q", "C")


class _Walk(torch.autograd.Function):
    """Flat: `_FIXED`, the bias's numbers, the memory per map; to y and the memory after."""

    @staticmethod
    def forward(ctx: Any, path: Path, commits: Commits, *flat: Any) -> tuple[Tensor, ...]:
        keys, asked, memory = _named(path, flat)
        ctx.path, ctx.commits, ctx.spans = path, commits, _spans(keys, memory)
        outputs: Tensors = []
        ctx.kept, room = [], Room(reused=False)
        for here in ctx.spans:
            made = forward(path, keys.cut(*here), memory, commits[slice(*here)], room)
            y, seen = read(path, made, asked.cut(*here))
            outputs.append(y)
            ctx.kept.append((made, seen))
            memory = made.ends
        ctx.save_for_backward(*flat)
        # What leaves is not what the backward pass will take.
        return torch.cat(outputs), *(w.clone() for w in memory)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        path: Path = ctx.path
        flat = ctx.saved_tensors
        needs = ctx.needs_input_grad[2:]
        if torch.is_grad_enabled():
            return None, None, *_again(path, ctx.commits, flat, needs, grads)
        return None, None, *_once(path, ctx, flat, needs, grads)


def _named(path: Path, flat: Sequence[Any]) -> tuple[Keys, Asked, Tensors]:
    fixed = dict(zip(_FIXED, flat, strict=False))
    rest = flat[len(_FIXED) :]
    count = len(path.gates)
    gates = dict(zip(path.gates, rest[:count], strict=True))
    keys = Keys(**{name: fixed[name] for name in ("k", "v", "raw", "T", "c")}, gates=gates)
    return keys, Asked(q=fixed["q"], C=fixed["C"], scale=fixed["scale"]), list(rest[count:])


def _once(
    path: Path,
    ctx: Any,
    flat: Sequence[Any],
    needs: Sequence[bool],
    grads: Sequence[Tensor],
) -> list[Tensor | None]:
    """The gradient, span by span from the last."""
    keys, asked, memory = _named(path, flat)
    names = [*_FIXED, *(f"gate {name}" for name in path.gates)]
    asks = dict(zip(names, needs, strict=False))
    given = dict(zip(names, flat, strict=False))
    total = {
        name: torch.empty_like(given[name], memory_format=torch.contiguous_format)
        for name, need in asks.items()
        if need
    }
    ends = [g.reshape(*w.shape[:2], -1).clone() for g, w in zip(grads[1:], memory, strict=True)]
    kept: list[tuple[Made, list[Seen]]] = ctx.kept
    for here, (made, seen) in zip(reversed(ctx.spans), reversed(kept), strict=True):
        span = slice(*here)
        part = asked.cut(*here)
        back = pull_read(path, made, part, seen, grads[0][span])
        pulled = backward(path, keys.cut(*here), made, ctx.commits[span], asks, back, ends)
        found = {"T": pulled.T, "k": pulled.k, "v": pulled.v, "raw": pulled.raw, "c": pulled.c}
        found |= {"q": back.q, "C": back.C, "scale": back.scale, **pulled.gates}
        for name, x in total.items():
            x[span] = 0.0 if (one := found[name]) is None else one
        ends = [w.flatten(2) for w in pulled.start]
    first = [w.unflatten(2, x.shape[2:]) for w, x in zip(ends, memory, strict=True)]
    asked_first = needs[len(names) :]
    return [
        *(total.get(name) for name in names),
        *(w if need else None for w, need in zip(first, asked_first, strict=True)),
    ]


def _again(
    path: Path,
    commits: Commits,
    flat: Sequence[Any],
    needs: Sequence[bool],
    grads: Sequence[Tensor],
) -> list[Tensor | None]:
    """The gradient as something to differentiate again."""

    def outputs(given: Sequence[Any]) -> Tensors:
        keys, asked, memory = _named(path, given)
        made = plain(path, keys, memory, commits)
        return [plain_read(path, made.M, made.h, made.delta, asked), *made.ends]

    return again(outputs, flat, needs, grads)
