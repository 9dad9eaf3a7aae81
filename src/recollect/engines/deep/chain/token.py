"""One token of a chain memory, straight from what a layer made.

What `recollect.engines.deep.decode` does for any memory with a table of coefficients, for the
recipes that need nothing of a token but q, k, v and the gates of rate, momentum and decay. It is
bound by the number of operations: ρ of a normalised step is put into the coefficients, −η ρ in
place of −η, so that the factors stay as they are (`shares`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from recollect.choices.runtime import cached_constant
from recollect.engines.common.problem import state_dtype
from recollect.engines.deep.chain.activations import CURVES
from recollect.engines.deep.chain.chain import Chain
from recollect.engines.deep.chain.forward import slopes
from recollect.engines.deep.chain.shares import share_now, share_of_row
from recollect.engines.deep.decode import moved
from recollect.engines.deep.fused.decode import run_token, shift_of, token_launch
from recollect.engines.deep.gradient_factors import Factors
from recollect.engines.deep.layout import DeepPlan, Memory
from recollect.engines.deep.step_coefficients import Row, Rule, advance
from recollect.engines.deep.token_cache import by_row, cached, mark, parted
from recollect.recipe.bound import BoundRecipe
from recollect.state.buffer import Buffer, update_buffer
from recollect.state.state import State

__all__ = ["is_bare", "token"]


def is_bare(bound: BoundRecipe, rule: Rule, chain: Chain | None) -> bool:
    """Whether a token needs its key, value and query, and a gate per head for each coefficient.

    With a residual, what is not finite in a query shows in what it reads, so that nobody has to
    look for it: behind an activation that is bounded it might not.

    Args:
        bound: the recipe, which has a table of coefficients.
        rule: of that table.
        chain: its memory, if it is one.
    """
    recipe, gates = bound.recipe, {"lr"}
    if rule.slot:
        gates.add("momentum")
    if recipe.retention.decay is not None:
        gates.add("log_decay")
    return (
        chain is not None
        and chain.memory.residual
        and not chain.memory.has_output_map
        and not bound.needs_lowering
        and bound.fingerprint is not None
        and not (
            bound.params or bound.has_features or recipe.algorithm.rate_depends_on_key or rule.mean
        )
        and recipe.context.horizon == 1
        and rule.slot in ("", "steps")
        and not recipe.bias.quantity_axes
        and all(gate.shape == (bound.H,) for gate in bound.gates.values())
        and set(bound.gates) == gates
    )


def token(
    bound: BoundRecipe,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: Mapping[str, Tensor],
    state: State,
) -> tuple[Tensor, State] | None:
    """`decode.follow` of a `bare` recipe, of numbers that nobody has to look at; else ``None``.

    ``None`` too where a gate has another type than the memory, where rows have come differently
    far, and inside of an inner batch whose factors nobody kept.

    Args:
        bound: the recipe.
        q: the query ``[B, 1, H·G, K]``.
        k: the key ``[B, 1, H, K]``.
        v: the value ``[B, 1, H, V]``.
        gates: by name, ``[B, 1, H]``.
        state: before the token.
    """
    plan: DeepPlan = bound.plan
    num_seen, cache, first = state.host_position, state.cache, state.weights[0]
    B, H = first.shape[:2]
    if not plan.bare or num_seen is None or B == 0 or state.recipe_id != bound.recipe_id:
        return None
    if not (q.dtype == k.dtype == v.dtype == first.dtype == state_dtype(q)):
        return None
    for gate in gates.values():
        if gate.dtype != first.dtype:  # the general way converts it
            return None
    assert bound.fingerprint is not None  # plan.bare
    place, cache_key = num_seen % plan.b, mark(bound.fingerprint)
    before = None
    if place:
        old = cache.get("factors")
        if old is None or old.shape[2] != place or "C" not in cache or cache_key not in cache:
            return None
        D = cache.get("D")
        row = Row(C=cache["C"].flatten(0, 1), D=None if D is None else D.flatten(0, 1))
        before = old.flatten(0, 1), row
    memory = Memory(
        A=[w.flatten(0, 1) for w in state.weights],
        slots={
            name: [w.flatten(0, 1) for w in slot] for name, slot in state.algorithm_state.items()
        },
    )
    launch = shift = None
    if plan.fused is not None:
        launch = token_launch(plan.fused, q, queries=q.shape[2] // H)
    if launch is None:
        y, kept, end = _by_operations(plan, memory, q, k, v, gates, before)
    else:
        assert plan.fused is not None
        shift = shift_of(bound, state, gates)
        made = run_token(
            plan.fused,
            launch,
            (q[:, 0], k[:, 0], v[:, 0]),
            {name: gate[:, 0] for name, gate in gates.items()},
            (memory.A, memory.slots.get("momentum")),
            before,
            shift=shift,
            ends=place + 1 == plan.b,
        )
        y, kept = made.y, made.after
        end = None if made.memory is None else memory.like(made.memory)
    if shift is None:
        after = state.position + 1
        buffer = _rolled(bound, k, v, gates, state, after)
    else:
        after, buffer = shift.position_after, shift.after
    changed: dict[str, object] = {"position": after, "buffer": buffer}
    if kept is not None:
        changed["cache"] = cached(*kept, {cache_key: state.position})
    if end is not None:
        changed["weights"] = tuple(by_row(w, B) for w in end.A)
        changed["algorithm_state"] = {
            name: tuple(by_row(w, B) for w in slot) for name, slot in end.slots.items()
        }
    return y.view(B, 1, q.shape[2], v.shape[3]), state.replace(**changed)


def _by_operations(
    plan: DeepPlan,
    memory: Memory,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: Mapping[str, Tensor],
    before: tuple[Tensor, Row] | None,
) -> tuple[Tensor, tuple[Tensor, Row] | None, Memory | None]:
    """Outputs; then factors and coefficients, or the memory after a batch's last token."""
    P, (old, row) = memory.A[0].shape[0], (None, None) if before is None else before
    if q.shape[0] > 1 and q.shape == k.shape and not k.is_contiguous():
        # Of several rows, both beside what else a layer has made of a token: one copy.
        key, x = torch.stack([k, q]).view(2, P, 1, -1).unbind(0)
    else:
        key, x = k.reshape(P, 1, -1), q.reshape(P, -1, q.shape[3])
    factors, weight = _written(plan, memory, key, k, v, gates["lr"].reshape(P, 1))
    theta = gates["momentum"].reshape(P, 1) if "momentum" in gates else None
    alpha = gates["log_decay"].exp().reshape(P, 1) if "log_decay" in gates else None
    row = advance(row, weight, theta, alpha, first=old is None)
    rows = factors if old is None else torch.cat([old, factors], dim=1)
    all_factors = parted(plan, rows)
    y = _asked(plan, memory, row, all_factors, x)
    if rows.shape[1] < plan.b:
        return y, (rows, row), None
    return y, None, moved(row, memory, all_factors)


