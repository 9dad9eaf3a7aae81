"""`diagnose`: runs a layer on a sequence and measures its memory, head by head.

Inner batches run one after the other, by the engine of the layer. The memory is read at the keys of
each batch before and after the write. The loss is that of the predictions before the write. The
*effective step* is the fraction of the error that the write removed:

    s_t = ⟨p_before − p_after, e_t⟩ / ‖e_t‖²,    e_t = ∂ℓ/∂prediction before.

It is 0 if nothing was written, 1 if the error is gone, and above 2 if the write overshot. For
DeltaNet it is η‖k‖². It includes the writes of other tokens in the inner batch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from inspect import signature
from typing import Any, overload

import torch
from torch import Tensor, nn

from recollect.blocks.layers import MixerLayer, memory_layers
from recollect.choices.memory.base import Stack
from recollect.engines.common.problem import resolve_rates, state_dtype
from recollect.engines.deep.gradient_factors import Points
from recollect.engines.select import select_engine
from recollect.explanation.diagnosis import (
    ADVICE_SMALLER_STEPS,
    OVERSHOOT_LIMIT,
    Diagnosis,
    Fault,
    ModelDiagnosis,
    format_number,
)
from recollect.explanation.model_inputs import (
    MemoryRun,
    model_inputs,
    received_by_memory,
    received_tokens,
    refuse_composition,
)
from recollect.explanation.tangent import supports_recipe, top_eigenvalue
from recollect.functional.binding import bind
from recollect.layer.gates import stability_limit
from recollect.layer.inspection import InspectableLayer
from recollect.state.state import State

__all__ = ["Diagnosis", "Fault", "ModelDiagnosis", "diagnose"]

SATURATION = 0.01
"""Distance from the ends of a gate's range, in units of the range, at which it is saturated."""

MAX_RANKS = 256
"""Largest number of boundaries of inner batches at which singular values are computed."""


@overload
def diagnose(layer: InspectableLayer, x: Tensor) -> Diagnosis: ...
@overload
def diagnose(layer: nn.Module, x: Tensor | Sequence[int]) -> ModelDiagnosis: ...


@torch.no_grad()
def diagnose(layer: Any, x: Any) -> Diagnosis | ModelDiagnosis:
    """Run tokens through the memory of a layer, or of each layer of a model, and measure it.

    Works for every recipe. Inner batches are run one at a time (T/b calls of the engine), so at
    b = 1 this is much slower than the layer itself; a few hundred tokens are enough.

    Args:
        layer: a `MemoryLayer`, another layer with the interface
            `recollect.layer.inspection.InspectableLayer`, or a model that has some.
        x: tokens ``[B, T, d_model]``, as the layer receives them. For a model its input: token ids
            ``[B, T]`` or ``[T]``, without padding.

    Returns:
        The diagnosis of the layer, or those of all layers of the model.

    Raises:
        ValueError: x of another shape, dtype or device, or without a token.
        RecipeError: neither a layer with a memory nor a model that has some.

    Examples:
        >>> layer = rc.zoo.get("titans").build(d_model=8, num_heads=2)
        >>> diagnosis = rc.diagnose(layer, torch.randn(1, 6, 8))
        >>> sorted(diagnosis.memory), diagnosis.engine
        (['W1', 'W2'], 'deep')
    """
    if isinstance(layer, MixerLayer):
        refuse_composition("diagnose", layer)
    layers = memory_layers(layer, "diagnose")
    if "" not in layers:
        return _diagnose_model(layer, layers, model_inputs(layer, x))
    width = layer.memory_spec.d_model
    weights = [weight for weight in layer.parameters() if weight.is_floating_point()]
    if not isinstance(x, Tensor) or not x.is_floating_point():
        kind = str(x.dtype) if isinstance(x, Tensor) else type(x).__name__
        raise ValueError(f"x must be a floating-point tensor [B, T, {width}], not {kind}")
    if weights and all((x.dtype, x.device) != (w.dtype, w.device) for w in weights):
        raise ValueError(
            f"x is {x.dtype} on {x.device} and the layer {weights[0].dtype} on "
            f"{weights[0].device}: give x.to(that dtype and device)"
        )
    if x.dim() != 3 or not x.shape[0] or x.shape[-1] != width or not x.shape[1]:
        raise ValueError(f"x must have shape [B, T, {width}] with B and T ≥ 1, not {list(x.shape)}")
    return _DiagnosisRun(layer, x).run()


