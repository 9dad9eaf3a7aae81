"""Kernel delta rule: a matrix over a kernel's features, as one triangular system.

The dual form is W_t = Σ_(i≤t) (a_t/a_i) u_i φ(k_i)ᵀ with a = cumprod(α). The error a·p − b·v of
the prediction p = W_(t−1) φ(k_t) is written to row t (AM 38–42)::

    u_t = b η_t v_t − a η_t Σ_(i<t) (a_(t−1)/a_i) κ₁(w_t, k_i) u_i
    y_t = Σ_(i≤t) (a_t/a_i) κ₂(q_t, k_i) u_i

with κ₁ = κ₂ and w = k without a probe. A probe defines κ₁ and w, and its rate replaces a η in the
sum. The system is (I + B) U = C with a strictly lower triangular B, solved by blocks of tokens. One
product with κ₂ follows. The state is the KU cache. The derivation is in
``docs/design/kernel-delta.md``.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from recollect.choices.features.base import Kernel
from recollect.choices.runtime import can_read_values
from recollect.engines.base import Engine
from recollect.engines.common.kernel_precision import (
    min_mass,
    possible_loss,
    precision_error,
    relative_tolerance,
)
from recollect.engines.common.problem import Problem, state_dtype
from recollect.engines.kernel.blockwise import Spec, apply_rows, solve_rows
from recollect.state.kernel_rows import KernelRows, append_rows
from recollect.state.state import State

if TYPE_CHECKING:
    from recollect.recipe.recipe import Recipe

__all__ = ["KernelDeltaRule"]

BLOCK = 64
"""Number of tokens per block. The rows of a block over all keys take a few megabytes."""
STEEP = 256.0
"""Limit of the sum of log decays inside a block, for five decimals in float32."""


class KernelDeltaRule(Engine):
    """Delta rule over a kernel's features, as one triangular system."""

    name = "kernel_delta_rule"

    def unsupported_reasons(self, recipe: Recipe) -> list[str]:
        if not recipe.uses_kernel_rows:
            return ["the memory stores no row per key"]
        reasons: list[str] = []
        if not recipe.memory.linear:
            reasons.append(f"{recipe.memory.title} is not linear in its weights")
        affine, probe, algorithm = recipe.bias.affine, recipe.bias.probe, recipe.algorithm
        if affine is None:
            reasons.append(f"the error of {recipe.bias.title} is not affine in the prediction")
        if recipe.context.horizon != 1:
            reasons.append(f"{recipe.context.title} writes to a row more than once")
        if algorithm.recursion != "none":
            reasons.append(f"the momentum of {algorithm.title} continues to write to every row")
        if algorithm.uses_normalized_steps:
            reasons.append(f"{algorithm.title} scales gradients by their effect on the prediction")
        if algorithm.batch_size > 1:
            reasons.append("gradients of an inner batch are taken at its start, not at every token")
        if probe is not None and probe.normalize == "rms":
            reasons.append("the RMS norm of an erased value is not linear in the rows")
        return reasons

    def describe(self, recipe: Recipe) -> str:
        bias = recipe.bias
        sees = bias.probe is not None or (bias.is_affine and bias.sees_prediction)
        system = "block substitution over the keys, " if sees else ""
        return f"{system}{'softmax ' if _normalized(recipe) else ''}attention over rows, KU cache"

    def run(self, problem: Problem) -> tuple[Tensor, State]:
        B, T, H, G, _ = problem.q.shape
        if T == 0 or B == 0:
            return problem.v.new_zeros(B, T, H, G, problem.v.shape[-1]), problem.final_state()
        call = _Call(problem)
        u = call.rows()
        y = call.outputs(u)
        if problem.token_mask is not None:
            y = torch.where(problem.token_mask[..., None, None, None], y, 0.0)
        return y.to(problem.v.dtype), call.state(u)


def _normalized(recipe: Recipe) -> bool:
    return recipe.memory.read.normalize == "sum"


def _fold(x: Tensor) -> Tensor:
    """Reshape ``[B, T, H, ...]`` to ``[B·H, T, ...]``."""
    return x.transpose(1, 2).flatten(0, 1).contiguous()


def _mass(dual: KernelRows) -> Tensor:
    """Return the log mass of the state's keys ``[B·H, n]``, −inf for no mass."""
    present = dual.mask[..., None] & (dual.mass > 0)
    return _fold(torch.where(present, torch.where(present, dual.mass, 1.0).log(), -torch.inf))


