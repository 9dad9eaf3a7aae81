"""Numeric inputs of the linear engine: features of tokens, gates, and initial states."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from recollect.engines.common.problem import Problem, state_dtype

__all__ = ["LinearProblem", "Past", "linear_problem"]


@dataclass(frozen=True, kw_only=True)
class Past:
    """Associations before the first token that a window may include."""

    k: Tensor  # [B, (c − 1) n, H, F]
    v: Tensor  # [B, (c − 1) n, H, V]
    mask: Tensor  # [B, (c − 1) n], whether an association is present


@dataclass(frozen=True, kw_only=True)
class LinearProblem:
    """Matrix memory with an error a·prediction − b·value, in the state's dtype.

    Per head and token, let D_t be the decay, P_t = A_{t−1} (D_t A_{t−1} if ``decays_first``) and i
    the associations of the window::

        g_t = Σ_i γ_(t,i) (a P_t k_i − b v_i) k_iᵀ
        S_t = θ_t S_{t−1} − η_t g_t           (momentum_on="value": on the part −b v kᵀ only)
        A_t = D_t A_{t−1} + σ_t S_t           (no momentum: D_t A_{t−1} − η_t g_t)
        A_t = D_t A_{t−1} − a (P_t w_t) e_tᵀ + η_t b v_t k_tᵀ       with a probe w and direction e
        A_t = D_t A_{t−1} − η_t (a P_t w_t − b v_t) k_tᵀ            with a probe w alone
        (with momentum, these steps are the −η_t g_t of S_t)
        y_t = A_t q_t
    """

    q: Tensor  # [B, T, H, G, F]
    k: Tensor  # [B, T, H, F]
    v: Tensor  # [B, T, H, V]
    lr: Tensor  # η [B, T, H]; also [B, T, H, V] until the engine folds it into the values
    A0: Tensor  # [B, H, V, F]
    S0: Tensor | None = None  # [B, H, V, F], or None without momentum
    # [B, T, H], or [B, T, H, F] over columns of A; ≤ 0, −inf erases A; for
    # `recollect.engines.linear.scan` only, [B, T, H, V, F] over entries
    log_decay: Tensor | None = None
    log_decay_value: Tensor | None = None  # [B, T, H, V] over rows of A; requires a = 0
    # factor a ≥ 0 [H, V, F] of a log decay over entries, with log_decay [B, T, H, V] as the other
    # factor
    decay_scale: Tensor | None = None
    momentum: Tensor | None = None  # θ in [0, 1), [B, T, H]
    outer_lr: Tensor | None = None  # σ ≥ 0, [B, T, H], or None for 1; used with momentum
    window: Tensor | None = None  # γ [B, T, H, c], entry m for association t − m n
    # n, the number of tokens of this problem that are one token of the caller. Only the first of
    # them decays, and only the output of the last is used.
    steps_per_token: int = 1
    past: Past | None = None  # associations before the first token, or None
    probe: Tensor | None = None  # w, [B, T, H, F], or None
    erase: Tensor | None = None  # e, [B, T, H, F], or None
    # [B, T], False only on the right. Masked tokens change nothing.
    token_mask: Tensor | None = None
    affine: tuple[float, float] = (1.0, 1.0)  # (a, b)
    decays_first: bool = False  # whether the error is measured after the decay
    momentum_on: str = "gradient"  # "gradient" or "value", used with momentum
    chunk_size: int | None = None  # tokens per chunk; does not affect results

    def tokens(self) -> dict[str, Tensor]:
        """Return the per-token tensors ``[B, T, ...]`` that are not ``None``, by name."""
        tensors = {
            "q": self.q,
            "k": self.k,
            "v": self.v,
            "lr": self.lr,
            "log_decay": self.log_decay,
            "log_decay_value": self.log_decay_value,
            "momentum": self.momentum,
            "outer_lr": self.outer_lr,
            "window": self.window,
            "probe": self.probe,
            "erase": self.erase,
        }
        return {name: x for name, x in tensors.items() if x is not None}

    def masked(self) -> LinearProblem:
        """Replace the values of masked tokens by neutral ones, which removes NaN."""
        if self.token_mask is None:
            return self
        masks = {
            n: self.token_mask.view(*self.token_mask.shape, *(1,) * (n - 2)) for n in range(3, 6)
        }
        return replace(
            self,
            **{
                name: torch.where(masks[x.dim()], x, 1.0 if name == "momentum" else 0.0)
                for name, x in self.tokens().items()
            },
        )

    def split(self, tokens: int) -> Iterator[LinearProblem]:
        """Split into runs of ``tokens`` tokens, all with the initial states of the sequence."""
        tensors = self.tokens() | (
            {} if self.token_mask is None else {"token_mask": self.token_mask}
        )
        # Use split: the gradient of a slice is as long as the sequence.
        runs = zip(*(x.split(tokens, dim=1) for x in tensors.values()), strict=True)
        return (replace(self, **dict(zip(tensors, run, strict=True))) for run in runs)


def linear_problem(problem: Problem, *, keeps_dtype: bool = False) -> LinearProblem:
    """Return the features, gates and states of a problem, in the state's dtype.

    If ``keeps_dtype``, q, k and v without features keep their dtype.
    """
    bound, rates, state = problem.bound, problem.rates, problem.state
    recipe, affine, decay, momentum_on = bound.recipe, bound.affine, bound.decay, bound.recursion
    has_momentum = momentum_on != "none"
    assert affine is not None  # LinearEngine.unsupported_reasons
    dtype = state_dtype(problem.q, problem.k, problem.v)
    # Only features use the positions of tokens.
    position = problem.positions() if bound.has_features else state.position
    if keeps_dtype and not bound.has_features:
        q, k, v = problem.q, problem.k, problem.v
    else:
        q = problem.phi(problem.q, "query", position)
        k = problem.phi(problem.k.unsqueeze(3), "key", position).squeeze(3)
        v = problem.v.to(dtype)
    lr = rates["lr"]
    if bound.rate_depends_on_key:
        lr = recipe.algorithm.rate(lr, k.square().sum(-1), affine[0])
    window = past = None
    if bound.horizon != 1:
        window, past = _window(problem, k)
    elif "window" in rates:
        # A weight γ of one association scales its step to η γ.
        lr = lr * (rates["window"] if lr.dim() == 4 else rates["window"][..., 0])
    log_decay = log_decay_value = decay_scale = None
    if decay is not None:
        log_decay = rates["log_decay"]
        if decay.per == "value" and log_decay.dim() == 4:
            log_decay, log_decay_value = None, log_decay
        elif decay.per == "key_value":
            log_decay_value = rates["log_decay_value"]
        elif decay.per == "entry" and decay.is_input_scaled:
            decay_scale = problem.params["decay_scale"].to(dtype)
    probe = erase = None
    if recipe.bias.probe is not None:
        probe, erase = _probe(problem, k, position)
    return LinearProblem(
        q=q,
        k=k,
        v=v,
        lr=lr,
        A0=state.weights[0].to(dtype),
        S0=state.algorithm_state["momentum"][0].to(dtype) if has_momentum else None,
        log_decay=log_decay,
        log_decay_value=log_decay_value,
        decay_scale=decay_scale,
        momentum=rates["momentum"] if has_momentum else None,
        outer_lr=rates.get("outer_lr") if has_momentum else None,
        window=window,
        steps_per_token=problem.steps_per_token,
        past=past,
        probe=probe,
        erase=erase,
        token_mask=problem.token_mask,
        affine=affine,
        decays_first=decay is not None and decay.when == "before",
        momentum_on="value" if momentum_on == "value" else "gradient",
        chunk_size=problem.chunk_size,
    )


def _probe(problem: Problem, k: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
    """Return the keys of predictions and the directions of their erasure."""
    probe, rates = problem.recipe.bias.probe, problem.rates
    assert probe is not None
    probe_keys = k
    if probe.at == "token":
        probe_keys = problem.phi(rates["probe"].unsqueeze(3), "key", position).squeeze(3)
    strength = rates["erase"] if rates["erase"].dim() == 4 else rates["erase"].unsqueeze(-1)
    return probe_keys, strength * (probe_keys if probe.write == "probe" else k)


def _window(problem: Problem, k: Tensor) -> tuple[Tensor, Past | None]:
    """Return the weights of a window, and its buffered associations."""
    horizon, buffer = problem.recipe.context.horizon, problem.state.buffer
    assert horizon is not None  # LinearEngine.unsupported_reasons
    window = problem.rates.get("window", k.new_ones(()).expand(*k.shape[:3], horizon))
    if buffer is None:
        return window, None
    steps = torch.arange(buffer.k.shape[1], device=k.device) - buffer.k.shape[1]
    position = (problem.state.position[:, None] + steps).clamp_min(0)
    past = problem.phi(buffer.k.unsqueeze(3), "key", position).squeeze(3)
    return window, Past(k=past, v=buffer.v.to(k.dtype), mask=buffer.mask)
