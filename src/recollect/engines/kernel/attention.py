"""Attention: a kernel-weighted mean or sum of the values (local constant regression).

A mean under a kernel with logarithm a·q·k + b(‖q‖² + ‖k‖²) is softmax attention, computed by
`scaled_dot_product_attention`:

* Full past: one causal call.
* Window of c: queries in chunks, each with the keys of its chunk and of the chunks before it, T·c
  pairs in one batched call. With the first n associations next to the window, T·(n + c) pairs.
* Weights of other contexts, a cache or padding: queries in pieces, each with the keys up to it. The
  logarithms of the weights are added to the logits.

A weight that is a factor of the query times a factor of the association (a decay) enters the
softmax through the association only. Its logarithm is one more key channel, relative to the first
query of the piece. If a piece decays too far for float32, the value is a mask without a gradient,
computed from differences in float64. The channel is then zero and carries the gradient.

If all weights are decays, keys with negligible weights are omitted (`DecayCutoff`).

Other kernels, plain sums, keys that later tokens move (`moved_keys`), and weights that replace the
softmax take two products per piece. The backward pass recomputes pieces, so memory is O(T).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from recollect.choices.context.weights import ContextWeights, VisibleAssociations
from recollect.choices.matmul_precision import effective_eps
from recollect.choices.runtime import can_read_values
from recollect.engines.base import Engine
from recollect.engines.common.associations import gather_visible, visible_values
from recollect.engines.common.kernel_precision import min_mass
from recollect.engines.common.problem import Problem, state_dtype
from recollect.engines.kernel.moved_keys import TRANSITIONS, moved_products
from recollect.engines.kernel.pieces import (
    PIECE,
    DecayCutoff,
    context_weights,
    cut,
    piecewise,
    strict_visibility_mask,
    visibility_mask,
)
from recollect.engines.kernel.softmax import is_mean, sdpa
from recollect.state.state import Buffer, State

if TYPE_CHECKING:
    from recollect.recipe.recipe import Recipe

__all__ = ["Attention", "attend", "pairs"]

MAX_LOGIT_ERROR = 4e-6  # largest error of a logit through a channel
MASKED_LOGIT = -1e4  # logit with exponential 0


class Attention(Engine):
    """Kernel-weighted mean or sum of the values."""

    name = "attention"

    def unsupported_reasons(self, recipe: Recipe) -> list[str]:
        if recipe.memory.degree != 0:
            return [f"{recipe.memory.title} is not a mean of values"]
        context = recipe.context
        if context.key_transition is None or context.kernel is None:
            return []
        if context.key_transition not in TRANSITIONS:
            return [f"key_transition={context.key_transition!r} has no blockwise products"]
        exponent = context.kernel.exponent(1)
        if exponent is None or exponent[1] != 0:
            return [
                f"later tokens move the keys, and the logarithm of {context.kernel.title} is not "
                "a multiple of q·k"
            ]
        return []

    def describe(self, recipe: Recipe) -> str:
        context = recipe.context
        if not context.keeps_similarity:
            moved = " with moved keys" * (context.key_transition is not None)
            return f"products{moved} and their weights piece by piece, KV cache"
        if not is_mean(recipe):
            return "masked products piece by piece, KV cache"
        kernel = recipe.context.kernel
        if kernel is None or kernel.exponent(1) is None:
            return "softmax over the stated kernel piece by piece, KV cache"
        names = [part.title.removeprefix("context.") for part in recipe.context.restrictions]
        how = "scaled dot-product attention"
        if recipe.context.horizon is not None and len(names) == 1:
            return f"{how} over chunks of the window, KV cache of {recipe.context.horizon}"
        if names:
            how += f" with the logarithms of {' and '.join(names)} as its bias"
        return f"{how}, KV cache"

    def run(self, problem: Problem) -> tuple[Tensor, State]:
        final_state = problem.final_state()
        keeps_all = problem.recipe.buffer_size is None and problem.lengths is None
        return attend(problem, joined=final_state.buffer if keeps_all else None), final_state

    def read_state(self, problem: Problem, query_rates: Mapping[str, Tensor]) -> Tensor:
        return attend(problem, query_rates)


def attend(
    problem: Problem,
    query_rates: Mapping[str, Tensor] | None = None,
    joined: Buffer | None = None,
) -> Tensor:
    """Return outputs ``[B, T, H, G, V]``; other arguments are those of `gather_visible`."""
    recipe, q, v = problem.recipe, problem.q, problem.v
    kernel, horizon = recipe.context.kernel, recipe.context.horizon
    assert kernel is not None
    B, T, H, G, K = q.shape
    buffer = problem.state.buffer
    n = problem.k.shape[1] + (0 if buffer is None else buffer.k.shape[1])
    if T == 0 or B == 0 or n == 0:
        return v.new_zeros(B, T, H, G, v.shape[-1])
    context = recipe.context
    own_weights = not context.keeps_similarity
    exponent = kernel.exponent(K) if is_mean(recipe) and not own_weights else None
    # Plain attention may run in half precision, but sums of weights may not.
    all_uniform = all(part.uniform for part in recipe.context.restrictions)
    exact = exponent is None or exponent[1] != 0 or not all_uniform
    dtype = state_dtype(q, problem.k, v) if exact else v.dtype
    visible = gather_visible(problem, dtype, query_rates, joined)
    stored = visible_values(problem, dtype, joined)
    weights = context_weights(visible, recipe)
    if exponent is None:
        y = _products(visible, stored, weights, recipe)
    else:
        y = _softmax(problem, visible, stored, weights, exponent, horizon)
    if problem.token_mask is not None and query_rates is None:
        y = torch.where(problem.token_mask[..., None, None, None], y, 0.0)
    return (y if (size := recipe.bias.optimum) == 1.0 else size * y).to(v.dtype)


# -- softmax ---------------------------------------------------------------------------------------


def _softmax(
    problem: Problem,
    visible: VisibleAssociations,
    stored: Tensor,
    weights: list[ContextWeights],
    exponent: tuple[float, float],
    horizon: int | None,
) -> Tensor:
    G, V = visible.q.shape[3], stored.shape[-1]
    q = visible.q.flatten(2, 3).transpose(1, 2)  # [B, H G, T, K]
    k, v = visible.k.transpose(1, 2), stored.transpose(1, 2)  # [B, H, n, ·]
    scale, by_length = exponent
    T, reading = q.shape[2], visible.first_slot >= k.shape[2]
    extra: list[Tensor] = []
    if by_length != 0:
        extra.append(by_length * visible.k.square().sum(-1))
    separable = [x.key_part for x in weights if x.key_part is not None and not x.may_hide_all]
    decay = torch.stack(separable).sum(0) if separable else None
    cutoff = None
    if decay is not None and len(separable) == len(weights) and not reading:
        cutoff = DecayCutoff.of(decay, q, k, scale=scale, by_length=by_length)
    moving = decay is not None and _is_gentle(visible, decay, k.dtype)
    if moving:
        weights = [x for x in weights if x.key_part is None or x.may_hide_all]
    channels = [x.key_part for x in weights if x.key_part is not None and x.key_part.requires_grad]
    if channels:
        total = torch.stack([x.nan_to_num(0.0, 0.0, 0.0) for x in channels]).sum(0)
        extra.append((total - total.detach()).to(k.dtype))
    if extra or moving:
        channel = torch.stack(extra).sum(0) if extra else torch.zeros_like(visible.k[..., 0])
        q = torch.cat([q, torch.full_like(q[..., :1], 1 / scale)], dim=-1)
        k = torch.cat([k, channel.transpose(1, 2).unsqueeze(-1)], dim=-1)
    # Fast attention kernels require keys and values of equal size.
    q, k, v = (_widened(x, max(q.shape[-1], V)) for x in (q, k, v))
    sinks = weights[0].sink_and_window if len(weights) == 1 and horizon is None else None
    plain = not (weights or reading or moving)
    if plain and problem.state.buffer is None and (horizon is None or horizon >= T):
        # Padding is on the right, after every real query.
        y = sdpa(q, k, v, scale=scale, is_causal=True)
    elif plain and T == 1 and horizon is None and _all_there(visible):
        y = sdpa(q, k, v, scale=scale)
    elif plain and T > 1 and horizon is not None:
        y = _banded(visible, q, k, v, horizon, scale)
    elif sinks and T > 1 and not (reading or moving):
        y = _banded(visible, q, k, v, sinks[1], scale, _front(visible, *sinks))
    else:
        bias_of_key = decay if moving else None
        y = _pieces(problem, visible, (q, k, v), weights, scale, horizon, cutoff, bias_of_key)
    return y[..., :V].transpose(1, 2).unflatten(2, (-1, G))


def _all_there(visible: VisibleAssociations) -> bool:
    """Return whether no slot is empty, or False if values cannot be read."""
    valid = visible.valid
    return visible.is_full or (can_read_values(valid) and bool(valid.all()))


def _widened(x: Tensor, size: int) -> Tensor:
    return functional.pad(x, (0, size - x.shape[-1])) if x.shape[-1] < size else x


def _is_gentle(visible: VisibleAssociations, of_key: Tensor, dtype: torch.dtype) -> bool:
    """Return whether the range of ``of_key`` in each piece is small enough for a channel."""
    if not can_read_values(of_key):
        return False  # a mask of differences is accurate for every range
    T, n = visible.q.shape[1], visible.k.shape[1]
    if visible.first_slot >= n:
        return True  # relative to the last slot, all others are lower
    x = of_key.detach()[:, visible.first_slot : visible.first_slot + T]
    ranges = [(piece - piece[:, :1]).abs().amax() for piece in x.split(PIECE, dim=1)]
    return float(torch.stack(ranges).max()) * effective_eps(dtype) < MAX_LOGIT_ERROR


def _front(visible: VisibleAssociations, first: int, c: int) -> Tensor:
    """Return the mask of the first F slots that a query sees next to its window.

    The first associations of a document are in slots of earlier calls, or after them.
    """  # [B, T, F]
    F = min(visible.first_slot + first, visible.valid.shape[1])
    slot = torch.arange(F, device=visible.valid.device)
    is_first = visible.valid[:, :F] & (visible.position[:, :F] < first)  # [B, F]
    return is_first[:, None] & (slot <= visible.query_slots[:, None] - c)


def _banded(
    visible: VisibleAssociations,
    q: Tensor,  # [B, H G, T, K]
    k: Tensor,  # [B, H, n, K]
    v: Tensor,  # [B, H, n, V]
    c: int,
    scale: float,
    front: Tensor | None = None,  # mask of the first F slots, seen next to the window, [B, T, F]
) -> Tensor:
    """Attend to the last c associations: chunks of C queries with the keys of m + 1 chunks."""
    B, T = q.shape[0], q.shape[2]
    C, m, N = chunking(c, T)
    num_left, num_right = m * C - visible.first_slot, N * C - T
    cut = max(-num_left, 0)

    def chunks(x: Tensor) -> Tensor:  # [B, H, n, D] -> [B N, H, (m + 1) C, D]
        x = functional.pad(x[:, :, cut:], (0, 0, max(num_left, 0), num_right))
        x = x.unflatten(2, (N + m, C))
        x = torch.cat([x[:, :, j : j + N] for j in range(m + 1)], dim=3)
        return x.transpose(1, 2).flatten(0, 1)

    device = q.device
    row = m * C + torch.arange(C, device=device)[:, None]
    column = torch.arange((m + 1) * C, device=device)
    diagonal = column == row
    band = (column <= row) & (column > row - c)
    real = chunks(visible.valid[:, None, :, None].to(torch.int8))[
        ..., 0
    ].bool()  # [B N, 1, (m + 1) C]
    # A query without an association is padding. It sees itself, so that no softmax is empty.
    mask = (band & real.unsqueeze(2)) | diagonal
    queries = functional.pad(q, (0, 0, 0, num_right)).unflatten(2, (N, C)).transpose(1, 2)
    keys, stored = chunks(k), chunks(v)
    if front is not None:
        F = front.shape[2]
        ahead = functional.pad(front, (0, 0, 0, num_right)).unflatten(1, (N, C)).flatten(0, 1)
        mask = torch.cat([ahead[:, None], mask.expand(B * N, 1, -1, -1)], dim=-1)
        keys, stored = (
            torch.cat([x[:, None, :, :F].expand(-1, N, -1, -1, -1).flatten(0, 1), each], dim=2)
            for x, each in ((k, keys), (v, stored))
        )
    y = sdpa(queries.flatten(0, 1), keys, stored, scale=scale, mask=mask)
    return y.unflatten(0, (B, N)).transpose(1, 2).flatten(2, 3)[:, :, :T]


def chunking(c: int, T: int) -> tuple[int, int, int]:
    """Return (C, m, N): N chunks of C queries, with a window over m earlier chunks."""
    C = min(max(32, -(-c // 2)), 256, T)
    return C, -(-(c - 1) // C), -(-T // C)


def pairs(T: int, horizon: int | None, *, banded: bool, size: int, front: int = 0) -> int:
    """Count the pairs of query and key that T tokens without a past compute.

    They are computed in pieces of ``size`` queries, or in chunks of the window if ``banded``, which
    also see the first ``front`` associations.
    """
    if banded and horizon is not None and (horizon < T or front):
        C, m, N = chunking(horizon, T)
        return N * C * ((m + 1) * C + min(front, T))
    total = 0
    for start in range(0, T, size):
        stop = min(start + size, T)
        low = 0 if horizon is None else max(start + 1 - horizon, 0)
        total += (stop - start) * (stop - low)
    return total


def _pieces(
    problem: Problem,
    visible: VisibleAssociations,
    qkv: tuple[Tensor, Tensor, Tensor],
    weights: list[ContextWeights],
    scale: float,
    horizon: int | None,
    cutoff: DecayCutoff | None,
    bias_of_key: Tensor | None,
) -> Tensor:
    """Attend in pieces of queries, with the log weights as the bias of the logits.

    ``bias_of_key [B, n, H]`` is added to the channel of the keys after their own.
    """
    q, k, v = qkv
    G, reading = q.shape[1] // k.shape[1], visible.first_slot >= k.shape[2]
    gapped = problem.state.buffer is not None or problem.lengths is not None
    # Padding may have no visible key.
    may_be_empty = reading or gapped or any(x.may_hide_all for x in weights)
    # A key channel carries the gradients of these weights, or they have none.
    constant_weights = [x for x in weights if x.is_binary or x.key_part is not None]
    varying_weights = [x for x in weights if not (x.is_binary or x.key_part is not None)]

    def piece(queries: slice, keys: slice) -> Tensor:
        mask = visibility_mask(visible, queries, keys, horizon, gapped=gapped)  # [B, C, m] or None
        if mask is not None:
            mask = mask[:, None]
        with torch.no_grad():
            bias = [x.log(queries, keys) for x in constant_weights if x.log is not None]
        bias += [x.log(queries, keys) for x in varying_weights if x.log is not None]
        empty = None
        if bias:
            total = (
                bias[0] if len(bias) == 1 else torch.stack(torch.broadcast_tensors(*bias)).sum(0)
            )
            if total.shape[1] != 1 and G > 1:
                total = total.expand(-1, -1, G, -1, -1)
            total = total.flatten(1, 2)  # [B, H G, C, m]
            if mask is not None:
                total = total.masked_fill(~mask, -torch.inf)
            if cutoff is not None:
                total = total.masked_fill(total < -cutoff.furthest, -torch.inf)
            if may_be_empty:
                empty = (total == -torch.inf).all(-1, keepdim=True)
                total = total.masked_fill(empty, 0.0)
            mask = total
        elif may_be_empty and mask is not None:
            empty = ~mask.any(-1, keepdim=True)
            mask = mask | empty
        visible_keys = k[:, :, keys]
        if bias_of_key is not None:
            # The bias is relative to the first query of the piece.
            slots, index = visible.query_slots[queries], visible.k.shape[-1]
            channel = bias_of_key[:, keys] - bias_of_key[:, slots[0]].unsqueeze(1)
            if cutoff is not None:
                channel = channel.masked_fill(cutoff.negligible(slots, keys), MASKED_LOGIT)
            channel = channel.clamp_min(MASKED_LOGIT).to(k.dtype).transpose(1, 2).unsqueeze(-1)
            first, old, last = visible_keys.split([index, 1, k.shape[-1] - index - 1], dim=-1)
            visible_keys = torch.cat([first, old + channel, last], dim=-1)
        y = sdpa(q[:, :, queries], visible_keys, v[:, :, keys], scale=scale, mask=mask)
        return y if empty is None else y.masked_fill(empty, 0.0)

    pieces = cut(visible, horizon)
    if cutoff is not None:
        pieces = cutoff.shorten(pieces, visible.query_slots)
    recompute = any(x.log is not None for x in varying_weights)
    return piecewise(pieces, piece, q.device.type, recompute=recompute)


# -- sums that are no softmax ----------------------------------------------------------------------


def _products(
    visible: VisibleAssociations, stored: Tensor, weights: list[ContextWeights], recipe: Recipe
) -> Tensor:
    """Return Σ γ κ v, divided by Σ γ κ for a mean."""
    kernel, horizon, mean = recipe.context.kernel, recipe.context.horizon, is_mean(recipe)
    assert kernel is not None
    q, k = visible.q.permute(0, 2, 3, 1, 4), visible.k.transpose(1, 2).unsqueeze(2)
    v = stored.transpose(1, 2).unsqueeze(2)  # [B, H, 1, n, V]
    hides_current = recipe.context.hides_current
    transition = next((x.transition for x in weights if x.transition is not None), None)
    reweigh = next((x.reweigh for x in weights if x.reweigh is not None), None)
    moved = None if transition is None else moved_products(visible, transition)
    exponent = None if moved is None else kernel.exponent(q.shape[-1])
    logs = kernel.positive and (mean or reweigh is not None or moved is not None)

    def piece(queries: slice, keys: slice) -> Tensor:
        mask = strict_visibility_mask(visible, queries, keys, horizon, hides_current=hides_current)
        hidden = ~mask[:, None, None]
        bias: Tensor | float = sum(
            (x.log(queries, keys) for x in weights if x.log is not None), start=0.0
        )
        if logs:
            if moved is not None and exponent is not None:
                log_kappa = exponent[0] * moved(queries, keys)
            else:
                log_kappa = kernel.log_kappa(q[..., queries, :], k[..., keys, :])
            score = (log_kappa + bias).masked_fill(hidden, -torch.inf)
            score = score if reweigh is None else reweigh(score)
            if mean and keys.stop > keys.start:
                peak = score.detach().amax(-1, keepdim=True)
                score = score - peak.clamp_min(torch.finfo(peak.dtype).min)
            # Products with smaller weights are subnormal numbers, which are slow on a CPU. Weights
            # relative to 1 are negligible earlier.
            bounded = mean or reweigh is not None
            low = min_mass(score.dtype) if bounded else torch.finfo(score.dtype).tiny
            score = functional.threshold(score.exp(), low, 0.0)
        else:
            score = kernel.kappa(q[..., queries, :], k[..., keys, :])
            if isinstance(bias, Tensor):
                score = score * bias.exp()
            score = score.masked_fill(hidden, 0.0)
        for x in weights:
            if x.value is not None:
                score = score * x.value(queries, keys)
        y = score @ v[..., keys, :]
        if not mean:
            return y
        size = score.sum(-1, keepdim=True)
        return torch.where(size == 0, 0.0, y / torch.where(size == 0, 1.0, size))

    y = piecewise(cut(visible, horizon), piece, q.device.type, recompute=True)
    return y.permute(0, 3, 1, 2, 4)