class _Call:
    """Solver of one problem, with batch and heads merged into one axis."""

    def __init__(self, problem: Problem) -> None:
        recipe, state = problem.recipe, problem.state
        assert state.kernel_rows is not None and isinstance(recipe.features, Kernel)
        self.problem, self.recipe = problem, recipe
        self.kernel, self.dual = recipe.features, state.kernel_rows
        self.dtype = state_dtype(problem.q, problem.k, problem.v)
        self.B, self.T, self.H, self.K = problem.k.shape
        self.n = self.dual.k.shape[1]
        self.keys = _fold(torch.cat([self.dual.k, problem.k.to(self.dtype)], dim=1))
        self.block = problem.chunk_size or BLOCK
        self.total, self.steep = self._decays(), False
        if self.total is not None and self.dtype is not torch.float64:
            sums = functional.pad(self.total, (0, -self.T % self.block), mode="replicate")
            sums = sums.unflatten(1, (-1, self.block))
            # Without access to values, decays are assumed to be steep.
            self.steep = not can_read_values(sums) or bool(
                (sums[..., 0] - sums[..., -1]).amax() > STEEP
            )

    def _spread(self) -> Tensor:
        """Return the largest possible range of one query's log similarities, in float64."""
        probe, spread = self.recipe.bias.probe, self.keys.new_zeros(())
        other = None if probe is None else probe.kernel
        query_like = [self.problem.q, self.keys]
        if probe is not None and probe.at == "token":
            query_like.append(self.problem.rates["probe"])
        longest = torch.stack([x.detach().to(self.dtype).norm(dim=-1).amax() for x in query_like])
        key = self.keys.detach().norm(dim=-1).amax()
        for kernel in (self.kernel, self.kernel if other is None else other):
            a, b = kernel.exponent(self.K) or (1.0, 1.0)
            spread = torch.maximum(spread, 2 * (abs(a) * longest.amax() * key + abs(b) * key**2))
        return spread.double()

    def _decays(self) -> Tensor | None:
        """Return the cumulative log decay after every token ``[B·H, T]``, or ``None``."""
        if self.recipe.retention.decay is None:
            return None
        logs = self.problem.rates["log_decay"].double()
        # The clamp leaves at most e^−1000 of the largest similarity over the smallest: 0.
        logs = torch.maximum(logs, -self._spread() - 1000.0)
        if self.problem.token_mask is not None:
            logs = torch.where(self.problem.token_mask[..., None], logs, 0.0)
        return _fold(logs).cumsum(1)

    def _gone(self) -> Tensor:
        """Return whether α is 0 at a later token, for the state and for every new key."""
        erases = self.problem.rates["log_decay"].isneginf()
        if self.problem.token_mask is not None:
            erases = erases & self.problem.token_mask[..., None]
        count = functional.pad(erases.long().cumsum(1), (0, 0, 1, 0))  # [B, 1 + T, H]
        return count < count[:, -1:]

    def logs(self, normalize: bool) -> Tensor | None:
        """Return the log mass of the keys ``[N, n + T]`` at time 0, or ``None`` if all are 1.

        Without normalisation the rows of the state include their decay, and only new keys count.
        """
        N, dtype = self.keys.shape[0], self.dtype
        past = _mass(self.dual) if normalize else self.keys.new_zeros(N, self.n)
        if self.total is not None:
            return torch.cat([past.double(), -self.total], dim=1)
        plain = not normalize or self.n == 0 or (can_read_values(past) and bool((past == 0).all()))
        return None if plain else torch.cat([past, past.new_zeros(N, self.T)], dim=1).to(dtype)

    def past(self, normalize: bool) -> Tensor:
        """Return the rows of the state ``[N, n, V]``, divided by their mass if normalised."""
        rows, mass = self.dual.rows[0], self.dual.mass
        if normalize and self.recipe.retention.decay is not None:
            empty = mass <= 0
            rows = rows / torch.where(empty, 1.0, mass).unsqueeze(-1)
        return _fold(rows)

    def query_decay(self, *, strict: bool) -> Tensor | None:
        """Return the log decay at every token ``[N, T]``, without its own decay if ``strict``."""
        decay = self.recipe.retention.decay
        if self.total is None or decay is None:
            return None
        if not strict or decay.when == "before":
            return self.total
        return torch.cat([torch.zeros_like(self.total[:, :1]), self.total[:, :-1]], dim=1)

    def rows(self) -> Tensor:
        """Return u of the new tokens ``[N, T, V]``."""
        problem, recipe, rates = self.problem, self.recipe, self.problem.rates
        affine, probe, algorithm = recipe.bias.affine, recipe.bias.probe, recipe.algorithm
        assert affine is not None
        a, b = affine
        lr = rates["lr"]
        k = problem.k.to(self.dtype)
        if algorithm.rate_depends_on_key:
            x = k.unsqueeze(-2)
            lr = algorithm.rate(lr, self.kernel.kappa(x, x)[..., 0, 0], a)
        if "window" in rates:  # one association of weight γ is a step of η γ
            lr = lr * rates["window"][..., 0]
        write = _fold(b * lr.unsqueeze(-1) * problem.v.to(self.dtype))
        if probe is None and a == 0:
            return write
        scale, kernel, x, normalize = a * lr, self.kernel, k, _normalized(recipe)
        heads = 1
        if probe is not None:
            scale, heads = a * rates["erase"], probe.heads
            kernel = kernel if probe.kernel is None else probe.kernel
            normalize = probe.normalize == "sum"
            x = rates["probe"].to(self.dtype) if probe.at == "token" else k
        scale = _fold(scale.unsqueeze(-1))  # [N, T, 1]
        if heads > 1:
            mix = problem.params["mix"].to(self.dtype)
            scale = scale * mix.repeat(self.B, 1)[:, None]
            x = x.transpose(1, 2).flatten(0, 1).flatten(1, 2)
        else:
            x = _fold(x)
        spec = Spec(
            kernel=kernel, normalize=normalize, strict=True, heads=heads, block=self.block,
            steep=self.steep,
        )  # fmt: skip
        logs, query_decay = self.logs(normalize), self.query_decay(strict=True)
        self._refuse(spec, x, logs, query_decay)
        return solve_rows(spec, x, self.keys, scale, write, self.past(normalize), logs, query_decay)

    def outputs(self, u: Tensor) -> Tensor:
        """Return y ``[B, T, H, G, V]`` from the rows of the new tokens ``[N, T, V]``."""
        q = self.problem.q.to(self.dtype)
        G = q.shape[3]
        normalize, exponent = _normalized(self.recipe), self.kernel.exponent(self.K)
        u = torch.cat([self.past(normalize), u], dim=1) if self.n else u
        if (
            normalize
            and exponent is not None
            and exponent[1] == 0
            and self.total is None
            and not self.n
        ):
            y = functional.scaled_dot_product_attention(
                q.flatten(2, 3).transpose(1, 2),
                self.keys.unflatten(0, (self.B, self.H)),
                u.unflatten(0, (self.B, self.H)),
                is_causal=True,
                scale=exponent[0],
                enable_gqa=G > 1,
            )
            return y.transpose(1, 2).unflatten(2, (self.H, G))
        x = q.transpose(1, 2).flatten(0, 1).flatten(1, 2)  # [N, T·G, K]
        spec = Spec(
            kernel=self.kernel, normalize=normalize, strict=False, heads=G, block=self.block,
            steep=self.steep,
        )  # fmt: skip
        logs, query_decay = self.logs(normalize), self.query_decay(strict=False)
        self._refuse(spec, x, logs, query_decay)
        y = apply_rows(spec, x, self.keys, u, logs, query_decay)
        y = y.unflatten(0, (self.B, self.H)).unflatten(2, (self.T, G))
        return y.transpose(1, 2)

    def _refuse(
        self, spec: Spec, x: Tensor, logs: Tensor | None, query_decay: Tensor | None
    ) -> None:
        """Raise an error if a read needs rows of the state below the precision of its dtype."""
        if not spec.normalize or self.total is None or not self.n:
            return
        lacking = possible_loss(self.dual)
        # The largest mass of every memory is at least the mass of its newest key.
        newest = self.dual.mass.amax(1).amin().clamp_max(1.0).double().log()
        excess = (
            self._spread()
            + math.log(self.n * min_mass(self.dtype) / relative_tolerance(self.dtype))
            - newest
        )
        if not bool(lacking.any() & (excess > 0)):
            return
        with torch.no_grad():
            share = lacking / torch.where(self.dual.mass > 0, self.dual.mass, 1.0)
            share = functional.pad(_fold(share), (0, self.T)).to(self.dtype)
            counted = apply_rows(spec, x, self.keys, share.unsqueeze(-1), logs, query_decay)
            if self.problem.token_mask is not None:
                token_mask = self.problem.token_mask.repeat_interleave(self.H, dim=0)
                counted = counted * token_mask.repeat_interleave(spec.heads, dim=1).unsqueeze(-1)
            if bool((counted > relative_tolerance(self.dtype)).any()):
                raise precision_error(self.problem)

    def state(self, u: Tensor) -> State:
        """Return the state with old and new rows, decayed to the end."""
        problem, old = self.problem, self.dual
        rows = u.unflatten(0, (self.B, self.H)).transpose(1, 2)
        mass = torch.ones_like(rows[..., 0])
        if self.total is not None:
            total = self.total.unflatten(0, (self.B, self.H)).transpose(1, 2)  # [B, T, H]
            end = total[:, -1:]
            fade, all_of = (end - total).exp().to(self.dtype), end.exp().to(self.dtype)
            floor, gone = min_mass(self.dtype), self._gone()
            rows = rows * fade.unsqueeze(-1)
            mass = torch.where(gone[:, 1:], 0.0, fade.clamp_min(floor))
            is_erased = gone[:, :1] | (old.mass == 0)
            old = KernelRows(
                k=old.k,
                rows=(old.rows[0] * all_of.unsqueeze(-1),),
                mass=torch.where(is_erased, 0.0, (old.mass * all_of).clamp_min(floor)),
                mask=old.mask,
            )
        mask = torch.ones(self.B, self.T, dtype=torch.bool, device=rows.device)
        new = KernelRows(k=problem.k.to(self.dtype), rows=(rows,), mass=mass, mask=mask)
        return problem.final_state(kernel_rows=append_rows(old, new, problem.lengths))
