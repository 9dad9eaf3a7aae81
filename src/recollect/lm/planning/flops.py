"""FLOPs of a training step, and the device's throughput that they are compared with."""

from __future__ import annotations

import statistics
import time

import torch

from recollect.blocks.cost import leaf_cost, leaf_workloads, retrieval_flops
from recollect.costs import Workload
from recollect.lm.model.config import RecollectConfig
from recollect.lm.model.counts import count_parameters

__all__ = ["measured_ceiling", "model_flops"]

_SIDE = 1024
_ROUNDS = 7


def model_flops(config: RecollectConfig, *, context: int) -> float:
    """Operations of training on one token: matrix products of maps, and what the memories do.

    6 for every number of a map, gate, MLP and of the output (2 forward, 4 backward; the embedding
    is looked up), and ``rc.cost(...).training`` of every layer over a row of ``context`` tokens.
    Of a memory as context the attention runs over twice the tokens and the memory is read twice;
    its maps are counted once. Gradient checkpointing is not counted: it is no work of the model's.
    """
    parts = count_parameters(config)
    maps = sum(parts.get(name, 0) for name in ("mlp", "maps", "gates"))
    maps += config.vocab_size * config.hidden_size
    total = 6.0 * maps
    for part in (each for mixer, _ in config.mixed for each in leaf_workloads(mixer, context)):
        options = part.leaf.options
        if options.persistent:
            continue  # its pairs are among the maps
        heads, memories = config.num_attention_heads, config.num_key_value_heads
        K = config.head_dim or options.key_dim or config.hidden_size // heads
        V = config.value_dim or config.head_dim or config.hidden_size // heads
        G = max(1, heads // memories)
        workload = Workload(K=K, V=V, H=memories, G=G, engine=config.engine)
        training = leaf_cost(part, workload).training
        total += (training + 3 * retrieval_flops(part, workload)) / context
    return total


def measured_ceiling(device: torch.device | str, dtype: torch.dtype) -> float:
    """Operations per second that one large matrix product reaches here and now.

    2 · 1024³ (8192³ on a GPU) over the lower quartile of a few rounds; about a tenth of a second.
    Of random numbers: a GPU multiplies equal ones faster than any that a model has.
    """
    device = torch.device(device)
    side = _SIDE if device.type == "cpu" else 8 * _SIDE
    generator = torch.Generator(device).manual_seed(0)
    left, right = (
        torch.randn(side, side, device=device, generator=generator).to(dtype) for _ in range(2)
    )
    seconds: list[float] = []
    for _ in range(_ROUNDS):
        _wait(device)
        began = time.perf_counter()
        torch.matmul(left, right)
        _wait(device)
        seconds.append(time.perf_counter() - began)
    # The first rounds wake the device; a lower quartile is steadier than the minimum.
    return 2.0 * side**3 / statistics.quantiles(seconds, n=4)[0]


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
