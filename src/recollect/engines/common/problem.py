"""The input of an engine: a recipe at known sizes, checked tensors, every number per token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from recollect.choices.bias.base import Bias
from recollect.choices.devices import constant
from recollect.choices.memory.base import Forward
from recollect.recipe.recipe import Recipe
from recollect.recipe.sized import SizedRecipe
from recollect.state.buffer import roll
from recollect.state.kernel_rows import KernelRows
from recollect.state.state import State

__all__ = [
    "Problem",
    "Tokens",
    "Weights",
    "as_matrix",
    "forward_of",
    "join",
    "resolve",
    "scaled",
    "state_dtype",
    "tensors",
    "wants_gradient",
]

Weights = list[Tensor]


def state_dtype(*tensors: Tensor) -> torch.dtype:
    """float64 when any input is float64, else float32: states never live in half precision."""
    for t in tensors:  # called often: no generator
        if t.dtype == torch.float64:
            return torch.float64
    return torch.float32


@dataclass(kw_only=True)  # made for every decoded token: frozen ones take five times as long
class Problem:
    """One call of an engine.

    Attributes:
        sized: the recipe, and how many memories of what size the caller asked for (a memory of ones
            is one more value channel in ``v``).
        plan: what the engine derived from that before any call (`Engine.plan`).
        q: queries by the memory they read, ``[B, T, H, G, K]``.
        k, v: ``[B, T, H, K]``, ``[B, T, H, V]``.
        rates: every number of the recipe by engine-side name (decays as logs), ``[B, T, H, ...]``.
        params: learned tensors ``[H, ...]``.
        lengths: real tokens per row ``[B]`` (the rest is padding on the right), or ``None``.
        places: ``[B, T]`` where each token stands in the caller's row, or ``None`` where it stands
            there as it does here. packed: whether rows are documents of the caller's only row.
        borders: ``[N + 1]``, of N documents that stand in the only row of q, k and v while lengths
            and states have a row for each; ``None`` where tokens have rows as these do.
        state: where to start.
        chunk_size: an execution detail, or ``None`` for the engine's own.
        sources: tensors that ``params`` were made of: what they hold decides what those are.
        steps_per_token: associations that stand as tokens of their own, so that features see the
            token's position.
        continues: whether anything will go on from the state after this call; where not, an engine
            may leave out what only that needs.
    """

    sized: SizedRecipe
    plan: Any = None
    q: Tensor
    k: Tensor
    v: Tensor
    rates: Mapping[str, Tensor]
    params: Mapping[str, Tensor]
    state: State
    lengths: Tensor | None = None
    places: Tensor | None = None
    packed: bool = False
    borders: Tensor | None = None
    chunk_size: int | None = None
    sources: Sequence[Tensor] = ()
    steps_per_token: int = 1
    continues: bool = True

    @property
    def recipe(self) -> Recipe:
        """The recipe."""
        return self.sized.recipe

    @property
    def live(self) -> Tensor | None:
        """``[B, T]``: which tokens are real, or ``None`` when all are."""
        # Made anew each time: a cached property takes a lock, at which torch.compile breaks.
        if self.lengths is None or self.borders is not None:
            return None
        steps = torch.arange(self.k.shape[1], device=self.k.device)
        return steps < self.lengths[:, None]

    @property
    def end(self) -> Tensor:
        """Position of each row after this call, ``[B]``."""
        seen = self.k.shape[1] if self.lengths is None else self.lengths
        return self.state.position + seen

    def place(self, row: int, token: int) -> tuple[int, int]:
        """Row and token as the caller counts them."""
        token //= self.steps_per_token
        if self.places is not None:
            token = int(self.places[row, token])
        return 0 if self.packed else row, token

    def phi(self, x: Tensor, side: str, position: Tensor) -> Tensor:
        """Lift ``x [B, T, H, N, K]`` in the state's dtype."""
        x = x.to(state_dtype(self.q, self.k, self.v))
        if not self.sized.lifts:
            return x
        if self.steps_per_token > 1:
            position = position // self.steps_per_token
        return self.recipe.features.phi(x, self.params, side, position)

    def after(
        self,
        *,
        weights: tuple[Tensor, ...] | None = None,
        slots: Mapping[str, tuple[Tensor, ...]] | None = None,
        dual: KernelRows | None = None,
        cache: Mapping[str, Tensor] | None = None,
    ) -> State:
        """The state after this call: position and buffer moved on, and what the engine changed."""
        end, old = self.end, self.state
        seen = None if self.lengths is not None or old.seen is None else old.seen + self.k.shape[1]
        buffer = roll(
            self.recipe,
            old.buffer,
            k=self.k,
            v=self.v,
            rates=self.rates,
            lengths=self.lengths,
            position=end,
            seen=seen,
        )
        return State(
            weights=old.weights if weights is None else weights,
            position=end,
            known=None if seen is None else (end, seen),
            sizes=old.sizes,
            slots=old.slots if slots is None else slots,
            buffer=buffer,
            dual=old.dual if dual is None else dual,
            ones=old.ones,
            log_scale=old.log_scale,
            written_by=self.sized.written,
            cache={} if cache is None else cache,
        )

    def positions(self) -> Tensor:
        """Index of each token (or association) in its document, ``[B, T]``, from 0."""
        if self.borders is not None:
            steps = torch.arange(self.k.shape[1], device=self.k.device)
            row = torch.searchsorted(self.borders[1:], steps, right=True)
            return (self.state.position[row] + steps - self.borders[row]).unsqueeze(0)
        first = self.state.position[:, None]
        if self.k.shape[1] == 1:
            return first
        return first + torch.arange(self.k.shape[1], device=self.k.device)


def _filled(value: float) -> Tensor:
    return torch.full((1, 1, 1), value, dtype=torch.float64)


