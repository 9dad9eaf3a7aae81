"""Input of an engine: a recipe at known sizes, validated tensors, and all rates per token."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import cast

import torch
from torch import Tensor

from recollect.choices.bias.base import Bias
from recollect.choices.memory.base import Forward
from recollect.choices.overrides import check_shape
from recollect.choices.runtime import cached_constant
from recollect.recipe.bound import BoundRecipe
from recollect.recipe.recipe import Recipe
from recollect.state.buffer import update_buffer
from recollect.state.kernel_rows import KernelRows
from recollect.state.state import HostPosition, State
from recollect.typing import Init

__all__ = [
    "JoinedTokens",
    "Problem",
    "Weights",
    "as_matrix",
    "factored_log_decay",
    "join_buffer",
    "loss_gradients",
    "memory_forward",
    "memory_read",
    "problem_tensors",
    "requires_grad",
    "resolve_rates",
    "state_dtype",
]

Weights = list[Tensor]


def state_dtype(*problem_tensors: Tensor) -> torch.dtype:
    """Return float64 if any input is float64, else float32; states are never in half precision."""
    for t in problem_tensors:  # a loop is faster than a generator here
        if t.dtype == torch.float64:
            return torch.float64
    return torch.float32


_NO_STATE = cast(State, None)


@dataclass(kw_only=True)  # not frozen: faster to construct per decoded token
class Problem:
    """One call: a bound recipe, its inputs, and the state before the first token.

    `recollect.recall` and layers construct it from the caller's arguments. `recollect.functional`
    packs it into dense sequences with padding on the right, resolves its rates, and groups its
    queries. Then an engine runs it.
    """

    # recipe at the caller's sizes (a memory of ones is one more channel of v), its engine, and the
    # engine's plan
    bound: BoundRecipe
    q: Tensor  # queries [B, T, Hq, K], grouped by memory for engines, [B, T, H, G, K]
    k: Tensor  # keys [B, T, H, K], or with an axis of associations after H
    v: Tensor  # values [B, T, H, V], or with an axis of associations after H
    gates: Mapping[str, Tensor] = field(default_factory=dict)  # as in `recollect.recall`
    params: Mapping[str, Tensor] = field(default_factory=dict)  # as in `recollect.recall`
    # all rates of the recipe by engine-side name (decays as logs), [B, T, H, ...]
    rates: Mapping[str, Tensor] = field(default_factory=dict)
    # entries of the next state's cache, in addition to those of the engine
    cache: Mapping[str, Tensor] = field(default_factory=dict)
    # State before the first token. Engines always receive one.
    state: State = _NO_STATE  # `recollect.functional.recall` sets a missing state

    # arguments of `recollect.recall`: initial_memory to output_final_state
    initial_memory: Init | None = None
    attention_mask: Tensor | None = None
    causal: bool = True
    chunk_size: int | None = None
    output_final_state: bool = True

    # Boundaries [N + 1] of N documents in the only sequence. Lengths and states have one element
    # per document. Only operators of flash-linear-attention receive them.
    cu_seqlens: Tensor | None = None
    # number of real tokens per sequence [B], if sequences have padding
    lengths: Tensor | None = None
    # position of each token in the caller's sequence [B, T], if it differs
    source_index: Tensor | None = None
    # whether sequences are documents of the caller's only sequence
    rows_are_documents: bool = False
    # Tensors from which params are computed. Their versions identify the params.
    param_sources: Sequence[Tensor] = ()
    # Whether gates and params come from a layer's projections, which were validated on the prompt.
    # Their names, shapes and ranges are not checked again.
    trusted: bool = False
    # Number of associations per token that the engine runs as separate tokens. Features use the
    # position of the token.
    steps_per_token: int = 1

    @property
    def recipe(self) -> Recipe:
        """The recipe."""
        return self.bound.recipe

    @property
    def uses_final_state(self) -> bool:
        """Whether the state after the call is read; otherwise engines may skip parts of it."""
        return self.output_final_state or not self.causal

    @property
    def token_mask(self) -> Tensor | None:
        """Mask of the real tokens ``[B, T]``, or ``None`` if all tokens are real."""
        # Not cached: a cached property takes a lock, which breaks graphs of torch.compile.
        if self.lengths is None or self.cu_seqlens is not None:
            return None
        steps = torch.arange(self.k.shape[1], device=self.k.device)
        return steps < self.lengths[:, None]

    @property
    def end(self) -> Tensor:
        """Position of each batch element after this call, ``[B]``."""
        return self.state.position + (self.k.shape[1] if self.lengths is None else self.lengths)

    def caller_index(self, row: int, token: int) -> tuple[int, int]:
        """Return row and token as indices of the caller's tensors."""
        token //= self.steps_per_token
        if self.source_index is not None:
            token = int(self.source_index[row, token])
        return 0 if self.rows_are_documents else row, token

    def phi(self, x: Tensor, side: str, position: Tensor | None = None) -> Tensor:
        """Lift ``x [B, T, H, N, K]`` in the state's dtype. Default: `positions`."""
        x = x.to(state_dtype(self.q, self.k, self.v))
        if not self.bound.has_features:
            return x
        if position is None:
            position = self.positions()
        if self.steps_per_token > 1:
            position = position // self.steps_per_token
        features, shape = self.recipe.features, (*x.shape[:-1], self.bound.num_features)
        y = features.phi(x, self.params, side, position)
        return check_shape(f"{features.title}.phi", y, shape, "F = dim(K) features [B, T, H, N, F]")

    def final_state(
        self,
        *,
        weights: tuple[Tensor, ...] | None = None,
        algorithm_state: Mapping[str, tuple[Tensor, ...]] | None = None,
        kernel_rows: KernelRows | None = None,
        cache: Mapping[str, Tensor] | None = None,
    ) -> State:
        """Return the state after this call: new position and buffer, and the engine's tensors."""
        end, old, position = self.end, self.state, self.state.host_position
        if position is not None:
            position = None if self.lengths is not None else position + self.k.shape[1]
        buffer = None
        if self.uses_final_state and self.recipe.buffer_size != 0:
            buffer = update_buffer(
                self.recipe,
                old.buffer,
                k=self.k,
                v=self.v,
                rates=self.rates,
                lengths=self.lengths,
                position=end,
                host_position=position,
            )
        return State(
            weights=old.weights if weights is None else weights,
            position=end,
            position_on_host=None if position is None else HostPosition(end, position),
            sizes=old.sizes,
            algorithm_state=old.algorithm_state if algorithm_state is None else algorithm_state,
            buffer=buffer,
            kernel_rows=old.kernel_rows if kernel_rows is None else kernel_rows,
            normalizer=old.normalizer,
            log_scale=old.log_scale,
            recipe_id=self.bound.recipe_id,
            cache={**self.cache, **(cache or {})},
        )

    def map(self, change: Callable[[Tensor], Tensor]) -> Problem:
        """Return the problem with ``change`` applied to the tensors that an engine reads."""
        return replace(
            self,
            q=change(self.q),
            k=change(self.k),
            v=change(self.v),
            rates={name: change(x) for name, x in self.rates.items()},
            params={name: change(x) for name, x in self.params.items()},
            state=self.state.map(change),
            cache={name: change(x) for name, x in self.cache.items()},
            lengths=None if self.lengths is None else change(self.lengths),
        )

    def positions(self) -> Tensor:
        """Index of each token (or association) in its document, ``[B, T]``, from 0."""
        if self.cu_seqlens is not None:
            steps = torch.arange(self.k.shape[1], device=self.k.device)
            row = torch.searchsorted(self.cu_seqlens[1:], steps, right=True)
            return (self.state.position[row] + steps - self.cu_seqlens[row]).unsqueeze(0)
        first = self.state.position[:, None]
        if self.k.shape[1] == 1:
            return first
        return first + torch.arange(self.k.shape[1], device=self.k.device)