def _diagnose_model(
    model: nn.Module, layers: Mapping[str, nn.Module], inputs: Tensor
) -> ModelDiagnosis:
    """Run the model once, and diagnose each layer with the tokens that it received.

    The model may refuse values of a layer that are not finite. That layer is then the last one.
    """
    diagnoses: dict[str, Diagnosis] = {}
    refusal: ValueError | None = None
    options = {"use_cache": False} if "use_cache" in signature(model.forward).parameters else {}
    with received_tokens(layers) as calls:
        try:
            model(inputs, **options)
        except ValueError as error:
            refusal = error
    for name, layer, x in received_by_memory(layers, calls):
        diagnoses[name] = _DiagnosisRun(layer, x).run()
    if refusal is not None and all(x.first_fault is None for x in diagnoses.values()):
        raise refusal
    return ModelDiagnosis(model=type(model).__name__, layers=diagnoses)


def effective_rank(weight: Tensor) -> Tensor:
    """Return exp(−Σ p_i log p_i), p = σ / Σ σ of the singular values, of matrices ``[..., a, b]``.

    It is 0 for a matrix of zeros.
    """
    values = torch.linalg.svdvals(weight.double())
    total = values.sum(-1, keepdim=True)
    p = values / torch.where(total == 0, 1.0, total)
    rank = torch.special.entr(p).sum(-1).exp()
    return torch.where(total.squeeze(-1) == 0, 0.0, rank)


