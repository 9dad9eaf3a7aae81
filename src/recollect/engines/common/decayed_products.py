"""Products inside a chunk under a decay per channel, exact in float32.

``decayed_gram`` is Σ_k x[t, k] y[i, k] exp(X[t, k] − Y[i, k]) for i ≤ t, with X and Y cumulated log
decays: splitting it into exp(X) and exp(−Y) overflows when a chunk decays by more than e^−88. Three
ways, chosen by the data:

1. the whole chunk decays by less than e^−30: absorb plainly;
2. otherwise sub-chunks of 16: a block below the diagonal is referenced to the start of the query's
   sub-chunk, so that no exponent is positive; a diagonal block is absorbed plainly while its
   sub-chunk decays by less than e^−30;
3. or computed from explicit differences ``[16, 16, K]``, which costs several times more.

On a device the host would have to wait to know which of these the data allows. There tokens are
taken by halves, right for all data: t > i have a highest bit h in which their indices differ, and
between them stands the first token m = ⌊t/2^h⌋ 2^h that has it. With Z the sums before m,
exp(X_t − Y_i) = exp(X_t − Z) exp(Z − Y_i), and neither exponent is ever positive. One product for
each of log₂ C bits, all of them in one batch.

``decayed_mix`` is the same for decays over value channels.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from recollect.choices.runtime import cached_constant, can_read_values
from recollect.engines.common.coefficients import SAFE, absorbable

__all__ = ["causal_mask", "decayed_gram", "decayed_mix"]

SUB = 16


def _spread(total: Tensor, rows: int) -> Tensor:
    """Per-token numbers ``[..., C, D]`` to ``rows`` rows per token."""
    return total if rows == 1 else total.repeat_interleave(rows, dim=-2)


def _starts(total: Tensor) -> list[tuple[int, int]]:
    C = total.shape[-2]
    return [(s, min(s + SUB, C)) for s in range(0, C, SUB)]


def _block_drop(total: Tensor, reference: Tensor) -> float:
    return float((reference - total).detach().amax()) if total.numel() else 0.0


def decayed_gram(x: Tensor, x_total: Tensor, y: Tensor, y_total: Tensor, *, strict: bool) -> Tensor:
    """``[..., C a, K], [..., C b, K] -> [..., C a, C b]``; zero where y is later than x.

    For chunks that decay too far to be absorbed at once (ways 2 and 3).

    Args:
        x, y: a (or b) rows per token, tokens in order.
        x_total, y_total: float64 cumulated log decays per token ``[..., C, K]``; x's may lag one
            token behind.
        strict: whether y's own token is excluded.
    """
    C = x_total.shape[-2]
    a, b = x.shape[-2] // C, y.shape[-2] // C
    if not can_read_values(x_total):
        return _gram_by_halves(x, x_total, y, y_total, strict=strict)
    rows: list[Tensor] = []
    for start, stop in _starts(x_total):
        here = slice(start * a, stop * a)
        reference = _reference(y_total, start)  # [..., 1, K]
        scaled = x[..., here, :] * _exp(x_total[..., start:stop, :] - reference, a, x)
        parts: list[Tensor] = []
        if start:
            past = y[..., : start * b, :] * _exp(reference - y_total[..., :start, :], b, y)
            parts.append(scaled @ past.transpose(-1, -2))
        parts.append(
            _diagonal(
                x[..., here, :],
                x_total[..., start:stop, :],
                y[..., start * b : stop * b, :],
                y_total[..., start:stop, :],
                reference,
                strict,
            )
        )
        if stop < C:
            shape = (*x.shape[:-2], (stop - start) * a, (C - stop) * b)
            parts.append(x.new_zeros(shape))
        rows.append(torch.cat(parts, dim=-1))
    return torch.cat(rows, dim=-2)


def _reference(total: Tensor, start: int) -> Tensor:
    """The cumulated log decay just before a sub-chunk."""
    if start == 0:
        return torch.zeros_like(total[..., :1, :])
    return total[..., start - 1 : start, :]


def _exp(exponent: Tensor, rows: int, like: Tensor) -> Tensor:
    return _spread(exponent.to(like.dtype).exp(), rows)


def causal_mask(x: Tensor, y: Tensor, tokens: int, *, strict: bool) -> Tensor:
    """1 where a y row is not later than an x row (``strict``: earlier), for rows in token order."""
    mask = torch.ones(tokens, tokens, dtype=x.dtype, device=x.device).tril(-1 if strict else 0)
    rows, columns = x.shape[-2] // tokens, y.shape[-2] // tokens
    return mask.repeat_interleave(rows, 0).repeat_interleave(columns, 1)


def _diagonal(
    x: Tensor, x_total: Tensor, y: Tensor, y_total: Tensor, reference: Tensor, strict: bool
) -> Tensor:
    C = x_total.shape[-2]
    a, b = x.shape[-2] // C, y.shape[-2] // C
    if _block_drop(y_total, reference) < SAFE:
        left = x * _exp(x_total - reference, a, x)
        right = y * _exp(reference - y_total, b, y)
        return (left @ right.transpose(-1, -2)) * causal_mask(x, y, C, strict=strict)
    rest = (x_total.unsqueeze(-2) - y_total.unsqueeze(-3)).to(x.dtype)  # [..., C, C, K]
    future = torch.ones(C, C, dtype=torch.bool, device=x.device).triu(0 if strict else 1)
    factor = rest.masked_fill(future.unsqueeze(-1), -torch.inf).exp()
    rows_x, rows_y = x.unflatten(-2, (C, a)), y.unflatten(-2, (C, b))
    product = torch.einsum("...tak,...tik,...ibk->...taib", rows_x, factor, rows_y)
    return product.flatten(-4, -3).flatten(-2, -1)


def decayed_mix(scores: Tensor, values: Tensor, total: Tensor) -> Tensor:
    """Σ_i scores[t, i] exp(total[t, v] − total[i, v]) values[i, v] for causal scores.

    Args:
        scores: ``[..., C g, C b]``, g query rows and b value rows per token, zero above the
        diagonal.
        values: ``[..., C b, V]``.
        total: float64 cumulated log decays per token and value channel ``[..., C, V]``.
    """
    C = total.shape[-2]
    g, b = scores.shape[-2] // C, values.shape[-2] // C
    if not can_read_values(total):
        return _mix_by_halves(scores, values, total)
    if absorbable(total):
        scaled = values * _exp(-total, b, values)
        return (scores @ scaled) * _exp(total, g, values)
    rows: list[Tensor] = []
    for start, stop in _starts(total):
        here = total[..., start:stop, :]
        reference = _reference(total, start)
        block = scores[..., start * g : stop * g, :]
        after = _exp(here - reference, g, values)
        own = values[..., start * b : stop * b, :]
        inner = block[..., start * b : stop * b]
        if _block_drop(here, reference) < SAFE:
            mixed = (inner @ (own * _exp(reference - here, b, values))) * after
        else:
            rest = (here.unsqueeze(-2) - here.unsqueeze(-3)).to(values.dtype)
            size = stop - start
            future = torch.ones(size, size, dtype=torch.bool, device=values.device).triu(1)
            factor = rest.masked_fill(future.unsqueeze(-1), -torch.inf).exp()
            mixed = torch.einsum(
                "...tgib,...tiv,...ibv->...tgv",
                inner.unflatten(-2, (size, g)).unflatten(-1, (size, b)),
                factor,
                own.unflatten(-2, (size, b)),
            ).flatten(-3, -2)
        if start:
            past = values[..., : start * b, :] * _exp(reference - total[..., :start, :], b, values)
            mixed = mixed + (block[..., : start * b] @ past) * after
        rows.append(mixed)
    return torch.cat(rows, dim=-2)


# -- by halves, where nobody looks at the data -----------------------------------------------------


class _Halves(NamedTuple):
    """For every bit of a token's index, and last for tokens with themselves.

    Attributes:
        refers: ``[2, L C]`` row of the sums before each token (one more row than tokens) that a
            token's own is counted from, as the later one and as the earlier.
        other: ``[2, L, C, 1]`` tokens that are no later or no earlier one in this bit.
        pairs: ``[L, C, C]``: 1 for those pairs that have this bit as their highest difference.
    """

    refers: Tensor
    other: Tensor
    pairs: Tensor


def _bits(C: int) -> tuple[Tensor, Tensor]:
    """Every bit of an index below C, lowest first ``[L, 1]``, and the indices ``[C]``."""
    return torch.arange(max(C - 1, 0).bit_length()).unsqueeze(-1), torch.arange(C)


def _refers(C: int, own: bool) -> Tensor:
    h, t = _bits(C)
    later, earlier = t >> h << h, (t >> h | 1) << h
    if own:
        later, earlier = (torch.cat([x, t[None] + 1]) for x in (later, earlier))
    return torch.stack([later, earlier]).clamp_max(C).flatten(1)


def _other(C: int, own: bool) -> Tensor:
    h, t = _bits(C)
    later = (t >> h & 1).bool()
    sides = torch.stack([~later, later])
    if own:
        sides = torch.cat([sides, torch.zeros(2, 1, C, dtype=torch.bool)], 1)
    return sides.unsqueeze(-1)


def _pairs(C: int, own: bool) -> Tensor:
    h, t = _bits(C)
    same = (t >> (h + 1)).unsqueeze(-1) == (t >> (h + 1)).unsqueeze(-2)
    later = (t >> h & 1).bool()
    pairs = same & later.unsqueeze(-1) & ~later.unsqueeze(-2)
    return torch.cat([pairs, torch.eye(C, dtype=torch.bool)[None]]) if own else pairs


def _halves(like: Tensor, C: int, *, own: bool) -> _Halves:
    return _Halves(
        refers=cached_constant(_refers, C, own, device=like.device),
        other=cached_constant(_other, C, own, device=like.device),
        pairs=cached_constant(_pairs, C, own, device=like.device, dtype=like.dtype),
    )


def _counted(total: Tensor, C: int, refers: Tensor) -> Tensor:
    """Sums before the tokens that others refer to, ``[..., C, D] -> [..., L, C, D]``."""
    before = torch.cat([torch.zeros_like(total[..., :1, :]), total], dim=-2)
    return before.index_select(-2, refers).unflatten(-2, (-1, C))


def _factor(exponent: Tensor, other: Tensor, rows: int, like: Tensor) -> Tensor:
    """exp of what is never positive where it counts, 0 elsewhere; rows of each token."""
    return _spread(exponent.to(like.dtype).masked_fill(other, -torch.inf).exp(), rows)


def _gram_by_halves(
    x: Tensor, x_total: Tensor, y: Tensor, y_total: Tensor, *, strict: bool
) -> Tensor:
    C = x_total.shape[-2]
    a, b = x.shape[-2] // C, y.shape[-2] // C
    halves = _halves(x, C, own=not strict)
    if not halves.pairs.shape[0]:  # a chunk of one token, whose own is excluded
        return (x @ y.mT) * 0.0
    of_x, of_y = (_counted(y_total, C, refers) for refers in halves.refers)
    later = _factor(x_total.unsqueeze(-3) - of_x, halves.other[0], a, x)
    earlier = _factor(of_y - y_total.unsqueeze(-3), halves.other[1], b, y)
    product = (x.unsqueeze(-3) * later) @ (y.unsqueeze(-3) * earlier).mT
    pairs = _spread(_spread(halves.pairs, a).mT, b).mT
    return (product * pairs).sum(-3)


def _mix_by_halves(scores: Tensor, values: Tensor, total: Tensor) -> Tensor:
    C = total.shape[-2]
    g, b = scores.shape[-2] // C, values.shape[-2] // C
    halves = _halves(values, C, own=True)
    of_later, of_earlier = (_counted(total, C, refers) for refers in halves.refers)
    later = _factor(total.unsqueeze(-3) - of_later, halves.other[0], g, values)
    earlier = _factor(of_earlier - total.unsqueeze(-3), halves.other[1], b, values)
    pairs = _spread(_spread(halves.pairs, g).mT, b).mT
    return (((scores.unsqueeze(-3) * pairs) @ (values.unsqueeze(-3) * earlier)) * later).sum(-3)
