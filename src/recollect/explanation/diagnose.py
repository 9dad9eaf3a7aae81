"""`diagnose`: runs a layer on a sequence and measures its memory, head by head.

Inner batches are run one after the other, by whatever engine runs the layer. Before each, its keys
are read from the memory as it stands: the loss of these predictions is the *surprise*. After it,
they are read again: how much of the error has gone is the *effective step*

    s_t = ⟨p_before − p_after, e_t⟩ / ‖e_t‖²,    e_t = ∂ℓ/∂prediction before,

0 where nothing was written, 1 where the error is gone, above 2 where the write overshot. For
DeltaNet it is η‖k‖². In an inner batch it counts what the batch's other tokens wrote too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from inspect import signature
from typing import Any, overload

import torch
from torch import Tensor, nn

from recollect.blocks.builder import leaf_inputs
from recollect.blocks.layers import MixerLayer, memory_layers
from recollect.choices.memory.base import Stack
from recollect.engines.common.problem import resolve_rates, state_dtype
from recollect.engines.deep.gradient_factors import Points
from recollect.engines.select import select_engine
from recollect.explanation.diagnosis import (
    OVERSHOOT,
    SMALLER_STEPS,
    Diagnosis,
    Fault,
    ModelDiagnosis,
    short,
)
from recollect.explanation.model_inputs import model_inputs, received_tokens
from recollect.explanation.tangent import measured, top_eigenvalue
from recollect.functional.binding import bind
from recollect.functional.read import read
from recollect.functional.recall import recall
from recollect.layer.gates import stability_limit
from recollect.layer.inspection import InspectableLayer
from recollect.layer.memory_layer import MemoryLayer
from recollect.messages import RecipeError
from recollect.state.state import State

__all__ = ["Diagnosis", "Fault", "ModelDiagnosis", "diagnose"]

EDGE = 0.01  # a gate this near to an end, in units of its range, hardly moves any more


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
        >>> found = rc.diagnose(layer, torch.randn(1, 6, 8))
        >>> sorted(found.memory), found.engine
        (['W1', 'W2'], 'deep')
    """
    if isinstance(layer, MixerLayer):
        raise RecipeError(
            f"diagnose looks at one memory, and this layer composes {', '.join(layer.leaves)}: "
            "give one of layer.leaves and what rc.blocks.leaf_inputs(layer, x) says that it "
            "receives"
        )
    layers = memory_layers(layer, "diagnose")
    if "" not in layers:
        return _diagnose_model(layer, layers, model_inputs(layer, x))
    width = layer.memory_spec.d_model
    weights = [weight for weight in layer.parameters() if weight.is_floating_point()]
    if not isinstance(x, Tensor) or not x.is_floating_point():
        said = str(x.dtype) if isinstance(x, Tensor) else type(x).__name__
        raise ValueError(f"x must be a floating-point tensor [B, T, {width}], not {said}")
    if weights and all((x.dtype, x.device) != (w.dtype, w.device) for w in weights):
        raise ValueError(
            f"x is {x.dtype} on {x.device} and the layer {weights[0].dtype} on "
            f"{weights[0].device}: give x.to(that dtype and device)"
        )
    if x.dim() != 3 or not x.shape[0] or x.shape[-1] != width or not x.shape[1]:
        raise ValueError(f"x must have shape [B, T, {width}] with B and T ≥ 1, not {list(x.shape)}")
    return _Examination(layer, x).examine()


def _diagnose_model(
    model: nn.Module, layers: Mapping[str, nn.Module], inputs: Tensor
) -> ModelDiagnosis:
    """Run the model once, and diagnose each layer with the tokens that it received.

    The model may refuse values of a layer that are not finite. Then that layer is the last.
    """
    diagnoses: dict[str, Diagnosis] = {}
    refusal: ValueError | None = None
    options = {"use_cache": False} if "use_cache" in signature(model.forward).parameters else {}
    with received_tokens(layers) as calls:
        try:
            model(inputs, **options)
        except ValueError as error:
            refusal = error
    for name, layer in layers.items():
        for x in calls[name]:
            if not isinstance(layer, MixerLayer):
                diagnoses[name] = _Examination(layer, x).examine()
                continue
            for path, tokens in leaf_inputs(layer, x).items():
                leaf = layer.leaves[path]
                if isinstance(leaf, MemoryLayer):
                    diagnoses[f"{name}.{path}"] = _Examination(leaf, tokens).examine()
    if refusal is not None and all(one.first is None for one in diagnoses.values()):
        raise refusal
    return ModelDiagnosis(model=type(model).__name__, layers=diagnoses)


