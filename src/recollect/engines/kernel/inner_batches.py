"""Memories over a kernel's features, by inner batches: attention before a perceptron.

Maps that read features are rows by key (`KernelRows`), and later maps are ordinary weights. Inside
an inner batch every gradient is taken at its start, W°. The batch is linear in the gradients, with
the coefficient matrix C = P^α P^θ diag(η) Γ of ``coefficients``::

    keys      z_i = Σ_j κ(k_i, z_j) u°_j, the other maps forward, then δ_i of every map by taps
    queries   z_t = Σ_j κ(q_t, z_j)(a_t u°_j + m_t s°_j) − Σ_i C_ti κ(q_t, k_i) δ_i
              x ↦ a_t W° x + m_t S° x − (C ⊙ (x hᵀ)) δ        for every other map, h its key inputs
    boundary  u_j ← a_b u°_j + m_b s°_j, and row i of the window less C_bi δ_i;  W, S likewise

Cost per token and head, with n keys and M outputs of the maps that read features: 2 n (K + M) for a
key, 2 n (K + M) for a query, and a small multiple of M V for the later maps. The derivation is in
``docs/design/kernel-delta.md``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from recollect.choices.algorithm.normalized_steps import polyak_scale_at
from recollect.choices.features.base import Kernel
from recollect.choices.memory.base import Stack
from recollect.choices.runtime import can_read_values
from recollect.engines.base import Engine
from recollect.engines.common.coefficients import Coefficients, coefficients
from recollect.engines.common.kernel_precision import (
    is_significant,
    min_mass,
    run_with_float64_fallback,
)
from recollect.engines.common.problem import Problem, join_buffer, loss_gradients, requires_grad
from recollect.state.kernel_rows import KernelRows
from recollect.state.state import State, join_states

if TYPE_CHECKING:
    from recollect.recipe.recipe import Recipe

__all__ = ["DeepKernelMemory"]


class DeepKernelMemory(Engine):
    """Deep memories over a kernel's features, by inner batches."""

    name = "deep_kernel_memory"

    def unsupported_reasons(self, recipe: Recipe) -> list[str]:
        if not recipe.uses_kernel_rows:
            return ["the memory stores no row per key"]
        reasons: list[str] = []
        if recipe.bias.probe is not None:
            reasons.append("a probe predicts at every token, not at the start of an inner batch")
        if recipe.spaced_window:
            reasons.append(f"{recipe.context.title} skips the other associations of a token")
        if recipe.algorithm.rate_depends_on_key:
            reasons.append(f"the rate of {recipe.algorithm.title} depends on the key")
        return reasons

    def describe(self, recipe: Recipe) -> str:
        return f"attention over rows of gradients, inner batches of {recipe.algorithm.batch_size}"

    def run(self, problem: Problem) -> tuple[Tensor, State]:
        return run_with_float64_fallback(_run, problem)


def _run(problem: Problem, lacking: Tensor | None) -> tuple[Tensor, State, Tensor]:
    """Run in one dtype, and return also whether a needed row was below its precision."""
    position, lengths = problem.state.position, problem.lengths
    B, T, H, G, _ = problem.q.shape
    V = problem.v.shape[-1]
    dual = problem.state.kernel_rows
    assert dual is not None
    known = problem.state.host_position is not None  # then no slot is empty
    even = lengths is None and (known or B < 2 or bool((position == position[0]).all()))
    if B and even and (known or bool(dual.mask.all())):
        return _InnerBatchLoop(problem, lacking).run()
    outputs: list[Tensor] = []
    states: list[State] = []
    is_lost = torch.zeros((), dtype=torch.bool, device=problem.k.device)
    for row in range(B):  # sequences at different positions of their inner batches, one by one
        lacking_row = None if lacking is None else lacking[row : row + 1, dual.mask[row]]
        y, state, of_row = _InnerBatchLoop(_single_row(problem, row), lacking_row).run()
        is_lost = is_lost | of_row
        missing = T - y.shape[1]
        outputs.append(torch.cat([y, y.new_zeros(1, missing, H, G, V)], dim=1))
        states.append(state)
    if not B:
        return problem.v.new_zeros(0, T, H, G, V), problem.final_state(), is_lost
    return torch.cat(outputs), join_states(states), is_lost


