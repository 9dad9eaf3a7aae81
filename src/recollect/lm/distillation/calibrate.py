"""Initial gates of a memory layer from the attention that it replaces.

Attention gives four quantities that the projections do not have: the age of the tokens that a head
reads, the weight of a token at its best reader, the size of the head's outputs, and their scale per
channel. With attention weights p_ts of query t and key s:

    decay        α = d / (1 + d),      d = mean over t of Σ_s p_ts (t − s)
    write        η_s = max_{t ≥ s} p_ts
    norm         w_c = root mean square of channel c of the head's outputs z
    output gate  silu(u_th) = ‖z_th‖ / (root mean square of ‖z_th‖ over t and h)

A memory with the constant decay α reads associations of mean age α / (1 − α) = d. Gates of the
input are fitted to η and u by ridge regression on the tokens. Quantities that a recipe or its
options lack keep their usual initial values.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from recollect.layer.gates import GateProjection
from recollect.layer.memory_layer import MemoryLayer
from recollect.lm.replacement.swap import OUTPUT_NAMES, find_attention_modules

__all__ = ["AttentionStatistics", "attention_statistics", "calibrate"]

RIDGE = 1e-2
"""Ridge of the regressions, as a multiple of the mean square of the tokens."""

WRITE_RANGE = (0.02, 0.98)
"""Smallest and largest write, as fractions of the gate's range; a gate at an end does not learn."""

GATE_RANGE = (0.1, 4.0)
"""Smallest and largest output gate."""

ROWS = 4
"""Number of rows in a call of the decoder; the weights of one layer are in memory at a time."""


@dataclass(frozen=True, kw_only=True, eq=False)
class AttentionStatistics:
    """Quantities of an attention module over N valid tokens."""

    tokens: Tensor  # inputs of the module [N, d_model]
    mean_distance: Tensor  # d, by memory [H]
    write: Tensor  # η_s, by memory [N, H]
    outputs: Tensor  # z, outputs of the heads before the output projection [N, heads, V]


@torch.no_grad()
def attention_statistics(
    model: Any, *batches: Mapping[str, Tensor]
) -> dict[int, AttentionStatistics]:
    """Return the statistics of each attention module of a decoder, by the index of its layer.

    A batch has ``input_ids [B, T]``, and ``attention_mask`` if they are padded on the right.
    Layers whose module does not return its weights are left out.
    """
    config = model.config.get_text_config(decoder=True)
    previous = config._attn_implementation
    parts: dict[int, list[AttentionStatistics]] = {}
    try:
        model.set_attn_implementation("eager")
        for batch in batches:
            ids, mask = batch["input_ids"], batch.get("attention_mask")
            for first in range(0, ids.shape[0], ROWS):
                rows = slice(first, first + ROWS)
                statistics = _row_statistics(model, ids[rows], None if mask is None else mask[rows])
                for index, part in statistics.items():
                    parts.setdefault(index, []).append(part)
    finally:
        model.set_attn_implementation(previous)
    return {index: _concatenate(parts[index]) for index in sorted(parts)}