def _constant(value: float) -> Tensor:
    return torch.full((1, 1, 1), value, dtype=torch.float64)


def resolve_rates(
    bound: BoundRecipe,
    gates: Mapping[str, Tensor],
    params: Mapping[str, Tensor],
    *,
    B: int,
    T: int,
    dtype: torch.dtype,
    device: torch.device,
) -> dict[str, Tensor]:
    """Return all rates of a recipe as ``[B, T, H, ...]``: constants, params and gates."""
    rates: dict[str, Tensor] = {}
    by_value: dict[float, Tensor] = {}
    for name, value in bound.constants.items():
        if value not in by_value:
            constant = cached_constant(_constant, value, device=device, dtype=dtype)
            by_value[value] = constant.expand(B, T, bound.H)
        rates[name] = by_value[value]
    for name, engine_side, log in bound.learned_rates:
        if name in params:
            x = params[name].to(dtype)
            rates[engine_side] = (x.log() if log else x).expand(B, T, *x.shape)
    for name, value in gates.items():
        rates[name] = value.to(dtype)
    if "log_lr" in rates:
        rates["lr"] = rates["log_lr"].exp()
    decay, scale = rates.get("log_decay"), rates.get("decay_scale")
    if decay is not None and scale is not None and decay.dim() == scale.dim():
        # A factored decay per channel is multiplied here. Per entry, engines receive both factors.
        rates["log_decay"] = factored_log_decay(decay, scale)
    return rates


def factored_log_decay(log_decay: Tensor, scale: Tensor) -> Tensor:
    """Return log α = ℓ a of a factored decay, whose factors are ℓ ≤ 0 and a ≥ 0.

    For ℓ = −inf, α = 1 if a = 0. Otherwise α = e^(ℓ a) = 0 and ∂α/∂a = ℓ α = 0, where autograd
    would return NaN without the clamp.
    """
    return log_decay.clamp_min(-1e30) * scale


