"""Calls in which a device decides without reading values.

``python -m tests.gpu.turns`` prints, for each call, the distance of the device's results from the
CPU's (a separate process, like `tests.gpu.measure`).
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext

import torch
from tests.gpu import pretend
from tests.gpu.passes import distance
from torch import Tensor, nn

import recollect as rc

Send = Callable[[Tensor], Tensor]
Scenario = Callable[[nn.Module, Send], Iterator[Tensor]]

WIDTH = 16


def tokens(*shape: int) -> Tensor:
    return torch.randn(*shape, WIDTH, generator=torch.Generator().manual_seed(1))


def trained_between_tokens(layer: nn.Module, send: Send) -> Iterator[Tensor]:
    """Stored tensors of the open inner batch were computed with earlier weights."""
    x = tokens(1, 9)
    _, state = layer(send(x[:, :5]))
    for t in range(5, 8):
        y, state = layer(send(x[:, t : t + 1]), state)
        yield y
    for parameter in layer.parameters():
        parameter.mul_(1.25)
    yield layer(send(x[:, 8:]), state)[0]


def padded(layer: nn.Module, send: Send) -> Iterator[Tensor]:
    """Rows of different lengths, then a token of each at different positions."""
    x, mask = tokens(3, 20), torch.ones(3, 20, dtype=torch.bool)
    mask[0, :7], mask[1, 3:] = False, False
    y, state = layer(send(x), attention_mask=send(mask))
    yield y
    for t in range(3):
        y, state = layer(send(x[:, t : t + 1]), state)
        yield y


def rows_start_anew(layer: nn.Module, send: Send) -> Iterator[Tensor]:
    x = tokens(2, 12)
    _, state = layer(send(x[:, :9]))
    init = layer.initial_memory if isinstance(layer, rc.MemoryLayer) else None
    state = state.reset(send(torch.tensor([True, False])), init)
    yield layer(send(x[:, 9:]), state)[0]


def packed(layer: nn.Module, send: Send) -> Iterator[Tensor]:
    x = tokens(1, 24)
    yield layer(send(x), cu_seqlens=send(torch.tensor([0, 5, 6, 24])))[0]


def chosen_rows(layer: nn.Module, send: Send) -> Iterator[Tensor]:
    x = tokens(2, 12)
    _, state = layer(send(x[:, :9]))
    state = state.select(send(torch.tensor([1, 1])))
    yield layer(send(x[:, 9:10]), state)[0]


def far_decays(layer: nn.Module, send: Send) -> Iterator[Tensor]:
    """Decays whose exponentials are far below float32's range."""
    for name, parameter in layer.named_parameters():
        if "log_decay" in name:
            parameter.mul_(30.0)
    yield layer(send(30.0 * tokens(1, 70)))[0]


SCENARIOS: tuple[Scenario, ...] = (
    trained_between_tokens, padded, rows_start_anew, packed, chosen_rows, far_decays,
)  # fmt: skip
PRESETS = (
    "gated_delta_net", "gla", "rwkv7", "ttt_linear", "titans", "dla", "softmax_attention", "fox",
    "moba", "kernel_regression_attention", "deep_transformer", "dot", "delta_former", "rls",
    "geometric_rls",
)  # fmt: skip


REFUSED = {("geometric_rls", "far_decays")}  # undetermined: the CPU raises


@torch.no_grad()
def main(names: list[str]) -> None:
    """Run every call with every preset."""
    warnings.simplefilter("ignore")
    for name in names or PRESETS:
        for scenario in SCENARIOS:
            if (name, scenario.__name__) in REFUSED:
                continue
            torch.manual_seed(0)
            cpu = rc.zoo.get(name).build(d_model=WIDTH, num_heads=2)
            moved = pretend.put_module(cpu)
            result: list[list[Tensor]] = []
            for layer, send in ((cpu, lambda x: x), (moved, pretend.put)):
                with nullcontext() if layer is cpu else pretend.counted():
                    result.append([pretend.host(y) for y in scenario(layer, send)])
            error = max(distance(y, x) for x, y in zip(*result, strict=True))
            print(json.dumps([name, scenario.__name__, error]), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
    os._exit(0)