def _single_row(problem: Problem, row: int) -> Problem:
    """Return the problem of one sequence, without padding and without empty slots."""
    T = problem.k.shape[1] if problem.lengths is None else int(problem.lengths[row])

    def cut(x: Tensor) -> Tensor:
        return x[row : row + 1, :T]

    state = problem.state.select(torch.tensor([row], device=problem.k.device))
    assert state.kernel_rows is not None
    mask = state.kernel_rows.mask[0]
    dual = state.kernel_rows.map(lambda x: x[:, mask])
    return dataclasses.replace(
        problem,
        q=cut(problem.q),
        k=cut(problem.k),
        v=cut(problem.v),
        rates={name: cut(x) for name, x in problem.rates.items()},
        lengths=None,
        state=dataclasses.replace(state, kernel_rows=dual),
    )


@dataclass(frozen=True, kw_only=True)
class _Batch:
    """One inner batch of n tokens, whose window has m associations."""

    low: int  # first token of the window
    start: int  # first token of the batch
    stop: int  # token after the last one of the batch
    skip: int  # number of its tokens from earlier calls, which have no query
    q: Tensor  # queries of its other tokens [B, H, t·G, K]
    C: Tensor  # coefficients of gradient i in A_t, [B, H, n, m]
    CS: Tensor | None  # coefficients of gradient i in S at the end, [B, H, m]
    c: Coefficients  # coefficients without rates and windows


@dataclass(frozen=True, kw_only=True)
class _PastReads:
    """Reads of the m keys and the queries of a batch from the rows at its start."""

    past: dict[int, Tensor]  # Σ_j κ u°_j of each map that reads features, by its index
    slow: dict[int, Tensor]  # Σ_j κ s°_j of each map that reads features, by its index
    # Σ_j κ over the mass of the rows, [..., 1], and over their missing mass if it is tracked, [...,
    # 2]. None without normalisation.
    total: Tensor | None
    near: Tensor  # κ of the queries and the keys of the window and the batch, [B, H, t·G, m]


