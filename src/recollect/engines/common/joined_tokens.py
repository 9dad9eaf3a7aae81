"""The tokens of a problem joined to the buffered ones, as the reference reads them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from recollect.choices.bias.base import Bias
from recollect.choices.memory.base import Forward
from recollect.engines.common.problem import Problem, state_dtype

__all__ = [
    "Tokens",
    "Weights",
    "as_matrix",
    "forward_of",
    "join",
    "tensors",
    "wants_gradient",
]

Weights = list[Tensor]


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """Buffered and new tokens in one run; the first ``held`` are the buffer's.

    ``phi`` are the lifted keys, or the keys themselves where features are infinitely many.
    """

    k: Tensor
    phi: Tensor
    v: Tensor
    rates: Mapping[str, Tensor]
    valid: Tensor
    held: int

    def numbers_of(self, bias: Bias, low: int, stop: int) -> dict[str, Tensor]:
        """A bias's numbers of associations ``low`` to ``stop``, ``[B, H, n, 1 or V]`` by name.

        Args:
            bias: whose numbers.
            low: the first association. stop: the one after the last.
        """
        found: dict[str, Tensor] = {}
        for name in bias.numbers:
            x = self.rates[name][:, low:stop].transpose(1, 2)
            found[name] = x if x.dim() == 4 else x.unsqueeze(-1)
        return found

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
    held = 0
    if buffer is not None:
        held = buffer.k.shape[1]
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
    steps = torch.arange(held + T, device=k.device) - held
    position = (problem.state.position[:, None] + steps).clamp_min(0)
    finite = problem.recipe.features.finite
    phi = problem.phi(k.unsqueeze(3), "key", position).squeeze(3) if finite else k
    return Tokens(k=k, phi=phi, v=v, rates=rates, valid=valid, held=held)


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
    found = [problem.q, problem.k, problem.v, *problem.rates.values(), *problem.params.values()]
    found += problem.state.tensors()
    return found if problem.lengths is None else [*found, problem.lengths]


def wants_gradient(problem: Problem) -> bool:
    """Whether anybody can ask for an outer gradient; otherwise no graph is kept."""
    if torch.is_grad_enabled():
        for x in tensors(problem):  # called often: no generator
            if x.requires_grad:
                return True
    return False