class _DiagnosisRun:
    """The memory of a layer during a diagnosis, and the curves so far."""

    def __init__(self, layer: Any, x: Tensor) -> None:
        self.layer, self.x = layer, x
        self.memory_run = run = MemoryRun(layer, x)
        self.spec, self.recipe = run.spec, run.spec.recipe
        self.q, self.k, self.v = run.inputs.q, run.inputs.k, run.inputs.v
        self.gates, self.params = run.inputs.gates, run.inputs.params
        self.batch_size = self.recipe.algorithm.batch_size
        self.T, self.H = x.shape[1], self.spec.num_kv_heads
        self.memory: dict[str, list[Tensor]] = {name: [] for name in self._map_names()}
        self.slots: dict[str, list[Tensor]] = {name: [] for name in self.recipe.algorithm.slots}
        self.positions: list[int] = []
        self.loss = torch.full((self.T, self.H), torch.nan)
        self.step = torch.full((self.T, self.H), torch.nan)
        self.error = torch.full((self.T, self.H), torch.nan)
        self.half_life: Tensor | None = None
        self.rank: dict[str, list[Tensor]] = {}
        self.rank_every = 1 + max(self.T // self.batch_size - 1, 0) // MAX_RANKS
        self.max_rank: dict[str, int] = {}
        self.curvature: list[Tensor] = []

    def _map_names(self) -> list[str]:
        recipe, K, V = self.recipe, self.spec.head_dim, self.spec.value_dim
        if recipe.nonparametric:
            return []
        if isinstance(recipe.memory, Stack):
            return [m.name for m in recipe.memory.maps(recipe.axes(K, V)["F"], V)]
        count = len(recipe.shapes(K, V))
        return [recipe.memory.weight_symbol] if count == 1 else [f"W{i}" for i in range(count)]

    def run(self) -> Diagnosis:
        """Run the sequence until its end or the first fault."""
        fault = self._check_inputs() or self._run_batches()
        multiple = self._limit_multiple()
        if multiple is not None:
            multiple = multiple.float()
            multiple = multiple if multiple.dim() == 3 else multiple.flatten(3).mean(-1)
            multiple = multiple.mean(0).cpu()
        return Diagnosis(
            recipe=self.recipe,
            engine=select_engine(self.recipe, self.spec.engine).engine.name,
            batch=self.batch_size,
            positions=torch.tensor(self.positions),
            memory={name: torch.stack(norms) for name, norms in self.memory.items() if norms},
            slots={name: torch.stack(norms) for name, norms in self.slots.items() if norms},
            rank={name: torch.stack(ranks) for name, ranks in self.rank.items()},
            max_rank=self.max_rank,
            half_life=self.half_life,
            error=self.error,
            loss=self.loss,
            step=self.step,
            limit_multiple=multiple,
            curvature=torch.stack(self.curvature) if self.curvature else None,
            saturated=self._saturated(),
            first_fault=fault,
        )

    def _check_inputs(self) -> Fault | None:
        """Return the first value that is not finite among the weights and inputs."""
        for name, weight in self.layer.named_parameters():
            if not weight.isfinite().all():
                cause = "a weight of the layer has diverged: train with less"
                return Fault(quantity=f"param {name}", cause=cause)
        gates = {f"gate {name}": gate for name, gate in self.gates.items()}
        logs = {f"gate {name}" for name in self.recipe.log_gates}
        faults: list[Fault] = []
        inputs = {"x": self.x, **gates, "q": self.q, "k": self.k, "v": self.v}
        for name, tensor in inputs.items():
            # A log of −inf is a decay or a rate of 0, which is valid.
            bad = ~(tensor < torch.inf) if name in logs else ~tensor.isfinite()
            if not bad.any():
                continue
            bad = bad.flatten(3).any(-1) if bad.dim() > 3 else bad  # [B, T, heads or channels]
            token = int(bad.flatten(2).any(-1).any(0).nonzero()[0])
            row = int(bad[:, token].flatten(1).any(-1).nonzero()[0])
            if name == "x":
                cause = "it comes from outside"
                return Fault(quantity=name, row=row, token=token, cause=cause)
            head = int(bad[row, token].nonzero()[0])
            gate = name.removeprefix("gate ") if name in gates else None
            cause = "its projection overflows"
            faults.append(
                Fault(quantity=name, row=row, token=token, head=head, gate=gate, cause=cause)
            )
        return min(faults, key=lambda fault: fault.token or 0, default=None)

    def _run_batches(self) -> Fault | None:
        """Run the inner batches, and return the first fault."""
        state = self.memory_run.recall(slice(0, 0), None)[1]
        self._record_norms(state)
        for start in range(0, self.T, self.batch_size):
            batch = slice(start, min(start + self.batch_size, self.T))
            prediction, rates = self._predict(batch, state)
            error, self.loss[batch] = self._error_and_loss(batch, prediction, rates)
            self.error[batch] = error.norm(dim=-1).mean((0, -1)).float().cpu()
            self._record_half_life(batch, rates)
            if supports_recipe(self.recipe):
                self.curvature.append(self._top_eigenvalue(batch, state))
            y, next_state = self.memory_run.recall(batch, state)
            fault = self._check_step(batch, y, next_state)
            if fault is not None:
                return fault
            if batch.stop - start == self.batch_size:  # an open batch has not written yet
                change = prediction - self._predict(batch, next_state)[0]
                size = error.square().sum(-1)
                removed = (change * error).sum(-1) / torch.where(size == 0, 1.0, size)
                step = torch.where(size == 0, torch.nan, removed).nanmean((0, -1))
                self.step[batch] = step.cpu()
                self._record_norms(next_state)
            state = next_state
        return None

    def _record_norms(self, state: State) -> None:
        self.positions.append(int(state.position[0]))
        scale = 1.0 if state.log_scale is None else state.log_scale.exp()

        def norm(w: Tensor) -> Tensor:  # [B, H, ...] -> [B, H]
            return w.reshape(*w.shape[:2], -1).norm(dim=-1)

        for norms, weight in zip(self.memory.values(), state.weights, strict=False):
            norms.append((scale * norm(weight)).mean(0).float().cpu())
        for name, weight in zip(self.memory, state.weights, strict=False):
            if weight.dim() == 4 and min(weight.shape[2:]) > 1:
                ranks, index = self.rank.setdefault(name, []), len(self.positions) - 1
                is_measured = index % self.rank_every == 0 or index == self.T // self.batch_size
                ranks.append(
                    effective_rank(weight).mean(0).float().cpu() if is_measured else ranks[-1]
                )
                self.max_rank[name] = min(weight.shape[2:])
        for name, slot in state.algorithm_state.items():
            total = torch.stack([norm(w).square() for w in slot]).sum(0).sqrt()
            self.slots[name].append((scale * total).mean(0).float().cpu())

    def _record_half_life(self, batch: slice, rates: Mapping[str, Tensor]) -> None:
        """Record −log 2 / log α, of the mean log α over channels and the batch."""
        if "log_decay" not in rates:
            return
        log_alpha, scale = rates["log_decay"], rates.get("decay_scale")
        if scale is not None and scale.dim() > log_alpha.dim():  # per entry of the memory
            log_alpha = log_alpha * scale.mean(-1)
        mean = log_alpha.flatten(2).unflatten(2, (self.H, -1)).mean((0, -1))
        if "log_decay_value" in rates:
            mean = mean + rates["log_decay_value"].flatten(3).mean((0, -1))
        if self.half_life is None:
            self.half_life = torch.full((self.T, self.H), torch.nan)
        self.half_life[batch] = (-math.log(2) / mean.clamp_max(-0.0)).abs().float().cpu()

    def _rates(self, batch: slice, dtype: torch.dtype) -> dict[str, Tensor]:
        """Return all rates of a batch as ``[B, t, H, ...]``."""
        B, t = self.k[:, batch].shape[:2]
        gates = {name: gate[:, batch] for name, gate in self.gates.items()}
        bound = bind(self.recipe, H=self.H, K=self.k.shape[-1], V=self.v.shape[-1])
        device = self.k.device
        return resolve_rates(bound, gates, self.params, B=B, T=t, dtype=dtype, device=device)

    def _features(self, keys: Tensor, state: State) -> Tensor:
        """Return φ of keys ``[B, t, H, n, K]`` that follow the state."""
        position = state.position[:, None] + torch.arange(keys.shape[1], device=keys.device)
        return self.recipe.features.phi(keys, self.params, "key", position)

    def _keys_and_values(self, batch: slice) -> tuple[Tensor, Tensor]:
        """Return keys and values of a batch, ``[B, t, H, n, ·]``."""
        k, v = self.k[:, batch], self.v[:, batch]
        if self.recipe.associations_per_token == 1:
            return k.unsqueeze(3), v.unsqueeze(3)
        return k, v

    def _predict(self, batch: slice, state: State) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the predictions ``[B, t, H, n, V]`` at the keys, and the rates."""
        recipe, (k, v) = self.recipe, self._keys_and_values(batch)
        dtype, (_, t, _, n, K) = state_dtype(k, v), k.shape
        rates = self._rates(batch, dtype)
        if not (recipe.features.finite and state.weights and recipe.context.horizon is not None):
            gates = {
                name: self.gates[name][:, batch].repeat_interleave(n, 1)
                for name in recipe.read_gates
                if name in self.gates
            }
            y = self.memory_run.read(k.transpose(2, 3).flatten(1, 2), gates, state)
            return y.unflatten(1, (t, n)).transpose(2, 3).to(dtype), rates
        W = [w.to(state_dtype(k)) for w in state.weights]
        if recipe.retention.has_link:
            first = {name: x[:, 0, :, None, None] for name, x in rates.items() if x.dim() == 3}
            W = [recipe.retention.link(w, first) for w in W]
        phi = self._features(k.to(W[0].dtype), state)

        def by_head(x: Tensor) -> Tensor:  # [B, H, t·n, ·]
            return x.permute(0, 2, 1, 3, 4).flatten(2, 3)

        predict = recipe.memory.bind(recipe.features.dim(K), self.v.shape[-1])
        y = predict(W, by_head(phi), by_head(k.to(phi.dtype)), self.params)
        return y.unflatten(2, (t, n)).permute(0, 2, 1, 3, 4).to(dtype), rates

    def _error_and_loss(
        self, batch: slice, prediction: Tensor, rates: Mapping[str, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Return ∂ℓ/∂prediction ``[B, t, H, n, V]``, and the loss ``[t, H]``."""
        bias, n = self.recipe.bias, prediction.shape[3]
        v = self._keys_and_values(batch)[1].to(prediction.dtype)
        per_association = {gate.name for gate in bias.gates()}
        gates: dict[str, Tensor] = {}
        for name, has_axis in bias.quantity_axes.items():
            rate = rates[name]
            if n > 1 and name in per_association:
                gates[name] = rate if has_axis else rate.unsqueeze(-1)
            else:
                gates[name] = rate.unsqueeze(3) if rate.dim() == 4 else rate[..., None, None]
        error = bias.error(prediction, v, gates)
        # A bias may define an error without a loss.
        if bias.defines_loss:
            loss = bias.loss(prediction, v, gates)
        else:
            loss = 0.5 * error.square().sum(-1)
        return error, loss.mean((0, -1)).float().cpu()

    def _top_eigenvalue(self, batch: slice, state: State) -> Tensor:
        """Return the largest eigenvalue of diag(η) K of an inner batch ``[H]``, see `tangent`."""
        k, v, bias = self.k[:, batch], self.v[:, batch], self.recipe.bias
        dtype = state_dtype(k, v)

        def by_head(x: Tensor) -> Tensor:
            return x.to(dtype).transpose(1, 2)

        rates = {name: by_head(rate) for name, rate in self._rates(batch, dtype).items()}
        points = Points(
            phi=by_head(self._features(k.unsqueeze(3).to(dtype), state).squeeze(3)),
            raw=by_head(k),
            v=by_head(v),
            gates={
                name: rates[name] if has_axis else rates[name].unsqueeze(-1)
                for name, has_axis in bias.quantity_axes.items()
            },
        )
        names = ("lr", "momentum", "outer_lr", "window")
        steps = {name: rates[name] for name in names if name in rates}
        W = [w.to(dtype) for w in state.weights]
        return top_eigenvalue(self.recipe, W, points, self.params, steps).mean(0).float().cpu()

    def _check_step(self, batch: slice, y: Tensor, state: State) -> Fault | None:
        """Return a fault if outputs or weights after an inner batch are not finite."""
        y = y.unflatten(2, (self.H, -1)).flatten(3)  # [B, t, H, ·]
        bad = ~y.isfinite().all(-1)
        weights = zip(self.memory, state.weights, strict=False)
        bad_weights = {name: ~w.flatten(2).isfinite().all(-1) for name, w in weights}
        bad_weights = {name: heads for name, heads in bad_weights.items() if heads.any()}
        if not bad.any() and not bad_weights:
            return None
        if bad.any():
            token = int(bad.any(0).any(-1).nonzero()[0])
            row, head = (int(i) for i in bad[:, token].nonzero()[0])
        else:
            token = batch.stop - batch.start - 1
            row, head = (int(i) for i in next(iter(bad_weights.values())).nonzero()[0])
        token += batch.start
        steps = self.step[: batch.stop, head]
        steps = steps[steps.isfinite()].abs()
        largest = steps.max().item() if len(steps) else math.nan
        rates = [
            gate.name
            for gate in self.recipe.gates()
            if gate.role == "rate" and "c" not in gate.axes and gate.name in self.gates
        ]
        rate, value = (rates[-1] if rates else None), ""
        if rate is not None:
            size = self.gates[rate][row, token, head].float().mean().item()
            value = f" ({rate} = {format_number(size)})"
        cause = f"the memory's own steps left the range of {y.dtype}{value}: {ADVICE_SMALLER_STEPS}"
        if not largest <= OVERSHOOT_LIMIT:
            cause = (
                "its writes grew without bound, the largest so far removed "
                f"{format_number(largest)} times the error: smaller steps{value}"
            )
        quantity = f"memory {next(iter(bad_weights))}" if bad_weights else "output"
        return Fault(quantity=quantity, row=row, token=token, head=head, gate=rate, cause=cause)

    def _limit_multiple(self) -> Tensor | None:
        """Return the step size in multiples of the stability limit, if the layer has a limit."""
        limit, values = self.spec.stability_limit, {**self.gates, **self.params}
        return None if limit is None else values["lr"] / stability_limit(limit, values)

    def _saturated(self) -> dict[str, Tensor]:
        """Return the fraction of saturated values of each gate ``[H]``."""
        saturated: dict[str, Tensor] = {}
        for name, gate in self.gates.items():
            if name not in self.spec.gate_ranges:
                continue
            multiple = self._limit_multiple() if name == "lr" else None
            value = (gate if multiple is None else multiple).float()
            if name in self.recipe.log_decays:
                keeps_all = value * self.T > math.log(1 - SATURATION)
                at_end = keeps_all | (value < math.log(SATURATION))
            else:
                low, high = self.spec.gate_ranges[name]
                fraction = (value - low) / (high - low)
                at_end = (fraction < SATURATION) | (fraction > 1 - SATURATION)
            saturated[name] = at_end.float().transpose(0, 2).flatten(1).mean(1).cpu()
        return saturated
