"""The reference for memories over a kernel's features: rows by key, one token at a time.

It follows `docs/design/kernel-delta.md`.

Weights that read features are rows u by key z, W φ(x) = Σ_j u_j κ(z_j, x) (`dual`). A gradient of
such a map is δ φ(k_i)ᵀ, δ the gradient of its output: it adds to the row of association i. All
rows that may ever be written stand in one array from the start, zero until they are, so a token
is one step of::

    g_t = Σ_i γ_i δ_i e_iᵀ,   S_t = θ_t S_(t−1) − η_t g_t,   A_t = α_t A_(t−1) + S_t

on rows, and of the same on the other maps' weights. δ is taken by autograd.

A normalised read divides what such a map gives by the mass of what it sees, and no step: W φ(x)
is Σ_j κ(z_j, x) u_j / Σ_j m_j κ(z_j, x), and row i moves by δ_i, as in attention.
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
from recollect.engines.common.decayed_keys import counts, least, with_enough_digits
from recollect.engines.common.problem import Problem, join, wants_gradient
from recollect.state.kernel_rows import KernelRows, append_rows
from recollect.state.state import State

__all__ = ["KernelTokenLoop", "likeness"]

Rows = list[Tensor]
Mass = tuple[Tensor, Tensor | None]  # of keys in a normaliser, and what of it is lacking


def likeness(
    kernel: Kernel, x: Tensor, keys: Tensor, mass: Tensor, lacking: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """κ(x, z_j) / Σ_j mass_j κ(x, z_j) for ``x [..., M, K]`` and keys ``[..., N, K]``.

    Args:
        mass: of the keys ``[..., N]``, 0 where a key is not seen (`decayed_keys`).
        lacking: what their rows and masses may lack, likewise.

    Returns:
        The weights ``[..., M, N]``, 0 where no key is seen; whether what is lacking counts.
    """
    weight = mass.unsqueeze(-2)
    seen = weight > 0
    logs = torch.where(seen, kernel.log_kappa(x, keys), -torch.inf)
    top = logs.amax(-1, keepdim=True) if logs.shape[-1] else logs.sum(-1, keepdim=True)
    top = torch.where(top.isfinite(), top, 0.0).detach()
    weights = torch.where(seen, (logs - top).exp(), 0.0)
    total = (weights * weight).sum(-1, keepdim=True)
    missing = None
    if lacking is not None:
        missing = (weights * lacking.unsqueeze(-2)).sum(-1, keepdim=True)
    lost = (seen.any(-1, keepdim=True) & counts(total, keys.shape[-2], missing)).any()
    empty = total == 0
    return torch.where(empty, 0.0, weights / torch.where(empty, 1.0, total)), lost


class KernelTokenLoop:
    """The recursion over tokens, for B rows and H memories at once.

    N counts the rows of the state and one for every buffered or new token.

    Attributes:
        U, D: A now: rows ``[B, H, N, out]`` of maps that read features, and the other maps.
        mass: what each key adds to a normaliser ``[B, H, N]``, 0 where nothing of it is left.
        lacking: what rows and masses may lack, likewise, or ``None``.
        lost: whether any of that, or of what the dtype cuts off, counted in what was read.
    """

    def __init__(self, problem: Problem, lacking: Tensor | None = None) -> None:
        recipe, state = problem.recipe, problem.state
        assert state.kernel_rows is not None
        assert isinstance(recipe.features, Kernel) and isinstance(recipe.memory, Stack)
        self.problem, self.recipe, self.kernel = problem, recipe, recipe.features
        self.memory, self.outer = recipe.memory, wants_gradient(problem)
        self.divides = recipe.memory.read.normalize == "sum"
        self.tokens = tokens = join(problem)
        self.b, self.c = recipe.algorithm.batch_size, recipe.context.horizon or 1
        self.first = [m.reads_features for m in recipe.memory.maps(0, problem.v.shape[-1])]
        dual, self.n0 = state.kernel_rows, state.kernel_rows.k.shape[1]
        self.keys = torch.cat([dual.k.to(tokens.k.dtype), tokens.k], dim=1).transpose(1, 2)
        count, B = len(tokens), tokens.k.shape[0]

        def spread(x: Tensor) -> Tensor:  # [B, n, H, ...] -> [B, H, N, ...]
            later = x.new_zeros(B, count, *x.shape[2:])
            return torch.cat([x, later], dim=1).transpose(1, 2)

        self.U = [spread(u) for u in dual.rows]
        self.D = list(state.weights)
        dense, names = state.algorithm_state, recipe.algorithm.slots
        self.SU = {name: [spread(u) for u in dual.slots[name]] for name in names}
        self.SD = {name: list(dense.get(name, ())) for name in names}
        self.mass = spread(torch.where(dual.mask[..., None], dual.mass, 0.0))
        self.lacking = None if lacking is None else spread(lacking)
        self.lost = torch.zeros((), dtype=torch.bool, device=tokens.k.device)
        self.count = state.position - state.position % self.b
        self.opened = state.position % self.b
        self._remember(torch.ones_like(self.count, dtype=torch.bool))

    # -- inner batches -------------------------------------------------------------------------

    def _remember(self, rows: Tensor) -> None:
        """Where ``rows [B]``: W° and the state are what stands now."""
        now = (self.U, self.D, self.SU, self.SD, self.mass, self.lacking)
        if not hasattr(self, "start"):
            self.start = now
            return
        U, D, SU, SD, mass, lacking = self.start

        def each(new: Sequence[Tensor], old: Sequence[Tensor]) -> Rows:
            return [_where(rows, a, b) for a, b in zip(new, old, strict=True)]

        self.start = (
            each(now[0], U),
            each(now[1], D),
            {n: each(self.SU[n], SU[n]) for n in SU},
            {n: each(self.SD[n], SD[n]) for n in SD},
            _where(rows, now[4], mass),
            None if lacking is None or now[5] is None else _where(rows, now[5], lacking),
        )

    def _row_of(self, j: int) -> Tensor:
        """Which row association j writes to, one-hot ``[B, N]``.

        Buffered associations of closed inner batches have theirs in the state, newest last.
        """
        buffered = self.tokens.buffered
        own = torch.full_like(self.count, self.n0 + j)
        back = buffered - self.opened - j  # > 0: written before the open batch began
        place = torch.where(back > 0, self.n0 - back, own)
        N = self.keys.shape[2]
        steps = torch.arange(N, device=place.device)
        return (steps == place[:, None]).to(self.keys.dtype)

    # -- reading -------------------------------------------------------------------------------

    def seen(self, kernel: Kernel, x: Tensor, mass: Mass, *, divides: bool) -> Tensor:
        """What ``x [B, H, M, K]`` weighs each row by, ``[B, H, M, N]``."""
        if not divides:
            return kernel.kappa(x, self.keys)
        shares, lost = likeness(kernel, x, self.keys, *mass)
        self.lost = self.lost | lost
        return shares

    def measure(self, x: Tensor, U: Rows, D: Rows, mass: Mass, taps: Rows) -> Tensor:
        """M(x): ``[B, H, M, V]``; each tap is added to what one map reads from the features."""
        seen = self.seen(self.kernel, x, mass, divides=self.divides)
        rows, others, extra = iter(U), iter(D), iter(taps)
        weights = [next(rows) if first else next(others) for first in self.first]

        def apply(index: int, h: Tensor) -> Tensor:
            if self.first[index]:
                return h @ weights[index] + next(extra)
            return h @ weights[index].transpose(-1, -2)

        return self.memory.compute(apply, seen, x, self.problem.params)

    def read(self, q: Tensor) -> Tensor:
        """What queries ``[B, H, G, K]`` read now."""
        q = q.to(self.keys.dtype)
        taps = [u.new_zeros(()) for u in self.U]
        return self.measure(q, self.U, self.D, (self.mass, self.lacking), taps)

    # -- the recursion -------------------------------------------------------------------------

    def _gradients(self, j: int, U: Rows, D: Rows, mass: Mass) -> tuple[Rows, Rows]:
        """g_t on rows and on the other maps, at W°."""
        low, tokens = max(j - self.c + 1, 0), self.tokens
        weight = tokens.valid[:, None, low : j + 1].to(tokens.v.dtype)
        if "window" in tokens.rates:
            weight = weight * tokens.rates["window"][:, j][..., : j + 1 - low].flip(-1)
        if not self.recipe.algorithm.uses_normalized_steps:
            return self._weighed(low, j + 1, weight, U, D, mass)
        total: list[Tensor] = []
        for i in range(low, j + 1):
            one = torch.ones_like(weight[..., :1])
            rows, others = self._weighed(i, i + 1, one, U, D, mass)
            scale = weight[..., i - low] * self._share(i, rows, others, U, D, mass)
            scaled = [scale[..., None, None] * g for g in (*rows, *others)]
            total = [a + b for a, b in zip(total, scaled, strict=True)] if total else scaled
        return total[: len(U)], total[len(U) :]

    def _share(self, i: int, rows: Rows, others: Rows, U: Rows, D: Rows, mass: Mass) -> Tensor:
        """ρ of association i ``[B, H]`` from its gradients: a row δ is δ φ(k)ᵀ, of |δ|² κ(k, k)."""
        tokens, bias = self.tokens, self.recipe.bias
        k, v = (x[:, i : i + 1].transpose(1, 2) for x in (tokens.k, tokens.v))
        prediction = self.measure(k, U, D, mass, [u.new_zeros(()) for u in U])
        error = bias.error(prediction, v, tokens.numbers_of(bias, i, i + 1))
        gain = (
            sum((g.square().sum((-2, -1)) for g in rows), torch.zeros_like(error[:, :, 0, 0]))
            * self.kernel.kappa(k, k)[..., 0, 0]
        )
        gain = sum((g.square().sum((-2, -1)) for g in others), gain)
        assert bias.target is not None
        at = (self.memory, prediction, bias.target * v, k, self.problem.params)
        return polyak_scale_at(*at, error=error, gain=gain.unsqueeze(-1))[:, :, 0]

    def _weighed(
        self, low: int, stop: int, weight: Tensor, U: Rows, D: Rows, mass: Mass
    ) -> tuple[Rows, Rows]:
        """Gradients of associations ``low`` to ``stop`` in one sum."""
        tokens, bias = self.tokens, self.recipe.bias
        k, v = (x[:, low:stop].transpose(1, 2) for x in (tokens.k, tokens.v))
        gates = tokens.numbers_of(bias, low, stop)
        place = torch.stack([self._row_of(i) for i in range(low, stop)], dim=1)  # [B, m, N]
        with torch.enable_grad():
            points = inner_leaves(D, outer=self.outer)
            m = stop - low
            taps = [u.new_zeros(*u.shape[:2], m, u.shape[-1]).requires_grad_() for u in U]
            prediction = self.measure(k, U, points, mass, taps)
            if bias.defines_loss:
                target, cotangent = (bias.loss(prediction, v, gates) * weight).sum(), None
            else:
                target = prediction
                cotangent = bias.error(prediction, v, gates) * weight.unsqueeze(-1)
            gradients = torch.autograd.grad(
                target,
                [*taps, *points],
                cotangent,
                create_graph=self.outer,
                materialize_grads=True,
            )
        if not self.outer:
            # Where a map's output is the prediction, its δ is the error itself, with its history.
            gradients = tuple(d.detach() for d in gradients)
        deltas = [torch.einsum("bmn,bhmo->bhno", place, d) for d in gradients[: len(U)]]
        return deltas, list(gradients[len(U) :])

    def _erased(self, j: int, U: Rows, mass: Mass) -> Tensor:
        """What the memory holds at the probe's keys, ``[B, H, V]``."""
        probe, tokens = self.recipe.bias.probe, self.tokens
        assert probe is not None
        w = tokens.k[:, j].unsqueeze(2)  # [B, H, J, K]
        if probe.at == "token":
            w = tokens.rates["probe"][:, j]
            w = w if probe.heads > 1 else w.unsqueeze(2)
        kernel = self.kernel if probe.kernel is None else probe.kernel
        seen = self.seen(kernel, w, mass, divides=probe.normalize == "sum")
        if probe.heads > 1:
            mix = self.problem.params["mix"].to(seen.dtype)  # [H, J]
            seen = (mix.unsqueeze(-1) * seen).sum(2, keepdim=True)
        reads = (seen @ U[0]).squeeze(2)
        if probe.normalize == "rms":
            reads = reads * (reads.square().mean(-1, keepdim=True) + NORM_EPS).rsqrt()
        return reads

    def _rate(self, j: int) -> Tensor:
        """η_t ``[B, H, 1, 1]``."""
        lr, algorithm, affine = self.tokens.rates["lr"][:, j], self.recipe.algorithm, None
        if algorithm.rate_depends_on_key:
            affine = self.recipe.bias.affine
            assert affine is not None
            k = self.tokens.k[:, j].unsqueeze(-2)
            lr = algorithm.rate(lr, self.kernel.kappa(k, k)[..., 0, 0], affine[0])
        return lr[..., None, None]

    def advance(self, j: int, live: Tensor) -> None:
        """Token j: where ``live [B]``, move rows, weights and mass."""
        recipe, rates = self.recipe, self.tokens.rates
        self._remember(live & (self.count % self.b == 0))
        decay, alpha = recipe.retention.decay, torch.ones_like(self.mass[..., :1, None])
        if decay is not None:
            alpha = rates["log_decay"][:, j].exp()[..., None, None]
        U, D, mass = list(self.start[0]), list(self.start[1]), self.start[4:]
        probe = recipe.bias.probe
        if decay is not None and decay.when == "before":
            D = [alpha * d for d in D]
            # A mean over rows is the same after all of them decay: α divides out, even where it
            # is 0.
            divides = self.divides if probe is None else probe.normalize == "sum"
            U = U if divides else [alpha * u for u in U]
        if probe is not None:
            assert recipe.bias.affine is not None
            a, b = recipe.bias.affine
            erased = rates["erase"][:, j].unsqueeze(-1) * self._erased(j, U, mass)
            step = b * rates["lr"][:, j].unsqueeze(-1) * self.tokens.v[:, j] - a * erased
            moves = [self._row_of(j)[:, None, :, None] * step.unsqueeze(2)]
            others: Rows = []
        else:
            deltas, dense = self._gradients(j, U, D, mass)
            eta = self._rate(j)
            moves, others = [-eta * g for g in deltas], [-eta * g for g in dense]
        for name in self.SU:
            theta = rates["momentum"][:, j][..., None, None]
            moves = [theta * s + g for s, g in zip(self.SU[name], moves, strict=True)]
            others = [theta * s + g for s, g in zip(self.SD[name], others, strict=True)]
            self.SU[name] = [_where(live, a, s) for a, s in zip(moves, self.SU[name], strict=True)]
            self.SD[name] = [_where(live, a, s) for a, s in zip(others, self.SD[name], strict=True)]
        own = self._row_of(j)[:, None]  # [B, 1, N]
        self.U = [_where(live, alpha * u + g, u) for u, g in zip(self.U, moves, strict=True)]
        self.D = [_where(live, alpha * d + g, d) for d, g in zip(self.D, others, strict=True)]
        self.mass = _where(live, self._decayed(j, alpha[..., 0]) + own, self.mass)
        if self.lacking is not None:
            self.lacking = _where(live, alpha[..., 0] * self.lacking, self.lacking)
        self.count = self.count + live

    def _decayed(self, j: int, alpha: Tensor) -> Tensor:
        """Mass after token j's decay: a key stays unless α = 0 and no step reaches its row."""
        if self.recipe.retention.decay is None:
            return self.mass
        mass = (alpha * self.mass).clamp_min(least(self.mass.dtype))
        mass = torch.where(self.mass > 0, mass, 0.0)
        if self.SU:  # momentum is a step of every row
            return mass
        low = max(j - self.c + 1, 0)
        valid = self.tokens.valid[:, low : j + 1].to(mass.dtype)
        rows = torch.stack([self._row_of(i) for i in range(low, j + 1)], dim=1)  # [B, m, N]
        reached = (rows * valid.unsqueeze(-1)).sum(1).bool().unsqueeze(1)
        nothing = self.tokens.rates["log_decay"][:, j].isneginf().unsqueeze(-1)  # [B, H, 1]
        return torch.where(nothing & ~reached, 0.0, mass)

    def replay(self) -> None:
        """The open inner batch, out of the buffer."""
        tokens, buffered = self.tokens, self.tokens.buffered
        for j in range(buffered):
            live = tokens.valid[:, j] & (j >= buffered - self.opened)
            if bool(live.any()):
                self.advance(j, live)

    def run(self) -> Tensor:
        """Replay the open batch, then every new token; outputs of the new ones."""
        problem, buffered = self.problem, self.tokens.buffered
        self.replay()
        outputs: list[Tensor] = []
        for j in range(buffered, len(self.tokens)):
            live = self.tokens.valid[:, j]
            self.advance(j, live)
            y = self.read(problem.q[:, j - buffered])
            outputs.append(torch.where(live.view(-1, 1, 1, 1), y, 0.0))
        if outputs:
            return torch.stack(outputs, dim=1)
        B, _, H, G, _ = problem.q.shape
        return problem.v.new_zeros(B, 0, H, G, problem.v.shape[-1])

    def state(self) -> State:
        """The state after all tokens: that of the open batch's start, and its raw tokens."""
        problem, old = self.problem, self.problem.state.kernel_rows
        assert old is not None
        self._remember(self.count % self.b == 0)
        U, D, SU, SD, mass, _ = self.start
        # Rows of closed batches: those of the state, then of tokens before the last border.
        n0, buffered = self.n0, self.tokens.buffered
        closed = problem.end - problem.end % self.b
        before = problem.state.position - self.opened

        def back(x: Tensor) -> Tensor:
            return x.transpose(1, 2)

        def cut(x: Tensor) -> Tensor:  # the new rows aligned left, per row of the batch
            x = back(x)[:, n0:]
            if buffered == 0:
                return x
            index = (buffered - self.opened)[:, None] + torch.arange(x.shape[1], device=x.device)
            index = index.clamp_max(max(x.shape[1] - 1, 0))
            return x.gather(1, index.view(*index.shape, *(1,) * (x.dim() - 2)).expand_as(x))

        standing = KernelRows(
            k=back(self.keys)[:, :n0],
            rows=tuple(back(u)[:, :n0] for u in U),
            mass=back(mass)[:, :n0],
            mask=old.mask,
            slots={n: tuple(back(u)[:, :n0] for u in SU[n]) for n in SU},
        )
        fresh = KernelRows(
            k=cut(self.keys),
            rows=tuple(cut(u) for u in U),
            mass=cut(mass),
            mask=torch.zeros(*old.mask.shape[:1], len(self.tokens), dtype=torch.bool).to(old.mask),
            slots={n: tuple(cut(u) for u in SU[n]) for n in SU},
        )
        dual = append_rows(standing, fresh, closed - before)
        slots = {name: tuple(SD[name]) for name in SD} if D else {}
        return problem.final_state(weights=tuple(D), algorithm_state=slots, kernel_rows=dual)