def resolve(
    sized: SizedRecipe,
    gates: Mapping[str, Tensor],
    params: Mapping[str, Tensor],
    *,
    B: int,
    T: int,
    dtype: torch.dtype,
    device: torch.device,
) -> dict[str, Tensor]:
    """Every number a recipe needs as ``[B, T, H, ...]``, whether constant, param or gate.

    Args:
        sized: the recipe, and how many memories of what size.
        gates: by name.
        params: by name.
        B: rows.
        T: tokens.
        dtype: of the numbers.
        device: of the constants.
    """
    rates: dict[str, Tensor] = {}
    made: dict[float, Tensor] = {}
    for name, value in sized.constants.items():
        if value not in made:
            one = constant(_filled, value, device=device, dtype=dtype)
            made[value] = one.expand(B, T, sized.H)
        rates[name] = made[value]
    for name, engine_side, log in sized.statics:
        if name in params:
            x = params[name].to(dtype)
            rates[engine_side] = (x.log() if log else x).expand(B, T, *x.shape)
    for name, value in gates.items():
        rates[name] = value.to(dtype)
    if "log_lr" in rates:
        rates["lr"] = rates["log_lr"].exp()
    decay, scale = rates.get("log_decay"), rates.get("decay_scale")
    if decay is not None and scale is not None and decay.dim() == scale.dim():
        # A factored decay per channel is one number; per entry, its factors stay apart.
        rates["log_decay"] = scaled(decay, scale)
    return rates


def scaled(log_decay: Tensor, scale: Tensor) -> Tensor:
    """log α = ℓ a of a factored decay, whose factors are ℓ ≤ 0 and a ≥ 0.

    At ℓ = −inf everything is forgotten, unless a = 0: α = e^(ℓ a) = 0 and ∂α/∂a = ℓ α = 0. From
    −inf itself autograd would make a NaN of the latter.
    """
    return log_decay.clamp_min(-1e30) * scale


# -- tokens joined to the buffered ones, as the reference reads them ------------------------------


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """Buffered and new tokens in one run; the first ``buffered`` are the buffer's.

    ``phi`` are the lifted keys, or the keys themselves where features are infinitely many.
    """

    k: Tensor
    phi: Tensor
    v: Tensor
    rates: Mapping[str, Tensor]
    valid: Tensor
    buffered: int

    def numbers_of(self, bias: Bias, low: int, stop: int) -> dict[str, Tensor]:
        """A bias's numbers of associations ``low`` to ``stop``, ``[B, H, n, 1 or V]`` by name.

        Args:
            bias: whose numbers.
            low: the first association. stop: the one after the last.
        """
        numbers: dict[str, Tensor] = {}
        for name in bias.numbers:
            x = self.rates[name][:, low:stop].transpose(1, 2)
            numbers[name] = x if x.dim() == 4 else x.unsqueeze(-1)
        return numbers

    def __len__(self) -> int:
        return self.k.shape[1]


def join(problem: Problem) -> Tokens:
    """The open buffer's tokens, then the new ones."""
    buffer = problem.state.buffer
    dtype = state_dtype(problem.q, problem.k, problem.v)
    k, v, rates = problem.k.to(dtype), problem.v.to(dtype), dict(problem.rates)
    B, T = k.shape[:2]
    valid = torch.ones(B, T, dtype=torch.bool, device=k.device)
    if problem.live is not None:
        valid = problem.live
    buffered = 0
    if buffer is not None:
        buffered = buffer.k.shape[1]
        k = torch.cat([buffer.k.to(dtype), k], dim=1)
        v = torch.cat([buffer.v.to(dtype), v], dim=1)
        for name, x in rates.items():
            rates[name] = torch.cat([buffer.rates[name].to(dtype), x], dim=1)
        valid = torch.cat([buffer.mask, valid], dim=1)
        # Empty slots weigh nothing, but a loss must be finite there: 0 may lie outside a range.
        fills = problem.sized.fills
        for name, x in rates.items():
            there = valid.view(*valid.shape, *(1,) * (x.dim() - 2))
            rates[name] = torch.where(there, x, fills.get(name, 0.0))
    steps = torch.arange(buffered + T, device=k.device) - buffered
    position = (problem.state.position[:, None] + steps).clamp_min(0)
    phi = k
    if problem.sized.features:
        phi = problem.phi(k.unsqueeze(3), "key", position).squeeze(3)
    return Tokens(k=k, phi=phi, v=v, rates=rates, valid=valid, buffered=buffered)


def forward_of(problem: Problem) -> Forward:
    """The memory's forward at the problem's sizes."""
    recipe = problem.recipe
    F = recipe.features.dim(problem.k.shape[-1])
    return recipe.memory.function(F, problem.v.shape[-1])


def as_matrix(w: Tensor) -> Tensor:
    """Weights ``[B, H, *shape]`` as ``[B, H, out, in]``: vectors are one row, tensors flattened."""
    if w.dim() == 4:
        return w
    if w.dim() < 4:
        return w.unsqueeze(2) if w.dim() == 3 else w[..., None, None]
    return w.flatten(3)


# -- the outer gradient, only where asked ---------------------------------------------------------


def tensors(problem: Problem) -> list[Tensor]:
    """Every tensor of the problem."""
    parts = [problem.q, problem.k, problem.v, *problem.rates.values(), *problem.params.values()]
    parts += problem.state.tensors()
    return parts if problem.lengths is None else [*parts, problem.lengths]


def wants_gradient(problem: Problem) -> bool:
    """Whether anybody can ask for an outer gradient; otherwise no graph is kept."""
    if torch.is_grad_enabled():
        for x in tensors(problem):  # called often: no generator
            if x.requires_grad:
                return True
    return False
