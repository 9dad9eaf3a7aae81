"""Chunks under momentum, windows, probes and decays over values, in differentiable operations.

Inside a chunk the state is affine in the state at its start. One unit-lower-triangular system per
chunk therefore gives the predictions of all its tokens (see `docs/design/linear-engine.md`):

    (I + E⁻ ⊙ (W Dᵀ)) X = [known part | coefficients of A° | coefficients of S°]

W are the keys of predictions, D the directions of their writes, and E⁻ the coefficients of earlier
steps. With coefficients instead of states on the right side, all chunks are solved in parallel. One
small affine map per chunk remains sequential, as a batched product:

    [A; S] ← M [A; S] + N

Decay, momentum, step and window enter through coefficients.

Layout: chunks are the first axis, ``[N, B, H, C, ·]``, and contiguous, so that a sequential step
reads consecutive memory. States are transposed, ``[B, H, K, V]``.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from recollect.engines.common.coefficients import Coefficients, shift_right
from recollect.engines.common.decayed_products import causal_mask, decayed_gram, decayed_matmul
from recollect.engines.common.linalg import baddbmm

__all__ = ["ChunkTransition", "RankOneUpdates", "solve"]


@dataclass(frozen=True, kw_only=True)
class RankOneUpdates:
    """Rank-one updates by the steps of a chunk.

    Attributes:
        probe_keys: keys w of the predictions (or errors), ``[..., J, K]``.
        erase_keys: directions e in which predictions (or errors) are subtracted.
        target: values to subtract from a·prediction, if the system solves for the error.
        fixed_writes: directions and values of writes without prediction.
        bypasses_momentum: whether the subtraction bypasses momentum.
    """

    probe_keys: Tensor | None = None
    erase_keys: Tensor | None = None
    target: Tensor | None = None
    fixed_writes: tuple[Tensor, Tensor] | None = None
    bypasses_momentum: bool = False


@dataclass(frozen=True, kw_only=True)
class ChunkTransition:
    """Transition inside a chunk, by coefficients or by absorbed decays.

    Attributes:
        table: coefficients for one decay per head, with or without momentum, or ``None``.
        log_decay_sums: float64 cumulative log decays ``[N, B, H, C, K or 1]``, or ``None``. Without
            ``table`` and ``log_decay_sums`` there is no decay.
        value_log_decay_sums: cumulative log decays over value channels, or ``None``.
        decays_first: whether predictions are measured after their token's decay.
        tokens: C.
        can_absorb: whether ``log_decay_sums`` may be split into exp(X) and exp(−Y).
    """

    table: Coefficients | None
    log_decay_sums: Tensor | None
    value_log_decay_sums: Tensor | None
    decays_first: bool
    tokens: int
    can_absorb: bool
    # Scaled rows, shared by the system, the output and the initial state.
    _scaled: dict[tuple[int, str], tuple[Tensor, Tensor]] = field(default_factory=dict, init=False)

    def spread(self, x: Tensor, like: Tensor, dim: int) -> Tensor:
        """Repeat per-token values for the rows of ``like``."""
        each = like.shape[-2] // self.tokens
        return x if each == 1 else x.repeat_interleave(each, dim=dim)

    def _scale(self, x: Tensor, kind: str) -> Tensor:
        """Scale rows by the exponential of ± their cumulative log decay; cached."""
        if self.log_decay_sums is None:
            return x
        key = (id(x), kind)
        if key not in self._scaled:
            log_decay_sums = (
                shift_right(self.log_decay_sums, -2, 0.0)
                if kind == "earlier"
                else self.log_decay_sums
            )
            log_decay_sums = -log_decay_sums if kind == "back" else log_decay_sums
            factor = self.spread(log_decay_sums.exp().to(x.dtype), x, -2)
            self._scaled[key] = (x, x * factor)  # keep x alive, so that its id stays unique
        return self._scaled[key][1]

    def _decay_kind(self, before_write: bool) -> str:
        return "earlier" if before_write and not self.decays_first else "now"

    def gram(
        self, x: Tensor, y: Tensor, *, before_write: bool, bypasses_momentum: bool = False
    ) -> Tensor:
        """Return coefficient times inner product of every x row with every earlier y row.

        Args:
            x, y: rows ``[N, B, H, C c, K]``.
            before_write: whether x precedes the write of its token. With one row per token, only
                the strictly lower part of the result is then defined.
            bypasses_momentum: whether the contributions of y bypass momentum.
        """
        several = x.shape[-2] > self.tokens or y.shape[-2] > self.tokens
        if self.table is None and self.can_absorb:
            product = self._scale(x, self._decay_kind(before_write)) @ self._scale(y, "back").mT
            if several:
                return product * causal_mask(x, y, self.tokens, strict=before_write)
            return product if before_write else product.tril_()
        if self.log_decay_sums is not None:
            sums = (
                shift_right(self.log_decay_sums, -2, 0.0)
                if self._decay_kind(before_write) == "earlier"
                else self.log_decay_sums
            )
            return decayed_gram(x, sums, y, self.log_decay_sums, strict=before_write)
        assert self.table is not None
        E = self.table.P if bypasses_momentum else self.table.E
        if before_write:
            E = self.table.matrix_at_previous_token(E, decayed=self.decays_first)
        E = self.spread(self.spread(E, x, -2), y, -1)
        return (x @ y.mT) * E

    def from_state(self, x: Tensor, *, before_write: bool) -> Tensor:
        """Scale x by the coefficient of A° at its token."""
        if self.table is None:
            return self._scale(x, self._decay_kind(before_write))
        a = self.table.a
        if before_write:
            a = self.table.at_previous_token(a, decayed=self.decays_first, first=1.0)
        return x * self.spread(a, x, -1).unsqueeze(-1)

    def from_momentum(self, x: Tensor, *, before_write: bool) -> Tensor:
        """Scale x by the coefficient of S° at its token."""
        assert self.table is not None and self.table.m is not None
        m = self.table.m
        if before_write:
            m = self.table.at_previous_token(m, decayed=self.decays_first, first=0.0)
        return x * self.spread(m, x, -1).unsqueeze(-1)

    def to_end(self, y: Tensor, *, bypasses_momentum: bool = False) -> Tensor:
        """Scale y by the coefficient of its step in A_C."""
        if self.log_decay_sums is not None:
            rest = (self.log_decay_sums[..., -1:, :] - self.log_decay_sums).exp().to(y.dtype)
            return y * self.spread(rest, y, -2)
        if self.table is None:
            return y
        E = self.table.P if bypasses_momentum else self.table.E
        return y * self.spread(E[..., -1, :], y, -1).unsqueeze(-1)

    def to_momentum(self, y: Tensor) -> Tensor:
        """Scale y by the coefficient of its step in S_C."""
        assert self.table is not None and self.table.theta is not None
        return y * self.spread(self.table.theta[..., -1, :], y, -1).unsqueeze(-1)

    def value_to_end(self, values: Tensor) -> Tensor:
        """Scale values by the decay of their channels to the end of the chunk."""
        if self.value_log_decay_sums is None:
            return values
        rest = (
            (self.value_log_decay_sums[..., -1:, :] - self.value_log_decay_sums)
            .exp()
            .to(values.dtype)
        )
        return values * self.spread(rest, values, -2)

    def decay(self, like: Tensor) -> Tensor:
        """Return the factor of A° in A_C, transposed: ``[N, B, H, K or 1, V or 1]``."""
        if self.log_decay_sums is not None:
            factor = self.log_decay_sums[..., -1, :].exp().to(like.dtype).unsqueeze(-1)
        elif self.table is not None:
            factor = self.table.a[..., -1][..., None, None]
        else:
            factor = like.new_ones(1, 1, 1, 1, 1)
        if self.value_log_decay_sums is not None:
            factor = factor * self.value_log_decay_sums[..., -1, :].exp().to(like.dtype).unsqueeze(
                -2
            )
        return factor


def solve(
    transition: ChunkTransition,
    updates: RankOneUpdates,
    queries: Tensor,
    Z: Tensor,
    Zs: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return outputs ``[N, B, H, C G, V]`` and the transposed final states."""
    fixed = fixed_s = errors = neg_errors = None
    if updates.fixed_writes is not None:
        direction, values = updates.fixed_writes
        fixed = transition.to_end(direction).mT @ transition.value_to_end(values)
        if Zs is not None:
            fixed_s = transition.to_momentum(direction).mT @ values
    if updates.probe_keys is not None:
        errors = _solve_errors(transition, updates, has_momentum=Zs is not None)
    if errors is not None and Zs is not None and Z.device.type == "cpu":
        starts, momenta, neg_errors, Z, Zs = _scan_with_momentum(
            transition, errors, (fixed, fixed_s), Z, Zs
        )
    else:
        starts, momenta, Z, Zs = _scan_affine_maps(transition, errors, (fixed, fixed_s), Z, Zs)
    y = transition.from_state(queries, before_write=False) @ starts
    if transition.value_log_decay_sums is not None:
        y = y * transition.spread(transition.value_log_decay_sums.exp().to(y.dtype), queries, -2)
    if momenta is not None:
        y = baddbmm(y, transition.from_momentum(queries, before_write=False), momenta)
    if updates.fixed_writes is not None:
        direction, values = updates.fixed_writes
        scores = transition.gram(queries, direction, before_write=False)
        if transition.value_log_decay_sums is None:
            y = baddbmm(y, scores, values)
        else:
            y = y + decayed_matmul(scores, values, transition.value_log_decay_sums)
    if errors is not None and updates.erase_keys is not None:
        if neg_errors is None:
            neg_errors = baddbmm(errors.constant, errors.of_state, starts, -1)
            if momenta is not None and errors.of_momentum is not None:
                neg_errors = baddbmm(neg_errors, errors.of_momentum, momenta, -1)
        scores = transition.gram(
            queries,
            updates.erase_keys,
            before_write=False,
            bypasses_momentum=updates.bypasses_momentum,
        )
        y = baddbmm(y, scores, neg_errors)
    return y, Z, Zs


