"""The reference for memories over a kernel's features: rows by key, one token at a time.

The derivation is in `docs/design/kernel-delta.md`.

Weights that read features are rows u by key z: W φ(x) = Σ_j u_j κ(z_j, x). The gradient of such a
map is δ φ(k_i)ᵀ, with δ the gradient of its output. It adds to the row of association i. One array
contains all rows of the call. A row is zero until a token writes to it. A token is one step of::

    g_t = Σ_i γ_i δ_i e_iᵀ,   S_t = θ_t S_(t−1) − η_t g_t,   A_t = α_t A_(t−1) + S_t

on the rows and on the weights of the other maps. Autograd computes δ.

A normalised read divides the output of such a map by the mass of its keys: W φ(x) is
Σ_j κ(z_j, x) u_j / Σ_j m_j κ(z_j, x). A step is not divided: row i moves by δ_i, as in attention.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from recollect.choices.algorithm.normalized_steps import polyak_scale_at
from recollect.choices.autograd import inner_leaves
from recollect.choices.features.base import Kernel
from recollect.choices.memory.base import Stack
from recollect.choices.memory.norms import NORM_EPS
from recollect.engines.common.kernel_precision import (
    is_significant,
    min_mass,
    run_with_float64_fallback,
)
from recollect.engines.common.problem import Problem, join_buffer, loss_gradients, requires_grad
from recollect.state.kernel_rows import KernelRows, append_rows
from recollect.state.state import State

__all__ = ["KernelTokenLoop", "normalized_kernel"]

Rows = list[Tensor]
Mass = tuple[Tensor, Tensor | None]  # [B, H, N] mass and missing mass of the keys


def normalized_kernel(
    kernel: Kernel,
    x: Tensor,  # [..., M, K]
    keys: Tensor,  # [..., N, K]
    mass: Tensor,  # [..., N], 0 for a forgotten key
    missing_mass: Tensor | None = None,  # upper bound of the lost rows and masses [..., N]
) -> tuple[Tensor, Tensor]:
    """Return κ(x, z_j) / Σ_j mass_j κ(x, z_j) and whether the dtype lost significant digits.

    The weights ``[..., M, N]`` are 0 if all keys are forgotten (`kernel_precision`).
    """
    weight = mass.unsqueeze(-2)
    is_visible = weight > 0
    logs = torch.where(is_visible, kernel.log_kappa(x, keys), -torch.inf)
    top = logs.amax(-1, keepdim=True) if logs.shape[-1] else logs.sum(-1, keepdim=True)
    top = torch.where(top.isfinite(), top, 0.0).detach()
    weights = torch.where(is_visible, (logs - top).exp(), 0.0)
    total = (weights * weight).sum(-1, keepdim=True)
    missing = None
    if missing_mass is not None:
        missing = (weights * missing_mass.unsqueeze(-2)).sum(-1, keepdim=True)
    precision_lost = (
        is_visible.any(-1, keepdim=True) & is_significant(total, keys.shape[-2], missing)
    ).any()
    empty = total == 0
    return torch.where(empty, 0.0, weights / torch.where(empty, 1.0, total)), precision_lost


class KernelTokenLoop:
    """Recursion over tokens for B batch elements and H memories.

    N is the number of rows of the state plus one row per buffered or new token.

    Attributes:
        U: Current rows ``[B, H, N, out]`` of the maps that read features.
        D: Current weights of the other maps.
        SU, SD: Momentum of U and D by slot name.
        mass: Contribution of each key to a normaliser ``[B, H, N]``, 0 for a forgotten key.
        missing_mass: Upper bound of the lost rows and masses ``[B, H, N]``, or ``None``.
        precision_lost: Whether a read lost significant digits.
    """

    def __init__(self, problem: Problem, missing_mass: Tensor | None = None) -> None:
        recipe, state = problem.recipe, problem.state
        assert state.kernel_rows is not None
        assert isinstance(recipe.features, Kernel) and isinstance(recipe.memory, Stack)
        self.problem, self.recipe, self.kernel = problem, recipe, recipe.features
        self.memory, self.outer = recipe.memory, requires_grad(problem)
        self.is_normalized = recipe.memory.read.normalize == "sum"
        self.tokens = tokens = join_buffer(problem)
        self.b = recipe.algorithm.batch_size
        self.reads_features = [m.reads_features for m in recipe.memory.maps(0, problem.v.shape[-1])]
        dual, self.num_stored = state.kernel_rows, state.kernel_rows.k.shape[1]
        self.keys = torch.cat([dual.k.to(tokens.k.dtype), tokens.k], dim=1).transpose(1, 2)
        count, B = len(tokens), tokens.k.shape[0]

        def append_zero_rows(x: Tensor) -> Tensor:  # [B, n, H, ...] -> [B, H, N, ...]
            later = x.new_zeros(B, count, *x.shape[2:])
            return torch.cat([x, later], dim=1).transpose(1, 2)

        self.U = [append_zero_rows(u) for u in dual.rows]
        self.D = list(state.weights)
        dense, names = state.algorithm_state, recipe.algorithm.slots
        self.SU = {name: [append_zero_rows(u) for u in dual.slots[name]] for name in names}
        self.SD = {name: list(dense.get(name, ())) for name in names}
        self.mass = append_zero_rows(torch.where(dual.mask[..., None], dual.mass, 0.0))
        self.missing_mass = None if missing_mass is None else append_zero_rows(missing_mass)
        self.precision_lost = torch.zeros((), dtype=torch.bool, device=tokens.k.device)
        self.count = state.position - state.position % self.b
        self.num_open = state.position % self.b
        self.batch_start = (
            self.U,
            self.D,
            dict(self.SU),
            dict(self.SD),
            self.mass,
            self.missing_mass,
        )

    # -- inner batches -------------------------------------------------------------------------

    def _save_batch_start(self, rows: Tensor) -> None:
        """Record the current weights as W° and as the state for the selected ``rows [B]``."""
        U, D, SU, SD, mass, missing_mass = self.batch_start

        def each(new: Sequence[Tensor], old: Sequence[Tensor]) -> Rows:
            return [_select(rows, a, b) for a, b in zip(new, old, strict=True)]

        self.batch_start = (
            each(self.U, U),
            each(self.D, D),
            {n: each(self.SU[n], SU[n]) for n in SU},
            {n: each(self.SD[n], SD[n]) for n in SD},
            _select(rows, self.mass, mass),
            None
            if missing_mass is None or self.missing_mass is None
            else _select(rows, self.missing_mass, missing_mass),
        )

    def _row_of(self, j: int) -> Tensor:
        """Return the one-hot row index of association j ``[B, N]``.

        The rows of buffered associations from closed inner batches are in the state, newest last.
        """
        buffered = self.tokens.buffered
        new_row = torch.full_like(self.count, self.num_stored + j)
        distance = buffered - self.num_open - j  # > 0: written before the open batch began
        place = torch.where(distance > 0, self.num_stored - distance, new_row)
        N = self.keys.shape[2]
        steps = torch.arange(N, device=place.device)
        return (steps == place[:, None]).to(self.keys.dtype)

    def _rows_of(self, associations: slice) -> Tensor:
        """Return the one-hot row indices of some associations ``[B, m, N]``."""
        index = range(*associations.indices(len(self.tokens)))
        return torch.stack([self._row_of(i) for i in index], dim=1)

    # -- reading -------------------------------------------------------------------------------

    def row_weights(self, kernel: Kernel, x: Tensor, mass: Mass, *, is_normalized: bool) -> Tensor:
        """Return the weight of each row ``[B, H, M, N]`` in a read at ``x [B, H, M, K]``."""
        if not is_normalized:
            return kernel.kappa(x, self.keys)
        weights, precision_lost = normalized_kernel(kernel, x, self.keys, *mass)
        self.precision_lost = self.precision_lost | precision_lost
        return weights

    def predict(self, x: Tensor, U: Rows, D: Rows, mass: Mass, taps: Rows) -> Tensor:
        """Return M(x) ``[B, H, M, V]`` with one tap added to each output of a map of features."""
        weights = self.row_weights(self.kernel, x, mass, is_normalized=self.is_normalized)
        rows, dense, offsets = iter(U), iter(D), iter(taps)
        maps = [next(rows) if first else next(dense) for first in self.reads_features]

        def apply(index: int, h: Tensor) -> Tensor:
            if self.reads_features[index]:
                return h @ maps[index] + next(offsets)
            return h @ maps[index].transpose(-1, -2)

        return self.memory.compute(apply, weights, x, self.problem.params)

    def read(self, q: Tensor) -> Tensor:
        """Return the outputs at queries ``[B, H, G, K]`` from the current weights."""
        q = q.to(self.keys.dtype)
        taps = [u.new_zeros(()) for u in self.U]
        return self.predict(q, self.U, self.D, (self.mass, self.missing_mass), taps)

    # -- the recursion -------------------------------------------------------------------------

    def _gradients(self, j: int, U: Rows, D: Rows, mass: Mass) -> tuple[Rows, Rows]:
        """Return g_t at W° for the rows and for the other maps."""
        tokens = self.tokens
        window = tokens.in_window(j)
        weight = tokens.valid[:, None, window].to(tokens.v.dtype)
        if "window" in tokens.rates:
            weight = weight * tokens.rates["window"][:, j][..., : weight.shape[-1]].flip(-1)
        if not self.recipe.algorithm.uses_normalized_steps:
            return self._weighted_gradients(window, weight, U, D, mass)
        total: list[Tensor] = []
        for m, i in enumerate(range(window.start, window.stop, window.step)):
            one = torch.ones_like(weight[..., :1])
            rows, other_gradients = self._weighted_gradients(slice(i, i + 1), one, U, D, mass)
            scale = weight[..., m] * self._share(i, rows, other_gradients, U, D, mass)
            scaled = [scale[..., None, None] * g for g in (*rows, *other_gradients)]
            total = [a + b for a, b in zip(total, scaled, strict=True)] if total else scaled
        return total[: len(U)], total[len(U) :]

    def _share(
        self, i: int, rows: Rows, other_gradients: Rows, U: Rows, D: Rows, mass: Mass
    ) -> Tensor:
        """Return ρ of association i ``[B, H]``; a row gradient δ φ(k)ᵀ has norm² |δ|² κ(k, k)."""
        tokens, bias = self.tokens, self.recipe.bias
        k, v = (x[:, i : i + 1].transpose(1, 2) for x in (tokens.k, tokens.v))
        prediction = self.predict(k, U, D, mass, [u.new_zeros(()) for u in U])
        error = bias.error(prediction, v, tokens.bias_gates(bias, slice(i, i + 1)))
        gain = (
            sum((g.square().sum((-2, -1)) for g in rows), torch.zeros_like(error[:, :, 0, 0]))
            * self.kernel.kappa(k, k)[..., 0, 0]
        )
        gain = sum((g.square().sum((-2, -1)) for g in other_gradients), gain)
        assert bias.target is not None
        at = (self.memory, prediction, bias.target * v, k, self.problem.params)
        return polyak_scale_at(*at, error=error, gain=gain.unsqueeze(-1))[:, :, 0]

    def _weighted_gradients(
        self, associations: slice, weight: Tensor, U: Rows, D: Rows, mass: Mass
    ) -> tuple[Rows, Rows]:
        """Return the sum of the gradients of some associations."""
        tokens, bias = self.tokens, self.recipe.bias
        k, v = (x[:, associations].transpose(1, 2) for x in (tokens.k, tokens.v))
        gates = tokens.bias_gates(bias, associations)
        rows = self._rows_of(associations)
        with torch.enable_grad():
            points = inner_leaves(D, outer=self.outer)
            m = k.shape[2]
            taps = [u.new_zeros(*u.shape[:2], m, u.shape[-1]).requires_grad_() for u in U]
            prediction = self.predict(k, U, points, mass, taps)
            leaves = [*taps, *points]
            gradients = loss_gradients(bias, prediction, v, gates, weight, leaves, outer=self.outer)
        if not self.outer:
            # If a map's output is the prediction, its δ is the error with its autograd graph.
            gradients = [d.detach() for d in gradients]
        deltas = [torch.einsum("bmn,bhmo->bhno", rows, d) for d in gradients[: len(U)]]
        return deltas, gradients[len(U) :]

    def _probe_read(self, j: int, U: Rows, mass: Mass) -> Tensor:
        """Return the output of the memory at the keys of the probe, ``[B, H, V]``."""
        probe, tokens = self.recipe.bias.probe, self.tokens
        assert probe is not None
        w = tokens.k[:, j].unsqueeze(2)  # [B, H, J, K]
        if probe.at == "token":
            w = tokens.rates["probe"][:, j]
            w = w if probe.heads > 1 else w.unsqueeze(2)
        kernel = self.kernel if probe.kernel is None else probe.kernel
        weights = self.row_weights(kernel, w, mass, is_normalized=probe.normalize == "sum")
        if probe.heads > 1:
            mix = self.problem.params["mix"].to(weights.dtype)  # [H, J]
            weights = (mix.unsqueeze(-1) * weights).sum(2, keepdim=True)
        reads = (weights @ U[0]).squeeze(2)
        if probe.normalize == "rms":
            reads = reads * (reads.square().mean(-1, keepdim=True) + NORM_EPS).rsqrt()
        return reads

    def _rate(self, j: int) -> Tensor:
        """Return η_t ``[B, H, 1, 1]``."""
        lr, algorithm, affine = self.tokens.rates["lr"][:, j], self.recipe.algorithm, None
        if algorithm.rate_depends_on_key:
            affine = self.recipe.bias.affine
            assert affine is not None
            k = self.tokens.k[:, j].unsqueeze(-2)
            lr = algorithm.rate(lr, self.kernel.kappa(k, k)[..., 0, 0], affine[0])
        return lr[..., None, None]

    def advance(self, j: int, token_mask: Tensor) -> None:
        """Update rows, weights and mass at token j for the selected ``token_mask [B]``."""
        recipe, rates = self.recipe, self.tokens.rates
        self._save_batch_start(token_mask & (self.count % self.b == 0))
        decay, alpha = recipe.retention.decay, torch.ones_like(self.mass[..., :1, None])
        if decay is not None:
            alpha = rates["log_decay"][:, j].exp()[..., None, None]
        U, D, mass = list(self.batch_start[0]), list(self.batch_start[1]), self.batch_start[4:]
        probe = recipe.bias.probe
        if decay is not None and decay.when == "before":
            D = [alpha * d for d in D]
            # Decay cancels in a mean over rows, also for α = 0.
            is_normalized = self.is_normalized if probe is None else probe.normalize == "sum"
            U = U if is_normalized else [alpha * u for u in U]
        if probe is not None:
            assert recipe.bias.affine is not None
            a, b = recipe.bias.affine
            erased = rates["erase"][:, j].unsqueeze(-1) * self._probe_read(j, U, mass)
            step = b * rates["lr"][:, j].unsqueeze(-1) * self.tokens.v[:, j] - a * erased
            moves = [self._row_of(j)[:, None, :, None] * step.unsqueeze(2)]
            dense_moves: Rows = []
        else:
            deltas, dense = self._gradients(j, U, D, mass)
            eta = self._rate(j)
            moves, dense_moves = [-eta * g for g in deltas], [-eta * g for g in dense]
        for name in self.SU:
            theta = rates["momentum"][:, j][..., None, None]
            moves = [theta * s + g for s, g in zip(self.SU[name], moves, strict=True)]
            dense_moves = [theta * s + g for s, g in zip(self.SD[name], dense_moves, strict=True)]
            self.SU[name] = [
                _select(token_mask, a, s) for a, s in zip(moves, self.SU[name], strict=True)
            ]
            self.SD[name] = [
                _select(token_mask, a, s) for a, s in zip(dense_moves, self.SD[name], strict=True)
            ]
        row = self._row_of(j)[:, None]  # [B, 1, N]
        self.U = [_select(token_mask, alpha * u + g, u) for u, g in zip(self.U, moves, strict=True)]
        self.D = [
            _select(token_mask, alpha * d + g, d) for d, g in zip(self.D, dense_moves, strict=True)
        ]
        self.mass = _select(token_mask, self._decay_mass(j, alpha[..., 0]) + row, self.mass)
        if self.missing_mass is not None:
            self.missing_mass = _select(
                token_mask, alpha[..., 0] * self.missing_mass, self.missing_mass
            )
        self.count = self.count + token_mask

    def _decay_mass(self, j: int, alpha: Tensor) -> Tensor:
        """Return the mass after the decay of token j; α = 0 drops keys without a step."""
        if self.recipe.retention.decay is None:
            return self.mass
        mass = (alpha * self.mass).clamp_min(min_mass(self.mass.dtype))
        mass = torch.where(self.mass > 0, mass, 0.0)
        if self.SU:  # momentum is a step of every row
            return mass
        window = self.tokens.in_window(j)
        valid = self.tokens.valid[:, window].to(mass.dtype)
        reached = (self._rows_of(window) * valid.unsqueeze(-1)).sum(1).bool().unsqueeze(1)
        erases_all = self.tokens.rates["log_decay"][:, j].isneginf().unsqueeze(-1)  # [B, H, 1]
        return torch.where(erases_all & ~reached, 0.0, mass)

    def replay(self) -> None:
        """Process the buffered tokens of the open inner batch again."""
        tokens, buffered = self.tokens, self.tokens.buffered
        for j in range(buffered):
            token_mask = tokens.valid[:, j] & (j >= buffered - self.num_open)
            if bool(token_mask.any()):
                self.advance(j, token_mask)

    def run(self) -> Tensor:
        """Replay the open batch, process the new tokens, and return their outputs."""
        problem, buffered = self.problem, self.tokens.buffered
        self.replay()
        outputs: list[Tensor] = []
        for j in range(buffered, len(self.tokens)):
            token_mask = self.tokens.valid[:, j]
            self.advance(j, token_mask)
            y = self.read(problem.q[:, j - buffered])
            outputs.append(torch.where(token_mask.view(-1, 1, 1, 1), y, 0.0))
        if outputs:
            return torch.stack(outputs, dim=1)
        B, _, H, G, _ = problem.q.shape
        return problem.v.new_zeros(B, 0, H, G, problem.v.shape[-1])

    def state(self) -> State:
        """Return the final state: the start of the open batch and the tokens of that batch."""
        problem, old = self.problem, self.problem.state.kernel_rows
        assert old is not None
        self._save_batch_start(self.count % self.b == 0)
        U, D, SU, SD, mass, _ = self.batch_start
        # Rows of closed batches: rows of the state, then rows of tokens before the last boundary.
        num_stored, buffered = self.num_stored, self.tokens.buffered
        closed = problem.end - problem.end % self.b
        old_boundary = problem.state.position - self.num_open

        def to_rows(x: Tensor) -> Tensor:
            return x.transpose(1, 2)

        def align_new_rows(x: Tensor) -> Tensor:  # new rows, left-aligned per batch element
            x = to_rows(x)[:, num_stored:]
            if buffered == 0:
                return x
            index = (buffered - self.num_open)[:, None] + torch.arange(x.shape[1], device=x.device)
            index = index.clamp_max(max(x.shape[1] - 1, 0))
            return x.gather(1, index.view(*index.shape, *(1,) * (x.dim() - 2)).expand_as(x))

        stored_rows = KernelRows(
            k=to_rows(self.keys)[:, :num_stored],
            rows=tuple(to_rows(u)[:, :num_stored] for u in U),
            mass=to_rows(mass)[:, :num_stored],
            mask=old.mask,
            slots={n: tuple(to_rows(u)[:, :num_stored] for u in SU[n]) for n in SU},
        )
        new_rows = KernelRows(
            k=align_new_rows(self.keys),
            rows=tuple(align_new_rows(u) for u in U),
            mass=align_new_rows(mass),
            mask=torch.zeros(*old.mask.shape[:1], len(self.tokens), dtype=torch.bool).to(old.mask),
            slots={n: tuple(align_new_rows(u) for u in SU[n]) for n in SU},
        )
        dual = append_rows(stored_rows, new_rows, closed - old_boundary)
        slots = {name: tuple(SD[name]) for name in SD} if D else {}
        return problem.final_state(weights=tuple(D), algorithm_state=slots, kernel_rows=dual)


def _select(rows: Tensor, new: Tensor, old: Tensor) -> Tensor:
    return torch.where(rows.view(-1, *(1,) * (old.dim() - 1)), new, old)


def run(problem: Problem) -> tuple[Tensor, State]:
    """Return the outputs ``[B, T, H, G, V]`` and the final state."""

    def run_in_dtype(problem: Problem, missing_mass: Tensor | None) -> tuple[Tensor, State, Tensor]:
        loop = KernelTokenLoop(problem, missing_mass)
        y = loop.run()
        return y.to(problem.v.dtype), loop.state(), loop.precision_lost

    return run_with_float64_fallback(run_in_dtype, problem)


def read(problem: Problem) -> Tensor:
    """Read ``problem.q [B, T, H, G, K]`` from the state without writing."""

    def run_in_dtype(problem: Problem, missing_mass: Tensor | None) -> tuple[Tensor, State, Tensor]:
        no_keys, no_values = problem.k[:, :0], problem.v[:, :0]
        loop = KernelTokenLoop(dataclasses.replace(problem, k=no_keys, v=no_values), missing_mass)
        loop.replay()
        q = problem.q.transpose(1, 2)  # [B, H, T, G, K]
        y = loop.read(q.flatten(2, 3)).unflatten(2, q.shape[2:4])
        return y.transpose(1, 2).to(problem.v.dtype), loop.problem.state, loop.precision_lost

    return run_with_float64_fallback(run_in_dtype, problem)[0]
