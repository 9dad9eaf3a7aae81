"""FLOPs of a training step, and the measured matrix product throughput of a device."""

from __future__ import annotations

import statistics
import time

import torch
from torch import nn

from recollect.blocks.cost import cost
from recollect.layer.memory_layer import MemoryLayer
from recollect.lm.model.config import RecollectConfig
from recollect.lm.model.counts import count_parameters, meta_model
from recollect.lm.model.model import RecollectForCausalLM

__all__ = ["decoder_flops", "measure_peak_flops", "memory_costs", "model_flops"]

_MATRIX_SIZE = 1024
_ROUNDS = 7


def memory_costs(
    model: RecollectForCausalLM, *, tokens: int, rows: int = 1
) -> tuple[int, int]:  # training FLOPs, state bytes
    """Return the costs of a model's memories over rows of tokens, without its linear maps."""
    if not any(isinstance(module, MemoryLayer) for module in model.modules()):
        return 0, 0
    costs = cost(model, T=tokens, B=rows)
    return sum(layer.training for layer in costs.layers.values()), costs.state_bytes


def model_flops(config: RecollectConfig, *, context: int) -> float:
    """Return the FLOPs of training on one token: linear maps and memories.

    A parameter of a map, gate, MLP or of the output has 6 (2 forward, 4 backward; the embedding is
    a lookup). The memories have ``rc.cost(...).training`` over a row of ``context`` tokens. The
    recomputation of gradient checkpointing is not counted.
    """
    parts = count_parameters(config)
    maps = sum(parts.get(name, 0) for name in ("mlp", "maps", "gates"))
    maps += config.vocab_size * config.hidden_size
    return 6.0 * maps + memory_costs(meta_model(config), tokens=context)[0] / context


def decoder_flops(model: nn.Module) -> float:
    """Return the FLOPs of training another decoder on one token: its matrices alone.

    An embedding is counted only if its weight is also that of the head.
    """
    maps = {id(m.weight) for m in model.modules() if isinstance(m, nn.Linear)}
    embeddings = [m.weight for m in model.modules() if isinstance(m, nn.Embedding)]
    tables = sum(weight.numel() for weight in embeddings if id(weight) not in maps)
    return 6.0 * (sum(p.numel() for p in model.parameters() if p.dim() == 2) - tables)


def measure_peak_flops(device: torch.device | str, dtype: torch.dtype) -> float:
    """Return the FLOP/s of a large matrix product on a device; this takes about 0.1 s.

    The matrices are random, because a GPU multiplies constant ones faster.
    """
    device = torch.device(device)
    size = _MATRIX_SIZE if device.type == "cpu" else 8 * _MATRIX_SIZE
    generator = torch.Generator(device).manual_seed(0)
    a, b = (torch.randn(size, size, device=device, generator=generator).to(dtype) for _ in range(2))
    seconds: list[float] = []
    for _ in range(_ROUNDS):
        _synchronize(device)
        start = time.perf_counter()
        torch.matmul(a, b)
        _synchronize(device)
        seconds.append(time.perf_counter() - start)
    # The first rounds wake the device; a lower quartile is steadier than the minimum.
    return 2.0 * size**3 / statistics.quantiles(seconds, n=4)[0]


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