# -- buffered and new tokens as one sequence -------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class JoinedTokens:
    """Buffered and new tokens as one sequence."""

    # keys and values
    k: Tensor
    phi: Tensor  # lifted keys, or the keys if the number of features is infinite
    v: Tensor
    rates: Mapping[str, Tensor]  # rates by name
    valid: Tensor  # mask of the real tokens
    buffered: int  # number of buffered tokens, which come first
    window: int  # number c of tokens in a window
    steps_per_token: int  # number n of associations of a token, which are tokens here

    def in_window(self, j: int) -> slice:
        """Return the associations in the window of j: the same association of c tokens."""
        n = self.steps_per_token
        first = j - (self.window - 1) * n
        return slice(first if first >= 0 else j % n, j + 1, n)

    def bias_gates(self, bias: Bias, associations: slice) -> dict[str, Tensor]:
        """Return a bias's gates for some associations, ``[B, H, m, 1 or V]``."""
        gates: dict[str, Tensor] = {}
        for name in bias.quantity_axes:
            x = self.rates[name][:, associations].transpose(1, 2)
            gates[name] = x if x.dim() == 4 else x.unsqueeze(-1)
        return gates

    def __len__(self) -> int:
        return self.k.shape[1]


def join_buffer(problem: Problem) -> JoinedTokens:
    """Return the buffered tokens followed by the new tokens."""
    buffer = problem.state.buffer
    dtype = state_dtype(problem.q, problem.k, problem.v)
    k, v, rates = problem.k.to(dtype), problem.v.to(dtype), dict(problem.rates)
    B, T = k.shape[:2]
    valid = torch.ones(B, T, dtype=torch.bool, device=k.device)
    if problem.token_mask is not None:
        valid = problem.token_mask
    buffered = 0
    if buffer is not None:
        buffered = buffer.k.shape[1]
        k = torch.cat([buffer.k.to(dtype), k], dim=1)
        v = torch.cat([buffer.v.to(dtype), v], dim=1)
        for name, x in rates.items():
            rates[name] = torch.cat([buffer.rates[name].to(dtype), x], dim=1)
        valid = torch.cat([buffer.mask, valid], dim=1)
        # Empty slots have weight 0, but their loss must be finite and 0 may be out of range.
        fills = problem.bound.padding_values
        for name, x in rates.items():
            mask = valid.view(*valid.shape, *(1,) * (x.dim() - 2))
            rates[name] = torch.where(mask, x, fills.get(name, 0.0))
    phi = k
    if problem.bound.num_features and problem.bound.has_features:
        steps = torch.arange(-buffered, T, device=k.device)
        position = (problem.state.position[:, None] + steps).clamp_min(0)
        phi = problem.phi(k.unsqueeze(3), "key", position).squeeze(3)
    return JoinedTokens(
        k=k,
        phi=phi,
        v=v,
        rates=rates,
        valid=valid,
        buffered=buffered,
        window=problem.recipe.context.horizon or 1,
        steps_per_token=problem.steps_per_token,
    )


def memory_forward(problem: Problem) -> Forward:
    """Return the forward function of the memory at the problem's sizes."""
    recipe = problem.recipe
    F = recipe.features.dim(problem.k.shape[-1])
    return recipe.memory.bind(F, problem.v.shape[-1])


def memory_read(problem: Problem) -> Forward:
    """Return the function of weights and queries that reads the memory."""
    if problem.recipe.memory.read.transposed:
        return lambda weights, x, raw, params: x @ weights[0]
    return memory_forward(problem)


def as_matrix(w: Tensor) -> Tensor:
    """Reshape weights ``[B, H, *shape]`` to ``[B, H, out, in]``; a vector becomes one row."""
    if w.dim() == 4:
        return w
    if w.dim() < 4:
        return w.unsqueeze(2) if w.dim() == 3 else w[..., None, None]
    return w.flatten(3)


# -- gradients -------------------------------------------------------------------------------------


def loss_gradients(
    bias: Bias,
    prediction: Tensor,  # [B, H, m, V]
    v: Tensor,
    gates: Mapping[str, Tensor],
    weight: Tensor | None,  # [B, H, m]
    points: Sequence[Tensor],
    *,
    outer: bool,
) -> list[Tensor]:
    """Return the gradients of Σ_i weight_i ℓ(prediction_i, v_i), with a graph if ``outer``."""
    if bias.defines_loss:
        loss = bias.loss(prediction, v, gates)
        target, grad_output = (loss if weight is None else loss * weight).sum(), None
    else:
        target, grad_output = prediction, bias.error(prediction, v, gates)
        grad_output = grad_output if weight is None else grad_output * weight.unsqueeze(-1)
    gradients = torch.autograd.grad(
        target, points, grad_output, create_graph=outer, materialize_grads=True
    )
    return list(gradients)


def problem_tensors(problem: Problem) -> list[Tensor]:
    """Return all tensors of the problem."""
    parts = [problem.q, problem.k, problem.v, *problem.rates.values(), *problem.params.values()]
    parts += problem.state.tensors()
    return parts if problem.lengths is None else [*parts, problem.lengths]


def requires_grad(problem: Problem) -> bool:
    """Return whether an outer gradient can be taken; otherwise no graph is recorded."""
    if torch.is_grad_enabled():
        for x in problem_tensors(problem):  # a loop is faster than a generator here
            if x.requires_grad:
                return True
    return False