def _written(
    plan: DeepPlan, memory: Memory, key: Tensor, k: Tensor, v: Tensor, lr: Tensor
) -> tuple[Tensor, Tensor]:
    """Factors of an association beside each other ``[P, 1, ·]``, and −η ρ ``[P, 1]``.

    The key is given twice, by memory ``[P, 1, K]`` and as the value is.
    """
    chain = plan.chain
    assert chain is not None  # plan.bare
    curve, A = CURVES[chain.activation], [w.mT for w in memory.A]
    affine, end = chain.affine, None
    if affine is None:
        ending = chain.ending(v.shape[2])
        given = ending.given(v.reshape(key.shape[0], 1, -1), key, {})
        h, delta, end = slopes(curve, ending, A, key, given, {}, {}, outer=False)
    else:
        a, b = affine
        h, z = [key], list[Tensor]()
        for w in A[:-1]:
            z.append(torch.bmm(h[-1], w))
            h.append(curve.value(z[-1]))
        # The residual is the key.
        base = torch.sub(k if a == 1 else a * k, v, alpha=b).reshape(key.shape)
        delta = [torch.baddbmm(base, h[-1], A[-1], alpha=a)]
        for w, at in zip(reversed(A[1:]), reversed(z), strict=True):
            delta.append(curve.pull(torch.bmm(delta[-1], w.mT), at))
        delta.reverse()
    factors = torch.cat([x for pair in zip(h, delta, strict=True) for x in pair], dim=-1)
    if chain.target is None:
        return factors, -lr
    if end is None:
        assert affine is not None
        return factors, share_of_row(factors, plan.widths, lr, affine[0])
    return factors, -lr * share_now(h, delta, end)


def _asked(
    plan: DeepPlan, memory: Memory, row: Row, all_factors: Sequence[Factors], x: Tensor
) -> Tensor:
    """M at queries ``[P, G, K]``, map by map: A°, S° and the batch's associations as `Row` says."""
    assert plan.chain is not None  # plan.bare
    value, moments = CURVES[plan.chain.activation].value, memory.slots.get("momentum")
    J, last = 1 + (moments is not None), len(memory.A) - 1
    stays = J == 1 and plan.recipe.retention.decay is None
    of_starts, C = row.C[:, :J, None, None], row.C[:, None, J:]
    raw = z = x
    for i, one in enumerate(all_factors):
        h = value(z) if i else z
        parts = [h] if stays else [*(h.unsqueeze(1) * of_starts).unbind(1)]
        W = memory.A[i].mT
        z = torch.baddbmm(raw, parts[0], W) if i == last else torch.bmm(parts[0], W)
        if moments is not None:
            z.baddbmm_(parts[1], moments[i].mT)
        z.baddbmm_(torch.bmm(h, one.h.mT).mul_(C), one.delta)
    return z


def _rolled(
    bound: BoundRecipe,
    k: Tensor,
    v: Tensor,
    gates: Mapping[str, Tensor],
    state: State,
    after: Tensor,
) -> Buffer | None:
    """The buffer one token on, at positions ``after``; what the recipe fixes is buffered too."""
    B, _, H, _ = k.shape
    rates: dict[str, Tensor] = {}
    for name, x in bound.constants.items():
        rates[name] = cached_constant(_filled, B, H, x, device=k.device, dtype=k.dtype)
    rates.update(gates)
    return update_buffer(
        bound.recipe,
        state.buffer,
        k=k,
        v=v,
        rates=rates,
        lengths=None,
        position=after,
        host_position=None if state.host_position is None else state.host_position + 1,
    )


def _filled(B: int, H: int, value: float) -> Tensor:
    return torch.full((B, 1, H), value)
