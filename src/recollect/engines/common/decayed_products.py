"""Products inside a chunk with a decay per channel, exact in float32.

``decayed_gram`` is Σ_k x[t, k] y[i, k] exp(X[t, k] − Y[i, k]) for i ≤ t, with X and Y cumulative
log decays. The factors exp(X) and exp(−Y) overflow if a chunk decays by more than e^−88. The data
select one of three algorithms:

1. If the full chunk decays by less than e^−30, use the factors exp(X) and exp(−Y).
2. Otherwise, split the chunk into sub-chunks of 16. A block below the diagonal is relative to the
   start of the query's sub-chunk, so that no exponent is positive. A diagonal block uses the
   factors if its sub-chunk decays by less than e^−30.
3. Otherwise, split the diagonal block by the bits of the token index, as on a GPU (below).

On a GPU, this selection would synchronise with the device. There the products are split by the bits
of the token index, which is exact for all data. For t > i, let h be the highest bit in which the
indices differ, and m = ⌊t/2^h⌋ 2^h. Then i < m ≤ t. With the sums Z before m,
exp(X_t − Y_i) = exp(X_t − Z) exp(Z − Y_i), and neither exponent is positive. One batch contains the
products of all log₂ C bits.

``decayed_matmul`` is the corresponding product for decays over value channels.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from recollect.choices.runtime import cached_constant, can_read_values
from recollect.engines.common.coefficients import (
    MAX_LOG_RANGE,
    causal,
    decay_matrix,
    fits_float32_range,
    repeat_rows,
)

__all__ = ["decayed_gram", "decayed_matmul"]

SUBCHUNK = 16


def _subchunks(total: Tensor) -> list[tuple[int, int]]:
    C = total.shape[-2]
    return [(s, min(s + SUBCHUNK, C)) for s in range(0, C, SUBCHUNK)]


def _max_decay(total: Tensor, reference: Tensor) -> float:
    return float((reference - total).detach().amax()) if total.numel() else 0.0


def decayed_gram(
    x: Tensor,  # a rows per token, tokens in order, [..., C a, K]
    # cumulative log decays of x in float64, perhaps one token behind, [..., C, K]
    x_total: Tensor,
    y: Tensor,  # b rows per token, tokens in order, [..., C b, K]
    y_total: Tensor,  # cumulative log decays of y in float64, [..., C, K]
    *,
    strict: bool,  # whether to exclude products of x and y of one token, on the diagonal
) -> Tensor:
    """Return the decayed products ``[..., C a, C b]``, zero if y is later than x.

    The algorithms are 2 and 3 of the module's list, for chunks with a strong decay.
    """
    C = x_total.shape[-2]
    a, b = x.shape[-2] // C, y.shape[-2] // C
    if x_total.shape[-1] == 1:
        matrix = decay_matrix(x_total.squeeze(-1), y_total.squeeze(-1), x.dtype, strict=strict)
        return (x @ y.mT) * repeat_rows(repeat_rows(matrix, a).mT, b).mT
    if not can_read_values(x_total):
        return _gram_by_bits(x, x_total, y, y_total, strict=strict)
    rows: list[Tensor] = []
    for start, stop in _subchunks(x_total):
        rows_x = slice(start * a, stop * a)
        reference = _reference(y_total, start)  # [..., 1, K]
        scaled = x[..., rows_x, :] * _exp(x_total[..., start:stop, :] - reference, a, x)
        parts: list[Tensor] = []
        if start:
            past = y[..., : start * b, :] * _exp(reference - y_total[..., :start, :], b, y)
            parts.append(scaled @ past.transpose(-1, -2))
        parts.append(
            _diagonal(
                x[..., rows_x, :],
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
    """Return the cumulative log decay before a sub-chunk."""
    if start == 0:
        return torch.zeros_like(total[..., :1, :])
    return total[..., start - 1 : start, :]


def _exp(exponent: Tensor, rows: int, like: Tensor) -> Tensor:
    return repeat_rows(exponent.to(like.dtype).exp(), rows)


def _diagonal(
    x: Tensor, x_total: Tensor, y: Tensor, y_total: Tensor, reference: Tensor, strict: bool
) -> Tensor:
    if _max_decay(y_total, reference) >= MAX_LOG_RANGE:
        return _gram_by_bits(x, x_total, y, y_total, strict=strict)
    C = x_total.shape[-2]
    scaled_x = x * _exp(x_total - reference, x.shape[-2] // C, x)
    scaled_y = y * _exp(reference - y_total, y.shape[-2] // C, y)
    return causal(scaled_x @ scaled_y.mT, C, strict=strict)


def decayed_matmul(
    # scores of g query rows and b value rows per token, zero above the diagonal, [..., C g, C b]
    scores: Tensor,
    values: Tensor,  # b rows per token, [..., C b, V]
    total: Tensor,  # cumulative log decays in float64, [..., C, V]
) -> Tensor:
    """Return Σ_i scores[t, i] exp(total[t, v] − total[i, v]) values[i, v] for causal scores."""
    C = total.shape[-2]
    g, b = scores.shape[-2] // C, values.shape[-2] // C
    if not can_read_values(total):
        return _mix_by_bits(scores, values, total)
    if fits_float32_range(total):
        scaled = values * _exp(-total, b, values)
        return (scores @ scaled) * _exp(total, g, values)
    rows: list[Tensor] = []
    for start, stop in _subchunks(total):
        block_total = total[..., start:stop, :]
        reference = _reference(total, start)
        block = scores[..., start * g : stop * g, :]
        query_decay = _exp(block_total - reference, g, values)
        block_values = values[..., start * b : stop * b, :]
        inner = block[..., start * b : stop * b]
        if _max_decay(block_total, reference) < MAX_LOG_RANGE:
            mixed = (
                inner @ (block_values * _exp(reference - block_total, b, values))
            ) * query_decay
        else:
            mixed = _mix_by_bits(inner, block_values, block_total)
        if start:
            past = values[..., : start * b, :] * _exp(reference - total[..., :start, :], b, values)
            mixed = mixed + (block[..., : start * b] @ past) * query_decay
        rows.append(mixed)
    return torch.cat(rows, dim=-2)


# -- split by bits of the token index, independent of the data -------------------------------------


class _BitPartition(NamedTuple):
    """Pairs of tokens by the highest bit in which their indices differ.

    The last of the L entries is the diagonal, if it is included.
    """

    # rows [2, L C] of the sums before each token that a token is relative to, as the later and as
    # the earlier token of a pair
    reference_rows: Tensor
    inactive: Tensor  # tokens [2, L, C, 1] that are never the later or the earlier token
    pair_mask: Tensor  # 1 for pairs whose highest different bit is this one, [L, C, C]


def _bits(C: int) -> tuple[Tensor, Tensor]:
    """Return the bits of an index below C, lowest first ``[L, 1]``, and the indices ``[C]``."""
    return torch.arange(max(C - 1, 0).bit_length()).unsqueeze(-1), torch.arange(C)


def _reference_rows(C: int, include_diagonal: bool) -> Tensor:
    h, t = _bits(C)
    later, earlier = t >> h << h, (t >> h | 1) << h
    if include_diagonal:
        later, earlier = (torch.cat([x, t[None] + 1]) for x in (later, earlier))
    return torch.stack([later, earlier]).clamp_max(C).flatten(1)


def _inactive(C: int, include_diagonal: bool) -> Tensor:
    h, t = _bits(C)
    later = (t >> h & 1).bool()
    is_inactive = torch.stack([~later, later])
    if include_diagonal:
        is_inactive = torch.cat([is_inactive, torch.zeros(2, 1, C, dtype=torch.bool)], 1)
    return is_inactive.unsqueeze(-1)


def _pair_mask(C: int, include_diagonal: bool) -> Tensor:
    h, t = _bits(C)
    same_prefix = (t >> (h + 1)).unsqueeze(-1) == (t >> (h + 1)).unsqueeze(-2)
    later = (t >> h & 1).bool()
    pair_mask = same_prefix & later.unsqueeze(-1) & ~later.unsqueeze(-2)
    return (
        torch.cat([pair_mask, torch.eye(C, dtype=torch.bool)[None]])
        if include_diagonal
        else pair_mask
    )


def _bit_partition(like: Tensor, C: int, *, include_diagonal: bool) -> _BitPartition:
    return _BitPartition(
        reference_rows=cached_constant(_reference_rows, C, include_diagonal, device=like.device),
        inactive=cached_constant(_inactive, C, include_diagonal, device=like.device),
        pair_mask=cached_constant(
            _pair_mask, C, include_diagonal, device=like.device, dtype=like.dtype
        ),
    )


def _sums_before(total: Tensor, C: int, reference_rows: Tensor) -> Tensor:
    """Return the sums before the reference tokens, ``[..., C, D] -> [..., L, C, D]``."""
    sums = torch.cat([torch.zeros_like(total[..., :1, :]), total], dim=-2)
    return sums.index_select(-2, reference_rows).unflatten(-2, (-1, C))


def _factor(exponent: Tensor, inactive: Tensor, rows: int, like: Tensor) -> Tensor:
    """Return exp(exponent) per row, 0 for inactive tokens; active exponents are not positive."""
    return repeat_rows(exponent.to(like.dtype).masked_fill(inactive, -torch.inf).exp(), rows)


def _gram_by_bits(
    x: Tensor, x_total: Tensor, y: Tensor, y_total: Tensor, *, strict: bool
) -> Tensor:
    C = x_total.shape[-2]
    a, b = x.shape[-2] // C, y.shape[-2] // C
    partition = _bit_partition(x, C, include_diagonal=not strict)
    if not partition.pair_mask.shape[0]:  # a chunk of one token without its diagonal
        return (x @ y.mT) * 0.0
    reference_x, reference_y = (
        _sums_before(y_total, C, reference_rows) for reference_rows in partition.reference_rows
    )
    later = _factor(x_total.unsqueeze(-3) - reference_x, partition.inactive[0], a, x)
    earlier = _factor(reference_y - y_total.unsqueeze(-3), partition.inactive[1], b, y)
    product = (x.unsqueeze(-3) * later) @ (y.unsqueeze(-3) * earlier).mT
    pair_mask = repeat_rows(repeat_rows(partition.pair_mask, a).mT, b).mT
    return (product * pair_mask).sum(-3)


def _mix_by_bits(scores: Tensor, values: Tensor, total: Tensor) -> Tensor:
    C = total.shape[-2]
    g, b = scores.shape[-2] // C, values.shape[-2] // C
    partition = _bit_partition(values, C, include_diagonal=True)
    reference_later, reference_earlier = (
        _sums_before(total, C, reference_rows) for reference_rows in partition.reference_rows
    )
    later = _factor(total.unsqueeze(-3) - reference_later, partition.inactive[0], g, values)
    earlier = _factor(reference_earlier - total.unsqueeze(-3), partition.inactive[1], b, values)
    pair_mask = repeat_rows(repeat_rows(partition.pair_mask, g).mT, b).mT
    return (((scores.unsqueeze(-3) * pair_mask) @ (values.unsqueeze(-3) * earlier)) * later).sum(-3)