def _where(rows: Tensor, new: Tensor, old: Tensor) -> Tensor:
    return torch.where(rows.view(-1, *(1,) * (old.dim() - 1)), new, old)


def run(problem: Problem) -> tuple[Tensor, State]:
    """Outputs ``[B, T, H, G, V]`` and the final state.

    Raises:
        ValueError: float64 does not hold what a decay has left and what is read needs.
    """

    def in_one_dtype(problem: Problem, lacking: Tensor | None) -> tuple[Tensor, State, Tensor]:
        loop = KernelTokenLoop(problem, lacking)
        y = loop.run()
        return y.to(problem.v.dtype), loop.state(), loop.lost

    return with_enough_digits(in_one_dtype, problem)


def read(problem: Problem) -> Tensor:
    """Read ``problem.q [B, T, H, G, K]`` from the state without writing."""

    def in_one_dtype(problem: Problem, lacking: Tensor | None) -> tuple[Tensor, State, Tensor]:
        none, nothing = problem.k[:, :0], problem.v[:, :0]
        loop = KernelTokenLoop(dataclasses.replace(problem, k=none, v=nothing), lacking)
        loop.replay()
        q = problem.q.transpose(1, 2)  # [B, H, T, G, K]
        y = loop.read(q.flatten(2, 3)).unflatten(2, q.shape[2:4])
        return y.transpose(1, 2).to(problem.v.dtype), loop.problem.state, loop.lost

    return with_enough_digits(in_one_dtype, problem)[0]