class _Examination:
    """One examination: the layer's numbers, and the curves as they grow."""

    def __init__(self, layer: nn.Module, x: Tensor) -> None:
        assert isinstance(layer, InspectableLayer)
        self.layer, self.x, self.spec = layer, x, layer.memory_spec
        self.recipe = recipe = self.spec.recipe
        self.b = recipe.algorithm.batch_size
        inputs = layer.memory_inputs(x)
        self.q, self.k, self.v, self.gates, self.params = (
            *(inputs.q, inputs.k, inputs.v),
            *(inputs.gates, inputs.params),
        )
        self.T, self.H = x.shape[1], self.spec.num_kv_heads
        self.memory: dict[str, list[Tensor]] = {name: [] for name in self._map_names()}
        self.slots: dict[str, list[Tensor]] = {name: [] for name in recipe.algorithm.slots}
        self.places: list[int] = []
        self.surprise = torch.full((self.T, self.H), torch.nan)
        self.step = torch.full((self.T, self.H), torch.nan)
        self.steep: list[Tensor] = []

    def _map_names(self) -> list[str]:
        recipe, K, V = self.recipe, self.spec.head_dim, self.spec.value_dim
        if recipe.nonparametric:
            return []
        shapes = recipe.shapes(K, V)
        if isinstance(recipe.memory, Stack):
            return [m.name for m in recipe.memory.maps(recipe.axes(K, V)["F"], V)]
        return (
            [recipe.memory.weight_symbol]
            if len(shapes) == 1
            else [f"W{i}" for i in range(len(shapes))]
        )

    def examine(self) -> Diagnosis:
        """Run the sequence until its end or the first fault."""
        first = self._given()
        if first is None:
            first = self._run_batches()
        return Diagnosis(
            recipe=self.recipe,
            engine=select_engine(self.recipe, self.spec.engine).engine.name,
            batch=self.b,
            places=torch.tensor(self.places),
            memory={n: torch.stack(x) for n, x in self.memory.items() if x},
            slots={n: torch.stack(x) for n, x in self.slots.items() if x},
            surprise=self.surprise,
            step=self.step,
            saturated=self._saturated(),
            first=first,
            share=self._shares(),
            steep=torch.stack(self.steep) if self.steep else None,
        )

    # -- what is given -----------------------------------------------------------------------------

    def _given(self) -> Fault | None:
        """A fault before anything is memorised: x, then params, then gates, then q, k, v."""
        for name, weight in self.layer.named_parameters():
            if not weight.isfinite().all():
                why = "a weight of the layer has diverged: train with less"
                return Fault(what=f"param {name}", why=why)
        named = {
            "x": self.x,
            **{f"gate {name}": g for name, g in self.gates.items()},
            "q": self.q,
            "k": self.k,
            "v": self.v,
        }
        faults: list[Fault] = []
        logs = {f"gate {name}" for name in self.recipe.log_gates}
        for name, tensor in named.items():
            # A log of −inf is a decay or a rate of 0, which is a value like others.
            bad = ~(tensor < torch.inf) if name in logs else ~tensor.isfinite()
            if not bad.any():
                continue
            rows = bad.flatten(3).any(-1) if bad.dim() > 3 else bad  # [B, T, heads or channels]
            token = int(rows.flatten(2).any(-1).any(0).nonzero()[0])
            row = int(rows[:, token].flatten(1).any(-1).nonzero()[0])
            head = None if name == "x" else int(rows[row, token].nonzero()[0])
            gate = name.removeprefix("gate ") if name.startswith("gate") else None
            why = "it comes from outside" if name == "x" else "its projection overflows"
            faults.append(Fault(what=name, row=row, token=token, head=head, gate=gate, why=why))
            if name == "x":
                break
        return min(faults, key=lambda fault: fault.token or 0) if faults else None

    # -- batches -----------------------------------------------------------------------------------

    def _run_batches(self) -> Fault | None:
        state = self._recall(slice(0, 0), None)[1]
        self._norms(state)
        for start in range(0, self.T, self.b):
            cut = slice(start, min(start + self.b, self.T))
            error, before, loss = self._predict(cut, state, None)
            self.surprise[cut] = loss
            if measured(self.recipe):
                self.steep.append(self._steepness(cut, state))
            y, after = self._recall(cut, state)
            fault = self._fault(cut, y, after)
            if fault is not None:
                return fault
            if cut.stop - start == self.b:  # an open batch has not written yet
                _, now, _ = self._predict(cut, after, error)
                size = error.square().sum(-1)
                gone = ((before - now) * error).sum(-1) / torch.where(size == 0, 1.0, size)
                self.step[cut] = torch.where(size == 0, torch.nan, gone).nanmean((0, -1)).cpu()
                self._norms(after)
            state = after
        return None

    def _recall(self, cut: slice, state: State | None) -> tuple[Tensor, State]:
        y, after = recall(
            self.recipe,
            *(self.q[:, cut], self.k[:, cut], self.v[:, cut]),
            {name: gate[:, cut] for name, gate in self.gates.items()},
            params=self.params,
            initial_memory=self.spec.initial_memory if state is None else None,
            state=state,
            engine=self.spec.engine,
            precision=self.spec.precision,
            chunk_size=self.spec.chunk_size,
        )
        assert after is not None
        return y, after

    def _steepness(self, cut: slice, state: State) -> Tensor:
        """The top eigenvalue of diag(η) K of an inner batch ``[H]``, see `tangent`."""
        k, v = self.k[:, cut], self.v[:, cut]
        dtype, (B, t, H, K) = state_dtype(k, v), k.shape
        gates = {name: gate[:, cut] for name, gate in self.gates.items()}
        at = bind(self.recipe, H=H, K=K, V=v.shape[-1])
        rates = resolve_rates(at, gates, self.params, B=B, T=t, dtype=dtype, device=k.device)
        position = state.position[:, None] + torch.arange(t, device=k.device)
        phi = self.recipe.features.phi(k.unsqueeze(3).to(dtype), self.params, "key", position)
        bias = self.recipe.bias

        def by_head(x: Tensor) -> Tensor:
            return x.to(dtype).transpose(1, 2)

        numbers = {name: by_head(rates[name]) for name in bias.quantity_axes}
        points = Points(
            phi=by_head(phi.squeeze(3)),
            raw=by_head(k),
            v=by_head(v),
            gates={n: x if bias.quantity_axes[n] else x.unsqueeze(-1) for n, x in numbers.items()},
        )
        steps = {n: by_head(rates[n]) for n in ("lr", "momentum", "window") if n in rates}
        W = [w.to(dtype) for w in state.weights]
        return top_eigenvalue(self.recipe, W, points, self.params, steps).mean(0).float().cpu()

    def _norms(self, state: State) -> None:
        self.places.append(int(state.position[0]))
        scale = 1.0 if state.log_scale is None else state.log_scale.exp()

        def size(w: Tensor) -> Tensor:  # [B, H, ...] -> [B, H]
            return w.reshape(*w.shape[:2], -1).norm(dim=-1)

        for norms, weight in zip(self.memory.values(), state.weights, strict=False):
            norms.append((scale * size(weight)).mean(0).float().cpu())
        for name, slot in state.algorithm_state.items():
            total = torch.stack([size(w).square() for w in slot]).sum(0).sqrt()
            self.slots[name].append((scale * total).mean(0).float().cpu())

    def _predict(
        self, cut: slice, state: State, error: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(∂ℓ/∂prediction, predictions ``[B, t, H, n, V]``, loss ``[t, H]``) at the keys."""
        k, v, bias = self.k[:, cut], self.v[:, cut], self.recipe.bias
        if self.recipe.associations_per_token == 1:
            k, v = k.unsqueeze(3), v.unsqueeze(3)
        dtype = state_dtype(k, v)
        B, t, H, n, _ = k.shape
        gates = {name: gate[:, cut] for name, gate in self.gates.items()}
        at = bind(self.recipe, H=H, K=k.shape[-1], V=v.shape[-1])
        rates = resolve_rates(at, gates, self.params, B=B, T=t, dtype=dtype, device=k.device)
        prediction = self._at_keys(k, gates, rates, state).to(dtype)
        if error is not None:
            return error, prediction, prediction
        bias_numbers: dict[str, Tensor] = {}
        per_association = {gate.name for gate in bias.gates()}  # one number per association
        for name in bias.quantity_axes:
            rate = rates[name]
            if n > 1 and name in per_association:
                bias_numbers[name] = rate if bias.quantity_axes[name] else rate.unsqueeze(-1)
            else:
                bias_numbers[name] = rate.unsqueeze(3) if rate.dim() == 4 else rate[..., None, None]
        v = v.to(dtype)
        error = bias.error(prediction, v, bias_numbers)
        # A bias that states an error and no loss: half its square is as good a measure.
        loss = (
            bias.loss(prediction, v, bias_numbers)
            if bias.defines_loss
            else 0.5 * error.square().sum(-1)
        )
        return error, prediction, loss.mean((0, -1)).float().cpu()

    def _at_keys(
        self, k: Tensor, gates: Mapping[str, Tensor], rates: Mapping[str, Tensor], state: State
    ) -> Tensor:
        """M(W; φ(k)) of keys ``[B, t, H, n, K]`` at the state, which is at a border."""
        recipe, (B, t, H, n, K) = self.recipe, k.shape
        weights = recipe.features.finite and state.weights and recipe.context.horizon is not None
        if not weights:
            read_gates = {
                name: g.repeat_interleave(n, 1)
                for name, g in gates.items()
                if name in recipe.read_gates
            }
            flat = k.transpose(2, 3).reshape(B, t * n, H, K)
            y = read(
                recipe,
                flat,
                gates=read_gates,
                state=state,
                params=self.params,
                precision=self.spec.precision,
            )
            return y.unflatten(1, (t, n)).transpose(2, 3)
        position = state.position[:, None] + torch.arange(t, device=k.device)
        W = [w.to(state_dtype(k)) for w in state.weights]
        if recipe.retention.has_link:
            first = {name: x[:, 0, :, None, None] for name, x in rates.items() if x.dim() == 3}
            W = [recipe.retention.link(w, first) for w in W]
        phi = recipe.features.phi(k.to(W[0].dtype), self.params, "key", position)
        F = recipe.features.dim(K)

        def by_head(x: Tensor) -> Tensor:  # [B, H, t·n, ·]
            return x.permute(0, 2, 1, 3, 4).flatten(2, 3)

        forward = recipe.memory.bind(F, self.v.shape[-1])
        y = forward(W, by_head(phi), by_head(k.to(phi.dtype)), self.params)
        return y.unflatten(2, (t, n)).permute(0, 2, 1, 3, 4)

    def _fault(self, cut: slice, y: Tensor, state: State) -> Fault | None:
        """What an inner batch broke, if it broke anything."""
        y = y.unflatten(2, (self.H, -1)).flatten(3)  # [B, t, H, ·]
        bad = ~y.isfinite().all(-1)
        names = list(self.memory)
        broken = [(names[i], ~w.flatten(2).isfinite().all(-1)) for i, w in enumerate(state.weights)]
        broken = [(name, rows) for name, rows in broken if rows.any()]
        if not bad.any() and not broken:
            return None
        if bad.any():
            token = int(bad.any(0).any(-1).nonzero()[0])
            row, head = (int(i) for i in bad[:, token].nonzero()[0])
        else:
            token = cut.stop - cut.start - 1
            row, head = (int(i) for i in broken[0][1].nonzero()[0])
        largest = self.step[: cut.stop, head]
        largest = largest[largest.isfinite()].abs().max().item() if cut.start else math.nan
        rates = [
            gate.name
            for gate in self.recipe.gates()
            if gate.role == "rate" and "c" not in gate.axes
        ]
        rate = next((name for name in reversed(rates) if name in self.gates), None)
        eta = ""
        if rate is not None:
            size = float(self._rate(rate, row, cut.start + token, head))
            eta = f" ({rate} = {short(size)})"
        why = (
            f"its writes grew without bound, the largest so far removed {short(largest)} times "
            f"the error: smaller steps{eta}"
            if not largest <= OVERSHOOT
            else f"the memory's own steps left the range of {y.dtype}{eta}: {SMALLER_STEPS}"
        )
        what = f"memory {broken[0][0]}" if broken else "output"
        return Fault(what=what, row=row, token=cut.start + token, head=head, gate=rate, why=why)

    def _rate(self, name: str, row: int, token: int, head: int) -> Tensor:
        return self.gates[name][row, token, head].float().mean()

    # -- gates -------------------------------------------------------------------------------------

    def _saturated(self) -> dict[str, Tensor]:
        saturated: dict[str, Tensor] = {}
        for name, gate in self.gates.items():
            if name not in self.spec.gate_ranges:
                continue
            share = self._share() if name == "lr" else None
            gate = gate if share is None else share
            at_end = self._at_an_end(name, gate.float(), *self.spec.gate_ranges[name])
            saturated[name] = at_end.float().transpose(0, 2).flatten(1).mean(1).cpu()
        return saturated

    def _share(self) -> Tensor | None:
        """The rate as a share of the stability limit, as the layer's gate has it."""
        limit, values = self.spec.stability_limit, {**self.gates, **self.params}
        return None if limit is None else values["lr"] / stability_limit(limit, values)

    def _shares(self) -> Tensor | None:
        share = self._share()
        if share is None:
            return None
        share = share.float()
        return (share if share.dim() == 3 else share.flatten(3).mean(-1)).mean(0).cpu()

    def _at_an_end(self, name: str, gate: Tensor, low: float, high: float) -> Tensor:
        if name in self.recipe.log_decays:
            return (gate * self.T > math.log(1 - EDGE)) | (gate < math.log(EDGE))
        share = (gate - low) / (high - low)
        return (share < EDGE) | (share > 1 - EDGE)