def _row_statistics(
    model: Any, ids: Tensor, attention_mask: Tensor | None
) -> dict[int, AttentionStatistics]:
    """Return the statistics of some rows; the weights of a layer are reduced when it returns."""
    config = model.config.get_text_config(decoder=True)
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    mask = (torch.ones_like(ids) if attention_mask is None else attention_mask).bool()  # [B, T]
    T = mask.shape[1]
    steps = torch.arange(T, device=mask.device)
    distance = (steps[:, None] - steps).clamp_min(0).float()
    outputs: dict[int, Tensor] = {}
    statistics: dict[int, AttentionStatistics] = {}

    def record(index: int, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        z = outputs.pop(index)
        p = output[1] if isinstance(output, tuple) and len(output) > 1 else None
        if not isinstance(p, Tensor) or p.shape[-2:] != (T, T):
            return
        x = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
        p = p.float() * mask[:, None, :, None]  # [B, heads, T, T]; padding reads nothing
        by_memory = p.unflatten(1, (kv_heads, heads // kv_heads))
        mean = (by_memory * distance).sum(-1).mean(2).transpose(1, 2)  # [B, T, H]
        write = by_memory.mean(2).amax(-2).transpose(1, 2)  # [B, T, H]
        statistics[index] = AttentionStatistics(
            tokens=x[mask].float(),
            mean_distance=mean[mask].mean(0),
            write=write[mask],
            outputs=z[mask].float().unflatten(-1, (heads, -1)),
        )

    def record_heads(index: int, module: nn.Module, args: Any) -> None:
        outputs[index] = args[0]

    options = {} if attention_mask is None else {"attention_mask": attention_mask}
    with ExitStack() as hooks:
        for index, (_, module) in find_attention_modules(model).items():
            hook = module.register_forward_hook(partial(record, index), with_kwargs=True)
            hooks.enter_context(hook)
            out = next(getattr(module, name) for name in OUTPUT_NAMES if hasattr(module, name))
            hooks.enter_context(out.register_forward_pre_hook(partial(record_heads, index)))
        model(ids, use_cache=False, **options)
    return statistics


def _concatenate(parts: list[AttentionStatistics]) -> AttentionStatistics:
    """Return the statistics of the tokens of all parts."""
    sizes = [part.tokens.shape[0] for part in parts]
    weighted = [n * part.mean_distance for n, part in zip(sizes, parts, strict=True)]
    return AttentionStatistics(
        tokens=torch.cat([part.tokens for part in parts]),
        mean_distance=torch.stack(weighted).sum(0) / sum(sizes),
        write=torch.cat([part.write for part in parts]),
        outputs=torch.cat([part.outputs for part in parts]),
    )


@torch.no_grad()
def calibrate(layer: MemoryLayer, statistics: AttentionStatistics, *, copied: bool) -> list[str]:
    """Initialize the gates of a layer from attention; return the names of the set parameters.

    ``copied`` is whether the layer has the output projection of the attention.
    """
    changed = []
    for name, gate in layer.gates.items():
        if not isinstance(gate, GateProjection) or gate.bias is None or gate.unit_is_per_position:
            continue
        role, is_input = gate.declared.role, gate.source == "input"
        if role == "decay" and gate.is_log and gate.options.init_schedule is None:
            _set_decay(gate, statistics.mean_distance)
        elif name == "lr" and role == "rate" and is_input and layer.limit is None:
            if gate.activation.kind != "sigmoid" or len(gate.shape) != 1:
                continue
            _set_write(gate, statistics, fits_weight=layer.shift is None)
        else:
            continue
        changed.append(f"gates.{name}")
    z = statistics.outputs
    norm = layer.norm if layer.options.norm_before_gate else None
    is_per_head = z.shape[1:] == (layer.num_heads, layer.value_dim)
    if not copied or not is_per_head or not isinstance(norm, nn.RMSNorm):
        return changed
    norm.weight.copy_(z.square().mean((0, 1)).sqrt().clamp_min(1e-4))
    changed.append("norm")
    is_silu_map = layer.output_gate_down is None and layer.gate_activation is functional.silu
    if layer.output_gate is not None and is_silu_map and layer.shift is None:
        size = z.square().mean(-1).sqrt()  # [N, heads]
        size = size / size.square().mean().sqrt().clamp_min(1e-12)
        u = _inverse_silu(size.clamp(*GATE_RANGE))
        weight, _ = _ridge(statistics.tokens, u, bias=False)  # [heads, d_model]
        layer.output_gate.weight.copy_(weight.repeat_interleave(layer.value_dim, 0))
        changed.append("output_gate")
    return changed


def _set_decay(gate: GateProjection, mean_distance: Tensor) -> None:
    """Set the mean decay of each memory; the spread over its channels stays."""
    bias = gate.bias
    assert bias is not None
    d = mean_distance.double().clamp_min(1e-2)
    target = (d / (1 + d)).log().view(-1, *(1,) * (bias.dim() - 1))
    initial = gate.initial().to(target.device)  # [H, ...], negative
    inner = tuple(range(1, initial.dim()))
    mean = (-initial).log().mean(inner, keepdim=True).exp() if inner else -initial
    bias.copy_(gate.activation.inverse(initial * (-target / mean)))


def _set_write(gate: GateProjection, statistics: AttentionStatistics, *, fits_weight: bool) -> None:
    low, high = gate.activation.low, gate.activation.high
    share = statistics.write.clamp(*WRITE_RANGE)
    z = gate.activation.inverse(low + (high - low) * share)
    assert gate.bias is not None and gate.weight is not None
    if gate.down is not None or not fits_weight:
        gate.bias.copy_(z.mean(0))
        return
    weight, bias = _ridge(statistics.tokens, z)
    gate.weight.copy_(weight)
    gate.bias.copy_(bias)


def _ridge(x: Tensor, y: Tensor, *, bias: bool = True) -> tuple[Tensor, Tensor]:
    """Return weight ``[outputs, inputs]`` and bias ``[outputs]`` of a ridge regression."""
    x, y = x.double(), y.double()
    x_mean = x.mean(0) if bias else x.new_zeros(x.shape[1])
    y_mean = y.mean(0) if bias else y.new_zeros(y.shape[1])
    centered = x - x_mean
    gram = centered.T @ centered
    ridge = RIDGE * gram.diagonal().mean().clamp_min(1e-12)
    gram.diagonal().add_(ridge)
    weight = torch.linalg.solve(gram, centered.T @ (y - y_mean)).T
    return weight, y_mean - weight @ x_mean


def _inverse_silu(y: Tensor) -> Tensor:
    """Return the positive u with silu(u) = y, for y > 0."""
    u = y.double() + 0.5
    for _ in range(20):
        s = torch.sigmoid(u)
        u = u - (functional.silu(u) - y) / (s * (1 + u * (1 - s)))
    return u