@dataclass(frozen=True, kw_only=True)
class _ChunkErrors:
    """Negative errors of a chunk, affine in its initial states.

    −x = constant − of_state A°ᵀ − of_momentum S°ᵀ is added to the state in ``direction``.
    """

    constant: Tensor
    of_state: Tensor
    of_momentum: Tensor | None
    direction: Tensor
    bypasses_momentum: bool

    def into_states(self, transition: ChunkTransition) -> tuple[Tensor, Tensor | None]:
        """Return the directions of −x in A_C, and in S_C unless it bypasses momentum."""
        into_state = transition.to_end(self.direction, bypasses_momentum=self.bypasses_momentum).mT
        if self.of_momentum is None or self.bypasses_momentum:
            return into_state, None
        return into_state, transition.to_momentum(self.direction).mT


def _solve_errors(
    transition: ChunkTransition, updates: RankOneUpdates, *, has_momentum: bool
) -> _ChunkErrors:
    """Solve the triangular systems of all chunks, by their explicit inverses.

    Inverses are faster than substitution for many right sides. They are as accurate here, because
    the diagonal is 1 and η‖k‖² bounds the entries.
    """
    w, e, bypasses_momentum = updates.probe_keys, updates.erase_keys, updates.bypasses_momentum
    assert w is not None and e is not None
    system = transition.gram(w, e, before_write=True, bypasses_momentum=bypasses_momentum)
    eye = torch.eye(system.shape[-1], dtype=system.dtype, device=system.device)
    inverse = torch.linalg.solve_triangular(
        system, eye.expand_as(system), upper=False, unitriangular=True
    )
    if updates.target is not None:
        constant = inverse @ updates.target
    else:
        assert updates.fixed_writes is not None
        direction, values = updates.fixed_writes
        scores = transition.gram(w, direction, before_write=True).tril(-1)
        constant = -(inverse @ (scores @ values))
    return _ChunkErrors(
        constant=constant,
        of_state=inverse @ transition.from_state(w, before_write=True),
        of_momentum=inverse @ transition.from_momentum(w, before_write=True)
        if has_momentum
        else None,
        direction=e,
        bypasses_momentum=bypasses_momentum,
    )