class _InnerBatchLoop:
    """Recurrence over inner batches of sequences at equal positions.

    Attributes:
        reads_features: whether each map reads the features.
        A, S: rows ``[B, H, n, out]`` of the maps that read features, weights of the other maps, and
            their momentum, at the start of the current inner batch.
        keys: keys of these rows, then keys of the batch.
        mass: mass of the keys ``[B, H, n, 1]``, and the missing mass as a second column if it is
            tracked. ``None`` without a decay.
        erased: mask of erased rows at the start and after every token, or ``None``.
    """

    def __init__(self, problem: Problem, lacking: Tensor | None) -> None:
        recipe, state = problem.recipe, problem.state
        dual = state.kernel_rows
        assert dual is not None
        assert isinstance(recipe.features, Kernel) and isinstance(recipe.memory, Stack)
        self.problem, self.recipe, self.outer = problem, recipe, requires_grad(problem)
        self.kernel, self.memory = recipe.features, recipe.memory
        self.normalize = recipe.memory.read.normalize == "sum"
        self.tokens = join_buffer(problem)
        self.k = self.tokens.k.transpose(1, 2)  # [B, H, n, K]
        self.v = self.tokens.v.transpose(1, 2)
        self.b, self.c = recipe.algorithm.batch_size, recipe.context.horizon or 1
        position = int(state.position[0]) if state.host_position is None else state.host_position
        num_open = position % self.b
        self.num_closed = position - num_open
        self.boundary = self.tokens.buffered - num_open
        self.slot = next(iter(recipe.algorithm.slots), None)
        maps = recipe.memory.maps(0, problem.v.shape[-1])
        self.reads_features = [m.reads_features for m in maps]
        self.A = self._by_map(dual.rows, state.weights)
        self.S: list[Tensor] = []
        if self.slot is not None:
            self.S = self._by_map(dual.slots[self.slot], state.algorithm_state.get(self.slot, ()))
        self.keys, self.n = dual.k.transpose(1, 2), dual.k.shape[1]
        self.mass, self.erased = None, None
        if recipe.retention.decay is not None:
            columns = [dual.mass] if lacking is None else [dual.mass, lacking]
            self.mass = torch.stack(columns, dim=-1).transpose(1, 2)
            self.erased = self._erased_rows(dual)
        self.precision_lost = torch.zeros((), dtype=torch.bool, device=self.k.device)

    def _by_map(self, rows: Sequence[Tensor], weights: Sequence[Tensor]) -> list[Tensor]:
        """Return rows ``[B, n, H, out]`` of a state and its weights in the order of the maps."""
        remaining_rows, remaining_weights = iter(rows), iter(weights)
        return [
            next(remaining_rows).transpose(1, 2) if reads else next(remaining_weights)
            for reads in self.reads_features
        ]

    def _erased_rows(self, dual: KernelRows) -> Tensor | None:
        """Return the mask of erased rows at the start and after every token.

        A row is erased if α was 0 and no later step writes to it. A window continues to write to
        rows, and momentum writes to all rows. Return ``None`` if no row is erased.
        """  # [B, H, 1 + n, rows]
        decay = self._rate("log_decay", self.boundary, len(self.tokens))
        assert decay is not None
        n, T, device = dual.k.shape[1], decay.shape[-1], self.k.device
        is_empty, is_erased = dual.mass.mT == 0, decay.isneginf()
        if self.slot is not None:
            is_erased = torch.zeros_like(is_erased)
        if can_read_values(is_erased) and not bool(is_empty.any() | is_erased.any()):
            return None
        steps = torch.arange(T, device=device)
        last = torch.where(is_erased, steps, -1).cummax(-1).values if T else is_erased.long()
        # Rows of the initial memory precede the rows of this document's tokens.
        reached = n + (last - (self.c - 1)).clamp_min(-self.num_closed)
        reached = torch.where(last >= 0, reached, 0)
        first = functional.pad(reached, (1, 0)).unsqueeze(-1)
        erased = torch.arange(n + T, device=device) < first
        return erased | functional.pad(is_empty, (0, T)).unsqueeze(-2)

    def run(self) -> tuple[Tensor, State, Tensor]:
        """Run every inner batch in order. The last batch may stay open."""
        problem, tokens = self.problem, self.tokens
        B, T, H, G, _ = problem.q.shape
        outputs: list[Tensor] = []
        for start in range(self.boundary, len(tokens), self.b):
            batch = self._batch(start, min(start + self.b, len(tokens)))
            self.keys = torch.cat([self.keys, self.k[:, :, batch.start : batch.stop]], dim=2)
            past_reads = self._past_reads(batch)
            inputs, deltas = self._gradients(batch, past_reads)
            if batch.stop > tokens.buffered:
                outputs.append(self._read(batch, past_reads, inputs, deltas))
            if batch.stop - batch.start == self.b:
                self._move(batch, inputs, deltas)
        if not outputs:
            y = problem.v.new_zeros(B, T, H, G, problem.v.shape[-1])
        else:
            y = torch.cat(outputs, dim=1).to(problem.v.dtype)
        return y, self._state(), self.precision_lost

    # -- one inner batch -----------------------------------------------------------------------

    def _rate(self, name: str, start: int, stop: int) -> Tensor | None:
        """Return a hyperparameter per token ``[B, H, n, ...]``."""
        x = self.tokens.rates.get(name)
        return None if x is None else x[:, start:stop].transpose(1, 2)

    def _batch(self, start: int, stop: int) -> _Batch:
        num_before = self.num_closed + start - self.boundary  # associations of this document
        low = start - min(self.c - 1, num_before)
        log_decay = None if self.mass is None else self._rate("log_decay", start, stop)
        eta = self._rate("lr", start, stop)
        assert eta is not None
        c = coefficients(log_decay, self._rate("momentum", start, stop), None, eta)
        n, m = stop - start, stop - low
        # Γ: entry d of token t's window weights association t − d.
        gap = torch.arange(n, device=eta.device)[:, None] + (start - low)
        gap = gap - torch.arange(m, device=eta.device)
        inside = (gap >= 0) & (gap < self.c)
        gamma = self._rate("window", start, stop)
        if gamma is None:
            window = inside.to(eta.dtype).expand(*eta.shape[:2], n, m)
        else:
            index = gap.clamp(0, self.c - 1).expand(*eta.shape[:2], n, m)
            window = torch.where(inside, gamma.gather(-1, index), 0.0)
        steps = eta.unsqueeze(-1) * window
        buffered = self.tokens.buffered
        skip = max(buffered - start, 0)
        q = self.problem.q[:, start + skip - buffered : max(stop - buffered, 0)]
        return _Batch(
            low=low,
            start=start,
            stop=stop,
            skip=skip,
            q=q.transpose(1, 2).to(self.k.dtype).flatten(2, 3),
            C=c.E @ steps,
            CS=None if c.theta is None else (c.theta[..., -1:, :] @ steps).squeeze(-2),
            c=c,
        )

    def _past_reads(self, batch: _Batch) -> _PastReads:
        """Read all rows with the keys and queries of the batch: one product with all keys."""
        kernel, n, m = self.kernel, self.n, batch.stop - batch.low
        x = torch.cat([self.k[:, :, batch.low : batch.stop], batch.q], dim=2)
        total = None
        if not self.normalize:
            similarity = kernel.kappa(x, self.keys)
        else:
            exponent = kernel.exponent(x.shape[-1])
            if exponent is not None and exponent[1] == 0.0:
                similarity = (exponent[0] * x) @ self.keys.mT
            else:
                similarity = kernel.log_kappa(x, self.keys)
            # Keys read the rows at the start of the batch, queries also the rows of the batch.
            at_keys, at_queries = similarity[:, :, :m], similarity[:, :, m:]
            at_keys[..., n:].fill_(-torch.inf)
            size = batch.stop - batch.start
            later = torch.ones(1, 1, size, size, dtype=torch.bool, device=x.device).triu(1)
            at_queries[..., n:].masked_fill_(self._per_query(batch, later), -torch.inf)
            if self.mass is None:  # every key has mass 1: a softmax
                if n == 0:
                    at_keys.fill_(0.0)  # no past to read
                similarity = torch.softmax(similarity, dim=-1)
            else:
                if self.erased is not None:
                    erased = self.erased[..., : similarity.shape[-1]]
                    first = batch.start - self.boundary
                    at_keys.masked_fill_(erased[:, :, first : first + 1], -torch.inf)
                    erased = erased[:, :, first + 1 : batch.stop - self.boundary + 1]
                    at_queries.masked_fill_(self._per_query(batch, erased), -torch.inf)
                top = similarity.detach().amax(-1, keepdim=True)
                has_keys = top.isfinite()
                top = torch.where(has_keys, top, 0.0)
                similarity = (
                    (similarity - top).exp()
                    if similarity.requires_grad
                    else similarity.sub_(top).exp_()
                )
                total = similarity[..., :n] @ self.mass
                self._note_missing(total[:, :, :m], has_keys[:, :, :m])
        past = similarity[..., :n]
        rows = [i for i, reads in enumerate(self.reads_features) if reads]
        return _PastReads(
            past={i: past @ self.A[i] for i in rows},
            slow={i: past @ self.S[i] for i in rows if self.S},
            total=total,
            near=similarity[:, :, m:, similarity.shape[-1] - m :],
        )

    def _per_query(self, batch: _Batch, x: Tensor) -> Tensor:
        """Return values per token ``[B, H, n, ...]`` as values per query ``[B, H, t·G, ...]``."""
        return x[:, :, batch.skip :].repeat_interleave(self.problem.q.shape[3], dim=2)

    def _note_missing(self, total: Tensor, has_keys: Tensor | None = None) -> None:
        """Record whether a sum needs missing mass. A sum over no key is 0."""
        missing = total[..., 1:] if total.shape[-1] > 1 else None
        is_lost = is_significant(total[..., :1], self.keys.shape[2], missing)
        is_lost = is_lost if has_keys is None else is_lost & has_keys
        self.precision_lost = self.precision_lost | is_lost.any()

    def _gradients(
        self, batch: _Batch, past_reads: _PastReads
    ) -> tuple[dict[int, Tensor], list[Tensor]]:
        """Return the inputs of the other maps, and δ of every map at W°, for the window."""
        bias, decay = self.recipe.bias, self.recipe.retention.decay
        k, v = self.k[:, :, batch.low : batch.stop], self.v[:, :, batch.low : batch.stop]
        m = batch.stop - batch.low
        maps = list(self.A)  # weights, or the outputs of maps that read features
        for i, output in past_reads.past.items():
            maps[i] = output[:, :, :m]
            if past_reads.total is not None:
                maps[i] = _divide(maps[i], past_reads.total[:, :, :m, :1])
        if decay is not None and decay.when == "before":  # one token: at α_t W_(t−1)
            alpha = batch.c.alpha[..., :1, None]
            # Decay cancels in a mean over rows.
            cancels = past_reads.past if self.normalize else ()
            maps = [w if i in cancels else alpha * w for i, w in enumerate(maps)]
        inputs: dict[int, Tensor] = {}

        def apply(index: int, h: Tensor) -> Tensor:
            if self.reads_features[index]:
                return maps[index] + taps[index]
            inputs[index] = h
            return h @ maps[index].mT + taps[index]

        gates = self.tokens.bias_gates(bias, slice(batch.low, batch.stop))
        with torch.enable_grad():
            sizes = [x.out_features for x in self.memory.maps(0, v.shape[-1])]
            taps = [k.new_zeros(*k.shape[:2], m, size).requires_grad_() for size in sizes]
            prediction = self.memory.compute(apply, k, k, self.problem.params)
            deltas = loss_gradients(bias, prediction, v, gates, None, taps, outer=self.outer)
        if not self.outer:
            # δ of a map whose output is the prediction is the error itself, with its graph.
            inputs = {i: h.detach() for i, h in inputs.items()}
            deltas = [d.detach() for d in deltas]
            prediction = prediction.detach()
        if not self.recipe.algorithm.uses_normalized_steps:
            return inputs, deltas
        assert bias.target is not None
        each = k.unsqueeze(-2)
        kappa = self.kernel.kappa(each, each)[..., 0, 0]
        gain = torch.zeros_like(kappa)  # Σ_l |h_l|²|δ_l|², with |φ(k)|² = κ(k, k)
        for i, delta in enumerate(deltas):
            size = inputs[i].square().sum(-1) if i in inputs else kappa
            gain = gain + size * delta.square().sum(-1)
        at = (self.memory, prediction, bias.target * v, k, self.problem.params)
        rho = polyak_scale_at(*at, error=bias.error(prediction, v, gates), gain=gain).unsqueeze(-1)
        return inputs, [rho * d for d in deltas]

    def _read(
        self,
        batch: _Batch,
        past_reads: _PastReads,
        inputs: dict[int, Tensor],
        deltas: list[Tensor],
    ) -> Tensor:
        """Return the outputs of the batch's new tokens ``[B, t, H, G, V]``."""
        c, m = batch.c, batch.stop - batch.low
        C = self._per_query(batch, batch.C)
        a = self._per_query(batch, c.a).unsqueeze(-1)
        slow = None if c.m is None else self._per_query(batch, c.m).unsqueeze(-1)
        total = None
        if past_reads.total is not None:
            P = c.P.expand(*batch.C.shape[:2], *c.P.shape[-2:])
            batch_mass = past_reads.near[..., m - P.shape[-1] :]
            batch_mass = (batch_mass * self._per_query(batch, P)).sum(-1, keepdim=True)
            total = a * past_reads.total[:, :, m:]
            total = torch.cat([total[..., :1] + batch_mass, total[..., 1:]], dim=-1)
            self._note_missing(total)
            total = total[..., :1]
        scores = C * past_reads.near

        def apply(index: int, h: Tensor) -> Tensor:
            if not self.reads_features[index]:
                z = a * (h @ self.A[index].mT) - (C * (h @ inputs[index].mT)) @ deltas[index]
                return z if slow is None else z + slow * (h @ self.S[index].mT)
            z = a * past_reads.past[index][:, :, m:] - scores @ deltas[index]
            if slow is not None:
                z = z + slow * past_reads.slow[index][:, :, m:]
            return z if total is None else _divide(z, total)

        y = self.memory.compute(apply, batch.q, batch.q, self.problem.params)
        return y.unflatten(2, (-1, self.problem.q.shape[3])).transpose(1, 2)

    # -- the boundary --------------------------------------------------------------------------

    def _move(self, batch: _Batch, inputs: dict[int, Tensor], deltas: list[Tensor]) -> None:
        """Decay A and S, add the steps of the batch, and append its rows and their mass."""
        c, back = batch.c, batch.start - batch.low

        def moved(i: int, decayed: Tensor, step: Tensor) -> Tensor:
            if not self.reads_features[i]:
                return decayed - step.mT @ inputs[i]
            n = decayed.shape[2] - back
            window = decayed[:, :, n:] - step[:, :, :back]
            return torch.cat([decayed[:, :, :n], window, -step[:, :, back:]], dim=2)

        a, last = c.a[..., -1:, None], batch.C[..., -1, :, None]  # [B, H, 1, 1], [B, H, m, 1]
        for i, delta in enumerate(deltas):
            A = self.A[i] if self.mass is None and c.m is None else a * self.A[i]
            if c.m is not None:
                assert c.theta_end is not None and batch.CS is not None
                A = A + c.m[..., -1:, None] * self.S[i]
                S = self._without_subnormals(i, c.theta_end[..., None, None] * self.S[i])
                self.S[i] = moved(i, S, batch.CS.unsqueeze(-1) * delta)
            if A is not self.A[i]:
                A = self._without_subnormals(i, A)
            self.A[i] = moved(i, A, last * delta)
        if self.mass is not None:
            fresh = c.P[..., -1, :].unsqueeze(-1).expand(*a.shape[:2], -1, 1)
            fresh = functional.pad(fresh, (0, self.mass.shape[-1] - 1))
            mass = torch.cat([a * self.mass, fresh], dim=2)
            mass = torch.cat([mass[..., :1].clamp_min(min_mass(mass.dtype)), mass[..., 1:]], dim=-1)
            if self.erased is not None:
                erased = self.erased[:, :, batch.stop - self.boundary, : mass.shape[2]]
                mass = mass.masked_fill(erased.unsqueeze(-1), 0.0)
            self.mass = mass
        self.n = self.keys.shape[2]

    def _without_subnormals(self, i: int, x: Tensor) -> Tensor:
        """Set values of rows at the end of the dtype's range to 0 in place.

        Products with subnormal numbers are slow on a CPU. The gradient is unchanged: a row may be 0
        because its token wrote 0.
        """
        if self.reads_features[i]:
            x.detach().copy_(functional.hardshrink(x.detach(), min_mass(x.dtype)))
        return x

    def _state(self) -> State:
        """Return the state: memory at the last boundary, and the tokens since."""

        def rows(maps: list[Tensor]) -> tuple[Tensor, ...]:
            pairs = zip(maps, self.reads_features, strict=True)
            return tuple(x.transpose(1, 2) for x, reads in pairs if reads)

        def weights(maps: list[Tensor]) -> tuple[Tensor, ...]:
            pairs = zip(maps, self.reads_features, strict=True)
            return tuple(x for x, reads in pairs if not reads)

        keys = self.keys[:, :, : self.n].transpose(1, 2)
        mass = None if self.mass is None else self.mass[..., 0].transpose(1, 2)
        dual = KernelRows(
            k=keys,
            rows=rows(self.A),
            mass=keys.new_ones(keys.shape[:3]) if mass is None else mass,
            mask=torch.ones(keys.shape[:2], dtype=torch.bool, device=keys.device),
            slots={} if self.slot is None else {self.slot: rows(self.S)},
        )
        slots = {} if self.slot is None else {self.slot: weights(self.S)}
        slots = {name: slot for name, slot in slots.items() if slot}
        return self.problem.final_state(
            weights=weights(self.A), algorithm_state=slots, kernel_rows=dual
        )


def _divide(x: Tensor, total: Tensor) -> Tensor:
    """Return x / total, or 0 if the total is 0."""
    empty = total == 0
    return torch.where(empty, 0.0, x / torch.where(empty, 1.0, total))
