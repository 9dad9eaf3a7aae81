"""The linear engine's numeric problem: lifted tokens, numbers by token, starting states."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from recollect.engines.common.problem import Problem, state_dtype

__all__ = ["LinearProblem", "Past", "linear_problem"]


@dataclass(frozen=True, kw_only=True)
class Past:
    """Associations before the first token, which a window may still reach.

    Attributes:
        k: ``[B, c − 1, H, F]``. v: ``[B, c − 1, H, V]``.
        mask: ``[B, c − 1]``, which of them are there.
    """

    k: Tensor
    v: Tensor
    mask: Tensor


@dataclass(frozen=True, kw_only=True)
class LinearProblem:
    """A matrix memory under an error a·prediction − b·value; all numbers in the state's dtype.

    Per head and token, with D_t the decay, P_t = A_{t−1} (``before``: D_t A_{t−1}) and i the
    associations of the window::

        g_t = Σ_i γ_(t,i) (a P_t k_i − b v_i) k_iᵀ
        S_t = θ_t S_{t−1} − η_t g_t           (momentum_on="value": on the part −b v kᵀ only)
        A_t = D_t A_{t−1} + S_t               (no momentum: D_t A_{t−1} − η_t g_t)
        A_t = D_t A_{t−1} − a (P_t w_t) e_tᵀ + η_t b v_t k_tᵀ       with a probe w and direction e
        y_t = A_t q_t

    Attributes:
        q: ``[B, T, H, G, F]``. k: ``[B, T, H, F]``. v: ``[B, T, H, V]``.
        lr: η ``[B, T, H]``.
        A0: ``[B, H, V, F]``. S0: the same; ``None`` without momentum.
        log_decay: ``[B, T, H]``, or ``[B, T, H, F]`` over columns of A; ≤ 0, −inf forgets all.
            For `recollect.engines.linear.scan` alone: ``[B, T, H, V, F]`` over entries.
        log_decay_value: ``[B, T, H, V]`` over rows of A; needs a = 0.
        decay_scale: a ≥ 0 ``[H, V, F]``: log_decay ``[B, T, H, V]`` is the other factor of a decay
            over entries.
        momentum: θ in [0, 1), ``[B, T, H]``.
        window: γ ``[B, T, H, c]``, entry m for association t − m; past: those before the first
            token, ``None`` for none.
        probe, erase: w and e, ``[B, T, H, F]``, or neither.
        live: ``[B, T]``; False only on the right. Dead tokens move nothing.
        affine: (a, b).
        before: whether the error is measured after the decay.
        momentum_on: ``"gradient"`` or ``"value"``, where there is momentum.
        chunk_size: tokens per chunk; no influence on results.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    lr: Tensor
    A0: Tensor
    S0: Tensor | None = None
    log_decay: Tensor | None = None
    log_decay_value: Tensor | None = None
    decay_scale: Tensor | None = None
    momentum: Tensor | None = None
    window: Tensor | None = None
    past: Past | None = None
    probe: Tensor | None = None
    erase: Tensor | None = None
    live: Tensor | None = None
    affine: tuple[float, float] = (1.0, 1.0)
    before: bool = False
    momentum_on: str = "gradient"
    chunk_size: int | None = None

    def tokens(self) -> dict[str, Tensor]:
        """The numbers that each token brings, ``[B, T, ...]`` by name: those that are there."""
        every = {
            "q": self.q,
            "k": self.k,
            "v": self.v,
            "lr": self.lr,
            "log_decay": self.log_decay,
            "log_decay_value": self.log_decay_value,
            "momentum": self.momentum,
            "window": self.window,
            "probe": self.probe,
            "erase": self.erase,
        }
        return {name: x for name, x in every.items() if x is not None}

    def masked(self) -> LinearProblem:
        """The same, where padded tokens have numbers that do nothing.

        They may hold anything, and NaN times zero would reach their neighbours.
        """
        if self.live is None:
            return self
        masks = {n: self.live.view(*self.live.shape, *(1,) * (n - 2)) for n in range(3, 6)}
        return replace(
            self,
            **{
                name: torch.where(masks[x.dim()], x, 1.0 if name == "momentum" else 0.0)
                for name, x in self.tokens().items()
            },
        )

    def split(self, tokens: int) -> Iterator[LinearProblem]:
        """Runs of so many tokens, each with the states at the start of the whole."""
        every = self.tokens() | ({} if self.live is None else {"live": self.live})
        # Split at once: the gradient of a slice is as long as the sequence.
        runs = zip(*(x.split(tokens, dim=1) for x in every.values()), strict=True)
        return (replace(self, **dict(zip(every, run, strict=True))) for run in runs)


def linear_problem(problem: Problem, *, keeps_dtype: bool = False) -> LinearProblem:
    """Lifted keys and queries, rates, decays and states of a problem, in the state's dtype.

    Args:
        problem: the problem.
        keeps_dtype: whether q, k and v keep their dtype if the recipe has no features.
    """
    bound, rates, state = problem.bound, problem.rates, problem.state
    recipe, affine, decay, momentum_on = bound.recipe, bound.affine, bound.decay, bound.recursion
    moves = momentum_on != "none"
    assert affine is not None  # linear.refuses
    dtype = state_dtype(problem.q, problem.k, problem.v)
    # Only features read the positions of tokens.
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
        # One association weighed by γ is a step of η γ.
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
        S0=state.algorithm_state["momentum"][0].to(dtype) if moves else None,
        log_decay=log_decay,
        log_decay_value=log_decay_value,
        decay_scale=decay_scale,
        momentum=rates["momentum"] if moves else None,
        window=window,
        past=past,
        probe=probe,
        erase=erase,
        live=problem.token_mask,
        affine=affine,
        before=decay is not None and decay.when == "before",
        momentum_on="value" if momentum_on == "value" else "gradient",
        chunk_size=problem.chunk_size,
    )


def _probe(problem: Problem, k: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
    """Where predictions are measured and in which direction they are erased."""
    probe, rates = problem.recipe.bias.probe, problem.rates
    assert probe is not None
    w = k
    if probe.at == "token":
        w = problem.phi(rates["probe"].unsqueeze(3), "key", position).squeeze(3)
    rate = rates["erase"] if rates["erase"].dim() == 4 else rates["erase"].unsqueeze(-1)
    return w, rate * (w if probe.write == "probe" else k)


def _window(problem: Problem, k: Tensor) -> tuple[Tensor, Past | None]:
    """Weights of a window's associations, and the buffered ones among these."""
    horizon, buffer = problem.recipe.context.horizon, problem.state.buffer
    assert horizon is not None  # linear.refuses
    window = problem.rates.get("window", k.new_ones(()).expand(*k.shape[:3], horizon))
    if buffer is None:
        return window, None
    steps = torch.arange(buffer.k.shape[1], device=k.device) - buffer.k.shape[1]
    position = (problem.state.position[:, None] + steps).clamp_min(0)
    past = problem.phi(buffer.k.unsqueeze(3), "key", position).squeeze(3)
    return window, Past(k=past, v=buffer.v.to(k.dtype), mask=buffer.mask)
