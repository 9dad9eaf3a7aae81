"""Deep memories over a kernel's features, by inner batches: attention before a perceptron.

Maps that read features are rows by key (`KernelRows`), and later maps are ordinary weights
(`batch_memory`). Inside an inner batch every gradient is taken at its start, W°. The batch is
linear in the gradients, with the coefficient matrix C = P^α P^θ diag(η) Γ of ``coefficients``::

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
from recollect.engines.common.coefficients import coefficients
from recollect.engines.common.kernel_precision import is_significant, run_with_float64_fallback
from recollect.engines.common.problem import Problem, join_buffer, requires_grad
from recollect.engines.kernel.batch_memory import Batch, BatchMemory, Maps, gains
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
        return _DeepKernelLoop(problem, lacking).run()
    outputs: list[Tensor] = []
    states: list[State] = []
    is_lost = torch.zeros((), dtype=torch.bool, device=problem.k.device)
    for row in range(B):  # sequences at different positions of their inner batches, one by one
        lacking_row = None if lacking is None else lacking[row : row + 1, dual.mask[row]]
        y, state, of_row = _DeepKernelLoop(_single_row(problem, row), lacking_row).run()
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
class _PastReads:
    """Reads of the m keys and the queries of a batch from the rows at its start.

    Attributes:
        past: Σ_j κ u°_j of each map that reads features.
        slow: Σ_j κ s°_j of each map that reads features.
        total: Σ_j κ over the mass of the rows, ``[..., 1]``, and over their missing mass if it is
            tracked, ``[..., 2]``. ``None`` without normalisation.
        near: κ of the queries and the keys of the window and the batch, ``[B, H, t·G, m]``.
    """

    past: Maps
    slow: Maps
    total: Tensor | None
    near: Tensor


class _DeepKernelLoop:
    """Recurrence over inner batches of sequences at equal positions."""

    def __init__(self, problem: Problem, lacking: Tensor | None) -> None:
        recipe, state = problem.recipe, problem.state
        assert state.kernel_rows is not None
        assert isinstance(recipe.features, Kernel) and isinstance(recipe.memory, Stack)
        self.problem, self.recipe = problem, recipe
        self.kernel, self.memory = recipe.features, recipe.memory
        self.normalize = recipe.memory.read.normalize == "sum"
        self.tokens = join_buffer(problem)
        self.first = [m.reads_features for m in recipe.memory.maps(0, problem.v.shape[-1])]
        self.b, self.c = recipe.algorithm.batch_size, recipe.context.horizon or 1
        position = int(state.position[0]) if state.host_position is None else state.host_position
        self.num_open = position % self.b
        self.num_closed = position - self.num_open
        self.boundary = self.tokens.buffered - self.num_open
        self.slot = next(iter(recipe.algorithm.slots), None)
        self.decays = recipe.retention.decay is not None
        more = len(self.tokens) - self.boundary
        self.outer = requires_grad(problem)
        self.k = self.tokens.k.transpose(1, 2)  # [B, H, n, K]
        self.v = self.tokens.v.transpose(1, 2)
        mass, self.erased = None, None
        if self.decays:
            mass = state.kernel_rows.mass
            columns = [mass] if lacking is None else [mass, lacking]
            mass = torch.stack(columns, dim=-1)
            self.erased = self._erased_rows(state.kernel_rows)
        self.batch_memory = BatchMemory(state, self.slot, self.first, more, mass, outer=self.outer)
        self.precision_lost = torch.zeros((), dtype=torch.bool, device=self.k.device)

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
            self.batch_memory.keys.add(self.k[:, :, batch.start : batch.stop])
            past_reads = self._past_reads(batch)
            inputs, deltas = self._gradients(batch, past_reads)
            if batch.stop > tokens.buffered:
                outputs.append(self._read(batch, past_reads, inputs, deltas))
            if batch.stop - batch.start == self.b:
                erased = (
                    None if self.erased is None else self.erased[:, :, batch.stop - self.boundary]
                )
                self.batch_memory.move(batch, inputs, deltas, erased)
        if not outputs:
            y = problem.v.new_zeros(B, T, H, G, problem.v.shape[-1])
        else:
            y = torch.cat(outputs, dim=1).to(problem.v.dtype)
        return y, self.batch_memory.state_after(problem), self.precision_lost

    # -- one inner batch -----------------------------------------------------------------------

    def _rate(self, name: str, start: int, stop: int) -> Tensor | None:
        """Return a hyperparameter per token ``[B, H, n, ...]``."""
        x = self.tokens.rates.get(name)
        return None if x is None else x[:, start:stop].transpose(1, 2)

    def _batch(self, start: int, stop: int) -> Batch:
        num_before = (
            self.num_closed + start - self.boundary
        )  # earlier associations of this document
        low = start - min(self.c - 1, num_before)
        log_decay = self._rate("log_decay", start, stop) if self.decays else None
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
        CS = None if c.theta is None else (c.theta[..., -1:, :] @ steps).squeeze(-2)
        return Batch(low=low, start=start, stop=stop, C=c.E @ steps, CS=CS, c=c)

    def _queries(self, batch: Batch) -> tuple[Tensor, int]:
        """Return the new queries ``[B, H, t·G, K]`` and the number of old tokens of the batch."""
        buffered = self.tokens.buffered
        skip = max(buffered - batch.start, 0)
        q = self.problem.q[:, batch.start + skip - buffered : max(batch.stop - buffered, 0)]
        return q.transpose(1, 2).to(self.k.dtype).flatten(2, 3), skip

    def _past_reads(self, batch: Batch) -> _PastReads:
        """Read all rows with the keys and queries of the batch: one product with all keys."""
        batch_memory, kernel = self.batch_memory, self.kernel
        q, skip = self._queries(batch)
        k = self.k[:, :, batch.low : batch.stop]
        x = torch.cat([k, q], dim=2)
        keys, n, m = batch_memory.keys.rows, batch_memory.n, k.shape[2]
        size, G = batch.stop - batch.start, self.problem.q.shape[3]
        total = None
        if not self.normalize:
            similarity = kernel.kappa(x, keys)
        else:
            exponent = kernel.exponent(x.shape[-1])
            if exponent is not None and exponent[1] == 0.0:
                similarity = (exponent[0] * x) @ keys.mT
            else:
                similarity = kernel.log_kappa(x, keys)
            # Keys read the rows at the start of the batch, queries also the rows of the batch.
            similarity[:, :, :m, n:].fill_(-torch.inf)
            ahead = torch.ones(size, size, dtype=torch.bool, device=x.device).triu(1)[skip:]
            similarity[:, :, m:, n:].masked_fill_(ahead.repeat_interleave(G, dim=0), -torch.inf)
            if batch_memory.mass is None:  # every key has mass 1: a softmax
                if n == 0:
                    similarity[:, :, :m].fill_(0.0)  # no past to read
                similarity = torch.softmax(similarity, dim=-1)
            else:
                if self.erased is not None:
                    start, count = batch.start - self.boundary, similarity.shape[-1]
                    erased = self.erased[..., :count]
                    at_queries = erased[:, :, start + 1 + skip : start + 1 + size]
                    at_queries = at_queries.repeat_interleave(G, dim=2)
                    similarity[:, :, :m].masked_fill_(erased[:, :, start : start + 1], -torch.inf)
                    similarity[:, :, m:].masked_fill_(at_queries, -torch.inf)
                top = similarity.detach().amax(-1, keepdim=True)
                has_keys = top.isfinite()
                top = torch.where(has_keys, top, 0.0)
                similarity = (
                    (similarity - top).exp()
                    if similarity.requires_grad
                    else similarity.sub_(top).exp_()
                )
                total = similarity[..., :n] @ batch_memory.mass.upto(n)
                self._note_missing(total[:, :, :m], has_keys[:, :, :m])
        past = similarity[..., :n]
        return _PastReads(
            past=[past @ u.upto(n) for u in batch_memory.U],
            slow=[past @ u.upto(n) for u in batch_memory.SU],
            total=total,
            near=similarity[:, :, m:, similarity.shape[-1] - m :],
        )

    def _note_missing(self, total: Tensor, has_keys: Tensor | None = None) -> None:
        """Record whether a sum needs missing mass. A sum over no key is 0."""
        missing = total[..., 1:] if total.shape[-1] > 1 else None
        is_lost = is_significant(total[..., :1], self.batch_memory.keys.count, missing)
        is_lost = is_lost if has_keys is None else is_lost & has_keys
        self.precision_lost = self.precision_lost | is_lost.any()

    def _program(self, first: Maps, others: Maps, raw: Tensor, taps: Maps) -> tuple[Tensor, Maps]:
        """Return M(x) from the outputs of the first maps, and the inputs of the other maps."""
        outputs, rest, extra = iter(first), iter(others), iter(taps)
        entered: Maps = []
        plan = [next(outputs) if first else next(rest) for first in self.first]

        def apply(index: int, h: Tensor) -> Tensor:
            if self.first[index]:
                return plan[index] + next(extra)
            entered.append(h)
            return h @ plan[index].mT + next(extra)

        return self.memory.compute(apply, raw, raw, self.problem.params), entered

    def _gradients(self, batch: Batch, past_reads: _PastReads) -> tuple[Maps, Maps]:
        """Return the inputs of the other maps and δ of every map at W° for the window."""
        bias = self.recipe.bias
        k, v = self.k[:, :, batch.low : batch.stop], self.v[:, :, batch.low : batch.stop]
        m = batch.stop - batch.low
        first, others = [z[:, :, :m] for z in past_reads.past], self.batch_memory.D
        decay = self.recipe.retention.decay
        if past_reads.total is not None:
            first = [_divide(z, past_reads.total[:, :, :m, :1]) for z in first]
        if decay is not None and decay.when == "before":  # one token: at α_t W_(t−1)
            alpha = batch.c.alpha[..., :1, None]
            first = first if self.normalize else [alpha * z for z in first]
            others = [alpha * d for d in others]
        gates = self.tokens.bias_gates(bias, batch.low, batch.stop)
        with torch.enable_grad():
            sizes = self.memory.maps(0, v.shape[-1])
            taps = [k.new_zeros(*k.shape[:2], m, x.out_features).requires_grad_() for x in sizes]
            prediction, entered = self._program(first, others, k, taps)
            if bias.defines_loss:
                target, cotangent = bias.loss(prediction, v, gates).sum(), None
            else:
                target, cotangent = prediction, bias.error(prediction, v, gates)
            deltas = torch.autograd.grad(
                target, taps, cotangent, create_graph=self.outer, materialize_grads=True
            )
        if not self.outer:
            # δ of a map whose output is the prediction is the error itself, with its graph.
            entered, deltas = [h.detach() for h in entered], tuple(d.detach() for d in deltas)
            prediction = prediction.detach()
        if not self.recipe.algorithm.uses_normalized_steps:
            return entered, list(deltas)
        assert bias.target is not None
        each = k.unsqueeze(-2)
        gain = gains(self.first, self.kernel.kappa(each, each)[..., 0, 0], entered, deltas)
        at = (self.memory, prediction, bias.target * v, k, self.problem.params)
        rho = polyak_scale_at(*at, error=bias.error(prediction, v, gates), gain=gain).unsqueeze(-1)
        return entered, [rho * d for d in deltas]

    def _read(self, batch: Batch, past_reads: _PastReads, inputs: Maps, deltas: Maps) -> Tensor:
        """Return the outputs of the batch's new tokens."""  # [B, t, H, G, V]
        batch_memory, c = self.batch_memory, batch.c
        x, skip = self._queries(batch)
        G, m = self.problem.q.shape[3], batch.stop - batch.low

        def spread(a: Tensor) -> Tensor:  # per token [B, H, n, ...] to per query
            return a[:, :, skip:].repeat_interleave(G, dim=2)

        C, a = spread(batch.C), spread(c.a).unsqueeze(-1)
        slow = None if c.m is None else spread(c.m).unsqueeze(-1)
        total = None
        if past_reads.total is not None:
            P = c.P.expand(*batch.C.shape[:2], *c.P.shape[-2:])
            batch_mass = past_reads.near[..., m - P.shape[-1] :]
            batch_mass = (batch_mass * spread(P)).sum(-1, keepdim=True)
            total = a * past_reads.total[:, :, m:]
            total = torch.cat([total[..., :1] + batch_mass, total[..., 1:]], dim=-1)
            self._note_missing(total)
            total = total[..., :1]
        scores = C * past_reads.near
        plan: list[Tensor | int] = []
        kinds = iter(range(len(batch_memory.U))), iter(range(len(batch_memory.D)))
        for first, delta in zip(self.first, deltas, strict=True):
            index = next(kinds[0] if first else kinds[1])
            if not first:
                plan.append(index)
                continue
            z = a * past_reads.past[index][:, :, m:] - scores @ delta
            if slow is not None:
                z = z + slow * past_reads.slow[index][:, :, m:]
            plan.append(z if total is None else _divide(z, total))

        def apply(index: int, h: Tensor) -> Tensor:
            output = plan[index]
            if isinstance(output, Tensor):
                return output
            z = a * (h @ batch_memory.D[output].mT) - (C * (h @ inputs[output].mT)) @ deltas[index]
            return z if slow is None else z + slow * (h @ batch_memory.SD[output].mT)

        y = self.memory.compute(apply, x, x, self.problem.params)
        return y.unflatten(2, (-1, G)).transpose(1, 2)


def _divide(x: Tensor, total: Tensor) -> Tensor:
    """Return x / total, or 0 if the total is 0."""
    empty = total == 0
    return torch.where(empty, 0.0, x / torch.where(empty, 1.0, total))