def _scan_affine_maps(
    transition: ChunkTransition,
    errors: _ChunkErrors | None,
    fixed: tuple[Tensor | None, Tensor | None],
    Z: Tensor,
    Zs: Tensor | None,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
    """Return the states at chunk starts and after the last, by one affine map per chunk.

    ``fixed`` are the contributions of fixed writes to A_C and S_C.
    """
    decay, (N, N_s) = transition.decay(Z), fixed
    if errors is None and Zs is None:
        assert N is not None
        starts, end = _decaying_sum(decay, N, Z)
        return starts, None, end, None
    eye = torch.eye(Z.shape[-2], dtype=Z.dtype, device=Z.device)
    M, into_state, into_momentum = eye * decay, None, None
    if errors is not None:
        into_state, into_momentum = errors.into_states(transition)
        M = M.expand(*errors.constant.shape[:3], -1, -1)
        M = baddbmm(M, into_state, errors.of_state, -1)
        N = _add_optional(N, into_state @ errors.constant)
        if into_momentum is not None:
            N_s = _add_optional(N_s, into_momentum @ errors.constant)
    assert N is not None
    if Zs is None:
        starts, end = _affine_scan(M, N, Z)
        return starts, None, end, None
    table = transition.table
    assert table is not None and table.m is not None and table.theta_end is not None
    assert N_s is not None
    A_S = eye * table.m[..., -1][..., None, None]
    S_S = eye * table.theta_end[..., None, None]
    S_A = torch.zeros_like(S_S)
    if errors is not None and errors.of_momentum is not None and into_state is not None:
        A_S = A_S - into_state @ errors.of_momentum
        if into_momentum is not None:
            S_A = S_A - into_momentum @ errors.of_state
            S_S = S_S - into_momentum @ errors.of_momentum
    full_map = torch.cat([torch.cat([M, A_S], -1), torch.cat([S_A, S_S], -1)], -2)
    starts, end = _affine_scan(full_map, torch.cat([N, N_s], -2), torch.cat([Z, Zs], -2))
    K = Z.shape[-2]
    return starts[..., :K, :], starts[..., K:, :], end[..., :K, :], end[..., K:, :]


def _add_optional(x: Tensor | None, y: Tensor) -> Tensor:
    return y if x is None else x + y


def _scan_with_momentum(
    transition: ChunkTransition,
    errors: _ChunkErrors,
    fixed: tuple[Tensor | None, Tensor | None],
    Z: Tensor,
    Zs: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the results of `_scan_affine_maps`, and the errors, by products with chunk rows.

    With momentum, two thin products per state replace a map of 2K × 2K. This needs less work and
    memory, but more launches, and therefore runs on a CPU only.
    """
    table, decay = transition.table, transition.decay(Z)
    assert table is not None and table.m is not None and table.theta_end is not None
    lead, count = Z.shape[:2], errors.constant.shape[0]

    def steps(x: Tensor | None) -> tuple[Tensor, ...]:
        return () if x is None else x.flatten(1, 2).unbind(0)

    state_factor = steps(decay.expand(count, *lead, *decay.shape[3:]))
    momentum_to_state, momentum_factor = (
        steps(x[..., None, None]) for x in (table.m[..., -1], table.theta_end)
    )
    into_state, into_momentum = map(steps, errors.into_states(transition))
    fixed_a, fixed_s = map(steps, fixed)
    constant, of_state = steps(errors.constant), steps(errors.of_state)
    of_momentum = steps(errors.of_momentum)
    A, S = Z.flatten(0, 1), Zs.flatten(0, 1)
    starts: list[Tensor] = []
    momenta: list[Tensor] = []
    errors_list: list[Tensor] = []
    for n in range(count):
        starts.append(A)
        momenta.append(S)
        x = torch.baddbmm(constant[n], of_state[n], A, alpha=-1)
        x = torch.baddbmm(x, of_momentum[n], S, alpha=-1)
        errors_list.append(x)
        A = torch.addcmul(fixed_a[n], A, state_factor[n]) if fixed_a else A * state_factor[n]
        A = torch.baddbmm(torch.addcmul(A, S, momentum_to_state[n]), into_state[n], x)
        S = torch.addcmul(fixed_s[n], S, momentum_factor[n]) if fixed_s else S * momentum_factor[n]
        S = torch.baddbmm(S, into_momentum[n], x) if into_momentum else S
    starts_, momenta_, errors_ = (
        torch.stack(x).unflatten(1, lead) for x in (starts, momenta, errors_list)
    )
    return starts_, momenta_, errors_, A.unflatten(0, lead), S.unflatten(0, lead)


def _affine_scan(M: Tensor, N: Tensor, Z: Tensor) -> tuple[Tensor, Tensor]:
    """Run Z ← M Z + N over chunks; return the states before each and after the last."""
    lead = Z.shape[:2]
    state, starts = Z.flatten(0, 1), []
    for m, n in zip(M.flatten(1, 2).unbind(0), N.flatten(1, 2).unbind(0), strict=True):
        starts.append(state)
        state = torch.baddbmm(n, m, state)
    return torch.stack(starts).unflatten(1, lead), state.unflatten(0, lead)


def _decaying_sum(decay: Tensor, N: Tensor, Z: Tensor) -> tuple[Tensor, Tensor]:
    """Run Z ← decay ⊙ Z + N over chunks; return the states before each and after the last."""
    starts: list[Tensor] = []
    factors = decay.expand(N.shape[0], *decay.shape[1:]).unbind(0)
    for factor, n in zip(factors, N.unbind(0), strict=True):
        starts.append(Z)
        Z = torch.addcmul(n, factor, Z)
    return torch.stack(starts), Z
